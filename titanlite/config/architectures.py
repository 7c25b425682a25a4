"""List what is known of each architecture before its file is imported: its place, the keys of its recipes, its weights.

This imports no torch, so that a config can be checked and its parameters counted within a second. The file of an
architecture is `titanlite/models/<name>.py`; a user's own is given by `model.file`, and nothing is known of it here.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from titanlite.config.problems import Problems, show
from titanlite.config.recipe_schema import ModelDims
from titanlite.config.schema import Model
from titanlite.errors import nearest

_EMBEDDINGS = ("tok_embeddings.weight", "positions.weight")


@dataclass(frozen=True)
class Architecture:
    """The facts of one architecture.

    Attributes:
        class_name: in `titanlite/models/<name>.py`, or in `module` there.
        needs: of the keys that only some architectures have, those that its recipes must give.
        may_have: those that they may.
        norms: of a block, beside those of queries and keys.
        query_norm: how queries and keys are normalised: head by head, or those of all heads together.
        biases: whether norms and linear layers of a block have some.
        projections: matrices of a feed-forward.
        module: the file, if several architectures share it.
        splits: whether tensor parallelism has a layout for it: what it computes of heads is of each by itself.
    """

    class_name: str
    needs: tuple[str, ...]
    may_have: tuple[str, ...]
    norms: tuple[str, ...] = ("attention_norm", "ffn_norm")
    query_norm: Literal["none", "head", "all"] = "none"
    biases: bool = False
    projections: int = 3
    module: str = ""
    splits: bool = True


ARCHITECTURES = {
    "llama3": Architecture("Llama3", ("ffn_dim", "rope_theta"), ("rope_scaling",)),
    "qwen3": Architecture("Qwen3", ("ffn_dim", "rope_theta"), ("head_dim",), query_norm="head"),
    "gemma3": Architecture(
        "Gemma3",
        ("ffn_dim", "rope_theta", "window", "local_rope_theta", "global_every"),
        ("head_dim",),
        norms=("attention_norm", "post_attention_norm", "ffn_norm", "post_ffn_norm"),
        query_norm="head",
    ),
    "gpt2": Architecture("GPT2", ("ffn_dim", "max_seq_len"), (), biases=True, projections=2),
    "qwen3_moe": Architecture("Qwen3MoE", ("rope_theta", "experts"), ("head_dim",), query_norm="head", module="moe"),
    "olmoe": Architecture("OLMoE", ("rope_theta", "experts"), (), query_norm="all", module="moe", splits=False),
    "mixtral": Architecture("Mixtral", ("rope_theta", "experts"), (), module="moe"),
}
_OPTIONAL = dict.fromkeys(key for known in ARCHITECTURES.values() for key in known.needs + known.may_have)


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


def parameter_shapes(model: Model, dims: ModelDims) -> dict[str, tuple[int, ...]] | None:
    """Give the shape of each parameter by name; of tied ones the first. None of a file of the user's own.

    Args:
        model: `[model]`.
        dims: its dimensions.
    """
    if model.file:
        return None
    known, D = ARCHITECTURES[model.name], dims.dim
    block = _block_shapes(known, dims)
    rows = (dims.vocab_size, dims.max_seq_len)
    shapes: dict[str, tuple[int, ...]] = {name: (n, D) for name, n in zip(_EMBEDDINGS, rows, strict=True) if n}
    shapes |= {f"layers.{n}.{name}": shape for n in range(dims.n_layers) for name, shape in block.items()}
    shapes |= {f"norm.{kind}": (D,) for kind in ("weight", *(("bias",) if known.biases else ()))}
    return shapes if dims.tied_embeddings else {**shapes, "output.weight": (dims.vocab_size, D)}


def _block_shapes(known: Architecture, dims: ModelDims) -> dict[str, tuple[int, ...]]:
    """Give those of a block, in the order in which they are used."""
    D, E, experts = dims.dim, dims.head_width, dims.experts
    of_queries, of_keys = dims.n_heads * E, dims.n_kv_heads * E
    widened = "w13" if known.projections == 3 else "w1"

    def feed_forward(name: str, width: int, count: int = 1) -> dict[str, tuple[int, ...]]:
        rows = count * (known.projections - 1) * width
        return {f"{name}.{widened}": (rows, D), f"{name}.w2": (count * D, width)}

    layers: dict[str, tuple[int, ...]] = {}
    for norm in known.norms:
        layers[norm] = (D,)
        if norm == "attention_norm":
            widths = {"none": (), "head": (E, E), "all": (of_queries, of_keys)}[known.query_norm]
            layers["attention.wqkv"] = (of_queries + 2 * of_keys, D)
            layers |= {f"attention.{of}_norm": (width,) for of, width in zip("qk", widths, strict=False)}
            layers["attention.wo"] = (D, of_queries)
        elif norm == "ffn_norm" and experts is None:
            layers |= feed_forward("feed_forward", dims.ffn_dim)
        elif norm == "ffn_norm" and experts is not None:
            layers["experts.router"] = (experts.n_experts, D)
            layers |= feed_forward("experts", experts.ffn_dim, experts.n_experts)
            layers |= feed_forward("experts.shared", experts.shared * experts.ffn_dim) if experts.shared else {}
    kinds = ("weight", "bias") if known.biases else ("weight",)
    return {
        f"{name}.{kind}": shape[:1] if kind == "bias" else shape for name, shape in layers.items() for kind in kinds
    }


def n_parameters(model: Model, dims: ModelDims) -> int | None:
    """Count the parameters, embeddings included; tied ones once. None of a file of the user's own: that needs torch.

    Args:
        model: `[model]`.
        dims: its dimensions.
    """
    shapes = parameter_shapes(model, dims)
    return None if shapes is None else sum(map(math.prod, shapes.values()))


def n_active_parameters(model: Model, dims: ModelDims) -> int | None:
    """Count the parameters that one token uses: of each layer's experts those that it goes to.

    Args:
        model: `[model]`.
        dims: its dimensions.
    """
    count, experts = n_parameters(model, dims), dims.experts
    if count is None or experts is None:
        return count
    each = ARCHITECTURES[model.name].projections * experts.ffn_dim * dims.dim
    return count - dims.n_layers * (experts.n_experts - experts.top_k) * each


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
