"""Schemas of the four kinds of recipes, one dataclass each. `titanlite/recipes.py` describes the kinds.

They are in the package of the config's schema because cross-checks of a config need the dimensions of its model.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields
from typing import Annotated, Any, ClassVar, Literal

from titanlite.config.problems import Origin
from titanlite.config.schema import Decay, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1 frequency scaling: low frequencies are divided by `factor`, high ones kept, those between blended."""

    factor: PositiveFloat
    low_freq_factor: PositiveFloat
    high_freq_factor: PositiveFloat
    original_seq_len: PositiveInt


ROUTER_TRAINING = ("balance_loss", "z_loss", "balance_bias")
"""Keys of `Experts` that change how a router is trained, but not what the model computes."""


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of a feed-forward: its computation, and how its router is trained.

    For each token, the router computes a logit per expert. The token goes to the `top_k` experts with the best scores,
    and their results are added with weights made from the scores.
    """

    n_experts: PositiveInt  # experts of a layer (E)
    top_k: PositiveInt  # experts of a token (K)
    ffn_dim: PositiveInt  # inner width of one expert (F), a multiple of 128
    score: Literal["softmax", "softmax_of_chosen", "sigmoid"] = "softmax"  # softmax: over all experts, then top-k
    normalised: bool = True  # whether the weights of a token's experts are divided by their sum
    scale: PositiveFloat = 1.0  # factor of the weights
    shared: NonNegativeInt = 0  # further experts, to which every token goes
    balance_loss: NonNegativeFloat = 0.0  # coefficient of the load-balancing loss, averaged over mixture layers
    z_loss: NonNegativeFloat = 0.0  # coefficient of the loss for large router logits, averaged likewise
    balance_bias: NonNegativeFloat = 0.0  # change of an expert's bias per step; the bias affects only the choice


@dataclass(frozen=True)
class ModelDims:
    """The dimensions of one model size. Keys whose default is 0 are not for every architecture."""

    help: str
    n_layers: PositiveInt
    dim: PositiveInt
    n_heads: PositiveInt
    n_kv_heads: PositiveInt
    ffn_dim: NonNegativeInt = 0  # inner width of a dense feed-forward (F)
    _: KW_ONLY
    vocab_size: PositiveInt
    norm_eps: PositiveFloat
    rope_theta: NonNegativeFloat = 0.0
    tied_embeddings: bool = False
    rope_scaling: RopeScaling | None = None
    head_dim: NonNegativeInt = 0  # width of a head, where it is not dim / n_heads
    window: NonNegativeInt = 0  # tokens that a local layer attends to, its own included
    local_rope_theta: NonNegativeFloat = 0.0  # rope_theta of local layers
    global_every: NonNegativeInt = 0  # in each group of this many layers, the last attends to all tokens
    max_seq_len: NonNegativeInt = 0  # positions that have a learned embedding
    logit_softcap: NonNegativeFloat = 0.0  # c: logits x become c · tanh(x / c), in any architecture; 0: no cap
    experts: Experts | None = None  # replaces the dense feed-forward
    refs: tuple[str, ...] = ()

    @property
    def head_width(self) -> int:
        """Width of a head (E)."""
        return self.head_dim or self.dim // self.n_heads

    @property
    def widths(self) -> dict[str, int]:
        """All dimensions that are whole numbers, by name, except `n_layers`."""
        return {f.name: n for f in fields(self) if type(n := getattr(self, f.name)) is int and f.name != "n_layers"}

    @property
    def windows(self) -> list[int]:
        """Number of tokens that a token attends to, for each layer (W); 0: all."""
        is_local = [bool(self.global_every and n % self.global_every) for n in range(1, self.n_layers + 1)]
        return [self.window if local else 0 for local in is_local]


@dataclass(frozen=True)
class SaveRule:
    """One rule of a save-list. The first rule that matches an operation decides whether it is saved."""

    op: str  # a class of operations, as attention or matmul; "block"; or one op, as "aten.mm.default"
    action: Literal["save", "recompute"]
    module: tuple[str, ...] = ()  # only ops of these linear layers, as "wqkv", "feed_forward.*"; empty: any
    every: int = 1  # the rule applies to the first of each `every` matching ops
    layers: str = ":"  # which blocks, as a Python slice: "5:" is all but the first five
    optional: bool = False  # whether it may match nothing without an error

    def blocks(self, n_layers: int) -> range:
        """Return the numbers of the blocks to which the rule applies. Raise ValueError if `layers` is no slice."""
        start, _, stop = self.layers.partition(":")
        if ":" not in self.layers:
            raise ValueError(self.layers)
        return range(n_layers)[int(start) if start else None : int(stop) if stop else None]


@dataclass(frozen=True)
class SaveList:
    """The activations of a block that are kept for backward. An operation that no rule matches follows `default`."""

    help: str
    default: Literal["save", "recompute"]
    rules: tuple[SaveRule, ...] = ()
    refs: tuple[str, ...] = ()
    origin: ClassVar[Origin] = Origin("save-list")  # no TOML key: file and line of each key; `recipes.load` sets it

    def active(self, n_layers: int) -> list[frozenset[int]]:
        """Return for each block the indices of the rules that apply to it."""
        of_rules = [frozenset(rule.blocks(n_layers)) for rule in self.rules]
        return [frozenset(i for i, blocks in enumerate(of_rules) if n in blocks) for n in range(n_layers)]


Granularity = Literal["tensor", "row", "1x128", "128x128", "none"]
"""The elements of an operand that share a scale: the tensor, a row (sums run along rows), or a block of rows × columns.
"none": the operand stays in high precision in this matmul."""

BLOCKS: dict[Granularity, tuple[int, int]] = {"1x128": (1, 128), "128x128": (128, 128)}
"""(Rows, columns) of a block, for the granularities that are blocks."""

MATMULS = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}
"""The three matmuls of a linear layer and the operands of each."""


@dataclass(frozen=True)
class Float8Input:
    """Format of the input of a linear layer, and its granularity in the two matmuls that use it."""

    dtype: Literal["e4m3", "e5m2"]
    output: Granularity
    grad_weight: Granularity


@dataclass(frozen=True)
class Float8Weight:
    """Format of the weight of a linear layer, and its granularity in the two matmuls that use it."""

    dtype: Literal["e4m3", "e5m2"]
    output: Granularity
    grad_input: Granularity


@dataclass(frozen=True)
class Float8GradOutput:
    """Format of the gradient of a linear layer's output, and its granularity in the two matmuls that use it."""

    dtype: Literal["e4m3", "e5m2"]
    grad_input: Granularity
    grad_weight: Granularity


