"""The predicted peak against measured runs, and what it must obey on any layout."""

from itertools import pairwise

import pytest

from titanlite import recipes
from titanlite.commands.validate import CheckedRun, checked_run
from titanlite.config.recipe_schema import SaveList, SaveRule
from titanlite.config.toml_file import shipped_folder
from titanlite.parallel.activation_bytes import block_prices
from titanlite.parallel.memory import GIB, Memory, MemoryModel

TP = "--parallelism.tensor_parallel_degree"
# docs/performance.md: reserved GiB on H200, sequence 8,192, local batch 2, torch 2.11.
MEASURED = {
    ("8b", 4, "balanced_tight"): 76.2,
    ("8b", 4, "full"): 42.6,
    ("8b", 4, "balanced"): 80.6,
    ("8b", 4, "balanced", "--float8.recipe", "rowwise"): 80.5,
    ("8b", 4, "none"): 111.6,
    ("8b", 4, "none", TP, "4"): 60.0,
    ("8b", 4, "none", TP, "2"): 75.3,
    ("1b", 1, "none"): 45.5,
}


def checked(model: str, world: int, name: str, *flags: str) -> CheckedRun:
    config = str(shipped_folder("configs") / f"llama3_{model}.toml")
    batch = ["--training.seq_len", "8192", "--training.local_batch_size", "2"]
    return checked_run(["--config", config, *batch, "--activation_checkpoint.recipe", name, *flags], world_size=world)


def peak(model: str, world: int, name: str, *flags: str) -> Memory:
    run = checked(model, world, name, *flags)
    assert run.save_list is not None
    memory = MemoryModel(run.config, run.dimensions, run.float8, world)
    return memory.peak(block_prices(run.dimensions, memory.layout, run.save_list))


@pytest.mark.parametrize("case", MEASURED, ids=str)
def test_measured_runs(case: tuple[str, int, str]) -> None:
    """All are within 0.4 %."""
    assert peak(*case).total / GIB == pytest.approx(MEASURED[case], rel=0.015)


def test_categories_add_up() -> None:
    memory = peak("8b", 4, "balanced")
    assert sum(memory.categories().values()) == memory.total
    shard = 8_030_261_248 // 4
    assert (memory.parameters, memory.gradients, memory.optimizer) == (4 * shard, 4 * shard, 8 * shard)
    assert memory.activations == 32 * (130 + 1088 + 128) * 2**20


def test_eight_gpus_hold_less_of_the_model_and_as_much_of_the_rest() -> None:
    """docs/performance.md counts 15.0 GiB."""
    four, eight = peak("8b", 4, "balanced"), peak("8b", 8, "balanced")
    assert (four.total - eight.total) / GIB == pytest.approx(15.0, abs=0.2)
    assert four.activations == eight.activations


@pytest.mark.parametrize(
    ("flags", "more"),
    [
        (["--training.global_batch_size", "16"], 4 * (128_256 * 4096 + 4096) // 4),  # of the head, a shard in float32
        (["--optimizer.state_dtype", "bfloat16"], -4 * 8_030_261_248 // 4),
        (["--parallelism.data_parallel_replicate_degree", "2"], 16 * 8_030_261_248 // 4),
    ],
    ids=["accumulation", "moments in bfloat16", "replicas"],
)
def test_what_a_key_changes(flags: list[str], more: int) -> None:
    """To a thousandth of all, which is less than any of them: FSDP's buffers change a little with the shards."""
    before, after = peak("8b", 4, "balanced").total, peak("8b", 4, "balanced", *flags).total
    assert after - before == pytest.approx(more, abs=0.004 * before)
    assert abs(more) > 0.004 * before


def test_weights_that_are_not_freed_are_held() -> None:
    always, never = (
        peak("8b", 4, "balanced", "--parallelism.fsdp_reshard_after_forward", which) for which in ("always", "never")
    )
    assert never.gathered_weights - always.gathered_weights == 2 * (8_030_261_248 - 128_256 * 4096 - 4096)


def test_a_short_sequence_peaks_in_a_block_and_a_long_one_in_the_head() -> None:
    """What the head holds grows with the tokens; gathered weights and what is reduced do not."""
    few = peak("8b", 4, "full", "--training.seq_len", "512", "--training.local_batch_size", "1")
    many = peak("8b", 4, "full")
    assert few.gathered_weights == 2 * (4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336) + 2 * 4096)
    assert many.gathered_weights == 2 * (128_256 * 4096 + 4096)


def test_more_kept_is_more_held() -> None:
    ordered = [peak("8b", 4, name) for name in ("full", "attention", "balanced_tight", "balanced", "matmuls", "none")]
    assert all(one.total < other.total for one, other in pairwise(ordered))


def test_whole_blocks_are_priced_as_a_list_that_saves_everything() -> None:
    run = checked("8b", 4, "none")
    memory = MemoryModel(run.config, run.dimensions, run.float8, 4)
    whole = SaveList("", "recompute", (SaveRule("block", "save"),))
    everything = recipes.load("activation_checkpoint", "none")
    assert block_prices(run.dimensions, memory.layout, whole) == block_prices(run.dimensions, memory.layout, everything)
