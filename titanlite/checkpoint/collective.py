"""Act on every rank, and fail on every rank if one fails.

A rank that raises alone leaves the others waiting in their next collective until it times out, and the message that
says why is on one rank of many. Everything in a checkpoint that can fail on a single rank (a disk, a damaged file)
therefore runs inside `on_all_ranks`. Without a process group there is one rank, and all of this is a plain call.
"""

# torch's annotations are partial.
# pyright: reportUnknownMemberType=false

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

from titanlite.errors import CheckpointError, TitanliteError

T = TypeVar("T")


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def on_all_ranks(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Call `action` on every rank and give every rank all results.

    Args:
        action: must not use collectives itself, for it may fail before them; its result is small and can be pickled.
        group: of all ranks, for a thread that must not use the one of the others; None: that one.

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
    everywhere: list[tuple[T, tuple[type[TitanliteError], str] | None]] = [(cast(T, result), _as_message(failure))]
    if dist.is_initialized():
        everywhere *= dist.get_world_size()
        dist.all_gather_object(everywhere, (result, _as_message(failure)), group)
    if failures := [failed for _, failed in everywhere if failed is not None]:
        if failure and not isinstance(failure, TitanliteError | OSError):
            raise failure
        kind = failures[0][0]
        raise kind("\n".join(dict.fromkeys(message for _, message in failures))) from failure
    return [r for r, _ in everywhere]


def on_rank_0(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Call `action` on rank 0 and give every rank its result, or its failure; `group` as in `on_all_ranks`."""
    return cast(T, on_all_ranks(lambda: action() if rank() == 0 else None, group)[0])


def _as_message(failure: Exception | None) -> tuple[type[TitanliteError], str] | None:
    """Return the class and message to raise on all ranks; an error that is not ours gets its rank and type."""
    if failure is None:
        return None
    if isinstance(failure, TitanliteError):
        return type(failure), str(failure)
    return CheckpointError, f"rank {rank()}: {type(failure).__name__}: {failure}"
