"""Manage the folder of one run: name its files, and keep other runs out.

Two mistakes cost more than a crash: a second job that writes into the folder of a running one, and a resumed run that
is no longer the same run (another model, other data). `RunFolder.claim` refuses both before torch is imported;
`same_run.py` compares the folder's config with the config of the start.

The lock is an flock: the kernel drops it when the process ends, however it ends, so that a job restarts after a crash
without a stale lock. Anyone who deletes the lock file lets another job in. So before each checkpoint and at its end a
run checks that it still has the lock. If the file is gone, the run locks a new one; if another job has come in, the run
ends with a message.
"""

import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import tomli
import tomli_w

from titanlite.config.schema import Config
from titanlite.durable import (
    disk_space_in,
    earlier,
    is_at,
    open_plain,
    read_plain,
    require_plain,
    require_writable,
    write_durably,
)
from titanlite.errors import ConfigError, FolderLostError
from titanlite.json_file import parse_json
from titanlite.observe.status import read_status
from titanlite.preflight.same_run import changes_since, keys_of_training
from titanlite.redact import redact_tree, redact_urls

T = TypeVar("T")
log = logging.getLogger(__name__)
_POLL_S = 0.1

AT_WORK_S = 60.0
"""Up to this age a status.json shows a running job: during training the file is renewed every ten seconds."""


