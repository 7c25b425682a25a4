"""Find the largest losses of time in a step, and for each a fix, with the config key that causes or would reduce it.

Time is lost while the device does no work of its own: in exposed communication, in waits for other ranks, and while the
host works. Of the host's work only the amount that every rank has is a loss of the host. If one rank has more, the
other ranks wait for it, so the excess counts once, as a wait for that rank.
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from titanlite.explain.divide import EXPOSED, HOST, STRAGGLER_WAIT
from titanlite.explain.profiled import ProfiledSteps
from titanlite.observe.step_profile import (
    ASIDE,
    COMMUNICATION,
    DATA_WAIT,
    DEVICE_WORK,
    EVALUATION,
    HOST_WORK,
    NUMERICS,
    RECOMPILATION,
    SAVING,
    VALIDATION,
)

NOTABLE = 0.05
"""The least share of a step that a loss must take to be reported as the first cause."""

_MOST = 0.6
"""Share of all waits that one rank must cause to be called the straggler: of two ranks one always causes half."""

_SHARD, _TP = f"{COMMUNICATION} dp_shard", f"{COMMUNICATION} tp"


@dataclass(frozen=True)
class Cause:
    """A loss of time in a step, with its reason and a fix."""

    name: str  # a category, or "rank N comes last"
    us: float  # µs of a step that would be saved without the loss, at most
    because: str
    fix: str  # beginning with the config key if there is one


def longest_loss(run: ProfiledSteps) -> Cause | None:
    """Return the longest part of a step that is not the device's own work; None if there is none."""
    return max(_losses(run), key=lambda cause: cause.us, default=None)


def first_cause(run: ProfiledSteps) -> Cause | None:
    """Return the longest loss, or None if it takes less than `NOTABLE` of a step."""
    longest = longest_loss(run)
    return longest if longest is not None and longest.us >= NOTABLE * run.wall_us else None


def _losses(run: ProfiledSteps) -> Iterator[Cause]:
    if run.waits.straggler is not None:
        yield _wait(run, *run.waits.straggler)
    ranks = run.parts_by_rank.values()
    of_host = {name: min(parts.get(name, 0.0) for parts in ranks) for name in (*HOST_WORK, HOST)}
    for category, us in {**of_host, **{name: run.parts.get(name, 0.0) for name in EXPOSED}}.items():
        if us > 0:
            yield Cause(category, us, _seen(category, run), advice(category, run))


def _wait(run: ProfiledSteps, last: int, caused: float) -> Cause:
    """Return the waits as a loss, blamed on rank `last` if it causes most of them. `caused`: µs that it causes."""
    by_rank = run.parts_by_rank
    waited = {rank: parts.get(STRAGGLER_WAIT, 0.0) for rank, parts in by_rank.items()}
    share = caused / sum(run.waits.caused_us.values())
    if share < _MOST:
        because = f"now this rank comes last, now that: rank {last} most often, for {share:.0%} of the time"
        fix = advice(STRAGGLER_WAIT, run)
        return Cause(STRAGGLER_WAIT, statistics.fmean(waited.values()), because, fix)
    others = [rank for rank in by_rank if rank != last]
    us = share * statistics.fmean(waited[rank] for rank in others)
    excess = {
        name: by_rank[last].get(name, 0.0) - statistics.median(by_rank[rank].get(name, 0.0) for rank in others)
        for name in (*DEVICE_WORK, *HOST_WORK, HOST)
    }
    where, more = max(excess.items(), key=lambda item: item[1])
    because = f"the others wait {us / 1e3:.1f} ms a step for it; it has {more / 1e3:.1f} ms more of {where} than they"
    if where in HOST_WORK:
        fix = advice(where, run)
    else:
        host = next(profile.host for profile in run.profiles if profile.rank == last)
        what = "its processors and who else uses them" if where == HOST else "its clock, temperature and neighbours"
        fix = f"no key: look at host {host}, {what}"
    return Cause(f"rank {last} comes last", us, because, fix)


def _seen(category: str, run: ProfiledSteps) -> str:
    if category == RECOMPILATION:
        return f"torch.compile made {run.graphs} graphs in these steps, of which there should be none"
    if category in ASIDE:
        return f"between the profiled steps was {category}"
    axis = category.removeprefix(f"{COMMUNICATION} ")
    return _SEEN.get(category, f"nothing hides these collectives over {axis}")


def advice(category: str, run: ProfiledSteps) -> str:
    """Return a fix for a loss of a category in this run. The fix begins with the config key, if there is one."""
    asked, on_gpus = run.config.get, run.profiles[0].device == "cuda"
    is_bf16 = asked("training.mixed_precision_param", "bfloat16") == "bfloat16"
    is_async = asked("parallelism.async_tensor_parallel", False)
    of_run = {
        (HOST, not asked("compile.enable", True)): "compile.enable = true makes fewer kernels",
        (_SHARD, asked("parallelism.fsdp_reshard_after_forward") == "always"): _RESHARD,
        (_SHARD, asked("parallelism.fsdp_copy_engines") == "never" and on_gpus): _COPY_ENGINES,
        (_TP, not is_async and is_bf16 and on_gpus): _ASYNC,
        (SAVING, asked("checkpoint.async_mode") == "async"): f"checkpoint.interval makes it rarer; {_WITHOUT}",
        (DATA_WAIT, asked("data.prepare") == "background"): _PREPARED,
    }
    return of_run.get((category, True), _ADVICE[category])


_SEEN = {
    DATA_WAIT: "every rank waits for the loader's thread to read its next batches",
    HOST: "the device has nothing to do while the host prepares its work",
}
_WITHOUT = "profiling.start_step chooses steps without it"
_COPY_ENGINES = 'parallelism.fsdp_copy_engines = "default" takes no multiprocessors from matmuls'
_RESHARD = 'parallelism.fsdp_reshard_after_forward = "default" gathers the head once'
_ASYNC = "parallelism.async_tensor_parallel = true overlaps them with their matmuls"
_PREPARED = 'data.prepare = "first": titanlite prepare tokenizes the source beforehand'
_ADVICE = {
    DATA_WAIT: "data.cache_dir: the token shards belong on a disk that keeps up, as one of this host",
    RECOMPILATION: "profiling.start_step: later steps, where all is compiled; if it goes on, a shape changes",
    HOST: "training.local_batch_size: more tokens give the device more to do for each launch",
    VALIDATION: f"validation.freq makes it rarer, validation.steps shorter; {_WITHOUT}",
    EVALUATION: f"evaluation.freq makes it rarer, fewer evaluation.tasks shorter; {_WITHOUT}",
    SAVING: f'checkpoint.async_mode = "async" saves beside the steps, checkpoint.interval more rarely; {_WITHOUT}',
    NUMERICS: f"metrics.float8_numerics_freq makes it rarer; {_WITHOUT}",
    STRAGGLER_WAIT: "no key: ranks have unequal work or share their processors with something else",
    _SHARD: "training.local_batch_size: more work for each gather hides more of it",
    f"{COMMUNICATION} dp_replicate": "training.local_batch_size: gradients are added up once a micro-step",
    f"{COMMUNICATION} cp": "parallelism.context_parallel_degree: a lower one sends less; titanlite plan compares",
    _TP: "parallelism.tensor_parallel_degree: fewer ranks, if the memory allows it",
    f"{COMMUNICATION} ep": "parallelism.expert_parallel_degree: titanlite plan says what another one costs",
    f"{COMMUNICATION} all ranks": "training.global_batch_size with Muon, whose rows travel once a step; else no key: "
    "sums of the loss and of gradients' norms wait for the slowest rank",
}
