"""Write a config as TOML. Reading it back gives an equal config, so a run's `config.toml` starts the same run again."""

import dataclasses
from typing import Any

import tomli_w

from titanlite.config.schema import Config
from titanlite.config.stages import replaced_keys


def to_toml(config: Any) -> str:
    """Return a resolved config or recipe as TOML text, with all values except None, which TOML lacks."""
    return tomli_w.dumps(toml_table(config))


def toml_table(config: Any) -> dict[str, Any]:
    """Return a config or recipe as nested dicts, without None and without keys that other keys replace."""
    table = dataclasses.asdict(config, dict_factory=lambda keys: {k: v for k, v in keys if v is not None})
    for replaced in replaced_keys(config) if isinstance(config, Config) else ():  # reading would refuse such a key
        section, _, key = replaced.partition(".")
        del table[section][key]
    return table
