"""Name what a step loses most time to, and the config key that did it or would change it.

Lost is what is not the device's own work: exposed communication, waits, the host. Of what a host does, the part that
every rank has counts here; what one rank has beyond the others is what these wait for, and counts once, as that rank's.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titanlite.explain.divide import EXPOSED, HOST, STRAGGLER_WAIT
from titanlite.explain.profiled import ProfiledSteps
from titanlite.observe.step_profile import (
    ASIDE,
    ATTENTION,
    CASTS,
    COMMUNICATION,
    COMPUTE,
    DATA_WAIT,
    DEVICE_WORK,
    EVALUATION,
    HOST_WORK,
    MATMUL,
    NUMERICS,
    OPTIMIZER,
    RECOMPILATION,
    SAVING,
    VALIDATION,
)

NOTABLE = 0.05
"""Share of a step from which on a loss is called its cause."""

_MOST = 0.6
"""Share of all waits that one rank must cause to be called the straggler: of two ranks one always causes half."""


@dataclass(frozen=True)
class Cause:
    """Something that takes time of a step.

    Attributes:
        name: a category, or "rank N comes last".
        category: whose keys change it.
        us: of a step that would be saved without it, at most.
        because: what was seen, in words.
        fix: what to do, beginning with the config key if there is one.
    """

    name: str
    category: str
    us: float
    because: str
    fix: str


def losses(run: ProfiledSteps) -> list[Cause]:
    """Return what is not the device's own work, the longest first."""
    found, ranks = _waits(run), run.parts_by_rank.values()
    for category in (*HOST_WORK, HOST):
        us = min(parts.get(category, 0.0) for parts in ranks)
        found.append(Cause(category, category, us, _seen(category, run), advice(category, run.config)))
    for category in EXPOSED:
        us = run.parts.get(category, 0.0)
        found.append(Cause(category, category, us, _seen(category, run), advice(category, run.config)))
    return sorted((cause for cause in found if cause.us > 0), key=lambda cause: -cause.us)


def work(run: ProfiledSteps) -> list[Cause]:
    """Return the device's own work, the longest first."""
    parts = run.parts
    found = [Cause(name, name, parts.get(name, 0.0), "", advice(name, run.config)) for name in DEVICE_WORK]
    return sorted((cause for cause in found if cause.us > 0), key=lambda cause: -cause.us)


def first_cause(run: ProfiledSteps) -> Cause | None:
    """Return the longest loss; None if none is notable."""
    found = losses(run)
    return found[0] if found and found[0].us >= NOTABLE * run.wall_us else None


def _waits(run: ProfiledSteps) -> list[Cause]:
    """Return the waits as the fault of the rank that comes last most, or of none if they take turns."""
    if (straggler := run.waits.straggler) is None:
        return []
    last, caused = straggler
    by_rank = run.parts_by_rank
    waited = {rank: parts.get(STRAGGLER_WAIT, 0.0) for rank, parts in by_rank.items()}
    share = caused / sum(run.waits.caused_us.values())
    if share < _MOST:
        us = statistics.fmean(waited.values())
        because = f"now this rank comes last, now that: rank {last} most often, for {share:.0%} of the time"
        return [Cause(STRAGGLER_WAIT, STRAGGLER_WAIT, us, because, advice(STRAGGLER_WAIT, run.config))]
    others = [rank for rank in by_rank if rank != last]
    us = share * statistics.fmean(waited[rank] for rank in others)
    excess = {
        name: by_rank[last].get(name, 0.0) - statistics.median(by_rank[rank].get(name, 0.0) for rank in others)
        for name in (*DEVICE_WORK, *HOST_WORK, HOST)
    }
    where, more = max(excess.items(), key=lambda item: item[1])
    host = next(profile.host for profile in run.profiles if profile.rank == last)
    because = f"the others wait {us / 1e3:.1f} ms a step for it; it has {more / 1e3:.1f} ms more of {where} than they"
    if where in (DATA_WAIT, RECOMPILATION, *ASIDE):
        fix = advice(where, run.config)
    else:
        what = "its processors and who else uses them" if where == HOST else "its clock, temperature and neighbours"
        fix = f"no key: look at host {host}, {what}"
    return [Cause(f"rank {last} comes last", where, us, because, fix)]


