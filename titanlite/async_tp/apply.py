"""Fuse the collectives of a compiled graph with its matmuls, for models that their authors parallelised with DTensor.

titanlite's own layers call the fused operators. A model under `parallelize_module` has separate collectives and
matmuls. Under `torch.compile` both are in one graph, and this pass rewrites pairs of them to

    torch.ops.titanlite.all_gather_matmul         an all-gather and the matmuls that read it
    torch.ops.titanlite.matmul_reduce_scatter     a matmul, or a sum of matmuls, and the reduce-scatter that reads it

The pass follows elements instead of matching patterns: `view_tracking.py` tracks the gathered tensor through any views,
splits and transposes to each matmul, and so finds the operand that is split over ranks, and its dim. Other readers of
the gathered tensor read the operator's first result. Results keep shape, dtype and strides.

The returned table lists each collective, with the reason if it is not fused. "Fused" means that the graph was
rewritten; `titanlite.kernels.lowering.lowered` shows whether a kernel then ran. Collectives that torch runs outside of
its graphs, at a graph break, are not in the table. `check_fused` reports failures of all three kinds.

    report: list[Pair] = []
    model = torch.compile(model, options=fusing(report))
    model(x).sum().backward()  # graphs are compiled when they are first needed
    check_fused(report)
    print(*report, sep="\n")

The pass is an option of the compiled model, not a setting of the process: new shapes compile new graphs at any time,
and on GPUs backward's graph is compiled in a thread of autograd, which in torch 2.13 has its own settings.

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
    """A collective, and whether the pass has fused it."""

    collective: str  # name of its node
    matmuls: tuple[str, ...]  # names of the matmuls that it was fused with
    fused: bool  # whether the collective was replaced
    reason: str  # why it is not fused, or not with some matmuls that read it; else ""
    declared: bool = False  # rightly not fused: no matmul is next to it, or the matmul has another collective

    def __str__(self) -> str:
        """Return the pair as a line of a table."""
        partners = f" with {', '.join(self.matmuls)}" if self.matmuls else ""
        return f"{'fused ' if self.fused else 'missed'} {self.collective}{partners}{self.reason and ': ' + self.reason}"


def fuse_collective_matmuls(graph: Graph) -> list[Pair]:
    """Rewrite collectives and matmuls to the fused operators, where that is possible.

    Args:
        graph: functional, of aten and `_c10d_functional` operators, with fake tensors in `meta["val"]`, as AOTAutograd
            gives it to a compiler, forward or backward. Changed in place, and left in topological order.

    Returns:
        A pair for every collective of the graph, in order.
    """
    work = GraphRewrite(graph)
    collectives = [node for node in graph.nodes if _is_collective(node)]
    fates: dict[Node, Pair] = {}
    of_scales: dict[Node, Node] = {}
    for node in sorted(collectives, key=lambda n: n.target == REDUCE_SCATTER):  # a stable sort, gathers first
        if node in work.erased:
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
        gone, reason = scales in work.erased, f"its scales travel with {node.name}"
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
    """Return options of `torch.compile`, to merge with others, that run the pass on every graph of a model.

    Blocks of one kind share their graphs if they are compiled with the same report.

    Args:
        report: receives the pairs of each graph. Inductor's cache is then not used, since a cached graph adds no pairs.
            Misses are also logged by this module, with or without a report: at WARNING, or INFO if `declared`.

    Raises:
        ValueError: inductor's `post_grad_custom_pre_pass` is already set.
    """
    other = torch._inductor.config.post_grad_custom_pre_pass
    if other is not None:
        raise ValueError(
            f"async_tp.fusing: inductor's post_grad_custom_pre_pass is {other!r}; want none. Call "
            "fuse_collective_matmuls(graph) from that pass"
        )
    return {"post_grad_custom_pre_pass": _Pass(report)}  # gets the graph as AOTAutograd leaves it


def check_fused(report: list[Pair]) -> None:
    """Check that every pair compiled so far, in the report of `fusing`, is fused, and runs as a kernel.

    To be called after the first step, forward and backward, and again after a step that compiled for new shapes.

    Raises:
        StrictError: for missed pairs that are not `declared`, operators that ran without their kernel, gathers and
            scatters that torch ran outside of graphs, or if nothing is fused; with the reasons.
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
    """List the gathers and scatters that torch runs outside of graphs, at graph breaks, with the reasons."""
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
"""Matches the names of torch's functions that could be a collective of a pair."""


class _Pass(CustomGraphPass):
    """`fuse_collective_matmuls` as a pass of inductor."""

    def __init__(self, report: list[Pair] | None) -> None:
        self._report = report

    def __eq__(self, other: object) -> bool:
        """Compare reports. Without this, blocks compiled one by one would share no graph, and recompile too often."""
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
        """Return a hash of this pass for inductor's cache; None: do not use the cache."""
        if self._report is not None:
            return None
        modules = (layout_modes, calls, fuse_gather, fuse_scatter, gathered_values, view_tracking, graph_rewrite)
        return get_hash_for_files((__file__, *(str(module.__file__) for module in modules)))
