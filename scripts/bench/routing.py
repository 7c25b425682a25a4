"""Routing of experts on one GPU at the shapes of Qwen3-30B-A3B and Mixtral: python scripts/bench/routing.py

Microseconds of each operator of `titanlite/kernels/routing.py`, a median of replays of a CUDA graph, for 16,384 tokens;
none of its inputs is in the cache. The floor is the time that a copy takes for the fewest bytes: each number once. All
of routing is the choice and the rows, of which the last line of a model has both.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from triton.testing import do_bench

from titanlite.kernels.routing import (
    combine,
    expert_rows,
    gather_rows,
    route,
    route_grad,
    router_logits,
    router_logits_grad,
    row_dots,
    spread_rows,
)

M = 16_384
MODELS = {  # D, E, K, score, normalised
    "Qwen3-30B-A3B": (2048, 128, 8, "softmax", True),
    "Mixtral 8x7B": (4096, 8, 2, "softmax_of_chosen", True),
}


def main() -> None:
    """Print the table."""
    rate = bytes_per_us()
    print(
        f"a copy moves {rate / 1e3:,.0f} GB/s\n\n| model | operator | us | floor, us | share |\n|---|---|---|---|---|"
    )
    for model, dims in MODELS.items():
        for name, (least, call) in calls_of(*dims).items():
            us, floor = microseconds(call), least / rate
            print(f"| {model} | {name} | {us:.1f} | {floor:.1f} | {floor / us:.0%} |", flush=True)


def calls_of(D: int, E: int, K: int, score: str, normalised: bool) -> dict[str, tuple[int, Callable[[], object]]]:
    """Return the fewest bytes of each operator, and what calls it."""
    x, router = normal(M, D), normal(E, D) / D**0.5
    logits, how = router_logits(x, router), (score, normalised, 1.0)
    weights, choices = route(logits, None, K, *how)
    rows, slots, _ = expert_rows(choices, 0, E)
    o = gather_rows(x, slots, K)
    R, moved = len(o), nbytes(x, o, rows)
    return {
        "router_logits": (nbytes(x, router, logits), partial(router_logits, x, router)),
        "router_logits_grad": (nbytes(x, x, router, router, logits), partial(router_logits_grad, logits, x, router)),
        "route_grad": (nbytes(weights, choices, logits), partial(route_grad, weights, logits, choices, *how)),
        "gather_rows": (moved, partial(gather_rows, x, slots, K)),
        "spread_rows": (moved, partial(spread_rows, x, rows, None, R)),
        "spread_rows, weighed": (moved + weights.nbytes, partial(spread_rows, x, rows, weights, R)),
        "combine": (moved, partial(combine, o, rows, None)),
        "combine, weighed": (moved + weights.nbytes, partial(combine, o, rows, weights)),
        "row_dots": (moved + weights.nbytes, partial(row_dots, x, o, rows)),
        "route": (nbytes(logits, weights, choices), partial(route, logits, None, K, *how)),
        "expert_rows": (nbytes(choices, rows, slots), partial(expert_rows, choices, 0, E)),
        "route, expert_rows": (
            nbytes(logits, weights, choices, rows, slots),
            lambda: expert_rows(route(logits, None, K, *how)[1], 0, E),
        ),
    }


def normal(*shape: int) -> Tensor:
    """Return random numbers in bfloat16."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def nbytes(*tensors: Tensor) -> int:
    """Return the bytes of tensors together."""
    return sum(t.nbytes for t in tensors)


def bytes_per_us() -> float:
    """Measure the bytes that a copy of 1 GiB reads and writes in a microsecond."""
    x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.nbytes / do_bench(lambda: y.copy_(x), return_mode="median") / 1e3


def microseconds(call: Callable[[], object]) -> float:
    """Time replays of a graph of one call, between which the cache is cleared."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return 1e3 * do_bench(graph.replay, return_mode="median")


if __name__ == "__main__":
    main()
