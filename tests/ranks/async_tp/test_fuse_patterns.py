"""Each pattern of collective and matmul is fused or missed as it should, and gives what the graph gave before."""

import functools
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.support.collective_graphs import F8, around_the_pass, c10d, gather, group, scatter, tensor, traced
from tests.support.needs import SCALES_BY_ROW, slow
from tests.support.ranks import run_ranks

T = TypeVar("T")


def check(
    f: Callable, *inputs: Tensor, fused: bool | list[bool] = True, reason: str = "", matmuls: int = 1, tolerance=1e-12
):
    """Compare a graph before and after, and its report with what is expected."""
    gm = traced(f, *inputs)
    nodes = len(gm.graph.nodes)
    out = around_the_pass(gm)
    said = "\n".join(map(str, out.pairs)) + f"\n{out.graph}"
    verdicts = [pair.fused for pair in out.pairs]
    assert verdicts == (fused if isinstance(fused, list) else [fused]), said
    assert reason in "; ".join(pair.reason for pair in out.pairs), said
    if not reason:
        assert not any(pair.reason for pair in out.pairs), said
    if not any(verdicts):
        assert len(out.graph.nodes) == nodes, said
    if verdicts[0]:
        assert len(out.pairs[0].matmuls) == matmuls, said
    left = [n for n in out.graph.nodes if "_c10d_functional" in str(n.target) and "wait" not in str(n.target)]
    assert len(left) == verdicts.count(False), said
    truth, got = out.plain(*inputs), out.fused(*inputs)
    for t, g in zip(torch.utils._pytree.tree_leaves(truth), torch.utils._pytree.tree_leaves(got), strict=True):
        assert (t.shape, t.stride(), t.dtype) == (g.shape, g.stride(), g.dtype), said
        torch.testing.assert_close(g.double(), t.double(), rtol=tolerance, atol=tolerance, msg=lambda m: f"{m}\n{said}")


K, N = 16, 12


def all_on_two_ranks(*cases: T) -> tuple[T, ...]:
    """The cases; on more ranks the last alone, since every rank traces every graph for itself."""
    return cases if dist.get_world_size() == 2 else cases[-1:]


