"""Format a profile as text: the table of time, the first cause of lost time, and the table of memory."""

from collections import Counter

from titanlite.explain.causes import NOTABLE, first_cause, longest_loss
from titanlite.explain.divide import mean_parts
from titanlite.explain.profiled import ProfiledSteps
from titanlite.observe.peak_memory import ACTIVATIONS, BUFFERS, FLOAT8, FRAGMENTS, GATHERED
from titanlite.observe.step_profile import ASIDE, COMMUNICATION
from titanlite.text_table import columns

_MEMORY = ("parameters", "gradients", "optimizer", ACTIVATIONS, GATHERED, FLOAT8, BUFFERS, FRAGMENTS)
_FORECAST = {  # category of the forecast → measured category that includes it
    "gathered weights": GATHERED,
    "communication": GATHERED,
    "logits": ACTIVATIONS,
    "working set": ACTIVATIONS,
    "slack": FRAGMENTS,
}


def run_text(run: ProfiledSteps) -> str:
    """Return the table of a run's time by rank, the first cause of lost time, and the table of memory."""
    time, cause = [_time_table(run), *_beside_the_sum(run)], _first_cause(run)
    lines = [*_headline(run), "", *time, "", *cause, "", memory_table(run)]
    return "\n".join(lines).rstrip() + "\n"


def memory_table(run: ProfiledSteps) -> str:
    """Return a table of the peak memory of the rank with the highest peak, beside its forecast; "" if not known."""
    known = [(profile.memory, profile) for profile in run.profiles if profile.memory is not None]
    if not known:
        return ""
    memory, profile = max(known, key=lambda pair: max(pair[0].reserved, pair[0].allocated))
    measured, forecast = memory.categories, Counter[str]()
    for name, size in profile.forecast.items():
        forecast[_FORECAST.get(name, name)] += size
    if profile.device == "cpu":  # a CPU has no caching allocator
        del forecast[FRAGMENTS]
    names = [name for name in _MEMORY if name in measured or forecast[name]]
    rows = [(name, _mib(measured.get(name, 0)), _mib(forecast[name]) if forecast[name] else "-") for name in names]
    total = _mib(forecast.total()) if forecast.total() else "-"
    head = (f"MiB at the peak, rank {profile.rank}", "measured", "forecast")
    return columns(head, *rows, ("all", _mib(sum(measured.values())), total))


def _headline(run: ProfiledSteps) -> list[str]:
    first, last = run.steps[0], run.steps[-1]
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    ranks = "1 rank" if len(run.profiles) == 1 else f"{len(run.profiles)} ranks"
    lines = [f"{run.name}: {steps}, {ranks} on {run.profiles[0].device}, {_ms(run.wall_us)} ms a step"]
    if run.unprofiled_us is not None:
        aside = {name: us for name, us in run.parts.items() if name in ASIDE}  # not in the other steps' time
        more = (run.wall_us - sum(aside.values())) / run.unprofiled_us - 1
        took = f"steps that were not recorded took {_ms(run.unprofiled_us)} ms"
        without = f", {' and '.join(aside)} not counted" if aside else ""
        lines.append(f"{took}, so recording costs {more:+.0%}{without}")
    return lines


def _time_table(run: ProfiledSteps) -> str:
    parts, by_rank, wall = run.parts, run.parts_by_rank, run.wall_us
    rows = []
    for name, us in parts.items():
        of_ranks = [each.get(name, 0.0) for each in by_rank.values()]
        rows.append((name, _ms(us), f"{us / wall:.1%}", f"{_ms(min(of_ranks))} - {_ms(max(of_ranks))}"))
    total = sum(parts.values())
    head = ("part of the step", "ms", "share", "by rank")
    return columns(head, *rows, ("sum", _ms(total), f"{total / wall:.1%}", ""))


def _beside_the_sum(run: ProfiledSteps) -> list[str]:
    lines = []
    mean = mean_parts([division.hidden for division in run.divisions])
    hidden = {name.removeprefix(f"{COMMUNICATION} "): us for name, us in mean.items() if us >= 1}
    if hidden:
        listed = ", ".join(f"{axis} {_ms(us)} ms" for axis, us in hidden.items())
        lines.append(f"hidden behind the device's work, not in the sum: {listed}")
    if run.waits.unmatched:
        axes = ", ".join(dict.fromkeys(run.waits.unmatched))
        lines.append(f"waits over {axes} are not known: its ranks were not in equally many collectives")
    lines.append(f"graphs compiled in these steps: {run.graphs}")
    if run.waits.straggler is not None:
        rank, us = run.waits.straggler
        share, each = us / sum(run.waits.caused_us.values()), _ms(us / len(run.steps))
        lines.append(f"comes last most: rank {rank}, by {each} ms a step, {share:.0%} of all waits")
    return lines


def _first_cause(run: ProfiledSteps) -> list[str]:
    first, longest = first_cause(run), longest_loss(run)
    if first is None:
        most = f"{longest.name} has {_ms(longest.us)} ms" if longest else "there is none"
        return [f"first cause: none; no loss is {NOTABLE:.0%} of the step ({most})"]
    size = f"{_ms(first.us)} ms a step ({first.us / run.wall_us:.0%})"
    return [f"first cause: {first.name}, {size}", f"  {first.because}", f"  change: {first.fix}"]


def _ms(us: float) -> str:
    return f"{us / 1e3:,.1f}"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f}"
