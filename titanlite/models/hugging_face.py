"""Convert weights of the shipped architectures to and from Hugging Face's layout, one titanlite parameter at a time.

`config/architectures.py` has the names of Hugging Face's weights.
"""

import re
from collections.abc import Callable

import torch
from torch import Tensor, nn

from titanlite.config.architectures import Architecture
from titanlite.models.experts import GroupedProjection
from titanlite.models.layers import Projection


def their_weights(layout: Architecture, model: nn.Module, name: str, weight: Tensor) -> dict[str, Tensor]:
    """Split a titanlite parameter into Hugging Face's: name → contiguous tensor of the same dtype.

    Args:
        layout: Hugging Face's layout of the architecture.
        model: titanlite's model; its weights are not read.
        name: name of the parameter in the model.
        weight: the whole parameter, not a shard.
    """
    layer, places = _places(layout, model, name)
    if not isinstance(layer, Projection):
        return {places[""]: weight - _offset(layout, weight)}
    if isinstance(layer, GroupedProjection):
        found: dict[str, Tensor] = {}
        for part, rows in layer.split(weight).items():
            pieces = enumerate(rows.chunk(layer.n_experts))
            found |= {places[part].replace(".*.", f".{n}."): piece.contiguous() for n, piece in pieces}
        return found
    joined: dict[str, list[Tensor]] = {}
    for part, rows in layer.split(weight).items():
        joined.setdefault(places[part], []).append(rows)
    return {theirs: _turned(layout, theirs, torch.cat(rows)).contiguous() for theirs, rows in joined.items()}


def our_weight(layout: Architecture, model: nn.Module, name: str, read: Callable[[str], Tensor]) -> Tensor:
    """Make a titanlite parameter of Hugging Face's tensors, in their dtype: the inverse of `their_weights`.

    Args:
        layout: Hugging Face's layout of the architecture.
        model: titanlite's model; its weights are not read.
        name: name of the parameter in the model.
        read: a function that returns the tensor with a name of Hugging Face's.
    """
    layer, places = _places(layout, model, name)
    if not isinstance(layer, Projection):
        weight = read(places[""])
        return weight + _offset(layout, weight)
    if isinstance(layer, GroupedProjection):
        numbers = [f".{n}." for n in range(layer.n_experts)]
        each = {part: [read(place.replace(".*.", n)) for n in numbers] for part, place in places.items()}
        return layer.fuse({part: torch.cat(rows) for part, rows in each.items()})
    parts: dict[str, Tensor] = {}
    for theirs in dict.fromkeys(places.values()):
        own = [part for part, place in places.items() if place == theirs]
        rows = _turned(layout, theirs, read(theirs)).split([layer.groups * layer.parts[part] for part in own])
        parts |= zip(own, rows, strict=True)
    return layer.fuse(parts)


def _places(layout: Architecture, model: nn.Module, name: str) -> tuple[nn.Module, dict[str, str]]:
    """Return a parameter's layer, and part → Hugging Face's name, with `*` for an expert's number. The part is "" if
    the layer is not a `Projection`.
    """
    place, _, own = name.rpartition(".")
    layer, beside = model.get_submodule(place), place.rpartition(".")[0]
    ours = (
        {part: f"{beside}.{part}".lstrip(".") for part in layer.parts} if isinstance(layer, Projection) else {"": place}
    )
    number = re.search(r"\.\d+\.", place)

    def theirs(part: str) -> str:
        called = layout.names[re.sub(r"\.\d+\.", ".*.", part)]
        return f"{called.replace('.*.', number[0], 1) if number else called}.{own}"

    return layer, {part: theirs(whole) for part, whole in ours.items()}


def _turned(layout: Architecture, theirs: str, weight: Tensor) -> Tensor:
    """Transpose a linear layer's weight where Hugging Face's layout is [in, out]."""
    return weight.T if layout.is_transposed and weight.ndim == 2 and not theirs.startswith("lm_head.") else weight


def _offset(layout: Architecture, weight: Tensor) -> float:
    """Return the constant that Hugging Face's norms add to their weight; 0 for embeddings."""
    return layout.norm_offset if weight.ndim == 1 else 0.0
