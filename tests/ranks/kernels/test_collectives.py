"""Gather and scatter move and sum what they say, and are each other's transpose."""

import pytest
import torch
import torch.distributed as dist

from tests.support.numbers import normal
from tests.support.ranks import run_ranks, world_group
from titanlite.kernels.collectives import Group, gather_tokens, scatter_tokens
from titanlite.kernels.linear import FUSED_LINEAR, linear
from titanlite.models.layers import Linear
from titanlite.parallel.tensor import ColumnParallelLinear

M, D = 12, 5


def of_rank(rank: int, *shape: int) -> torch.Tensor:
    return normal(*shape, seed=rank, dtype=torch.float64)


@pytest.mark.parametrize("tp", [2, 4])
def test_values(tp, tmp_path):
    def body() -> None:
        group = world_group()
        gathered = gather_tokens(of_rank(group.rank, M // tp, D), group)
        assert torch.equal(gathered, torch.cat([of_rank(r, M // tp, D) for r in range(tp)]))
        scattered = scatter_tokens(of_rank(group.rank, M, D), group)
        total = torch.stack([of_rank(r, M, D) for r in range(tp)]).sum(0)
        torch.testing.assert_close(scattered, total.chunk(tp)[group.rank], rtol=1e-14, atol=1e-14)

    run_ranks(body, tmp_path, tp)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("op", [gather_tokens, scatter_tokens])
def test_backward_is_the_transpose(op, tp, tmp_path):
    # <A x, y> = <x, Aᵀ y>, over all ranks: each side is a sum of local dot products.
    rows_in, rows_out = (M // tp, M) if op is gather_tokens else (M, M // tp)

    def body() -> None:
        group = world_group()
        x = of_rank(group.rank, rows_in, D).requires_grad_()
        y = of_rank(100 + group.rank, rows_out, D)
        out = op(x, group)
        out.backward(y)
        sides = torch.stack(((out.detach() * y).sum(), (x.detach() * x.grad).sum()))
        dist.all_reduce(sides)
        torch.testing.assert_close(sides[0], sides[1], rtol=1e-13, atol=1e-13)

    run_ranks(body, tmp_path, tp)


def test_linear_layers_on_ranks_are_one_linear_layer(tmp_path):
    x, w_in, w_out = of_rank(0, M, 6), of_rank(1, 8, 6), of_rank(2, 6, 8)
    leaves = [t.clone().requires_grad_() for t in (x, w_in, w_out)]
    truth = leaves[0] @ leaves[1].T @ leaves[2].T
    truth.square().sum().backward()

    def body() -> None:
        group = world_group()
        parts = [x.chunk(2)[group.rank], w_in.chunk(2)[group.rank], w_out.chunk(2, dim=1)[group.rank]]
        mine = [p.clone().requires_grad_() for p in parts]
        out = linear(linear(mine[0], mine[1], gather=group), mine[2], scatter=group)
        out.square().sum().backward()
        wanted = [t.grad.chunk(2, dim)[group.rank] for t, dim in zip(leaves, (0, 0, 1), strict=True)]
        torch.testing.assert_close(out, truth.detach().chunk(2)[group.rank], rtol=1e-12, atol=1e-12)
        for got, want in zip(mine, wanted, strict=True):
            torch.testing.assert_close(got.grad, want, rtol=1e-12, atol=1e-12)

    run_ranks(body, tmp_path, 2)


@pytest.mark.parametrize("sides", [(), ("gather", "scatter")])
def test_what_cannot_be_fused_is_refused(sides: tuple[str, ...]):
    # It used to be dropped in silence: the scatter, or all of the fusing.
    group = Group("of nobody", 2, 0)
    with pytest.raises(ValueError, match=r"linear: fused with gather .*; want one of the two"):
        linear(of_rank(0, M, D), of_rank(1, 8, D), **dict.fromkeys(sides, group), fused=FUSED_LINEAR)


def test_an_arithmetic_of_its_own_is_not_replaced_by_fusing():
    layer = Linear(D, {"w": 8}, std=0.02)
    layer.__class__ = ColumnParallelLinear
    layer.group, layer.asynchronous = Group("of nobody", 2, 0), True  # type: ignore[assignment]
    assert layer.fused is not None  # type: ignore[attr-defined]
    layer.matmul = lambda x, w: x @ w.T
    assert layer.fused is None  # type: ignore[attr-defined]
    assert layer.unfused == "has an arithmetic of its own"  # type: ignore[attr-defined]
