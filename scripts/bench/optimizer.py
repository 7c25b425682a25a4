"""AdamW with clipping against its bytes: python scripts/bench/optimizer.py

On the shards that one of eight ranks holds of Llama-3 8B, float32. The bytes: 4 per parameter for the norm, 28 for the
update (read parameter, gradient and two moments, write parameter and two moments).
"""

import torch
from triton.testing import do_bench

from titanlite.config.schema import Comm, Optimizer, Parallelism
from titanlite.parallel.mesh import build_mesh
from titanlite.parallel.process_group import start_process_group
from titanlite.training.optimizer import AdamW

GBPS = 4300  # of a device-to-device copy on one H200, read and write
D, F, V, RANKS = 4096, 14336, 128256, 8
BLOCK = {"wqkv": (6144 // RANKS, D), "wo": (D // RANKS, D), "w13": (2 * F // RANKS, D), "w2": (D // RANKS, F)}


def main() -> None:
    device = start_process_group(Comm())
    shapes = {f"{i}.{name}.weight": shape for i in range(32) for name, shape in BLOCK.items()}
    shapes |= {f"{i}.{name}_norm.weight": (D // RANKS,) for i in range(32) for name in ("attention", "ffn")}
    shapes |= {"tok_embeddings.weight": (V // RANKS, D), "output.weight": (V // RANKS, D), "norm.weight": (D // RANKS,)}
    parameters = {n: torch.nn.Parameter(torch.randn(s, device=device)) for n, s in shapes.items()}
    optimizer = AdamW(parameters, Optimizer(), build_mesh(Parallelism(), device))
    gradients = {name: torch.randn_like(p) for name, p in optimizer.locals.items()}
    keep = torch.zeros((), device=device)

    def step() -> None:
        norm = optimizer.norm(gradients)
        optimizer.step(gradients, 0.0, norm.clamp(min=1.0), keep)

    n = sum(p.numel() for p in parameters.values())
    floor = 32 * n / GBPS / 1e6
    measured = do_bench(step, return_mode="median")
    print("| parameters | ms | floor ms (32 bytes each at 4.3 TB/s) | ratio |\n|---|---|---|---|")
    print(f"| {n:,} | {measured:.2f} | {floor:.2f} | {measured / floor:.2f} |")


if __name__ == "__main__":
    main()