@dataclass(frozen=True)
class Float8Accumulation:
    """How each matmul adds up: `fast` keeps partial sums in the tensor core, `split` promotes them to float32."""

    output: Literal["fast", "split"]
    grad_input: Literal["fast", "split"]
    grad_weight: Literal["fast", "split"]


@dataclass(frozen=True)
class Decibels:
    """A number of decibels for each of the three matmuls of a linear layer."""

    output: float
    grad_input: float
    grad_weight: float


@dataclass(frozen=True)
class Float8Contract:
    """Bounds of each matmul's ratio of signal to quantisation noise (SQNR), compared with a matmul in high precision.

    It is measured on bfloat16 operands: normally distributed numbers, without and with tokens, channels and single
    values that are much larger (`tests/unit/float8/test_recipes.py`).
    """

    sqnr_db: Decibels  # lower bound for the whole result
    sqnr_row_p1_db: Decibels  # lower bound that 99 % of the rows of the result reach
    sqnr_below_db: Decibels  # upper bound: a greater ratio shows that other formats were used


@dataclass(frozen=True)
class Float8Recipe:
    """The arithmetic of a linear layer's three matmuls: output, grad_input, grad_weight."""

    help: str
    scale_rounding: Literal["exact", "pow2_floor"]
    input: Float8Input
    weight: Float8Weight
    grad_output: Float8GradOutput
    accumulation: Float8Accumulation
    fsdp_all_gather: Literal["high_precision", "float8"] = "high_precision"
    reduce_amax: bool = False  # reduce maxima over tensor-parallel ranks, so that scales are those of one device
    min_compute_capability: PositiveFloat = 8.9  # of a GPU; on a lower one the recipe is emulated
    dim_multiple: int = 16  # widths of a converted layer are multiples of it
    status: Literal["stable", "experimental"] = "stable"
    refs: tuple[str, ...] = ()
    contract: Float8Contract | None = None

    @property
    def has_blocks(self) -> bool:
        """Return whether any operand has one scale per block."""
        return any(granularity in BLOCKS for granularity in self.granularities)

    @property
    def granularities(self) -> tuple[Granularity, ...]:
        """Return the granularities of all operands: two for each matmul, in the order of `MATMULS`."""
        return tuple(g for matmul in MATMULS for g in self.operands(matmul))

    def operands(self, matmul: str) -> tuple[Granularity, Granularity]:
        """Return the granularities of the two operands of "output", "grad_input" or "grad_weight"."""
        left, right = MATMULS[matmul]
        return getattr(getattr(self, left), matmul), getattr(getattr(self, right), matmul)


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with the same rule and settings. A key that a group leaves out has the value in `[optimizer]`."""

    rule: str  # one of `GROUP_OF_RULE`, or a class of the file that `optimizer.file` names
    pattern: tuple[str, ...] = ()  # shell patterns of names; empty: all parameters that other groups leave
    shape: Literal["any", "matrix", "vector"] = "any"  # matrix: two dimensions or more
    optional: bool = False  # whether it may take no parameter without an error
    lr_factor: NonNegativeFloat = 1.0  # factor of the learning rate; 0: the parameters are frozen
    weight_decay: NonNegativeFloat | None = None  # decoupled; None: the one of `[optimizer]`
    update: ClassVar[str]  # no TOML key: "module.Class" in `titanlite/optimizers` that updates the group

    @property
    def own(self) -> dict[str, Any]:
        """Return the keys of the rule, with values, without those that all groups have."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in COMMON_KEYS}


