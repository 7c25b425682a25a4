"""Speed of attention's kernels at the shapes of Llama-3 8B and 1B and Gemma 3: python scripts/bench/attention.py

Forward and backward of one layer, causal, bf16, grouped-query; TFLOP/s count the tokens that a query sees. Decides the
order in `titanlite/training/build.py::fastest_attention`.
"""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

from titanlite.config.recipe_schema import twice_attended
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


def row(name: str, backend: SDPBackend, flops: int, times: tuple[float, float]) -> str:
    """Return one line of the table; backward has two and a half times the FLOPs."""
    there, back = (n * flops / ms / 1e9 for n, ms in zip((1, 2.5), times, strict=True))
    return f"| {name} | {backend.name.lower()} | {times[0]:.2f} | {there:.0f} | {times[1]:.2f} | {back:.0f} |"


if __name__ == "__main__":
    main()
