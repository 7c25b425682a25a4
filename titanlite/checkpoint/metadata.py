"""Read the `.metadata` of a DCP checkpoint without running code from it.

DCP stores what a checkpoint holds as a pickle and loads it with plain `pickle.load`, which executes whatever the file
says. Here the unpickler knows a closed list of classes, all of them plain records, and refuses any other name. Entries
that are not tensors are refused as well, because DCP would unpickle their content; so are entries that point out of
the folder.
"""

# Some of the records are private to DCP; their names are part of its format.
# pyright: reportUnknownMemberType=false, reportPrivateUsage=false

import math
import pickle
import re
from pathlib import Path
from typing import Any, cast

import torch
import torch.serialization
from torch.distributed.checkpoint import filesystem, metadata

from titanlite.errors import CheckpointError, Problem, describe

_RECORDS = [
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.ChunkStorageMetadata,
    metadata.TensorStorageMetadata,
    metadata.BytesStorageMetadata,  # known so that it can be refused by name of the entry
    metadata.TensorProperties,
    metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
    torch.Size,
]


def _enum_member(kind: object, name: object) -> Any:
    """What `getattr` may do: some releases of Python 3.11 pickle a member of an enum as a look-up by name."""
    if kind is not metadata._MEM_FORMAT_ENCODING or not isinstance(name, str):
        raise pickle.UnpicklingError("it names builtins.getattr")
    return metadata._MEM_FORMAT_ENCODING[name]


_KNOWN: dict[tuple[str, str], Any] = {
    ("builtins", "getattr"): _enum_member,
    **{(c.__module__, c.__qualname__): c for c in _RECORDS},
    **{("torch", name): dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)},
    # A function, but only a look-up of "torch.strided" and its like.
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
}
_SHARD_FILE = re.compile(r"__[0-9]+_[0-9]+\.distcp")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        try:
            return _KNOWN[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module_name}.{global_name}") from None


def read_metadata(folder: Path) -> metadata.Metadata:
    """Read and check what a checkpoint holds.

    Args:
        folder: a checkpoint written by `store.write`.

    Returns:
        DCP's description: every entry a tensor, every tensor whole, every shard in a file of this folder.

    Raises:
        CheckpointError: the file is missing, damaged, or anything but such a description.
    """
    try:
        with open(folder / ".metadata", "rb") as f:
            content = _Unpickler(f).load()
        wrong = _first_fault(content)
    except Exception as e:  # a damaged pickle raises almost anything
        raise _refused(folder, f"{type(e).__name__}: {e}") from None
    if wrong:
        raise _refused(folder, wrong)
    return cast(metadata.Metadata, content)


def _first_fault(content: Any) -> str | None:
    """What makes this unusable as the description of tensors, if anything."""
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


def _refused(folder: Path, saw: str) -> CheckpointError:
    want = "a description of tensors as titanlite writes it; nothing else is read, because a pickle can run code"
    fix = "move this checkpoint's folder away; a run goes on from its own checkpoints only"
    return CheckpointError(describe(str(folder), [Problem(".metadata", saw, want, fix)]))
