"""Cast a matrix to float8 by a recipe, which defines the elements that share a scale, and how scales are rounded.

Casts equal torchao's bit for bit where torchao has the recipe (`tests/unit/float8/test_emulated.py`).

This file takes the maximum of each row, of each block or of the whole matrix. `scale_of` and `cast_to` of
`kernels/float8_scales.py` compute the scale and the bytes from it. Kernels that fuse a cast with other work
(`kernels/float8_cast.py`, `swiglu.py`, `experts.py`) are defined by the same two functions.

A matmul sums over the C columns of a matrix [R, C]. A block with one scale has r rows and c columns.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from titanlite.config.recipe_schema import BLOCKS, Granularity
from titanlite.kernels.collectives import Group, all_reduce
from titanlite.kernels.float8_scales import cast_to, scale_of

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class Cast(NamedTuple):
    """A matrix in float8; its values are `qdata · scale_inv`."""

    qdata: Tensor  # [R, C] float8
    scale_inv: Tensor  # float32: [] for the whole matrix, [R, 1] for rows, [R/r, C/c] for blocks


class AmaxGroups(NamedTuple):
    """The ranks over which the maximum of each operand of a matmul is reduced; None: this rank has all of it."""

    input: Group | None = None
    weight: Group | None = None
    grad_output: Group | None = None


ALL_HERE = AmaxGroups()


def cast(x: Tensor, of: Granularity, dtype: str, rounding: str, over: Group | None = None) -> Cast:
    """Quantise a matrix whose last dim is contracted.

    Args:
        x: [R, C], any floating dtype. R and C are multiples of the block's size.
        of: the unit that has a scale; not "none".
        dtype: "e4m3" or "e5m2".
        rounding: how scales are rounded: "exact" or "pow2_floor"; see `scale_of`.
        over: the ranks that hold the other parts of the matrix, which all share one scale; only if `of` is "tensor".

    Returns:
        The cast matrix, its bytes laid out in memory as `x`. A NaN or infinity turns all elements with the same scale
        into NaN; for an infinity with exact scales, only after the multiplication by `scale_inv`.

    Source:
        torchao.float8.float8_utils.
    """
    to, pow2 = DTYPES[dtype], rounding == "pow2_floor"
    if of in BLOCKS:
        rows, columns = BLOCKS[of]
        blocks = x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        scale, scale_inv = scale_of(blocks.abs().amax((1, 3)), to, pow2)
        return Cast(cast_to(blocks, scale[:, None, :, None], to).flatten(2).flatten(0, 1), scale_inv)
    scale, scale_inv = scale_of(_amax_of(x, of, over), to, pow2)
    return Cast(cast_to(x, scale, to), scale_inv)


def _amax_of(x: Tensor, of: Granularity, over: Group | None) -> Tensor:
    """Return the largest magnitude of each row, [R, 1], or of the matrix, []; with `over`, the largest of its ranks."""
    if of == "row":
        return x.abs().amax(-1, keepdim=True)
    return x.abs().amax() if over is None else all_reduce(x.abs().amax(), "max", over)
