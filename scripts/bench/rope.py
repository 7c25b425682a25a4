"""The gradient of rotated heads on one GPU: python scripts/bench/rope.py

Milliseconds of `titanlite/kernels/rope.py`, backward, the median of many calls, for two sequences of 8,192, beside what
a compiler makes of the definition by itself. GB/s are of the gradients of queries, keys and values read and of that of
their projection written.
"""

from functools import partial

import torch
from triton.testing import do_bench

from titanlite.kernels.rope import rope_table, rotated_heads_grad

M, S = 16_384, 8192
MODELS = {"Llama 1B": (8, 4, 64), "Llama 8B": (8, 4, 128), "Llama 70B, TP 8": (1, 8, 128)}  # K, R, E


def main() -> None:
    print(f"{'model':16s} {'compiler':>9s} {'titanlite':>9s} {'GB/s':>6s}")
    for name, (K, R, E) in MODELS.items():
        upstream = [torch.randn(M, n, E, device="cuda", dtype=torch.bfloat16) for n in (K * R, K, K)]
        given = *upstream, *(t.cuda() for t in rope_table(S, E, 1e4, None))
        runs = torch.compile(rotated_heads_grad.definition, dynamic=False), rotated_heads_grad
        compiler, ours = (do_bench(partial(run, *given), return_mode="median") for run in runs)
        moved = 2 * sum(t.nbytes for t in upstream)
        print(f"{name:16s} {compiler:9.3f} {ours:9.3f} {moved / ours / 1e6:6,.0f}", flush=True)


if __name__ == "__main__":
    main()
