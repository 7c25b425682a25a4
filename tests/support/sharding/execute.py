"""Runs a planned graph on local tensors with explicit collectives, forward and backward, and counts them.

The slow, obvious executor: every move of the plan is one autograd function, every operator runs on this rank's parts.
It computes what the plan says and nothing else: a placement that is wrong gives wrong numbers, a collective that is
missing as well.
"""

import math
import operator
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Shard

from titanlite.sharding.collectives import Hop, hops
from titanlite.sharding.graph import Graph, tensor_inputs, values
from titanlite.sharding.op_rules import RESHAPES
from titanlite.sharding.plan import Move, Placements, Plan, local_shape

aten = torch.ops.aten
_ops = torch.ops._c10d_functional
_TO_SHAPE = RESHAPES | {aten.expand.default}


class Executor:
    """One rank of a planned graph.

    Attributes:
        executed: collectives by (kind, direction, axis, wire bytes), as they ran.
    """

    def __init__(self, graph: Graph, plan: Plan, mesh: DeviceMesh) -> None:
        self.graph, self.plan, self.mesh = graph, plan, mesh
        self.sizes = tuple(plan.axes.values())
        self.executed = Counter[tuple[str, str, str, int]]()

    def part(self, whole: Tensor, placements: Placements) -> Tensor:
        """This rank's part of a tensor that it has whole."""
        for axis, placement in enumerate(placements):
            if isinstance(placement, Shard):
                rank = self.mesh.get_local_rank(axis)
                whole = whole.chunk(self.sizes[axis], placement.dim)[rank]
        return whole

    def run(self, tensors: dict[str, Tensor]) -> list[Tensor]:
        """Compute the outputs' local parts of the local parts of parameters, buffers and inputs."""
        at: dict[Any, Any] = {}
        for node, name in self.graph.names.items():
            if node.op == "placeholder":
                at[node] = tensors[name]
                if name in self.plan.gradients:
                    at[node] = self._move(at[node], self.plan.gradients[name], tuple(node.meta["val"].shape))
        moved: dict[tuple[Any, Move], Tensor] = {}
        for node in self.graph.operators:
            step = self.plan.steps[self.graph.names[node]]
            arguments = []
            for source, move in zip(tensor_inputs(node), step.inputs, strict=True):
                if (source, move) not in moved:
                    shape = tuple(values(source)[0].shape)
                    moved[source, move] = (
                        at[source] if node.target is operator.getitem else self._move(at[source], move, shape)
                    )
                arguments.append(moved[source, move])
            out = self._compute(node, arguments, step.computed)
            at[node] = (
                out if isinstance(out, tuple | list) else self._move(out, step.output, tuple(values(node)[0].shape))
            )
        return [at[node] for node in self.graph.outputs]

    def _compute(self, node: Any, given: list[Tensor], placements: Placements) -> Any:
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
            shape = local_shape(tuple(whole.shape), placements, self.sizes)
            return args[0].expand(shape) if target is aten.expand.default else args[0].reshape(shape)
        if not given:  # every rank makes the whole, from one stream of random numbers, and keeps its part
            return self.part(target(*args, **kwargs), placements)
        inputs = self.plan.steps[self.graph.names[node]].inputs
        if target is aten.embedding.default:
            return self._embedding(args[0], args[1], inputs[0].target)
        if target is aten.cross_entropy_loss.default and Shard(1) in inputs[0].target:
            return self._cross_entropy(node, args, inputs[0].target.index(Shard(1)))
        return target(*args, **kwargs)

    def _embedding(self, table: Tensor, tokens: Tensor, placements: Placements) -> Tensor:
        first = 0
        for axis, placement in enumerate(placements):
            if placement == Shard(0):
                first = self.mesh.get_local_rank(axis) * table.shape[0]
        local = tokens - first
        owned = (local >= 0) & (local < table.shape[0])
        return torch.nn.functional.embedding(torch.where(owned, local, 0), table) * owned[..., None]

    def _cross_entropy(self, node: Any, args: Any, axis: int) -> Tensor:
        logits, targets, reduction = args[0], args[1], (args[3] if len(args) > 3 else 1)
        group = self.mesh.get_group(axis).group_name
        losses = _ParallelLoss.apply(logits, targets, group, self.sizes[axis], self.mesh.get_local_rank(axis))
        rows = values(tensor_inputs(node)[0])[0].shape[0]
        self._count("all_gather", "forward", axis, 4 * self.sizes[axis] * 2 * rows)
        return [losses, losses.mean(), losses.sum()][reduction]

    def _move(self, x: Tensor, move: Move, shape: tuple[int, ...]) -> Tensor:
        for hop in hops(move, shape, self.sizes):
            x = _Hop.apply(x, self, hop)
        return x

    def _count(self, kind: str, direction: str, axis: int, whole_bytes: int) -> None:
        size = self.sizes[axis]
        share = {"all_reduce": 2 * (size - 1) / size, "all_to_all": (size - 1) / size**2}.get(kind, (size - 1) / size)
        self.executed[kind, direction, list(self.plan.axes)[axis], math.ceil(share * whole_bytes)] += 1

    def collective(self, kind: str, x: Tensor, dim: int, to: int, direction: str, axis: int) -> Tensor:
        """One real collective: from parts along `dim`, or sums, to parts along `to`."""
        size, group = self.sizes[axis], self.mesh.get_group(axis).group_name
        whole = x.numel() * x.element_size() * (1 if kind in ("reduce_scatter", "all_reduce") else size)
        self._count(kind, direction, axis, whole)
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


