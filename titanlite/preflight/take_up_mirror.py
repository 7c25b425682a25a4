"""Before a start reads its folder: refuse another run's mirror; fetch the newest and best checkpoint if it has none.

A run is known by a random id in `mirror.json` of its folder, and so is its mirror. A folder without checkpoints, as on
a new disk, takes up the id of a mirror of the same name and config. Nothing is written to the store: the process that
copies does so once training has begun. A store that cannot be read only costs a warning where the folder has
checkpoints; where it has none, the start is refused, as it would begin at step 0.

Only rank 0 does so. There is no process group yet, so other ranks that find no checkpoint wait until there is one, or
until `mirror.json` has a claim without a token: no start has trained since rank 0 has looked into the mirror.
"""

import json
import os
import secrets
from contextlib import suppress
from dataclasses import asdict, replace
from typing import cast

from titanlite.checkpoint import publish
from titanlite.checkpoint.mirror_store import BESIDE, Claim, MirrorStore
from titanlite.checkpoint.resume import chosen_step
from titanlite.config.schema import Config
from titanlite.data.remote import TRIES_AT_START, retried, telling
from titanlite.durable import write_durably
from titanlite.errors import CheckpointError, DataError
from titanlite.file_system import MIRROR
from titanlite.json_file import MALFORMED, as_type, read_json
from titanlite.preflight.hub_names import names_in, with_commits
from titanlite.preflight.run_folder import RunFolder, wait_for_rank_0
from titanlite.preflight.same_run import changes_from
from titanlite.streams import say_first


def take_up_mirror(config: Config) -> tuple[list[str], list[str]]:
    """Fetch checkpoints from the mirror of a run on rank 0, if the folder has none; on other ranks wait for one.

    These are the newest and, with `checkpoint.keep_best`, the best: else a worse one would become the folder's best.

    Returns:
        Notices and warnings, to be logged.

    Raises:
        ConfigError: the folder cannot be written, or is in use.
        CheckpointError: the mirror is another run's, ahead of the folder, or its newest checkpoint is broken; or the
            disk has too little room; or rank 0 has written nothing.
        DataError: the protocol's package is missing, or the folder has no checkpoint and the store cannot be read.
    """
    folder = RunFolder.of(config)
    if os.environ.get("RANK", "0") != "0":
        if not publish.complete_steps(folder.checkpoints):
            _wait_for_checkpoint(folder, config.comm.init_timeout_seconds)
        return [], []
    store = MirrorStore(config.checkpoint.mirror)
    with folder.locked(config), telling(say_first):
        return _take_up(config, folder, store)


def _take_up(config: Config, folder: RunFolder, store: MirrorStore) -> tuple[list[str], list[str]]:
    here, own, name = publish.complete_steps(folder.checkpoints), _claim_in(folder), config.job.name

    def look() -> tuple[Claim | None, list[int]]:
        there = store.claim()
        if not here and there is None:
            store.require_place()
        return there, store.complete()

    try:
        there, steps = retried(look, config.checkpoint.mirror, MIRROR, "a listing", TRIES_AT_START)
    except DataError as e:
        if not here:
            raise
        return [], [f"the mirror {store} cannot be read; training goes on. {e}"]
    if there and (there.name != name or (own.id != there.id if own else here)):
        want = f"the mirror of this run, {name}{f' with the id {own.id}' if own else ''}"
        saw = f"{store}, of the run {there.name} with the id {there.id}"
        raise CheckpointError.of("checkpoint", MIRROR, saw, want, "another URL, as with job.name at its end")
    if here and steps and steps[-1] > here[-1]:
        saw = f"{store}, whose newest checkpoint is of step {steps[-1]}"
        want = f"none newer than this folder's, of step {here[-1]}: a new disk would take up another branch"
        fix = "delete the newer ones there, or move this folder's checkpoints away to go on from them"
        raise CheckpointError.of(str(folder.path), MIRROR, saw, want, fix)
    own = own or Claim(there.id if there else secrets.token_hex(8), name, 0, 0, secrets.token_hex(8))
    own = replace(own, start=max(own.start, there.start if there else 0) + 1, since=0)
    if not here:
        step = chosen_step(steps, config.checkpoint.resume, str(store)) if steps else None
        _take_config(store, folder, config, has_checkpoint=step is not None)
        if step is not None:
            _write(folder, own)  # before there is a checkpoint without an id
            publish.remove_stale(folder.checkpoints)
            key, url = config.checkpoint.keep_best, config.checkpoint.mirror
            best = retried(lambda: store.best(steps, key), url, MIRROR, "the losses") if key else None
            here = sorted({step, step if best is None else best})
            store.fetch(here, folder.checkpoints, say_first)
        own = replace(own, token="")
    _write(folder, own)
    if not here or own.token:
        return [], []
    taken = f"that of step {here[-1]} was"
    if len(here) > 1:
        taken = f"those of step {here[-1]}, the newest, and step {here[0]}, the best, were"
    return [f"{folder.path} had no checkpoint: {taken} taken from {store}"], []


def claim_of(folder: RunFolder, config: Config) -> Claim:
    """Return the claim of a start that trains, which the folder has from now on."""
    own = _claim_in(folder) or Claim(secrets.token_hex(8), "", 0, 0, "")
    own = replace(own, name=config.job.name, since=own.since + 1, token=secrets.token_hex(8))
    _write(folder, own)
    return own


def _claim_in(folder: RunFolder) -> Claim | None:
    """Return the claim of the run's last start, or None if the folder has none."""
    with suppress(OSError, *MALFORMED):
        return cast(Claim, as_type(Claim, read_json(folder.mirror)))
    return None


def _write(folder: RunFolder, claim: Claim) -> None:
    write_durably(folder.mirror, json.dumps(asdict(claim)))


def _take_config(store: MirrorStore, folder: RunFolder, config: Config, *, has_checkpoint: bool) -> None:
    """Refuse the mirror of a run with another config; copy the run's small files if it has a checkpoint to go with."""
    small = {name: retried(lambda of=name: store.read(of), config.checkpoint.mirror, MIRROR, name) for name in BESIDE}
    toml, hub = (small[name] for name in BESIDE)
    if toml is not None:
        changes_from(toml, f"{store}/config.toml", with_commits(config, names_in(hub, f"{store}/hub.json")))
    for name, content in small.items():
        if has_checkpoint and content is not None:
            write_durably(folder.path / name, content.decode())


def _wait_for_checkpoint(folder: RunFolder, limit_s: float) -> None:
    """Wait until rank 0 has taken a checkpoint or has found none, as long as its copy grows."""

    def found() -> bool | None:
        own = _claim_in(folder)
        return (own is not None and not own.token) or bool(publish.complete_steps(folder.checkpoints)) or None

    def size() -> int:
        with suppress(OSError):  # a file has just been renamed
            return publish.stale_bytes(folder.checkpoints)
        return 0

    if wait_for_rank_0(found, limit_s, size) is None:
        want, fix = "one folder for all ranks", "see what rank 0 says; set job.dump_folder to a folder that all share"
        saw = f"not written by rank 0 within {limit_s:g} s, as this rank sees it"
        raise CheckpointError.of(str(folder.path), folder.mirror.name, saw, want, fix)
