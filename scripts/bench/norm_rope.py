"""Normalised and rotated heads on one GPU: python scripts/bench/norm_rope.py

Milliseconds of `titanlite/kernels/norm_rope.py`, a mean, for 16,384 tokens of sequences of 8,192, beside what a
compiler makes of its definition. GB/s are of the fewest bytes: queries and keys read and written; backward the
projection, the gradients of its parts and that of the whole.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from titanlite.kernels.norm_rope import norm_rope
from titanlite.kernels.rope import heads, rope, rope_table

M, S, EPS = 16_384, 8192, 1e-6
MODELS = {"Qwen3 0.6B": (8, 2, 128), "Qwen3 8B": (8, 4, 128), "Gemma 3 1B": (1, 4, 256)}  # K, R, E


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    h = x.float()
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def definition(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, R: int, eps: float
) -> tuple[Tensor, ...]:
    q, k, v = heads(qkv, R, 2 * cos.shape[1])
    q, k = norm(q, q_weight, eps).flatten(1, 2), norm(k, k_weight, eps).flatten(1, 2)
    return rope(q, cos, sin), rope(k, cos, sin), v.squeeze(2)


def main() -> None:
    print(f"{'model':12s} {'pass':9s} {'compiler':>9s} {'titanlite':>9s} {'GB/s':>6s}")
    for name, (K, R, E) in MODELS.items():
        cos, sin = (t.cuda() for t in rope_table(S, E, 1e6, None))
        given = [normal(M, K * (R + 2) * E), normal(E), normal(E)]
        forward = 2 * 2 * M * K * (R + 1) * E
        show(
            name,
            "forward",
            forward,
            *(forward_of(f, given, cos, sin, R) for f in (torch.compile(definition), norm_rope)),
        )
        both = [backward_of(f, given, cos, sin, R) for f in (torch.compile(definition, dynamic=False), norm_rope)]
        show(name, "backward", forward + 2 * 2 * M * K * E + 2 * M * K * (R + 1) * E, *both)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def forward_of(f: Callable[..., tuple[Tensor, ...]], given: list[Tensor], *rest: object) -> float:
    return of_kernels(lambda: f(*given, *rest, EPS))


def backward_of(f: Callable[..., tuple[Tensor, ...]], given: list[Tensor], *rest: object) -> float:
    """Return the time of both passes, less the first."""
    upstream = [torch.randn_like(x) for x in f(*given, *rest, EPS)]
    both = of_kernels(lambda: torch.autograd.grad(f(*given, *rest, EPS), given, upstream))
    return both - forward_of(f, given, *rest)


def of_kernels(call: Callable[[], object], calls: int = 20) -> float:
    """Return the milliseconds of all kernels of a call: a host takes longer to launch these than a GPU to run them."""
    for _ in range(3):
        call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / calls / 1e3


def show(name: str, which: str, n_bytes: int, compiler: float, titanlite: float) -> None:
    print(f"{name:12s} {which:9s} {compiler:9.3f} {titanlite:9.3f} {n_bytes / titanlite / 1e6:6,.0f}", flush=True)


if __name__ == "__main__":
    main()
