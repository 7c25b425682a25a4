"""Write the config.json of a shipped architecture, and find the weights of a folder.

The layouts are in `architectures.py`; `config_json.py` holds a given folder against a config, and
`models/hugging_face.py` moves weights. This imports no torch.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

from titanlite.config.architectures import ARCHITECTURES, CAP, HubLayout
from titanlite.config.problems import show
from titanlite.config.recipe_schema import ModelDims
from titanlite.config.schema import Model
from titanlite.errors import Problem
from titanlite.json_file import read_json

ONE_FILE = "model.safetensors"  # several are listed in an index, which has this name and more

LAYOUTS = {name: known.hub for name, known in ARCHITECTURES.items()}


def config_json(layout: HubLayout, dims: ModelDims, seq_len: int, dtype: str, end: int | None) -> dict[str, Any]:
    """Make the content of config.json.

    Args:
        layout: of the architecture.
        dims: the model's dimensions.
        seq_len: the longest that the model has seen.
        dtype: of the weights, as "bfloat16".
        end: id of the token that follows a document, and so stands before a text; None if it is not known.
    """
    return {
        "architectures": [layout.class_name],
        **model_keys(layout, dims),
        **training_keys(layout, dims),
        **({} if dims.max_seq_len else {"max_position_embeddings": seq_len}),
        "bos_token_id": end,
        "eos_token_id": end,
        "torch_dtype": dtype,
    }


def model_keys(layout: HubLayout, dims: ModelDims) -> dict[str, Any]:
    """Give what config.json says of the model that is computed."""
    keys = {"model_type": layout.model_type, **layout.always}
    keys |= _told(layout.sizes, dims)
    if dims.rope_scaling is not None:
        scaling = asdict(dims.rope_scaling)
        scaling["original_max_position_embeddings"] = scaling.pop("original_seq_len")
        keys["rope_scaling"] = {"rope_type": "llama3", **scaling}
    if dims.global_every:
        keys["layer_types"] = layer_types(dims)
    if CAP in layout.always:
        keys[CAP] = dims.logit_softcap or None
    return keys


def training_keys(layout: HubLayout, dims: ModelDims) -> dict[str, Any]:
    """Give what config.json says of how a model is trained, on which no logit depends."""
    return _told(layout.training, dims)


def _told(keys: Mapping[str, str], dims: ModelDims) -> dict[str, Any]:
    return {theirs: attrgetter(ours)(dims) for theirs, ours in keys.items()}


def without_place(layout: HubLayout, dims: ModelDims, is_start: bool = False) -> list[Problem]:
    """Return what a recipe says of its experts, or of its logits, that transformers does not compute.

    Args:
        layout: of the architecture.
        dims: the model's dimensions.
        is_start: weights come from transformers: a bias, which starts at 0, changes no logit of theirs.
    """
    of, all_have = dims.experts, f"which every {layout.class_name} of transformers has"
    uncapped = [Problem("logit_softcap", show(dims.logit_softcap), f"0, {all_have}", "logit_softcap = 0")]
    uncapped = uncapped if dims.logit_softcap and CAP not in layout.always else []
    if of is None:
        return uncapped
    wanted: dict[str, object] = {"scale": 1.0, "shared": 0, **({} if is_start else {"balance_bias": 0.0})}
    if of.score == "sigmoid":
        wanted["score"] = layout.fixed.get("experts.score", "softmax")
    if "experts.normalised" not in layout.sizes.values():
        wanted["normalised"] = True
    wrong = {key: want for key, want in wanted.items() if getattr(of, key) != want}
    return uncapped + [
        Problem(f"experts.{key}", show(getattr(of, key)), f"{show(want)}, {all_have}", "another recipe")
        for key, want in wrong.items()
    ]


def can_export(model: Model, dims: ModelDims) -> bool:
    """Return whether transformers has a class that computes what a model does: none for a user's own architecture."""
    if model.file:
        return False
    layout = LAYOUTS[model.name]
    return (dims.n_kv_heads == dims.n_heads or layout.groups_heads) and not without_place(layout, dims)


def layer_types(dims: ModelDims) -> list[str]:
    """Name the attention of each layer."""
    return ["sliding_attention" if window else "full_attention" for window in dims.windows]


def weight_files(folder: Path) -> list[Path]:
    """Name the files that have the weights, whether they are there or not.

    Raises:
        ValueError, LookupError, TypeError: their index is damaged, or names a file that is not in the folder itself.
    """
    index = folder / f"{ONE_FILE}.index.json"
    if os.path.isfile(folder / ONE_FILE) or not os.path.isfile(index):  # as transformers chooses if there are both
        return [folder / ONE_FILE]
    named = cast(dict[str, dict[str, str]], read_json(index))["weight_map"]
    files = sorted(set(named.values()))
    if strange := [file for file in files if not re.fullmatch(r"[^/\\\0]+\.safetensors", file)]:
        raise ValueError(f"{index.name} names {', '.join(map(repr, strange))}, which is no safetensors file beside it")
    return [folder / file for file in files]
