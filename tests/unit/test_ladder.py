"""The shipped configs: their figures are the forecast's, and none is much slower than the best that fits."""

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from scripts import ladder
from scripts.ladder import LADDER, ROOT, Rung
from tests.support.needs import slow
from titanlite.byte_size import GIB
from titanlite.config.schema import Config
from titanlite.errors import TitanliteError
from titanlite.forecast.search import RESERVE_GIB, Candidate, Setting, candidates_of_layout
from titanlite.preflight.checked_run import checked_run

BEHIND = 0.03
CHOSEN = [rung for rung in LADDER if rung.model]
DEGREES = 1, 2, 4, 8


@pytest.fixture(autouse=True)
def _nothing_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention is priced by documents of prepared data; what whoever runs this has prepared makes no difference."""
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize("rung", LADDER, ids=lambda rung: rung.name)
def test_a_file_and_its_rows_have_the_figures_of_the_forecast(rung: Rung) -> None:
    """`python scripts/ladder.py NAME` writes both anew."""
    found = ladder.figures(rung, ROOT / rung.path)
    assert (ROOT / rung.path).read_text().partition("\n[job]")[0] == ladder.heading(rung, found)
    assert ladder.rows(rung, found) in ladder.PAGE.read_text()


def test_what_is_published_for_64_gpus_is_reached() -> None:
    """NVIDIA publishes 1,633 to 1,664 tok/s/GPU in float8 for 70B on 64 H100, Automodel 867 in bf16."""
    bf16, rowwise = re.findall(r"([\d,]+) tok/s/GPU", (ROOT / "configs" / "llama3_70b.toml").read_text())
    assert int(bf16.replace(",", "")) >= 867
    assert int(rowwise.replace(",", "")) >= 1664


@pytest.mark.parametrize("rung", slow(*CHOSEN), ids=lambda rung: rung.name)
def test_a_file_is_what_the_search_finds(rung: Rung) -> None:
    assert ladder.keys_of(rung) == "\n[job]" + (ROOT / rung.path).read_text().partition("\n[job]")[2]


def variants(config: Config, world: int, is_mixture: bool) -> list[Config]:
    """Return a config in every layout of 8 GPUs of a host or fewer, with every micro-batch and nearly its batch."""
    found = []
    degrees = [(*each, 1) for each in product(DEGREES, DEGREES)] + [(1, 1, e) for e in DEGREES if is_mixture]
    for (t, cp, ep), is_async, n in product(degrees, (False, True), (*range(1, 9), 12, 16, 24, 32)):
        if t * cp * ep > world or t * cp * ep > 8 or (is_async and t == 1):
            continue
        at_once = n * world // (t * cp)
        batch = max(1, round((config.training.global_batch_size or 1) / at_once)) * at_once
        own = {"tensor_parallel_degree": t, "context_parallel_degree": cp, "expert_parallel_degree": ep}
        mesh = replace(config.parallelism, **own, async_tensor_parallel=is_async)
        training = replace(config.training, local_batch_size=n, global_batch_size=batch)
        found.append(replace(config, parallelism=mesh, training=training))
    return found


@pytest.mark.parametrize("name", slow("llama3_1b_8gpus", "llama3_8b_128k", "olmoe_1b_7b"))
def test_no_layout_batch_and_save_list_that_fits_is_much_faster(name: str) -> None:
    (rung,) = (each for each in LADDER if each.name == name)
    run, rates = checked_run(["--config", str(ROOT / rung.path)], rung.world), rung.machine.rates
    assert rates is not None
    setting = Setting(run.dims, None, run.optimizer, rates, host=rates.host)
    own, fastest, tried = Candidate(setting, rung.world, run.config, run.save_list), 0.0, 0
    assert own.fits
    for config in variants(run.config, rung.world, run.dims.experts is not None):
        layout = Candidate(setting, rung.world, config)
        try:
            found = candidates_of_layout(layout)
        except TitanliteError:  # a degree does not divide heads or sequences
            continue
        fitting = [candidate.tokens_per_second for candidate in found if candidate.fits]
        if fitting and max(candidate.tokens_per_second for candidate in found) > fastest:
            budget = rates.device_gib - RESERVE_GIB - layout.memory.symmetric_memory / GIB
            fitting.append(layout.keeping("auto", None, budget).tokens_per_second)
        fastest, tried = max([fastest, *fitting]), tried + len(found)
    assert tried > 100
    assert own.tokens_per_second > (1 - BEHIND) * fastest
