"""Read the profile of a run and divide its steps, for the tables, the first cause of lost time and the picture."""

import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.comparison.run_paths import require_runs
from titanlite.comparison.runs import recorded_config, recorded_receipt
from titanlite.explain.divide import Division, divide, mean_parts
from titanlite.explain.waits import Waits, find_waits
from titanlite.observe.metrics import read_metrics
from titanlite.observe.step_profile import RankProfile, read_profiles
from titanlite.preflight.run_again import processes_of
from titanlite.streams import one_line


@dataclass(frozen=True)
class ProfiledSteps:
    """The profiled steps of all ranks of a run."""

    name: str
    config: Mapping[str, Any]  # dotted key → value
    profiles: Sequence[RankProfile]  # in order of rank
    waits: Waits
    divisions: Sequence[Division]  # of each step of each rank
    unprofiled_us: float | None = None  # median wall time of steps that were not recorded; None if the run logged none

    @property
    def steps(self) -> list[int]:
        """Return the numbers of the profiled steps."""
        return [step.step for step in self.profiles[0].steps]

    @property
    def wall_us(self) -> float:
        """Return the mean wall time of a step over steps and ranks."""
        return statistics.fmean(d.wall_us for d in self.divisions)

    @property
    def parts(self) -> dict[str, float]:
        """Return the mean µs of each category; they sum to `wall_us`."""
        return mean_parts([d.parts for d in self.divisions])

    @property
    def parts_by_rank(self) -> dict[int, dict[str, float]]:
        """Return the mean µs of each category of each rank."""
        ranks = [profile.rank for profile in self.profiles]
        return {rank: mean_parts([d.parts for d in self.divisions if d.rank == rank]) for rank in ranks}

    @property
    def graphs(self) -> int:
        """Return how many graphs torch.compile made in the profiled steps, on the rank with most."""
        return max(profile.graphs for profile in self.profiles)

    @property
    def median_step(self) -> int:
        """Return the step with the median wall time, which is drawn by default."""
        walls = {step: statistics.fmean(d.wall_us for d in self.divisions if d.step == step) for step in self.steps}
        return sorted(walls, key=lambda step: walls[step])[(len(walls) - 1) // 2]


def read_profiled(folder: Path) -> ProfiledSteps:
    """Read a run's profile and config, and divide its steps; refuse a folder without a profile."""
    require_runs("titanlite explain", [folder], "profile/rank0.json", _profiling_command)
    profiles, config = read_profiles(folder), recorded_config(folder)
    waits = find_waits(profiles)
    divisions = [division for profile in profiles for division in divide(profile, waits)]
    unprofiled_us = _unprofiled_us(folder / "metrics.jsonl", profiles[0])
    return ProfiledSteps(one_line(folder.resolve().name), config, profiles, waits, divisions, unprofiled_us)


def _profiling_command(folder: Path) -> str:
    """Return the command that trains a run again with a profile, under another name; "" if the folder is no run."""
    if not (folder / "config.toml").is_file():
        return ""
    name, processes = f"{folder.resolve().name}-profiled", processes_of(recorded_receipt(folder))
    words = ["titanlite", "train", str(folder / "config.toml"), "--job.name", name, "--profiling.enable", "true"]
    return shlex.join([*words, *(["--gpus", str(processes)] if processes and processes > 1 else [])])


def _unprofiled_us(metrics: Path, profile: RankProfile) -> float | None:
    """Return the median µs of unprofiled steps, except steps 1 and 2 (compilation) and neighbours of profiled ones."""
    rows = read_metrics(metrics) if metrics.is_file() else []
    near = range(profile.steps[0].step - 1, profile.steps[-1].step + 2)
    seconds = [row["seconds"] for row in rows if row.get("seconds") and row["step"] > 2 and row["step"] not in near]
    return 1e6 * statistics.median(seconds) if seconds else None
