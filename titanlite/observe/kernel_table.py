"""Show where the time of a step goes: a profiler trace as a table of text.

Reads the events of a Chrome trace as torch.profiler writes it, and nothing else, so it also works on a trace from
another machine. On a GPU the rows are kernels and copies as the device ran them. Without a GPU they are the operators
of the CPU, without the time that their callees account for.

Three numbers matter before any row does: how long the device was idle, how much of the communication was not hidden
behind other work, and which class of kernels has the rest.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

_TOP = 40
_GAPS = 5

# First match wins. Elementwise kernels and reductions that a compiler made are named for what they feed, as matmuls;
# titanlite's own passes over memory are counted with them. A fused kernel of communication and matmul is named for both
# and counts as a matmul; attention kernels are built from the same libraries as matmuls and must come before them.
_CLASSES = (
    ("triton", r"^triton_(poi|red|per|for)_|^_(cast_(amax|transpose|rows|blocks)|transpose|swiglu_\w+)$"),
    ("triton", r"^_(norm_rope\w*|rotated_heads_grad|rms_norm_grad|add_parts)$"),
    ("triton", r"^_(route(_grad)?|expert_(counts|begins|places|gate\w*)|aligned_rows)$"),
    ("triton", r"^_((gather|combine|spread)_rows|row_dots)$"),
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
    """One kernel, copy or operator. Times in microseconds; of an operator, without those of its callees."""

    name: str
    times: list[tuple[float, float]]  # from, to; in order
    thread: Any = None  # of an operator
    caller: str = ""  # the operator that called it; "" if none did

    @property
    def us(self) -> float:
        """How long it took."""
        return total_us(self.times)

    @property
    def kind(self) -> str:
        """The class it belongs to."""
        return kernel_class(self.name)


def kernel_class(name: str) -> str:
    """Classify a kernel or operator by its name: attention, matmul, communication, optimizer, triton or other."""
    return next((kind for kind, pattern in _CLASSES if re.search(pattern, name, re.IGNORECASE)), "other")


def kernel_table(trace: dict[str, Any], steps: int) -> str:
    """Summarise a trace.

    Args:
        trace: the parsed JSON of a Chrome trace by torch.profiler.
        steps: training steps in it; times are given per step.

    Returns:
        Text of three parts: time by class with idle and exposed communication, the longest gaps, the longest kernels.
    """
    work = device_work(trace) or cpu_work(trace)
    if not work:
        return "The trace holds no kernels and no operators.\n"
    busy = merge_spans(time for w in work for time in w.times)
    span, busy_us = busy[-1][1] - busy[0][0], total_us(busy)
    not_comm_us = total_us(merge_spans(time for w in work if w.kind != "communication" for time in w.times))

    by_class: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    by_name: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for w in work:
        for total in (by_class[w.kind], by_name[w.name]):
            total[0] += w.us
            total[1] += 1

    def row(us: float, calls: float | None, name: str) -> str:
        count = f"{calls / steps:10.1f}" if calls is not None else " " * 10
        return f"{us / steps / 1e3:10.3f}{count}{100 * us / span:9.1f}%  {name}"

    def longest(totals: dict[str, list[float]]) -> list[tuple[str, list[float]]]:
        return sorted(totals.items(), key=lambda item: -item[1][0])

    head = f"{'ms/step':>10}{'calls':>10}{'of wall':>10}"
    lines = [f"{steps} steps, wall time per step {span / steps / 1e3:.3f} ms", "", f"{head}  class"]
    lines += [row(us, calls, kind) for kind, (us, calls) in longest(by_class)]
    lines += [
        row(span - busy_us, None, "idle"),
        row(busy_us - not_comm_us, None, "communication that nothing hides"),
    ]
    gaps = [(start - end, end, start) for (_, end), (start, _) in pairwise(busy)]
    if gaps:
        lines += ["", f"{'us':>10}  the longest gaps"]
        before = {end: w.name for w in work for _, end in w.times}
        after = {start: w.name for w in work for start, _ in w.times}
        lines += [
            f"{us:10.1f}  {_short(before[end], 60)} -> {_short(after[start], 60)}"
            for us, end, start in sorted(gaps, reverse=True)[:_GAPS]
        ]
    lines += ["", f"{head}  {'class':<14}{'kernel':<}"]
    lines += [
        row(us, calls, f"{kernel_class(name):<14}{_short(name, 110)}") for name, (us, calls) in longest(by_name)[:_TOP]
    ]
    return "\n".join(lines) + "\n"


def device_work(trace: dict[str, Any]) -> list[Work]:
    """Kernels, copies and fills of the GPU, each with its whole duration."""
    return [
        Work(e["name"], [(e["ts"], end_us(e))])
        for e in trace["traceEvents"]
        if e.get("ph") == "X" and e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]


def cpu_work(trace: dict[str, Any]) -> list[Work]:
    """Operators of the CPU. They nest within a thread; each has the times at which none of its callees ran."""
    threads: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") == "cpu_op":
            threads[event.get("tid")].append(event)
    work = []
    for thread, events in threads.items():
        running: list[tuple[float, Work]] = []  # until when; each is called by the one before
        for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
            _end_before(event["ts"], running)
            caller = running[-1][1] if running else None
            if caller is not None:
                caller.times[-1] = (caller.times[-1][0], event["ts"])
            work.append(Work(event["name"], [(event["ts"], event["ts"])], thread, caller.name if caller else ""))
            running.append((end_us(event), work[-1]))
        _end_before(math.inf, running)
    return work


def _end_before(ts: float, running: list[tuple[float, Work]]) -> None:
    """Let end what has ended by then; what called it goes on."""
    while running and running[-1][0] <= ts:
        end, ended = running.pop()
        ended.times[-1] = (ended.times[-1][0], end)
        if running:
            running[-1][1].times.append((end, end))


def end_us(event: dict[str, Any]) -> float:
    """Return when an event of a trace ends."""
    return event["ts"] + event["dur"]


def merge_spans(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Unite overlapping intervals, in order of time."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def total_us(intervals: list[tuple[float, float]]) -> float:
    """Return how long some intervals are that do not overlap."""
    return sum(end - start for start, end in intervals)


def _short(name: str, width: int) -> str:
    """Cut a name: C++ kernels carry their whole template, after namespaces that say nothing."""
    for noise in ("void ", "(anonymous namespace)::", "at::native::"):
        name = name.replace(noise, "")
    return name if len(name) <= width else name[: width - 3] + "..."
