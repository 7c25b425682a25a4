"""A run with its profile, divided: what the tables, the causes and the picture are made from."""

import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.comparison.runs import recorded_config, recorded_receipt
from titanlite.explain.divide import Division, by_rank, divide, hidden_us, mean_parts
from titanlite.explain.waits import Waits, find_waits
from titanlite.json_file import MALFORMED
from titanlite.observe.metrics import read_metrics
from titanlite.observe.step_profile import RankProfile, read_profiles
from titanlite.streams import one_line


@dataclass(frozen=True)
class ProfiledSteps:
    """The profiled steps of all ranks of a run.

    Attributes:
        name: of the run.
        config: dotted key → value.
        profiles: by rank.
        waits: for each other.
        divisions: of each step of each rank.
        unprofiled_us: median wall time of steps that were not recorded; None if the run logged none.
        rules: of the optimizer, by its receipt; where that has none, the name of its recipe.
    """

    name: str
    config: Mapping[str, Any]
    profiles: Sequence[RankProfile]
    waits: Waits
    divisions: Sequence[Division]
    unprofiled_us: float | None = None
    rules: frozenset[str] = frozenset()

    @property
    def is_on_gpus(self) -> bool:
        """Return whether it ran on GPUs."""
        return self.profiles[0].device == "cuda"

    @property
    def wall_us(self) -> float:
        """Return the mean wall time of a step over steps and ranks."""
        return statistics.fmean(d.wall_us for d in self.divisions)

    @property
    def parts(self) -> dict[str, float]:
        """Return the mean µs of each category; they sum to `wall_us`."""
        return mean_parts(self.divisions)

    @property
    def parts_by_rank(self) -> dict[int, dict[str, float]]:
        """Return the mean µs of each category of each rank."""
        return by_rank(self.divisions)

    @property
    def hidden(self) -> dict[str, float]:
        """Return the mean µs of communication that the device's work hides."""
        return hidden_us(self.divisions)

    @property
    def graphs(self) -> int:
        """Return how many graphs the rank with most compiled in the window."""
        return max(profile.graphs for profile in self.profiles)


def read_profiled(folder: Path) -> ProfiledSteps:
    """Read a run's profile and config, and divide its steps.

    Raises:
        RunError: it has no profile, or a file of it is damaged.
    """
    profiles = read_profiles(folder)
    config = recorded_config(folder)
    waits = find_waits(profiles)
    divisions = [division for profile in profiles for division in divide(profile, waits)]
    steps = [step.step for step in profiles[0].steps]
    rules = _rules_by_receipt(folder) or frozenset([str(config.get("optimizer.recipe", ""))])
    unprofiled_us = _unprofiled_us(folder, steps)
    name = one_line(folder.resolve().name)
    return ProfiledSteps(name, config, profiles, waits, divisions, unprofiled_us, rules)


def _rules_by_receipt(folder: Path) -> frozenset[str]:
    entries = recorded_receipt(folder) or ()
    with suppress(*MALFORMED):  # it is another version's
        applied = (entry["applied"] for entry in entries if entry["feature"] == "optimizer")
        return frozenset(group["rule"] for each in applied for group in each["groups"].values())
    return frozenset()


def _unprofiled_us(folder: Path, profiled: Sequence[int]) -> float | None:
    """Return the median time of other steps, but for the first two, which compile, and those next to the window."""
    path = folder / "metrics.jsonl"
    rows = read_metrics(path) if path.is_file() else []
    near = range(profiled[0] - 1, profiled[-1] + 2)
    seconds = [row["seconds"] for row in rows if row.get("seconds") and row["step"] > 2 and row["step"] not in near]
    return 1e6 * statistics.median(seconds) if seconds else None
