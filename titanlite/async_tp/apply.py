"""Fuse the collectives of a compiled graph with its matmuls, for models that somebody else parallelised with DTensor.

titanlite's own layers call the fused operators. A model under `parallelize_module` has collectives and matmuls apart;
under `torch.compile` both are in one graph, and this pass rewrites pairs of them to

    torch.ops.titanlite.all_gather_matmul         an all-gather and the matmuls that read it
    torch.ops.titanlite.matmul_reduce_scatter     a matmul, or a sum of some, and the reduce-scatter that reads it

It looks at elements, not at spellings: `view_tracking.py` follows the gathered tensor through whatever views, splits
and transposes a graph has, up to each matmul, and from there it is known which operand is split over ranks and along
which dim. What else reads the gathered tensor reads the operator's first result. Results keep shape, dtype and strides.

Nothing is missed in silence: each collective is in the returned table, with the reason if it was left alone. "Fused"
says that the graph was rewritten; whether a kernel then ran is in `titanlite.kernels.lowering.lowered`. A collective
that torch leaves out of its graphs, at a break, is in no table. `check_fused` looks at all three.

    report: list[Pair] = []
    model = torch.compile(model, options=fusing(report))
    model(x).sum().backward()  # graphs are compiled when they are first needed
    check_fused(report)
    print(*report, sep="\n")

The pass is an option of the compiled model, not a setting of the process: graphs are compiled as long as there are new
shapes, and those of backward, on GPUs, by a thread of autograd's, which in torch 2.13 has settings of its own.

Reading order: this file, `fuse_gather.py`, `gathered_values.py`, `fuse_scatter.py`; below them `layout_modes.py`,
`view_tracking.py`, `graph_rewrite.py`.
"""

import logging
import re
from typing import Any, NamedTuple

import torch
import torch._inductor.config
from torch._dynamo.utils import graph_break_reasons
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, Node

from titanlite.async_tp import fuse_gather, fuse_scatter, gathered_values, graph_rewrite, layout_modes, view_tracking
from titanlite.async_tp.fuse_scatter import REDUCE_SCATTER
from titanlite.async_tp.gathered_values import ALL_GATHER
from titanlite.async_tp.graph_rewrite import GraphRewrite, MissedError, UnpairedError, name_of
from titanlite.errors import Problem, StrictError, describe
from titanlite.kernels.lowering import lowered
from titanlite.parallel import calls

_logger = logging.getLogger(__name__)


class Pair(NamedTuple):
    """A collective and what became of it.

    Attributes:
        collective: name of its node.
        matmuls: names of the matmuls that it was fused with.
        fused: whether it is gone from the graph.
        reason: why not; if it is, why not with other matmuls that read it, or "".
        declared: whether that is as it should be: no matmul is next to it, or another collective has that.
    """

    collective: str
    matmuls: tuple[str, ...]
    fused: bool
    reason: str
    declared: bool = False

    def __str__(self) -> str:
        """One line of a table."""
        partners = f" with {', '.join(self.matmuls)}" if self.matmuls else ""
        return f"{'fused ' if self.fused else 'missed'} {self.collective}{partners}{self.reason and ': ' + self.reason}"


def fuse_collective_matmuls(graph: Graph) -> list[Pair]:
    """Rewrite collectives and matmuls to the fused operators, where that is possible.

    Args:
        graph: functional, of aten and `_c10d_functional` operators, with fake tensors in `meta["val"]`: what
            AOTAutograd gives a compiler, forward or backward. Changed in place, and left in topological order.

    Returns:
        Every collective of the graph, in its order.
    """
    work = GraphRewrite(graph)
    collectives = [node for node in graph.nodes if _is_collective(node)]
    fates: dict[Node, Pair] = {}
    of_scales: dict[Node, Node] = {}
    for node in sorted(collectives, key=lambda n: n.target == REDUCE_SCATTER):  # stable: gathers first
        if work.is_erased(node):
            continue
        try:
            if node.target == ALL_GATHER:
                matmuls, left, scales = fuse_gather.fuse_gather(work, node)
                fates[node] = Pair(node.name, matmuls, True, "; ".join(left))
                if scales is not None:
                    of_scales[scales] = node
            elif node.target == REDUCE_SCATTER:
                fates[node] = Pair(node.name, fuse_scatter.fuse_scatter(work, node), True, "")
            else:
                raise UnpairedError(f"there is no operator for {name_of(node)}")
        except MissedError as missed:
            work.undo()
            fates[node] = Pair(node.name, (), False, str(missed), isinstance(missed, UnpairedError))
    for scales, node in of_scales.items():
        gone, reason = work.is_erased(scales), f"its scales travel with {node.name}"
        if not gone:
            reason += ", but are read otherwise too"
        fates[scales] = Pair(scales.name, fates[node].matmuls if gone else (), gone, reason, declared=True)
    stable_topological_sort(graph)
    return [fates[node] for node in collectives]