class _Hop(torch.autograd.Function):
    """One step of a move and its transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, executor: Executor, hop: Hop) -> Tensor:
        ctx.executor, ctx.hop = executor, hop
        source, target = getattr(hop.source, "dim", 0), getattr(hop.target, "dim", 0)
        if hop.forward:
            out = executor.collective(hop.forward, x, source, target, "forward", hop.axis)
            if isinstance(hop.source, Partial) and hop.source.reduce_op == "avg":
                out = out / executor.sizes[hop.axis]
            return out
        return _slice(x, target, executor, hop.axis) if isinstance(hop.target, Shard) else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        executor, hop = ctx.executor, ctx.hop
        source, target = getattr(hop.source, "dim", 0), getattr(hop.target, "dim", 0)
        if hop.backward:
            grad = executor.collective(hop.backward, grad, target, source, "backward", hop.axis)
        elif isinstance(hop.source, Shard):
            grad = _slice(grad, source, executor, hop.axis)
        if isinstance(hop.source, Partial) and hop.source.reduce_op == "avg":
            grad = grad / executor.sizes[hop.axis]
        return grad, None, None


def _slice(x: Tensor, dim: int, executor: Executor, axis: int) -> Tensor:
    return x.chunk(executor.sizes[axis], dim)[executor.mesh.get_local_rank(axis)].contiguous()


class _ParallelLoss(torch.autograd.Function):
    """Cross-entropy per token over split columns, in the logits' dtype."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: str, size: int, rank: int) -> Tensor:
        local = targets - rank * logits.shape[1]
        owned = (local >= 0) & (local < logits.shape[1])
        picked = torch.where(owned, logits.gather(1, torch.where(owned, local, 0)[:, None])[:, 0], 0.0)
        both = torch.stack((logits.logsumexp(-1), picked))[None]
        both = _ops.wait_tensor(_ops.all_gather_into_tensor(both, size, group))
        lse = both[:, 0].logsumexp(0)
        ctx.save_for_backward(logits, torch.where(owned, local, -1), lse)
        return lse - both[:, 1].sum(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        logits, local, lse = ctx.saved_tensors
        columns = torch.arange(logits.shape[1])
        return ((logits - lse[:, None]).exp() - (columns == local[:, None]).double()) * grad[:, None], *[None] * 4


def planned(plan: Plan) -> Counter[tuple[str, str, str, int]]:
    """The collectives that a plan announces, as `Executor.executed` counts them."""
    return Counter((c.kind, c.direction, c.axis, c.wire_bytes) for c in plan.collectives)


def difference(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest element."""
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-300)).item() if b.numel() else 0.0


def compare_with_one_process(
    model: torch.nn.Module, inputs: list[Tensor], graph: Graph, plan: Plan, mesh: DeviceMesh
) -> None:
    """Run a plan on this rank and compare outputs, gradients and collectives with those of one process."""
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    given = iter(inputs)
    wholes = {n: state[n] if n in state else next(given) for n in graph.names.values() if n in _placeholders(graph)}
    executor = Executor(graph, plan, mesh)
    parts = {}
    for name, whole in wholes.items():
        part = executor.part(whole.detach(), plan.tensors[name].placements).contiguous().clone()
        parts[name] = part.requires_grad_(whole.requires_grad)
    torch.manual_seed(1)
    expected = model(*inputs)
    expected = list(expected) if isinstance(expected, tuple) else [expected]
    torch.manual_seed(1)
    got = executor.run(parts)
    weights = [torch.randn(e.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) for e in expected]
    torch.autograd.backward(expected, weights)
    out_places = [plan.tensors[graph.names[node]].placements for node in graph.outputs]
    torch.autograd.backward(got, [executor.part(w, p) for w, p in zip(weights, out_places, strict=True)])
    for e, g, p in zip(expected, got, out_places, strict=True):
        assert difference(g, executor.part(e, p)) < 1e-13, difference(g, executor.part(e, p))
    for name, whole in wholes.items():
        if whole.requires_grad:
            part = executor.part(whole.grad, plan.tensors[name].placements)
            assert difference(parts[name].grad, part) < 1e-12, name
    assert executor.executed == planned(plan), (
        f"{executor.executed - planned(plan)} {planned(plan) - executor.executed}"
    )
    dist.barrier()


def _placeholders(graph: Graph) -> set[str]:
    return {name for node, name in graph.names.items() if node.op == "placeholder"}
