"""Cast a matrix to float8 as a recipe says: which numbers share a scale, and how scales are rounded.

Casts are torchao's to the bit where torchao has the recipe (`tests/unit/float8/test_emulated.py`).

The maximum of each row, block or whole is taken here; `scale_of` and `cast_to` of `kernels/float8_scales.py` make scale
and bytes of it. Kernels that cast something else on their way (`kernels/float8_cast.py`, `swiglu.py`, `experts.py`)
are defined by the same two functions.

A matrix [R, C] is seen as rows of C values that are summed over, and as blocks [R/r, r, C/c, c] with one scale each.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from titanlite.config.recipe_schema import BLOCKS, Granularity
from titanlite.kernels.collectives import Group, all_reduce
from titanlite.kernels.float8_scales import cast_to, scale_of

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class Cast(NamedTuple):
    """A matrix in float8: the numbers are `qdata · scale_inv`."""

    qdata: Tensor  # [R, C] float8
    scale_inv: Tensor  # float32: [] of the whole matrix, [R, 1] of rows, [R/r, C/c] of blocks


class AmaxGroups(NamedTuple):
    """The ranks over which each operand's maximum is reduced; None: this rank has the whole operand."""

    input: Group | None = None
    weight: Group | None = None
    grad_output: Group | None = None


ALL_HERE = AmaxGroups()


def cast(x: Tensor, of: Granularity, dtype: str, rounding: str, over: Group | None = None) -> Cast:
    """Quantise a matrix whose last dim is contracted.

    Args:
        x: [R, C], any floating dtype. R and C are multiples of a block.
        of: the unit that has a scale; not "none".
        dtype: "e4m3" or "e5m2".
        rounding: of the scales: "exact" or "pow2_floor", as `scale_of` has them.
        over: the ranks that hold the other parts of a matrix with one scale; only with "tensor".

    Returns:
        The matrix, its bytes laid out as `x`. NaN and infinity make NaN of all numbers with the same scale; infinity
        with exact scales only once bytes are multiplied by `scale_inv`.

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
    """Return the maximum of each row, [R, 1], or of the matrix, [], on this rank or all."""
    if of == "row":
        return x.abs().amax(-1, keepdim=True)
    return x.abs().amax() if over is None else all_reduce(x.abs().amax(), "max", over)
