"""What a machine without a GPU records for an H200 is what a run on two wrote into its receipt.

`tests/data/receipts` has those of torch 2.11 with flash-attn-4, at commit 2effeae7, except
that the number of rows in `ep.json` is of a window, as it is now.
"""

import json
from pathlib import Path

import pytest

from titanlite.config.toml_file import shipped_folder
from titanlite.preflight.checked_run import checked_run
from titanlite.receipt import Receipt
from titanlite.recorder.record import record

RECEIPTS = Path(__file__).parents[2] / "data" / "receipts"
FLAGS = {
    "fsdp": (),
    "tp_async_rowwise": (
        "--parallelism.tensor_parallel_degree=2",
        "--parallelism.async_tensor_parallel=true",
        "--float8.recipe=rowwise",
        "--compile.enable=true",
    ),
    "ep": ("--model.name=qwen3_moe", "--parallelism.expert_parallel_degree=2"),
    "cp": ("--parallelism.context_parallel_degree=2", "--data.document_mask=true"),
}
MEASURED = {"environment", "flash_attention_4", "data.source", "data.document_mask", "compile", "memory"}
"""Entries of versions, of data that is read, and of a step that has run."""


@pytest.mark.parametrize("name", FLAGS)
def test_the_recorded_receipt_is_that_of_a_gpu(name: str, tmp_path: Path) -> None:
    given = "--config", str(shipped_folder("configs") / "debug.toml"), "--training.mixed_precision_param=bfloat16"
    receipt = Receipt()
    for entry in record(checked_run([*given, *FLAGS[name]], 2), 2, "h200", all_blocks=True).entries:
        receipt.add(entry)
    receipt.write(tmp_path / "receipt.json")
    recorded, real = (
        {entry["feature"]: entry for entry in json.loads(path.read_text()) if entry["feature"] not in MEASURED}
        for path in (tmp_path / "receipt.json", RECEIPTS / f"{name}.json")
    )
    assert recorded == real
    assert real["attention"]["applied"] == "flash_attention_4"
