"""Run an action on every rank, and raise on every rank if it fails on one.

If only one rank raised, the others would wait in their next collective until it times out, and the message would be in
the log of that rank alone. Every part of a save or load that can fail on a single rank (a disk, a damaged file)
therefore runs inside `on_all_ranks`. Without a process group there is one rank, and this is a plain call.
"""

# torch's annotations are partial.
# pyright: reportUnknownMemberType=false

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

import torch.distributed as dist

from titanlite.durable import disk_space_in
from titanlite.errors import CheckpointError, Problem, TitanliteError

T = TypeVar("T")


def rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def on_all_ranks(
    action: Callable[[], T], group: dist.ProcessGroup | None = None, writes: Path | None = None
) -> list[T]:
    """Call `action` on every rank, and return the results of all ranks on every rank.

    Args:
        action: must not call collectives, because it may fail before it reaches them. Its result is pickled.
        group: a process group of all ranks, for a thread that must not use the default group. None: the default group.
        writes: the folder to which `action` writes. If the write fails, the message tells how much space is free.

    Returns:
        The results, by rank.

    Raises:
        TitanliteError: `action` failed on some rank. All ranks raise the class of the first failed rank's error, with
            the messages of all. Errors that are not a TitanliteError become a CheckpointError, with one exception: a
            rank with an error that looks like a bug (no OSError either) raises its original error.
    """
    result: T | None = None
    failure: Exception | None = None
    try:
        result = action()
    except Exception as e:
        failure = e
    own = cast(T, result), failure and _for_all_ranks(failure, writes)
    everywhere: list[tuple[T, tuple[type[TitanliteError], str] | None]] = [own]
    if dist.is_initialized():
        everywhere *= dist.get_world_size()
        dist.all_gather_object(everywhere, own, group)
    if failures := [failed for _, failed in everywhere if failed is not None]:
        if failure and not isinstance(failure, TitanliteError | OSError):
            raise failure
        kind = failures[0][0]
        raise kind("\n".join(dict.fromkeys(message for _, message in failures))) from failure
    return [r for r, _ in everywhere]


def on_rank_0(action: Callable[[], T], group: dist.ProcessGroup | None = None, writes: Path | None = None) -> T:
    """Call `action` on rank 0. Return its result, or raise its error, on every rank. Arguments as in `on_all_ranks`."""
    return cast(T, on_all_ranks(lambda: action() if rank() == 0 else None, group, writes)[0])


def needs_to_write(folder: Path) -> tuple[str, str]:
    """Return the texts (want, fix) for the message that a save cannot write to a folder."""
    free, make_room = disk_space_in(folder)
    want = "a folder that every rank can write to, with space and quota for the whole checkpoint"
    return want, f"{make_room} ({free} now) or set job.dump_folder to another disk; earlier checkpoints are whole"


def _for_all_ranks(failure: Exception, writes: Path | None) -> tuple[type[TitanliteError], str]:
    """Return the class and message to raise on all ranks. Rank and type are added to an error of another library."""
    if isinstance(failure, TitanliteError):
        return type(failure), str(failure)
    message = f"rank {rank()}: {type(failure).__name__}: {failure}"
    if writes is not None and isinstance(failure, OSError):
        with contextlib.suppress(OSError):  # the disk may not even report its free space
            message = str(Problem(f"{message}, while {writes} was written", "", *needs_to_write(writes)))
    return CheckpointError, message
