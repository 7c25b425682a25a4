"""Compare the config of a start with the config of the run's last start: is it still the same run?

Keys that define the run must be equal; any other difference is reported. URLs are compared without their user part.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, cast

import tomli

from titanlite.checkpoint.resume import lasting
from titanlite.config.schema import Config, Model
from titanlite.config.write import toml_table
from titanlite.durable import read_plain
from titanlite.errors import ConfigError, Problem, describe
from titanlite.recipes import model_dims
from titanlite.redact import redact_tree, redact_urls

# Keys that define a run: with another value its checkpoints would not load, or its checkpoints and curves would mean
# something else.
_IDENTITY = (
    "model.",
    "data.source",
    "data.tokenizer",
    "data.shuffle_window",
    "data.separator_id",
    "data.packing",
    "training.seq_len",
    "training.seed",
    "training.nudge",
    "optimizer.state_dtype",
)
_PATHS = ("data.source", "data.tokenizer")  # paths; each checkpoint has a fingerprint of the content


def changes_since(recorded: Path, config: Config) -> list[str]:
    """Return a notice for each key that differs from the config of the run's last start.

    `recorded` is the file of that config, which need not exist.

    Raises:
        ConfigError: a key that defines the run differs, or the file is damaged.
    """
    try:
        toml = read_plain(recorded)
    except FileNotFoundError:
        return []
    return changes_from(toml, str(recorded), config)


def changes_from(recorded_toml: bytes, file: str, config: Config) -> list[str]:
    """Return and raise as `changes_since`, of the content of the `file` of the run's last config."""
    try:
        before = dotted(redact_tree(tomli.loads(recorded_toml.decode()), redact_urls))
    except (ValueError, RecursionError) as e:  # not TOML, or not UTF-8
        want, fix = "the config of this run", "restore it, or choose another job.name"
        raise ConfigError.of(file.rpartition("/")[0], "config.toml", str(e), want, fix) from None
    # A key that is not in the recorded config had its default.
    default = dotted(asdict(Config()))
    was, now = default | before, default | dotted(redact_tree(toml_table(config), redact_urls))
    changed = [key for key in {**was, **now} if was.get(key) != now.get(key)]
    may_change = ("optimizer.state_dtype",) if config.optimizer.fresh_state else ()
    identity = [key for key in changed if key in now and key.startswith(_IDENTITY) and key not in may_change]
    dims_was, dims_now = _dims(was, config), _dims(now, config)
    differing = _differing(dims_was, dims_now)
    problems: list[Problem] = []
    is_mixed = [any(key.startswith("data.mixture[") for key in of) for of in (was, now)]
    if is_mixed[0] != is_mixed[1]:  # only one of the two configs has [[data.mixture]]
        identity = [key for key in identity if key != "data.source"]
        sole = [f"data.source = {_toml(of['data.source'])}" for of in (now, was)]
        saw, want = ("[[data.mixture]]", sole[1]) if is_mixed[1] else (sole[0], "[[data.mixture]]")
        fix = "the old one, or another job.name: with checkpoint.initial_load_path = this run, it goes on from there"
        problems.append(Problem("data", saw, f"{want}, as in {file}", fix))
    for key in identity:
        # A dimension that is not set comes from the flavor. Two flavors may have the same dimensions.
        name = key.removeprefix("model.")
        saw, want = dims_now.get(name, now[key]), dims_was.get(name, was[key])
        if saw != want and not (key == "model.flavor" and dims_was and not differing):
            fix = "the old value, or another job.name"
            if key == "optimizer.state_dtype":
                fix += "; or optimizer.fresh_state = true, to begin with fresh state"
            if key in _PATHS:
                fix += f"; if only its place has changed, write the new one into {file} as well"
            as_in = f"{_toml(want)}, as in {file}"
            if key == "model.flavor" and dims_was and dims_now:
                as_in += f"; they differ in {', '.join(differing)}"
            problems.append(Problem(key, _toml(saw), as_in, fix))
    if problems:
        raise ConfigError(describe(f"{file.rpartition('/')[0]}: output folder of a different run", problems))
    return [
        f"changed since the last start: {key}: {_toml(was.get(key))} → {_toml(now.get(key))}"
        if key in now or "[" in key  # a key in a list of tables
        else f"{key}: no longer a key, ignored"
        for key in changed
        if key != "job.stop_after"  # where to stop this time is no change of the run
    ]


def _differing(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the dimensions of two models that differ, with both values; those of the training of routers may."""
    before, after = (dotted({key: lasting(value) for key, value in of.items()}) for of in (was, now))
    return [
        f"{key} ({_toml(before.get(key))} → {_toml(after.get(key))})"
        for key in {**before, **after}
        if before.get(key) != after.get(key)
    ]


def _dims(flat: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Return the model's dimensions by flat config keys; {} if its recipe is gone or a value has the wrong type."""
    keys = {field.name for field in fields(Model)}
    model = Model(**{key: flat[f"model.{key}"] for key in keys if f"model.{key}" in flat})
    try:
        dims = asdict(model_dims(replace(config, model=model)))
    except (ConfigError, TypeError):
        return {}
    return {key: value for key, value in dims.items() if key not in ("help", "refs")}


def keys_of_training(config_toml: bytes) -> dict[str, Any]:
    """Return the keys of a config, except `job.stop_after` and `checkpoint.resume`, as `dotted` flattens them."""
    keys = dotted(tomli.loads(config_toml.decode()))
    return {key: value for key, value in keys.items() if key not in ("job.stop_after", "checkpoint.resume")}


def dotted(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a config: {"a": {"b": 1, "c": [{"d": 2}]}} → {"a.b": 1, "a.c[0].d": 2}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= dotted(cast(Mapping[str, Any], value), f"{prefix}{key}.")
        elif isinstance(value, tuple | list) and value and all(isinstance(each, Mapping) for each in value):
            for n, table in enumerate(cast("Sequence[Mapping[str, Any]]", value)):
                given = {name: entry for name, entry in table.items() if entry is not None}  # TOML has no None
                flat |= dotted(given, f"{prefix}{key}[{n}].")
        else:
            flat[prefix + key] = list(cast("Sequence[Any]", value)) if isinstance(value, tuple | list) else value
    return flat


def _toml(value: object) -> str:
    """Return a value as TOML; a date, which no key takes, as a string."""
    return "not given" if value is None else json.dumps(value, ensure_ascii=False, default=str)
