"""What is predicted of an update by the rules of a recipe, on any layout."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from titanlite.config.toml_file import shipped_folder
from titanlite.forecast.device_specs import measured_rates
from titanlite.forecast.memory import MemoryModel
from titanlite.forecast.search import LEAST
from titanlite.forecast.update_time import computed_flops, seconds_of, update_time
from titanlite.forecast.update_work import AVERAGE
from titanlite.kernels import orthogonalise
from titanlite.kernels.symmetric_product import symmetric_product
from titanlite.preflight.checked_run import checked_run

WHOLE, HIDDEN = 8_030_261_248, 32 * (6144 * 4096 + 4096 * 4096 + 28672 * 4096 + 4096 * 14336)
HEADS, EXPERTS = 48 * (5120 * 2048 + 2048 * 4096), 48 * 128 * 3 * 768 * 2048
MUON, DEGREE = "--optimizer.recipe=muon", "--parallelism.{}_parallel_degree={}"
MIXTURE = ("--model.name=qwen3_moe", "--model.flavor=30B-A3B", "--training.seq_len=4096")


def memory_of(world: int, *flags: str) -> MemoryModel:
    run = checked_run(["--config", str(shipped_folder("configs") / "llama3_8b.toml"), *flags], world_size=world)
    return MemoryModel(run.config, run.dims, run.float8, run.optimizer, world)


def test_groups_of_one_rule_cost_what_one_group_does(tmp_path: Path) -> None:
    """To the digit, and what it was before there were rules: two moments, and 32 bytes of each element."""
    (mine := tmp_path / "mine.toml").write_text(
        'extends = "adamw"\nhelp = "Mine."\n[groups.embeddings]\nrule = "adamw"\npattern = ["tok_embeddings.*"]\n'
    )
    plain, grouped = (memory_of(8, f"--optimizer.recipe={recipe}") for recipe in ("adamw", mine))
    assert plain.peak_under(LEAST) == grouped.peak_under(LEAST)
    for memory in (plain, grouped):
        assert memory.optimizer.state == 8 * memory.shard == 8 * (WHOLE // 8)
        time = update_time(memory.optimizer, measured_rates())
        assert time.total == 1e3 * (32 * memory.shard) / measured_rates().optimizer / 1e9
    assert {name: group.elements for name, group in grouped.optimizer.groups().items()} == {
        "embeddings": 128_256 * 4096,
        "all": WHOLE - 128_256 * 4096,
    }


@pytest.mark.parametrize(
    ("world", "flags", "hidden", "others"),
    [
        (8, [], HIDDEN / 8, (WHOLE - HIDDEN) / 8),
        # Norms, 65 of 4,096, are whole on every tensor-parallel rank.
        (8, [DEGREE.format("tensor", 2)], HIDDEN / 8, (WHOLE - HIDDEN - 65 * 4096) / 8 + 65 * 4096 / 4),
        (16, ["--parallelism.data_parallel_replicate_degree=2"], HIDDEN / 8, (WHOLE - HIDDEN) / 8),
        (8, [*MIXTURE, DEGREE.format("expert", 8)], (HEADS + EXPERTS) / 8, (30_532_122_624 - HEADS - EXPERTS) / 8),
        (8, ["--optimizer.state_dtype=bfloat16"], HIDDEN / 16, (WHOLE - HIDDEN) / 16),
    ],
)
def test_muon_keeps_one_moment_of_hidden_matrices(world: int, flags: list[str], hidden: float, others: float) -> None:
    memory = memory_of(world, MUON, *flags)
    assert memory.optimizer.state == pytest.approx(4 * hidden + 8 * others, rel=1e-6)
    least = memory.peak_under(LEAST)
    assert least.optimizer == memory.optimizer.state
    plain = memory_of(world, *flags)
    both = [plain.peak_under(LEAST).total - least.total, plain.optimizer.state - memory.optimizer.state]
    assert both[0] == both[1]  # activations have more room than the update needs
    assert sum(group.state for group in memory.optimizer.groups().values()) == pytest.approx(memory.optimizer.state)


def test_the_peak_is_in_the_update_where_activations_are_few() -> None:
    memory = memory_of(1, MUON, "--model.n_layers=2", "--model.vocab_size=256", "--training.seq_len=128")
    least = memory.peak_under(LEAST)
    assert (least.activations, least.working_set) == (0, memory.optimizer.buffers)
    assert memory.optimizer.buffers > 4 * 2**27


def test_the_average_of_weights_is_four_bytes_and_twelve_moved() -> None:
    plain, averaged = memory_of(8), memory_of(8, "--optimizer.ema_decay=0.999")
    assert averaged.optimizer.state - plain.optimizer.state == averaged.optimizer.average == 4 * plain.shard
    assert averaged.optimizer.moved()[AVERAGE] == 12 * plain.shard
    assert averaged.optimizer.groups()[AVERAGE].elements == WHOLE


@pytest.mark.parametrize(("shape", "steps"), [((64, 64), 5), ((64, 192), 3), ((192, 64), 7), ((8, 64), 1)])
def test_half_of_symmetric_products_is_computed(
    shape: tuple[int, int], steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    halves: list[int] = []

    def counted(x: Tensor, y: Tensor | None = None, **given: object) -> Tensor:
        halves.append(x.shape[1] ** 2 * x.shape[2])
        return symmetric_product(x, y, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(orthogonalise, "symmetric_product", counted)
    with FlopCounterMode(display=False) as counter:
        orthogonalise.orthogonalise(torch.ones(1, *shape), ((1.0, 0.0, 0.0),) * steps)
    assert computed_flops(*shape, steps) == counter.get_total_flops() - sum(halves)


def test_the_time_of_muon_is_that_of_its_parts() -> None:
    rates, world = measured_rates(), 8
    memory = memory_of(world, MUON)
    time, ((_, shared),) = update_time(memory.optimizer, rates), memory.optimizer.shared
    passes = (4 + 4 + 8 + 2 + 2 + 8) * memory.optimizer.elements["muon"] / rates.optimizer
    handled = 8 * sum(bucket.collected for bucket in shared.buckets) / rates.memory
    assert time.passes["muon"] == pytest.approx((passes + handled) / 1e6)
    work = [seconds_of(own, 5, rates) for own in shared.owned]
    assert time.orthogonalisation == pytest.approx(1e3 * max(work))
    assert max(work) / min(work) < 1.02  # they are shared out evenly
    slower = update_time(memory.optimizer, replace(rates, fsdp=rates.fsdp / 100))
    there_and_back = 2 * 2 * HIDDEN / 8 * 7 / 8  # bytes that a rank sends
    # What nothing hides: all but what the orthogonalisation has time for; owners have unequal parts of a bucket.
    sent = there_and_back / rates.fsdp * 100 / 1e6
    assert slower.exchanges == pytest.approx(sent - time.orthogonalisation, rel=0.1)
    assert time.exchanges < 0.05 * time.orthogonalisation
    alone = memory_of(1, MUON, "--model.n_layers=2")
    assert update_time(alone.optimizer, rates).exchanges == 0


def test_normuon_has_a_number_of_each_row_on_every_rank() -> None:
    rows, rates = 32 * (6144 + 4096 + 28672 + 4096), measured_rates()
    muon, normuon = memory_of(8, MUON), memory_of(8, "--optimizer.recipe=normuon")
    assert normuon.optimizer.state - muon.optimizer.state == 4 * rows
    assert normuon.optimizer.buffers - muon.optimizer.buffers == 4 * rows
    assert normuon.optimizer.saved - muon.optimizer.saved == 4 * rows
    assert sum(normuon.optimizer.rows.values()) == rows
    longer = update_time(normuon.optimizer, rates).total - update_time(muon.optimizer, rates).total
    assert longer == pytest.approx(44 * HIDDEN / 8 / rates.memory / 1e6, rel=0.05)  # of an owner with most