def gather_cases() -> None:
    w, v, bias = tensor(K, N, seed=1), tensor(K, N, seed=2), tensor(N, seed=3)
    n = dist.get_world_size()
    for spelling in ("split", "slices", "view", "bytes"):
        linear = functools.partial(lambda x, w, dim, how: gather(x, dim, how) @ w, how=spelling)
        for shape in all_on_two_ranks((6, K), (2, 3, 4, K), (2, 6, K)):
            for dim in range(len(shape)):
                wide = tensor(K * n if dim == len(shape) - 1 else K, N, seed=1)
                check(lambda x, w, d=dim, f=linear: f(x, w, d), tensor(*shape), wide)
        check(lambda x, w, f=linear: f(x, w, 1), tensor(1, 6, K), w)
        check(lambda x, w, f=linear: f(x, w, 1), tensor(1, 1, K), w)
        check(lambda x, w, f=linear: f(x, w, -2), tensor(2, 6, K), w)
    for batch in all_on_two_ranks(1, 3, 2):
        x = tensor(batch, 6, K)
        check(lambda x, w, b: F.linear(gather(x, 1), w, b), x, w.t(), bias)
        check(lambda x, w, b: F.linear(gather(x, 1), w, b), x, w.t().contiguous(), bias)
        check(lambda x, w, v, b: (F.linear(y := gather(x, 1), w, b), F.linear(y, v)), x, w.t(), v.t(), bias, matmuls=2)
        check(lambda x, w, v: (y := gather(x, 1), y @ w, y @ v), x, w, v, matmuls=2)
        check(lambda x, w: (y := gather(x, 1), y @ w, (y * 2).sum(), y.transpose(0, 1))[1:], x, w)
        check(lambda x, go: go.flatten(0, 1).t() @ gather(x, 1).flatten(0, 1), x, tensor(batch, 6 * n, N))
        check(lambda x, go: gather(x, 1).flatten(0, 1).t() @ go.flatten(0, 1), x, tensor(batch, 6 * n, N))
        # Others read the gathered tensor too: whole, in another order, in part.
        check(lambda x, go: (y := gather(x, 1), go.flatten(0, 1).t() @ y.flatten(0, 1), y * 2)[1:], x,
              tensor(batch, 6 * n, N))  # fmt: skip
        check(lambda x, w: (y := gather(x, 1), y @ w, y[:, 1:] * 2, y[:, :, ::2].sum())[1:], x, w)
    x = tensor(6, K)
    check(lambda x, w: gather(x, 1)[0] @ w, x[None], w)
    check(lambda x, w: (y := gather(x), y @ w, y[1:] * 2)[1:], x, w)
    check(lambda x, go: go @ gather(x), x, tensor(N, 6 * n))
    check(lambda x, go: go.t() @ gather(x), x, tensor(6 * n, N))
    check(lambda x, go: gather(x).t() @ go, x, tensor(6 * n, N))
    check(lambda x, go: go @ gather(x, 1), x, tensor(N, 6))
    check(lambda x, go: gather(x, 1).t() @ go, x, tensor(6, N))
    check(lambda w, x: x @ gather(w).t(), x, tensor(N, K))
    check(lambda w, x: x @ gather(w, 1).t(), x, tensor(N, K * n))
    check(lambda x, w: gather(x.t(), 1).t() @ w, x, w)
    check(lambda x, b, w: torch.addmm(b, gather(x), w), x, bias, w)
    check(lambda x, w: (y := c10d.all_gather_into_tensor(x, n, group()), c10d.wait_tensor(y) @ w), x, w)
    check(
        lambda x, w, go: (y := gather(x), y @ w, y.t() @ go)[1:], x, w, tensor(6 * n, N), reason="another form, left_t"
    )  # fmt: skip
    # What cannot be fused, and says why.
    missed = functools.partial(check, fused=False)
    missed(lambda x, w: gather(x).relu() @ w, x, w, reason="relu stands between it and mm")
    missed(lambda x: gather(x) * 2, x, reason="no matmul reads it, but mul")
    missed(lambda x: gather(x), x, reason="no matmul reads it, but the graph's result")
    missed(lambda x, w: torch.bmm(gather(x), w), tensor(2, 6, K), tensor(2 * n, K, N), reason="batches of matrices")
    missed(lambda x: (y := gather(x)) @ y.t(), x, reason="depends on the gathered tensor")
    missed(lambda x, w: (y := gather(x)) @ (w + y.sum()), x, w, reason="depends on the gathered tensor")
    missed(lambda x, w: torch.addmm((y := gather(x)).sum(0)[:N], y, w), x, w, reason="depends on the gathered tensor")
    missed(lambda x, w: gather(x)[: 6 * n - 1] @ w, x, w, reason="a part of the gathered tensor")
    missed(lambda x, w: gather(x, 1)[:, 0] @ w, tensor(2, 6, K), w, reason="a part of the gathered tensor")
    missed(lambda x, w, b: torch.addmm(b, gather(x), w, alpha=2.0), x, w, bias, reason="scales its terms")
    missed(lambda x, w, b: torch.addmm(b, gather(x), w), x, w, tensor(6 * n, N), reason="no bias")
    check(lambda x, go: go @ gather(x, 1).flatten(1), tensor(2, 3, 4), tensor(N, 2))
    missed(lambda x, go: go @ gather(x, 2).flatten(1), tensor(2, 3, 4), tensor(N, 2), reason="columns within others")
    missed(lambda x, w: (y := gather(x), w.mul_(1), y @ w)[2], x, w, reason="changed in place between the two")
    missed(lambda x: c10d.wait_tensor(c10d.all_reduce(x, "sum", group())), x, reason="no operator for all_reduce")
    # One consumer depends on the other's product: one is fused, and the graph stays in order.
    check(
        lambda x, w: (y := gather(x), a := y @ w, y @ (a.t() @ y).t())[2], x, w, reason="depends on the gathered tensor"
    )
    # A weight that is computed after the first product.
    check(lambda x, w, v: (y := gather(x), y @ w, y @ v.sin())[1:], x, w, v, matmuls=2)


