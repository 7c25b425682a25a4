"""Write named tensors from all ranks into one folder, and read them back under any other layout.

The work is done by torch.distributed.checkpoint (DCP): every rank writes its own shards into its own file, replicated
tensors are written once (shared out over the ranks that have them), and on reading each rank fetches the slices that
its present layout needs. What is added here is what DCP leaves open: a disk that is too small is noticed before
anything is written; a missing, surplus, misshapen or mistyped tensor is an error that lists all of them, where DCP
converts dtypes and ignores surplus names in silence; its CheckpointException, which derives from BaseException,
becomes a CheckpointError; and nothing is unpickled but a closed list of records (`metadata.py`).

A state is a flat dict. Values are tensors, the same on every rank, or DTensors on any mesh. A tensor that differs by
rank carries the rank in its name.
"""

# torch's annotations are partial, and it does not list what it exports.
# pyright: reportUnknownMemberType=false, reportPrivateImportUsage=false, reportPrivateUsage=false

import hashlib
import math
import shutil
import socket
import warnings
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _split_by_size_and_type
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.futures import Future

from titanlite.byte_size import byte_size
from titanlite.checkpoint import publish
from titanlite.checkpoint.collective import needs_to_write, on_all_ranks, rank
from titanlite.checkpoint.disk_space import SPARE
from titanlite.checkpoint.metadata import read_metadata
from titanlite.checkpoint.publish import FileEntry, hash_files
from titanlite.errors import CheckpointError, Problem, describe

_SHOWN = 8  # names per problem in a message


