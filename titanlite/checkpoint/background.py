"""Write checkpoints in a thread while training goes on: training waits for a copy of the tensors, not for the disk.

The copies are on the host, pinned where there is a GPU, and their memory is kept for the next checkpoint: on each rank
as much as its share of weights and moments. The thread has a process group of its own over gloo, for collectives of two
threads in one group would meet in any order. A checkpoint is published as any other, so one that is cut off is absent.
"""

# torch's annotations are partial.
# pyright: reportUnknownMemberType=false

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from titanlite.checkpoint.state import Checkpoints
from titanlite.parallel.process_group import CHECKPOINT_GROUP


class Background:
    """Saves the checkpoints of a run, one at a time. All ranks make one, and call its methods alike.

    Args:
        checkpoints: of the run.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._group: Any = dist.new_group(backend="gloo", group_desc=CHECKPOINT_GROUP)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=CHECKPOINT_GROUP)
        on_gpu = torch.cuda.is_available()
        options = StagingOptions(
            use_pinned_memory=on_gpu,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=on_gpu,
        )
        self._stager = DefaultStager(options)
        self._writing: Future[Path] | None = None

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Copy the tensors and begin to write them; call `wait` before. Arguments as for `Checkpoints.save`.

        The tensors may change as soon as this returns, the state may not.
        """
        staged = cast(dict[str, Tensor], self._stager.stage(dict(tensors)))
        self._writing = self._thread.submit(self._checkpoints.save, step, staged, state, self._group)

    @property
    def has_failed(self) -> bool:
        """Whether the last checkpoint could not be written, as far as this rank knows by now."""
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
