"""Speed of attention's kernels at the shapes of Llama-3 8B and 1B and Gemma 3: python scripts/bench/attention.py

Forward and backward of one layer, causal, bf16, grouped-query; TFLOP/s count the tokens that a query sees. Decides the
order in `titanlite/training/build.py::fastest_attention`. Then attention to documents: of lengths drawn log-normally
with sigma 1, as sums over several batches, and of one document a sample, beside what else could attend to them.
"""

import math
import random

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

from titanlite.config.recipe_schema import twice_attended
from titanlite.kernels import document_attention
from titanlite.kernels.flex_documents import attend_flexibly, flexible_grad
from titanlite.models.layers import CausalAttention

SHAPES = {  # B, S, H, K, E
    "8B": (2, 8192, 32, 8, 128),
    "8B, tensor parallel 4": (2, 8192, 8, 2, 128),
    "1B": (2, 8192, 32, 8, 64),
    "Gemma 3 1B": (2, 8192, 4, 1, 256),
}
WINDOW = 512  # of Gemma's local layers
BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


def measure(backend: SDPBackend, B: int, S: int, H: int, K: int, E: int, window: int = 0) -> tuple[float, float]:
    """Return the median milliseconds of forward and of backward."""
    shape = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    inputs = [torch.randn(B, S, heads, E, **shape) for heads in (H, K, K)]
    grad = torch.randn(B, S, H, E, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    attend = CausalAttention(window)

    def forward() -> torch.Tensor:
        return attend(*(t.transpose(1, 2) for t in inputs))

    with sdpa_kernel(backend):
        there = do_bench(forward, return_mode="median")
        out = forward()
        back = do_bench(lambda: out.backward(grad, retain_graph=True), grad_to_none=inputs, return_mode="median")
    return there, back


def main() -> None:
    print("| shape | kernel | forward ms | TFLOP/s | backward ms | TFLOP/s |\n|---|---|---|---|---|---|")
    for name, (B, S, H, K, E) in SHAPES.items():
        flops = 2 * B * H * S * S * E  # Q Kᵀ and P V, half of the square
        for backend in BACKENDS:
            try:
                times = measure(backend, B, S, H, K, E)
            except RuntimeError as error:
                print(f"| {name} | {backend.name.lower()} | {str(error).splitlines()[0][:60]} | | | |")
                continue
            print(row(name, backend, flops, times))
    flash, W = SDPBackend.FLASH_ATTENTION, WINDOW
    times = measure(flash, B, S, H, K, E, W)
    print(row(f"{name}, window of {W}", flash, 2 * B * H * E * S * twice_attended(W, S), times))
    print("\n| documents | kernel | forward TFLOP/s | backward TFLOP/s |\n|---|---|---|---|")
    for mean in (300, 1000, 3000, S):
        for kernel, (there, back) in documents(mean).items():
            print(
                f"| {f'mean of {mean} tokens' if mean < S else 'one a sample'} | {kernel} | {there:.0f} | {back:.0f} |"
            )


def documents(mean: int, batches: int = 12) -> dict[str, tuple[float, float]]:
    """Return TFLOP/s of what is attended, forward and backward, by kernel, at the shape of 8B."""
    B, S, H, K, E = SHAPES["8B"]
    q, k, v, grad = (torch.randn(B * S, n, E, device="cuda", dtype=torch.bfloat16) for n in (H, K, K, H))
    flops, ms = 0, {"document_attention": [0.0, 0.0], "flex_attention": [0.0, 0.0], "flash_attention": [0.0, 0.0]}
    for batch in range(batches if mean < S else 1):
        lengths = drawn_lengths(mean, S, B, random.Random(batch)) if mean < S else [S] * B
        flops += sum(2 * H * E * n * (n + 1) for n in lengths)
        ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
        starts = torch.repeat_interleave(ends[:-1], torch.tensor(lengths, device="cuda"))
        out, sums = document_attention._fast(q, k, v, starts, S, 0)
        of_flash = (ends, ends, max(lengths), max(lengths), 0.0, True)
        flash_out, flash_sums, *state = torch.ops.aten._flash_attention_forward(q, k, v, *of_flash, False)
        calls = {
            "document_attention": (
                lambda of=starts: document_attention._fast(q, k, v, of, S, 0),
                lambda of=starts, out=out, sums=sums: document_attention._fast_grad(grad, q, k, v, out, sums, of, S, 0),
            ),
            "flex_attention": (
                lambda of=starts: attend_flexibly(q, k, v, of, S, 0),
                lambda of=starts: flexible_grad(grad, q, k, v, of, S, 0),  # its forward is in there
            ),
            "flash_attention": (
                lambda of=of_flash: torch.ops.aten._flash_attention_forward(q, k, v, *of, False),
                lambda of=of_flash, out=flash_out, sums=flash_sums, state=state[:2]: (
                    torch.ops.aten._flash_attention_backward(grad, q, k, v, out, sums, *of, *state)
                ),
            ),
        }
        for kernel, (forward, backward) in calls.items():
            for way, call in enumerate((forward, backward)):
                ms[kernel][way] += do_bench(call, return_mode="median")
    return {kernel: (flops / there / 1e9, 2.5 * flops / back / 1e9) for kernel, (there, back) in ms.items()}


def drawn_lengths(mean: int, S: int, B: int, source: random.Random) -> list[int]:
    """Draw lengths log-normally until each of B samples of S tokens is full; its last document is cut."""
    found: list[int] = []
    for _ in range(B):
        left = S
        while left:
            found.append(min(left, max(1, round(source.lognormvariate(math.log(mean) - 0.5, 1.0)))))
            left -= found[-1]
    return found


def row(name: str, backend: SDPBackend, flops: int, times: tuple[float, float]) -> str:
    """Return one line of the table; backward has two and a half times the FLOPs."""
    there, back = (n * flops / ms / 1e9 for n, ms in zip((1, 2.5), times, strict=True))
    return f"| {name} | {backend.name.lower()} | {times[0]:.2f} | {there:.0f} | {times[1]:.2f} | {back:.0f} |"


if __name__ == "__main__":
    main()
