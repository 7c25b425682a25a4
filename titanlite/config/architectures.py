"""What is known of each architecture before its file is imported: where it is, which keys its recipes have, its size.

This imports no torch, so that a config can be checked and its parameters counted within a second. The file of an
architecture is `titanlite/models/<name>.py`; a user's own is given by `model.file`, and of that nothing is known here.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from titanlite.config.build import show
from titanlite.config.problems import Problems
from titanlite.config.recipe_schema import ModelRecipe
from titanlite.config.schema import Model
from titanlite.errors import Problem

_OPTIONAL = ("rope_theta", "rope_scaling", "head_dim", "window", "local_rope_theta", "global_every", "max_seq_len")


@dataclass(frozen=True)
class Architecture:
    """What is known of one architecture.

    Attributes:
        class_name: in `titanlite/models/<name>.py`.
        needs: of the keys that only some architectures have, those that its recipes must give.
        may_have: those that they may.
        n_parameters: counts them, embeddings included (tied ones once).
        has_price_list: whether the formulas of `parallel/activation_bytes.py` are those of its block.
    """

    class_name: str
    needs: tuple[str, ...]
    may_have: tuple[str, ...]
    n_parameters: Callable[[ModelRecipe], int]
    has_price_list: bool = False


def _matrices(sizes: ModelRecipe, feed_forward: int) -> int:
    """wqkv, wo and so many matrices of the feed-forward in each block, and the embeddings."""
    attention = sizes.dim * sizes.head_width * (2 * sizes.n_heads + 2 * sizes.n_kv_heads)
    embeddings = sizes.vocab_size * sizes.dim * (1 if sizes.tied_embeddings else 2)
    return sizes.n_layers * (attention + feed_forward * sizes.dim * sizes.ffn_dim) + embeddings


def _llama3(sizes: ModelRecipe) -> int:
    return _matrices(sizes, 3) + (2 * sizes.n_layers + 1) * sizes.dim


def _qwen3(sizes: ModelRecipe) -> int:
    return _llama3(sizes) + 2 * sizes.n_layers * sizes.head_width


def _gemma3(sizes: ModelRecipe) -> int:
    return _qwen3(sizes) + 2 * sizes.n_layers * sizes.dim


def _gpt2(sizes: ModelRecipe) -> int:
    wqkv = sizes.head_width * (sizes.n_heads + 2 * sizes.n_kv_heads)
    biases = sizes.n_layers * (wqkv + sizes.ffn_dim + 2 * sizes.dim)
    return _matrices(sizes, 2) + biases + 2 * (2 * sizes.n_layers + 1) * sizes.dim + sizes.max_seq_len * sizes.dim


ARCHITECTURES = {
    "llama3": Architecture("Llama3", ("rope_theta",), ("rope_scaling",), _llama3, has_price_list=True),
    "qwen3": Architecture("Qwen3", ("rope_theta",), ("head_dim",), _qwen3),
    "gemma3": Architecture(
        "Gemma3", ("rope_theta", "local_rope_theta", "window", "global_every"), ("head_dim",), _gemma3
    ),
    "gpt2": Architecture("GPT2", ("max_seq_len",), (), _gpt2),
}


def architecture(model: Model) -> Architecture | None:
    """What is known of a config's architecture; None if it is the user's own."""
    return None if model.file else ARCHITECTURES[model.name]


def unpriced(model: Model) -> Problem | None:
    """Why the formulas of `parallel/activation_bytes.py` are not those of a model's block, or None."""
    known = architecture(model)
    if known is not None and known.has_price_list:
        return None
    where, name = ("model.file", model.file) if known is None else ("model.name", model.name)
    priced = [other for other, facts in ARCHITECTURES.items() if facts.has_price_list]
    want = f"an architecture whose block has a price list: {', '.join(priced)}"
    return Problem(where, f'"{name}"', want, "train a few steps and read memory_gib, with each list in turn")


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
