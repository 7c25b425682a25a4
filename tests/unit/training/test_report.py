"""The numbers of a logged step, from moments that are given instead of measured."""

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

import titanlite.training.report as training_report
from titanlite import recipes
from titanlite.comparison.curves import metrics_of
from titanlite.comparison.runs import RunRecord
from titanlite.config.schema import Config, Metrics, Training
from titanlite.data.mixture import Mixture
from titanlite.data.stages import Past, StageRow, stage_table
from titanlite.models.llama3 import Llama3
from titanlite.observe.console import Console
from titanlite.observe.metric_table import METRICS, Metric
from titanlite.observe.metrics import MetricsFile, read_metrics
from titanlite.observe.peak_flops import mean_attended, token_flops_of, windows_of
from titanlite.observe.tensorboard import TensorBoardFile
from titanlite.preflight.run_folder import RunFolder
from titanlite.training.report import InFlight, Moment, Outcome, Report
from titanlite.training.routers import Routers, SeenRouting
from titanlite.training.step import NONE

SIZES = recipes.load("model", "llama3-debug")
CPU, S, BATCH, WORLD, EPOCH = torch.device("cpu"), 64, 8, 2, 44
with torch.device("meta"):
    MODEL = Llama3(SIZES, S)
OF_TOKEN, ATTENDED = token_flops_of(MODEL, SIZES), mean_attended(windows_of(MODEL), np.array([S] * BATCH))
FLOPS = OF_TOKEN.total(ATTENDED)


@dataclass
class At(Moment):
    """A moment in seconds after the report's clock was started."""

    seconds: float
    _event: None = field(default=None, init=False)

    def seconds_since(self, earlier: Moment) -> float:
        return self.seconds - (earlier.seconds if isinstance(earlier, At) else 0.0)


@contextmanager
def report(folder: Path, log_freq: int, samples_before: int, start: int) -> Iterator[Report]:
    config = Config(
        training=Training(steps=100, seq_len=S, global_batch_size=BATCH), metrics=Metrics(log_freq=log_freq)
    )
    console, metrics = Console(0, 0, 100, folder, io.StringIO()), MetricsFile(folder / "metrics.jsonl", start)
    with closing(console), closing(metrics):
        asked = stage_table(config, 1).rows[0].asked
        rows = [StageRow(0, 0, 0, asked), StageRow(start, samples_before, samples_before * S, asked)]
        table = stage_table(config, 1, Past(start, samples_before, tuple(rows), S))
        yield Report(config, Mixture(table, {"": EPOCH}), WORLD, OF_TOKEN, CPU, console, [console, metrics])


def outcome(step: int, seconds: float, wait: float, attended: float = ATTENDED) -> Outcome:
    return Outcome(
        step,
        lr=1e-3,
        numbers={"loss": 2.5, "grad_norm": 0.5},
        skipped=False,
        stop_asked=False,
        lacked_data=False,
        attended=attended,
        data_wait_s=wait,
        done=At(seconds),
    )


def test_a_row_is_the_mean_since_the_row_before(tmp_path: Path) -> None:
    # 50 sequences were trained on in 10 steps, of another batch size than now.
    with report(tmp_path, log_freq=2, samples_before=50, start=10) as logged:
        for step, seconds, wait in ((11, 5.0, 0.5), (12, 6.0, 0.25), (13, 6.5, 0.0), (14, 7.0, 0.25)):
            logged.step(outcome(step, seconds, wait))
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    keys = """step loss grad_norm lr tokens epoch tokens_per_second_per_gpu tflops_per_gpu mfu
        memory_gib memory_allocated_gib seconds data_wait_seconds"""
    assert [*first] == [*second] == keys.split()
    assert [row["step"] for row in (first, second)] == [12, 14]
    assert [row["seconds"] for row in (first, second)] == [3.0, 0.5]
    assert [row["data_wait_seconds"] for row in (first, second)] == [0.375, 0.125]
    assert [row["tokens"] for row in (first, second)] == [(50 + 2 * BATCH) * S, (50 + 4 * BATCH) * S]
    assert [row["epoch"] for row in (first, second)] == [1.5, (50 + 4 * BATCH) / EPOCH]
    rate = BATCH * S / 0.5 / WORLD
    assert second["tokens_per_second_per_gpu"] == rate
    assert second["tflops_per_gpu"] == pytest.approx(rate * FLOPS / 1e12)
    assert second["mfu"] == pytest.approx(rate * FLOPS / logged._peak)


