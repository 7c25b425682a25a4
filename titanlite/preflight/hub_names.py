"""Replace names of the hub in a config by names with a commit, the same in all ranks and all starts of a run.

Rank 0 of a start resolves a name once and writes the commit into `hub.json` in the run's folder, where the other ranks
and later starts find it, under the name as the config has it. Another name or revision is resolved anew.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from titanlite.config.config_json import KEY
from titanlite.config.schema import FROM_CHECKPOINT, Config
from titanlite.errors import HubError
from titanlite.hub import fetch_description, is_hub_name, read_name, resolve_name
from titanlite.json_file import MALFORMED, as_type, read_json
from titanlite.preflight.run_folder import RunFolder, wait_for_rank_0

TOKENIZER = "data.tokenizer"


class Pin(NamedTuple):
    """The commit of a name of the hub."""

    key: str  # config key of the name
    asked: str  # the name in the config
    name: str  # the name with its commit
    how: str  # how the commit was found; "" if the config has it

    @property
    def notice(self) -> str:
        """Return the message that says which commit is used."""
        commit = read_name(self.name, self.key).revision
        return f"{self.key} = {self.asked} is commit {commit}, {self.how}" if self.how else ""


def names_hub(config: Config) -> bool:
    """Return whether a config names a model or a tokenizer of the hub."""
    return any(is_hub_name(attrgetter(key)(config)) for key in (KEY, TOKENIZER))


def pin_names(config: Config, *, is_fresh: bool, has_weights: bool, is_start: bool) -> tuple[Config, tuple[Pin, ...]]:
    """Resolve the names of the hub in a config, and fetch what describes the model that a fresh run starts from.

    Args:
        config: its names are right (`config/check.py`).
        is_fresh: whether the run starts from `checkpoint.initial_load_path`, which a resumed run does not look at.
        has_weights: whether the description of the initial weights is needed on this host.
        is_start: whether this is a rank of a start, which records what it resolves. Without it nothing is written.

    Returns:
        The config with commits, and a pin for each name.

    Raises:
        HubError: a model cannot be found or fetched.
        ConfigError: the run's folder cannot be written.
    """
    folder, pins, found = RunFolder.of(config), list[Pin](), dict[str, str]()
    recorded = _read_record(folder.hub)
    needs_weights = is_fresh and (has_weights or config.model.flavor == FROM_CHECKPOINT)
    is_first = os.environ.get("RANK", "0") == "0"
    for key in (TOKENIZER, KEY):
        asked: str = attrgetter(key)(config)
        if not is_hub_name(asked) or (key == KEY and not needs_weights and asked not in recorded):
            continue
        if read_name(asked, key).is_resolved:
            pins.append(Pin(key, asked, asked, ""))
            continue
        how = "as at this run's first start"
        if asked not in recorded and is_start and not is_first:
            recorded = _recorded_by_rank_0(folder.hub, asked, key, config.comm.init_timeout_seconds)
            how = "as rank 0 recorded it"
        if asked in found:  # the same name for both keys
            how = pins[0].how
        elif asked not in recorded:
            found[asked], has_answered = resolve_name(asked, key)
            how = "as the hub says now" if has_answered else "as this host's cache has it: the hub cannot be asked"
        pins.append(Pin(key, asked, (recorded | found)[asked], how))
    if found and is_start:
        folder.record_hub(config, json.dumps(recorded | found, indent=1) + "\n")
    names = {pin.key: pin.name for pin in pins}
    if KEY in names and needs_weights:
        fetch_description(names[KEY], KEY)
    return _with_names(config, names), tuple(pins)


def with_recorded_commits(config: Config, record: Path) -> Config:
    """Replace names of the hub that are in a run's `hub.json`, the file `record`. Raise HubError if that is damaged."""
    recorded = _read_record(record)
    asked: dict[str, str] = {key: attrgetter(key)(config) for key in (TOKENIZER, KEY)}
    return _with_names(config, {key: recorded.get(name, name) for key, name in asked.items()})


def _with_names(config: Config, names: Mapping[str, str]) -> Config:
    """Return a config with these names, by key."""
    data = replace(config.data, tokenizer=names.get(TOKENIZER, config.data.tokenizer))
    checkpoint = replace(config.checkpoint, initial_load_path=names.get(KEY, config.checkpoint.initial_load_path))
    return replace(config, data=data, checkpoint=checkpoint)


def _read_record(record: Path) -> dict[str, str]:
    """Return the names with commits that a run has recorded, by the names as configs have them."""
    try:
        names: Mapping[str, str] = as_type(Mapping[str, str], read_json(record))
        for name in names.values():
            if not read_name(name, "").is_resolved:
                raise ValueError(name)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, HubError, *MALFORMED) as error:
        want, fix = "what titanlite writes", "delete it, and the names are resolved anew"
        raise HubError.of(str(record.parent), record.name, f"{type(error).__name__}: {error}", want, fix) from None
    return dict(names)


def _recorded_by_rank_0(record: Path, asked: str, key: str, limit_s: float) -> dict[str, str]:
    """Return what rank 0 records of a name, as soon as it has."""

    def found() -> dict[str, str] | None:
        return recorded if asked in (recorded := _read_record(record)) else None

    if (recorded := wait_for_rank_0(found, limit_s)) is None:
        want = f"its commit in {record}, which rank 0 writes: a folder that all hosts share"
        raise HubError.of("Hugging Face hub", key, repr(asked), want, "set job.dump_folder to a shared folder")
    return recorded
