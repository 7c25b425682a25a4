"""Write safetensors files that have a header alone: what a check before a start reads of a folder of weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanlite.config.recipe_schema import ModelDims
from titanlite.config.schema import Model
from titanlite.config.weight_shapes import weight_shapes


def header_of(name: str, dims: ModelDims) -> dict[str, Any]:
    """Return the header of all weights of a model."""
    shapes = weight_shapes(Model(name=name), dims)  # type: ignore[arg-type]
    return {key: {"dtype": "F32", "shape": list(shape), "data_offsets": [0, 0]} for key, shape in shapes.items()}


def write_header(file: Path, header: Mapping[str, Any]) -> None:
    """Write a header."""
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)
