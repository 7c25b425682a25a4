"""A kernel whose blocks take all registers of a multiprocessor. NCCL's take 544 × 96 of 65,536 on sm_90."""

# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUnknownVariableType=false

import torch
import triton
import triton.language as tl

REGISTERS = 65_536  # of a multiprocessor
_BLOCKS, _WARPS, _ELEMENTS = 24, 16, 65_536  # NCCL has as many blocks


@triton.jit(do_not_specialize=["rounds"])
def _large(numbers, rounds, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(numbers + at)
    for _ in range(rounds):
        x = x * 0.5 + tl.sum(x * x, 0)  # all of x is wanted after the sum: it stays in registers
    tl.store(numbers + at, x)


def launch_large_blocks(numbers: torch.Tensor) -> None:
    """Launch it on the current stream.

    Args:
        numbers: at least 65,536 of float32, on the GPU; overwritten.
    """
    kernel = _large[(_BLOCKS,)](numbers, 1, _ELEMENTS, num_warps=_WARPS)
    taken = kernel.n_regs * _WARPS * 32
    assert taken == REGISTERS, f"a block takes {taken} registers; want {REGISTERS}"