@pytest.mark.parametrize("ranks", [2, *slow(4)])
def test_gathers(ranks, tmp_path):
    run_ranks(gather_cases, tmp_path, ranks)


def scatter_cases() -> None:
    n = dist.get_world_size()
    w, v, bias = tensor(K, 4 * n, seed=1), tensor(K, 4 * n, seed=2), tensor(4 * n, seed=3)
    for shape in ((4 * n, K), (2 * n, 4 * n, K), (1, 4 * n, K), (2, 4 * n, K), (3, 4 * n, K), (2, 2 * n, 2 * n, K)):
        for dim in range(len(shape)):
            if shape[dim] % n == 0:
                check(lambda x, w, d=dim: scatter(x @ w, d), tensor(*shape), w)
                check(lambda x, w, d=dim: scatter(F.linear(x, w), d), tensor(*shape), w.t().contiguous())
    for batch in all_on_two_ranks(1, 3, 2):
        x, y = tensor(batch, 2 * n, K), tensor(batch, 2 * n, K, seed=4)
        check(lambda x, w, b: scatter(F.linear(x, w, b), 1), x, w.t(), bias)
        check(lambda x, w, b: scatter(F.linear(x, w, b / n), 2), x, w.t(), bias)
        check(lambda x, w, b: scatter(x @ w + b, 1), x, w, bias)
        check(lambda x, y, w, v: scatter(x @ w + y @ v, 1), x, y, w, v, matmuls=2)
        check(lambda x, y, w, v: scatter((x @ w + y @ v) + y @ w, 1), x, y, w, v, matmuls=3)
        check(
            lambda x, y, w, v, b: scatter(F.linear(x, w, b) + F.linear(y, v, b), 1), x, y, w.t(), v.t(), bias, matmuls=2
        )
        check(lambda x, w: scatter(x @ w, 1, "avg"), x, w)
        # The product is a matrix by birth, and gets its dims afterwards.
        check(lambda x, w, s=(batch, 2 * n, 4 * n): scatter((x @ w).view(s), 1), x.flatten(0, 1), w)
        check(lambda x, w, s=(batch, 2 * n, 4 * n): scatter((x @ w).view(s).transpose(0, 1)), x.flatten(0, 1), w)
        # More products than the kernels sum: the narrow ones are put side by side.
        check(lambda x, y, w, v: scatter((x @ w + y @ v) + (y @ w + x @ v), 1), x, y, w, v, matmuls=4)
        check(lambda x, y, w, v, b: scatter(x @ w + y[..., :6] @ v[:6] + x[..., 3:] @ w[3:] + b, 1), x, y, w, v, bias,
              matmuls=3)  # fmt: skip
    x = tensor(2 * n, K)
    check(lambda x, w: scatter((x @ w)[0]), x[None], w)
    check(lambda x, w: scatter(torch.select_scatter(x.new_zeros(1, 2 * n, 4 * n), x @ w, 0, 0), 1), x, w)
    check(lambda x, w: scatter((x @ w).t()), x, w)
    check(lambda x, w: scatter(x @ w + x @ w), x, w, matmuls=2)
    check(lambda x, w: scatter((y := x @ w) + y), x, w, matmuls=2)
    check(lambda g, w: scatter(g.t() @ w), tensor(K, 2 * n), w)
    check(lambda x, w: (y := c10d.reduce_scatter_tensor(x @ w, "sum", n, group()), c10d.wait_tensor(y) * 2), x, w)
    check(lambda x, w, v: scatter(gather(x) @ w) @ v, tensor(2, K), w, tensor(4 * n, N),
          fused=[True, False], reason="its matmul is fused with an all-gather")  # fmt: skip
    missed = functools.partial(check, fused=False)
    y = tensor(4 * n, K)
    missed(lambda y, w: scatter((y @ w)[:n] + (y @ w.cos())[:n]), y, w, reason="do not lie alike")
    missed(lambda x, w: scatter(x @ w, 0, "max"), x, w, reason="reduces by 'max'")
    missed(lambda x, w: scatter(x @ w, 0, "min"), x, w, reason="reduces by 'min'")
    missed(lambda x, w: (y := x @ w, scatter(y), y.sum())[1:], x, w, reason="mm is read by sum_1 as well")
    missed(lambda x, w, v: (y := x @ w, scatter(y + x @ v), y.sum())[1:], x, w, v, reason="mm is read by sum_1 as well")
    missed(lambda x, w: (y := x @ w, scatter(y, 1), y)[1:], x, w, reason="mm is read by output as well")
    missed(lambda x, w: scatter((x @ w).relu()), x, w, reason="relu stands between")
    missed(lambda x, w: scatter((x @ w).float()), x, w, reason="stands between")
    missed(lambda x, w: scatter((x @ w) * 2), x, w, reason="mul stands between")
    missed(lambda x, w: scatter(x @ w + 1), x, w, reason="adds a number")
    missed(lambda x, w: scatter(x @ w + (x @ w).cos()), x, w, reason="cos stands between")
    missed(lambda x, w: scatter(torch.add(x @ w, x @ w, alpha=2)), x, w, reason="add stands between")
    missed(
        lambda x, w: scatter(x @ w + (x @ w).view(4 * n, 2 * n).t().reshape(2 * n, 4 * n)),
        x,
        w,
        reason="do not lie alike",
    )
    missed(lambda x, w: scatter(torch.bmm(x, w)), tensor(n, 3, K), tensor(n, K, N), reason="batches of matrices")
    missed(
        lambda x, w: scatter(F.pad(x @ w, (0, 0, 0, 1))),
        tensor(2 * n - 1, K),
        w,
        reason="constant_pad_nd stands between",
    )
    missed(lambda x, w: scatter((x @ w)[:n]), x, w, reason="a part of mm")
    missed(lambda x: scatter(x), x, reason="an input of the graph")
    missed(lambda x, w: scatter((x @ w).view(2 * n, 2, 2 * n).transpose(0, 1).reshape(4 * n, 2 * n)), x, w,
           reason="parts of the ranks") if n == 4 else None  # fmt: skip


