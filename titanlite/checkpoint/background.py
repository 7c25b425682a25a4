"""Write checkpoints in a thread while training goes on. Training waits for a copy of the tensors, not for the disk.

Each rank copies its share of weights and optimizer state to host memory, pinned if the rank has a GPU. The memory is
allocated at the start, so that a run with too little of it ends at once and not at its first checkpoint. The thread has
a gloo process group, because the collectives of two threads in one group could be matched in different orders. A
checkpoint is published as in a synchronous save, so an interrupted one does not exist for readers.
"""

# torch's annotations are partial, and the layout of a DTensor is a private attribute.
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
    """Saves the checkpoints of a run in a thread, one at a time. All ranks call the same methods in the same order.

    Raises:
        ConfigError: on all ranks, if a host has too little memory for the copies.
    """

    def __init__(self, checkpoints: Checkpoints, tensors: Mapping[str, Tensor]) -> None:
        self._checkpoints = checkpoints
        self._group: Any = dist.new_group(backend="gloo", group_desc="checkpoint")
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._copies: dict[str, Tensor] = {}
        self._writing: Future[Path] | None = None
        on_all_ranks(lambda: self._take_memory(tensors))

    def save(self, step: int, tensors: Mapping[str, Tensor], state: SavedState) -> None:
        """Copy the tensors, and begin to write the copies. Call `wait` first. Arguments as in `Checkpoints.save`.

        After this returns, the caller may change the tensors, but not `state`.
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
        """Begin to copy this rank's part of a tensor to the host. A DTensor becomes a DTensor of the same layout."""
        copy = self._copies[name].copy_(_local_part(tensor), non_blocking=True)
        # `DTensor.from_local` would move the copy back to the mesh's device.
        return DTensor(copy, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else copy

    @property
    def has_failed(self) -> bool:
        """Return whether the last write has already failed on this rank; False while it is still running."""
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None

    def written(self) -> Path | None:
        """Return the folder of a checkpoint completed since the last call of this method or of `wait`, or None."""
        if self._writing is None or not self._writing.done() or self.has_failed:
            return None
        return self.wait()

    def wait(self) -> Path | None:
        """Wait for the checkpoint that is being written. Collective.

        Returns:
            The folder of this checkpoint, or None if none was being written.

        Raises:
            CheckpointError: on all ranks, the error of `Checkpoints.save`.
        """
        writing, self._writing = self._writing, None
        return writing.result() if writing else None


def _local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
