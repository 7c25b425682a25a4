"""Define the summary of one rank's trace, `profile/rank<i>.json`, which `titanlite explain` reads.

It holds intervals by category, the collectives in order, each step's start and end, and the memory at its peak: a few
hundred kilobytes, where an 8B model's trace has 100 MB. Times are microseconds since `origin_us`, by the host's clock.
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
"""Categories of device work. Time in which kernels overlap counts for the category that comes first in this order."""

VALIDATION, EVALUATION, SAVING, NUMERICS = "validation", "evaluation", "saving", "float8 numerics"
ASIDE = (VALIDATION, EVALUATION, SAVING, NUMERICS)
"""Categories of work between steps."""

DATA_WAIT, RECOMPILATION = "data wait", "recompilation"
HOST_WORK = (*ASIDE, RECOMPILATION, DATA_WAIT)
"""Categories of host work in a trace. Overlapping time counts for the category that comes first in this order."""

COMMUNICATION = "communication"
"""Prefix of the categories of collectives; the mesh axis follows, as in "communication dp_shard"."""

AXES = ("dp_shard", "dp_replicate", "cp", "tp", "ep", "all ranks")
"""Mesh axes of collectives. "all ranks" is for collectives over every rank, such as that of the loss."""

BY_COPY_ENGINES = ", by copy engines"
"""Suffix of the axis of collectives by copy engines; ranks may order them differently relative to those of NCCL."""
OF_EXPERTS = ", of experts"
"""Suffix of the axis of collectives of experts' weights under expert parallelism, which span fewer ranks."""

_VERSION = 2

Interval = tuple[float, float]


@dataclass(frozen=True)
class StepEdges:
    """Start and end of one step. On a GPU a step ends with its last kernel, and the next one starts at this end."""

    step: int
    start_us: float
    end_us: float


@dataclass(frozen=True)
class PeakMemory:
    """Memory of a rank at the moment of the traced steps at which most was allocated.

    Attributes:
        categories: bytes by category.
        allocated: sum of the categories without fragmentation, in bytes.
        reserved: most bytes that the caching allocator reserved; 0 on a CPU.
    """

    categories: Mapping[str, int]
    allocated: int
    reserved: int


@dataclass(frozen=True)
class RankProfile:
    """Summary of one rank's trace of a few steps.

    Attributes:
        device: "cuda" or "cpu".
        origin_us: start of the first step, in microseconds since 1970. All other times are relative to it.
        clock_us: microseconds from the start of the first step until the device had finished the last, by the host's
            clock. The steps must add up to it.
        spans: merged intervals by category.
        groups: by mesh axis, the ranks of this rank's group.
        collectives: by axis, the interval of each collective of this rank, in the order of the calls.
        graphs: number of graphs that were compiled during the steps.
        forecast: bytes by category, as predicted when the run was built; empty without a prediction.
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
        """Return the profile as the JSON text of its file."""

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
        RunError: the file of a rank is missing, damaged, or of other steps than rank 0's.
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
