"""List what is known of each architecture before its file is imported: its place, the keys of its recipes, its size.

This imports no torch, so that a config can be checked and its parameters counted within a second. The file of an
architecture is `titanlite/models/<name>.py`; a user's own is given by `model.file`, and nothing is known of it here.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from titanlite.config.problems import Problems, show
from titanlite.config.recipe_schema import Experts, ModelDims
from titanlite.config.schema import Model
from titanlite.errors import nearest

_OPTIONAL = (
    *("ffn_dim", "rope_theta", "rope_scaling", "head_dim", "window", "local_rope_theta", "global_every", "max_seq_len"),
    "experts",
)


@dataclass(frozen=True)
class Architecture:
    """The facts of one architecture.

    Attributes:
        class_name: in `titanlite/models/<name>.py`, or in `module` there.
        needs: of the keys that only some architectures have, those that its recipes must give.
        may_have: those that they may.
        vectors: number of a block's parameters outside matrices, by the dimensions and the width of its queries, keys
            and values together: those of norms, and biases.
        projections: matrices of a feed-forward.
        last_norm: vectors of the norm behind the blocks.
        module: the file, if several architectures share it.
        splits: whether tensor parallelism has a layout for it: what it computes of heads is of each by itself.
    """

    class_name: str
    needs: tuple[str, ...]
    may_have: tuple[str, ...]
    vectors: Callable[[ModelDims, int], int]
    projections: int = 3
    last_norm: int = 1
    module: str = ""
    splits: bool = True


ARCHITECTURES = {
    "llama3": Architecture("Llama3", ("ffn_dim", "rope_theta"), ("rope_scaling",), lambda dims, _: 2 * dims.dim),
    "qwen3": Architecture(
        "Qwen3", ("ffn_dim", "rope_theta"), ("head_dim",), lambda dims, _: 2 * dims.dim + 2 * dims.head_width
    ),
    "gemma3": Architecture(
        "Gemma3",
        ("ffn_dim", "rope_theta", "local_rope_theta", "window", "global_every"),
        ("head_dim",),
        lambda dims, _: 4 * dims.dim + 2 * dims.head_width,
    ),
    "gpt2": Architecture(
        "GPT2",
        ("ffn_dim", "max_seq_len"),
        (),
        lambda dims, qkv: qkv + dims.ffn_dim + 6 * dims.dim,
        projections=2,
        last_norm=2,
    ),
    "qwen3_moe": Architecture(
        "Qwen3MoE",
        ("rope_theta", "experts"),
        ("head_dim",),
        lambda dims, _: 2 * dims.dim + 2 * dims.head_width,
        module="moe",
    ),
    "olmoe": Architecture(
        "OLMoE",
        ("rope_theta", "experts"),
        (),
        lambda dims, qkv: 2 * dims.dim + qkv - dims.n_kv_heads * dims.head_width,  # values are not normalised
        module="moe",
        splits=False,
    ),
    "mixtral": Architecture("Mixtral", ("rope_theta", "experts"), (), lambda dims, _: 2 * dims.dim, module="moe"),
}


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


def layers_of_block(model: Model, dims: ModelDims) -> tuple[str, ...] | None:
    """Name the linear layers of a block, in the order in which they run; None of a file of the user's own.

    Args:
        model: `[model]`.
        dims: its dimensions.
    """
    if model.file:
        return None
    shared = dims.experts is not None and dims.experts.shared > 0
    widened = "w13" if ARCHITECTURES[model.name].projections == 3 else "w1"
    feed_forward = "feed_forward" if dims.experts is None else "experts"
    parts = (feed_forward, *(("experts.shared",) if shared else ()))
    return ("attention.wqkv", "attention.wo", *(f"{part}.{name}" for part in parts for name in (widened, "w2")))


def n_parameters(model: Model, dims: ModelDims) -> int | None:
    """Count the parameters, embeddings included; tied ones once. None of a file of the user's own: that needs torch.

    Args:
        model: `[model]`.
        dims: its dimensions.
    """
    return None if model.file else _parameters_with(model, dims, lambda experts: experts.n_experts)


def n_active_parameters(model: Model, dims: ModelDims) -> int | None:
    """Count the parameters that one token uses: of each layer's experts those that it goes to.

    Args:
        model: `[model]`.
        dims: its dimensions.
    """
    return None if model.file else _parameters_with(model, dims, lambda experts: experts.top_k)


def _parameters_with(model: Model, dims: ModelDims, counted: Callable[[Experts], int]) -> int:
    """Count parameters, of so many experts of a layer beside the shared ones."""
    known, qkv = ARCHITECTURES[model.name], (dims.n_heads + 2 * dims.n_kv_heads) * dims.head_width
    of_attention = (qkv + dims.n_heads * dims.head_width) * dims.dim
    of_block = of_attention + known.projections * dims.ffn_dim * dims.dim + known.vectors(dims, qkv)
    if (experts := dims.experts) is not None:
        n = counted(experts) + experts.shared
        of_block += (n * known.projections * experts.ffn_dim + experts.n_experts) * dims.dim  # and the router
    rows = dims.vocab_size * (1 if dims.tied_embeddings else 2) + dims.max_seq_len + known.last_norm
    return dims.n_layers * of_block + rows * dims.dim


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
    defaults = {field.name: field.default for field in dataclasses.fields(ModelDims)}
    for key in _OPTIONAL:
        value = getattr(recipe, key)
        is_given, is_own = value != defaults[key], getattr(model, key, None) is not None
        if is_given and key not in known.needs + known.may_have:
            where, at = (f"model.{key}", "") if is_own else (key, f" in the recipe {model.name}-{model.flavor}")
            saw = "" if dataclasses.is_dataclass(value) else show(value)
            problems.add(where, saw, f"no such key{at}: {model.name} does not use it", "remove it")
        if not is_given and not is_own and key in known.needs:
            want = f"a value: {model.name} needs it"
            problems.add(f"model.{key}", "", want, f"{key} = the published value, in the recipe")
