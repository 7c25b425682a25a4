"""What holds of every operator: what a compiler is told of its results, how work may be split, layouts, repeated bits.

One table has calls of the operators; values are held against definitions in the file of each.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.support.needs import DEVICES
from tests.support.numbers import normal, some_choices
from titanlite.kernels import (  # noqa: F401
    block_scaled_matmul,
    float8_cast,
    grouped_matmul,
    norm_rope,
    rms_norm,
    router_losses,
    swiglu,
)
from titanlite.kernels.operators import SPLITS
from titanlite.kernels.rope import rope_table
from titanlite.kernels.routing import SCORES, expert_rows, route

OPS = torch.ops.titanlite
BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
EPS = 1e-5


def norm_gradients(shape: tuple[int, ...] = (24, 48), device: str = "cpu", of_stream: bool = True) -> tuple:
    x, grad, weight = (normal(*s, seed=i, dtype=BF16, device=device) for i, s in enumerate((shape, shape, shape[-1:])))
    return grad, x, weight, x.float().square().mean(-1, keepdim=True), x if of_stream else None, EPS


def of_heads(
    sizes: tuple[int, ...] = (18, 9, 2, 3, 16), device: str = "cpu"
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Gradients of queries, keys and values; a projection and two weights; angles."""
    M, S, K, R, E = sizes
    draw = partial(normal, dtype=BF16, device=device)
    upstream = [draw(M, n, E, seed=n) for n in (K * R, K, K)]
    return (
        upstream,
        [draw(M, K * (R + 2) * E), draw(E), draw(E, seed=1)],
        [t.to(device) for t in rope_table(S, E, 1e4, None)],
    )


def routing_calls(device: str) -> dict[str, list[tuple]]:
    rows, slots, _ = (t.to(device) for t in expert_rows(some_choices(6, 8, 2), 0, 8))
    leaf = lambda *shape, seed=0: normal(*shape, seed=seed, device=device).requires_grad_()  # noqa: E731
    x, o, router, logits, weights = leaf(6, 16), leaf(12, 16), leaf(8, 16), leaf(6, 8), leaf(6, 2)
    choices, bias = route(logits, None, 2, "softmax", False, 1.0)[1], torch.ones(8, device=device)
    return {
        "router_logits": [(x, router)],
        "router_logits_grad": [(logits.detach(), x.detach(), router.detach())],
        "route": [
            *((logits, None, 2, score, normalised, 2.0) for score, normalised in product(SCORES, (False, True))),
            (logits, bias, 2, "sigmoid", True, 2.0),
        ],
        "route_grad": [(weights.detach(), logits.detach(), choices, "softmax", False, 1.0)],
        "expert_rows": [(choices, 0, 8)],
        "count_choices": [(choices, torch.ones(6, dtype=torch.bool, device=device), 8)],
        "expert_rows_for_host": [(choices, 0, 8)],
        "gather_rows": [(x, slots, 2)],
        "combine": [(o, rows, given) for given in (weights, None)],
        "spread_rows": [(x, rows, given, 12) for given in (weights, None)],
        "row_dots": [(x.detach(), o.detach(), rows)],
    }


def on_any_device(device: str) -> dict[str, list[tuple]]:
    upstream, projection, angles = of_heads(device=device)
    return {
        "rms_norm_grad": [norm_gradients(device=device, of_stream=of_stream) for of_stream in (False, True)],
        "rotated_heads_grad": [(*upstream, *angles)],
        "norm_rope": [(*projection, *angles, 3, EPS)],
        "norm_rope_grad": [(*upstream, *projection, *angles, 3, EPS)],
        **routing_calls(device),
    }


def on_cpus() -> dict[str, list[tuple]]:
    x, grad, gate = (normal(64, n, dtype=BF16) for n in (48, 256, 512))
    blocks, scales = normal(256, 128, dtype=BF16), torch.ones(2, 1)
    return {
        "swiglu_grad": [(grad, gate)],
        "swiglu_cast": [(gate, by_row, E4M3, True) for by_row in (True, False)],
        "swiglu_grad_cast": [(grad, gate, by_row, E5M2, E4M3, True) for by_row in (True, False)],
        "cast_transpose": [(x, torch.ones(64, 1), True, E4M3, True)],
        "transpose": [(x.to(E4M3),)],
        "cast_rows": [(x, E4M3)],
        "cast_into": [(x, scale, torch.zeros(x.shape).to(E4M3)) for scale in (None, torch.ones(()))],
        "cast_blocks": [(blocks, *rows, E4M3, True) for rows in ((1, 1), (128, 0), (0, 128))],
        "block_scaled_matmul": [(blocks.to(E4M3), scales, blocks.to(E4M3), torch.ones(256, 1), BF16)],
    }


@cache
def calls(device: str) -> dict[str, list[tuple]]:
    """Arguments of calls, by the operator's name."""
    return on_any_device(device) | (on_cpus() if device == "cpu" else {})


ON_BOTH = [(name, "cpu") for name in calls("cpu")]
ON_BOTH += [pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in on_any_device("cpu")]


