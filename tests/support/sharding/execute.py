"""Runs a planned graph on local tensors with explicit collectives, forward and backward, and counts them.

The slow, obvious executor: every move of the plan is one autograd function, every operator runs on this rank's parts.
It computes what the plan says and nothing else: a placement that is wrong gives wrong numbers, a collective that is
missing as well.
"""

import operator
from collections import Counter
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from titanlite.sharding.graph import Graph, tensor_inputs, values
from titanlite.sharding.op_rules import RESHAPES
from titanlite.sharding.plan import Move, Plan

aten = torch.ops.aten
_ops = torch.ops._c10d_functional
_TO_SHAPE = RESHAPES | {aten.expand.default}

Count = Counter[tuple[str, str, int]]
"""Collectives by (kind, direction, numbers of the whole tensor)."""


class Executor:
    """One rank of a planned graph.

    Attributes:
        executed: collectives as they ran.
    """

    def __init__(self, graph: Graph, plan: Plan, mesh: DeviceMesh) -> None:
        self.graph, self.plan = graph, plan
        self.group, self.rank = mesh.get_group().group_name, mesh.get_local_rank()
        self.executed: Count = Counter()

    def part(self, whole: Tensor, placement: Placement) -> Tensor:
        """This rank's part of a tensor that it has whole."""
        return whole.chunk(self.plan.ranks, placement.dim)[self.rank] if isinstance(placement, Shard) else whole

    def run(self, tensors: dict[str, Tensor]) -> list[Tensor]:
        """Compute the outputs' local parts of the local parts of parameters, buffers and inputs."""
        at: dict[Any, Any] = {}
        for node, name in self.graph.names.items():
            if node.op == "placeholder":
                gradient = self.plan.gradients.get(name)
                at[node] = _Moved.apply(tensors[name], self, gradient) if gradient else tensors[name]
        moved: dict[tuple[Any, Move], Tensor] = {}
        for node in self.graph.operators:
            step = self.plan.steps[self.graph.names[node]]
            arguments = []
            for source, move in zip(tensor_inputs(node), step.inputs, strict=True):
                if (source, move) not in moved:
                    is_piece = node.target is operator.getitem
                    moved[source, move] = at[source] if is_piece else _Moved.apply(at[source], self, move)
                arguments.append(moved[source, move])
            out = self._compute(node, arguments, step)
            at[node] = out if isinstance(out, tuple | list) else _Moved.apply(out, self, step.output)
        return [at[node] for node in self.graph.outputs]

    def _compute(self, node: Any, given: list[Tensor], step: Any) -> Any:
        """One operator on local tensors."""
        locals_ = iter(given)
        target, whole = node.target, values(node)[0]

        def local(argument: Any) -> Any:
            if isinstance(argument, torch.fx.Node):
                return next(locals_)
            if isinstance(argument, list | tuple):
                return type(argument)(local(a) for a in argument)
            return torch.device("cpu") if isinstance(argument, torch.device) else argument

        args, kwargs = local(node.args), {k: local(v) for k, v in node.kwargs.items()}
        if target in _TO_SHAPE:
            shape = self.part(whole, step.output.source).shape
            return args[0].expand(shape) if target is aten.expand.default else args[0].reshape(shape)
        if not given:  # every rank makes the whole, from one stream of random numbers, and keeps its part
            return self.part(target(*args, **kwargs), step.output.source)
        if target is aten.embedding.default:
            return self._embedding(args[0], args[1], step.inputs[0].target)
        return target(*args, **kwargs)

    def _embedding(self, table: Tensor, tokens: Tensor, placement: Placement) -> Tensor:
        local = tokens - (self.rank * table.shape[0] if placement == Shard(0) else 0)
        owned = (local >= 0) & (local < table.shape[0])
        return torch.nn.functional.embedding(torch.where(owned, local, 0), table) * owned[..., None]

    def collective(self, kind: str, x: Tensor, dim: int, to: int, direction: str) -> Tensor:
        """One real collective: from parts along `dim`, or sums, to parts along `to`."""
        size, group = self.plan.ranks, self.group
        self.executed[kind, direction, x.numel() * (1 if kind in ("reduce_scatter", "all_reduce") else size)] += 1
        if kind == "all_reduce":
            return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", group))
        if kind == "all_gather":
            rows = x.movedim(dim, 0).contiguous()
            return _ops.wait_tensor(_ops.all_gather_into_tensor(rows, size, group)).movedim(0, dim).contiguous()
        if kind == "reduce_scatter":
            rows = x.movedim(to, 0).contiguous()
            return _ops.wait_tensor(_ops.reduce_scatter_tensor(rows, "sum", size, group)).movedim(0, to).contiguous()
        assert kind == "all_to_all"
        n = x.shape[to] // size
        rows = x.movedim(to, 0).contiguous()
        parts = _ops.wait_tensor(_ops.all_to_all_single(rows, [n] * size, [n] * size, group)).chunk(size)
        return torch.cat([part.movedim(0, to) for part in parts], dim)


