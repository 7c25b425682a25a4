"""The pass where it is meant to be used: on a block of DTensors, compiled by inductor, on GPUs.

The truth is the same block compiled without the pass. Both are in bfloat16, and differ by roundings.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.gpu.ranks_on_gpus import run_on_gpus
from tests.ranks.parallel.test_async_tensor_parallel import allowed, assert_same
from tests.support.collective_graphs import tensor
from tests.support.dtensor_llama import Block, parallel, recomputed
from titanlite.async_tp.apply import Pair, check_fused, fusing
from titanlite.errors import StrictError
from titanlite.kernels.lowering import lowered

DTYPE = torch.bfloat16
BATCH, STEPS = 2, 5


class Sizes(NamedTuple):
    """Of a block."""

    width: int
    head_width: int
    ffn_width: int


SIZES = {"cpu": Sizes(64, 8, 128), "cuda": Sizes(1024, 64, 4096)}
TOKENS = {"cpu": 16, "cuda": 512}
LR = {"cpu": 2.0, "cuda": 80.0}

# How the block is recomputed, and how many collectives it then has: see test_async_tp.py.
CASES: dict[str, tuple[Callable[[nn.Module], nn.Module], int]] = {
    "none": (lambda block: block, 8),
    "full": (recomputed, 8 + 3),
    "per op": (partial(recomputed, per_op=True), 8 + 2),
}


class Ran(NamedTuple):
    """What a block computed."""

    results: dict[str, Tensor]  # output and gradients
    losses: list[float]  # of some steps
    updates: list[float]  # by how much each of them moved the parameters, as a part of their norm


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def norm(tensors: Sequence[Tensor]) -> float:
    return math.hypot(*(whole(t.detach()).float().norm().item() for t in tensors))


def run(device: str, wrap: Callable[[nn.Module], nn.Module], options: dict[str, Any] | None = None) -> Ran:
    """Gradients of an output, then some steps that make it small."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = wrap(parallel(Block(*SIZES[device], bias=True).to(device, DTYPE)))
    compiled = torch.compile(model, fullgraph=True, dynamic=False, options=options)
    shape = BATCH, TOKENS[device] // dist.get_world_size(), SIZES[device].width
    x, upstream = (tensor(*shape, seed=i, dtype=DTYPE).to(device) for i in range(2))
    x.requires_grad_()
    out = compiled(x)
    out.backward(upstream)
    results = {"output": out.detach(), "input": x.grad, **{name: p.grad for name, p in model.named_parameters()}}
    results = {name: whole(t) for name, t in results.items() if t is not None}
    x.grad = None  # else steps add to it
    parameters = list(model.parameters())
    optimizer, losses, updates = torch.optim.SGD(parameters, LR[device]), [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = compiled(x).float().square().mean() / dist.get_world_size()
        loss.backward()
        losses.append(loss.item())
        updates.append(LR[device] * norm([p.grad for p in parameters if p.grad is not None]) / norm(parameters))
        optimizer.step()
    return Ran(results, losses, updates)


def allowed_loss(step: int) -> float:
    """How far the losses of two runs may be apart, as a part of the loss.

    The output errs as in `allowed`, through the four pairs of forward. Each step before rounds the weights of a pair
    again, and what it adds to them differs between runs by less than that, as long as it is a small part of them. A
    mean square differs by twice the relative error, and its square.
    """
    runs, pairs, roundings = 2, 4, 4 + 2 * step
    error = math.sqrt(runs * pairs * roundings) * torch.finfo(DTYPE).eps / 2
    return 2 * error + error**2


def body(device: str) -> None:
    # Attention in one kernel cannot be recomputed on a CPU: see test_async_tp.py.
    with sdpa_kernel(SDPBackend.MATH) if device == "cpu" else nullcontext():
        plain = run(device, CASES["none"][0])
        assert not lowered
        # Had half of a gradient been lost, that would be more than is allowed.
        assert plain.losses[-1] < plain.losses[0] * (1 - 2 * allowed_loss(STEPS - 1)), plain.losses
        # Gradients differ by what `allowed` says, and what they add to the weights by less than a rounding.
        assert max(plain.updates) * allowed(DTYPE, pairs=8) < torch.finfo(DTYPE).eps / 2, plain.updates
        for name, (wrap, collectives) in CASES.items():
            report: list[Pair] = []
            fused = run(device, wrap, fusing(report))
            on_cpu = pytest.raises(StrictError, match="has run on a GPU; a CPU computes their definitions")
            with nullcontext() if device == "cuda" else on_cpu:
                check_fused(report)
            assert [pair.fused for pair in report] == [True] * collectives, "\n".join([name, *map(str, report)])
            assert_same(fused.results, plain.results, allowed(DTYPE, pairs=8))
            for step, (got, wanted) in enumerate(zip(fused.losses, plain.losses, strict=True)):
                assert abs(got - wanted) <= allowed_loss(step) * wanted, (name, step, got, wanted)
    assert bool(lowered) == (device == "cuda")
    assert not {how.reason for how in lowered if how.reason}


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_on_gpus(tmp_path):
    run_on_gpus(body, tmp_path)