def test_flops_are_those_of_what_is_attended(tmp_path: Path) -> None:
    """Two documents a sample have half the scores of one, each token seeing half as many on average."""
    halves = mean_attended(windows_of(MODEL), np.array([S // 2] * 2 * BATCH))
    with report(tmp_path, log_freq=2, samples_before=0, start=10) as logged:
        logged.step(outcome(11, 1.0, 0.0))
        logged.step(outcome(12, 2.0, 0.0, halves))
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    of_attention = FLOPS - OF_TOKEN.matmul
    assert row["mfu"] == pytest.approx(BATCH * S / WORLD * (FLOPS - of_attention / 4) / logged._peak)


def test_the_last_step_is_logged_and_what_was_not_training_does_not_count(tmp_path: Path) -> None:
    with report(tmp_path, log_freq=7, samples_before=0, start=97) as logged:
        logged.step(outcome(98, 5.0, 0.5))
        logged.step(outcome(99, 6.0, 0.5))
        logged._start_clock(At(9.0))  # as after a checkpoint
        logged.step(outcome(100, 9.5, 0.125))
    first, last = read_metrics(tmp_path / "metrics.jsonl")
    assert first["step"] == 98
    assert (last["step"], last["seconds"], last["data_wait_seconds"]) == (100, 0.5, 0.125)


def test_what_is_logged_is_shown_and_a_look_at_no_layer_is_not(tmp_path: Path) -> None:
    numbers = {f"float8_{what}.w": 0.0 for what in ("output_sqnr_db", "input_saturated", "input_flushed")}
    with report(tmp_path, log_freq=2, samples_before=0, start=10) as logged:
        logged.step(outcome(12, 1.0, 0.0))
        for measured in ({"validation_loss": 3.5}, {}, numbers):
            logged.log(12, measured)
    lines = (tmp_path / "rank0.log").read_text().splitlines()
    shown = [line.partition("12/100  ")[2].split()[0] for line in lines[1:]]  # the first has the peak
    assert shown == ["loss", "validation", "float8"]
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [12, 12, 12]


class Event:
    """A CUDA event."""

    def __init__(self, enable_timing: bool) -> None:
        self.timed, self.passed, self.ms = enable_timing, False, 0.0

    def record(self) -> None:
        self.ms = 1000.0

    def synchronize(self) -> None:
        self.passed = True

    def elapsed_time(self, later: "Event") -> float:
        assert self.timed
        assert later.timed
        return later.ms - self.ms


def test_a_moment_is_of_the_devices_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_report, "time", SimpleNamespace(monotonic=iter([5.0, 5.5, 6.0, 8.0]).__next__))
    earlier, later = Moment(CPU), Moment(CPU)
    assert later.seconds_since(earlier) == 0.5
    monkeypatch.setattr(torch.cuda, "Event", Event)
    earlier, later = (Moment(torch.device("cuda")) for _ in range(2))
    assert isinstance(earlier._event, Event)
    assert isinstance(later._event, Event)
    later.wait()
    assert later._event.passed
    earlier._event.ms -= 125
    assert later.seconds_since(earlier) == 0.125


RESULT = {"loss": 2.5, "stop_asked": 1.0, "attended": 7.0, "lacked_data": 0.0, "grad_norm": 0.5, "skipped": 0.0}
RESULT |= {"targets": 64.0, "loss.wiki": 2.25, "loss.code": NONE, "grad_norm.matrices": math.nan}


def test_results_are_read_when_the_device_is_done() -> None:
    class Arrival(At):
        def wait(self) -> None:
            in_flight._host.copy_(Tensor([*RESULT.values()]))

    in_flight = InFlight(11, 1e-3, dict.fromkeys(RESULT, torch.zeros(())), 0.25)
    in_flight._done = done = Arrival(1.0)
    found = in_flight.read()
    assert math.isnan(found.numbers["grad_norm.matrices"])
    numbers = {"loss": 2.5, "grad_norm": 0.5, "loss.wiki": 2.25, "grad_norm.matrices": math.inf}
    found = replace(found, numbers={**found.numbers, "grad_norm.matrices": math.inf})
    assert found == Outcome(11, 1e-3, numbers, False, True, False, 7.0, 0.25, done)


def test_what_is_behind_a_result_is_of_routers() -> None:
    class Reader(Routers):
        def __init__(self) -> None:
            pass

        def seen(self) -> Tensor:
            return torch.tensor([1.5, 3.0], dtype=torch.float64)

        def read(self, seen: Sequence[float]) -> SeenRouting:
            return SeenRouting({"experts_fullest.layers.0": seen[0]}, {"layers.0": [int(seen[1])]})

    result = {name: torch.tensor(number) for name, number in RESULT.items()} | {"targets": torch.tensor(0.0)}
    outcome = InFlight(11, 1e-3, result, 0.25, Reader()).read()
    assert outcome.numbers == {"targets": 0}
    assert outcome.routing == SeenRouting({"experts_fullest.layers.0": 1.5}, {"layers.0": [3]})


def test_a_metric_is_one_declaration_and_one_number_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spread = Metric("spread", "train/spread", "Loss", "spread of losses", "nats", console="spread {:4.2f}".format)
    monkeypatch.setitem(METRICS, spread.key, spread)
    result = {name: torch.tensor(number) for name, number in (RESULT | {"spread": 0.25}).items()}
    in_flight = InFlight(12, 1e-3, result, 0.25)
    in_flight._done = At(1.0)
    folder = RunFolder(tmp_path)
    with report(tmp_path, log_freq=2, samples_before=0, start=10) as logged:
        shown = TensorBoardFile(folder.tensorboard, folder.metrics, folder.samples, logged.console.warning)
        logged.observers = [*logged.observers, shown]
        logged.step(in_flight.read())
        shown.close()
    rows = read_metrics(folder.metrics)
    assert [row["spread"] for row in rows] == [0.25]
    line = (tmp_path / "rank0.log").read_text().splitlines()[-1]
    assert re.search(r"loss  2\.5000  grad  0\.500 .* GiB  spread 0\.25  eta", line)
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder.tensorboard))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/spread")] == [(12, 0.25)]
    (chart,) = (chart for chart in metrics_of([RunRecord("a", rows, {}, "", None)]) if chart.name == "spread")
    assert (chart.group, chart.label) == ("Loss", "spread of losses (nats)")
