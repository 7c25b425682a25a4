"""Read the `.metadata` of a DCP checkpoint without running code from it.

DCP stores what a checkpoint holds as a pickle and loads it with plain `pickle.load`, which executes whatever the file
says. Here the unpickler knows a closed list of names, and gives a stand-in for each: a pickle can not only call what it
names but also set its attributes. The records are made afterwards, of plain data. Entries that are not tensors are
refused as well, because DCP would unpickle their content; so are entries that point out of the folder.
"""

# Some of the records are private to DCP; their names are part of its format.
# pyright: reportUnknownMemberType=false, reportPrivateUsage=false

import math
import pickle
import re
from pathlib import Path
from typing import Any, Self, cast

import torch
import torch.serialization
from torch.distributed.checkpoint import filesystem, metadata

from titanlite.errors import CheckpointError

_NAMED: list[Any] = [
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.ChunkStorageMetadata,
    metadata.TensorStorageMetadata,
    metadata.BytesStorageMetadata,  # known so that it can be refused by name of the entry
    metadata.TensorProperties,
    metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
    torch.Size,
    torch.serialization._get_layout,  # of "torch.strided" and its like
    getattr,  # by which some releases of Python 3.11 look a member of an enum up
]
_Enum = metadata._MEM_FORMAT_ENCODING


class _StandIn:
    """Stand in for a class or function of torch in a pickle: keep what it is given, and have nothing to replace."""

    args: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *args: object) -> Self:
        made = super().__new__(cls)
        made.args = args
        return made

    def __setstate__(self, state: object) -> None:
        """Keep it; only of an instance: of the class itself, a pickle could otherwise set attributes."""
        self.state = state


_REAL: dict[Any, Any] = {type(real.__name__, (_StandIn,), {}): real for real in _NAMED}
_STAND_INS: dict[tuple[str, str], Any] = {(real.__module__, real.__qualname__): c for c, real in _REAL.items()}
_DTYPES = {("torch", name): dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
_KNOWN = {**_STAND_INS, **_DTYPES}  # dtypes have no attributes that could be set
_SHARD_FILE = re.compile(r"__[0-9]+_[0-9]+\.distcp")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        try:
            return _KNOWN[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module_name}.{global_name}") from None


class _Made(dict[int, Any]):
    """Replace stand-ins by what they stand for, each once however often it is named; refuse all but plain data."""

    def of(self, value: Any) -> Any:
        if id(value) not in self:
            self[id(value)] = self._make(value)
        return self[id(value)]

    def _make(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {self.of(key): self.of(item) for key, item in cast(dict[Any, Any], value).items()}
        if isinstance(value, list):
            return [self.of(item) for item in cast(list[Any], value)]
        if isinstance(value, tuple):
            return tuple(self.of(item) for item in cast(tuple[Any, ...], value))
        if value is None or isinstance(value, str | int | torch.dtype):
            return value
        if not isinstance(value, _StandIn):
            raise pickle.UnpicklingError(f"it holds {value!r:.60}")
        real = _REAL[type(value)]
        if real is getattr:
            kind, name = value.args
            if _REAL.get(kind) is not _Enum:
                raise pickle.UnpicklingError("it names builtins.getattr")
            return _Enum[name]
        args, state = self.of(value.args), self.of(value.state)
        if real is not metadata.TensorProperties:
            return real(*args, **(state or {}))
        properties = metadata.TensorProperties()
        properties.__setstate__(state)
        return properties


def read_metadata(folder: Path) -> metadata.Metadata:
    """Read and check what a checkpoint holds.

    Returns:
        DCP's description: every entry a tensor, every tensor whole, every shard in a file of this folder.

    Raises:
        CheckpointError: the file is missing, damaged, or anything but such a description.
    """
    try:
        with open(folder / ".metadata", "rb") as f:
            content = _Made().of(_Unpickler(f).load())
        wrong = _first_fault(content)
    except Exception as e:  # a damaged pickle raises almost anything
        raise _metadata_refused(folder, f"{type(e).__name__}: {e}") from None
    if wrong:
        raise _metadata_refused(folder, wrong)
    return cast(metadata.Metadata, content)


def _first_fault(content: Any) -> str | None:
    """Return why this cannot be used as the description of tensors; None if it can."""
    if not isinstance(content, metadata.Metadata):
        return f"a {type(content).__name__}"
    for name, entry in content.state_dict_metadata.items():
        if not isinstance(entry, metadata.TensorStorageMetadata):
            return f"entry {name!r} is not a tensor"
        if sum(math.prod(c.sizes) for c in entry.chunks) != math.prod(entry.size):
            return f"the shards of {name!r} do not make up the tensor"
    for info in content.storage_data.values():
        if not _SHARD_FILE.fullmatch(info.relative_path):
            return f"a shard in {info.relative_path!r}"
        if info.transform_descriptors:
            return f"a shard transformed by {info.transform_descriptors}"
    return None


def _metadata_refused(folder: Path, saw: str) -> CheckpointError:
    want = "a description of tensors as titanlite writes it; nothing else is read, because a pickle can run code"
    fix = "move this checkpoint's folder away; a run goes on from its own checkpoints only"
    return CheckpointError.of(str(folder), ".metadata", saw, want, fix)
