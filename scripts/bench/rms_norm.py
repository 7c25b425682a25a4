"""The gradient of RMSNorm on one GPU: python scripts/bench/rms_norm.py

Milliseconds of `titanlite/kernels/rms_norm.py`, backward, the median of many calls, for 16,384 tokens, with the
gradient of the residual stream, beside what a compiler makes of the definition by itself. GB/s are of the fewest bytes:
the input, the gradients of its norm and of the stream, and that of the input.
"""

from functools import partial

import torch
from triton.testing import do_bench

from titanlite.kernels.rms_norm import rms_norm_grad

M, EPS = 16_384, 1e-6
WIDTHS = {"Gemma 3 1B": 1152, "Llama 1B": 2048, "Llama 8B": 4096, "Llama 70B": 8192}


def main() -> None:
    print(f"{'model':12s} {'compiler':>9s} {'titanlite':>9s} {'GB/s':>6s}")
    for name, D in WIDTHS.items():
        grad, x, rest = (torch.randn(M, D, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        weight, mean = torch.randn_like(x[0]), x.float().square().mean(-1, keepdim=True)
        given = grad, x, weight, mean, rest, EPS
        runs = torch.compile(rms_norm_grad.definition, dynamic=False), rms_norm_grad
        compiler, ours = (do_bench(partial(run, *given), return_mode="median") for run in runs)
        print(f"{name:12s} {compiler:9.3f} {ours:9.3f} {4 * 2 * M * D / ours / 1e6:6,.0f}", flush=True)


if __name__ == "__main__":
    main()