class RunFolder:
    """Paths of a run's files, and the lock of its folder. Rank 0 claims the folder; other ranks use only the paths."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.metrics = self.path / "metrics.jsonl"
        self.experts = self.path / "experts.jsonl"
        self.samples = self.path / "samples.jsonl"
        self.receipt = self.path / "receipt.json"
        self.save_list = self.path / "activation_checkpoint.toml"
        self.status = self.path / "status.json"
        self.hub = self.path / "hub.json"
        self.checkpoints = self.path / "checkpoints"
        self.mirror = self.path / "mirror.json"
        self.logs = self.path / "logs"
        self.profile = self.path / "profile"
        self.tensorboard = self.path / "tensorboard"
        self._lock: int | None = None  # descriptor of the lock file; while it is open, the lock is held

    def require_ours(self) -> None:
        """If this process has locked the folder, check that it still has the lock. A deleted lock file is made anew.

        Raises:
            FolderLostError: another job may have begun in the folder, or the folder is gone.
        """
        if self._lock is None or is_at(self.path / "lock", self._lock):
            return
        if self.path.is_dir() and not os.path.lexists(self.path / "lock"):  # deleted by a cleaner, say
            before = self._lock
            with suppress(ConfigError, FileNotFoundError):  # another job was quicker, or the folder is gone
                self._take_lock()
                os.close(before)
                log.warning("%s was removed, and is taken anew", self.path / "lock")
                return
        want = "the file that this job has locked: since it was removed or replaced, another job may have begun here"
        fix = "let one of the two go on; never delete the lock of a job that runs, which is dropped when it ends"
        raise FolderLostError.of(str(self.path), "lock", "not this job's any more", want, fix)

    @classmethod
    def of(cls, config: Config) -> "RunFolder":
        """Return the folder of a config's run."""
        return cls(Path(os.path.expanduser(config.job.dump_folder)) / config.job.name)

    def claim(self, config: Config) -> list[str]:
        """Create the folder, or check that it is this run's, and lock it; return notices. Only rank 0 calls this.

        Notices tell of keys that changed since the run was last started, and of a file system without locks.

        Raises:
            ConfigError: the folder, or a folder in it, cannot be written; or it is in use, a different run's, not new
                with `checkpoint.resume = "never"`, or has checkpoints although `checkpoint.enable` is false.
        """
        with self._access_explained(config):
            self.path.mkdir(parents=True, exist_ok=True)
            notices = self._take_lock()
            try:
                return notices + self._check(config)
            except BaseException:
                self.release()
                raise

    @contextmanager
    def locked(self, config: Config) -> Iterator[None]:
        """Within the context, hold the lock of the folder, made if it is missing. Raise ConfigError as `claim` does."""
        with self._access_explained(config):
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            try:
                yield
            finally:
                self.release()

    def foresee(self, config: Config) -> list[str]:
        """Make the checks of `claim`, but write and lock nothing: another job that starts must find the lock free."""
        with self._access_explained(config):
            require_writable(self.path)
            return self._check(config)

    def require_same(self, config: Config) -> None:
        """Raise ConfigError, as `claim` does, if the folder is another run's; called before checkpoints are read."""
        with self._access_explained(config):
            changes_since(self.config, config)

    def seems_in_use(self) -> str | None:
        """Return a message if `status.json` was renewed by a running job within `AT_WORK_S`, else None."""
        try:
            status = read_status(self.status)
            age_s = (datetime.now(UTC) - datetime.fromisoformat(status["updated"])).total_seconds()
            if status["state"] != "running" or age_s > AT_WORK_S:
                return None
            job = f"process {status['pid']} on {status['host']}, at step {status['step']} {max(0, age_s):.0f} s ago"
        except (OSError, ValueError, LookupError, TypeError):  # no file, or in another format
            return None
        return f"{self.path} seems to be in use by another job ({job}): a start is refused while it runs"

    def record(self, config_toml: str, save_list_toml: str | None = None) -> Path | None:
        """Write `config.toml`, and a save-list chosen for this start; return the file that keeps the former config.

        Call once it is certain that the claimed run trains with them. The user part of a URL is not written; it must be
        added by hand to start a run from this file. A former config that differs in a key other than `job.stop_after`
        and `checkpoint.resume` is kept, with its receipt and chosen save-list, under names such as
        `config.earlier-1.toml`.
        """
        config_toml = tomli_w.dumps(redact_tree(tomli.loads(config_toml), redact_urls))
        kept: Path | None = None
        was = read_plain(self.config) if os.path.lexists(self.config) else None
        if was is not None and (before := keys_of_training(was)) != keys_of_training(config_toml.encode()):
            kept, receipt, save_list = earlier(self.config, self.receipt, self.save_list)
            kept.write_bytes(was)  # a copy: config.toml must be there at the next start
            if before.get("activation_checkpoint.recipe") == "auto" and os.path.lexists(self.save_list):
                save_list.write_bytes(read_plain(self.save_list))  # a copy: the new config may name it
            if self.receipt.exists():
                self.receipt.rename(receipt)
        if save_list_toml is not None:
            write_durably(self.save_list, save_list_toml)
        write_durably(self.config, config_toml)
        return kept

    def record_hub(self, config: Config, text: str) -> None:
        """Write `hub.json`, before the folder is claimed; raise ConfigError, as `claim` does, if that is impossible."""
        with self._access_explained(config):
            self.path.mkdir(parents=True, exist_ok=True)
            write_durably(self.hub, text)

    @contextmanager
    def write_errors_explained(self) -> Iterator[None]:
        """Within the context, explain why a file of the run cannot be written, and how much disk space is free.

        Raises:
            ConfigError: in place of an OSError about a file in this folder, or about a full or read-only disk.
            FolderLostError: as `require_ours` raises it.
        """
        try:
            yield
        except OSError as e:
            is_inside = isinstance(e.filename, str) and Path(e.filename).is_relative_to(self.path)
            if not is_inside and e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
                raise
            self.require_ours()
            free, make_room = disk_space_in(self.path)
            raise ConfigError.of(
                str(self.path),
                str(e.filename or "a file"),
                f"{e.strerror or e}; {free} in this folder",
                "a folder that takes the run's log, metrics and status, on a disk and in a quota with room for them",
                f"{make_room}, or clear the file's place, and start again: the run goes on from its last checkpoint",
            ) from e

    def release(self) -> None:
        """Release the lock, if this process has it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @contextmanager
    def _access_explained(self, config: Config) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            saw, want = f"{config.job.dump_folder} ({e})", "a folder that can be read and written"
            fix = f"set job.dump_folder to one, {disk_space_in(self.path)[1]}, or remove what is in a file's place"
            raise ConfigError.of(str(self.path), "job.dump_folder", saw, want, fix) from None

    def _take_lock(self) -> list[str]:
        lock = open_plain(self.path / "lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            holder = _holder(os.read(lock, 4096))
            os.close(lock)
            if e.errno in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                return [f"{self.path}: this file system has no locks; make sure that no second job uses the folder"]
            if e.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            want, fix = "no other job in this folder", "wait for that job or stop it, or choose another job.name"
            raise ConfigError.of(f"{self.path}: in use", "lock", holder, want, fix) from None
        self._lock = lock
        # A forked child (a data worker, say) shares the lock and would keep it when this process is killed.
        os.register_at_fork(after_in_child=self.release)
        start = datetime.now(UTC).isoformat(timespec="seconds")
        who = {"host": socket.gethostname(), "pid": os.getpid(), "start": start}
        os.ftruncate(lock, 0)
        os.pwrite(lock, (json.dumps(who) + "\n").encode(), 0)
        return []

    def _check(self, config: Config) -> list[str]:
        """Refuse a folder that is a different run's or that this config cannot use; return notices of changed keys."""
        notices = changes_since(self.config, config)
        if not config.checkpoint.enable and _has_content(self.checkpoints):
            want = "true: without it this start begins anew, beside the checkpoints of the run that is here"
            fix = "choose another job.name, or delete the folder"
            raise ConfigError.of(str(self.path), "checkpoint.enable", "false", want, fix)
        to_be_new = (self.checkpoints, self.metrics) if config.checkpoint.resume == "never" else ()
        if used := [path.name for path in to_be_new if _has_content(path)]:
            saw = f'"never", and the folder has {" and ".join(used)}'
            fix = 'choose another job.name, set checkpoint.resume = "auto", or delete the folder'
            raise ConfigError.of(str(self.path), "checkpoint.resume", saw, "a new folder", fix)
        folders = {self.logs: True, self.checkpoints: config.checkpoint.enable, self.profile: config.profiling.enable}
        for folder in (folder for folder, is_written in folders.items() if is_written):
            try:
                require_writable(folder)
            except OSError as e:
                want = "a folder that can be written: the run would end when it comes to that"
                fix = "make it writable or move it away, or choose another job.name"
                raise ConfigError.of(str(self.path), str(folder), str(e.strerror), want, fix) from None
        files = [self.path / "lock", self.logs / "rank0.log", self.metrics, self.experts]
        files += [path.with_name(f"{path.name}.tmp") for path in (self.config, self.receipt)]
        for path in (*files, self.status.with_name(f"{self.status.name}.0.tmp")):
            require_plain(path)
        if folder := next((path for path in (self.status, self.receipt) if path.is_dir()), None):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(folder))
        return notices


def wait_for_rank_0(found: Callable[[], T | None], limit_s: float, size: Callable[[], int] = lambda: 0) -> T | None:
    """Return what `found` finds in the folder as soon as rank 0 has written it.

    If rank 0 fails, the launcher ends this rank, or else the limit does: None is returned when for `limit_s` seconds
    nothing was found and `size` was the same.
    """
    before, since = size(), time.monotonic()
    while (there := found()) is None:
        if (now := size()) != before:
            before, since = now, time.monotonic()
        if time.monotonic() - since > limit_s:
            return None
        time.sleep(_POLL_S)
    return there


def _holder(content: bytes) -> str:
    """Return who holds the lock, from the content that the job has written to the lock file."""
    try:
        who = parse_json(content)
        return f"held by process {who['pid']} on {who['host']}, since {who['start']}"
    except (ValueError, LookupError, TypeError):
        return "held by another process"


def _has_content(path: Path) -> bool:
    if path.is_dir():
        return any(path.iterdir())
    return path.exists() and path.stat().st_size > 0
