import contextlib
import gzip
import io
import json
import re

import pytest
import torch

from titanlite.config.schema import Profiling
from titanlite.errors import StepError
from titanlite.observe.console import Console
from titanlite.observe.profiler import Profiler, span
from titanlite.observe.step_profile import DATA_WAIT, MATMUL, read_profiles
from titanlite.observe.trace_spans import ProfiledRun


def train(folder, device, start_step, steps, first_step, last_step, rank=0, enable=True, fail=False):
    """Train steps `first_step` to `last_step`, of which step s does s matmuls; give what the console showed."""
    device, stream = torch.device(device), io.StringIO()
    config = Profiling(enable=enable, start_step=start_step, steps=steps)
    console = Console(rank, 0, last_step, folder.parent / "logs", stream)
    a = torch.ones(64, 64, device=device)
    run = ProfiledRun(rank=rank, world=rank + 1, device=device.type)
    with contextlib.suppress(StepError), Profiler(config, folder, run, device, first_step, console) as profiler:
        for step in range(first_step, last_step + 1):
            profiler.begin(step)
            for _ in range(step):
                torch.mm(a, a)
            profiler.end(step)
            profiler.step(step)
        if fail:
            raise StepError
    console.close()
    return re.sub(r"\n +", " ", stream.getvalue())  # lines that the console folds, whole


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
    said = train(folder, "cpu", start_step, 2, first_step, first_step + 5)
    assert matmuls(folder) == traced
    assert sorted(path.name for path in folder.iterdir()) == ["kernels.txt", "rank0.json", "rank0.json.gz"]
    assert (folder / "kernels.txt").read_text().startswith("2 steps\n")
    assert "aten::mm" in (folder / "kernels.txt").read_text()
    assert said == (
        f"profile of 2 steps: {folder / 'rank0.json.gz'}, {folder / 'kernels.txt'}\n"
        f"what they did with their time: titanlite explain {tmp_path}\n"
    )


def test_another_rank_than_0_writes_its_summary_alone(tmp_path):
    totals = []
    for attempt in range(
        5
    ):  # steps of a fraction of a millisecond: a busy machine may stop between two reads of a clock
        assert train(tmp_path / f"{attempt}" / "profile", "cpu", 3, 2, 1, 6, rank=1) == ""
        (path,) = (tmp_path / f"{attempt}" / "profile").iterdir()
        summary = json.loads(path.read_text())
        assert (path.name, summary["rank"], [step["step"] for step in summary["steps"]]) == ("rank1.json", 1, [3, 4])
        assert MATMUL in summary["spans"]
        total = sum(step["end_us"] - step["start_us"] for step in summary["steps"])
        totals.append((total, summary["clock_us"]))
        if total == pytest.approx(summary["clock_us"], rel=0.02, abs=500):  # µs
            return
    pytest.fail(f"steps, clock: {totals}")


def test_nothing_is_marked_outside_the_window():
    assert isinstance(span(DATA_WAIT), contextlib.nullcontext)


@pytest.mark.parametrize(("last_step", "traced"), [(2, 2), (3, 2 + 3)])
def test_a_run_that_ends_within_the_window_writes_what_there_is(tmp_path, last_step, traced):
    folder = tmp_path / "profile"
    folder.mkdir()  # of an earlier start
    train(folder, "cpu", 2, 10, 1, last_step)
    assert matmuls(folder) == traced
    assert (folder / "kernels.txt").read_text().startswith(f"{last_step - 1} steps\n")


def test_a_window_that_is_over_is_a_warning(tmp_path):
    said = train(tmp_path / "profile", "cpu", 3, 2, 11, 15)
    assert said == (
        "warning: profiling.start_step = 3 is before step 11, where training begins: no trace; give a step from 11 on\n"
    )
    assert not (tmp_path / "profile").exists()
    assert train(tmp_path / "profile", "cpu", 3, 2, 11, 15, rank=1) == ""


@pytest.mark.parametrize("how", [{"enable": False}, {"fail": True, "steps": 99}, {"start_step": 4}])
def test_nothing_is_written_where_nothing_was_asked_for_or_the_run_failed(tmp_path, how):
    window = {"start_step": 1, "steps": 2, "first_step": 1, "last_step": 3}
    assert train(tmp_path / "profile", "cpu", **{**window, **how}) == ""
    assert not (tmp_path / "profile").exists()
    assert not torch._C._autograd._profiler_enabled()


def test_a_failure_is_not_hidden_by_a_trace_that_cannot_be_stopped(tmp_path, monkeypatch):
    stop = torch.profiler.profile.stop

    def fail(trace):
        stop(trace)
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(torch.profiler.profile, "stop", fail)
    train(tmp_path / "profile", "cpu", 1, 9, 1, 3, fail=True)  # expects the failure, and no other


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_know_when_a_trace_begins_and_ends(tmp_path, rank):
    console = Console(rank, 0, 9, tmp_path, io.StringIO())
    for first_step, edges in ((1, [None, "begin", None, "end", None]), (4, [None] * 5)):
        config = Profiling(enable=True, start_step=3, steps=2)
        profiler = Profiler(config, tmp_path, ProfiledRun(rank=rank), torch.device("cpu"), first_step, console)
        assert [profiler.edge(step) for step in range(1, 6)] == edges
    console.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_kernels_of_a_gpu(tmp_path):
    train(tmp_path / "profile", "cuda", 3, 2, 1, 5)
    table = (tmp_path / "profile/kernels.txt").read_text()
    (row,) = [line for line in table.splitlines() if line.strip().startswith("aten::mm ")]
    assert row.split()[-1] == f"{3 + 4}"
    (profile,) = read_profiles(tmp_path)
    assert len(profile.spans[MATMUL]) <= 3 + 4
    assert [step.step for step in profile.steps] == [3, 4]
    total = sum(step.end_us - step.start_us for step in profile.steps)
    assert total == pytest.approx(profile.clock_us, rel=0.02, abs=500)
    assert profile.memory is not None
    assert profile.memory.reserved > 0
