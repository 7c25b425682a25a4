"""Write named tensors from all ranks into one folder as safetensors, and read them back under any other layout.

torch.distributed.checkpoint (DCP) makes the plans: every rank writes its shards into files of its own, and replicated
tensors are written once, distributed over the ranks that hold them. On reading, DCP's reader of safetensors fetches the
slices that this run's layout needs. Files are written here and not by DCP, which would first make a second copy of
everything that a rank writes in host memory.

Errors that DCP leaves open are raised here. A disk that is too small is noticed before anything is written. Missing,
surplus, misshapen or mistyped tensors raise an error that lists all of them, while DCP converts dtypes and ignores
surplus names silently. DCP's CheckpointException, which derives from BaseException, becomes a CheckpointError.

A state is a flat dict of tensors, the same on every rank, or DTensors on any mesh. A tensor that differs by rank has
the rank in its name.
"""

# torch's annotations and lists of exports are partial; safetensors has no annotations.
# pyright: reportUnknownMemberType=false, reportPrivateImportUsage=false, reportPrivateUsage=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false

import hashlib
import json
import math
import os
import shutil
import socket
import warnings
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor
from torch.futures import Future

from titanlite.byte_size import GIB, byte_size
from titanlite.checkpoint import publish
from titanlite.checkpoint.collective import needs_to_write, on_all_ranks, rank, world_size
from titanlite.checkpoint.disk_space import SPARE
from titanlite.checkpoint.publish import FileEntry, hash_files
from titanlite.errors import CheckpointError, Problem, describe
from titanlite.json_file import MALFORMED, as_type, parse_json

_SHOWN = 8  # names per problem in a message
_FILE_BYTES = 4 * GIB  # about the largest size of a file: a reader maps a whole file into its memory
_OFFSETS, _SAVED = "DCP_SHARDING_INFO", "saved_offsets"  # keys under which DCP's reader finds a part's offsets
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class _Part(NamedTuple):
    """A rectangular part of a tensor, as a file's header describes it."""

    name: str
    dtype: str
    shape: list[int]
    offsets: list[int]  # indices of the part's first element in the whole tensor


class _Place(NamedTuple):
    relative_path: str  # DCP's reader requires this name


