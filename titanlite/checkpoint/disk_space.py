"""Check before the first step whether a disk has room for the checkpoints of a run. Does not import torch.

Each save also checks the room for itself and ends the run if there is too little (`store.py`). With a long interval
that may be hours later. Neither check sees quotas.
"""

import math
import os
import shutil
from pathlib import Path

from titanlite.byte_size import byte_size
from titanlite.checkpoint.publish import THREADS, complete_steps, stale_bytes
from titanlite.config.check import last_step
from titanlite.config.schema import Config

SPARE = 1.1  # required free space, as a multiple of the tensors' bytes: room for headers, state.json and rounding
_FILES = THREADS + 3  # the least inodes of a checkpoint: files of tensors, state.json, the manifest, the folder


def lack_of_disk_space(root: Path, config: Config, each: int) -> str | None:
    """Return a warning if the disk lacks room for the checkpoints that the run will keep, of `each` bytes each."""
    steps, last = complete_steps(root), last_step(config)
    newest, interval = max(steps, default=0), config.checkpoint.interval
    to_come = math.ceil(last / interval) - newest // interval  # one at each multiple, one at the end
    if last <= newest:
        return None
    keep, there = config.checkpoint.keep_latest_k, len(steps)
    # An old checkpoint is deleted once a new one is complete, but not the one resumed from, the best one and the one
    # that is being copied to the mirror.
    best, copied = bool(config.checkpoint.keep_best), bool(config.checkpoint.mirror)
    more = max(1, min(to_come, keep + 1 + bool(there) + best + copied - there)) if keep else to_come
    folder = next(path for path in (root, *root.parents) if path.exists())
    free, files = shutil.disk_usage(folder).free + stale_bytes(root), os.statvfs(folder)
    lacks_files = files.f_files > 0 and files.f_favail < more * _FILES  # f_files is 0 if there is no limit
    if free >= (more - 1 + SPARE) * each and not lacks_files:
        return None
    spared = {"the one resumed from": there, "the best one": best, "the one being copied": copied}
    others = "".join(f", {what}" for what, is_there in spared.items() if is_there) + " and the one being written"
    others = others if keep else " keeps all"
    why = f"checkpoint.keep_latest_k = {keep}{others}" if more < to_come or not keep else f"until step {last}"
    need = f"{more} more of {byte_size(each)} {'is' if more == 1 else 'are'} to come ({why})"
    room = f"{files.f_favail} files (inodes)" if lacks_files else byte_size(free)
    return f"the disk has no room for the checkpoints: {need}, and {room} are free at {folder}"
