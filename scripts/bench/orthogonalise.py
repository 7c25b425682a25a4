"""Time orthogonalisation, and its symmetric products by torch and by titanlite: python scripts/bench/orthogonalise.py

Matrices of Llama-3 8B and experts of Qwen3 30B-A3B, in bfloat16. Floating-point operations are counted in full for
both, so that titanlite's rate may be above that of the GPU.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from titanlite.kernels.orthogonalise import ITERATIONS, orthogonalise, orthogonalise_flops
from titanlite.kernels.symmetric_product import symmetric_product

SHAPES = {"wq": (1, 4096, 4096), "wk": (2, 1024, 4096), "w1": (1, 14336, 4096), "experts": (64, 768, 2048)}
ROUNDS, CALLS = 7, 10


def by_torch(x: Tensor) -> Tensor:
    return x @ x.mT


def milliseconds(call: Callable[[], Tensor]) -> float:
    times = []
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)  # the host runs ahead
        start.record()
        for _ in range(CALLS):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / CALLS)
    return sorted(times)[ROUNDS // 2]


def main() -> None:
    print(
        "| matrices | torch, ms | titanlite, ms | titanlite, TFLOP/s | orthogonalised, ms | TFLOP/s |\n"
        + "|---" * 6
        + "|"
    )
    for name, (batch, rows, columns) in SHAPES.items():
        x = torch.randn(batch, rows, columns, device="cuda", dtype=torch.bfloat16)
        wide = (x if rows <= columns else x.mT).contiguous()
        theirs, ours = milliseconds(lambda w=wide: by_torch(w)), milliseconds(lambda w=wide: symmetric_product(w))
        product = 2e-9 * batch * wide.shape[1] ** 2 * wide.shape[2]
        polynomials = ITERATIONS["polar_express"]
        whole = milliseconds(lambda x=x, p=polynomials: orthogonalise(x, p))
        all_of_it = 1e-9 * batch * orthogonalise_flops(rows, columns, len(polynomials))
        numbers = f"{theirs:.3f} | {ours:.3f} | {product / ours:.0f} | {whole:.3f} | {all_of_it / whole:.0f}"
        print(f"| {name} {batch} × {rows} × {columns} | {numbers} |")


if __name__ == "__main__":
    main()
