"""Read a run back from Weights & Biases: from the folder of an offline run, or from the server, by its path there.

What wandb was given are the rows of metrics.jsonl, each once (`observe/wandb_process.py`), so they come back as they
were: names in groups become the file's keys again, and numbers that were not finite, which wandb has not, become None.

A `.wandb` file is a log of protobuf records, in the format of LevelDB's log with wandb's header and checksums. wandb's
own reader is part of its service and not to be called from Python, so the twenty lines that read the format are here.
A record that is cut off at the end of the file is of a run that goes on, or was killed.
"""

import os
import re
import struct
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import tomli

from titanlite.errors import TitanliteError
from titanlite.json_file import parse_json, read_json
from titanlite.observe.metric_table import flat_key
from titanlite.observe.metrics import RunError
from titanlite.redact import redact

_BLOCK, _HEADER = 32768, 7  # bytes: of the log's blocks, and before each chunk of a record (and before the first block)
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4  # the kinds of chunks
_OF_WANDB = b":W&B"  # how a file begins
# entity/project/id, with a mark before it or as the address of its page; `Path` has made one slash of two.
_PATH = re.compile(r"(?:wandb:|https?:/[^/]+/)?([\w.-]+)/([\w.-]+)/(?:runs/)?([a-z0-9]{8})")
_FILES = ("config.toml", "receipt.json")
TIMEOUT_S = 30
"""How long to wait for one answer of wandb's server."""


@dataclass(frozen=True)
class WandbRecord:
    """A run as wandb has it.

    Attributes:
        name: under which wandb shows it.
        rows: of metrics.jsonl.
        config: the sections of its config.toml.
        receipt: of receipt.json; None if there is none.
        state: as status.json says it; "" if it is not known.
    """

    name: str
    rows: list[dict[str, Any]]
    config: dict[str, Any]
    receipt: Any
    state: str


def read_offline(folder: Path) -> list[dict[str, Any]]:
    """Read the rows of an offline run of wandb's.

    Args:
        folder: `offline-run-…`, or the `.wandb` file in it.

    Returns:
        The rows that metrics.jsonl has, in its order.

    Raises:
        RunError: it is no such folder, it is damaged, or the run is not one of titanlite's.
    """
    return read_wandb_folder(folder).rows


def wandb_file(path: Path) -> Path | None:
    """Return the `.wandb` file that a path names, or that a folder of wandb's holds; None if there is none."""
    if path.suffix == ".wandb" and os.path.isfile(path):
        return path
    found = sorted(path.glob("run-*.wandb")) if os.path.isdir(path) else []
    return found[0] if found else None


def is_run_path(path: Path) -> bool:
    """Return whether a path that is not there is that of a run on a server of wandb's: entity/project/run_id."""
    return _PATH.fullmatch(str(path)) is not None and not os.path.lexists(path)


def wandb_run_path(path: Path, config: Mapping[str, Any]) -> str | None:
    """Return the path of a run on wandb's server; None if it is not one of wandb's.

    Args:
        path: the run's folder, a folder of wandb's or its file, or entity/project/run_id.
        config: the run's, by dotted keys; it says the project. Of whom it is, the user's key says.
    """
    match = _PATH.fullmatch(str(path)) if is_run_path(path) else None
    if match is not None:
        return "/".join(match.groups())
    file = wandb_file(path)
    if file is not None:
        run_id = file.stem.removeprefix("run-")
    elif os.path.isfile(path / "wandb/run_id"):
        run_id = (path / "wandb/run_id").read_text(errors="replace").strip()
    else:
        return None
    return f"{config.get('metrics.wandb_project', 'titanlite')}/{run_id}"


def read_wandb_folder(path: Path) -> WandbRecord:
    """Read an offline run of wandb's.

    Args:
        path: `offline-run-…`, or the `.wandb` file in it.

    Raises:
        RunError: as `read_offline` says.
    """
    file = wandb_file(path)
    if file is None:
        want = "a folder of wandb's, offline-run-…, with a run-….wandb file, or such a file"
        raise RunError.of("wandb", str(path), "", want, "give the path <run>/wandb/offline-run-…")
    lines: list[dict[str, Any]] = []
    config: dict[str, Any] = {}
    name, exit_code = file.stem, None
    for record in wandb_records(file):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            lines.append({item.key or item.nested_key[0]: parse_json(item.value_json) for item in record.history.item})
        elif kind == "run":
            name = record.run.display_name or name
            config |= {item.key: parse_json(item.value_json) for item in record.run.config.update if item.key}
        elif kind == "exit":
            exit_code = record.exit.exit_code
    state = "running" if exit_code is None else "failed" if exit_code else ""
    return _checked_record(str(path), name, lines, config, state, file.parent / "files")


