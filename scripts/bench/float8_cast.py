"""Casts to float8, and products with scales by block, on one GPU: python scripts/bench/float8_cast.py

Milliseconds, a median, of the operators in `titanlite/kernels/float8_cast.py`, `swiglu.py`, `block_scaled_matmul.py` at
the sizes of Llama-3 8B, 16,384 tokens. GB/s are of bytes read and written, beside which an H200 copies at 4,300;
TFLOP/s are beside those of a product in bf16.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from triton.testing import do_bench

from titanlite.kernels.block_scaled_matmul import block_scaled_matmul
from titanlite.kernels.float8_cast import cast_blocks, cast_rows, cast_transpose, transpose
from titanlite.kernels.swiglu import swiglu_cast, swiglu_grad_cast

E4M3 = torch.float8_e4m3fn
TOKENS = 16_384
LAYERS = {"wqkv": (6144, 4096), "wo": (4096, 4096), "w13": (28_672, 4096), "w2": (4096, 14_336)}  # N, K
BLOCKS = {"1x128": (1, 0), "1x128 transposed": (0, 1), "1x128 both ways": (1, 1), "128x128": (128, 0)}


def main() -> None:
    """Print both tables."""
    print("cast                             rows  columns      ms   GB/s")
    for shape in ((TOKENS, 28_672), (TOKENS, 4096), (28_672, 4096)):
        x, ones = normal(*shape), torch.ones(shape[0], 1, device="cuda")
        for name, (rows, transposed) in BLOCKS.items():
            show(name, 2 + bool(rows) + bool(transposed), x, partial(cast_blocks, x, rows, transposed, E4M3, False))
        show("by row", 3, x, partial(cast_rows, x, E4M3))
        show("by column, transposed", 5, x, partial(cast_transpose, x, ones, True, E4M3, True))
        qdata = x.to(E4M3)
        show("bytes by column, transposed", 3, x, partial(cast_transpose, qdata, ones, True, E4M3, True))
        show("bytes transposed", 2, x, partial(transpose, qdata))
    grad, x = normal(TOKENS, 14_336), normal(TOKENS, 28_672)
    show("SwiGLU by row", 5, grad, partial(swiglu_cast, x, True, E4M3, True))
    show("SwiGLU by one scale", 9, grad, partial(swiglu_cast, x, False, E4M3, False))  # what is cast is read twice
    show("its gradient by row", 9, grad, partial(swiglu_grad_cast, grad, x, True, E4M3, E4M3, True))
    show("its gradient by one scale", 15, grad, partial(swiglu_grad_cast, grad, x, False, E4M3, E4M3, False))

    print("\nproduct                 M        N        K   blocks TFLOP/s     bf16 TFLOP/s")
    for name, (N, K) in LAYERS.items():
        products = {"output": (TOKENS, N, K, 128), "grad_input": (TOKENS, K, N, 128), "grad_weight": (N, K, TOKENS, 1)}
        for what, (m, n, k, rows) in products.items():
            a, b = normal(m, k), normal(n, k)
            left, left_scale_inv, _, _ = cast_blocks(a, 1, 0, E4M3, False)
            right, right_scale_inv, _, _ = cast_blocks(b, rows, 0, E4M3, False)
            by_blocks = partial(block_scaled_matmul, left, left_scale_inv, right, right_scale_inv, torch.bfloat16)
            times = milliseconds(by_blocks), milliseconds(partial(torch.mm, a, b.t()))
            rates = "  ".join(f"{ms:7.3f} {2 * m * n * k / ms / 1e9:7,.0f}" for ms in times)
            print(f"{name:4} {what:11} {m:8,} {n:8,} {k:8,}  {rates}", flush=True)


def normal(rows: int, columns: int) -> Tensor:
    """Return random numbers, [rows, columns] bfloat16."""
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)


def show(name: str, bytes_each: int, x: Tensor, call: Callable[[], object]) -> None:
    """Print a line; so many bytes are read and written for each element of `x`."""
    ms = milliseconds(call)
    rate = bytes_each * x.numel() / ms / 1e6
    print(f"{name:27} {x.shape[0]:9,} {x.shape[1]:8,} {ms:7.3f} {rate:6,.0f}", flush=True)


def milliseconds(call: Callable[[], object]) -> float:
    """Return the median time of a call."""
    return do_bench(call, return_mode="median")  # type: ignore[return-value]


if __name__ == "__main__":
    main()
