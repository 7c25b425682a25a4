"""What is known of each architecture before its file is imported: where it is, which keys its recipes have, its size.

This imports no torch, so that a config can be checked and its parameters counted within a second. The file of an
architecture is `titanlite/models/<name>.py`; a user's own is given by `model.file`, and of that nothing is known here.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from titanlite.config.build import show
from titanlite.config.problems import Problems
from titanlite.config.recipe_schema import ModelRecipe
from titanlite.config.schema import Model
from titanlite.errors import Problem

_OPTIONAL = ("rope_theta", "rope_scaling", "head_dim", "window", "local_rope_theta", "global_every", "max_seq_len")


@dataclass(frozen=True)
class Block:
    """What a block is made of besides attention, `wqkv` and `wo` before and behind it, and a norm before each sublayer.

    Attributes:
        gate: between the matrices of the feed-forward; that of "gelu" has no second factor.
        qk_norms: whether each head's queries and keys are normalised.
        post_norms: whether a norm is behind each sublayer, too.
        is_rotary: whether queries and keys are rotated.
        layer_norms: whether norms are LayerNorms, with a shift; RMSNorms otherwise.
        biases: whether linear layers have them.
    """

    gate: Literal["swiglu", "geglu", "gelu"] = "swiglu"
    qk_norms: bool = False
    post_norms: bool = False
    is_rotary: bool = True
    layer_norms: bool = False
    biases: bool = False

    @property
    def gate_width(self) -> int:
        """Width of the gate's input, in widths of its result."""
        return 1 if self.gate == "gelu" else 2

    @property
    def layers(self) -> tuple[str, str, str, str]:
        """Give the names of the linear layers, in the order in which they run."""
        first = "w1" if self.gate == "gelu" else "w13"
        return "attention.wqkv", "attention.wo", f"feed_forward.{first}", "feed_forward.w2"

    @property
    def norms(self) -> int:
        """Number of norms of the residual stream's width."""
        return 4 if self.post_norms else 2

    def weights(self, sizes: ModelRecipe, ranks: int = 1) -> dict[str, tuple[int, int]]:
        """Give the shapes [N, K] of the linear layers' weights on one of so many tensor-parallel ranks.

        Args:
            sizes: the model's dimensions.
            ranks: a divisor of n_kv_heads.
        """
        D, F, E = sizes.dim, sizes.ffn_dim, sizes.head_width
        H, K = sizes.n_heads, sizes.n_kv_heads
        shapes = ((H + 2 * K) * E // ranks, D), (D, H * E // ranks), (self.gate_width * F // ranks, D), (D, F // ranks)
        return dict(zip(self.layers, shapes, strict=True))

    def n_parameters(self, sizes: ModelRecipe, ranks: int = 1) -> int:
        """Count the parameters on one of so many tensor-parallel ranks; norms are whole, and biases split as outputs.

        Args:
            sizes: the model's dimensions.
            ranks: a divisor of n_kv_heads.
        """
        shapes = self.weights(sizes, ranks).values()
        norms = self.norms * self.norm(sizes) + (2 * sizes.head_width if self.qk_norms else 0)
        return sum(n * k for n, k in shapes) + norms + (sum(n for n, _ in shapes) if self.biases else 0)

    def norm(self, sizes: ModelRecipe) -> int:
        """Count the parameters of a norm of the residual stream."""
        return sizes.dim * (2 if self.layer_norms else 1)


@dataclass(frozen=True)
class Architecture:
    """What is known of one architecture.

    Attributes:
        class_name: in `titanlite/models/<name>.py`.
        needs: of the keys that only some architectures have, those that its recipes must give.
        may_have: those that they may.
        block: what its blocks are made of.
    """

    class_name: str
    needs: tuple[str, ...]
    may_have: tuple[str, ...]
    block: Block

    def linear_layers(self, sizes: ModelRecipe, ranks: int = 1) -> dict[str, tuple[int, int]]:
        """Give the shapes [N, K] of all linear layers' weights on one of so many tensor-parallel ranks.

        Args:
            sizes: the model's dimensions.
            ranks: a divisor of n_kv_heads and vocab_size.
        """
        of_a_block = self.block.weights(sizes, ranks).items()
        layers = {f"layers.{n}.{name}": shape for n in range(sizes.n_layers) for name, shape in of_a_block}
        return {**layers, "output": (sizes.vocab_size // ranks, sizes.dim)}

    def n_parameters(self, sizes: ModelRecipe) -> int:
        """Count the parameters, embeddings included; tied ones once.

        Args:
            sizes: the model's dimensions.
        """
        rows = sizes.vocab_size * (1 if sizes.tied_embeddings else 2) + sizes.max_seq_len
        return sizes.n_layers * self.block.n_parameters(sizes) + rows * sizes.dim + self.block.norm(sizes)


ARCHITECTURES = {
    "llama3": Architecture("Llama3", ("rope_theta",), ("rope_scaling",), Block()),
    "qwen3": Architecture("Qwen3", ("rope_theta",), ("head_dim",), Block(qk_norms=True)),
    "gemma3": Architecture(
        "Gemma3",
        ("rope_theta", "local_rope_theta", "window", "global_every"),
        ("head_dim",),
        Block("geglu", qk_norms=True, post_norms=True),
    ),
    "gpt2": Architecture("GPT2", ("max_seq_len",), (), Block("gelu", is_rotary=False, layer_norms=True, biases=True)),
}


def architecture(model: Model) -> Architecture | None:
    """What is known of a config's architecture; None if it is the user's own."""
    return None if model.file else ARCHITECTURES[model.name]


def unpriced(model: Model) -> Problem | None:
    """Why the formulas of `parallel/activation_bytes.py` are not those of a model's block, or None."""
    if architecture(model) is not None:
        return None
    want = f"an architecture whose block has a price list: {', '.join(ARCHITECTURES)}"
    fix = "train a few steps and read memory_gib, with each list in turn"
    return Problem("model.file", f'"{model.file}"', want, fix)


def check_keys(model: Model, recipe: ModelRecipe, problems: Problems) -> None:
    """Refuse a key that the architecture makes nothing of, and the lack of one that it needs.

    Args:
        model: `[model]`.
        recipe: its dimensions, overrides applied.
        problems: gets what is wrong.
    """
    known = architecture(model)
    if known is None:
        return
    defaults = {field.name: field.default for field in dataclasses.fields(ModelRecipe)}
    for key in _OPTIONAL:
        value = getattr(recipe, key)
        is_given = value != defaults[key]
        if is_given and key not in known.needs + known.may_have:
            problems.add(f"model.{key}", show(value), f"no such key: {model.name} makes nothing of it", "remove it")
        if not is_given and key in known.needs:
            want = f"a value: {model.name} needs it"
            problems.add(f"model.{key}", "", want, f"{key} = the published value, in the recipe")
