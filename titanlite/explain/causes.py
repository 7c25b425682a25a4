"""Name what a step loses most time to, and the config key that did it or would change it on the run's device.

Lost is what is not the device's own work: exposed communication, waits, the host. Of what a host does, the part that
every rank has counts here; what one rank has beyond the others is what these wait for, and counts once, as that rank's.
"""

import statistics
from dataclasses import dataclass

from titanlite.config.recipe_schema import MATRIX_RULES
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
        found.append(Cause(category, category, us, _seen(category, run), advice(category, run)))
    for category in EXPOSED:
        us = run.parts.get(category, 0.0)
        found.append(Cause(category, category, us, _seen(category, run), advice(category, run)))
    return sorted((cause for cause in found if cause.us > 0), key=lambda cause: -cause.us)


def work(run: ProfiledSteps) -> list[Cause]:
    """Return the device's own work, the longest first."""
    parts = run.parts
    found = [Cause(name, name, parts.get(name, 0.0), "", advice(name, run)) for name in DEVICE_WORK]
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
        return [Cause(STRAGGLER_WAIT, STRAGGLER_WAIT, us, because, advice(STRAGGLER_WAIT, run))]
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
        fix = advice(where, run)
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


def advice(category: str, run: ProfiledSteps) -> str:
    """Return what changes a category in this run, beginning with the config key if there is one."""
    of_run = (text for categories, holds, text in _advice_by_run(run) if holds and category in categories)
    return next(of_run, _ADVICE[category])


def _advice_by_run(run: ProfiledSteps) -> tuple[tuple[tuple[str, ...], bool, str], ...]:
    """Return categories, whether a key changes them here, and the advice; what comes first is given first."""
    config, on_gpus = run.config, run.is_on_gpus
    is_bf16 = config.get("training.mixed_precision_param", "bfloat16") == "bfloat16"
    is_float8 = config.get("float8.recipe", "none") != "none"
    is_recomputed = config.get("activation_checkpoint.recipe", "none") != "none"
    is_async, is_adamw = config.get("parallelism.async_tensor_parallel", False), run.rules <= {"adamw"}
    reshard, engines = (config.get(f"parallelism.fsdp_{key}") for key in ("reshard_after_forward", "copy_engines"))
    return (
        ((HOST, COMPUTE, CASTS), not config.get("compile.enable", True), "compile.enable = true makes fewer kernels"),
        ((MATMUL, CASTS), is_float8 and not on_gpus, 'float8.recipe = "none": a CPU emulates float8'),
        ((MATMUL, CASTS), is_bf16 and not on_gpus, _FLOAT32),
        ((MATMUL,), not is_float8 and on_gpus, "float8.recipe: see titanlite recipes float8"),
        ((CASTS,), is_float8, "float8.recipe: a recipe with fewer scales casts less"),
        ((MATMUL, COMPUTE), is_recomputed, "activation_checkpoint.recipe: a list that keeps more computes less again"),
        ((OPTIMIZER,), is_adamw and on_gpus and config.get("optimizer.state_dtype") != "bfloat16", _NARROW_MOMENTS),
        ((f"{COMMUNICATION} all ranks",), bool(run.rules & {*MATRIX_RULES}), _ADVICE[OPTIMIZER]),
        ((f"{COMMUNICATION} dp_shard",), engines == "never" and on_gpus, _COPY_ENGINES),
        ((f"{COMMUNICATION} dp_shard",), reshard == "always", _RESHARD),
        ((f"{COMMUNICATION} tp",), not is_async and is_bf16 and on_gpus, _ASYNC),
        ((SAVING,), config.get("checkpoint.async_mode") == "async", f"checkpoint.interval makes it rarer; {_WITHOUT}"),
        ((DATA_WAIT,), config.get("data.prepare") == "background", _PREPARED),
        ((ATTENTION,), config.get("data.document_mask", True), _DOCUMENTS),
    )


_BETWEEN = {
    VALIDATION: "a validation, the loss on held-out text",
    EVALUATION: "an evaluation, the accuracy in tasks",
    SAVING: "a checkpoint that was saved",
    NUMERICS: "a measurement of what float8 does to each layer",
}
_WITHOUT = "profiling.start_step chooses steps without it"
_FLOAT32 = 'training.mixed_precision_param = "float32": most CPUs have no fast bfloat16'
_NARROW_MOMENTS = 'optimizer.state_dtype = "bfloat16": moments of half the size are read faster'
_COPY_ENGINES = 'parallelism.fsdp_copy_engines = "default" takes no multiprocessors from matmuls'
_RESHARD = 'parallelism.fsdp_reshard_after_forward = "default" gathers the head once'
_ASYNC = "parallelism.async_tensor_parallel = true overlaps them with their matmuls"
_PREPARED = 'data.prepare = "first": titanlite prepare tokenizes the source beforehand'
_DOCUMENTS = "training.seq_len: its time grows with the length of documents, which end where a sample does"
_OWN = "no key: it is the model's own arithmetic"
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
    f"{COMMUNICATION} dp_replicate": "training.local_batch_size: gradients are added up once a micro-step",
    f"{COMMUNICATION} cp": "parallelism.context_parallel_degree: a lower one sends less; titanlite plan compares",
    f"{COMMUNICATION} tp": "parallelism.tensor_parallel_degree: fewer ranks, if the memory allows it",
    f"{COMMUNICATION} ep": "parallelism.expert_parallel_degree: titanlite plan says what another one costs",
    f"{COMMUNICATION} all ranks": "no key: sums of the loss and of gradients' norms, which wait for the slowest rank",
    MATMUL: _OWN,
    ATTENTION: "training.seq_len: its time grows with the square of the sequence",
    CASTS: "training.local_batch_size: weights are cast for each gather, however many tokens it is for",
    OPTIMIZER: "training.global_batch_size: an update takes as long, however many tokens a step has",
    COMPUTE: _OWN,
}
