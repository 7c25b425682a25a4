"""The summary of one rank's profile, `profile/rank<i>.json`, which `titanlite explain` reads.

It has intervals by category, each collective in order, the edges of the steps and the memory at the peak. A trace of 8B
has 100 MB; this has a few hundred kilobytes. Times are microseconds since `origin_us`, which is by the host's clock.
"""

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from titanlite.errors import Problem, describe
from titanlite.json_file import MALFORMED, as_type, read_json
from titanlite.observe.metrics import RunError

ATTENTION, MATMUL, CASTS, OPTIMIZER, COMPUTE = "attention", "matmul", "casts", "optimizer", "other compute"
DEVICE_WORK = (ATTENTION, MATMUL, CASTS, OPTIMIZER, COMPUTE)
"""The kinds of a device's work, in the order in which overlapping kernels have the time."""

VALIDATION, EVALUATION, SAVING, NUMERICS = "validation", "evaluation", "saving", "float8 numerics"
ASIDE = (VALIDATION, EVALUATION, SAVING, NUMERICS)
"""The work between steps."""

DATA_WAIT, RECOMPILATION = "data wait", "recompilation"
HOST_WORK = (*ASIDE, RECOMPILATION, DATA_WAIT)
"""The kinds of work that a host is seen at, in the order in which it has the time."""

COMMUNICATION = "communication"
"""Before the mesh axis, as in "communication dp_shard", where the category is a collective's."""

AXES = ("dp_shard", "dp_replicate", "cp", "tp", "ep", "all ranks")
"""The last: of collectives over every rank, as for the loss."""

BY_COPY_ENGINES = ", by copy engines"
"""After the axis of collectives without NCCL, which ranks may run in another order among NCCL's."""
OF_EXPERTS = ", of experts"
"""After the axis of collectives of experts' weights, where ranks share experts out: fewer ranks meet there."""

_VERSION = 2

Interval = tuple[float, float]


@dataclass(frozen=True)
class StepEdges:
    """When one step began and ended: on a GPU, by its kernels."""

    step: int
    start_us: float
    end_us: float


@dataclass(frozen=True)
class PeakMemory:
    """Bytes at the moment of the window at which most were allocated.

    Attributes:
        categories: bytes by category.
        allocated: all of them.
        reserved: by the caching allocator, at most; 0 on a CPU.
    """

    categories: Mapping[str, int]
    allocated: int
    reserved: int


@dataclass(frozen=True)
class RankProfile:
    """The time of one rank in a few steps.

    Attributes:
        device: "cuda" or "cpu".
        origin_us: microseconds since 1970 of the time 0.
        clock_us: from the beginning of the first step until the device had done the last, by the host's own clock:
            what the steps must add up to.
        spans: merged intervals by category.
        groups: ranks of this one's group on each mesh axis.
        collectives: when this rank was in each, by axis, in the order of their calls.
        graphs: number of graphs that were compiled meanwhile.
        forecast: bytes by category, as predicted when the run was built; empty if nothing was.
    """

    rank: int
    world: int
    device: str
    origin_us: float
    clock_us: float
    steps: Sequence[StepEdges]
    spans: Mapping[str, Sequence[Interval]]
    groups: Mapping[str, Sequence[int]] = field(default_factory=dict)
    collectives: Mapping[str, Sequence[Interval]] = field(default_factory=dict)
    graphs: int = 0
    memory: PeakMemory | None = None
    forecast: Mapping[str, int] = field(default_factory=dict)
    host: str = field(default_factory=socket.gethostname)

    def to_json(self) -> str:
        """Return the text of the file."""

        def rounded(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: rounded(item) for key, item in value.items()}
            if isinstance(value, list | tuple):
                return [rounded(item) for item in value]
            return round(value, 1) if isinstance(value, float) else value

        return json.dumps({"version": _VERSION} | rounded(asdict(self)), separators=(",", ":")) + "\n"


def read_profiles(run: Path) -> list[RankProfile]:
    """Read the summaries of all ranks of a run from its folder.

    Raises:
        RunError: the profile lacks a rank, or a file is damaged or of another window.
    """
    folder, fix = run / "profile", "profile the run again"
    first = _read_summary(folder / "rank0.json")
    named = (folder / f"rank{rank}.json" for rank in range(1, first.world))
    if missing := list(islice((path.name for path in named if not path.is_file()), 9)):
        names = ", ".join(missing[:8]) + (", …" if len(missing) > 8 else "")
        want = f"a file of each of the {first.world} ranks; hosts without a shared folder write each its own"
        raise RunError.of("titanlite explain", str(folder), f"no {names}", want, "copy these files here")
    paths = [folder / f"rank{rank}.json" for rank in range(1, first.world)]
    profiles = [first, *map(_read_summary, paths)]
    numbers = [[step.step for step in profile.steps] for profile in profiles]
    problems = [
        Problem(str(path), f"steps {saw} of {profile.world} ranks", f"rank 0's, {numbers[0]} of {first.world}", fix)
        for path, profile, saw in zip(paths, profiles[1:], numbers[1:], strict=True)
        if saw != numbers[0] or profile.world != first.world
    ]
    if problems:
        raise RunError(describe("titanlite explain", problems))
    return profiles


def _read_summary(path: Path) -> RankProfile:
    try:
        content = read_json(path)
        if content.pop("version") != _VERSION:
            raise ValueError("of another version")
        profile: RankProfile = as_type(RankProfile, content)
        ranks = [profile.rank, *(rank for group in profile.groups.values() for rank in group)]
        if f"rank{profile.rank}.json" != path.name or not all(0 <= rank < profile.world for rank in ranks):
            raise ValueError("of another rank")
        if not profile.steps:
            raise ValueError("no step")
        return profile
    except (OSError, *MALFORMED) as error:
        want = f"a rank's profile, as titanlite with version {_VERSION} of the file writes it"
        raise RunError.of(str(path), "content", str(error), want, "profile the run again") from error
