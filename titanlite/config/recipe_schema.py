"""Schemas of the four kinds of recipes, one dataclass each; `titanlite/recipes.py` says what each kind is.

They stand beside the schema of the config because the cross-checks of a config need the dimensions of its model.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, ClassVar, Literal

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
"""Keys of `Experts` that change how a router is trained, and not what is computed."""


@dataclass(frozen=True)
class Experts:
    """The feed-forward of a mixture of experts: what is computed, and what is added to train its router.

    A token's router gives each expert a logit; the token goes to its `top_k` best, whose results are summed by weight.
    """

    n_experts: PositiveInt  # of a layer (E)
    top_k: PositiveInt  # of a token (K)
    ffn_dim: PositiveInt  # inner width of one expert (F), a multiple of 128
    score: Literal["softmax", "softmax_of_chosen", "sigmoid"] = "softmax"  # softmax: over all experts, then top-k
    normalised: bool = True  # the weights of a token's experts are divided by their sum
    scale: PositiveFloat = 1.0  # of the weights
    shared: NonNegativeInt = 0  # experts beside these that every token goes to
    balance_loss: NonNegativeFloat = 0.0  # coefficient of the loss of unequal use, in the mean over mixtures
    z_loss: NonNegativeFloat = 0.0  # coefficient of the loss of large logits, likewise
    balance_bias: NonNegativeFloat = 0.0  # what a step moves an expert's bias by, which shifts the choice alone


@dataclass(frozen=True)
class ModelDims:
    """The dimensions of one model size. Keys whose default is 0 are not for every architecture."""

    help: str
    n_layers: PositiveInt
    dim: PositiveInt
    n_heads: PositiveInt
    n_kv_heads: PositiveInt
    ffn_dim: NonNegativeInt = 0  # of a dense feed-forward
    _: KW_ONLY
    vocab_size: PositiveInt
    norm_eps: PositiveFloat
    rope_theta: NonNegativeFloat = 0.0
    tied_embeddings: bool = False
    rope_scaling: RopeScaling | None = None
    head_dim: NonNegativeInt = 0  # width of a head, where it is not dim / n_heads
    window: NonNegativeInt = 0  # tokens that a local layer attends to, its own included
    local_rope_theta: NonNegativeFloat = 0.0  # rope_theta of local layers
    global_every: NonNegativeInt = 0  # every so many layers, the last of them attends to all tokens
    max_seq_len: NonNegativeInt = 0  # positions that have a learned embedding
    logit_softcap: NonNegativeFloat = 0.0  # c of the logits c · tanh(x / c) of any architecture; 0: they are x
    experts: Experts | None = None  # in the place of a dense feed-forward
    refs: tuple[str, ...] = ()

    @property
    def head_width(self) -> int:
        """Width of a head (E)."""
        return self.head_dim or self.dim // self.n_heads

    @property
    def widths(self) -> dict[str, int]:
        """Dimensions of the layers by name."""
        return {f.name: n for f in fields(self) if type(n := getattr(self, f.name)) is int and f.name != "n_layers"}

    @property
    def windows(self) -> list[int]:
        """Tokens that the attention of each layer sees (W); 0: all."""
        is_local = [bool(self.global_every and n % self.global_every) for n in range(1, self.n_layers + 1)]
        return [self.window if local else 0 for local in is_local]


@dataclass(frozen=True)
class SaveRule:
    """One line of a save-list; the first rule that matches an operation decides."""

    op: str  # a class of operations, as attention or matmul; "block"; or one op, as "aten.mm.default"
    action: Literal["save", "recompute"]
    module: tuple[str, ...] = ()  # only what belongs to these linear layers, as "wqkv", "feed_forward.*"; empty: any
    every: int = 1  # of the ops that match, the first of every so many
    layers: str = ":"  # which blocks, as a Python slice: "5:" is all but the first five
    optional: bool = False  # may match nothing

    def blocks(self, n_layers: int) -> range:
        """Return the blocks that the rule is for; ValueError if `layers` is no slice."""
        start, _, stop = self.layers.partition(":")
        if ":" not in self.layers:
            raise ValueError(self.layers)
        return range(n_layers)[int(start) if start else None : int(stop) if stop else None]


@dataclass(frozen=True)
class SaveList:
    """The activations of a block that are kept for backward. What no rule matches follows `default`."""

    help: str
    default: Literal["save", "recompute"]
    rules: tuple[SaveRule, ...] = ()
    refs: tuple[str, ...] = ()
    origin: ClassVar[Origin] = Origin("save-list")  # no key: where they stand; one that was loaded has its own

    def active(self, n_layers: int) -> list[frozenset[int]]:
        """Return the numbers of the rules that are for each block."""
        of_rules = [frozenset(rule.blocks(n_layers)) for rule in self.rules]
        return [frozenset(i for i, blocks in enumerate(of_rules) if n in blocks) for n in range(n_layers)]


Granularity = Literal["tensor", "row", "1x128", "128x128", "none"]
"""The part of an operand that shares a scale, where sums run along rows: all of it, a row, a block of rows × columns;
"none": this operand stays in high precision in this matmul."""

BLOCKS: dict[Granularity, tuple[int, int]] = {"1x128": (1, 128), "128x128": (128, 128)}
"""Rows and columns of the granularities that are blocks."""

MATMULS = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}
"""The three matmuls of a linear layer and the operands of each."""


@dataclass(frozen=True)
class Float8Input:
    """The activation of a linear layer, in the two matmuls that use it."""

    dtype: Literal["e4m3", "e5m2"]
    output: Granularity
    grad_weight: Granularity


@dataclass(frozen=True)
class Float8Weight:
    """The weight, in the two matmuls that use it."""

    dtype: Literal["e4m3", "e5m2"]
    output: Granularity
    grad_input: Granularity


@dataclass(frozen=True)
class Float8GradOutput:
    """The gradient of the output, in the two matmuls that use it."""

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
    """A number for each of the three matmuls."""

    output: float
    grad_input: float
    grad_weight: float


@dataclass(frozen=True)
class Float8Contract:
    """Signal to quantisation noise of each matmul against its bfloat16 operands in high precision, in decibels.

    On normal numbers, and on some with loud tokens, channels and single values (`tests/unit/float8/test_recipes.py`).
    """

    sqnr_db: Decibels  # at least
    sqnr_row_p1_db: Decibels  # of each row, 99 % of them, at least
    sqnr_below_db: Decibels  # what is more exact was not in these formats


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
    reduce_amax: bool = False  # over tensor-parallel ranks: a tensor has the scale and the bytes of one device
    min_compute_capability: PositiveFloat = 8.9  # of GPUs; below it the recipe is emulated
    dim_multiple: int = 16  # layers with other widths cannot be converted
    status: Literal["stable", "experimental"] = "stable"
    refs: tuple[str, ...] = ()
    contract: Float8Contract | None = None

    @property
    def has_blocks(self) -> bool:
        """Return whether an operand has scales by block."""
        return any(granularity in BLOCKS for granularity in self.granularities)

    @property
    def granularities(self) -> tuple[Granularity, ...]:
        """Return those of all operands, both of each matmul in turn."""
        return tuple(g for matmul in MATMULS for g in self.operands(matmul))

    def operands(self, matmul: str) -> tuple[Granularity, Granularity]:
        """Return the granularities of the two operands of "output", "grad_input" or "grad_weight"."""
        left, right = MATMULS[matmul]
        return getattr(getattr(self, left), matmul), getattr(getattr(self, right), matmul)


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are updated alike. What a group leaves out is what `[optimizer]` says."""

    rule: str  # one of `GROUP_OF_RULE`, or a class of the file that `optimizer.file` names
    pattern: tuple[str, ...] = ()  # shell patterns of names; empty: all that no group with patterns takes
    shape: Literal["any", "matrix", "vector"] = "any"  # matrix: two dimensions, or those of experts in a stack
    optional: bool = False  # may take nothing
    lr_factor: PositiveFloat = 1.0  # of the learning rate
    weight_decay: NonNegativeFloat | None = None  # decoupled
    update: ClassVar[str]  # no key: the module of `titanlite/optimizers` and the class that updates them

    @property
    def own(self) -> dict[str, Any]:
        """Return the keys that the rule has beside those of every group."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in COMMON_KEYS}


COMMON_KEYS = tuple(f.name for f in fields(ParameterGroup))
"""Keys of a group that do not depend on its rule."""


@dataclass(frozen=True)
class AdamWGroup(ParameterGroup):
    """Parameters of AdamW."""

    update = "adamw.AdamW"
    beta1: Decay | None = None
    beta2: Decay | None = None
    eps: PositiveFloat | None = None


@dataclass(frozen=True)
class MuonGroup(ParameterGroup):
    """Matrices of Muon."""

    update = "muon_of_groups.MuonOfGroups"
    momentum: Decay = 0.95
    nesterov: bool = True
    # That orthogonalise: a published sequence, or one's own [a, b, c] of each a x + b x³ + c x⁵ in turn.
    polynomials: Literal["polar_express", "newton_schulz"] | tuple[tuple[float, ...], ...] = "polar_express"


@dataclass(frozen=True)
class NorMuonGroup(MuonGroup):
    """Matrices of NorMuon."""

    update = "muon_of_groups.NorMuonOfGroups"
    beta2: Decay | None = None


GROUP_OF_RULE: dict[str, type[ParameterGroup]] = {"adamw": AdamWGroup, "muon": MuonGroup, "normuon": NorMuonGroup}

MATRIX_RULES = tuple(rule for rule, group in GROUP_OF_RULE.items() if issubclass(group, MuonGroup))
"""Rules for whole matrices; all others go by the single number."""


Value = float | int | bool | str


@dataclass(frozen=True)
class OwnRule:
    """An update rule of a user's own file, as `update_rules/find.py` imports it."""

    name: str
    file: str  # as it was given
    sha256: str  # of the file's bytes
    state: tuple[str, ...]  # names of what it keeps, each a number for each of a parameter's
    keys: Mapping[str, Value]  # of a group that has it, each with its default
    kind: type[Any]  # the class


@dataclass(frozen=True)
class OptimizerRecipe:
    """The rules of an optimizer. The first group that matches a parameter takes it."""

    help: str
    groups: dict[str, ParameterGroup]  # by names that the receipt has
    refs: tuple[str, ...] = ()
    origin: ClassVar[Origin] = Origin("optimizer")  # no key: where they stand; one that was loaded has its own
    own_rules: ClassVar[Mapping[str, OwnRule]] = {}  # no key: those of `optimizer.file`, likewise
