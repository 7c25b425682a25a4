"""Check the user's wishes for a new run before torch is imported: the file, the model, its data and tokenizer."""

import math
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from titanlite import recipes
from titanlite.config.problems import Origin
from titanlite.config.schema import Config, Model
from titanlite.data.inputs import Inputs, check_inputs
from titanlite.data.train_tokenizer import LEAST_IDS
from titanlite.errors import ConfigError, Together
from titanlite.hub import folder_of, is_hub_name
from titanlite.preflight.output_file import require_new
from titanlite.preflight.run_folder import RunFolder
from titanlite.recipes import is_part

LIST = "list"
"""In place of a model: all models, with whether they fit, and how long each takes."""
TRAIN = "train:"
"""Before the number of ids of a tokenizer that is to be trained."""
_MOST_IDS = 1 << 20
_UNITS = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_MOST_TOKENS = 1e18
_COUNT = re.compile(r"([0-9_,]*\.?[0-9]+(?:e[0-9]+)?)\s*([KMBT]?)", re.IGNORECASE)


@dataclass(frozen=True)
class Wishes:
    """The user's wishes for a new run.

    Attributes:
        model: name and flavor, as `llama3-8B`.
        tokenizer: as data.tokenizer, or `train:N`, which `read_text` makes a file.
        tokens: number of tokens to train on; 0: as many as suit the model.
        seq_len: tokens of a sequence; 0: as many as are usual for the model's size.
        is_elsewhere: whether the run is planned for another machine; the tokenizer may then be missing on this one.
    """

    model: str
    data: str
    tokenizer: str = "bytes"
    tokens: int = 0
    is_elsewhere: bool = False
    seq_len: int = 0

    @property
    def lacks_tokenizer(self) -> bool:
        """Return whether the tokenizer is only on the other machine. The model's vocabulary is then kept."""
        is_here = self.tokenizer == "bytes" or is_hub_name(self.tokenizer) or os.path.isfile(folder_of(self.tokenizer))
        return self.is_elsewhere and not is_here


def wished_model(text: str) -> Model:
    """Read a model's name, as `llama3-8B`, or a flavor of llama3, as `8B`. Refuse an unknown or incomplete name."""
    there, part = recipes.names("model"), text
    text = text if "-" in text else f"llama3-{text}"
    meant = [name for name in there if is_part(part, name)]
    if meant and text not in there:
        fix = f"did you mean --model {meant[0]}?" if len(meant) == 1 else f"--model {meant[0]}, or another of them"
        raise ConfigError.of("command line", "--model", part, f"name and flavor: {', '.join(meant)}", fix)
    recipes.load("model", text, origin=Origin("command line"))
    name, _, flavor = text.partition("-")
    return Model(name=name, flavor=flavor)


def wished_inputs(config: Config, wishes: Wishes) -> tuple[Config, Inputs]:
    """Add data and tokenizer to a config, and check them as `titanlite validate` does.

    If the tokenizer is not on this machine, the config has `bytes`, and the inputs have no tokenizer and token counts.

    Raises:
        DataError: there is no such data or tokenizer.
    """
    lacks = wishes.lacks_tokenizer
    data = replace(config.data, source=wishes.data, tokenizer="bytes" if lacks else wishes.tokenizer)
    inputs = check_inputs(config := replace(config, data=data), None)
    return config, replace(inputs, tokenizer=None, tokens={}) if lacks else inputs


def ids_to_train(tokenizer: str) -> int:
    """Return N of `train:N`; 0 if the text names a tokenizer that exists. Refuse `train:` with another text."""
    if not tokenizer.startswith(TRAIN):
        return 0
    text = tokenizer.removeprefix(TRAIN)
    n_ids = int(text) if text.isdecimal() and len(text) < 10 else 0
    if not LEAST_IDS <= n_ids <= _MOST_IDS:
        want = f"{TRAIN}N with a number of ids from {LEAST_IDS} (the bytes, and the end of a text) to {_MOST_IDS:,}"
        raise ConfigError.of("command line", "--tokenizer", tokenizer, want, f"--tokenizer {TRAIN}8192")
    return n_ids


def check_wishes(model: str | None, data: str | None, tokenizer: str, is_elsewhere: bool) -> None:
    """Check the wishes that flags give, and raise all errors as one. None: not given, to be asked for later."""

    checks, source = Together(), data or Config().data.source
    checks.attempt(lambda: model in (None, LIST) or wished_model(model))
    n_ids = checks.attempt(lambda: ids_to_train(tokenizer))
    wishes = Wishes("", source, tokenizer if n_ids == 0 else "bytes", is_elsewhere=is_elsewhere)
    found = checks.attempt(lambda: wished_inputs(Config(), wishes)[1])
    if n_ids and found and not found.is_text:
        want = f"no {TRAIN}N for token files such as {source!r}, whose ids another tokenizer has made"
        checks.errors.append(ConfigError.of("command line", "--tokenizer", tokenizer, want, "leave it out"))
    checks.raise_all()


def file_to_write(named: str | None, model: str) -> Path:
    """Return the path `named`, or one with the model's name. Refuse a file that exists or cannot be written."""
    if named is None:
        wished = wished_model(model)
        named = f"{wished.name}-{wished.flavor.lower()}.toml"
    file = Path(named)
    run = RunFolder(Path(Config().job.dump_folder) / file.stem)
    if run.config.exists():
        want = f"a name that no run has: {run.path} is there"
        raise ConfigError.of("command line", "FILE", str(file), want, "name another: titanlite new other.toml")
    if not file.parent.is_dir():
        want = f"a file in a folder that exists: {file.parent} {'is none' if file.parent.exists() else 'does not'}"
        raise ConfigError.of("command line", "FILE", str(file), want, f"mkdir -p {file.parent}, or name another")
    require_new("FILE", file)
    return file


def token_count(text: str) -> int:
    """Read a number of tokens, as 20B, 1.5e9 or 2_000_000. Refuse other text, and a number below 1 or above 1e18."""
    found = _COUNT.fullmatch(text.strip())
    count = float(re.sub("[,_]", "", found[1])) * _UNITS[found[2].upper()] if found else math.nan
    if not 1 <= count <= _MOST_TOKENS:
        want = f"a number of tokens from 1 to {_MOST_TOKENS:.0e}, as 20B, 500M or 1.5e9"
        raise ConfigError.of("command line", "--tokens", text, want, "--tokens 20B")
    return int(count)
