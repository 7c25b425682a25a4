"""Speed of torch's attention kernels at the shapes of Llama-3 8B and 1B and Gemma 3: python scripts/bench/attention.py

Forward and backward of one layer, causal, bf16, grouped-query; TFLOP/s count causal work only. Decides the order in
`titanlite/training/build.py::fastest_attention`.
"""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

SHAPES = {
    "8B": (2, 8192, 32, 8, 128),
    "8B, tensor parallel 4": (2, 8192, 8, 2, 128),
    "1B": (2, 8192, 32, 8, 64),
    "Gemma 3 1B": (2, 8192, 4, 1, 256),
}
BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


def measure(backend: SDPBackend, B: int, S: int, H: int, K: int, E: int) -> tuple[float, float]:
    """Milliseconds of forward and of backward, medians."""
    shape = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    inputs = [torch.randn(B, S, heads, E, **shape) for heads in (H, K, K)]
    grad = torch.randn(B, H, S, E, device="cuda", dtype=torch.bfloat16)

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in inputs), is_causal=True, enable_gqa=True)

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
                there, back = measure(backend, B, S, H, K, E)
            except RuntimeError as error:
                print(f"| {name} | {backend.name.lower()} | {str(error).splitlines()[0][:60]} | | | |")
                continue
            rates = flops / there / 1e9, 2.5 * flops / back / 1e9
            print(f"| {name} | {backend.name.lower()} | {there:.2f} | {rates[0]:.0f} | {back:.2f} | {rates[1]:.0f} |")


if __name__ == "__main__":
    main()
