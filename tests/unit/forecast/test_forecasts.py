"""Forecasts keep the figures of `tests/data/forecasts.jsonl`, over all layouts, save-lists and update rules.

Measured runs hold forecasts to what a GPU does (`test_memory.py`, `test_step_time.py`); these say which figure changes.
Where one changes on purpose, `PYTHONPATH=. python tests/unit/forecast/test_forecasts.py` prints the file anew.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.measured import MEASURED_CONFIGS
from titanlite.config.toml_file import shipped_folder
from titanlite.forecast.activation_cost import block_costs
from titanlite.forecast.device_specs import measured_rates, no_rates_reason
from titanlite.forecast.memory import MemoryModel
from titanlite.forecast.step_time import StepTimeModel
from titanlite.preflight.checked_run import checked_run

FILE = Path(__file__).parents[2] / "data" / "forecasts.jsonl"
ROWS = [json.loads(line) for line in FILE.read_text().splitlines()]
USUAL = "--training.seq_len 8192 --training.local_batch_size 2 --parallelism.fsdp_copy_engines never"


def figures(run: str, world: int, host: int | None = None) -> tuple[dict[str, int], dict[str, float]]:
    """Bytes by category, and milliseconds by class of work where there are rates."""
    config, *flags = run.split()
    folder = shipped_folder("configs") if "debug" in config else MEASURED_CONFIGS
    path = str(folder / f"{config}.toml")
    asked = checked_run(["--config", path, *USUAL.split(), *flags], world_size=world)
    memory = MemoryModel(asked.config, asked.dims, asked.float8, asked.optimizer, world, host=host)
    assert asked.save_list is not None
    blocks, update = block_costs(memory.run, asked.save_list), memory.optimizer
    own = {"symmetric memory": memory.symmetric_memory, "of the update": update.buffers, "saved": update.saved}
    held = memory.peak(blocks).categories() | own
    if no_rates_reason(memory) is not None:
        return held, {}
    model = StepTimeModel(memory, measured_rates())
    time, keys = model.update(), model.key_exchange(blocks)
    parts = {"keys": keys, "orthogonalisation": time.orthogonalisation, "exchanges": time.exchanges}
    return held, model.step(blocks).categories() | parts


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['run']} on {row['world']}")
def test_a_forecast_is_as_it_was(row: dict[str, Any]) -> None:
    held, ms = figures(row["run"], row["world"], row.get("host"))
    assert held == dict(zip(held, row["bytes"], strict=True))
    assert ms == pytest.approx(dict(zip(ms, row["ms"], strict=True)), rel=1e-5)


if __name__ == "__main__":
    for given in ({key: row[key] for key in ("run", "world", "host") if key in row} for row in ROWS):
        held, ms = figures(**given)
        print(json.dumps(given | {"bytes": [*held.values()], "ms": [float(f"{each:.6g}") for each in ms.values()]}))
