"""The checkpoints of a run: save one, choose which to resume from, load it.

A checkpoint holds tensors (`store.py`) and one `state.json` with everything else. It is published completely or not at
all (`publish.py`). `resume.py` decides from which checkpoint a run resumes. A damaged one is not skipped: it stops the
run with a message that names the newest undamaged one.

Every method is collective: all ranks call it, and all return the same value or raise the same error.
"""

import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor

import titanlite
from titanlite.checkpoint import publish, store
from titanlite.checkpoint.collective import on_all_ranks, on_rank_0, rank, world_size
from titanlite.checkpoint.optimizer_state import PREFIX as OPTIMIZER
from titanlite.checkpoint.resume import step_to_resume
from titanlite.checkpoint.rng import PREFIX as RNG
from titanlite.checkpoint.saved_state import STATE, RankedLoss, SavedState, best_of, losses_of, read_state
from titanlite.durable import write_durably
from titanlite.errors import CheckpointError


class Checkpoints:
    """All checkpoints of one run."""

    def __init__(
        self, root: Path, keep: int, warn: Callable[[str], object] = lambda text: None, keep_best: str = ""
    ) -> None:
        """Set the folder of the checkpoints, on a file system that all ranks share. No file is changed.

        The newest `keep` complete checkpoints are kept (0: all), the one resumed from, which is known to load, and the
        one with the lowest loss `keep_best` ("": none). `warn` is called with a message, on every rank, if the first
        attempt to write a checkpoint fails.
        """
        self.root = root
        self.keep = keep
        self.keep_best = keep_best
        self.held: Callable[[], AbstractContextManager[int | None]] = nullcontext
        """Held while checkpoints are deleted; gives the one that a mirror copies, to spare."""
        self.best: tuple[int, float] | None = None  # after a save: step and loss of the best checkpoint
        self._losses: dict[int, RankedLoss | None] = {}  # by step
        self._unread: Mapping[int, CheckpointError] = {}  # steps whose losses cannot be read
        self._warn = warn
        self._resumed_from: int | None = None

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        state: SavedState,
        group: dist.ProcessGroup | None = None,
    ) -> Path:
        """Write and publish a checkpoint, with a second attempt if necessary. Then delete all but the newest `keep`.

        `tensors` maps flat names to tensors or DTensors; a tensor that differs by rank has the rank in its name. Rank
        0's `state` is stored, with step, number of ranks and torch's version set. `group` is as in `on_all_ranks`.

        Returns:
            The folder of the checkpoint, complete and on disk.

        Raises:
            CheckpointError: a checkpoint of this step exists already, or both attempts failed on some rank. Earlier
                checkpoints are untouched.
        """
        state = replace(state, step=step, world_size=world_size(), torch=str(torch.__version__))
        text = on_rank_0(state.to_json, group)  # if this fails, nothing has been written yet
        try:
            folder = self._write(step, tensors, text, group)
        except CheckpointError as e:
            if on_rank_0(lambda: os.path.lexists(publish.step_folder(self.root, step)), group):
                raise
            self._warn(f"step-{step:08d} could not be written, and a second attempt is made: {e}")
            folder = self._write(step, tensors, text, group)
        self.best = on_rank_0(self._prune, group, self.root)
        return folder

    def check_shared(self) -> None:
        """Raise CheckpointError on all ranks if one does not see the folder; the message names both rank and host."""

        def make() -> Path:  # with a new name, because NFS caches for a while that a name does not exist
            made = (self.root if self.root.is_dir() else self.root.parent) / f"seen-{secrets.token_hex(4)}.tmp"
            made.mkdir()
            return made

        made = on_rank_0(make)
        try:
            on_all_ranks(lambda: store.check_seen(made))
        except CheckpointError:  # raised on all ranks; after a success `choose` removes the folder
            on_rank_0(lambda: publish.remove_stale(self.root))
            raise

    def choose(self, resume: Literal["auto", "never"] | int) -> int | None:
        """Decide at start from which step to resume, and remove the leftovers of a killed save or deletion.

        Returns:
            The step to load; None for a fresh start.

        Raises:
            CheckpointError: as in `step_to_resume`.
        """

        def choose() -> int | None:
            publish.remove_stale(self.root)
            return step_to_resume(self.root, resume)

        return on_rank_0(choose)

    def load(
        self, step: int, tensors: Mapping[str, Tensor], check: Callable[[SavedState], tuple[str, ...]] | None = None
    ) -> tuple[SavedState, list[str]]:
        """Verify a checkpoint (each rank hashes a share), and fill `tensors` in place, resharded as needed.

        Args:
            step: the step that `choose` returned.
            tensors: as for `save`, in the layout of this run. Entries `rng/…` are filled only if the number of ranks is
                the same.
            check: a function that is called before tensors are read, and raises if the checkpoint does not fit the run.
                Tensors whose names begin with a prefix that it returns are neither read nor changed.

        Returns:
            The saved state, and notices for the user (random state not restored, other versions of libraries).

        Raises:
            CheckpointError: the checkpoint is damaged (the message names the newest undamaged one), a rank does not see
                it, or it is of another model or optimizer.
        """
        folder = publish.step_folder(self.root, step)
        on_all_ranks(lambda: store.check_seen(folder))  # else `_verify` would call unseen files missing
        self._verify(step)
        saved = on_rank_0(lambda: read_state(folder, step))
        left = () if check is None else check(saved)
        notices = [
            f"{folder.name} was saved with {library} {was}, this is {now}"
            for library, was, now in (
                ("torch", saved.torch, str(torch.__version__)),
                ("titanlite", saved.titanlite, titanlite.__version__),
            )
            if was != now
        ]
        random = {name for name in tensors if name.startswith(RNG)}
        if saved.world_size != world_size():
            tensors = {name: t for name, t in tensors.items() if name not in random}
        tensors = {name: t for name, t in tensors.items() if not name.startswith(left)}
        read = store.read(folder, tensors, optional=(RNG, *left))
        if lost := sorted(random - read):
            then, now = saved.world_size, world_size()
            why = f"it was saved by {then} ranks, this run has {now}"
            if then == now:
                why = f"it does not have {', '.join(lost)}"
            restored = "weights and the place" if OPTIMIZER in left else "weights, optimizer state and the place"
            notices.append(
                f"{folder.name}: random number generators start fresh, since {why}. This affects only dropout and the "
                f"like; {restored} in the data are restored exactly"
            )
        self._resumed_from = step
        return saved, notices

    def _prune(self) -> tuple[int, float] | None:
        """Delete what need not be kept, and return the step and loss of the best checkpoint."""
        unread = losses_of(self.root, self.keep_best, self._losses) if self.keep_best else {}
        for step in unread.keys() - self._unread.keys():
            self._warn(f"step-{step:08d} is kept, as it may be the best: its losses cannot be read. {unread[step]}")
        self._unread = unread
        best = best_of(self._losses)
        with self.held() as copied:
            publish.prune(self.root, self.keep, spare=(self._resumed_from, best, copied, *unread))
        return None if best is None else (best, cast(RankedLoss, self._losses[best]).loss)

    def _write(self, step: int, tensors: Mapping[str, Tensor], text: str, group: dist.ProcessGroup | None) -> Path:
        tmp = on_rank_0(lambda: publish.begin(self.root, step), group, self.root)
        entries = store.write(tmp, tensors, group)

        def finish() -> Path:
            write_durably(tmp / STATE, text)
            return publish.commit(tmp, entries | publish.hash_files(tmp, [STATE]))

        return on_rank_0(finish, group, tmp)

    def _verify(self, step: int) -> None:
        """Verify a checkpoint on all ranks. If it is damaged, raise CheckpointError with the newest undamaged step."""
        if (damage := self._damage(step)) is None:
            return
        older = [other for other in on_rank_0(lambda: publish.complete_steps(self.root)) if other < step]
        good = next((other for other in reversed(older) if self._damage(other) is None), None)
        then = f"step {good} is the newest that is undamaged" if good is not None else "no older one is undamaged"
        raise CheckpointError(f"{damage}\n  {then}") from damage

    def _damage(self, step: int) -> CheckpointError | None:
        """Verify a checkpoint, of which each rank hashes a share. Return the error, or None if it is undamaged."""
        folder = publish.step_folder(self.root, step)
        try:
            on_all_ranks(lambda: publish.verify(folder, share=rank(), shares=world_size()))
        except CheckpointError as damage:
            return damage
        return None
