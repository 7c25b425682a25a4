"""Weights of the shipped architectures, to and from Hugging Face's layout, one parameter of ours at a time.

`config/hugging_face.py` has the names, and says how weights lie there.
"""

import re
from collections.abc import Callable

import torch
from torch import Tensor, nn

from titanlite.config.architectures import HubLayout
from titanlite.models.experts import GroupedProjection
from titanlite.models.layers import Projection


def their_weights(layout: HubLayout, model: nn.Module, name: str, weight: Tensor) -> dict[str, Tensor]:
    """Take one parameter of ours apart, into those that it is there.

    Args:
        layout: of the architecture.
        model: ours; its weights are not read.
        name: of the parameter.
        weight: its value, whole.

    Returns:
        Their names, and tensors of the same dtype, contiguous.
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


def our_weight(layout: HubLayout, model: nn.Module, name: str, read: Callable[[str], Tensor]) -> Tensor:
    """Put one parameter of ours together: the inverse of `their_weights`.

    Args:
        layout: of the architecture.
        model: ours; its weights are not read.
        name: of the parameter.
        read: the tensor that has a name there, in the shape that `their_weights` gives it.

    Returns:
        The parameter, whole, in the dtype of what was read.
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


def _places(layout: HubLayout, model: nn.Module, name: str) -> tuple[nn.Module, dict[str, str]]:
    """The layer of a parameter, and what each of the layer's parts is called there; the one of other layers is "".

    The number of an expert is left as a star.
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


def _turned(layout: HubLayout, theirs: str, weight: Tensor) -> Tensor:
    """A linear layer's weight or bias as it lies on the other side."""
    return weight.T if layout.is_transposed and weight.ndim == 2 and not theirs.startswith("lm_head.") else weight


def _offset(layout: HubLayout, weight: Tensor) -> float:
    """Return what a norm adds to its weight there; 0 for embeddings."""
    return layout.norm_offset if weight.ndim == 1 else 0.0
