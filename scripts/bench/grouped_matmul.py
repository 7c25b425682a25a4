"""Speed of the products of experts at the shapes of Qwen3-30B-A3B and Mixtral: python scripts/bench/grouped_matmul.py

16,384 tokens in bf16, as many rows for each expert as a router gives that nobody has balanced: log-normal, sigma 0.5.
The floor is one cuBLAS product of as many rows and FLOPs, which has one weight; beside it torch's own grouped product.
"""

import torch
from torch import Tensor
from triton.testing import do_bench

from titanlite.kernels.grouped_matmul import (
    grouped_matmul,
    grouped_weight_gradient,
    scaled_grouped_gradient,
    scaled_grouped_matmul,
)

TOKENS, E4M3 = 16384, torch.float8_e4m3fn
SHAPES = {"Qwen3-30B-A3B": (128, 8, 2048, 768), "Mixtral 8x7B": (8, 2, 4096, 14336)}  # experts, of a token, D, F


def drawn_offsets(n: int, rows: int) -> Tensor:
    """Draw how many rows each of n experts has, [n + 1] int32 on the GPU."""
    weights = torch.randn(n, generator=torch.Generator().manual_seed(0)).mul(0.5).exp()
    ends = (weights.cumsum(0) / weights.sum() * rows).round()
    return torch.cat([torch.zeros(1), ends]).int().cuda()


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def main() -> None:
    print("| model | product | ms | TFLOP/s | cuBLAS, dense | share | torch, grouped |\n|---|---|---|---|---|---|---|")
    for model, (E, top_k, D, F) in SHAPES.items():
        R = TOKENS * top_k
        offsets = drawn_offsets(E, R)
        for name, N, K, transposed in (
            ("w13", 2 * F, D, False),
            ("w2", D, F, False),
            ("w2, of its input", F, D, True),
            ("w13, of its input", D, 2 * F, True),
        ):
            a, weight = random(R, K), random(E, N, K)
            weight = weight.mT.contiguous().mT if transposed else weight
            dense = random(N, K)
            calls = {
                "ours": lambda a=a, w=weight, of=offsets: grouped_matmul(a, w, of),
                "cublas": lambda a=a, w=dense: a @ w.t(),
                "torch": lambda a=a, w=weight, of=offsets: torch._grouped_mm(a, w.mT, offs=of[1:]),
            }
            print(row(model, name, 2 * R * N * K, calls), flush=True)
            del a, weight
        for name, N, K in (("w13, of itself", 2 * F, D), ("w2, of itself", D, F)):
            grad, x, dense = random(R, N), random(R, K), random(N, K)
            calls = {
                "ours": lambda grad=grad, x=x, of=offsets: grouped_weight_gradient(grad, x, of),
                "cublas": lambda x=x, w=dense: x @ w.t(),
                "torch": lambda grad=grad, x=x, of=offsets: torch._grouped_mm(grad.t(), x, offs=of[1:]),
            }
            print(row(model, name, 2 * R * N * K, calls), flush=True)
            del grad, x
        in_float8(model, E, R, D, F, offsets)


def in_float8(model: str, E: int, R: int, D: int, F: int, offsets: Tensor) -> None:
    """Print the products in float8, with sums of tensor cores and split ones, beside cuBLAS's of one weight."""
    for name, N, K in (("w13", 2 * F, D), ("w2", D, F)):
        a, weight, dense = (random(*shape).to(E4M3) for shape in ((R, K), (E, N, K), (N, K)))
        by_row, by_column, by_group = (torch.ones(*shape, device="cuda") for shape in ((R, 1), (1, N), (E, N)))
        for fast in (True, False):
            calls = {
                "ours": lambda a=a, w=weight, s=(by_row, by_group), fast=fast: scaled_grouped_matmul(
                    a, w, *s, offsets, torch.bfloat16, fast
                ),
                "cublas": lambda a=a, w=dense, s=(by_row, by_column), fast=fast: torch._scaled_mm(
                    a, w.t(), *s, out_dtype=torch.bfloat16, use_fast_accum=fast
                ),
                "torch": lambda a=a, w=weight, s=(by_row, by_group), fast=fast: torch._scaled_grouped_mm(
                    a, w.mT, s[0].flatten(), s[1], offsets[1:], out_dtype=torch.bfloat16, use_fast_accum=fast
                ),
            }
            print(row(model, f"{name}, float8, {'fast' if fast else 'split'}", 2 * R * N * K, calls), flush=True)
        grad, x = random(N, R).to(E4M3), random(K, R).to(E4M3)
        columns, begins = torch.ones(K, 1, device="cuda"), offsets // 16 * 16
        for fast in (True, False):
            calls = {
                "ours": lambda grad=grad, x=x, s=columns, of=begins, fast=fast: scaled_grouped_gradient(
                    grad, x, None, s, of, torch.bfloat16, fast
                ),
                "cublas": lambda a=a, w=dense, s=(by_row, by_column), fast=fast: torch._scaled_mm(
                    a, w.t(), *s, out_dtype=torch.bfloat16, use_fast_accum=fast
                ),
            }
            name_of = f"{name}, of itself, float8, {'fast' if fast else 'split'}"
            print(row(model, name_of, 2 * R * N * K, calls), flush=True)
        del a, weight, dense, grad, x


def row(model: str, name: str, flops: int, calls: dict) -> str:
    """Time the calls in turn, three times each, and return one line of the table, of medians."""
    times: dict[str, list[float]] = {kernel: [] for kernel in calls}
    for _ in range(3):
        for kernel, call in calls.items():
            try:
                times[kernel].append(do_bench(call, return_mode="median"))
            except RuntimeError:
                times[kernel].append(float("nan"))
    ms = {kernel: sorted(found)[1] for kernel, found in times.items()}
    rate = {kernel: flops / found / 1e9 for kernel, found in ms.items()}
    share = rate["ours"] / rate["cublas"]
    return (
        f"| {model} | {name} | {ms['ours']:.3f} | {rate['ours']:.0f} | {rate['cublas']:.0f} | {share:.0%} "
        f"| {rate.get('torch', float('nan')):.0f} |"
    )


if __name__ == "__main__":
    main()