def write(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> dict[str, FileEntry]:
    """Write a state into an empty folder that all ranks see. Collective; `group` as in `on_all_ranks`.

    Returns:
        Size and hash of every file written by any rank, for `publish.commit`. Each rank hashes its own files.

    Raises:
        CheckpointError: too little free space, or a rank could not write. On all ranks.
    """
    _check_before_writing(folder, tensors, group)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _dcp_errors(folder, "write"):
        dcp.save(dict(tensors), storage_writer=_Writer(folder), planner=planner, process_group=group)

    def hash_own() -> dict[str, FileEntry]:
        return hash_files(folder, sorted(p.name for p in folder.glob(f"rank{rank():05d}-*")))

    entries = on_all_ranks(hash_own, group, folder)
    return {name: entry for of_rank in entries for name, entry in of_rank.items()}


def read(folder: Path, tensors: Mapping[str, Tensor], optional: tuple[str, ...] = ()) -> set[str]:
    """Fill tensors in place from a checkpoint of any layout. Collective.

    Args:
        folder: a checkpoint. Verify it first: damage inside a tensor is not noticed here.
        tensors: the tensors to fill. The names of all ranks together must be those in the checkpoint.
        optional: prefixes of names that the run or the checkpoint may lack. Such a tensor is read only if both have it
            with the same shape and dtype.

    Returns:
        The names that were read on this rank.

    Raises:
        CheckpointError: names, shapes or dtypes differ (all are listed), or the files cannot be read. On all ranks.
    """
    found = on_all_ranks(lambda: list(tensors))  # also waits until all ranks are here
    asked = {name for names in found for name in names}
    metadata = _index(folder)
    wanted = {n: t for n, t in tensors.items() if not n.startswith(optional) or _is_alike(t, metadata, n)}
    on_all_ranks(lambda: _check_same(folder, metadata, wanted, asked, optional))
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _dcp_errors(folder, "read"):
        dcp.load(dict[str, Any](wanted), storage_reader=_Reader(folder, metadata), planner=planner)
    return set(wanted)


def digests(folder: Path) -> dict[str, str]:
    """Hash every stored part of a checkpoint's tensors, to compare checkpoints of the same layout bit by bit.

    Returns:
        "<tensor> <offsets>" → SHA-256 of the part's dtype, shape and bytes.

    Raises:
        CheckpointError: the folder has no files of tensors, or one cannot be read.
    """
    found: dict[str, str] = {}
    for file in _files_of(folder):
        with _open_tensors(file) as opened:
            for part in _parts_of(file, opened):
                digest = hashlib.sha256(f"{part.dtype} {part.shape}".encode())
                digest.update(opened.get_tensor(part.name).reshape(-1).view(torch.uint8).numpy())
                found[f"{part.name} {tuple(part.offsets)}"] = digest.hexdigest()
    return found


def check_seen(folder: Path) -> None:
    """Raise CheckpointError, with this rank and its host, if this rank does not see a folder that all must share."""
    if not folder.is_dir():
        fix = "set job.dump_folder to a folder on a file system that all hosts share"
        place = f"rank {rank()} on {socket.gethostname()}"
        raise CheckpointError.of(str(folder), place, "does not see it", "one folder for all ranks", fix)


class _Writer(HuggingFaceStorageWriter):
    """DCP's writer of safetensors, except that it writes tensor by tensor and reports the system's error."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)
        self.folder = folder

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write the tensors of this rank's plan to several files, by several threads."""
        by_size = sorted(plan.items, key=lambda item: -_bytes_of(item))
        n_files = max(publish.THREADS, -(-sum(map(_bytes_of, by_size)) // _FILE_BYTES))
        parts = list(filter(None, (by_size[k::n_files] for k in range(n_files))))
        with ThreadPoolExecutor(publish.THREADS) as pool:
            list(pool.map(lambda k: self._write_file(planner, k, parts[k]), range(len(parts))))
        results: Future[list[Any]] = Future()
        results.set_result([])
        return results

    def _write_file(self, planner: Any, k: int, items: list[Any]) -> None:
        items = sorted(items, key=lambda item: -item.tensor_data.properties.dtype.itemsize)  # widest first: aligned
        header, offsets, end = dict[str, Any](), dict[str, Any](), 0
        for item in items:
            of, name = item.tensor_data, item.index.fqn
            begin, end = end, end + _bytes_of(item)
            header[name] = {
                "dtype": _NAMES[of.properties.dtype],
                "shape": [*of.chunk.sizes],
                "data_offsets": [begin, end],
            }
            offsets[name] = {_SAVED: [*of.chunk.offsets]}
        said = json.dumps({"__metadata__": {"format": "pt", _OFFSETS: json.dumps(offsets)}, **header}).encode()
        said += b" " * (-len(said) % 8)
        try:
            with open(self.folder / f"rank{rank():05d}-{k}.safetensors", "xb") as file:
                file.write(len(said).to_bytes(8, "little") + said)
                for item in items:
                    data = planner.resolve_data(item).detach().cpu().contiguous()
                    file.write(data.reshape(-1).view(torch.uint8).numpy())
                file.flush()
                os.fsync(file.fileno())
        except OSError as e:
            want, fix = needs_to_write(self.folder)
            raise CheckpointError.of(str(self.folder), f"rank {rank()}", f"cannot write: {e}", want, fix) from e


def _bytes_of(item: Any) -> int:
    """Return the bytes of an item of DCP's plan."""
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


class _Reader(HuggingFaceStorageReader):
    """DCP's reader, with the metadata that `_index` has read."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(str(folder))
        self.metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata


def _index(folder: Path) -> Metadata:
    """Return the metadata of all tensors in a folder. Each rank reads the headers of a share of the files. Collective.

    Raises:
        CheckpointError: there are no files, one is damaged, or parts of a tensor are missing or overlap. On all ranks.
    """

    def read_own() -> list[tuple[str, list[_Part]]]:
        own = _files_of(folder)[rank() :: world_size()]
        found: list[tuple[str, list[_Part]]] = []
        for file in own:
            with _open_tensors(file) as opened:
                found.append((str(file), _parts_of(file, opened)))
        return found

    by_name = dict[str, list[tuple[str, _Part]]]()
    for file, parts in sorted(each for of_rank in on_all_ranks(read_own) for each in of_rank):
        for part in parts:
            by_name.setdefault(part.name, []).append((file, part))
    found, places = dict[str, Any](), dict[MetadataIndex, Any]()
    for name, every in by_name.items():
        # Some ranks have an empty part, with offsets but without elements.
        own = [(file, part) for file, part in every if math.prod(part.shape)]
        own = own or list({tuple(part.offsets): (file, part) for file, part in every}.values())
        chunks = [ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.shape)) for _, part in own]
        ends = [[at + n for at, n in zip(part.offsets, part.shape, strict=True)] for _, part in every]
        are_alike = len({(part.dtype, len(part.shape)) for _, part in every}) == 1
        size = torch.Size(map(max, zip(*ends, strict=True)) if are_alike else ())
        are_once = len({chunk.offsets for chunk in chunks}) == len(chunks)
        if not (are_alike and are_once and _is_whole(chunks, size)):
            raise _not_ours(folder, name, "parts that do not make up the tensor")
        found[name] = TensorStorageMetadata(TensorProperties(dtype=_DTYPES[own[0][1].dtype]), size, chunks)
        places |= {
            MetadataIndex(name, chunk.offsets): _Place(file) for chunk, (file, _) in zip(chunks, own, strict=True)
        }
    return Metadata(found, storage_data=places)


def _is_whole(chunks: Sequence[ChunkStorageMetadata], size: torch.Size) -> bool:
    """Return whether parts with distinct offsets form a grid that covers a tensor of `size` without gap or overlap."""
    for dim, n in enumerate(size):
        begins = sorted({chunk.offsets[dim] for chunk in chunks})
        ends = dict(zip(begins, [*begins[1:], n], strict=True))
        if any(ends[chunk.offsets[dim]] != chunk.offsets[dim] + chunk.sizes[dim] for chunk in chunks):
            return False
    return sum(math.prod(chunk.sizes) for chunk in chunks) == math.prod(size)


def _files_of(folder: Path) -> list[Path]:
    """List the files of tensors in a folder.

    Raises:
        CheckpointError: there are none, one is not a plain file, or the folder cannot be read.
    """
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix == ".safetensors")
    except OSError as e:
        raise publish.cannot_be_read(str(folder), e) from None
    if not files:
        raise _not_ours(folder, "*.safetensors", "none")
    if odd := [file.name for file in files if file.is_symlink() or not file.is_file()]:
        raise _not_ours(folder, few_names(odd), "no plain file")
    return files


@contextmanager
def _open_tensors(file: Path) -> Generator[Any]:
    """Open a file of tensors. safetensors checks that the header fits the content.

    Raises:
        CheckpointError: the file is damaged, or the system cannot read or map it.
    """
    try:
        with safe_open(file, "pt") as opened:
            yield opened
    except OSError as e:
        raise publish.cannot_be_read(str(file.parent), e) from None
    except RuntimeError as e:  # torch raises it if a file cannot be mapped
        want, fix = f"memory to map {byte_size(file.stat().st_size)}", "a host with more memory"
        raise CheckpointError.of(str(file.parent), file.name, str(e).partition("\n")[0], want, fix) from None
    except (SafetensorError, *MALFORMED) as e:
        raise _not_ours(file.parent, file.name, f"{type(e).__name__}: {e}") from None


def _parts_of(file: Path, opened: Any) -> list[_Part]:
    """Return the parts of tensors that an open file holds, from its header."""
    said, parts = parse_json(opened.metadata()[_OFFSETS]), list[_Part]()
    for name in opened.keys():  # noqa: SIM118  # it is no mapping
        tensor, offsets = opened.get_slice(name), as_type(Sequence[int], said[name][_SAVED])
        part = _Part(name, tensor.get_dtype(), tensor.get_shape(), offsets)
        if part.dtype not in _DTYPES or len(offsets) != len(part.shape) or min(offsets, default=0) < 0:
            raise _not_ours(file.parent, file.name, f"{name} {part.dtype} {part.shape} at {offsets}")
        parts.append(part)
    return parts


def _not_ours(folder: Path, where: str, saw: str) -> CheckpointError:
    want, fix = "tensors as titanlite writes them", "move this checkpoint's folder away or delete it"
    return CheckpointError.of(str(folder), where, saw, want, fix)


def _check_before_writing(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Refuse a disk that is too small for what all ranks write, and plain tensors that differ between ranks."""

    def survey() -> tuple[float, dict[str, tuple[str, int]], int]:
        check_seen(folder)
        if odd := [name for name, t in tensors.items() if t.dtype not in _NAMES]:
            saw, fix = f"of {tensors[odd[0]].dtype}", "keep it in one of these"
            raise CheckpointError.of(str(folder), few_names(odd), saw, ", ".join(map(str, _NAMES)), fix)
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
    saved: Any = metadata.state_dict_metadata.get(name)
    return saved is not None and saved.size == tensor.shape and saved.properties.dtype == tensor.dtype


def _check_same(
    folder: Path, metadata: Metadata, wanted: Mapping[str, Tensor], asked: set[str], optional: tuple[str, ...]
) -> None:
    """Raise CheckpointError unless the run's tensors match the checkpoint's in name, shape and dtype.

    `wanted` are the tensors that this rank reads, `asked` the names of all ranks' tensors.
    """
    saved: Any = metadata.state_dict_metadata
    found = {
        name: f"{list(s.size)} {s.properties.dtype}"
        for name, s in saved.items()
        if name in wanted or not (name in asked or name.startswith(optional))  # else another rank checks it
    }
    ours = {name: f"{list(t.shape)} {t.dtype}" for name, t in wanted.items()}
    fix = "restore the config that it was saved with (config.toml of that run), or choose a new job.name"
    require_same(folder, found, ours, fix, "checkpoint", "tensor", "shapes and dtypes")


def require_same(
    folder: Path, found: Mapping[str, str], wanted: Mapping[str, str], fix: str, place: str, what: str, of: str
) -> None:
    """Raise CheckpointError with all names that are missing, surplus or different in a folder.

    `found` and `wanted` map a name to a text of its shape. `place`, `what` and `of` are words of the message, such as
    "checkpoint", "tensor" and "shapes".
    """
    differ = [f"{name} {found[name]} (this run: {own})" for name, own in wanted.items() if found.get(name, own) != own]
    problems = [
        (f"missing in the {place}", [*(wanted.keys() - found.keys())], f"every {what} of this run"),
        (f"only in the {place}", [*(found.keys() - wanted.keys())], f"no {what} that this run does not have"),
        (f"different in the {place}", differ, f"this run's {of}"),
    ]
    require_none(folder, problems, fix)


def require_none(folder: Path, problems: Sequence[tuple[str, list[str], str]], fix: str) -> None:
    """Raise CheckpointError with a problem for each (place, names, want) whose list of names is not empty."""
    found = [Problem(where, few_names(names), want, fix) for where, names, want in problems if names]
    if found:
        raise CheckpointError(describe(str(folder), found))


@contextmanager
def _dcp_errors(folder: Path, verb: str) -> Generator[None]:
    """Turn DCP's CheckpointException, a BaseException that is the same on all ranks, into a CheckpointError.

    `verb`, "read" or "write", is for its message.
    """
    try:
        if dist.is_initialized():  # perhaps in a thread, but all threads share warning filters
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
    """Join the first names in order for a message, and count the others."""
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(sorted(names)[:_SHOWN]) + more
