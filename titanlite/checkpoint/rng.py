"""Save a rank's random number generators as tensors: a resumed run draws the same numbers as an uninterrupted one.

The state of a generator has a fixed size and belongs to one rank, hence names like `rng/rank00003/torch`. With another
number of ranks no assignment of the states is right, so none is restored, and `Checkpoints.load` returns a notice.
"""

# torch's and numpy's annotations are partial.
# pyright: reportUnknownMemberType=false

import random
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from titanlite.checkpoint.collective import rank

PREFIX = "rng/"


def seed_all(seed: int) -> None:
    """Seed the generators whose states a checkpoint holds."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Tensor]:
    """Copy the state of this rank's generators: Python, numpy, torch, and the current CUDA device if there is one.

    Returns:
        `rng/rank<rank>/<generator>` → state, uint8 or int64, on the CPU.
    """
    return {_name(kind): get() for kind, (get, _) in _generators().items()}


def restore_rng(tensors: Mapping[str, Tensor]) -> None:
    """Set this rank's generators to the states in `tensors`. Tensors with other names are ignored."""
    for kind, (_, put) in _generators().items():
        if _name(kind) in tensors:
            put(tensors[_name(kind)])


def _name(kind: str) -> str:
    return f"{PREFIX}rank{rank():05d}/{kind}"


def _generators() -> dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], Any]]]:
    """Return the functions that read and set the state of each generator of this process."""
    found: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], Any]]] = {
        "python": (lambda: _pack(*random.getstate()[1:]), lambda state: random.setstate((3, *_unpack(state)))),
        "numpy": (_get_numpy, _set_numpy),
        "torch": (torch.get_rng_state, torch.set_rng_state),
    }
    if torch.cuda.is_available():
        found["cuda"] = (torch.cuda.get_rng_state, torch.cuda.set_rng_state)
    return found


def _get_numpy() -> Tensor:
    state: dict[str, Any] = np.random.get_state(legacy=False)  # pyright: ignore[reportAssignmentType]
    words = [*(int(w) for w in state["state"]["key"]), int(state["state"]["pos"])]
    return _pack(words, state["gauss"] if state["has_gauss"] else None)


def _set_numpy(state: Tensor) -> None:
    words, gauss = _unpack(state)
    np.random.set_state(("MT19937", np.array(words[:-1], np.uint32), words[-1], int(gauss is not None), gauss or 0.0))


def _pack(words: Iterable[int], gauss: float | None) -> Tensor:
    """Pack the n words of a Mersenne twister, and the pending second Gaussian of a pair or None, as int64 [n + 2]."""
    bits = struct.unpack("<q", struct.pack("<d", gauss or 0.0))[0]
    return torch.tensor([*words, int(gauss is not None), bits], dtype=torch.int64)


def _unpack(state: Tensor) -> tuple[tuple[int, ...], float | None]:
    *words, has_gauss, bits = cast(list[int], state.tolist())
    return tuple(words), struct.unpack("<d", struct.pack("<q", bits))[0] if has_gauss else None
