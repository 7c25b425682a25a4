"""Check what a person wishes of a new run, before torch is imported: the file, the model, its data and tokenizer."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from titanlite import recipes
from titanlite.config.problems import Origin
from titanlite.config.schema import Config, Model
from titanlite.data.inputs import Inputs, check_inputs
from titanlite.errors import ConfigError, TitanliteError
from titanlite.recipes import is_part

_UNITS = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_MOST_TOKENS = 1e18
_COUNT = re.compile(r"([0-9_,]*\.?[0-9]+(?:e[0-9]+)?)\s*([KMBT]?)", re.IGNORECASE)


@dataclass(frozen=True)
class Wishes:
    """The wishes of a person for a run.

    Attributes:
        model: name and flavor, as `llama3-8B`.
        data: `data.source`.
        tokenizer: `data.tokenizer`.
        tokens: to train on; 0: as many as suit the model.
    """

    model: str
    data: str
    tokenizer: str = "bytes"
    tokens: int = 0


def wished_model(text: str) -> Model:
    """Read a model's name, as `llama3-8B`; of a flavor alone, as `8B`, it is llama3's.

    Raises:
        ConfigError: it is part of the names of models alone.
        RecipeError: there is no such model.
    """
    there, part = recipes.names("model"), text
    text = text if "-" in text else f"llama3-{text}"
    meant = [name for name in there if is_part(part, name)]
    if meant and text not in there:
        fix = f"did you mean --model {meant[0]}?" if len(meant) == 1 else f"--model {meant[0]}, or another of them"
        raise ConfigError.of("command line", "--model", part, f"name and flavor: {', '.join(meant)}", fix)
    recipes.load("model", text, origin=Origin("command line"))
    name, _, flavor = text.partition("-")
    return Model(name=name, flavor=flavor)  # type: ignore[arg-type]  # of an architecture that there is


def wished_inputs(config: Config, data: str, tokenizer: str) -> tuple[Config, Inputs]:
    """Add data and tokenizer to a config, and check them as `titanlite validate` does.

    Raises:
        DataError: there is no such data or tokenizer.
    """
    config = replace(config, data=replace(config.data, source=data, tokenizer=tokenizer))
    return config, check_inputs(config, None)


def check_wishes(model: str | None, data: str | None, tokenizer: str) -> None:
    """Check what was given as flags; what was not is asked for later.

    Raises:
        TitanliteError: with all problems found.
    """
    checks: list[Callable[[], object]] = [lambda: wished_model(model)] if model is not None else []
    checks.append(lambda: wished_inputs(Config(), Config().data.source if data is None else data, tokenizer))
    found = list[TitanliteError]()
    for check in checks:
        try:
            check()
        except TitanliteError as error:
            found.append(error)
    if found:
        raise ConfigError(*(report for error in found for report in error.args)) if len(found) > 1 else found[0]


def file_to_write(named: str | None, model: str) -> Path:
    """Give the file of a config, which has the model's name if it was not named.

    Raises:
        ConfigError: it exists, or its folder does not.
    """
    if named is None:
        wished = wished_model(model)
        named = f"{wished.name}-{wished.flavor.lower()}.toml"
    file = Path(named)
    if file.exists() or file.is_symlink():
        fix = f"remove {file}, or name another: titanlite new other.toml"
        raise ConfigError.of("command line", "FILE", str(file), "a file that does not exist: this one does", fix)
    if not file.parent.is_dir():
        want = f"a file in a folder that exists: {file.parent} {'is none' if file.parent.exists() else 'does not'}"
        raise ConfigError.of("command line", "FILE", str(file), want, f"mkdir -p {file.parent}, or name another")
    return file


def token_count(text: str) -> int:
    """Read a number of tokens, as 20B, 1.5e9 or 2_000_000.

    Raises:
        ConfigError: it is none, below 1 or beyond all text.
    """
    found = _COUNT.fullmatch(text.strip())
    count = float(re.sub("[,_]", "", found[1])) * _UNITS[found[2].upper()] if found else math.nan
    if not 1 <= count <= _MOST_TOKENS:
        want = f"a number of tokens from 1 to {_MOST_TOKENS:.0e}, as 20B, 500M or 1.5e9"
        raise ConfigError.of("command line", "--tokens", text, want, "--tokens 20B")
    return int(count)
