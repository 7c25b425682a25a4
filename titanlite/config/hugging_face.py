"""Convert a model recipe to the keys of a config.json and back, and find the files of weights in a folder.

`architectures.py` has the layouts, `config_json.py` compares a folder with a config, `models/hugging_face.py` converts
weights.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

from titanlite.config.architectures import ARCHITECTURES, CAP, Architecture
from titanlite.config.build import from_table
from titanlite.config.problems import Origin, Problems, show
from titanlite.config.recipe_schema import ModelDims
from titanlite.config.schema import Model
from titanlite.errors import Problem
from titanlite.json_file import read_json

ONE_FILE = "model.safetensors"
INDEX = f"{ONE_FILE}.index.json"  # of several files
_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_seq_len": "original_max_position_embeddings",
}


def config_json(layout: Architecture, dims: ModelDims, seq_len: int, dtype: str, end: int | None) -> dict[str, Any]:
    """Make the content of config.json.

    Args:
        layout: names and defaults of the architecture's keys.
        dims: the model's dimensions.
        seq_len: tokens of the longest sequences in training.
        dtype: dtype of the weights, as "bfloat16".
        end: id of the token between documents, which is written as the begin and the end of a text; None: unknown.
    """
    return {
        "architectures": [layout.hub_class],
        **model_keys(layout, dims),
        **({} if dims.max_seq_len else {"max_position_embeddings": seq_len}),
        "bos_token_id": end,
        "eos_token_id": end,
        "torch_dtype": dtype,
    }


def model_keys(layout: Architecture, dims: ModelDims) -> dict[str, Any]:
    """Return the keys of a config.json that describe the model, without token ids and dtype."""
    keys: dict[str, Any] = {"model_type": layout.model_type}
    for name, of in layout.fields.items():
        if of.ours or of.is_written:
            keys[name] = attrgetter(of.ours)(dims) if of.ours else of.left_out
    if dims.rope_scaling is not None:
        scaling = {theirs: getattr(dims.rope_scaling, ours) for ours, theirs in _SCALING.items()}
        keys["rope_scaling"] = {"rope_type": "llama3", **scaling}
    if dims.global_every:
        keys["layer_types"] = layer_types(dims)
    if CAP in keys:
        keys[CAP] = keys[CAP] or None
    return keys


def recipe_table(architecture: str, theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Make the table of a model recipe from `theirs`, the keys of a config.json as `model_keys` returns them."""
    known, table = ARCHITECTURES[architecture], dict[str, Any](help="")
    values = {of.ours: theirs[name] for name, of in known.fields.items() if of.ours}
    for ours, value in {**values, **known.fixed}.items():
        section, _, key = ours.rpartition(".")
        (table.setdefault(section, {}) if section else table)[key] = value
    table.setdefault("n_kv_heads", table["n_heads"])
    table.pop("head_width", None)
    if "head_dim" in known.may_have:
        table["head_dim"] = theirs["head_dim"]
    if CAP in theirs:
        table["logit_softcap"] = theirs[CAP] or 0.0
    scaling = theirs.get("rope_scaling")
    if scaling and "rope_scaling" in known.may_have and {*scaling} == {"rope_type", *_SCALING.values()}:
        table["rope_scaling"] = {ours: scaling[name] for ours, name in _SCALING.items()}  # no other is supported
    return table


def without_place(architecture: str, dims: ModelDims) -> list[Problem]:
    """Return a problem for each value of a recipe that is lost in config.json: no class of transformers computes it."""
    layout, problems = ARCHITECTURES[architecture], Problems(Origin("config.json"))
    table = recipe_table(architecture, model_keys(layout, dims))
    read, given = computed(cast("ModelDims", from_table(ModelDims, table, problems))), computed(dims)
    return [
        Problem(key, show(value), f"{show(read[key])}, which every {layout.hub_class} of transformers has", fix)
        for key, value in given.items()
        if value != read[key]
        for fix in [f"{key.rpartition('.')[2]} = {show(read[key])}"]
    ]


def computed(dims: ModelDims) -> dict[str, object]:
    """Return the keys of a recipe that define its model, as a flat dict, without the z-loss of routers."""
    of = asdict(dims.experts) if dims.experts else {}
    if of and of["score"] == "softmax" and of["normalised"]:
        of["score"] = "softmax_of_chosen"  # normalised softmax is the same
    flat = asdict(dims) | {"head_dim": dims.head_width} | {f"experts.{key}": value for key, value in of.items()}
    return {key: value for key, value in flat.items() if key not in ("help", "refs", "experts", "experts.z_loss")}


def can_export(model: Model, dims: ModelDims) -> bool:
    """Return whether a class of transformers computes the same as the model. False for a user's own architecture."""
    return not model.file and not without_place(model.name, dims)


def layer_types(dims: ModelDims) -> list[str]:
    """Return for each layer transformers' name of its attention, full or sliding."""
    return ["sliding_attention" if window else "full_attention" for window in dims.windows]


def weight_files(folder: Path) -> list[Path]:
    """Return the paths of the files of weights in a folder, without checking that they exist.

    Raises:
        ValueError, LookupError, TypeError: the index is damaged, or names a file outside of the folder.
    """
    index = folder / INDEX
    if os.path.isfile(folder / ONE_FILE) or not os.path.isfile(index):  # transformers prefers ONE_FILE to an index
        return [folder / ONE_FILE]
    named = cast(dict[str, dict[str, str]], read_json(index))["weight_map"]
    files = sorted(set(named.values()))
    if strange := [file for file in files if not re.fullmatch(r"[^/\\\0]+\.safetensors", file)]:
        raise ValueError(f"{index.name} names {', '.join(map(repr, strange))}, which is no safetensors file beside it")
    return [folder / file for file in files]
