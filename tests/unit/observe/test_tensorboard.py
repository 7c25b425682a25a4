"""TensorBoard's own reader sees each step once, whatever happened to the run on the way."""

import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.run_folder import STEP
from titanlite.config.schema import Config, Data
from titanlite.observe.metrics import MetricsFile, Row
from titanlite.observe.tensorboard import TensorBoardFile, tensorboard_entry
from titanlite.receipt import Receipt

pytest.importorskip("tensorboard")


def step_row(step: int, loss: float, mfu: float = 0.5) -> Row:
    return STEP | {"step": step, "loss": loss, "tokens": 1000 * step, "mfu": mfu}


STARTS: list["Start"] = []


@pytest.fixture(autouse=True)
def _close_all(monkeypatch: pytest.MonkeyPatch):
    """Not earlier: a run that is killed closes nothing."""
    from tensorboard.summary.writer import event_file_writer

    # A file's name ends in the number of the process's writer, and files of one second are read in order of names.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    yield
    for start in STARTS:
        start.metrics.close()
        if start.shown:
            start.shown.close()
    STARTS.clear()


class Start:
    """One start of a run: its file of rows, and TensorBoard's."""

    def __init__(
        self, folder: Path, resume_step: int, shows: bool = True, warn: Callable = print, validates_again: bool = False
    ) -> None:
        path = folder / "metrics.jsonl"
        self.metrics = MetricsFile(path, resume_step, validates_again)
        self.shown = TensorBoardFile(folder / "tensorboard", path, folder / "samples.jsonl", warn) if shows else None
        STARTS.append(self)

    def write(self, *rows: Row) -> "Start":
        for row in rows:
            self.metrics.write(row)
            if self.shown:
                self.shown.write(row)
        return self


def read(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder / "tensorboard")).Reload()


def steps(folder: Path, name: str = "train/loss") -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(folder).Scalars(name)]


def test_names_are_those_of_wandb_and_steps_the_axis(tmp_path: Path) -> None:
    start = Start(tmp_path, 0)
    measured = {"validation_loss": 2.25}, {"float8_output_sqnr_db.layers.0.wo": 30.0}
    start.write(step_row(1, 2.0, mfu=math.nan), *({"step": 1, "tokens": 1000, **more} for more in measured))
    found = read(tmp_path)  # while the run goes on
    names = set(found.Tags()["scalars"])
    assert {"train/loss", "optim/lr", "perf/memory_gib", "val/loss", "float8/output_sqnr_db.layers.0.wo"} <= names
    assert not {"perf/mfu", "step", "tokens"} & names
    assert steps(tmp_path, "val/loss") == [(1, 2.25)]


LAPSE = [(0, 3, 1.0), (3, 9, 2.0, False), (9, 9, 0.0), (9, 9, 0.0), (9, 10, 3.0)]


@pytest.mark.parametrize(
    ("starts", "losses", "cut_off"),
    [  # each killed: after which step it starts, its last step and its loss, and whether TensorBoard's file is written
        ([(0, 5, 1.0), (3, 8, 2.0), (6, 8, 3.0), (8, 9, 4.0)], [1.0] * 3 + [2.0] * 3 + [3.0] * 2 + [4.0], 0),
        ([(0, 5, 1.0, False), (3, 4, 2.0)], [1.0] * 3 + [2.0], 0),
        (LAPSE, [1.0] * 3 + [2.0] * 6 + [3.0], 0),
        (LAPSE, [1.0] * 3 + [2.0] * 6 + [3.0], 5),
    ],
    ids=["stopped twice", "turned on late", "not written for a time", "and cut off before"],
)
def test_each_step_has_one_point(tmp_path: Path, starts: list[tuple], losses: list[float], cut_off: int) -> None:
    for step, last, loss, *shows in starts:
        Start(tmp_path, step, *shows).write(*(step_row(one, loss) for one in range(step + 1, last + 1)))
        if cut_off and step == 0:
            (file,) = (tmp_path / "tensorboard").iterdir()
            os.truncate(file, file.stat().st_size - cut_off)
    for name, values in {"train/loss": losses, "perf/mfu": [0.5] * len(losses)}.items():
        assert steps(tmp_path, name) == list(enumerate(values, 1))


