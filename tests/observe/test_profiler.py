import gzip
import json

import pytest
import torch

from titanlite.observe.profiler import Profiler


def train(folder, device, start_step, steps, first_step, last_step):
    """Train steps `first_step` to `last_step`, of which step s does s matmuls; give the notices and warnings."""
    notices: list[str] = []
    warnings: list[str] = []
    device = torch.device(device)
    profiler = Profiler(folder, 0, start_step, steps, first_step, device, notices.append, warnings.append)
    a = torch.ones(64, 64, device=device)
    for step in range(first_step, last_step + 1):
        for _ in range(step):
            torch.mm(a, a)
        profiler.step(step)
    profiler.close(last_step)
    return notices, warnings


def matmuls(folder):
    with gzip.open(folder / "rank0.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    return sum(e.get("cat") == "cpu_op" and e["name"] == "aten::mm" for e in events)


@pytest.mark.parametrize(
    ("first_step", "start_step", "traced"),
    [(1, 3, 3 + 4), (1, 1, 1 + 2), (11, 12, 12 + 13)],
    ids=["in mid-run", "from the first step", "after a resume"],
)
def test_exactly_the_steps_of_the_window_are_traced(tmp_path, first_step, start_step, traced):
    folder = tmp_path / "profile"
    notices, warnings = train(folder, "cpu", start_step, 2, first_step, first_step + 5)
    assert matmuls(folder) == traced
    assert sorted(path.name for path in folder.iterdir()) == ["kernels.txt", "rank0.json.gz"]
    assert (folder / "kernels.txt").read_text().startswith("2 steps, wall time per step ")
    assert "aten::mm" in (folder / "kernels.txt").read_text()
    assert len(notices) == 1
    assert str(folder / "kernels.txt") in notices[0]
    assert warnings == []


def test_a_run_that_ends_within_the_window_writes_what_there_is(tmp_path):
    train(tmp_path, "cpu", 2, 10, 1, 3)
    assert matmuls(tmp_path) == 2 + 3
    assert (tmp_path / "kernels.txt").read_text().startswith("2 steps")


def test_a_window_that_is_over_is_a_warning(tmp_path):
    notices, warnings = train(tmp_path / "profile", "cpu", 3, 2, 11, 15)
    assert notices == []
    assert warnings == [
        "profiling.start_step = 3 is before step 11, where training begins: no trace; give a step from 11 on"
    ]
    assert not (tmp_path / "profile").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_kernels_of_a_gpu(tmp_path):
    train(tmp_path, "cuda", 3, 2, 1, 5)
    table = (tmp_path / "kernels.txt").read_text()
    (row,) = [line for line in table.splitlines() if line.endswith("  matmul")]
    assert float(row.split()[1]) == (3 + 4) / 2
