"""Profiles made by hand, of ranks that do what a test says."""

from collections.abc import Mapping, Sequence
from typing import Any

from titanlite.explain.divide import divide
from titanlite.explain.profiled import ProfiledSteps
from titanlite.explain.waits import find_waits
from titanlite.observe.step_profile import COMMUNICATION, Interval, RankProfile, StepEdges

STEP_US = 100.0


def rank_profile(
    spans: Mapping[str, Sequence[Interval]],
    *,
    rank: int = 0,
    world: int = 1,
    steps: int = 1,
    device: str = "cuda",
    **more: Any,
) -> RankProfile:
    """Return a rank's profile of steps of 100 µs; its collectives are its communication."""
    collectives = {
        name.removeprefix(f"{COMMUNICATION} "): found for name, found in spans.items() if name.startswith(COMMUNICATION)
    }
    edges = [StepEdges(11 + i, i * STEP_US, (i + 1) * STEP_US) for i in range(steps)]
    given = {"origin_us": 1e15, "clock_us": steps * STEP_US, "collectives": collectives, "host": f"host{rank}"}
    return RankProfile(rank=rank, world=world, device=device, steps=edges, spans=spans, **given | more)


def profiled(*profiles: RankProfile, name: str = "run", **config: object) -> ProfiledSteps:
    """Return a run with these ranks; a key of its config is given as `compile__enable`."""
    waits = find_waits(profiles)
    divisions = [division for profile in profiles for division in divide(profile, waits)]
    keys = {key.replace("__", "."): value for key, value in config.items()}
    return ProfiledSteps(name, keys, profiles, waits, divisions)
