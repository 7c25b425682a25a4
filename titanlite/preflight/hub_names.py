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
from titanlite.durable import read_plain
from titanlite.errors import HubError
from titanlite.hub import fetch_description, is_hub_name, read_name, resolve_name
from titanlite.json_file import MALFORMED, as_type, parse_json
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
    config = with_commits(config, recorded | found)
    if needs_weights and is_hub_name(path := config.checkpoint.initial_load_path):
        fetch_description(path, KEY)
    return config, tuple(pins)


def with_commits(config: Config, recorded: Mapping[str, str]) -> Config:
    """Return a config with the `recorded` names with commits in place of those of the hub."""
    tokenizer, path = config.data.tokenizer, config.checkpoint.initial_load_path
    data = replace(config.data, tokenizer=recorded.get(tokenizer, tokenizer))
    return replace(config, data=data, checkpoint=replace(config.checkpoint, initial_load_path=recorded.get(path, path)))


def _read_record(record: Path) -> dict[str, str]:
    try:
        return names_in(read_plain(record), str(record))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise _damaged(str(record), error) from None


def names_in(recorded: bytes | None, file: str) -> dict[str, str]:
    """Return the names with commits in a run's `hub.json`, by the names as configs have them. `file`: its place."""
    try:
        names: Mapping[str, str] = as_type(Mapping[str, str], parse_json(recorded or b"{}"))
        for name in names.values():
            if not read_name(name, "").is_resolved:
                raise ValueError(name)
    except (HubError, *MALFORMED) as error:
        raise _damaged(file, error) from None
    return dict(names)


def _damaged(file: str, error: Exception) -> HubError:
    want, fix = "what titanlite writes", "delete it, and the names are resolved anew"
    return HubError.of(file.rpartition("/")[0], "hub.json", f"{type(error).__name__}: {error}", want, fix)


def _recorded_by_rank_0(record: Path, asked: str, key: str, limit_s: float) -> dict[str, str]:
    """Return what rank 0 records of a name, as soon as it has."""

    def found() -> dict[str, str] | None:
        return recorded if asked in (recorded := _read_record(record)) else None

    if (recorded := wait_for_rank_0(found, limit_s)) is None:
        want = f"its commit in {record}, which rank 0 writes: a folder that all hosts share"
        raise HubError.of("Hugging Face hub", key, repr(asked), want, "set job.dump_folder to a shared folder")
    return recorded
