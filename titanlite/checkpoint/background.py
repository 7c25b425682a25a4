"""Write checkpoints in a thread while training goes on: training waits for a copy of the tensors, not for the disk.

The copies are on the host, pinned where there is a GPU, in memory that is taken at the start, so that a run for which
there is none ends there and not at its first checkpoint: on each rank as much as its share of weights and moments. The
thread has a process group of its own over gloo, for collectives of two threads in one group would meet in any order. A
checkpoint is published as any other, so one that is cut off is absent.
"""

# torch's annotations are partial, and how a DTensor is laid out is private there.
# pyright: reportUnknownMemberType=false, reportPrivateUsage=false, reportArgumentType=false, reportCallIssue=false

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite.byte_size import byte_size
from titanlite.checkpoint.collective import on_all_ranks, rank
from titanlite.checkpoint.saved_state import SavedState
from titanlite.checkpoint.state import Checkpoints
from titanlite.errors import ConfigError


class Background:
    """Saves the checkpoints of a run, one at a time. All ranks make one, and call its methods alike.

    Raises:
        ConfigError: on all ranks, if the host's memory is not enough for the copies.
    """

    def __init__(self, checkpoints: Checkpoints, tensors: Mapping[str, Tensor]) -> None:
        self._checkpoints = checkpoints
        self._group: Any = dist.new_group(backend="gloo", group_desc="checkpoint")
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._copies: dict[str, Tensor] = {}
        self._writing: Future[Path] | None = None
        on_all_ranks(lambda: self._take_memory(tensors))

    def save(self, step: int, tensors: Mapping[str, Tensor], state: SavedState) -> None:
        """Copy the tensors and begin to write them; call `wait` before. Arguments as for `Checkpoints.save`.

        The tensors may change as soon as this returns, the state may not.
        """
        staged = {name: self._copy(name, tensor) for name, tensor in tensors.items()}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._writing = self._thread.submit(self._checkpoints.save, step, staged, state, self._group)

    def _take_memory(self, tensors: Mapping[str, Tensor]) -> None:
        local = {name: _local_part(tensor) for name, tensor in tensors.items()}
        try:
            for name, part in local.items():
                self._copies[name] = torch.empty_like(part, device="cpu", pin_memory=part.is_cuda)
        except RuntimeError as e:
            size = byte_size(sum(part.nbytes for part in local.values()))
            want = f"{size} of the host's memory for this rank's copies of weights and moments"
            fix = 'more hosts, or checkpoint.async_mode = "disabled"'
            saw = f'"async", and there is too little memory ({str(e).splitlines()[0]})'
            raise ConfigError.of(f"rank {rank()}", "checkpoint.async_mode", saw, want, fix) from e

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        """Begin to copy a tensor to the host, in the layout that it has."""
        copy = self._copies[name].copy_(_local_part(tensor), non_blocking=True)
        # Not from_local, which would move it back to the mesh's device.
        return DTensor(copy, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else copy

    @property
    def has_failed(self) -> bool:
        """Return whether the last checkpoint could not be written, as far as this rank knows by now."""
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None

    def written(self) -> Path | None:
        """Give the checkpoint that has become complete since this or `wait` was last called, or None."""
        if self._writing is None or not self._writing.done() or self.has_failed:
            return None
        return self.wait()

    def wait(self) -> Path | None:
        """Wait until nothing is being written. Collective.

        Returns:
            The checkpoint that was waited for, or None.

        Raises:
            CheckpointError: on all ranks, what `Checkpoints.save` raised.
        """
        writing, self._writing = self._writing, None
        return writing.result() if writing else None


def _local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
