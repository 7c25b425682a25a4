"""Act on every rank, and fail on every rank if one fails.

A rank that raises alone leaves the others waiting in their next collective until it times out, and the message that
says why is on one rank of many. Everything in a checkpoint that can fail on a single rank (a disk, a damaged file)
therefore runs inside `on_all_ranks`. Without a process group there is one rank, and all of this is a plain call.
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
    """Call `action` on every rank and give every rank all results.

    Args:
        action: must not use collectives itself, for it may fail before them; its result can be pickled, and is
            gathered on all ranks.
        group: of all ranks, for a thread that must not use the one of the others; None: that one.
        writes: the folder that a save writes with it, for the message if it cannot.

    Returns:
        The results, by rank.

    Raises:
        TitanliteError: it failed on some rank; message and class are that rank's, on all ranks. What is not an error of
            ours becomes a CheckpointError; only what looks like a bug, not an error of the operating system either,
            keeps its type and traceback on the rank where it is.
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
    """Call `action` on rank 0 and give every rank its result, or its failure; the rest as in `on_all_ranks`."""
    return cast(T, on_all_ranks(lambda: action() if rank() == 0 else None, group, writes)[0])


def needs_to_write(folder: Path) -> tuple[str, str]:
    """Return what a save wants of a folder that it cannot write, and the fix, for a message."""
    free, make_room = disk_space_in(folder)
    want = "a folder that every rank can write to, with space and quota for the whole checkpoint"
    return want, f"{make_room} ({free} now) or set job.dump_folder to another disk; earlier checkpoints are whole"


def _for_all_ranks(failure: Exception, writes: Path | None) -> tuple[type[TitanliteError], str]:
    """Return the class and message to raise everywhere; an error that is not ours gets its rank and type."""
    if isinstance(failure, TitanliteError):
        return type(failure), str(failure)
    message = f"rank {rank()}: {type(failure).__name__}: {failure}"
    if writes is not None and isinstance(failure, OSError):
        with contextlib.suppress(OSError):  # of a disk that does not even say what is free
            message = str(Problem(f"{message}, while {writes} was written", "", *needs_to_write(writes)))
    return CheckpointError, message
