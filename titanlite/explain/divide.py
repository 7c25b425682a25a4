"""Divide the wall time of each step among categories of work, exactly: each instant belongs to one category.

Where intervals overlap, the time belongs to work between steps (as a validation), else to the device's work, else to
communication, else to the host's work. The remaining time is the host's too: it prepares work for an idle device.
Communication before the last rank has come is a wait. So the parts of a step sum to its wall time. Communication that
overlaps the device's work is called hidden, and reported beside the sum. On a CPU, which is host and device in one, the
host's work comes first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from titanlite.explain.waits import Waits
from titanlite.observe.kernel_classes import merge_spans
from titanlite.observe.step_profile import (
    ASIDE,
    AXES,
    COMMUNICATION,
    DATA_WAIT,
    DEVICE_WORK,
    HOST_WORK,
    RECOMPILATION,
    RankProfile,
)

HOST, STRAGGLER_WAIT = "host", "waiting for other ranks"
EXPOSED = tuple(f"{COMMUNICATION} {axis}" for axis in AXES)
CATEGORIES = (*DEVICE_WORK, *EXPOSED, STRAGGLER_WAIT, RECOMPILATION, DATA_WAIT, HOST, *ASIDE)
"""All parts of a step, in the order in which they are shown."""


@dataclass(frozen=True)
class Division:
    """The time of one step of one rank, divided among categories."""

    rank: int
    step: int
    wall_us: float
    parts: Mapping[str, float]  # µs by category; they sum to `wall_us`
    hidden: Mapping[str, float]  # µs of communication beside the device's work, by category; not in the sum


def divide(profile: RankProfile, waits: Waits) -> list[Division]:
    """Divide the wall time of each profiled step of a rank among categories."""
    edges = np.array([profile.steps[0].start_us, *(step.end_us for step in profile.steps)])
    found = exclusive(profile, waits, edges)
    divisions = []
    for i, step in enumerate(profile.steps):
        inside = found.step == i
        owned = np.bincount(found.owner[inside], found.length[inside], minlength=len(found.order))
        parts = {name: float(us) for name, us in zip(found.order, owned, strict=True) if us > 0}
        hidden = {
            name: float(found.length[inside & found.covered[name] & found.is_device].sum())
            for name in EXPOSED
            if name in found.covered
        }
        divisions.append(Division(profile.rank, step.step, step.end_us - step.start_us, parts, hidden))
    return divisions


@dataclass(frozen=True)
class Segments:
    """The profiled time of a rank, cut into n segments wherever a step or an interval begins or ends."""

    start: NDArray[np.float64]  # [n] µs
    length: NDArray[np.float64]  # [n] µs
    step: NDArray[np.int64]  # [n] index of the step
    owner: NDArray[np.int64]  # [n] index in `order` of the category that the segment belongs to
    order: Sequence[str]  # categories by falling priority; the last takes the time without an interval
    covered: Mapping[str, NDArray[np.bool_]]  # by category, [n] whether its intervals cover the segment, hidden or not
    is_device: NDArray[np.bool_]  # [n] whether the device computes


def exclusive(profile: RankProfile, waits: Waits, edges: NDArray[np.float64]) -> Segments:
    """Cut the time of a rank into segments, each of one category. `edges`: the boundaries of steps, [steps + 1] µs."""
    communication = (STRAGGLER_WAIT, *EXPOSED)
    order = (*ASIDE, *DEVICE_WORK, *communication, RECOMPILATION, DATA_WAIT)
    if profile.device == "cpu":
        order = (*HOST_WORK, *DEVICE_WORK, *communication)
    spans = {**profile.spans, STRAGGLER_WAIT: merge_spans(waits.spans.get(profile.rank, ()))}
    intervals = {name: np.array(spans[name], dtype=np.float64).reshape(-1, 2) for name in order if spans.get(name)}
    cuts = np.unique(np.concatenate([edges, *(each.ravel() for each in intervals.values())]))
    cuts = cuts[(cuts >= edges[0]) & (cuts <= edges[-1])]
    start, length = cuts[:-1], np.diff(cuts)
    nobody = np.zeros(len(start), dtype=np.bool_)
    covered = {name: _covers(each, start) for name, each in intervals.items()}
    stack = np.stack([*(covered.get(name, nobody) for name in order), ~nobody])
    is_device = np.logical_or.reduce([covered.get(name, nobody) for name in DEVICE_WORK])
    step = np.searchsorted(edges, start, side="right") - 1
    return Segments(start, length, step, stack.argmax(axis=0), (*order, HOST), covered, is_device)


def _covers(intervals: NDArray[np.float64], start: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return whether each segment, by its start, is within one of the sorted intervals, which do not overlap."""
    place = np.searchsorted(intervals[:, 0], start, side="right") - 1
    return (place >= 0) & (start < intervals[np.maximum(place, 0), 1])


def mean_parts(of: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean µs of each category over several divisions, without categories that none of them has."""
    return {
        name: sum(parts.get(name, 0.0) for parts in of) / len(of)
        for name in CATEGORIES
        if any(name in parts for parts in of)
    }