def _is_collective(node: Node) -> bool:
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace == "_c10d_functional"
        and name_of(node) != "wait_tensor"
    )


def fusing(report: list[Pair] | None = None) -> dict[str, Any]:
    """Return options of `torch.compile` with which the pass runs on every graph of a model, whenever that is compiled.

    Models that are compiled with one report are compiled alike: blocks of one kind share their graphs.

    Args:
        report: receives the pairs of each graph. A graph from inductor's cache passes nothing, so with a report that
            cache is not used. With or without one, misses are logged by this module: at level WARNING, or INFO where
            they are `declared`.

    Returns:
        The options; others may stand beside them.

    Raises:
        ValueError: inductor has another pass in this place.
    """
    other = torch._inductor.config.post_grad_custom_pre_pass
    if other is not None:
        raise ValueError(
            f"async_tp.fusing: inductor's post_grad_custom_pre_pass is {other!r}; want none. Call "
            "fuse_collective_matmuls(graph) from that pass"
        )
    return {"post_grad_custom_pre_pass": _Pass(report)}  # it gets the graph as AOTAutograd leaves it


def check_fused(report: list[Pair]) -> None:
    """Hold what was compiled until now against what was asked for: every pair fused, by a kernel.

    To be called after the first step, forward and backward, and again after one that compiled for new shapes.

    Args:
        report: the one that `fusing` was given.

    Raises:
        StrictError: a pair that is missed and not `declared`, an operator of this process without its kernel, a gather
            or scatter that torch ran outside of this process's graphs, or none fused; with the reasons.
    """
    n_fused, want = sum(pair.fused for pair in report), "every pair fused"
    cases = [(pair.collective, pair.reason) for pair in report if not (pair.fused or pair.declared)]
    cases += [(f"{op} {shapes}", reason) for op, shapes, reason, expected in lowered if reason and not expected]
    if not n_fused:
        want = "a pair fused"
        nothing = ("no collective", "was found in any graph that was compiled")
        cases = [(pair.collective, pair.reason) for pair in report] or [nothing]
    elif not lowered:
        cases.append(("no operator", "has run on a GPU; a CPU computes their definitions"))
    cases += _outside_of_graphs()
    if cases:
        lines = "".join(f"\n          {what}: {why}" for what, why in cases)
        fix = "change what stands in the way; without check_fused the model runs with what was fused"
        problem = Problem("async_tp.check_fused", f"{n_fused} of {len(report)} collectives fused", want + lines, fix)
        raise StrictError(describe("not all that was asked for was applied", [problem]))


def _outside_of_graphs() -> list[tuple[str, str]]:
    """List the gathers and scatters that torch broke off a graph for, to run them by themselves."""
    cases = []
    for broken in graph_break_reasons:
        stack, (why, *_) = broken.user_stack, broken.reason.splitlines()
        names = [frame.name if frame.filename.startswith(torch.__path__[0]) else "" for frame in stack]
        names += re.findall(r"\w+", broken.reason)
        at = next((i for i, name in enumerate(names) if _PAIRED.fullmatch(name)), None)
        if at is not None:
            caller = stack[max(0, min(at, len(stack)) - 1)]
            where = f"{caller.filename}:{caller.lineno}, in {caller.name}"
            cases.append((names[at], f"torch broke off the graph and ran it outside, {where}: {why}"))
    return list(dict.fromkeys(cases))


_PAIRED = re.compile(r"_?(all_gather|reduce_scatter)(?!_object)\w*")
"""Names of torch's functions that could be one of a pair."""


class _Pass(CustomGraphPass):
    """Run the pass, as inductor calls it."""

    def __init__(self, report: list[Pair] | None) -> None:
        self._report = report

    def __eq__(self, other: object) -> bool:
        """Blocks that are compiled one by one would otherwise not share a graph, and run out of recompilations."""
        return isinstance(other, _Pass) and self._report is other._report

    def __hash__(self) -> int:
        return id(self._report)

    def __call__(self, graph: Graph) -> None:
        pairs = fuse_collective_matmuls(graph)
        if self._report is not None:
            self._report.extend(pairs)
        for pair in pairs:
            if pair.reason:
                _logger.log(logging.INFO if pair.fused or pair.declared else logging.WARNING, "%s", pair)

    def uuid(self) -> bytes | None:
        """Return what a compiled graph depends on beside its source; None to compile each graph anew."""
        if self._report is not None:
            return None
        modules = (layout_modes, calls, fuse_gather, fuse_scatter, gathered_values, view_tracking, graph_rewrite)
        return get_hash_for_files((__file__, *(str(module.__file__) for module in modules)))
