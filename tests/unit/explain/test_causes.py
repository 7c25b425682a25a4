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

SHARD, TP, WORLD = "communication dp_shard", "communication tp", "communication all ranks"


def two_ranks(one, two, **config):
    return profiled(rank_profile(one, world=2), rank_profile(two, rank=1, world=2), **config)


def test_a_slow_loader_of_every_rank_is_the_loader_s_fault():
    spans = {DATA_WAIT: [(0.0, 60.0)], MATMUL: [(60.0, 90.0)], SHARD: [(90.0, 95.0)]}
    cause = first_cause(two_ranks(spans, spans))
    assert (cause.name, cause.us) == (DATA_WAIT, 60.0)
    assert cause.fix.startswith("data.cache_dir: ")


def test_a_slow_loader_of_one_rank_is_that_rank_s_fault():
    slow = {DATA_WAIT: [(0.0, 60.0)], MATMUL: [(60.0, 90.0)], SHARD: [(90.0, 95.0)]}
    other = {MATMUL: [(0.0, 30.0)], SHARD: [(30.0, 95.0)]}
    cause = first_cause(two_ranks(other, slow))
    assert (cause.name, cause.us) == ("rank 1 comes last", 60.0)
    assert "more of data wait" in cause.because
    assert cause.fix.startswith("data.cache_dir: ")


def test_a_rank_whose_kernels_are_slower_is_a_matter_of_its_gpu():
    slow, other = {MATMUL: [(0.0, 80.0)], SHARD: [(80.0, 95.0)]}, {MATMUL: [(0.0, 40.0)], SHARD: [(40.0, 95.0)]}
    cause = first_cause(two_ranks(slow, other))
    assert cause.name == "rank 0 comes last"
    assert "more of matmul" in cause.because
    assert cause.fix.startswith("no key: look at host host0")


def test_ranks_that_take_turns_are_not_called_stragglers():
    one = {MATMUL: [(0.0, 10.0), (50.0, 80.0)], SHARD: [(10.0, 50.0), (80.0, 90.0)]}
    two = {MATMUL: [(0.0, 40.0), (50.0, 52.0)], SHARD: [(40.0, 50.0), (52.0, 90.0)]}
    assert first_cause(two_ranks(one, two)).name == "waiting for other ranks"


def test_what_the_config_has_decides_the_advice():
    idle = {MATMUL: [(0.0, 40.0)]}
    assert first_cause(profiled(rank_profile(idle), compile__enable=False)).fix.startswith("compile.enable = true")
    assert first_cause(profiled(rank_profile(idle), compile__enable=True)).fix.startswith("training.local_batch_size")
    sent = {MATMUL: [(0.0, 40.0)], TP: [(40.0, 100.0)]}
    key = "parallelism.async_tensor_parallel"
    assert first_cause(profiled(rank_profile(sent))).fix.startswith(key)
    fused = profiled(rank_profile(sent), parallelism__async_tensor_parallel=True)
    assert not first_cause(fused).fix.startswith(key)


@pytest.mark.parametrize(
    ("category", "device", "config", "key"),
    [
        (WORLD, "cuda", {}, "training.global_batch_size with Muon"),
        (SHARD, "cuda", {"parallelism__fsdp_reshard_after_forward": "always"}, "parallelism.fsdp_reshard_after"),
        (SHARD, "cuda", {"parallelism__fsdp_copy_engines": "never"}, "parallelism.fsdp_copy_engines"),
        (SHARD, "cpu", {"parallelism__fsdp_copy_engines": "never"}, "training.local_batch_size"),
        ("communication dp_replicate", "cuda", {}, "training.local_batch_size"),
        ("communication cp", "cuda", {}, "parallelism.context_parallel_degree"),
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


def test_the_exchange_of_a_sequence_s_keys_is_a_part_of_a_step():
    cause = first_cause(profiled(rank_profile({MATMUL: [(0.0, 40.0)], "communication cp": [(40.0, 100.0)]})))
    assert (cause.name, cause.us) == ("communication cp", 60.0)


def test_a_step_that_loses_nothing_notable_has_no_cause():
    assert first_cause(profiled(rank_profile({MATMUL: [(0.0, 96.0)]}))) is None
    assert first_cause(profiled(rank_profile({MATMUL: [(0.0, 94.0)]}))).name == HOST


@pytest.mark.parametrize(
    ("between", "key"),
    [
        (VALIDATION, "validation.freq"),
        (EVALUATION, "evaluation.freq"),
        (SAVING, "checkpoint.async_mode"),
        (NUMERICS, "metrics.float8_numerics_freq"),
    ],
)
def test_what_is_between_the_steps_is_named_with_its_key(between, key):
    spans = {MATMUL: [(0.0, 40.0)], between: [(40.0, 95.0)]}
    cause = first_cause(profiled(rank_profile(spans)))
    assert (cause.name, cause.us) == (between, 55.0)
    assert between in cause.because
    assert cause.fix.startswith(key)


def test_recompilations_are_counted_and_named():
    spans = {MATMUL: [(0.0, 40.0)], RECOMPILATION: [(40.0, 95.0)]}
    cause = first_cause(profiled(rank_profile(spans, graphs=3)))
    assert cause.name == RECOMPILATION
    assert "made 3 graphs" in cause.because
