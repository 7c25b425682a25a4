"""Find which ranks waited for which: the n-th collective of a rank is matched with the n-th of the others in its group.

A collective ends on all ranks when the last rank has entered it and the data has moved. So the rank that entered last
has the shortest duration. Another rank waited at the beginning, for as long as its own duration exceeds the shortest.
Only durations are compared, so the clocks of hosts need not agree.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from titanlite.observe.step_profile import BY_COPY_ENGINES, Interval, RankProfile


@dataclass
class Waits:
    """The times at which ranks waited for other ranks in the collectives of the profiled steps."""

    spans: dict[int, list[Interval]] = field(default_factory=lambda: defaultdict(list))  # by rank, when it waited
    # By the rank that entered a collective last: µs that the others of its group waited on average, summed over calls.
    caused_us: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    # Axes whose waits are not known, because their ranks were not in equally many collectives.
    unmatched: list[str] = field(default_factory=list)

    @property
    def straggler(self) -> tuple[int, float] | None:
        """Return the rank for which the others waited longest, and how long in µs; None if no rank waited."""
        return max(self.caused_us.items(), key=lambda item: item[1], default=None)


def find_waits(profiles: Sequence[RankProfile]) -> Waits:
    """Match the collectives of all ranks, and return which rank waited when, and for which."""
    waits = Waits()
    by_rank = {profile.rank: profile for profile in profiles}
    for axis in sorted({axis for profile in profiles for axis in profile.collectives}):
        of_mesh = axis.removesuffix(BY_COPY_ENGINES)
        for group in sorted({tuple(profile.groups.get(of_mesh, range(profile.world))) for profile in profiles}):
            calls = {rank: by_rank[rank].collectives.get(axis, ()) for rank in group}
            if len(set(map(len, calls.values()))) > 1:
                waits.unmatched.append(axis)
            elif len(group) > 1:
                _add_waits(waits, calls)
    return waits


def _add_waits(waits: Waits, calls: Mapping[int, Sequence[Interval]]) -> None:
    for meeting in zip(*calls.values(), strict=True):
        lasted = {rank: end - start for rank, (start, end) in zip(calls, meeting, strict=True)}
        last = min(lasted, key=lambda rank: lasted[rank])
        for rank, (start, _) in zip(calls, meeting, strict=True):
            if (waited := lasted[rank] - lasted[last]) > 0:
                waits.spans[rank].append((start, start + waited))
                waits.caused_us[last] += waited / (len(calls) - 1)
