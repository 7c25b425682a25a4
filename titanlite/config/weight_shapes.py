"""Hold the safetensors of a folder in Hugging Face's layout against its config.json, by their headers alone.

A header names each tensor with its dtype and shape, so that a head that is missing, or a width that is another than
config.json says, is found before a start, without torch. `checkpoint/hugging_face.py` makes the same comparison with
the model itself when it reads the weights.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from titanlite.config.architectures import parameter_shapes
from titanlite.config.hugging_face import LAYOUTS, HubLayout, weight_files
from titanlite.config.recipe_schema import ModelDims
from titanlite.config.schema import Model
from titanlite.json_file import parse_json

# Tables of positions and masks, which older releases of transformers saved beside the weights.
_BUFFER = re.compile(r"\.(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)$")
_LISTED = 5  # weights that a message names


def full_name(layout: HubLayout, name: str) -> str | None:
    """Return the whole name of a tensor of a folder; None if it is no weight.

    A model that was saved without its head does not name what is above its layers.
    """
    base = layout.names["norm"].partition(".")[0]
    return None if _BUFFER.search(name) else name if name.startswith((f"{base}.", "lm_head.")) else f"{base}.{name}"


def odd_weights(folder: Path, model: Model, dims: ModelDims) -> list[str]:
    """Say which weights of a folder are not those of its model: the first few, and how many more.

    Args:
        folder: with its config.json and safetensors.
        model: `[model]`; its name is the architecture's.
        dims: the dimensions that config.json gives.

    Raises:
        OSError, ValueError, LookupError, TypeError: a file cannot be read, or is no safetensors file.
    """
    layout, wanted = LAYOUTS[model.name], weight_shapes(model, dims)
    tensors = (tensor for file in weight_files(folder) for tensor in _header(file))
    found = {name: (dtype, shape) for theirs, dtype, shape in tensors if (name := full_name(layout, theirs))}
    odd = [f"{name} is missing" for name in wanted.keys() - found.keys()]
    for name, (dtype, shape) in found.items():
        if name not in wanted:
            odd += [] if name == "lm_head.weight" else [f"no {name}"]  # of a tied head, which may be written, too
        elif shape != wanted[name]:
            odd.append(f"{name} of {list(wanted[name])} (it has {list(shape)})")
        elif not dtype.startswith(("F", "BF")):
            odd.append(f"{name} of floating-point numbers (it has {dtype})")
    return sorted(odd)[:_LISTED] + [f"{len(odd) - _LISTED:,} more"] * (len(odd) > _LISTED)


def weight_shapes(model: Model, dims: ModelDims) -> dict[str, tuple[int, ...]]:
    """Give the shape of each weight by its name in Hugging Face's layout.

    Args:
        model: `[model]`, of a shipped architecture.
        dims: its dimensions.
    """
    layout, shapes, of_keys = LAYOUTS[model.name], dict[str, tuple[int, ...]](), dims.n_kv_heads * dims.head_width
    for name, (rows, *columns) in (parameter_shapes(model, dims) or {}).items():
        place, _, kind = name.rpartition(".")
        above, _, layer = place.rpartition(".")
        keys = {"wk": of_keys, "wv": of_keys}
        fused = {"wqkv": {"wq": rows - 2 * of_keys, **keys}, "w13": {"w1": rows // 2, "w3": rows // 2}}
        for part, n in fused.get(layer, {layer: rows}).items():
            ours = f"{above}.{part}".removeprefix(".")
            theirs = layout.names[re.sub(r"\.\d+\.", ".*.", ours)]
            if number := re.search(r"\.\d+\.", ours):
                theirs = theirs.replace(".*.", number[0], 1)
            each = dims.experts.n_experts if dims.experts and ".*." in theirs else 1
            for expert in range(each):
                key = f"{theirs.replace('.*.', f'.{expert}.')}.{kind}"
                joined = shapes.get(key, (0,))[0]
                shapes[key] = (joined + n // each, *columns)
    if layout.is_transposed:
        blocks = {key for key, shape in shapes.items() if len(shape) == 2 and ".h." in key}
        shapes |= {key: shapes[key][::-1] for key in blocks}
    return shapes


def _header(file: Path) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield name, dtype and shape of each tensor of a safetensors file."""
    with file.open("rb") as content:
        size = int.from_bytes(content.read(8), "little")
        if not 0 < size <= file.stat().st_size:
            raise ValueError(f"{file.name} is no safetensors file")
        header = cast(dict[str, dict[str, Any]], parse_json(content.read(size)))
    for name, tensor in header.items():
        if name != "__metadata__":
            yield name, str(tensor["dtype"]), tuple(tensor["shape"])