def _seen(category: str, run: ProfiledSteps) -> str:
    if category == DATA_WAIT:
        return "every rank waits for the loader's thread to read its next batches"
    if category == RECOMPILATION:
        return f"torch.compile made {run.graphs} graphs in these steps, of which there should be none"
    if category == HOST:
        return "the device has nothing to do while the host prepares its work"
    if category in ASIDE:
        return f"between the profiled steps was {_BETWEEN[category]}"
    return f"nothing hides these collectives over {category.removeprefix(f'{COMMUNICATION} ')}"


def advice(category: str, config: Mapping[str, Any]) -> str:
    """Return what changes a category, beginning with the config key if there is one."""
    is_compiled = config.get("compile.enable", True)
    if category in (HOST, COMPUTE, CASTS) and not is_compiled:
        return "compile.enable = true makes fewer and larger kernels"
    if category == SAVING and config.get("checkpoint.async_mode") == "async":
        return f"checkpoint.interval makes it rarer; {_WITHOUT}"
    if category == f"{COMMUNICATION} dp_shard":
        if config.get("parallelism.fsdp_copy_engines") == "never":
            return 'parallelism.fsdp_copy_engines = "default" takes no multiprocessors from matmuls'
        if config.get("parallelism.fsdp_reshard_after_forward") == "always":
            return 'parallelism.fsdp_reshard_after_forward = "default" gathers the head once'
    if category == f"{COMMUNICATION} tp" and not config.get("parallelism.async_tensor_parallel"):
        return "parallelism.async_tensor_parallel = true overlaps them with their matmuls"
    if category == MATMUL and config.get("float8.recipe", "none") == "none":
        return "float8.recipe: see titanlite recipes float8"
    return _ADVICE[category]


_BETWEEN = {
    VALIDATION: "a validation, the loss on held-out text",
    EVALUATION: "an evaluation, the accuracy in tasks",
    SAVING: "a checkpoint that was saved",
    NUMERICS: "a measurement of what float8 does to each layer",
}
_WITHOUT = "profiling.start_step chooses steps without it"
_ADVICE = {
    DATA_WAIT: "data.cache_dir: the token shards belong on a disk that keeps up, as one of this host",
    RECOMPILATION: "profiling.start_step: later steps, where all is compiled; if it goes on, a shape changes",
    HOST: "training.local_batch_size: more tokens give the device more to do for each launch",
    VALIDATION: f"validation.freq makes it rarer, validation.steps shorter; {_WITHOUT}",
    EVALUATION: f"evaluation.freq makes it rarer, fewer evaluation.tasks shorter; {_WITHOUT}",
    SAVING: f'checkpoint.async_mode = "async" saves beside the steps, checkpoint.interval more rarely; {_WITHOUT}',
    NUMERICS: f"metrics.float8_numerics_freq makes it rarer; {_WITHOUT}",
    STRAGGLER_WAIT: "no key: ranks have unequal work or share their processors with something else",
    f"{COMMUNICATION} dp_shard": "training.local_batch_size: more work for each gather hides more of it",
    f"{COMMUNICATION} dp_replicate": "training.global_batch_size: more micro-steps need fewer reductions",
    f"{COMMUNICATION} tp": "parallelism.tensor_parallel_degree: fewer ranks, if the memory allows it",
    f"{COMMUNICATION} ep": "parallelism.expert_parallel_degree: titanlite plan says what another one costs",
    f"{COMMUNICATION} all ranks": "no key: sums of the loss and of gradients' norms, which wait for the slowest rank",
    MATMUL: "activation_checkpoint.recipe: a list that keeps more computes less again",
    ATTENTION: "training.seq_len: its time grows with the square of the sequence",
    CASTS: "float8.recipe: a recipe with fewer scales casts less",
    OPTIMIZER: "optimizer.state_dtype: moments of half the size are read faster; titanlite plan has the time by rule",
    COMPUTE: "activation_checkpoint.recipe: a list that keeps more computes less again",
}
