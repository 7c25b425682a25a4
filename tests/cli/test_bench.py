"""The scripts of scripts/bench, where they deal with processes."""

import importlib.util
import json
import os
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


def script(name: str) -> ModuleType:
    """One of the scripts, as a module."""
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
