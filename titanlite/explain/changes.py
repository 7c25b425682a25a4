"""Say what changed between two profiled runs, and which of their config differences did it.

A key is blamed only for categories that it can touch: `TOUCHES` says which. Of several differing keys that touch what
changed most, the one whose categories changed most together comes first.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from titanlite.explain.causes import Cause, losses, work
from titanlite.explain.divide import CATEGORIES, HOST, STRAGGLER_WAIT
from titanlite.explain.profiled import ProfiledSteps
from titanlite.observe.step_profile import (
    ATTENTION,
    CASTS,
    COMMUNICATION,
    COMPUTE,
    DATA_WAIT,
    EVALUATION,
    MATMUL,
    NUMERICS,
    OPTIMIZER,
    RECOMPILATION,
    SAVING,
    VALIDATION,
)

_SIZES = ("model.*", "training.seq_len", "training.local_batch_size", "training.global_batch_size")
_AGAIN = ("activation_checkpoint.*",)
_SPLIT = ("parallelism.*_parallel_degree", "parallelism.data_parallel_*")
_UPDATE = ("optimizer.recipe", "optimizer.file", "optimizer.state_dtype", "optimizer.ema_decay")
_NUMBERS = ("float8.*", "training.mixed_precision_param", "training.deterministic")
_SENT = (*_SIZES, *_SPLIT, *_NUMBERS, "training.mixed_precision_reduce", *_AGAIN)

TOUCHES = {
    MATMUL: (*_SIZES, *_AGAIN, *_SPLIT, *_NUMBERS, "parallelism.async_tensor_parallel"),
    ATTENTION: (*_SIZES, *_AGAIN, *_SPLIT, *_NUMBERS, "data.*"),
    CASTS: (*_SIZES, *_AGAIN, *_SPLIT, *_NUMBERS, "compile.enable"),
    OPTIMIZER: (*_UPDATE, "model.*", *_SPLIT, "float8.recipe", "metrics.log_freq"),
    COMPUTE: (*_SIZES, *_AGAIN, *_SPLIT, *_NUMBERS, "compile.enable"),
    f"{COMMUNICATION} dp_shard": (*_SENT, "parallelism.fsdp_*", "compile.enable"),
    f"{COMMUNICATION} dp_replicate": _SENT,
    f"{COMMUNICATION} cp": (*_SENT, "data.*"),
    f"{COMMUNICATION} tp": (*_SENT, "parallelism.async_tensor_parallel"),
    f"{COMMUNICATION} ep": (*_SENT, "compile.enable"),
    f"{COMMUNICATION} all ranks": (*_SPLIT, *_UPDATE, "model.*", "float8.recipe"),
    STRAGGLER_WAIT: _SPLIT,
    RECOMPILATION: ("compile.enable", "activation_checkpoint.*", "model.*", "training.seq_len"),
    DATA_WAIT: ("data.*", "training.seq_len", "training.local_batch_size", "training.global_batch_size"),
    HOST: (*_SIZES, *_AGAIN, "compile.enable", "float8.*", "metrics.*", "parallelism.*"),
    VALIDATION: ("validation.*",),
    EVALUATION: ("evaluation.*",),
    SAVING: ("checkpoint.*",),
    NUMERICS: ("metrics.float8_numerics_freq",),
}
"""Config keys, as shell patterns, that can change the time of a category."""

_NO_MATTER = (
    "job.*",
    "profiling.*",
    "metrics.wandb*",
    "checkpoint.resume",
    "checkpoint.keep_latest_k",
    "training.seed",
)


@dataclass(frozen=True)
class Difference:
    """A config key that two runs have with different values, and what it touches of what changed.

    Attributes:
        text: as "compile.enable: true → false".
        touched: categories, the most changed first.
        us: the change of these in the direction of the step's change.
    """

    key: str
    text: str
    touched: Sequence[str]
    us: float


def changed_parts(a: ProfiledSteps, b: ProfiledSteps) -> dict[str, tuple[float, float]]:
    """Return the µs of each category in both runs, for the categories that either has."""
    one, two = a.parts, b.parts
    return {name: (one.get(name, 0.0), two.get(name, 0.0)) for name in CATEGORIES if name in one or name in two}


def config_changes(a: ProfiledSteps, b: ProfiledSteps) -> list[Difference]:
    """Return the differing keys, those first that touch what changed most."""
    direction = 1 if b.wall_us >= a.wall_us else -1
    changes = {name: direction * (two - one) for name, (one, two) in changed_parts(a, b).items()}
    found = []
    for key in dict.fromkeys((*a.config, *b.config)):
        values = [json.dumps(run.config[key]) if key in run.config else "-" for run in (a, b)]
        if values[0] == values[1] or _matches(key, _NO_MATTER):
            continue
        touched = sorted((name for name in changes if _matches(key, TOUCHES[name])), key=lambda n: -changes[n])
        us = sum(max(0.0, changes[name]) for name in touched)
        found.append(Difference(key, f"{key}: {values[0]} → {values[1]}", touched, us))
    return sorted(found, key=lambda difference: -difference.us)


def first_change(a: ProfiledSteps, b: ProfiledSteps) -> tuple[Cause, float, list[Difference]] | None:
    """Find what changed the step most.

    Returns:
        The cause, as the run has it that loses more by it, its change in µs from a to b, and the differing keys that
        touch it; None if nothing changed in the direction of the step.
    """
    direction = 1 if b.wall_us >= a.wall_us else -1
    one, two = ({cause.name: cause for cause in (*losses(run), *work(run))} for run in (a, b))
    changes = {
        name: (two[name].us if name in two else 0.0) - (one[name].us if name in one else 0.0) for name in one | two
    }
    if not changes:
        return None
    name, change = max(changes.items(), key=lambda item: direction * item[1])
    if direction * change <= 0:
        return None
    slower = (two if direction > 0 else one).get(name) or (one | two)[name]
    keys = [difference for difference in config_changes(a, b) if slower.category in difference.touched]
    return slower, change, keys


def _matches(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)
