"""Write what a profile says as text that folds into 80 columns: a run's time, two runs' difference, the memory."""

import statistics
import textwrap
from collections.abc import Mapping, Sequence

from titanlite.explain.causes import NOTABLE, Cause, first_cause, losses, work
from titanlite.explain.changes import Difference, changed_parts, config_changes, first_change
from titanlite.explain.divide import CATEGORIES
from titanlite.explain.profiled import ProfiledSteps
from titanlite.observe.peak_memory import ACTIVATIONS, BUFFERS, FLOAT8, FRAGMENTS, GATHERED
from titanlite.observe.step_profile import COMMUNICATION, PeakMemory
from titanlite.text_table import columns

_WIDTH = 80
_SECOND = 3  # further losses that are named
_MEMORY = ("parameters", "gradients", "optimizer", ACTIVATIONS, GATHERED, FLOAT8, BUFFERS, FRAGMENTS)
_FORECAST = {  # what the prediction says more finely, or in other words
    "gathered weights": GATHERED,
    "communication": GATHERED,
    "logits": ACTIVATIONS,
    "working set": ACTIVATIONS,
    "slack": FRAGMENTS,
}


def run_text(run: ProfiledSteps) -> str:
    """Return the tables and causes of one run."""
    lines = [_headline(run), *_recording_lines(run), "", _time_table(run)]
    lines += [_beside_the_sum(run), _causes(run)]
    if memory := memory_table(run):
        lines += ["", memory]
    return "\n".join(lines).rstrip() + "\n"


def two_runs_text(a: ProfiledSteps, b: ProfiledSteps) -> str:
    """Return what changed from one run to another."""
    rows = [(name, _ms(one), _ms(two), _signed(two - one)) for name, (one, two) in changed_parts(a, b).items()]
    total = ("step", _ms(a.wall_us), _ms(b.wall_us), _signed(b.wall_us - a.wall_us))
    lines = [_headline(a, "A  "), _headline(b, "B  "), "", columns(("ms a step", "A", "B", "change"), *rows, total)]
    graphs = f"graphs compiled in these steps: {a.graphs} and {b.graphs}"
    lines += [
        graphs,
        *(_in_80(note, f"{name}: ") for name, run in (("A", a), ("B", b)) for note in _straggler_lines(run)),
    ]
    change = first_change(a, b)
    if change is None:
        lines.append("first cause of the change: none; the step has not changed")
    else:
        lines += ["", *_first_change_lines(a, b, *change)]
    if others := [d for d in config_changes(a, b) if d.touched]:
        lines += ["", "config differences that touch time, and what they touch"]
        lines += [_in_80(f"{d.text}: {', '.join(d.touched)}", "  ") for d in others]
    return "\n".join(lines).rstrip() + "\n"


def memory_table(run: ProfiledSteps) -> str:
    """Return the memory at the peak of the rank that holds most, beside its forecast; "" if nothing is known."""
    known = [(profile.memory, profile) for profile in run.profiles if profile.memory is not None]
    if not known:
        return ""
    memory, profile = max(known, key=lambda pair: max(pair[0].reserved, pair[0].allocated))
    forecast = _regrouped(profile.forecast)
    names = dict.fromkeys(name for name in _MEMORY if name in memory.categories or name in forecast)
    if profile.device == "cpu":  # which has no caching allocator
        names.pop(FRAGMENTS, None)
        forecast.pop(FRAGMENTS, None)
    rows = [
        (name, _mib(memory.categories.get(name, 0)), _mib(forecast[name]) if name in forecast else "-")
        for name in names
    ]
    total = _mib(sum(forecast.values())) if forecast else "-"
    head = (f"MiB at the peak, rank {profile.rank}", "measured", "forecast")
    return columns(head, *rows, ("all", _mib(_all(memory)), total))


def _all(memory: PeakMemory) -> int:
    return sum(memory.categories.values())


def _regrouped(forecast: Mapping[str, int]) -> dict[str, int]:
    """Return a forecast in the categories that are measured."""
    grouped: dict[str, int] = {}
    for name, size in forecast.items():
        name = _FORECAST.get(name, name)
        grouped[name] = grouped.get(name, 0) + size
    return {name: size for name, size in grouped.items() if size}


def _headline(run: ProfiledSteps, letter: str = "") -> str:
    first, last = (run.profiles[0].steps[i].step for i in (0, -1))
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    ranks = "1 rank" if len(run.profiles) == 1 else f"{len(run.profiles)} ranks"
    said = f"{run.name}: {steps}, {ranks} on {run.profiles[0].device}, {run.wall_us / 1e3:,.1f} ms a step"
    return _in_80(said, letter)


