"""Write safetensors files whose numbers take no room: what a check before a start reads of a folder of weights."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanlite.config.architectures import ARCHITECTURES
from titanlite.config.recipe_schema import ModelDims
from titanlite.config.schema import Model
from titanlite.models.find import build_model
from titanlite.models.hugging_face import their_weights

_BYTES = {"F32": 4, "BF16": 2, "I8": 1}


def header_of(name: str, dims: ModelDims) -> dict[str, Any]:
    """Return the dtype and shape of all weights of a model."""
    model = build_model(Model(name=name), dims, 1)
    return {
        key: {"dtype": "BF16", "shape": [*weight.shape]}
        for ours, parameter in model.named_parameters()
        for key, weight in their_weights(ARCHITECTURES[name], model, ours, parameter).items()
    }


def write_header(file: Path, header: Mapping[str, Any]) -> None:
    """Write a header, and as long a hole as the tensors would be."""
    content, end = dict[str, Any](__metadata__={"format": "pt"}), 0
    for key, of in header.items():
        begin, end = end, end + _BYTES[of["dtype"]] * math.prod(of["shape"])
        content[key] = {**of, "data_offsets": [begin, end]}
    text = json.dumps(content).encode()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + end)
