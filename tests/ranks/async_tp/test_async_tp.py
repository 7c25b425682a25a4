"""The pass on models of DTensors: all collectives of a block are fused, training is the same, strict mode is strict."""

import re
from collections.abc import Callable
from threading import Thread

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    parallelize_module,
)
from torch.fx import GraphModule
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad

from tests.support.collective_graphs import around_the_pass, c10d, gather, group, scatter, tensor, traced
from tests.support.dtensor_llama import Block, parallel, recomputed
from tests.support.needs import DOUBLE_ATTENTION, slow
from tests.support.ranks import run_ranks
from titanlite.async_tp.apply import Pair, check_fused, fuse_collective_matmuls, fusing
from titanlite.errors import StrictError
from titanlite.kernels.lowering import Lowered, lowered


def local(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


class Compiler:
    """AOTAutograd as inductor calls it, without code generation; each graph runs with and without the pass."""

    def __init__(self) -> None:
        self.report: list[Pair] = []
        self.fused = False
        self.backend = aot_autograd(
            fw_compiler=self._compile,
            bw_compiler=self._compile,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )

    def _compile(self, gm: GraphModule, _: object) -> Callable:
        both = around_the_pass(gm)
        self.report += both.pairs
        return make_boxed_func(lambda *inputs: (both.fused if self.fused else both.plain)(*inputs))


def runs_of(model: nn.Module, batch: int, tokens: int, dtype: torch.dtype) -> tuple[list[list[Tensor]], list[Pair]]:
    """Output, gradient of the input and of all parameters, without and with the pass; and its report."""
    torch._dynamo.reset()
    compiler = Compiler()
    compiled, runs = torch.compile(model, backend=compiler.backend, fullgraph=True), []
    for compiler.fused in (False, True):
        x = tensor(batch, tokens, 16, dtype=dtype).requires_grad_()
        out = local(compiled(x))
        model.zero_grad()
        out.square().sum().backward()
        runs.append([out.detach(), x.grad, *(local(p.grad) for p in model.parameters())])  # type: ignore[arg-type]
    return runs, compiler.report


def block(bias: bool, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return parallel(Block(bias=bias).to(dtype))


def check(model: nn.Module, batch: int, dtype: torch.dtype, collectives: int) -> None:
    """The model computes the same with all of its collectives fused."""
    (truth, got), report = runs_of(model, batch, 4, dtype)
    assert [pair.fused for pair in report] == [True] * collectives, "\n".join(map(str, report))
    # Products are summed in one accumulator instead of being rounded each and after each addition: 5 roundings for
    # q, k, v and 3 for gate and up, of eps/2 each.
    for g, t in zip(got, truth, strict=True):
        assert (g - t).double().norm() <= 4 * torch.finfo(dtype).eps * t.double().norm()


@pytest.mark.parametrize(
    ("bias", "dtype", "batches"),
    [(True, torch.bfloat16, (1,)), *slow((True, torch.bfloat16, (2, 3)), (False, torch.float32, (2,)))],
    ids=["bias-bfloat16-1", "bias-bfloat16", "plain-float32"],
)
def test_block_of_dtensors(bias, dtype, batches, tmp_path):
    def body() -> None:
        for batch in batches:
            check(block(bias, dtype), batch, dtype, 8)

    run_ranks(body, tmp_path, 2)


# Of a batch of two. Backward gathers for wq, wk, wv, w1 and w3 again, and if it does not keep what was reduced,
# wo's too.
@pytest.mark.parametrize(("per_op", "collectives"), slow((True, 8 + 2), (False, 8 + 3)), ids=["per-op", "full"])
def test_recomputed_block(per_op, collectives, tmp_path):
    def body() -> None:
        # torch 2.13 on a CPU mixes up what a graph with DTensors keeps for backward if it recomputes an operation that
        # could have drawn random numbers, such as attention in one kernel.
        with sdpa_kernel(SDPBackend.MATH):
            check(recomputed(block(True, torch.bfloat16), per_op), 2, torch.bfloat16, collectives)

    run_ranks(body, tmp_path, 2)


def test_a_weight_of_which_the_last_rank_has_nothing(tmp_path):
    def body() -> None:
        torch.manual_seed(0)
        head = nn.Sequential(nn.Linear(16, 4, bias=False)).double()
        style = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        model = parallelize_module(head, init_device_mesh("cpu", (3,)), {"0": style})
        assert model[0].weight.to_local().shape[0] == (2, 2, 0)[dist.get_rank()]  # type: ignore[operator]
        (truth, got), report = runs_of(model, 2, 6, torch.float64)
        assert [(pair.collective, pair.fused) for pair in report if pair.matmuls] == [
            ("all_gather_into_tensor", True),
            ("reduce_scatter_tensor", True),
        ], "\n".join(map(str, report))
        for g, t in zip(got, truth, strict=True):
            torch.testing.assert_close(g, t, rtol=1e-12, atol=1e-12)

    run_ranks(body, tmp_path, 3)


@DOUBLE_ATTENTION
@pytest.mark.slow
def test_training_with_inductor(tmp_path):
    def losses(model: nn.Module, run: Callable) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        out = []
        for _ in range(5):
            x, y = (tensor(2, 4, 16, seed=i) for i in range(2))
            loss = (local(run(x)) - y).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            out.append(loss.item())
        return out

    def model() -> Block:
        torch.manual_seed(0)
        return parallel(Block(bias=True).double())

    def body() -> None:
        plain = losses(eager := model(), eager)
        report: list[Pair] = []
        fused = losses(compiled := model(), torch.compile(compiled, fullgraph=True, options=fusing(report)))
        with pytest.raises(StrictError, match="8 of 8 collectives fused") as error:
            check_fused(report)
        assert "a CPU computes their definitions" in str(error.value)
        assert [pair.fused for pair in report] == [True] * 8, "\n".join(map(str, report))
        assert fused[0] > fused[-1]
        torch.testing.assert_close(torch.tensor(fused), torch.tensor(plain), rtol=1e-12, atol=1e-12)

    run_ranks(body, tmp_path, 2, timeout_s=200)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w(x)


def graphs_of_two_layers() -> None:
    plan, mesh = {"w": ColwiseParallel(input_layouts=Shard(0))}, init_device_mesh("cpu", (2,))
    layer, next_layer = (parallelize_module(Layer().double(), mesh, plan) for _ in range(2))
    report: list[Pair] = []

    def said() -> list[str]:
        """Lines of the graphs that were compiled since the last call."""
        lines = list(map(str, report))
        report.clear()
        return lines

    gather, scatter = "fused  all_gather_into_tensor with mm", "fused  reduce_scatter_tensor with mm_2"
    plain, fused = (torch.compile(layer, options=o, dynamic=False) for o in ({}, fusing(report)))
    for tokens in (4, 6):
        x, y = (tensor(tokens, 16).requires_grad_() for _ in range(2))
        plain(x).square().sum().backward()  # compiled before, and in inductor's cache
        assert said() == []
        out = fused(y).square().sum()
        assert said() == [gather]
        backward = Thread(target=out.backward)  # as autograd does on GPUs
        backward.start()
        backward.join()
        assert scatter in said()
        torch.testing.assert_close(y.grad, x.grad, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        fused(tensor(4, 16))
    assert said() == [gather]
    # As other layers of a model do, the next has the graphs of the first.
    torch.compile(next_layer, options=fusing(report), dynamic=False)(tensor(4, 16).requires_grad_())
    assert said() == []


@pytest.mark.slow
def test_graphs_are_fused_whenever_they_are_compiled(tmp_path):
    run_ranks(graphs_of_two_layers, tmp_path, 2)


def strict_cases() -> None:
    n, x, w = dist.get_world_size(), tensor(6, 16), tensor(16, 12)
    kernel = Lowered("all_gather_matmul", "6×16, 16×12")

    def error(f: Callable, *ran: Lowered) -> str:
        """What strict mode says of a compiled function whose operators ran so."""
        lowered.clear()
        lowered.update(ran)
        try:
            check_fused(fuse_collective_matmuls(traced(f, x, w).graph))
        except StrictError as problem:
            return str(problem)
        return ""

    def gather_of(ranks: int) -> Callable:
        return lambda x, w: c10d.wait_tensor(c10d.all_gather_into_tensor(x, ranks, group())) @ w

    def product(x: Tensor, w: Tensor) -> Tensor:
        return gather(x) @ w

    # Nothing to say: all fused, by kernels; and collectives that nobody could fuse beside them.
    assert error(product, kernel) == ""
    assert error(lambda x, w: (product(x, w), gather(x) * 2), kernel) == ""
    assert error(lambda x, w: (product(x, w), scatter(x * 2), scatter(x @ w, 0, "max")), kernel) == ""
    assert error(lambda x, w: (product(x, w), c10d.wait_tensor(c10d.all_reduce(x, "sum", group()))), kernel) == ""
    assert error(lambda x, w: (product(x, w), gather_of(1)(x, w)), kernel) == ""
    assert error(lambda x, w: scatter(gather(x) @ w), kernel) == ""  # one matmul between two
    # A gathered tensor that says which rows of another to take.
    assert error(lambda x, w: (product(x, w), x[gather(torch.arange(6))] @ w), kernel) == ""
    # A pair that is missed.
    both = error(lambda x, w: (product(x, w), gather(x)[: 6 * n - 1] @ w), kernel)
    assert "1 of 2 collectives fused" in both
    assert "all_gather_into_tensor_1: mm_1 reads a part of the gathered tensor" in both
    assert "all_gather_into_tensor_1: a group of 9 ranks; want 2 to 8" in error(
        lambda x, w: (product(x, w), gather_of(9)(x, w)), kernel
    )
    read_twice = error(lambda x, w: (scatter(y := x @ w), y * 2), kernel)
    assert "reduce_scatter_tensor: mm is read by mul as well" in read_twice
    for stands, between in (
        ("convert_element_type", lambda x, w: gather(x).half() @ w.half()),
        ("div", lambda x, w: scatter((x @ w) / n)),
        ("constant_pad_nd", lambda x, w: scatter(pad((x @ w)[: 6 - n], (0, 0, 0, n)))),
        ("constant_pad_nd", lambda x, w: scatter(torch.cat([(y := (x @ w).split(4))[0], pad(y[1], (0, 0, 0, 2))]))),
        ("mul", lambda x, w: torch.cat((gather(x) * 2).split(5)) @ w),
        ("index", lambda x, w: gather(x)[torch.arange(4)] @ w),
        ("select_scatter", lambda x, w: scatter(torch.select_scatter(x.new_zeros(2 * n, 6, 12), x @ w, 0, 1))),
    ):
        missed = error(lambda x, w, f=between: (product(x, w), f(x, w)), kernel)
        assert f"{stands} stands between it and mm_1" in missed
    # An operator without its kernel.
    assert "no operator: has run on a GPU; a CPU computes their definitions" in error(product)
    for reason in ("no peer access between the GPUs of rank 0", "torch.float32 operands; the kernels take bfloat16"):
        failed = error(product, kernel, kernel._replace(reason=reason))
        assert f"all_gather_matmul 6×16, 16×12: {reason}" in failed
        assert error(product, kernel, kernel._replace(reason=reason, expected=True)) == ""
    # None fused.
    assert "no collective: was found in any graph that was compiled" in error(lambda x, w: x @ w, kernel)
    alone = error(lambda x, w: gather(x).relu() @ w, kernel)
    assert "a pair fused" in alone
    assert "all_gather_into_tensor: relu stands between it and mm" in alone


def test_strict(tmp_path):
    run_ranks(strict_cases, tmp_path, 2)


def gathers_outside_of_graphs() -> None:
    whole = functional.all_gather_single if hasattr(functional, "all_gather_single") else functional.all_gather_tensor
    # As torch 2.11 does, which does not look into what makes one tensor of what was gathered along another dim than 0.
    functional._maybe_view_chunk_cat = torch.compiler.disable(functional._maybe_view_chunk_cat)
    w, kernel = tensor(16, 8), Lowered("all_gather_matmul", "2×4×16, 16×8")

    def product(x: Tensor, dim: int) -> Tensor:
        return whole(x, dim, group()) @ w

    def products(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        return whole(x, 0, group()) @ w, whole(x, dim, group()) @ w

    for f, dim, fused, found in (
        (product, 0, 1, ""),
        (products, 1, 1, "1 of 1 collectives fused"),
        (product, 1, 0, "no collective: was found in any graph"),
    ):
        torch._dynamo.reset()
        report: list[Pair] = []
        with torch.no_grad():
            torch.compile(f, options=fusing(report), dynamic=False)(tensor(2, 4, 16), dim)
        assert [pair.fused for pair in report] == [True] * fused, report
        lowered.update([kernel])
        if not found:
            check_fused(report)
            continue
        with pytest.raises(StrictError) as error:
            check_fused(report)
        said, here = str(error.value), rf"{re.escape(__file__)}:\d+, in "
        assert found in said
        assert re.search(rf"{whole.__name__}: torch broke off the graph and ran it outside, {here}", said), said


@pytest.mark.slow
def test_a_gather_that_torch_runs_outside_of_its_graphs(tmp_path):
    run_ranks(gathers_outside_of_graphs, tmp_path, 2)


def test_a_graph_from_the_cache_was_compiled_by_this_pass():
    assert fusing()["post_grad_custom_pre_pass"].uuid()
    recorded = fusing([])
    assert recorded["post_grad_custom_pre_pass"].uuid() is None  # a graph from the cache would be missing in the report
    with torch._inductor.config.patch(recorded), pytest.raises(ValueError, match=r"_pre_pass is .*; want none"):
        fusing()
