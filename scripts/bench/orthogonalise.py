"""Time orthogonalisation beside the plain one of torch.optim.Muon: python scripts/bench/orthogonalise.py

Matrices of Llama-3 8B and experts of Qwen3 30B-A3B, in bfloat16, five steps. The plain one takes a new X Xᵀ in each,
all by cuBLAS. Floating-point operations are counted in full for both, so that titanlite's rate may be above that of the
GPU: of a symmetric product it computes half.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from titanlite.kernels.orthogonalise import ITERATIONS, Polynomials, orthogonalise, orthogonalise_flops
from titanlite.kernels.symmetric_product import symmetric_product

SHAPES = {"wq": (1, 4096, 4096), "wk": (2, 1024, 4096), "w1": (1, 14336, 4096), "experts": (64, 768, 2048)}
ROUNDS, CALLS = 7, 4
POLYNOMIALS = ITERATIONS["polar_express"]


def plain(x: Tensor, polynomials: Polynomials = POLYNOMIALS) -> Tensor:
    """Orthogonalise a batch as torch.optim.Muon does a matrix."""
    y = x.mT if x.shape[1] > x.shape[2] else x
    y = y / y.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for a, b, c in polynomials:
        gram = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.mT if x.shape[1] > x.shape[2] else y


def milliseconds(call: Callable[[], Tensor]) -> float:
    """Return the median time of a call, the host far ahead."""
    times = []
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)
        start.record()
        for _ in range(CALLS):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / CALLS)
    return sorted(times)[ROUNDS // 2]


def main() -> None:
    """Print the table."""
    columns = "matrices", "plain, ms", "titanlite, ms", "TFLOP/s", "X Xᵀ by torch, ms", "titanlite, ms", "TFLOP/s"
    print(f"| {' | '.join(columns)} |\n" + "|---" * len(columns) + "|")
    for name, (batch, rows, columns) in SHAPES.items():
        x = torch.randn(batch, rows, columns, device="cuda", dtype=torch.bfloat16)
        wide = (x if rows <= columns else x.mT).contiguous().half()
        theirs, ours = milliseconds(lambda x=x: plain(x)), milliseconds(lambda x=x: orthogonalise(x, POLYNOMIALS))
        flops = 1e-9 * batch * orthogonalise_flops(rows, columns, len(POLYNOMIALS))
        product = 2e-9 * batch * wide.shape[1] ** 2 * wide.shape[2]
        torchs, half = milliseconds(lambda w=wide: w @ w.mT), milliseconds(lambda w=wide: symmetric_product(w))
        numbers = f"{theirs:.3f} | {ours:.3f} | {flops / ours:.0f} | {torchs:.3f} | {half:.3f} | {product / half:.0f}"
        print(f"| {name} {batch} × {rows} × {columns} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
