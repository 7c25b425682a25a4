"""The scripts of scripts/bench, where they deal with processes."""

import importlib.util
import os
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[1] / "scripts" / "bench"


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
    assert throughput.run("stalls", "", Namespace(gpus=2, steps=1, timeout_s=25, logs=tmp_path)) is None
    ranks = [int(path.name.removeprefix("pid")) for path in tmp_path.glob("pid*")]
    assert len(ranks) == 2
    for rank in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(rank, 0)