@pytest.mark.parametrize(("name", "device"), ON_BOTH)
def test_results_are_what_a_compiler_is_told(name: str, device: str) -> None:
    for given in calls(device)[name]:
        of_float8 = any(a in (E4M3, E5M2) or getattr(a, "dtype", None) in (E4M3, E5M2) for a in given)
        # The other checks compute with results, which float8 on CPUs does not.
        only = {"test_utils": "test_faketensor"} if of_float8 else {}
        torch.library.opcheck(getattr(OPS, name).default, given, **only)


SPLIT = [name for name in calls("cpu") if getattr(OPS, name).default in SPLITS]


@pytest.mark.parametrize("name", SPLIT)
def test_ranks_may_share_the_work_as_the_rules_say(name: str) -> None:
    op, tried = getattr(OPS, name).default, set()
    for given, split in product(calls("cpu")[name], SPLITS[op]):
        tensors = [a.detach() for a in given if isinstance(a, Tensor)]
        if len(tensors) == len(split.inputs):
            parts = zip(*(_halves(t, d) for t, d in zip(tensors, split.inputs, strict=True)), strict=True)
            found = [op(*_in_place_of_tensors(given, part)) for part in parts]
            for whole, *halves in zip(*map(_several, (op(*given), *found)), strict=True):
                assert torch.equal(torch.cat(halves, split.output), whole), split
            tried.add(split)
    assert tried == {*SPLITS[op]}


def _halves(t: Tensor, dim: int | None) -> tuple[Tensor, ...]:
    return (t, t) if dim is None else t.chunk(2, dim)


def _in_place_of_tensors(arguments: tuple[object, ...], tensors: tuple[Tensor, ...]) -> list[object]:
    left = iter(tensors)
    return [next(left) if isinstance(a, Tensor) else a for a in arguments]


def _several(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def turned(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def apart(x: Tensor) -> Tensor:
    """The same numbers, each beside one of another tensor."""
    return torch.stack((x, x), dim=-1)[..., 0]


def lying_otherwise(name: str, device: str) -> Iterator[tuple[tuple, tuple]]:
    """Give arguments, and the same of which some lie otherwise in memory."""
    if name == "rms_norm_grad":
        grad, x, weight, mean, rest, eps = given = norm_gradients(device=device)
        yield given, (turned(grad), x, weight, mean, turned(rest), eps)
        yield given, (grad, turned(x), apart(weight), mean, rest, eps)
        return
    upstream, projection, angles = of_heads((24, 12, 2, 2, 32), device)
    more = (*projection, *angles, 2, EPS) if name == "norm_rope_grad" else (*angles,)
    for lies in ((1, 0, 2), (2, 1, 0)):  # as attention gives them: heads outermost, or a head's numbers apart
        back = [lies.index(n) for n in range(3)]
        yield (*upstream, *more), (*(x.permute(lies).contiguous().permute(back) for x in upstream), *more)
    if name == "rotated_heads_grad":
        yield (*upstream, *more), (*upstream, *map(apart, angles))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["rms_norm_grad", "rotated_heads_grad", "norm_rope_grad"])
def test_operands_that_lie_otherwise_change_no_bit(name: str, device: str) -> None:
    op = getattr(OPS, name)
    for given, otherwise in lying_otherwise(name, device):
        pairs = zip(_several(op(*given)), _several(op(*otherwise)), strict=True)
        assert all(torch.equal(wanted, got) for wanted, got in pairs)


LARGE: dict[str, Callable[[], tuple]] = {
    "rms_norm_grad": lambda: norm_gradients((40_000, 1152), "cuda"),
    "norm_rope_grad": lambda: (*(of := of_heads((40_000, 8000, 2, 2, 128), "cuda"))[0], *of[1], *of[2], 2, EPS),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", LARGE)
def test_two_runs_give_the_same_bits(name: str) -> None:
    given = LARGE[name]()
    first, second = (getattr(OPS, name)(*given) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("router_logits", 2 * 6 * 16 * 8),
        ("router_logits_grad", 4 * 6 * 16 * 8),
        ("block_scaled_matmul", 2 * 256**2 * 128),
    ],
)
def test_operations_are_counted(name: str, flops: int) -> None:
    with FlopCounterMode(display=False) as counter:
        getattr(OPS, name)(*calls("cpu")[name][0])
    assert counter.get_total_flops() == flops


@pytest.mark.parametrize(
    ("name", "shapes", "wanted"),
    [
        ("grouped_matmul", ((8, 6), (3, 5, 6)), (8, 5)),
        ("grouped_weight_gradient", ((8, 6), (8, 6)), (3, 6, 6)),
    ],
)
def test_shapes_are_known_without_numbers(name: str, shapes: tuple, wanted: tuple) -> None:
    offsets = torch.empty(4, dtype=torch.int32, device="meta")
    assert getattr(OPS, name)(*(torch.empty(s, device="meta") for s in shapes), offsets).shape == wanted
