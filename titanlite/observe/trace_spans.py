"""Turn the events of one rank's trace into the intervals of its summary.

On a GPU the intervals are those of kernels and copies. Their category follows from their name and from the host code
that launched them: kernels launched within the optimizer count for the optimizer. NCCL's kernels carry the name of
their process group, which determines the mesh axis. A step ends with the last kernel launched in it.

On a CPU the intervals are those of operators in the computing threads, without their callees. Gloo's threads show when
a collective runs, but not on which axis. Collectives run in the order of their calls, and the axis follows from the
code around a call: a hook of FSDP, or a functional collective of tensor, context or expert parallelism.
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
"""Prefix of the profiler's mark of a step; the step's number follows."""

COMPILED_FRAME = "_compile.compile_inner (dynamo_timed)"
"""Name that the compilation of one graph by torch.compile has in a trace."""

_CASTS = re.compile(
    r"^_?cast_|^_transpose$|(bfloat16|float8|direct)_?copy|^triton_[a-z]+_fused__to_copy(_(to_copy|t|view|clone))*_\d+$"
)
_CAST_OPERATORS = ("aten::_to_copy", "aten::to")
_COPY_ENGINES = re.compile(r"memcpy ptop|^_add_shards$|^_?meet$", re.IGNORECASE)
_COPY_ENGINES_MEET = re.compile(r"^_?meet$")
_MEETS = re.compile("nccl", re.IGNORECASE)  # kernels that end only once all ranks of their group have started them

Events = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class ProfiledRun:
    """Facts of a run that its trace lacks.

    Attributes:
        rank: index of this rank among all `world` ranks.
        device: "cuda" or "cpu".
        axes: by name of a process group, its mesh axis, followed by `OF_EXPERTS` if it shards experts' weights.
        groups: by mesh axis, the ranks of this rank's group.
        held: bytes of parameters, of optimizer state and of memory for gathered weights, by category.
        forecast: predicted bytes at the peak, by category.
    """

    rank: int = 0
    world: int = 1
    device: str = "cpu"
    axes: Mapping[str, str] = field(default_factory=dict)
    groups: Mapping[str, Sequence[int]] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    forecast: Mapping[str, int] = field(default_factory=dict)


def summarise(trace: Mapping[str, Any], run: ProfiledRun, clock_us: float, reserved: int = 0) -> RankProfile:
    """Summarise a rank's trace, the JSON of torch.profiler with a mark for each step. `clock_us`: time of all steps by
    the host's clock; `reserved`: most bytes that the caching allocator reserved.
    """
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
    begins = [start for start, _, _ in marks[1:]]  # a step lasts until the next one begins
    for (_, _, step), host_end in zip(marks, [*begins, marks[-1][1]], strict=True):
        last = max(start, ends.get(step, host_end))
        edges.append(StepEdges(step, start - origin, last - origin))
        start = last
    final = edges[-1].end_us
    merged = {name: _clipped(found, origin, final) for name, found in spans.items()}
    # Collectives before the first step, such as that in which ranks agree on the start, belong to no step.
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
    """Return the host's intervals of waiting for data, of compiling, and of work between steps, by category."""
    spans: dict[str, list[Interval]] = defaultdict(list)
    for e in (e for e in events if e.get("cat") in ("user_annotation", "cpu_op")):
        name = RECOMPILATION if e["name"].endswith("(dynamo_timed)") else e["name"]
        if name in (DATA_WAIT, RECOMPILATION, *ASIDE):
            spans[name].append(span_of(e))
    return spans


def _of_device(
    events: Events, run: ProfiledRun, marks: Sequence[tuple[float, float, int]]
) -> tuple[dict[str, list[Interval]], dict[str, list[Interval]], dict[int, float]]:
    """Return kernels' intervals by category, collectives' intervals by axis, and the end of each step's last kernel.
    `marks`: (start, end, step) of each step's mark.
    """
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
            axis = _axis_of_group(args, run.axes) or _axis_of_caller(e["name"], hooks(launched))
            spans[f"{COMMUNICATION} {axis.removesuffix(OF_EXPERTS)}"].append(span)
            if _MEETS.search(e["name"]):  # sorted by launch below: all ranks launch in one order
                collectives[axis].append((launched, span))
            elif _COPY_ENGINES_MEET.search(e["name"]):
                collectives[f"{axis}{BY_COPY_ENGINES}"].append((launched, span))
        elif optimizer(launched) or kind == OPTIMIZER:  # also the matmuls that orthogonalise updates
            spans[OPTIMIZER].append(span)
        elif kind in (ATTENTION, MATMUL):
            spans[kind].append(span)
        else:
            spans[CASTS if _CASTS.search(e["name"]) else COMPUTE].append(span)
    ordered = {axis: [span for _, span in sorted(found)] for axis, found in collectives.items()}
    return spans, ordered, ends


def _axis_of_group(args: Mapping[str, Any], axes: Mapping[str, str]) -> str | None:
    """Return a communication kernel's mesh axis by its process group; None if the trace names none of the mesh."""
    if (group := str(args.get("Process Group Name"))) in axes:
        return axes[group]
    described = str(args.get("Process Group Description", "")).removeprefix("mesh_")
    return described if described in axes.values() else None


def _axis_of_caller(name: str, is_fsdp: bool) -> str:
    """Return a collective's mesh axis by its name and caller. `is_fsdp`: a hook of FSDP called it."""
    if is_fsdp:
        return "dp_replicate" if re.search("all_?reduce", name, re.IGNORECASE) else "dp_shard"
    return "ep" if _COPY_ENGINES.search(name) else "all ranks"  # they move weights, and tokens


def _of_cpu(
    trace: Mapping[str, Any], events: Events, run: ProfiledRun
) -> tuple[dict[str, list[Interval]], dict[str, list[Interval]], dict[int, float]]:
    """Return operators' intervals by category and collectives' by axis; {}, as a step's end is that of its mark."""
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
    """Return a function that tests whether a time lies within a user annotation whose name begins with `name`."""
    return _within(span_of(e) for e in events if e.get("cat") == "user_annotation" and e["name"].startswith(name))


def _within(intervals: Iterable[Interval]) -> Callable[[float], bool]:
    """Return a function that tests whether a time lies within one of the intervals."""
    merged = merge_spans(intervals)
    starts = [start for start, _ in merged]

    def holds(time: float) -> bool:
        place = bisect_right(starts, time)
        return place > 0 and time < merged[place - 1][1]

    return holds