def _recording_lines(run: ProfiledSteps) -> list[str]:
    if run.unprofiled_us is None:
        return []
    more = run.wall_us / run.unprofiled_us - 1
    return [_in_80(f"steps that were not recorded took {_ms(run.unprofiled_us)} ms, so recording costs {more:+.0%}")]


def _time_table(run: ProfiledSteps) -> str:
    parts, by_rank, wall = run.parts, run.parts_by_rank, run.wall_us
    rows = []
    for name in (name for name in CATEGORIES if name in parts):
        of_ranks = [each.get(name, 0.0) for each in by_rank.values()]
        spread = f"{_ms(min(of_ranks))} - {_ms(max(of_ranks))}"
        rows.append((name, _ms(parts[name]), f"{parts[name] / wall:.1%}", spread))
    total = sum(parts.values())
    head = ("part of the step", "ms", "share", "by rank")
    return columns(head, *rows, ("sum", _ms(total), f"{total / wall:.1%}", "")).rstrip("\n")


def _beside_the_sum(run: ProfiledSteps) -> str:
    lines = [""]
    hidden = {name.removeprefix(f"{COMMUNICATION} "): us for name, us in run.hidden.items() if us >= 1}
    if hidden:
        listed = ", ".join(f"{axis} {_ms(us)} ms" for axis, us in hidden.items())
        lines.append(_in_80(f"hidden behind the device's work, not in the sum: {listed}"))
    if run.waits.unmatched:
        axes = ", ".join(dict.fromkeys(run.waits.unmatched))
        lines.append(_in_80(f"waits over {axes} are not known: its ranks were not in equally many collectives"))
    lines.append(f"graphs compiled in these steps: {run.graphs}")
    return "\n".join([*lines, *map(_in_80, _straggler_lines(run))])


def _straggler_lines(run: ProfiledSteps) -> list[str]:
    if (straggler := run.waits.straggler) is None:
        return []
    rank, us = straggler
    share = us / sum(run.waits.caused_us.values())
    steps = len(run.profiles[0].steps)
    return [f"comes last most: rank {rank}, by {us / steps / 1e3:.1f} ms a step, {share:.0%} of all waits"]


def _causes(run: ProfiledSteps) -> str:
    first, found = first_cause(run), losses(run)
    lines = [""]
    if first is None:
        most = f"{found[0].name} has {_ms(found[0].us)} ms" if found else "there is none"
        lines.append(_in_80(f"first cause: none; no loss is {NOTABLE:.0%} of the step ({most})"))
        lines += [_cause_lines(f"most of the step is {cause.name}", cause, run.wall_us) for cause in work(run)[:1]]
        return "\n".join(lines)
    lines.append(_cause_lines(f"first cause: {first.name}", first, run.wall_us))
    further = [cause for cause in found[1 : 1 + _SECOND] if cause.us >= NOTABLE * run.wall_us]
    lines += [_cause_lines(f"then: {cause.name}", cause, run.wall_us) for cause in further]
    return "\n".join(lines)


def _cause_lines(title: str, cause: Cause, wall_us: float) -> str:
    lines = [_in_80(f"{title}, {_ms(cause.us)} ms a step ({cause.us / wall_us:.0%})")]
    lines += [_in_80(cause.because, "  ")] if cause.because else []
    return "\n".join([*lines, _in_80(cause.fix, "  change: ")])


def _first_change_lines(
    a: ProfiledSteps, b: ProfiledSteps, cause: Cause, change_us: float, keys: Sequence[Difference]
) -> list[str]:
    texts = [key.text for key in keys]
    said = f"{cause.name}, {_signed(change_us)} ms of {_signed(b.wall_us - a.wall_us)} ms a step"
    if texts:
        lines = [_in_80(f"first cause of the change: {texts[0]}"), _in_80(f"by {said}", "  ")]
        return lines + [_in_80(f"or {text}", "  ") for text in texts[1:]]
    lines = [_in_80(f"first cause of the change: {said}"), _in_80("no config difference touches it", "  ")]
    return [*lines, _in_80(cause.because, "  "), _in_80(cause.fix, "  change: ")]


def _in_80(text: str, indent: str = "") -> str:
    """Fold a text into 80 columns; what follows a long indent is indented as far."""
    return textwrap.fill(
        text, _WIDTH, initial_indent=indent, subsequent_indent=" " * max(2, len(indent)), break_on_hyphens=False
    )


def _ms(us: float) -> str:
    return f"{us / 1e3:,.1f}"


def _signed(us: float) -> str:
    return f"{us / 1e3:+,.1f}"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f}"


def median_step(run: ProfiledSteps) -> int:
    """Return the step of the window whose wall time is the median: the one to draw."""
    walls = {
        step.step: statistics.fmean(d.wall_us for d in run.divisions if d.step == step.step)
        for step in run.profiles[0].steps
    }
    return sorted(walls, key=lambda step: walls[step])[(len(walls) - 1) // 2]
