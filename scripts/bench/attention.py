"""Speed of attention's kernels at the shapes of Llama-3 8B and 1B and Gemma 3: python scripts/bench/attention.py

Forward and backward of one layer, causal, bf16, grouped-query; TFLOP/s count the tokens that a query sees. Whole
samples by torch's kernels, in the order of `titanlite/training/attention.py::torch_order`, and by FlashAttention-4,
whose backward may repeat its bits; then a window, documents of lengths drawn log-normally with sigma 1, and the pieces
of a sample of 131,072 tokens that one of two ranks has.
"""

import math
import random
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

from titanlite.data.context_split import ContextGroup, documents_of_samples, share_of_rank
from titanlite.data.document_starts import document_bounds
from titanlite.kernels import attention, flash_attention_4

SHAPES = {  # B, S, H, K, E
    "8B": (2, 8192, 32, 8, 128),
    "8B, tensor parallel 4": (2, 8192, 8, 2, 128),
    "1B": (2, 8192, 32, 8, 64),
    "Gemma 3 1B": (2, 8192, 4, 1, 256),
}
WINDOW = 512  # of Gemma's local layers
BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
WHOLE = (None,) * 4


def main() -> None:
    print("| case | kernel | forward ms | TFLOP/s | backward ms | TFLOP/s |\n|---|---|---|---|---|---|")
    for name, shape in SHAPES.items():
        B, S, H, _, E = shape
        flops = 2 * B * H * E * S * (S + 1)
        for backend in BACKENDS:
            report(name, backend.name.lower(), flops, lambda shape=shape, backend=backend: by_torch(backend, *shape))
        by_operator(name, shape, WHOLE, flops)
    B, S, H, _, E = shape
    by_operator(f"{name}, window of {WINDOW}", shape, WHOLE, 4 * B * H * E * seen(S, WINDOW), WINDOW)
    for model in ("8B", "1B"):
        B, S, H, _, E = shape = SHAPES[model]
        for mean in (300, 1000, 3000):
            lengths = drawn_lengths(mean, S, B, random.Random(0))
            starts = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths).astype(np.int32)
            at, runs = document_bounds(starts)
            pieces = of_device(starts), of_device(at), torch.from_numpy(runs), None
            flops = sum(2 * H * E * n * (n + 1) for n in lengths)
            by_operator(f"{model}, {len(lengths)} documents of {mean}", shape, pieces, flops)
    B, S, H, K, E = 1, 131072, *SHAPES["8B"][2:]
    share = share_of_rank(documents_of_samples(S, S), S, ContextGroup("", 2, 0))
    starts = documents_of_samples(S, S)[share.columns]
    places = of_device(share.columns.astype(np.int32))
    pieces = of_device(starts), of_device(share.bounds[0]), torch.from_numpy(share.runs[0]), places
    by_operator("8B, pieces of 131,072", (B, S, H, K, E), pieces, 4 * H * E * int((share.columns + 1).sum()))


def of_device(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array).cuda()


def seen(S: int, window: int) -> int:
    return sum(min(i + 1, window) for i in range(S))


def by_torch(backend: SDPBackend, B: int, S: int, H: int, K: int, E: int) -> tuple[float, float]:
    """Return the median milliseconds of forward and of backward."""
    shape = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    inputs = [torch.randn(B, S, heads, E, **shape) for heads in (H, K, K)]
    grad = torch.randn(B, S, H, E, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

    def forward() -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in inputs)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    with sdpa_kernel(backend):
        there = do_bench(forward, return_mode="median")
        out = forward()
        back = do_bench(lambda: out.backward(grad, retain_graph=True), grad_to_none=inputs, return_mode="median")
    return there, back


def by_operator(name: str, shape: tuple[int, ...], pieces: tuple, flops: int, window: int = 0) -> None:
    """Report the operator by FlashAttention-4, with backward in any order and in one, and by FlexAttention."""
    B, S, H, K, E = shape
    M = len(pieces[0]) if pieces[0] is not None else B * S
    q, grad = (torch.randn(M, H, E, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(B * S, K, E, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def measure() -> tuple[float, float]:
        out, sums = torch.ops.titanlite.attention(q, k, v, *pieces, S, window)
        given = grad, q, k, v, out, sums, *pieces, S, window
        there = do_bench(lambda: torch.ops.titanlite.attention(q, k, v, *pieces, S, window), return_mode="median")
        return there, do_bench(lambda: torch.ops.titanlite.attention_grad(*given), return_mode="median")

    for repeats in (False, True):
        torch.use_deterministic_algorithms(repeats)
        flash_attention_4.serve((E,))
        report(name, attention.attention_kernel(q) + ", deterministic" * repeats, flops, measure)
    torch.use_deterministic_algorithms(False)
    flash_attention_4.serve(())
    report(name, attention.attention_kernel(q), flops, measure)


def drawn_lengths(mean: int, S: int, B: int, source: random.Random) -> list[int]:
    """Draw lengths log-normally until each of B samples of S tokens is full; its last document is cut."""
    found: list[int] = []
    for _ in range(B):
        left = S
        while left:
            found.append(min(left, max(1, round(source.lognormvariate(math.log(mean) - 0.5, 1.0)))))
            left -= found[-1]
    return found


def report(name: str, kernel: str, flops: int, measure: Callable[[], tuple[float, float]]) -> None:
    """Print one line of the table; backward has two and a half times the FLOPs."""
    try:
        times = measure()
    except RuntimeError as error:
        print(f"| {name} | {kernel} | {str(error).splitlines()[0][:60]} | | | |")
        return
    there, back = (n * flops / ms / 1e9 for n, ms in zip((1, 2.5), times, strict=True))
    print(f"| {name} | {kernel} | {times[0]:.2f} | {there:.0f} | {times[1]:.2f} | {back:.0f} |", flush=True)


if __name__ == "__main__":
    main()
