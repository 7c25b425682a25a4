"""The two passes over the logits on one GPU: python scripts/bench/cross_entropy.py

Milliseconds of `titanlite/kernels/cross_entropy.py`, the median of many calls, for 16,384 tokens in bfloat16, beside
what a compiler makes of the definitions. GB/s are of the fewest bytes: each pass reads the logits, the second one
writes them, too.
"""

from functools import partial

import torch
from triton.testing import do_bench

from titanlite.kernels.cross_entropy import local_statistics, overwrite_with_gradient

M = 16_384
VOCABULARIES = {"GPT-2": 50_257, "OLMoE": 50_304, "Llama 3": 128_256, "Qwen3": 151_936, "Gemma 3": 262_144}


def main() -> None:
    print(f"{'logits':10s} {'pass':10s} {'compiler':>9s} {'titanlite':>9s} {'GB/s':>6s}")
    for name, V in VOCABULARIES.items():
        logits = torch.randn(M, V, device="cuda", dtype=torch.bfloat16)
        targets, scale = torch.randint(V, (M,), device="cuda"), torch.tensor(1e-4, device="cuda")
        lse, _ = local_statistics(logits, targets, 0, 0.0)
        passes = (
            ("statistics", local_statistics, (logits, targets, 0, 0.0), 1),
            ("gradient", overwrite_with_gradient, (logits, targets, 0, lse, scale, 0.0, 0.0), 2),
        )
        for of, run, given, times in passes:
            compiled = torch.compile(run.definition.__wrapped__, dynamic=False)
            compiler, ours = (do_bench(partial(each, *given), return_mode="median") for each in (compiled, run))
            print(f"{name:10s} {of:10s} {compiler:9.3f} {ours:9.3f} {times * 2 * M * V / ours / 1e6:6,.0f}", flush=True)


if __name__ == "__main__":
    main()
