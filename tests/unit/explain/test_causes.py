import pytest

from tests.support.profiles import profiled, rank_profile
from titanlite.explain.causes import advice, first_cause
from titanlite.explain.divide import CATEGORIES, HOST
from titanlite.observe.step_profile import (
    DATA_WAIT,
    DEVICE_WORK,
    EVALUATION,
    MATMUL,
    NUMERICS,
    RECOMPILATION,
    SAVING,
    VALIDATION,
)

SHARD, TP, CP, WORLD = (f"communication {axis}" for axis in ("dp_shard", "tp", "cp", "all ranks"))


def up_to(*ends, since=0.0):
    """The spans of what follows each other: (MATMUL, 40.0), (SHARD, 95.0)."""
    spans = {}
    for name, end in ends:
        spans.setdefault(name, []).append((since, end))
        since = end
    return spans


SLOW_LOADER = up_to((DATA_WAIT, 60.0), (MATMUL, 90.0), (SHARD, 95.0))
SHORT, MIDDLE, LONG = (up_to((MATMUL, end), (SHARD, 95.0)) for end in (30.0, 40.0, 80.0))
TURNS = (
    {MATMUL: [(0.0, 10.0), (50.0, 80.0)], SHARD: [(10.0, 50.0), (80.0, 90.0)]},
    {MATMUL: [(0.0, 40.0), (50.0, 52.0)], SHARD: [(40.0, 50.0), (52.0, 90.0)]},
)


@pytest.mark.parametrize(
    ("ranks", "name", "us", "because", "fix"),
    [
        ((SLOW_LOADER, SLOW_LOADER), DATA_WAIT, 60.0, "every rank waits", "data.cache_dir: "),
        ((SHORT, SLOW_LOADER), "rank 1 comes last", 60.0, "more of data wait", "data.cache_dir: "),
        ((LONG, MIDDLE), "rank 0 comes last", 40.0, "more of matmul", "no key: look at host host0"),
        (TURNS, "waiting for other ranks", 29.0, "now this rank comes last, now that", "no key"),
        ((up_to((MATMUL, 40.0), (CP, 100.0)),), CP, 60.0, "over cp", "parallelism.context_parallel_degree"),
        ((up_to((MATMUL, 40.0), (RECOMPILATION, 95.0)),), RECOMPILATION, 55.0, "made 3 graphs", "profiling.start_step"),
        *(
            ((up_to((MATMUL, 40.0), (between, 95.0)),), between, 55.0, between, key)
            for between, key in (
                (VALIDATION, "validation.freq"),
                (EVALUATION, "evaluation.freq"),
                (SAVING, "checkpoint.async_mode"),
                (NUMERICS, "metrics.float8_numerics_freq"),
            )
        ),
        (({MATMUL: [(0.0, 94.0)]},), HOST, 6.0, "the device has nothing to do", "training.local_batch_size"),
    ],
)
def test_the_longest_loss_is_named_with_its_reason_and_its_key(ranks, name, us, because, fix):
    profiles = [rank_profile(spans, rank=n, world=len(ranks), graphs=3) for n, spans in enumerate(ranks)]
    cause = first_cause(profiled(*profiles))
    assert (cause.name, cause.us) == (name, pytest.approx(us))
    assert because in cause.because
    assert cause.fix.startswith(fix)


def test_a_step_that_loses_nothing_notable_has_no_cause():
    assert first_cause(profiled(rank_profile({MATMUL: [(0.0, 96.0)]}))) is None


@pytest.mark.parametrize(
    ("category", "device", "config", "key"),
    [
        (WORLD, "cuda", {}, "training.global_batch_size with Muon"),
        (HOST, "cuda", {"compile__enable": False}, "compile.enable = true"),
        (HOST, "cuda", {"compile__enable": True}, "training.local_batch_size"),
        (SHARD, "cuda", {"parallelism__fsdp_reshard_after_forward": "always"}, "parallelism.fsdp_reshard_after"),
        (SHARD, "cuda", {"parallelism__fsdp_copy_engines": "never"}, "parallelism.fsdp_copy_engines"),
        (SHARD, "cpu", {"parallelism__fsdp_copy_engines": "never"}, "training.local_batch_size"),
        ("communication dp_replicate", "cuda", {}, "training.local_batch_size"),
        (CP, "cuda", {}, "parallelism.context_parallel_degree"),
        (TP, "cuda", {}, "parallelism.async_tensor_parallel"),
        (TP, "cuda", {"parallelism__async_tensor_parallel": True}, "parallelism.tensor_parallel_degree"),
        (TP, "cpu", {}, "parallelism.tensor_parallel_degree"),
        (TP, "cuda", {"training__mixed_precision_param": "float32"}, "parallelism.tensor_parallel_degree"),
        (DATA_WAIT, "cuda", {"data__prepare": "background"}, "data.prepare"),
        (SAVING, "cuda", {"checkpoint__async_mode": "async"}, "checkpoint.interval"),
    ],
)
def test_the_device_and_the_config_of_a_run_decide_the_advice(category, device, config, key):
    run = profiled(rank_profile({MATMUL: [(0.0, 40.0)]}, device=device), **config)
    assert advice(category, run).startswith(key)


def test_every_loss_has_advice():
    run = profiled(rank_profile({MATMUL: [(0.0, 40.0)]}))
    assert all(advice(category, run) for category in {*CATEGORIES} - {*DEVICE_WORK})
