"""Classify kernels and operators of a profiler trace, and find when each CPU operator ran outside of its callees."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]

# The first match wins. Names of elementwise kernels and reductions made by torch.compile may contain the operator that
# they feed, such as mm, so their pattern comes first; titanlite's own memory-bound kernels are in their class. A fused
# kernel of communication and matmul has both in its name and counts as a matmul. Attention kernels come from the same
# libraries as matmuls, so their pattern precedes that of matmuls.
_CLASSES = (
    ("triton", r"^triton_(poi|red|per|for)_|^_(cast_(amax|transpose|rows|blocks)|transpose|swiglu_\w+)$"),
    ("triton", r"^_(norm_rope\w*|rotated_heads_grad|rms_norm_grad|add_parts)$"),
    ("triton", r"^_(route(_grad)?|expert_(counts|begins|places|gate\w*)|aligned_rows)$"),
    ("triton", r"^_((gather|combine|spread)_rows|row_dots|cross_entropy_\w+)$"),
    ("attention", r"flash|fmha|attention|sdpa|cudnn::fusion"),
    ("matmul", r"gemm|nvjet|cutlass|xmma|matmul|splitk|::(_scaled_)?(add|b|badd)?mm$|::linear$|mkldnn_linear"),
    ("matmul", r"^_grouped_weight_gradient$"),
    ("communication", r"^_?meet$|^_add_shards$|memcpy ptop|nccl|c10d|gloo|symm_mem"),
    ("communication", r"all_?gather|reduce_?scatter|all_?reduce|all_?to_?all"),
    ("optimizer", r"adam|multi_tensor|_foreach_|foreach_norm"),
    ("triton", r"^triton_|^_?[a-z0-9_]+_kernel$"),
)


@dataclass(frozen=True)
class Work:
    """One call of a CPU operator. Its times are in microseconds and leave out its callees."""

    name: str
    times: list[tuple[float, float]]  # (start, end), in order
    thread: Any
    caller: str  # name of the operator that called this one; "" if none


def kernel_class(name: str) -> str:
    """Classify a kernel or operator by its name: attention, matmul, communication, optimizer, triton or other."""
    return next((kind for kind, pattern in _CLASSES if re.search(pattern, name, re.IGNORECASE)), "other")


def cpu_work(trace: Mapping[str, Any]) -> list[Work]:
    """Return all calls of CPU operators, each with the intervals in which none of its callees ran."""
    threads: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") == "cpu_op":
            threads[event.get("tid")].append(event)
    work = []
    for thread, events in threads.items():
        callees: dict[int, list[float]] = defaultdict(list)  # by id of the caller: start, end, start, end, …
        called = [(event, around[-1] if around else None) for event, around in nested(events)]
        for event, caller in called:
            callees[id(caller)] += span_of(event)
        for event, caller in called:
            start, end = span_of(event)
            edges = [start, *callees[id(event)], end]
            times = list(zip(edges[::2], edges[1::2], strict=True))
            work.append(Work(event["name"], times, thread, caller["name"] if caller else ""))
    return work


def nested(events: Iterable[Event]) -> Iterator[tuple[Event, list[Event]]]:
    """Yield a thread's events by start time, each with the (reused) list of events that enclose it, outermost first."""
    around: list[Event] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event.get("dur", 0))):
        while around and span_of(around[-1])[1] <= event["ts"]:
            around.pop()
        yield event, around
        if "dur" in event:
            around.append(event)


def span_of(event: Event) -> tuple[float, float]:
    """Return start and end of a trace event, in microseconds."""
    return event["ts"], event["ts"] + event["dur"]


def merge_spans(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merge overlapping intervals and return them in order of time."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged
