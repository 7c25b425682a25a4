"""The scripts of scripts/bench: where they deal with processes, and the rows that they print."""

import importlib.util
import json
import os
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import tables

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_run_over_its_time_leaves_no_rank_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    throughput = script("throughput")
    monkeypatch.setattr(throughput, "ROOT", tmp_path)
    stalls = "import os, pathlib, time\npathlib.Path(f'pid{os.getpid()}').touch()\ntime.sleep(600)\n"
    (tmp_path / "train.py").write_text(stalls)
    assert throughput.run("stalls", "", Namespace(gpus=2, alone=False, steps=1, timeout_s=25, logs=tmp_path)) is None
    ranks = [int(path.name.removeprefix("pid")) for path in tmp_path.glob("pid*")]
    assert len(ranks) == 2
    for rank in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(rank, 0)


def test_a_row_is_what_the_tables_read(tmp_path: Path) -> None:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    receipt = [{"feature": "environment", "applied": {"device": "NVIDIA H100"}}]
    (tmp_path / "runs" / "a" / "receipt.json").write_text(json.dumps(receipt))
    keys = ("tokens_per_second_per_gpu", "mfu", "seconds", "memory_gib")
    measured = [
        dict(zip(keys, values, strict=True)) for values in ((9000.4, 0.5, 1.5, 70.04), (8000.0, 0.25, 2.5, 70.0))
    ]
    flags = "--config configs/llama3_8b.toml --activation_checkpoint.recipe none --parallelism.tensor_parallel_degree 2"
    args = Namespace(gpus=4, alone=False, repeats=2, steps=12, logs=tmp_path)
    row = script("throughput").as_row(flags, measured, args)
    assert (tables.model(row), tables.layout(row), tables.save_list(row)) == ("8B", "FSDP 2 × TP 2", "`none`")
    assert (row["gpu"], row["steps"], row["repeats"]) == ("NVIDIA H100", "6-12", 2)
    assert (row["tokens_per_second"], row["tokens_per_second_spread"]) == (8500, [8000, 9000])
    assert (row["mfu_percent"], row["ms_per_step"], row["reserved_gib"]) == (37.5, 2000, 70.0)


@pytest.mark.slow
def test_one_rank_trains_without_the_others(tmp_path: Path):
    """Of FSDP 4 x TP 2, in one process: it holds what a rank of eight would."""
    flags = "--config configs/debug.toml --parallelism.tensor_parallel_degree 2"
    row = script("throughput").run("alone", flags, Namespace(gpus=8, alone=True, steps=7, timeout_s=200, logs=tmp_path))
    assert row is not None
    receipt = json.loads((tmp_path / "runs" / "alone" / "receipt.json").read_text())
    applied = {entry["feature"]: entry["applied"] for entry in receipt}
    shares = {"data_parallel_replicate": 1, "data_parallel_shard": 4, "tensor_parallel": 2}
    assert applied["parallelism"] == shares
