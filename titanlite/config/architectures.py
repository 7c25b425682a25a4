"""List what is known of each architecture before its file is imported: its place, and the keys of its recipes.

This imports no torch, so that a config can be checked within a second. The file of an architecture is
`titanlite/models/<name>.py`; a user's own is given by `model.file`, and nothing is known of it here.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from titanlite.config.problems import Problems, show
from titanlite.config.recipe_schema import ModelDims
from titanlite.config.schema import Model
from titanlite.errors import nearest


@dataclass(frozen=True)
class Architecture:
    """The facts of one architecture.

    Attributes:
        class_name: in `titanlite/models/<name>.py`, or in `module` there.
        needs: of the keys that only some architectures have, those that its recipes must give.
        may_have: those that they may.
        module: the file, if several architectures share it.
        splits: whether tensor parallelism has a layout for it: what it computes of heads is of each by itself.
    """

    class_name: str
    needs: tuple[str, ...]
    may_have: tuple[str, ...]
    module: str = ""
    splits: bool = True


ARCHITECTURES = {
    "llama3": Architecture("Llama3", ("ffn_dim", "rope_theta"), ("rope_scaling",)),
    "qwen3": Architecture("Qwen3", ("ffn_dim", "rope_theta"), ("head_dim",)),
    "gemma3": Architecture(
        "Gemma3",
        ("ffn_dim", "rope_theta", "window", "local_rope_theta", "global_every"),
        ("head_dim",),
    ),
    "gpt2": Architecture("GPT2", ("ffn_dim", "max_seq_len"), ()),
    "qwen3_moe": Architecture("Qwen3MoE", ("rope_theta", "experts"), ("head_dim",), module="moe"),
    "olmoe": Architecture("OLMoE", ("rope_theta", "experts"), (), module="moe", splits=False),
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
