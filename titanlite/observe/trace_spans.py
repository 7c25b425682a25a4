"""Turn the events of one rank's trace into the intervals of its summary.

On a GPU intervals are kernels and copies, by their names and by where the host launched them: what was launched within
the optimizer is the optimizer's. NCCL's kernels name their process group, which names the mesh axis. A step ends with
the last kernel that was launched in it.

On a CPU they are operators, each without its callees, in the threads that compute. Gloo's own threads say when a
collective runs but not for whom: collectives run in the order of their calls, which FSDP's hooks or the functional
collectives of tensor, context or expert parallelism enclose.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from titanlite.observe.kernel_classes import cpu_work, kernel_class, merge_spans, span_of
from titanlite.observe.peak_memory import peak_memory
from titanlite.observe.step_profile import (
    ASIDE,
    ATTENTION,
    BY_COPY_ENGINES,
    CASTS,
    COMMUNICATION,
    COMPUTE,
    DATA_WAIT,
    MATMUL,
    OF_EXPERTS,
    OPTIMIZER,
    RECOMPILATION,
    Interval,
    RankProfile,
    StepEdges,
)

STEP = "titanlite step "
"""Before the number, as the profiler marks each step of the loop."""

COMPILED_FRAME = "_compile.compile_inner (dynamo_timed)"
"""How torch.compile names the compilation of one graph in a trace."""

_CASTS = re.compile(
    r"^_?cast_|^_transpose$|(bfloat16|float8|direct)_?copy|^triton_[a-z]+_fused__to_copy(_(to_copy|t|view|clone))*_\d+$"
)
_CAST_OPERATORS = ("aten::_to_copy", "aten::to")
_COPY_ENGINES = re.compile(r"memcpy ptop|^_add_shards$|^_?meet$", re.IGNORECASE)
_COPY_ENGINES_MEET = re.compile(r"^_?meet$")
_MEETS = re.compile("nccl", re.IGNORECASE)  # kernels that end when all ranks have come

Events = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class ProfiledRun:
    """The facts of a run that its trace does not have.

    Attributes:
        rank: this one's, of `world`.
        device: "cuda" or "cpu".
        axes: mesh axis by the name of its process group; with `OF_EXPERTS` where the group shards experts' weights.
        groups: ranks of this one's group on each axis.
        held: bytes of parameters and of the optimizer's state, by category.
        forecast: bytes at the peak by category, as predicted.
    """

    rank: int = 0
    world: int = 1
    device: str = "cpu"
    axes: Mapping[str, str] = field(default_factory=dict)
    groups: Mapping[str, Sequence[int]] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    forecast: Mapping[str, int] = field(default_factory=dict)


def summarise(trace: Mapping[str, Any], run: ProfiledRun, clock_us: float, reserved: int = 0) -> RankProfile:
    """Summarise a rank's trace, torch.profiler's JSON with a mark of each step; `clock_us` is the host's, of all."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    steps = (e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith(STEP))
    marks = sorted((*span_of(e), int(e["name"].removeprefix(STEP))) for e in steps)
    origin = marks[0][0]
    if run.device == "cuda":
        spans, collectives, ends = _of_device(events, run, marks)
    else:
        spans, collectives, ends = _of_cpu(trace, events, run)
    for name, found in _of_host(events).items():
        spans.setdefault(name, []).extend(found)
    edges, start = [], origin
    begins = [start for start, _, _ in marks[1:]]  # a step lasts until the next begins, for there is no time between
    for (_, _, step), host_end in zip(marks, [*begins, marks[-1][1]], strict=True):
        last = max(start, ends.get(step, host_end))
        edges.append(StepEdges(step, start - origin, last - origin))
        start = last
    final = edges[-1].end_us
    merged = {name: _clipped(found, origin, final) for name, found in spans.items()}
    # What was called before the first step, as to agree on the beginning, is of no step.
    ordered = {axis: [span for span in found if span[0] >= origin] for axis, found in collectives.items()}
    return RankProfile(
        rank=run.rank,
        world=run.world,
        device=run.device,
        origin_us=trace.get("baseTimeNanoseconds", 0) / 1e3 + origin,
        clock_us=clock_us,
        steps=edges,
        spans={name: found for name, found in merged.items() if found},
        groups={axis: list(ranks) for axis, ranks in run.groups.items()},
        collectives={axis: [(a - origin, b - origin) for a, b in found] for axis, found in ordered.items() if found},
        graphs=sum(e["name"] == COMPILED_FRAME and origin <= e["ts"] < origin + final for e in events),
        memory=peak_memory(trace["traceEvents"], run.device, run.held, (origin, marks[-1][1]), reserved),
        forecast=dict(run.forecast),
    )


def _clipped(found: Iterable[Interval], origin: float, final: float) -> list[Interval]:
    merged = merge_spans((max(0.0, a - origin), min(final, b - origin)) for a, b in found)
    return [(a, b) for a, b in merged if b > a]


def _of_host(events: Events) -> dict[str, list[Interval]]:
    """Return what the host was seen at: waiting for data, compiling, or on what is not of a step."""
    spans: dict[str, list[Interval]] = defaultdict(list)
    for e in (e for e in events if e.get("cat") in ("user_annotation", "cpu_op")):
        name = RECOMPILATION if e["name"].endswith("(dynamo_timed)") else e["name"]
        if name in (DATA_WAIT, RECOMPILATION, *ASIDE):
            spans[name].append(span_of(e))
    return spans