class _Moved(torch.autograd.Function):
    """A move and its transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, executor: Executor, move: Move) -> Tensor:
        ctx.executor, ctx.move = executor, move
        source, target = getattr(move.source, "dim", 0), getattr(move.target, "dim", 0)
        if move.forward:
            out = executor.collective(move.forward, x, source, target, "forward")
            return out / executor.plan.ranks if _is_mean(move) else out
        is_cut = move.source != move.target and isinstance(move.target, Shard)
        return executor.part(x, move.target).contiguous() if is_cut else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        executor, move = ctx.executor, ctx.move
        source, target = getattr(move.source, "dim", 0), getattr(move.target, "dim", 0)
        if move.backward:
            grad = executor.collective(move.backward, grad, target, source, "backward")
        elif move.source != move.target and isinstance(move.source, Shard):
            grad = executor.part(grad, move.source).contiguous()
        return grad / executor.plan.ranks if _is_mean(move) else grad, None, None


def _is_mean(move: Move) -> bool:
    return isinstance(move.source, Partial) and move.source.reduce_op == "avg"


def planned(plan: Plan) -> Count:
    """The collectives that a plan announces, as `Executor.executed` counts them."""
    found: Count = Counter()
    for move in plan.moves:
        for kind, direction in ((move.forward, "forward"), (move.backward, "backward")):
            if kind:
                found[kind, direction, prod(plan.tensors[move.tensor].shape)] += 1
    return found


def difference(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest element."""
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-300)).item() if b.numel() else 0.0


def compare_with_one_process(
    model: torch.nn.Module, inputs: list[Tensor], graph: Graph, plan: Plan, mesh: DeviceMesh
) -> None:
    """Run a plan on this rank and compare outputs, gradients and collectives with those of one process."""
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    given = iter(inputs)
    held = (name for node, name in graph.names.items() if node.op == "placeholder")
    wholes = {name: state[name] if name in state else next(given) for name in held}
    executor = Executor(graph, plan, mesh)
    parts = {}
    for name, whole in wholes.items():
        part = executor.part(whole.detach(), plan.tensors[name].placement).contiguous().clone()
        parts[name] = part.requires_grad_(whole.requires_grad)
    torch.manual_seed(1)
    expected = model(*inputs)
    expected = list(expected) if isinstance(expected, tuple) else [expected]
    torch.manual_seed(1)
    got = executor.run(parts)
    weights = [torch.randn(e.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) for e in expected]
    torch.autograd.backward(expected, weights)
    out_places = [plan.tensors[graph.names[node]].placement for node in graph.outputs]
    torch.autograd.backward(got, [executor.part(w, p) for w, p in zip(weights, out_places, strict=True)])
    for e, g, p in zip(expected, got, out_places, strict=True):
        assert difference(g, executor.part(e, p)) < 1e-13, difference(g, executor.part(e, p))
    for name, whole in wholes.items():
        if whole.requires_grad:
            part = executor.part(whole.grad, plan.tensors[name].placement)
            assert difference(parts[name].grad, part) < 1e-12, name
    assert executor.executed == planned(plan), (
        f"{executor.executed - planned(plan)} {planned(plan) - executor.executed}"
    )
    dist.barrier()
