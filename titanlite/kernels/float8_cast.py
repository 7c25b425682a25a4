"""Float8 casts that compilers do badly: those that transpose a matrix, and those of weights, outside of any graph.

Hopper multiplies float8 along rows only, so both operands of a weight-gradient GEMM must have tokens along their rows:
one is cast so, the other was cast before and is only transposed. Compilers write such a transpose byte by byte; the
kernels here write 128 together (`titanlite/kernels/device/float8_cast.py`).
"""

import torch
from torch import Tensor

from titanlite.kernels import lowering
from titanlite.kernels.float8_scales import BLOCK, cast_to, scale_of


def cast_transpose(
    x: Tensor, factors: Tensor, by_column: bool, dtype: torch.dtype, pow2: bool, after: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cast the transpose of `x · factors`.

    Args:
        x: [M, K], bfloat16, float16, float32 or float8; rows contiguous.
        factors: [M, 1] float32, one for each row of `x`.
        by_column: whether each of x's columns has a scale; one for all otherwise.
        dtype: float8.
        pow2: round scales down to a power of two.
        after: as for `transpose`.

    Returns:
        Bytes [K, M], contiguous; and their inverse scales, [K, 1] or [] float32.
    """
    return torch.ops.titanlite.cast_transpose(x, factors, by_column, dtype, pow2, after)


def transpose(x: Tensor, after: Tensor | None = None) -> Tensor:
    """Transpose float8 bytes.

    Args:
        x: [M, K] float8, contiguous.
        after: what must be there before, and is not read. Of a weight this is a gradient: a compiler would as soon
            transpose the weight in forward, and keep it until backward although FSDP gathers it anew.

    Returns:
        [K, M], contiguous.
    """
    return torch.ops.titanlite.transpose(x, after)


def cast_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cast each row by a power of two of its own.

    Args:
        x: [M, K], bfloat16, float16 or float32; contiguous.
        dtype: float8.

    Returns:
        Bytes [M, K], and their inverse scales, [M, 1] float32.
    """
    return torch.ops.titanlite.cast_rows(x, dtype)


def cast_by(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast by a scale that is known.

    Args:
        x: [M, K], bfloat16, float16 or float32; contiguous.
        scale: [] float32.
        dtype: float8.

    Returns:
        Bytes [M, K] of `x · scale`.
    """
    return torch.ops.titanlite.cast_by(x, scale, dtype)


def cast_blocks(
    x: Tensor, rows: int, rows_transposed: int, dtype: torch.dtype, pow2: bool, after: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cast a matrix by blocks, and its transpose, reading it once.

    Args:
        x: [M, K], bfloat16, float16 or float32; M and K are multiples of 128, rows contiguous.
        rows: of a block of `x`, 1 or 128, its columns being 128; 0 if it is not wanted.
        rows_transposed: the same of its transpose.
        dtype: float8.
        pow2: round scales down to a power of two.
        after: as for `transpose`.

    Returns:
        Bytes [M, K], and their inverse scales, [M/rows, K/128] float32; both again for the transpose. What is not
        wanted has no elements. By blocks of one row, scales are contiguous along their columns, as cuBLASLt has it.
    """
    return torch.ops.titanlite.cast_blocks(x, rows, rows_transposed, dtype, pow2, after)


def _cast(
    x: Tensor, factors: Tensor, by_column: bool, dtype: torch.dtype, pow2: bool, after: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    transposed = (x.float() * factors).t()  # [K, M]
    scale, scale_inv = scale_of(
        transposed.abs().amax(1, keepdim=True) if by_column else transposed.abs().amax(), dtype, pow2
    )
    return cast_to(transposed, scale, dtype).contiguous(), scale_inv


def _cast_on_gpus(
    x: Tensor, factors: Tensor, by_column: bool, dtype: torch.dtype, pow2: bool, after: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    from titanlite.kernels.device import float8_cast as device

    return device.launch_cast_transpose(
        x if x.stride(1) == 1 else x.contiguous(), factors.contiguous(), by_column, dtype, pow2
    )


def _cast_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale, scale_inv = scale_of(x.abs().amax(1, keepdim=True), dtype, pow2=True)
    return cast_to(x, scale, dtype), scale_inv


def _cast_blocks(
    x: Tensor, rows: int, rows_transposed: int, dtype: torch.dtype, pow2: bool, after: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def one(x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        qdata, scale_invs = empty_blocks(x, rows, dtype)
        if rows:
            blocks = x.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, rows))
            scale, scale_inv = scale_of(blocks.abs().amax((1, 3)), dtype, pow2)
            qdata.copy_(cast_to(blocks, scale[:, None, :, None], dtype).flatten(2).flatten(0, 1))
            scale_invs.copy_(scale_inv)
        return qdata, scale_invs

    return *one(x, rows), *one(x.t(), rows_transposed)


def empty_blocks(x: Tensor, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Allocate the bytes of a matrix [R, C] and their inverse scales, laid out as `cast_blocks` has them."""
    R, C = x.shape
    if not rows:
        return x.new_empty((0, 0), dtype=dtype), x.new_empty((0, 0), dtype=torch.float32)
    shape = (C // BLOCK, R) if rows == 1 else (R // rows, C // BLOCK)
    scale_invs = x.new_empty(shape, dtype=torch.float32)
    return x.new_empty((R, C), dtype=dtype), scale_invs.t() if rows == 1 else scale_invs


def _cast_blocks_on_gpus(
    x: Tensor, rows: int, rows_transposed: int, dtype: torch.dtype, pow2: bool, after: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from titanlite.kernels.device import block_cast as device

    if x.shape[0] % BLOCK or x.shape[1] % BLOCK:
        raise ValueError(f"cast_blocks: {tuple(x.shape)}; want multiples of {BLOCK}")
    out = *empty_blocks(x, rows, dtype), *empty_blocks(x.t(), rows_transposed, dtype)
    device.launch_cast_blocks(x if x.stride(1) == 1 else x.contiguous(), out, rows, rows_transposed, pow2)
    return out


def _transpose(x: Tensor, after: Tensor | None = None) -> Tensor:
    return x.t().contiguous()


def _transpose_on_gpus(x: Tensor, after: Tensor | None = None) -> Tensor:
    from titanlite.kernels.device import float8_cast as device

    return device.launch_transpose(x.contiguous())


def _cast_by_on_gpus(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    from titanlite.kernels.device import float8_cast as device

    return device.launch_cast_rows(x.contiguous(), dtype, scale)[0]


def _cast_rows_on_gpus(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    from titanlite.kernels.device import float8_cast as device

    return device.launch_cast_rows(x.contiguous(), dtype)


def _fake_cast(x, factors, by_column, dtype, pow2, after=None):
    M, K = x.shape
    return x.new_empty((K, M), dtype=dtype), factors.new_empty((K, 1) if by_column else ())


def _fake_transpose(x, after=None):
    return x.new_empty(x.shape[::-1])


def _fake_cast_rows(x, dtype):
    return x.new_empty(x.shape, dtype=dtype), x.new_empty((x.shape[0], 1), dtype=torch.float32)


def _fake_cast_by(x, scale, dtype):
    return x.new_empty(x.shape, dtype=dtype)


def _fake_cast_blocks(x, rows, rows_transposed, dtype, pow2, after=None):
    return *empty_blocks(x, rows, dtype), *empty_blocks(x.t(), rows_transposed, dtype)


lowering.define("cast_transpose", _cast, _cast_on_gpus, _fake_cast)
lowering.define("cast_rows", _cast_rows, _cast_rows_on_gpus, _fake_cast_rows)
lowering.define("cast_by", cast_to, _cast_by_on_gpus, _fake_cast_by)
lowering.define("transpose", _transpose, _transpose_on_gpus, _fake_transpose)
lowering.define("cast_blocks", _cast_blocks, _cast_blocks_on_gpus, _fake_cast_blocks)
