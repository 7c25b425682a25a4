"""Speed of the products of experts at the shapes of Qwen3-30B-A3B and Mixtral: python scripts/bench/grouped_matmul.py

16,384 tokens in bf16, as many rows for each expert as a router gives that nobody has balanced: log-normal, sigma 0.5.
The floor is one cuBLAS product of as many rows and FLOPs, which has one weight; beside it torch's own grouped product.
"""

import torch
from torch import Tensor
from triton.testing import do_bench

from titanlite.kernels.grouped_matmul import grouped_matmul, grouped_weight_gradient

TOKENS = 16384
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
        f"| {rate['torch']:.0f} |"
    )


if __name__ == "__main__":
    main()
