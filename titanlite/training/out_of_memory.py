"""Explain that memory is full, or will be: what uses it, how much was predicted, and which flags would help.

torch reports only the size of the allocation that failed. Its allocator has sizes, but no names: what uses the rest is
known only from the prediction (`forecast/memory.py`).
"""

import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from titanlite.config.recipe_schema import SaveList
from titanlite.errors import OutOfMemoryError, Problem, RecipeError, describe
from titanlite.forecast.memory import GIB, MemoryModel
from titanlite.forecast.search import changes_that_fit
from titanlite.observe.memory import memory_gib

_MARGIN = 0.95  # if a prediction was too low, flags must reduce memory to this share of it
_OF_THE_DRIVER = re.compile("CUDA (driver )?error: out of memory")  # for symmetric memory, outside the allocator


@dataclass(frozen=True)
class Measured:
    """Memory of this rank, in GiB."""

    reserved: float
    allocated: float
    peak_reserved: float
    peak_allocated: float
    could_be_reserved: float  # reserved + free; on a CPU, allocated + this rank's share of free memory

    def __str__(self) -> str:
        return (
            f"{self.reserved:.1f} GiB are reserved (peak {self.peak_reserved:.1f}), {self.allocated:.1f} of them by "
            f"tensors (peak {self.peak_allocated:.1f}); {self.could_be_reserved:.1f} are available"
        )


def measure(device: torch.device) -> Measured:
    """Measure the memory of this rank: of its GPU, or of the process on a CPU."""
    peak_reserved, peak_allocated = memory_gib(device)
    if device.type != "cuda":
        free = _available() / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return Measured(peak_allocated, peak_allocated, peak_reserved, peak_allocated, peak_allocated + free / GIB)
    reserved, (free, _) = torch.cuda.memory_reserved(device), torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    return Measured(reserved / GIB, allocated / GIB, peak_reserved, peak_allocated, (reserved + free) / GIB)


def _available() -> int:
    """Return the bytes that processes can still allocate, as Linux estimates; elsewhere all memory of the machine."""
    table = Path("/proc/meminfo")
    found = re.search(r"^MemAvailable: *(\d+) kB$", table.read_text() if table.exists() else "", re.MULTILINE)
    return int(found[1]) * 1024 if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def foreseen(model: MemoryModel, save_list: SaveList | None, measured: Measured) -> str | None:
    """Return a warning, before the first step, if a run is predicted not to fit, else None.

    `measured` is taken while this rank has only weights, moments and symmetric memory. `save_list` is None if one is
    still to be chosen: then only `activation_checkpoint.budget_gib` is compared with free memory.
    """
    room, budget = measured.could_be_reserved, model.config.activation_checkpoint.budget_gib
    if save_list is None:
        assert budget is not None  # noqa: S101  # checked in `config/check.py`
        if budget <= room:
            return None
        want = f"at most {room:.1f}, which this device has free"
        fix = f"--activation_checkpoint.budget_gib {math.floor(room)}"
        problem = Problem("activation_checkpoint.budget_gib", f"{budget:g}", want, fix)
        return describe("this run may run out of memory", [problem])
    with suppress(RecipeError):
        if model.needed_under(save_list) > room * GIB:
            return f"this run is predicted to run out of memory\n{explanation(model, save_list, measured)}"
    return None


@contextmanager
def explained(model: Callable[[], MemoryModel], save_list: SaveList, device: torch.device) -> Iterator[None]:
    """Raise `OutOfMemoryError` with an explanation if torch runs out of memory within a context."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and not _OF_THE_DRIVER.match(str(error)):
            raise
        reason = ". ".join(str(error).partition("\n")[0].split(". ")[:2]).rstrip(".")
        message = explanation(model(), save_list, measure(device))
        raise OutOfMemoryError(f"rank {dist.get_rank()}: {reason}\n{message}") from error


def explanation(model: MemoryModel, save_list: SaveList, measured: Measured) -> str:
    """Return a text about what uses the memory of a run, and which flags would make the run fit."""
    lines = [f"    saw:  {measured}"]
    room = measured.could_be_reserved * GIB
    try:
        predicted = model.peak_under(save_list)
    except RecipeError:
        reason = "because the save-list keeps results that it does not name"
        fix = "a save-list that names what it keeps"
        if unpriced := model.run.no_trace_reason:
            reason = f"with {unpriced.where} = {unpriced.saw}"
            fix = "--training.local_batch_size 1, or a save-list that keeps less"
        lines += [f"    want: less; there is no prediction, {reason}", f"    fix:  {fix}"]
        return "\n".join(lines)
    total, but = predicted.total + model.later_window, ""
    if fits := total <= room:
        but = ", which would fit: the prediction is too low, or other processes use memory of this device"
        if model.all_windows:
            but += f", or a rank has most experts' rows, for which {model.all_windows / GIB:.1f} GiB may be needed"
    lines.append(f"    want: {total / GIB:.1f} GiB, as predicted{but}; of these")
    parts = predicted.categories() | {"a second window of experts' rows": model.later_window}
    held = sorted(parts.items(), key=lambda item: -item[1])
    lines += [f"          {size / GIB:6.1f}  {name}" for name, size in held if size]
    limit = (_MARGIN * total if fits else room) + model.symmetric_memory  # the last is allocated already
    if flags := changes_that_fit(model, save_list, limit):
        lines.append("    fix:  one of these")
        lines += [f"          {flag}" for flag in flags]
    else:
        lines.append(
            "    fix:  more memory or GPUs, or a smaller model: no save-list, layout or batch is enough, nor any two"
        )
    return "\n".join(lines)
