"""Write the rows of metrics.jsonl for TensorBoard. It can never end a run: the first failure becomes one warning.

A run that is restarted trains some steps again, and TensorBoard would show them twice. So each start writes one new
file with all rows of metrics.jsonl, which keep the time at which they were first written, and empties the file of the
start before. The new one begins with TensorBoard's mark of a restart, at which a TensorBoard that is looking on forgets
what it has read.

TensorBoard's x axis is the step; `tokens` is an axis and no curve. A number that is NaN or infinite has no point.
"""

import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import tomli_w

from titanlite.config.schema import Config
from titanlite.config.write import toml_table
from titanlite.durable import open_plain, read_plain
from titanlite.observe.metric_table import AXES, shown_name
from titanlite.observe.metrics import Row, json_row, read_metrics
from titanlite.receipt import Entry, Skipped
from titanlite.redact import redact, redact_tree

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]

_NAME = "events.out.tfevents.{}.titanlite"  # TensorBoard looks for the middle, and reads in order of names
_FRAME = struct.Struct("<QI")  # before a record: its length in bytes, and a checksum; after it another checksum of 4


class TensorBoardFile:
    """The file of one start. Rank 0 owns it; made only when `metrics.tensorboard` is true."""

    def __init__(self, folder: Path, metrics: Path, warn: Callable[[str], object]) -> None:
        """Write the rows that there are, in the place of earlier files.

        Args:
            folder: `tensorboard/` in the run's folder; created if need be.
            metrics: the file of rows, which has none of a step that is trained again.
            warn: called with one text at the first failure.
        """
        self._warn, self._has_failed = warn, False
        self._file: BinaryIO | None = None
        self._attempt(lambda: self._start(folder, metrics))

    @property
    def has_failed(self) -> bool:
        """Return whether it has stopped writing, for a reason that it has said."""
        return self._has_failed

    def describe(self, config: Config, facts: Mapping[str, Any]) -> None:
        """Show the config and the run's facts as texts, without secrets."""
        from torch.utils.tensorboard.summary import text

        def write() -> None:
            for name, table in {"config": toml_table(config), "run": dict(facts)}.items():
                toml = tomli_w.dumps(redact_tree(table))
                markdown = "".join(f"    {line}\n" for line in toml.splitlines())  # as it stands
                self._summary(text(name, markdown), 0, time.time())

        self._attempt(write)

    def write(self, row: Row) -> None:
        """Add one row."""
        self._attempt(lambda: self._add(json_row(row)))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None

    def _attempt(self, write: Callable[[], object]) -> None:
        """Write something; if that fails, say so once, and write no more."""
        if self._has_failed:
            return
        try:
            write()
            if self._file is not None:
                self._file.flush()
        except (OSError, ImportError) as error:
            self._has_failed = True
            self.close()
            with suppress(OSError):  # the log may be on the same full disk
                self._warn(redact(f"tensorboard: cannot write ({error}); metrics.jsonl has every row"))

    def _start(self, folder: Path, metrics: Path) -> None:
        """Write all rows to a new file, and empty those of earlier starts."""
        folder.mkdir(parents=True, exist_ok=True)
        before = sorted(folder.glob(_NAME.format("*")))
        times = {key: at for path in before for key, at in _times(path)}
        last = max((int(number) for path in before if (number := path.name.split(".")[3]).isdecimal()), default=0)
        path = folder / _NAME.format(f"{max(int(time.time()), last + 1):010d}")
        self._file = os.fdopen(open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb")
        self._begin()
        for row in read_metrics(metrics):
            self._add(row, times)
        self._file.flush()
        for one in before:
            if one.stat().st_size:  # a TensorBoard that reads it waits for its end, and would wait for one that is gone
                os.close(open_plain(one, os.O_WRONLY | os.O_TRUNC))
            else:
                one.unlink()

    def _begin(self) -> None:
        """Write what a file begins with."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog, SourceMetadata  # type: ignore[attr-defined]

        source = SourceMetadata(writer="titanlite")
        self._record(Event(wall_time=time.time(), file_version="brain.Event:2", source_metadata=source))
        self._record(Event(wall_time=time.time(), step=0, session_log=SessionLog(status=SessionLog.START)))

    def _add(self, row: Mapping[str, Any], times: Mapping[tuple[int, str], float] = {}) -> None:
        """Write one row of metrics.jsonl, of now or of the time at which it was written before."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]

        shown = {
            shown_name(key): value for key, value in row.items() if key not in AXES and isinstance(value, int | float)
        }
        values = [Summary.Value(tag=name, simple_value=value) for name, value in shown.items()]
        if values:
            at = times.get((row["step"], values[0].tag), time.time())
            self._summary(Summary(value=values), row["step"], at)

    def _summary(self, summary: "Summary", step: int, at: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[attr-defined]

        self._record(Event(wall_time=at, step=step, summary=summary))

    def _record(self, event: Any) -> None:
        """Write one record, as TensorBoard's own writer frames it."""
        from tensorboard.summary.writer.record_writer import RecordWriter

        RecordWriter(self._file).write(event.SerializeToString())


def tensorboard_entry(folder: Path, file: TensorBoardFile | None = None) -> Entry:
    """Return the receipt's entry; a file that cannot be written is told there and ends no run."""
    stopped = file is not None and file.has_failed
    skipped = (Skipped("rows", "the file cannot be written", is_told=True),) if stopped else ()
    return Entry("metrics.tensorboard", True, {"folder": str(folder)}, count=1, skipped=skipped)


def _times(path: Path) -> Iterator[tuple[tuple[int, str], float]]:
    """Read when the numbers of each step were written, up to where the file is cut off: step, first name, time."""
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[attr-defined]

    data, at = read_plain(path), 0
    while at + _FRAME.size <= len(data):
        length, _ = _FRAME.unpack_from(data, at)
        record = data[at + _FRAME.size : at + _FRAME.size + length]
        at += _FRAME.size + length + 4
        event = Event()
        try:
            event.ParseFromString(record)
        except DecodeError:
            return
        if event.summary.value:
            yield (event.step, event.summary.value[0].tag), event.wall_time
