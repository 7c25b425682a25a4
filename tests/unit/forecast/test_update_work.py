"""What is predicted of an update by the rules of a recipe, on any layout."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.support.measured import MEASURED_CONFIGS
from titanlite.forecast.device_specs import measured_rates
from titanlite.forecast.memory import MemoryModel
from titanlite.forecast.search import LEAST
from titanlite.forecast.update_time import computed_flops, seconds_of, update_time
from titanlite.kernels import orthogonalise
from titanlite.kernels.symmetric_product import symmetric_product
from titanlite.preflight.checked_run import checked_run

WHOLE, HIDDEN = 8_030_261_248, 32 * (6144 * 4096 + 4096 * 4096 + 28672 * 4096 + 4096 * 14336)
MUON = "--optimizer.recipe=muon"


def memory_of(world: int, *flags: str) -> MemoryModel:
    run = checked_run(["--config", str(MEASURED_CONFIGS / "llama3_8b.toml"), *flags], world_size=world)
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


@pytest.mark.parametrize("flags", [("--training.global_batch_size=64",), (MUON,)])
def test_frozen_parameters_have_weights_and_no_gradient_state_or_update(flags: tuple[str, ...], tmp_path: Path) -> None:
    (mine := tmp_path / "mine.toml").write_text(
        f'extends = "{"muon" if MUON in flags else "adamw"}"\nhelp = "Mine."\n[groups.ends]\nrule = "adamw"\n'
        'pattern = ["tok_embeddings.weight", "output.weight", "norm.weight"]\nlr_factor = 0.0\n'
    )
    plain, frozen = (memory_of(8, *flags, *own) for own in ((), (f"--optimizer.recipe={mine}",)))
    ends = 2 * 128_256 * 4096 + 4096
    before, now = plain.peak_under(LEAST), frozen.peak_under(LEAST)
    assert now.parameters == before.parameters
    assert before.optimizer - now.optimizer == 8 * (ends // 8)
    assert now.total < before.total
    if plain.micro_steps > 1:  # else not all gradients exist at the peak
        assert before.gradients - now.gradients == 4 * (ends // 8)
    assert plain.optimizer.saved - frozen.optimizer.saved == 8 * ends
    group = frozen.optimizer.groups()["ends"]
    assert (group.rule, group.elements, group.state) == ("frozen", ends, 0)
    assert sum(plain.optimizer.moved().values()) - sum(frozen.optimizer.moved().values()) == 32 * (ends // 8)


def test_frozen_parameters_take_no_memory_for_gradients_in_transit(tmp_path: Path) -> None:
    """Copy engines push the largest gradients, the embedding's. If it is tied, it would be held through backward."""
    (mine := tmp_path / "mine.toml").write_text(
        'extends = "adamw"\nhelp = "Mine."\n[groups.kept]\nrule = "adamw"\nlr_factor = 0.0\n'
        'pattern = ["tok_embeddings.weight", "layers.*"]\n'
    )
    (most := tmp_path / "most.toml").write_text(mine.read_text().replace('"layers', '"output.weight", "layers'))
    recipe, engines = f"--optimizer.recipe={mine}", "--parallelism.fsdp_copy_engines=always"
    of_most = f"--optimizer.recipe={most}"
    plain, frozen = (memory_of(8, engines, *own).symmetric_memory for own in ((), (of_most,)))
    assert plain - frozen == 2 * 128_256 * 4096  # bfloat16
    tied = ("--model.name=gemma3", "--model.flavor=270M", "--training.local_batch_size=1", "--training.seq_len=32")
    by_nccl = "--parallelism.fsdp_copy_engines=never"
    before, now = (memory_of(8, *tied, by_nccl, *own).peak_under(LEAST) for own in ((), (recipe,)))
    assert before.communication - now.communication >= 4 * 262_144 * 640  # float32, as it is reduced


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


def test_orthogonalisation_hides_exchanges_and_is_shared_out_evenly() -> None:
    rates, world = measured_rates(), 8
    memory = memory_of(world, MUON)
    time, ((_, shared),) = update_time(memory.optimizer, rates), memory.optimizer.shared
    work = [seconds_of(own, 5, rates) for own in shared.owned]
    assert max(work) / min(work) < 1.02  # they are shared out evenly
    slower = update_time(memory.optimizer, replace(rates, fsdp=rates.fsdp / 100))
    there_and_back = 2 * 2 * HIDDEN / 8 * 7 / 8  # bytes that a rank sends
    # What nothing hides: all but what the orthogonalisation has time for; owners have unequal parts of a bucket.
    sent = there_and_back / rates.fsdp * 100 / 1e6
    assert slower.exchanges == pytest.approx(sent - time.orthogonalisation, rel=0.1)
    assert time.exchanges < 0.05 * time.orthogonalisation
    alone = memory_of(1, MUON, "--model.n_layers=2")
    assert update_time(alone.optimizer, rates).exchanges == 0
