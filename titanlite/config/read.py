"""Read a config file into a `Config`, and suggest for every unknown key the one that was probably meant.

tomli parses, `toml_file.py` merges the extended files, `build.py` checks each key and value against the schema. An
unknown key may belong to another section, be torchtitan's or another trainer's, or be misspelt.
"""

import dataclasses
from pathlib import Path
from typing import cast

from titanlite.config.build import from_table
from titanlite.config.problems import Origin, Problems
from titanlite.config.recipe_schema import GROUP_OF_RULE, Experts
from titanlite.config.schema import Config, schema_keys, sections
from titanlite.config.synonyms import SYNONYMS
from titanlite.config.toml_file import read_merged
from titanlite.config.torchtitan import answer_to_key
from titanlite.errors import nearest


def read_config(path: Path) -> tuple[Config, Origin]:
    """Read a TOML file and the files that it extends. Raise one ConfigError with all problems."""
    config, problems = read_what_is_right(path)
    problems.raise_all()
    return config, problems.origin


def read_what_is_right(path: Path) -> tuple[Config, Problems]:
    """Read a TOML file and the files that it extends. Their paths are relative to the file that names them.

    Returns:
        The config without wrong keys and values, and the problems with these.

    Raises:
        ConfigError: a file is missing or is not TOML.
    """
    table, places = read_merged(path, find=lambda name, at: Path(at.source).parent / name)
    problems = Problems(Origin(str(path), places))
    config = from_table(Config, table, problems, suggest=suggest_key)
    return cast("Config", config), problems


def suggest_key(path: str, value: object = None) -> str | None:
    """Return advice on an unknown key: its replacement, its section or the nearest key; None if there is none."""
    section, _, key = path.rpartition(".")
    if path == "optimizer.name":  # a key of titanlite 0.1.0, too
        return 'recipe = "adamw" in its place'
    if there := answer_to_key(path):
        if not there.startswith("use "):
            return f"remove it, a key of torchtitan's; {there}"
        used = there.removeprefix("use ").replace(" = {}", "")
        return f"this is torchtitan's; titanlite convert FILE writes {used}"
    if "[" in section:  # a key in a list of tables, which is no section
        return None
    of_experts = {field.name for field in dataclasses.fields(Experts)}
    if path.startswith(("experts", "model.experts")) or (section == "model" and key in of_experts):
        return "write it in the table [experts] of a recipe of your own: docs/how_to/mixture_of_experts.md"
    if f"{path}.".startswith("optimizer.groups."):
        return "write groups in a recipe of your own, which optimizer.recipe names: docs/optimizers.md"
    of_group = {field.name for group in GROUP_OF_RULE.values() for field in dataclasses.fields(group)}
    if section == "optimizer" and key in of_group:
        return f"write {key} in a group of a recipe of your own: docs/optimizers.md"
    if key in SYNONYMS and not isinstance(value, dict):
        return f"did you mean {SYNONYMS[key]}?"
    if flat := next((k for k in schema_keys() if k.replace(".", "_") == path), None):
        return f"did you mean {flat}?"
    if not section and (near := nearest(path, sections())):
        return f"did you mean [{near}]?"
    elsewhere = [k for k in schema_keys() if k.endswith(f".{key}")]
    own = [k for k in schema_keys() if k.startswith(f"{section}.")]
    if own and 1 <= len(elsewhere) <= 3:
        near = elsewhere
    else:
        names = {k.partition(".")[2]: k for k in own}  # without the section, which all share
        begun = [name for name in names if name.startswith(f"{key}_")]  # "ema" is "ema_decay"
        word = nearest(key, names) or (begun[0] if len(begun) == 1 else "")
        meant = names.get(word) if own else nearest(path, schema_keys())
        near = [meant] if meant else elsewhere[:3]
    return f"did you mean {' or '.join(near)}?" if near else None