def float8_cases() -> None:
    n = dist.get_world_size()
    check8 = functools.partial(check, tolerance=1e-5)
    f8 = functools.partial(tensor, dtype=F8)
    f32 = functools.partial(lambda *shape, **how: tensor(*shape, dtype=torch.float32, **how).abs())
    w, v, one, two = f8(N, K, seed=1).t(), f8(N, K, seed=2).t(), f32(seed=1, same=True), f32(seed=2)

    def mm(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, dtype=torch.float32, **more) -> Tensor:
        out = torch._scaled_mm(a.reshape(-1, K), b, sa.reshape(-1, 1) if sa.ndim else sa, sb, out_dtype=dtype, **more)
        return out.reshape(*a.shape[:-1], b.shape[1])

    for batch in (1, 2, 3):
        x, rows = f8(batch, 4, K), f32(batch, 4, 1, seed=3)
        check8(lambda x, w, a, b: mm(gather(x, 1), w, a, b), x, w, one, two)
        check8(lambda x, w, a, b: mm(gather(x, 1), w, a, b, torch.bfloat16), x, w, one, two, tolerance=0.01)
        check8(lambda x, w, a, b, c: mm(gather(x, 1), w, a, b, bias=c), x, w, one, two, f32(N))
        by_row = [True, True]
        check8(
            lambda x, w, a, b: mm(gather(x, 1), w, gather(a, 1), b),
            x,
            w,
            rows,
            f32(1, N),
            fused=by_row,
            reason="scales travel",
        )
        check8(
            lambda x, w, v, a, b: (y := gather(x, 1), s := gather(a, 1), mm(y, w, s, b), mm(y, v, s, b))[2:],
            x, w, v, rows, f32(1, N), fused=by_row, reason="scales travel", matmuls=2,
        )  # fmt: skip
        check8(
            lambda x, w, a, b: (s := gather(a, 1), mm(gather(x, 1), w, s, b), s.sum())[1:],
            x, w, rows, f32(1, N), fused=[False, True], reason="read otherwise too",
        )  # fmt: skip
        # Two consumers with scales of their own: the larger group is fused, and no scale is lost.
        check8(lambda x, w, v, a, b: (y := gather(x, 1), mm(y, w, a, b), mm(y, v, b, a))[1:], x, w, v, one, two,
               reason="in another form, left")  # fmt: skip
        check8(lambda x, w, a, b: mm(gather(x, 1), w, a, b), x, w, f32(batch, 4 * n, 1), f32(1, N), fused=False,
               reason="not all-gathered beside")  # fmt: skip
        # The same number of scales, in another order; or one column of a wider tensor of scales.
        check8(lambda x, w, a, b: mm(gather(x, 1), w, gather(a), b), x, w, f32(batch * 4, 1), f32(1, N),
               fused=[False, False], reason="not all-gathered beside") if batch > 1 else None  # fmt: skip
        check8(lambda x, w, a, b: mm(gather(x, 1), w, gather(a, 1)[..., 1:].contiguous(), b),
               x, w, f32(batch, 4, 2), f32(1, N), fused=[False, False], reason="neither lie apart")  # fmt: skip
        x, w8 = f8(batch, 4 * n, K), f8(4 * n, K, seed=1).t()
        rows, columns = f32(batch, 4 * n, 1, seed=3), f32(1, 4 * n)
        for dim in (1, 2):
            check8(lambda x, w, a, b, d=dim: scatter(mm(x, w, a, b), d), x, w8, one, two)
            check8(lambda x, w, a, b, d=dim: scatter(mm(x, w, a, b), d), x, w8, rows, columns)
        check8(lambda x, w, a, b: scatter(mm(x, w, a, b) + mm(x, w, b, a), 1), x, w8, one, two, matmuls=2)
        check8(lambda x, w, a, b: scatter((mm(x, w, a, b) + mm(x, w, b, a)) + (mm(x, w, a, a) + mm(x, w, b, b)), 1),
               x, w8, one, two, fused=False, reason="a sum of 4 scaled products")  # fmt: skip
        check8(lambda x, w, a, b, c: scatter(mm(x, w, a, b, bias=c), 1), x, w8, one, two, f32(4 * n), fused=False,
               reason="no bias in the product's dtype")  # fmt: skip
    # The gathered operand on the right: go @ G, and x @ G.t() with scales by row of G.
    x = f8(16, K)
    check8(lambda x, w, a, b: torch._scaled_mm(x, gather(w).t(), a, b, out_dtype=torch.float32), x, f8(8, K), one, two)
    check8(lambda x, w, a, b: torch._scaled_mm(x, gather(w).t(), a, gather(b).t(), out_dtype=torch.float32),
           x, f8(8, K), f32(16, 1), f32(8, 1), fused=[True, True], reason="scales travel")  # fmt: skip
    check8(lambda x, w, a, b: torch._scaled_mm(gather(x, 1), w, a, b, out_dtype=torch.float32),
           f8(16, K), f8(16, K * n).t(), f32(16, 1, same=True), f32(1, 16))  # fmt: skip
    check8(lambda x, w, a, b: torch._scaled_mm(gather(x), w, a, b, out_dtype=F8), x, f8(16, K).t(), one, two,
           fused=False, reason="into torch.float8_e4m3fn")  # fmt: skip
    check8(lambda x, w, a, b: torch._scaled_mm(gather(x), w, a, b, scale_result=b, out_dtype=torch.float32),
           x, f8(16, K).t(), one, two, fused=False, reason="scales its result")  # fmt: skip


@pytest.mark.parametrize("ranks", slow(2, 4))
def test_scatters(ranks, tmp_path):
    run_ranks(scatter_cases, tmp_path, ranks)


def test_an_average_does_not_overflow(tmp_path):
    def body() -> None:
        x, w = torch.full((4, 8), 5000.0, dtype=torch.float16), torch.ones(8, 3, dtype=torch.float16)
        out = around_the_pass(traced(lambda x, w: scatter(x @ w, 0, "avg"), x, w))
        assert [pair.fused for pair in out.pairs] == [True]
        result = out.fused(x, w)  # 40000, and the sum of two is more than float16 holds
        assert (result.dtype, result.tolist()) == (torch.float16, [[40000.0] * 3] * 2)

    run_ranks(body, tmp_path, 2)


@SCALES_BY_ROW
@pytest.mark.slow
def test_float8(tmp_path):
    run_ranks(float8_cases, tmp_path, 2)
