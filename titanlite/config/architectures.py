"""List what is known of each architecture before its file is imported: its place, the keys of its recipes, its size.

This imports no torch, so that a config can be checked and its parameters counted within a second. The file of an
architecture is `titanlite/models/<name>.py`; a user's own is given by `model.file`, and known is what its recipe says
under `[block]`.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from titanlite.config.build import show
from titanlite.config.problems import Problems
from titanlite.config.recipe_schema import Block, ModelDims
from titanlite.config.schema import Model
from titanlite.errors import nearest

_OPTIONAL = ("rope_theta", "rope_scaling", "head_dim", "window", "local_rope_theta", "global_every", "max_seq_len")


@dataclass(frozen=True)
class Architecture:
    """The facts of one architecture.

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


def block_of(model: Model, dims: ModelDims) -> Block | None:
    """Return what the blocks of a config's model are made of; None if it is the user's own and its recipe does not say.

    Args:
        model: `[model]`.
        dims: its dimensions.
    """
    return dims.block if model.file else ARCHITECTURES[model.name].block


def linear_layers(block: Block, dims: ModelDims, ranks: int = 1) -> dict[str, tuple[int, int]]:
    """Give the shapes [N, K] of all linear layers' weights on one of so many tensor-parallel ranks.

    Args:
        block: what the model's blocks are made of.
        dims: its dimensions.
        ranks: a divisor of n_kv_heads and vocab_size.
    """
    of_a_block = block.weights(dims, ranks).items()
    layers = {f"layers.{n}.{name}": shape for n in range(dims.n_layers) for name, shape in of_a_block}
    return {**layers, "output": (dims.vocab_size // ranks, dims.dim)}


def nearest_layer(name: str, layers: Sequence[str]) -> str | None:
    """Return the linear layer that was probably meant: one that has it as a part, as `wqkv` has `wk`, or the nearest.

    Args:
        name: what was written, in full or in part.
        layers: names of the linear layers there are.
    """
    last_names = list(dict.fromkeys(layer.rpartition(".")[2] for layer in layers))
    part = name.rpartition(".")[2]
    for whole in last_names:
        if len(part) == 2 < len(whole) and part[0] == whole[0] and part[1] in whole[1:]:
            in_full = f"{name.removesuffix(part)}{whole}"
            return in_full if any(in_full in layer for layer in layers) else whole
    return nearest(name, [*last_names, *layers])


def n_parameters(block: Block, dims: ModelDims) -> int:
    """Count the parameters, embeddings included; tied ones once.

    Args:
        block: what the model's blocks are made of.
        dims: its dimensions.
    """
    rows = dims.vocab_size * (1 if dims.tied_embeddings else 2) + dims.max_seq_len
    return dims.n_layers * block.n_parameters(dims) + rows * dims.dim + block.norm(dims)


def check_keys(model: Model, recipe: ModelDims, problems: Problems) -> None:
    """Refuse a key that the architecture makes nothing of, and the lack of one that it needs.

    Args:
        model: `[model]`.
        recipe: its dimensions, overrides applied.
        problems: gets what is wrong.
    """
    if model.file:
        return
    known = ARCHITECTURES[model.name]
    if recipe.block is not None:
        want = f"no such table in the recipe {model.name}-{model.flavor}: titanlite knows the blocks of {model.name}"
        problems.add("[block]", "a table", want, "remove it from the recipe; it is for a model file of your own")
    defaults = {field.name: field.default for field in dataclasses.fields(ModelDims)}
    for key in _OPTIONAL:
        value = getattr(recipe, key)
        is_given = value != defaults[key]
        if is_given and key not in known.needs + known.may_have:
            is_own = getattr(model, key, None) is not None
            where, at = (f"model.{key}", "") if is_own else (key, f" in the recipe {model.name}-{model.flavor}")
            problems.add(where, show(value), f"no such key{at}: {model.name} does not use it", "remove it")
        if not is_given and key in known.needs:
            want = f"a value: {model.name} needs it"
            problems.add(f"model.{key}", "", want, f"{key} = the published value, in the recipe")
