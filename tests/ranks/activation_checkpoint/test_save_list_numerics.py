"""Recomputing changes nothing: the same loss and gradients as if everything were kept, bit by bit where torch allows.

Eager mode runs the same kernels twice, so that all is bitwise equal, and so do the graphs that the compiler makes (see
test_activation_cost.py for one rank's). Its code fuses what it recomputes anew and may round elsewhere, but what
attention's backward sees must be bitwise what its saved statistics are of.
"""

from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.held_for_backward import Compiled, build, stream
from tests.support.needs import DEVICES
from tests.support.ranks import run_ranks
from titanlite import recipes
from titanlite.config.recipe_schema import ModelDims
from titanlite.models.layers import Sequences

D, S, B = 64, 48, 2
SIZES = ModelDims("", 1, D, n_heads=4, n_kv_heads=2, ffn_dim=256, vocab_size=32, rope_theta=1e4, norm_eps=1e-5)
LISTS = recipes.names("activation_checkpoint")
ROUNDINGS = 2 * 11  # forward: norm, wqkv, rope, attention, wo, add, norm, w13, swiglu, w2, add; and backward of each


class AttentionBackward(TorchDispatchMode):
    """Keeps the arguments of attention's backward, by name, and what its forward makes of them."""

    supports_higher_order_operators = True  # recomputed attention is one: it restores the random generator

    def __init__(self) -> None:
        super().__init__()
        self.arguments: list[dict] = []
        self.forward: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::")  # a higher-order operator has no schema
        if name.startswith("_scaled_dot_product_") and name.endswith("_backward"):
            # Copies: compiled code writes its next result where an argument was.
            given = {
                a.name: v.clone() if isinstance(v, Tensor) else v
                for a, v in zip(func._schema.arguments, args, strict=False)
            }
            forward = getattr(torch.ops.aten, name.removesuffix("_backward")).default
            names = {a.name for a in forward._schema.arguments}
            again = {key: value for key, value in given.items() if key in names}
            if "compute_log_sumexp" in names:
                again["compute_log_sumexp"] = True
            self.arguments.append(given)
            self.forward.append(forward(**again)[:2])
        return func(*args, **(kwargs or {}))


def run(
    name: str,
    float8: str | None,
    compile: Callable[[nn.Module], object] | None = None,
    fused: bool = False,
    device: str = "cpu",
) -> tuple[list[Tensor], AttentionBackward]:
    """Output of the first block, gradients of its input and of its weights; and what attention's backward was given."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    model = build(SIZES, S, recipes.load("activation_checkpoint", name), float8, tokens=B * S, fused=fused)
    model.to(device)
    block, x = model.layers[0], stream(B * S // world, D, torch.bfloat16).detach().to(device).requires_grad_()
    if compile:
        compile(block)
    out = block(x, model.cos, model.sin, Sequences(model.seq_len))
    with AttentionBackward() as seen:
        out.float().square().mean().backward()
    return [out, *(t.grad for t in (x, *block.parameters()) if t.grad is not None)], seen


@pytest.fixture(scope="module")
def kept() -> Callable[[str | None, str], list[Tensor]]:
    """What is computed where everything is kept."""
    return cache(lambda float8, device: run("none", float8, device=device)[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("float8", [None, "tensorwise", "rowwise"])
@pytest.mark.parametrize("name", [name for name in LISTS if name != "none"])
def test_eager_is_bitwise_equal(name, float8, device, kept):
    for got, truth in zip(run(name, float8, device=device)[0], kept(float8, device), strict=True):
        assert torch.equal(got, truth)


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("float8", ["rowwise", "tensorwise"])
def test_float8_under_tensor_parallelism_is_bitwise_equal(float8, fused, tmp_path):
    def body() -> None:
        truth = run("none", float8, fused=fused)[0]
        for name in LISTS:
            for got, kept in zip(run(name, float8, fused=fused)[0], truth, strict=True):
                assert torch.equal(got, kept), name
        if fused:  # what is not differs from one rank's graphs by collectives alone
            truth, other = (run(name, float8, Compiled, fused)[0] for name in ("none", "balanced"))
            for got, kept in zip(other, truth, strict=True):
                assert torch.equal(got, kept)

    run_ranks(body, tmp_path)


# Half a minute of the C++ compiler. In each run of the tests test_layouts.py trains with code of its making, and the
# graphs that it is made of are bitwise equal in test_activation_cost.py.
@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["attention", "none", "full", "matmuls", "every_second_matmul"])
def test_compiled_rounds_no_more_than_each_operation_once(name, device, kept):
    got, seen = run(name, None, partial(nn.Module.compile, fullgraph=True, dynamic=False), device=device)
    for mine, truth in zip(got, kept(None, device), strict=True):
        difference = (mine.float() - truth.float()).norm()
        assert difference <= ROUNDINGS * torch.finfo(torch.bfloat16).eps / 2 * truth.float().norm()
    (given,), (again,) = seen.arguments, seen.forward
    assert torch.equal(again[0], given["out"])
    assert torch.equal(again[1], given["logsumexp"])