def write(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> dict[str, FileEntry]:
    """Write a state. Collective: every rank calls it with its tensors.

    Args:
        folder: an empty folder that all ranks see.
        tensors: flat names to tensors (equal on all ranks that have the name) or DTensors.
        group: as in `on_all_ranks`.

    Returns:
        Size and hash of every file written by any rank, for `publish.commit`. Each rank hashed its own.

    Raises:
        CheckpointError: too little free space, or a rank could not write. On all ranks.
    """
    _check_before_writing(folder, tensors, group)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _dcp_errors(folder, "write"):
        dcp.save(dict(tensors), storage_writer=_Writer(folder), planner=planner, process_group=group)
    own = f"__{rank()}_"  # as DCP names what it writes from a rank

    def hash_own() -> dict[str, FileEntry]:
        names = sorted(p.name for p in folder.iterdir() if p.name.startswith(own))
        return hash_files(folder, [".metadata", *names] if rank() == 0 else names)

    entries = on_all_ranks(hash_own, group, folder)
    return {name: entry for of_rank in entries for name, entry in of_rank.items()}


def read(folder: Path, tensors: Mapping[str, Tensor], optional: tuple[str, ...] = ()) -> set[str]:
    """Fill tensors in place from a checkpoint, whatever layout it was written under. Collective.

    Args:
        folder: a checkpoint; verify it first, for damage inside a tensor shows nowhere else.
        tensors: what to fill. The names of all ranks together must be those of the checkpoint.
        optional: names that begin so may be absent here or there; they are read where they fit and else left alone.

    Returns:
        The names that were read on this rank.

    Raises:
        CheckpointError: names, shapes or dtypes differ (all are listed), or the files cannot be read. On all ranks.
    """
    found = on_all_ranks(lambda: list(tensors))  # also a first contact: all ranks are here
    asked = {name for names in found for name in names}
    described: list[Metadata] = []
    on_all_ranks(lambda: described.append(read_metadata(folder)))  # each by itself, since it may be large
    metadata = described[0]
    wanted = {n: t for n, t in tensors.items() if not n.startswith(optional) or _is_alike(t, metadata, n)}
    on_all_ranks(lambda: _check_same(folder, metadata, wanted, asked, optional))
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _dcp_errors(folder, "read"):
        dcp.load(dict[str, Any](wanted), storage_reader=_Reader(folder, metadata), planner=planner)
    return set(wanted)


def digests(folder: Path) -> dict[str, str]:
    """Hash what a checkpoint holds: equal for equal bits, under one layout.

    Returns:
        SHA-256 of each stored part of each tensor, by name and offsets.

    Raises:
        CheckpointError: its description cannot be read.
    """
    found: dict[str, str] = {}
    for index, place in read_metadata(folder).storage_data.items():
        with open(folder / place.relative_path, "rb") as file:
            file.seek(place.offset)
            digest = hashlib.sha256(file.read(place.length)).hexdigest()
        found[f"{index.fqn} {tuple(index.offset or ())}"] = digest
    return found


def check_seen(folder: Path) -> None:
    """Raise if this rank does not see a folder that it shares with all ranks: elsewhere, files would seem to be lost.

    Raises:
        CheckpointError: it is not there; the rank and its host are named.
    """
    if not folder.is_dir():
        fix = "set job.dump_folder to a folder on a file system that all hosts share"
        place = f"rank {rank()} on {socket.gethostname()}"
        raise CheckpointError.of(str(folder), place, "does not see it", "one folder for all ranks", fix)


class _Writer(dcp.FileSystemWriter):
    """DCP's writer, without the absolute path in `.metadata`, and with the operating system's reason for a failure."""

    def __init__(self, folder: Path) -> None:
        # Copying ahead from a GPU waits for all that it has to do, tensors on the host included: beside training,
        # for a step in every 10 MB. To memory that is not pinned nothing is copied ahead anyway.
        super().__init__(folder, sync_files=True, thread_count=1, overwrite=False, per_thread_copy_ahead=0)
        self.folder = folder

    def storage_meta(self) -> None:
        return None

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write a file in each of several threads. DCP's own would lose what one of them fails of."""
        parts = list(filter(None, _split_by_size_and_type(publish.THREADS, plan.items)))

        def write_file(k: int) -> list[Any]:
            return self._write_file(plan, planner, k, parts[k])

        with ThreadPoolExecutor(publish.THREADS) as pool:
            written = list(pool.map(write_file, range(len(parts))))
        results: Future[list[Any]] = Future()
        results.set_result([result for of_file in written for result in of_file])
        return results

    def _write_file(self, plan: Any, planner: Any, k: int, items: list[Any]) -> list[Any]:
        prefix = replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{k}")  # DCP numbers from 0 behind it
        try:
            return super().write_data(replace(plan, items=items, storage_data=prefix), planner).wait()
        except Exception as e:
            # A full disk surfaces as "unexpected pos" from torch's zip writer; the OSError is what it was handling.
            cause: BaseException | None = e
            while cause and not isinstance(cause, OSError):
                cause = cause.__context__
            if cause is None:
                raise
            want, fix = needs_to_write(self.folder)
            where = f"rank {rank()}"
            raise CheckpointError.of(str(self.folder), where, f"cannot write: {cause}", want, fix) from e


class _Reader(dcp.FileSystemReader):
    """DCP's reader, given the metadata that was read and checked by us."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self.metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata


def _check_before_writing(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Compare free space with what all ranks will write, and plain tensors of one name with each other."""

    def survey() -> tuple[float, dict[str, tuple[str, int]], int]:
        check_seen(folder)
        sharded, plain = 0.0, dict[str, tuple[str, int]]()
        for name, t in tensors.items():
            if isinstance(t, DTensor):
                copies = math.prod(t.device_mesh.size(d) for d, p in enumerate(t.placements) if p.is_replicate())
                sharded += t.to_local().nbytes / copies
            else:
                plain[name] = (f"{t.dtype}{list(t.shape)}", t.nbytes)
        return sharded, plain, shutil.disk_usage(folder).free

    ranks = on_all_ranks(survey, group)
    plain: dict[str, tuple[str, int]] = {}
    for _, of_rank, _ in ranks:
        differ = [n for n in of_rank if plain.setdefault(n, of_rank[n]) != of_rank[n]]
        if differ:
            saw, want = "another shape or dtype on some rank", "the same tensor on all ranks"
            fix = "put the rank into the name of a tensor that differs by rank, or make it a DTensor"
            raise CheckpointError.of(str(folder), few_names(differ), saw, want, fix)
    total = sum(sharded for sharded, _, _ in ranks) + sum(n for _, n in plain.values())
    free = min(free for _, _, free in ranks)
    if free < SPARE * total:
        saw, want = (
            f"{byte_size(free)} free at {folder}",
            f"needs {byte_size(SPARE * total)} ({SPARE} times the tensors)",
        )
        fix = "make room, lower checkpoint.keep_latest_k, or set job.dump_folder to another disk"
        raise CheckpointError.of(str(folder), "free space", saw, want, fix)


def _is_alike(tensor: Tensor, metadata: Metadata, name: str) -> bool:
    saved = metadata.state_dict_metadata.get(name)
    if not isinstance(saved, TensorStorageMetadata):
        return False
    return saved.size == tensor.shape and saved.properties.dtype == tensor.dtype


def _check_same(
    folder: Path, metadata: Metadata, wanted: Mapping[str, Tensor], asked: set[str], optional: tuple[str, ...]
) -> None:
    """Check that the run's tensors are the checkpoint's, by name, shape and dtype."""
    saved = metadata.state_dict_metadata
    missing = [n for n in wanted if n not in saved]
    surplus = [n for n in saved if n not in asked and not n.startswith(optional)]
    differ: list[str] = []
    for name, t in wanted.items():
        s = saved.get(name)
        if isinstance(s, TensorStorageMetadata) and not _is_alike(t, metadata, name):
            differ.append(f"{name} {list(s.size)} {s.properties.dtype} (this run: {list(t.shape)} {t.dtype})")
    fix = "restore the config that it was saved with (config.toml of that run), or choose a new job.name"
    problems = [
        ("missing in the checkpoint", missing, "every tensor of this run"),
        ("only in the checkpoint", surplus, "no tensor that this run does not have"),
        ("different in the checkpoint", differ, "this run's shapes and dtypes"),
    ]
    require_none(folder, problems, fix)


def require_none(folder: Path, problems: Sequence[tuple[str, list[str], str]], fix: str) -> None:
    """Raise with every problem that some names have.

    Raises:
        CheckpointError: there are such names.
    """
    found = [Problem(where, few_names(names), want, fix) for where, names, want in problems if names]
    if found:
        raise CheckpointError(describe(str(folder), found))


@contextmanager
def _dcp_errors(folder: Path, verb: str) -> Generator[None]:
    """Turn DCP's exception, which `except Exception` does not catch, into ours; it is the same on all ranks."""
    try:
        if dist.is_initialized():  # perhaps in a thread, and filters of warnings are those of all threads
            yield
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            yield
    except CheckpointException as e:
        if stops := [cause for cause, _ in e.failures.values() if isinstance(cause, KeyboardInterrupt)]:
            raise stops[0] from None
        ours = [str(cause) for cause, _ in e.failures.values() if isinstance(cause, CheckpointError)]
        others = [
            Problem(f"rank {r}", f"{type(cause).__name__}: {cause}", f"to {verb} this checkpoint", "see the cause")
            for r, (cause, _) in e.failures.items()
            if not isinstance(cause, CheckpointError)
        ]
        raise CheckpointError("\n".join([*ours, *([describe(str(folder), others)] if others else [])])) from e


def few_names(names: list[str]) -> str:
    """Write a few of many names."""
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(sorted(names)[:_SHOWN]) + more
