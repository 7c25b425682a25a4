import pytest

from tests.support.profiles import profiled, rank_profile
from titanlite.explain.causes import advice, first_cause
from titanlite.explain.changes import TOUCHES, config_changes, first_change
from titanlite.explain.divide import CATEGORIES, HOST
from titanlite.observe.step_profile import (
    ATTENTION,
    CASTS,
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


MUON, FLOAT32 = ("adamw", "muon"), {"training__mixed_precision_param": "float32"}
MORE_TOKENS, NONE = "training.global_batch_size", "no key"


@pytest.mark.parametrize(
    ("category", "device", "rules", "config", "key"),
    [
        (OPTIMIZER, "cuda", ("adamw",), {}, "optimizer.state_dtype"),
        (OPTIMIZER, "cuda", ("adamw",), {"optimizer__state_dtype": "bfloat16"}, MORE_TOKENS),
        (OPTIMIZER, "cuda", MUON, {}, MORE_TOKENS),
        (OPTIMIZER, "cpu", ("adamw",), {}, MORE_TOKENS),  # where moments in bfloat16 are converted, there and back
        (WORLD, "cuda", ("adamw",), {}, NONE),
        (WORLD, "cuda", MUON, {}, MORE_TOKENS),  # its rows on their way
        (MATMUL, "cuda", (), {}, "float8.recipe: "),
        (MATMUL, "cpu", (), {}, "training.mixed_precision_param"),
        (MATMUL, "cpu", (), FLOAT32, NONE),
        (MATMUL, "cpu", (), {"float8__recipe": "rowwise"}, 'float8.recipe = "none"'),
        (MATMUL, "cpu", (), FLOAT32 | {"activation_checkpoint__recipe": "full"}, "activation_checkpoint.recipe"),
        (COMPUTE, "cuda", (), {"activation_checkpoint__recipe": "none"}, NONE),
        (CASTS, "cuda", (), {}, "training.local_batch_size"),
        (CASTS, "cuda", (), {"float8__recipe": "blockwise"}, "float8.recipe: "),
        (ATTENTION, "cuda", (), {"data__document_mask": False}, "training.seq_len: its time grows with the square"),
        (ATTENTION, "cuda", (), {}, "training.seq_len: its time grows with the length of documents"),
        (SHARD, "cpu", (), {"parallelism__fsdp_copy_engines": "never"}, "training.local_batch_size"),
        ("communication dp_replicate", "cuda", (), {}, "training.local_batch_size"),
        ("communication cp", "cuda", (), {}, "parallelism.context_parallel_degree"),
        (TP, "cpu", (), {}, "parallelism.tensor_parallel_degree"),
        (TP, "cuda", (), FLOAT32, "parallelism.tensor_parallel_degree"),
        (DATA_WAIT, "cuda", (), {"data__prepare": "background"}, "data.prepare"),
    ],
)
def test_the_device_and_the_rules_of_a_run_decide_the_advice(category, device, rules, config, key):
    run = profiled(rank_profile({MATMUL: [(0.0, 40.0)]}, device=device), rules=rules, **config)
    assert advice(category, run).startswith(key)


def test_every_part_of_a_step_has_advice_and_keys_that_touch_it():
    run = profiled(rank_profile({MATMUL: [(0.0, 40.0)]}))
    assert all(advice(category, run) for category in CATEGORIES)
    assert TOUCHES.keys() == {*CATEGORIES}


def test_the_exchange_of_a_sequence_s_keys_is_a_part_of_a_step():
    cause = first_cause(profiled(rank_profile({MATMUL: [(0.0, 40.0)], "communication cp": [(40.0, 100.0)]})))
    assert (cause.name, cause.us) == ("communication cp", 60.0)


def test_a_step_that_loses_nothing_notable_has_no_cause():
    assert first_cause(profiled(rank_profile({MATMUL: [(0.0, 96.0)]}))) is None
    assert first_cause(profiled(rank_profile({MATMUL: [(0.0, 94.0)]}))).name == HOST


def test_of_two_runs_the_key_that_touches_what_changed_most_is_named():
    fast = {MATMUL: [(0.0, 50.0)], COMPUTE: [(50.0, 60.0)], ATTENTION: [(60.0, 62.0)]}
    slow = {MATMUL: [(0.0, 52.0)], COMPUTE: [(52.0, 95.0)], ATTENTION: [(95.0, 97.0)]}
    same = {"training__seq_len": 64, "float8__recipe": "none"}
    a = profiled(rank_profile(fast), compile__enable=True, optimizer__state_dtype="float32", job__name="a", **same)
    b = profiled(rank_profile(slow), compile__enable=False, optimizer__state_dtype="bfloat16", job__name="b", **same)
    cause, change, keys = first_change(a, b)
    assert (cause.name, change) == (COMPUTE, 33.0)
    assert [key.text for key in keys] == ["compile.enable: true → false"]
    assert [key.key for key in config_changes(a, b)] == ["compile.enable", "optimizer.state_dtype"]


def test_a_degree_of_parallelism_touches_what_is_sent():
    fast, slow = ({MATMUL: [(0.0, 50.0)], SHARD: [(50.0, end)]} for end in (55.0, 95.0))
    a, b = (
        profiled(rank_profile(parts), parallelism__expert_parallel_degree=degree)
        for parts, degree in ((fast, 2), (slow, 1))
    )
    _, _, keys = first_change(a, b)
    assert [key.text for key in keys] == ["parallelism.expert_parallel_degree: 2 → 1"]


def test_a_change_that_no_key_touches_has_the_cause_itself():
    slow, other = {MATMUL: [(0.0, 80.0)], SHARD: [(80.0, 95.0)]}, {MATMUL: [(0.0, 40.0)], SHARD: [(40.0, 95.0)]}
    even = {MATMUL: [(0.0, 40.0)], SHARD: [(40.0, 55.0)]}
    a = two_ranks(even, even, data__cache_dir="/a")
    b = two_ranks(other, slow, data__cache_dir="/b")
    cause, change, keys = first_change(a, b)
    assert (cause.name, change, keys) == ("rank 1 comes last", 40.0, [])


@pytest.mark.parametrize(
    ("between", "because", "key"),
    [
        (VALIDATION, "a validation", "validation.freq"),
        (EVALUATION, "an evaluation", "evaluation.freq"),
        (SAVING, "a checkpoint", "checkpoint.async_mode"),
        (NUMERICS, "what float8 does", "metrics.float8_numerics_freq"),
    ],
)
def test_what_is_between_the_steps_is_named_with_its_key(between, because, key):
    without = profiled(rank_profile({MATMUL: [(0.0, 96.0)]}), **{key.replace(".", "__"): 1000})
    spans = {MATMUL: [(0.0, 40.0)], between: [(40.0, 95.0)]}
    run = profiled(rank_profile(spans), **{key.replace(".", "__"): 2})
    cause = first_cause(run)
    assert (cause.name, cause.us) == (between, 55.0)
    assert because in cause.because
    assert cause.fix.startswith(key)
    assert [each.key for each in first_change(without, run)[2]] == [key]


def test_saving_beside_the_steps_is_not_advised_twice():
    spans = {MATMUL: [(0.0, 40.0)], SAVING: [(40.0, 95.0)]}
    run = profiled(rank_profile(spans), checkpoint__async_mode="async")
    assert first_cause(run).fix.startswith("checkpoint.interval")


def test_recompilations_are_counted_and_named():
    spans = {MATMUL: [(0.0, 40.0)], RECOMPILATION: [(40.0, 95.0)]}
    cause = first_cause(profiled(rank_profile(spans, graphs=3)))
    assert cause.name == RECOMPILATION
    assert "made 3 graphs" in cause.because