def _of_device(
    events: Events, run: ProfiledRun, marks: Sequence[tuple[float, float, int]]
) -> tuple[dict[str, list[Interval]], dict[str, list[Interval]], dict[int, float]]:
    """Return the kernels by category, the collectives by axis, and when each step's last kernel ended."""
    launches = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    optimizer, hooks = _within_marks(events, OPTIMIZER), _within_marks(events, "FSDP::")
    aside = {name: _within_marks(events, name) for name in ASIDE}
    starts = [start for start, _, _ in marks]
    spans: dict[str, list[Interval]] = defaultdict(list)
    collectives: dict[str, list[tuple[float, Interval]]] = defaultdict(list)
    ends: dict[int, float] = {}
    for e in events:
        if e.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        args, span = e.get("args", {}), span_of(e)
        launched = launches.get(args.get("correlation", -1), e["ts"])
        if (place := bisect_right(starts, launched)) > 0:
            step = marks[place - 1][2]
            ends[step] = max(ends.get(step, 0.0), span[1])
        kind = kernel_class(e["name"])
        if between := next((name for name in ASIDE if aside[name](launched)), ""):
            spans[between].append(span)
        elif kind == "communication":
            axis = _axis_of_kernel(e["name"], args, run.axes) or _axis_of_caller(e["name"], hooks(launched))
            spans[f"{COMMUNICATION} {axis.removesuffix(OF_EXPERTS)}"].append(span)
            if _MEETS.search(e["name"]):  # in their order of launch, which all ranks share
                collectives[axis].append((launched, span))
            elif _COPY_ENGINES_MEET.search(e["name"]):
                collectives[f"{axis}{BY_COPY_ENGINES}"].append((launched, span))
        elif optimizer(launched) or kind == OPTIMIZER:  # its matmuls, too: those that orthogonalise
            spans[OPTIMIZER].append(span)
        elif kind in (ATTENTION, MATMUL):
            spans[kind].append(span)
        else:
            spans[CASTS if _CASTS.search(e["name"]) else COMPUTE].append(span)
    ordered = {axis: [span for _, span in sorted(found)] for axis, found in collectives.items()}
    return spans, ordered, ends


def _axis_of_kernel(name: str, args: Mapping[str, Any], axes: Mapping[str, str]) -> str | None:
    """Return the mesh axis of a kernel that communicates, as it says itself."""
    if (group := str(args.get("Process Group Name"))) in axes:
        return axes[group]
    described = str(args.get("Process Group Description", "")).removeprefix("mesh_")
    if described in axes.values():
        return described
    return "dp_shard" if _COPY_ENGINES.search(name) else None


def _axis_of_caller(name: str, is_fsdp: bool) -> str:
    """Return the axis of a collective that does not say it, from who called it."""
    if is_fsdp:
        return "dp_replicate" if re.search("all_?reduce", name, re.IGNORECASE) else "dp_shard"
    return "all ranks"


def _of_cpu(
    trace: Mapping[str, Any], events: Events, run: ProfiledRun
) -> tuple[dict[str, list[Interval]], dict[str, list[Interval]], dict[int, float]]:
    """Return the operators by category and the collectives by axis; a CPU ends its steps where the host does."""
    of_gloo = [e for e in events if e["name"].startswith("gloo:")]
    running, threads = sorted(map(span_of, of_gloo)), {e["tid"] for e in of_gloo}
    called = [e for e in events if e["name"].startswith("c10d::") and e.get("tid") not in threads]
    calls, names = sorted(map(span_of, called)), {e["ts"]: e["name"] for e in called}
    fsdp, optimizer = _within_marks(events, "FSDP::"), _within_marks(events, OPTIMIZER)
    functional = _within(span_of(e) for e in events if e["name"].startswith("_c10d_functional::"))
    split = next((axis for axis in ("tp", "cp", "ep") if len(run.groups.get(axis, ())) > 1), "dp_shard")
    spans: dict[str, list[Interval]] = defaultdict(list)
    collectives: dict[str, list[Interval]] = defaultdict(list)
    for call, work in zip(calls, running if len(running) == len(calls) else calls, strict=True):
        axis = split if functional(call[0]) else _axis_of_caller(names[call[0]], fsdp(call[0]))
        collectives[axis].append((min(call[0], work[0]), max(work)))
        spans[f"{COMMUNICATION} {axis}"] += [call, work]
    for work in cpu_work(trace):
        if work.thread in threads or work.name.startswith(("c10d::", "_c10d_functional::")):
            continue
        kind = kernel_class(work.name)
        if optimizer(work.times[0][0]):
            kind = OPTIMIZER
        elif kind not in (ATTENTION, MATMUL):
            is_cast = work.name in _CAST_OPERATORS or work.caller in _CAST_OPERATORS
            kind = CASTS if is_cast else COMPUTE
        spans[kind] += work.times
    return spans, collectives, {}


def _within_marks(events: Events, name: str) -> Callable[[float], bool]:
    """Return what says of a time whether it lies within a mark whose name begins so: the trainer's, or FSDP's hooks."""
    return _within(span_of(e) for e in events if e.get("cat") == "user_annotation" and e["name"].startswith(name))


def _within(intervals: Iterable[Interval]) -> Callable[[float], bool]:
    """Return what says of a time whether it lies within one of some intervals."""
    merged = merge_spans(intervals)
    starts = [start for start, _ in merged]

    def holds(time: float) -> bool:
        place = bisect_right(starts, time)
        return place > 0 and time < merged[place - 1][1]

    return holds