def read_wandb_path(path: Path) -> WandbRecord:
    """Read a run from wandb's server, as the user's key for it allows.

    Args:
        path: entity/project/run_id.

    Raises:
        RunError: there is no such run, or the server does not give it.
    """
    import wandb

    match = _PATH.fullmatch(str(path))
    assert match is not None  # noqa: S101  # `is_run_path` is asked before
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # of hints on logging in
            api = wandb.Api(timeout=TIMEOUT_S)
            run = api.run("/".join(match.groups()))
            lines = list(run.scan_history(use_cache=False))
            state = {"finished": "", "crashed": "failed", "killed": "failed"}.get(run.state, run.state)
            with tempfile.TemporaryDirectory() as folder:
                for file in run.files(names=list(_FILES)):
                    file.download(root=folder, replace=True)
                return _checked_record(str(path), run.name or run.id, lines, run.config, state, Path(folder))
    except TitanliteError:
        raise
    except Exception as error:  # wandb's, of the network's, and what a server of another version leads to
        saw = redact(f"{str(error).strip() or type(error).__name__}".splitlines()[0])[:200]
        want = "a run on wandb's server, entity/project/run_id; there is no such folder here"
        fix = "check the path, and `wandb login` or WANDB_API_KEY; or give the run's folder"
        raise RunError.of("wandb", str(path), saw, want, fix) from error


def wandb_records(file: Path) -> Iterator[Any]:
    """Read the protobuf records of a `.wandb` file, those that are whole.

    Raises:
        RunError: it is no such file, or it is damaged.
    """
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    data = file.read_bytes()
    if not data.startswith(_OF_WANDB[: len(data)]):
        raise _damaged_file(file, 0, "not wandb's mark")
    at, whole = _HEADER, b""
    while True:
        at += -at % _BLOCK if _BLOCK - at % _BLOCK < _HEADER else 0  # no chunk begins in a block's last bytes
        if at + _HEADER > len(data):
            return
        checksum, length, kind = struct.unpack_from("<IHB", data, at)
        chunk = data[at + _HEADER : at + _HEADER + length]
        if len(chunk) < length:
            return
        if zlib.crc32(chunk, zlib.crc32(bytes([kind]))) != checksum or kind not in (_WHOLE, _FIRST, _MIDDLE, _LAST):
            if not any(data[at:]):  # a file system that makes room before it writes
                return
            raise _damaged_file(file, at, "another checksum than the record's")
        whole = chunk if kind in (_WHOLE, _FIRST) else whole + chunk
        at += _HEADER + length
        if kind in (_WHOLE, _LAST):
            record = Record()
            try:
                record.ParseFromString(whole)
            except DecodeError:
                raise _damaged_file(file, at, "no record of wandb's") from None
            yield record


def rows_of_lines(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Make the rows of metrics.jsonl again from wandb's lines; those that were emptied are left out."""
    rows = []
    for line in lines:
        row = {flat_key(name): value for name, value in line.items() if name[0] != "_" and value is not None}
        if row:
            rows.append(row | dict.fromkeys(line.get("_null") or ()))
    return rows


def _checked_record(
    where: str, name: str, lines: Iterable[Mapping[str, Any]], config: Mapping[str, Any], state: str, files: Path
) -> WandbRecord:
    """Check that a run is one of titanlite's, and put it together.

    Args:
        where: its path.
        name: under which wandb shows it.
        lines: of its history.
        config: wandb's, for a run that kept no config.toml.
        state: "" if it has ended well.
        files: the folder of those that wandb has of it.
    """
    rows = rows_of_lines(lines)
    strange = [row for row in rows if not (isinstance(row.get("step"), int) and isinstance(row.get("tokens"), int))]
    sections = _read_config(files / "config.toml", config)
    if strange or not sections:
        saw = f"a row of {', '.join(list(strange[0])[:4])}" if strange else "no config"
        want, fix = "a run of titanlite's: rows with step and tokens", "give a run that titanlite has trained"
        raise RunError.of(f"wandb, {where}", "row" if strange else "config", saw, want, fix)
    if not state and rows:
        is_finished = rows[-1]["step"] == sections.get("training", {}).get("steps")
        state = "finished" if is_finished else "stopped"
    return WandbRecord(name, rows, sections, _read_receipt(files / "receipt.json"), state)


def _read_config(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of a config.toml, or of wandb's config, which also has facts of the run beside them."""
    if path.is_file():
        try:
            return tomli.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            want, fix = "TOML, as the run wrote it", "delete the file to compare with wandb's config"
            raise RunError.of(str(path), "config.toml", str(error), want, fix) from None
    sections = {key: table for key, table in config.items() if isinstance(table, dict) and key[0] != "_"}
    return {key: {name: value for name, value in table.items() if value is not None} for key, table in sections.items()}


def _read_receipt(path: Path) -> Any:
    """Return the content of a receipt; None if there is none."""
    if not path.is_file():
        return None
    try:
        return read_json(path)
    except ValueError as error:
        want, fix = "a JSON list of features, as the run wrote it", "delete the file to compare without it"
        raise RunError.of(str(path), "receipt.json", str(error), want, fix) from None


def _damaged_file(file: Path, at: int, saw: str) -> RunError:
    want, fix = (
        "a file that wandb has written",
        "copy it again from where the run was trained, or give the run's folder",
    )
    return RunError.of(str(file), f"byte {at:,}", saw, want, fix)
