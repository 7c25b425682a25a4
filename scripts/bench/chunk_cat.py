"""Time the copy of gradients for FSDP's reduce-scatter, by torch and by titanlite: python scripts/bench/chunk_cat.py

Gradients of a block of Llama-3 8B, whole and under TP 4, from bfloat16 to float32 for so many ranks. `host` is the time
until the call returns; the floor is 6 bytes for each number.
"""

import time
from functools import partial

import torch
from torch import Tensor

from titanlite.kernels.chunk_cat import chunk_cat

GBPS = 4300  # of a device-to-device copy on one H200, read and write
D, F = 4096, 14336
ROUNDS, CALLS = 7, 10


def by_torch(tensors: list[Tensor], n_chunks: int, out: Tensor) -> None:
    torch._chunk_cat(tensors, 0, n_chunks, out=out)


def milliseconds(call: partial[None]) -> tuple[float, float]:
    """Return the milliseconds of a call: on the GPU or until the host lets the next one begin, and on the host."""
    gpu, host = [], []
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)  # the host runs ahead
        start.record()
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        host.append(1e3 * (time.perf_counter() - began) / CALLS)
        end.record()
        torch.cuda.synchronize()
        gpu.append(start.elapsed_time(end) / CALLS)
    return sorted(gpu)[ROUNDS // 2], sorted(host)[ROUNDS // 2]


def main() -> None:
    print("| TP | ranks | floor | titanlite | its host | torch | its host |\n|---|---|---|---|---|---|---|")
    for tp in (1, 4):
        shapes = [(6144 // tp, D), (D, D // tp), (2 * F // tp, D), (D, F // tp), (D,), (D,)]
        gradients = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
        n = sum(g.numel() for g in gradients)
        for ranks in (1, 2, 4, 8):
            times = []
            for function in (chunk_cat, by_torch):
                out = torch.empty(ranks, n // ranks, device="cuda")
                times += milliseconds(partial(function, gradients, ranks, out))
            print(f"| {tp} | {ranks} | {6e-6 * n / GBPS:.3f} | " + " | ".join(f"{t:.3f}" for t in times) + " |")


if __name__ == "__main__":
    main()