COMMON_KEYS = tuple(f.name for f in fields(ParameterGroup))
"""Keys of a group that do not depend on its rule."""


@dataclass(frozen=True)
class AdamWGroup(ParameterGroup):
    """A group of parameters that AdamW updates."""

    update = "adamw.AdamW"
    beta1: Decay | None = None
    beta2: Decay | None = None
    eps: PositiveFloat | None = None


@dataclass(frozen=True)
class MatrixGroup(ParameterGroup):
    """A group of matrices whose momentum is orthogonalised."""

    momentum: Decay = 0.95
    # Polynomials that orthogonalise: a published sequence, or [a, b, c] of each a x + b x³ + c x⁵, applied in turn.
    polynomials: Literal["polar_express", "newton_schulz"] | tuple[tuple[float, ...], ...] = "polar_express"


@dataclass(frozen=True)
class MuonGroup(MatrixGroup):
    """A group of matrices that Muon updates."""

    update = "muon_of_groups.MuonOfGroups"
    nesterov: bool = True


@dataclass(frozen=True)
class NorMuonGroup(MuonGroup):
    """A group of matrices that NorMuon updates."""

    update = "muon_of_groups.NorMuonOfGroups"
    beta2: Decay | None = None


@dataclass(frozen=True)
class Dion2Group(MatrixGroup):
    """A group of matrices that Dion2 updates."""

    update = "muon_of_groups.Dion2OfGroups"
    share: Annotated[float, "(0, 1]"] = 0.25  # of the rows of a matrix, or of its columns if it has fewer


GROUP_OF_RULE: dict[str, type[ParameterGroup]] = {
    "adamw": AdamWGroup,
    "muon": MuonGroup,
    "normuon": NorMuonGroup,
    "dion2": Dion2Group,
}

MATRIX_RULES = tuple(rule for rule, group in GROUP_OF_RULE.items() if issubclass(group, MatrixGroup))
"""Rules that update whole matrices. All others update each element alone."""

FROZEN = "frozen"
"""Stands for the rule of parameters in a group with `lr_factor = 0.0`: they have no gradient, state or update."""


Value = float | int | bool | str


@dataclass(frozen=True)
class OwnRule:
    """An update rule of a user's own file, as `update_rules/find.py` imports it."""

    name: str
    file: str  # path, as the user gave it
    sha256: str  # of the file's bytes
    state: tuple[str, ...]  # names of its state tensors, each of the parameter's shape
    keys: Mapping[str, Value]  # further keys of its groups, with their defaults
    kind: type[Any]  # the class of the rule


@dataclass(frozen=True)
class OptimizerRecipe:
    """The groups of an optimizer. The first group that matches a parameter takes it."""

    help: str
    groups: dict[str, ParameterGroup]  # by name, under which the receipt lists them
    refs: tuple[str, ...] = ()
    origin: ClassVar[Origin] = Origin("optimizer")  # no TOML key: file and line of each key; `recipes.load` sets it
    own_rules: ClassVar[Mapping[str, OwnRule]] = {}  # no TOML key: rules in `optimizer.file`; `recipes.load` sets it
