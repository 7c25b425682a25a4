"""Before a start reads its folder: refuse another run's mirror, and fetch the newest checkpoint if the folder has none.

A run is known by a random id in `mirror.json` of its folder, and so is its mirror. A folder without checkpoints, as on
a new disk, takes up the id of a mirror of the same name and config. Nothing is written to the store: the process that
copies does so once training has begun. A store that cannot be read only costs a warning where the folder has
checkpoints; where it has none, the start is refused, as it would begin at step 0.

Only rank 0 does so. There is no process group yet, so other ranks that find no checkpoint wait until there is one, or
until `mirror.json` says that there is none to take.
"""

import json
import os
import secrets
import sys
import tempfile
from contextlib import suppress

from titanlite.checkpoint import publish
from titanlite.checkpoint.mirror_store import BESIDE, Claim, MirrorStore
from titanlite.checkpoint.resume import chosen_step
from titanlite.config.schema import Config
from titanlite.data.remote import TRIES_AT_START, retried, telling
from titanlite.durable import write_durably
from titanlite.errors import CheckpointError, ConfigError, DataError, ErrorReport
from titanlite.file_system import MIRROR
from titanlite.json_file import MALFORMED, as_type, read_json
from titanlite.preflight.hub_names import with_recorded_commits
from titanlite.preflight.run_folder import RunFolder, wait_for_rank_0
from titanlite.preflight.same_run import changes_since

_FIX = "another URL, as with job.name at its end"


def take_up_mirror(config: Config) -> tuple[list[str], list[str]]:
    """Fetch a checkpoint from the mirror of a run on rank 0, if the folder has none; on other ranks wait for it.

    Returns:
        Notices and warnings, to be logged.

    Raises:
        ConfigError: the folder cannot be written, or is in use.
        CheckpointError: the mirror is another run's, ahead of the folder, or its newest checkpoint is broken; or the
            disk has too little room; or rank 0 has written nothing.
        DataError: the protocol's package is missing, or the folder has no checkpoint and the store cannot be read.
    """
    folder, url = RunFolder.of(config), config.checkpoint.mirror
    here = publish.complete_steps(folder.checkpoints)
    if os.environ.get("RANK", "0") != "0":
        if not here:
            _wait_for_checkpoint(folder, config.comm.init_timeout_seconds)
        return [], []
    store, (own, taken) = MirrorStore(url), _id_and_taken(folder)
    try:
        there, steps = retried(lambda: (store.claim(), store.complete()), url, MIRROR, "a listing", TRIES_AT_START)
    except DataError as e:
        if not here:
            raise
        return [], [f"the mirror {store} cannot be read; training goes on. {e}"]
    if there is not None and own != there.id and (own or here or there.name != config.job.name):
        want = f"the mirror of this run (id {own})" if own else f"the mirror of this run, {config.job.name}"
        saw = f"{store}, of the run {there.name} with the id {there.id}"
        raise CheckpointError.of("checkpoint", MIRROR, saw, want, _FIX)
    if here and steps and steps[-1] > here[-1]:
        saw = f"{store}, whose newest checkpoint is of step {steps[-1]}"
        want = f"none newer than this folder's, of step {here[-1]}: a new disk would take up another branch"
        fix = "delete the newer ones there, or move this folder's checkpoints away to go on from them"
        raise CheckpointError.of(str(folder.path), MIRROR, saw, want, fix)
    if not here:
        step = chosen_step(steps, config.checkpoint.resume, str(store)) if steps else None
        with folder.locked(config), telling(_say):
            _take_config(store, folder, config, has_checkpoint=step is not None)
            if step is not None:
                publish.remove_stale(folder.checkpoints)
                store.fetch(step, folder.checkpoints, _say)
            taken = step or 0
            run = there.id if there else own or secrets.token_hex(8)
            write_durably(folder.mirror, json.dumps({"id": run, "taken": taken}))
    is_news = taken and taken == max(here, default=taken)
    return ([f"{folder.path} had no checkpoint: that of step {taken} was taken from {store}"] if is_news else []), []


def claim_of(folder: RunFolder, config: Config) -> Claim:
    """Return the claim of a start that trains, with the id in the folder, or a new one if there is none.

    `mirror.json` then no longer says that the mirror is empty.
    """
    run = _id_and_taken(folder)[0] or secrets.token_hex(8)
    write_durably(folder.mirror, json.dumps({"id": run}))
    return Claim(run, config.job.name, secrets.token_hex(8))


def _id_and_taken(folder: RunFolder) -> tuple[str, int | None]:
    """Return ("" or the id of the run, the step that was taken from the mirror: 0 if it had none, None if trained)."""
    with suppress(OSError, *MALFORMED):
        found = read_json(folder.mirror)
        return as_type(str, found["id"]), as_type(int | None, found.get("taken"))
    return "", None


def _take_config(store: MirrorStore, folder: RunFolder, config: Config, *, has_checkpoint: bool) -> None:
    """Refuse the mirror of a run with another config; copy the run's small files if it has a checkpoint to go with."""
    url = config.checkpoint.mirror
    small = {name: retried(lambda of=name: store.read(of), url, MIRROR, name) for name in BESIDE}
    with tempfile.TemporaryDirectory() as path:
        recorded = RunFolder(path)
        for name, content in small.items():
            if content is not None:
                (recorded.path / name).write_bytes(content)
        try:
            changes_since(recorded.config, with_recorded_commits(config, recorded.hub))
        except ConfigError as e:
            problems = [p for report in e.args if isinstance(report, ErrorReport) for p in report.problems]
            source = f", as in {recorded.config}"
            keys = ", ".join(
                f"{p.where} = {p.saw}; the mirror's run has {p.want.removesuffix(source)}" for p in problems
            )
            want, fix = "the mirror of this run", f"{_FIX}, or the old values"
            raise CheckpointError.of("checkpoint", MIRROR, f"{store}: {keys}", want, fix) from e
    for name, content in small.items():
        if has_checkpoint and content is not None:
            write_durably(folder.path / name, content.decode())


def _wait_for_checkpoint(folder: RunFolder, limit_s: float) -> None:
    """Wait until rank 0 has taken a checkpoint or has found none, as long as its copy grows."""

    def found() -> bool | None:
        return bool(publish.complete_steps(folder.checkpoints)) or _id_and_taken(folder)[1] == 0 or None

    def size() -> int:
        with suppress(OSError):  # a file has just been renamed
            return publish.stale_bytes(folder.checkpoints)
        return 0

    if wait_for_rank_0(found, limit_s, size) is None:
        want, fix = "one folder for all ranks", "see what rank 0 says; set job.dump_folder to a folder that all share"
        saw = f"not written by rank 0 within {limit_s:g} s, as this rank sees it"
        raise CheckpointError.of(str(folder.path), folder.mirror.name, saw, want, fix)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