def test_a_step_that_is_validated_again_has_one_point(tmp_path: Path) -> None:
    for step, loss in ((0, 3.0), (2, 2.5)):
        start = Start(tmp_path, step, validates_again=True).write(*(step_row(step, 1.0) for step in range(step + 1, 3)))
        start.write({"step": 2, "tokens": 2000, "validation_loss": loss})
    assert steps(tmp_path, "val/loss") == [(2, 2.5)]
    assert steps(tmp_path) == [(1, 1.0), (2, 1.0)]


def test_a_tensorboard_that_looks_on_forgets_what_is_trained_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    Start(tmp_path, 0).write(*(step_row(step, 1.0) for step in range(1, 6)))
    looks_on = EventAccumulator(str(tmp_path / "tensorboard"))
    looks_on.Reload()
    assert len(looks_on.Scalars("train/loss")) == 5
    Start(tmp_path, 3).write(step_row(4, 2.0))
    looks_on.Reload()
    assert [(event.step, event.value) for event in looks_on.Scalars("train/loss")] == steps(tmp_path)
    assert len(steps(tmp_path)) == 4


def test_what_is_no_number_has_no_point(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "tokens": 9, "loss": 5.0, "phase": "decay", "of": [1]}\n')
    Start(tmp_path, 1)
    assert steps(tmp_path) == [(1, 5.0)]
    assert read(tmp_path).Tags()["scalars"] == ["train/loss"]


def test_config_and_facts_are_texts_without_secrets(tmp_path: Path) -> None:
    start = Start(tmp_path, 0)
    assert start.shown is not None
    start.shown.describe(Config(data=Data(source="https://me:topsecret@host/x")), {"world_size": 2})
    found = read(tmp_path)
    texts = [found.Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0].decode() for name in ("config", "run")]
    assert '    source = "https://***@host/x"\n' in texts[0]
    assert texts[1] == "    world_size = 2\n"
    entry = tensorboard_entry(tmp_path / "tensorboard", start.shown)
    assert entry.summary() == f"metrics.tensorboard: folder {tmp_path / 'tensorboard'}"


def test_what_fails_is_one_warning_and_training_goes_on(tmp_path: Path) -> None:
    warned: list[str] = []
    (tmp_path / "tensorboard").write_text("a file in the folder's place")
    start = Start(tmp_path, 0, warn=warned.append).write(step_row(1, 1.0), step_row(2, 1.0))
    assert start.shown is not None
    start.shown.describe(Config(), {})
    start.shown.close()
    (said,) = warned
    assert said.startswith("tensorboard: cannot write (")
    assert said.endswith("metrics.jsonl has every row")
    receipt = Receipt()
    receipt.add(tensorboard_entry(tmp_path / "tensorboard", start.shown))
    assert [case.why for case in receipt.entries[0].skipped] == ["the file cannot be written"]
    receipt.enforce(strict=True, warn=warned.append)  # it ends no run


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's own thread
def test_a_full_disk_in_mid_run(tmp_path: Path) -> None:
    warned: list[str] = []
    start = Start(tmp_path, 0, warn=warned.append).write(step_row(1, 1.0))
    assert start.shown is not None
    worker = start.shown._writer.file_writer.event_writer._async_writer._worker
    records = start.shown._writer.file_writer.event_writer._async_writer._writer
    with open("/dev/full", "wb", buffering=0) as full:
        records._writer, own = full, records._writer
        start.write(step_row(2, 1.0), step_row(3, 1.0))
        worker.join(30)  # else its exception would be told of the next test
    own.close()
    assert len(warned) == 1
    assert "No space left on device" in warned[0]
