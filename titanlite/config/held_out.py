"""Name the held-out sources of a run: `validation.source`, and those that `validation.sources` adds."""

import re

from titanlite.config.build import show
from titanlite.config.problems import Problems
from titanlite.config.schema import Config

FIRST = "validation.source"
_NAMED = re.compile(r"([A-Za-z0-9_-]+)=(.+)", re.DOTALL)


def held_out_sources(config: Config) -> dict[str, str]:
    """Return the sources that a run validates on, none if it does not, by key.

    Returns:
        `validation.source` first, then `validation.sources.NAME` of each further one, in order.
    """
    if not config.validation.enable:
        return {}
    more = (text.partition("=") for text in config.validation.sources)
    return {FIRST: config.validation.source} | {f"{FIRST}s.{name}": source for name, _, source in more}


def name_of_source(key: str) -> str:
    """Return the name that stands in the key of a held-out source; "" for the first, which has none."""
    return key.removeprefix(FIRST).removeprefix("s.")


def check_held_out(config: Config, problems: Problems) -> None:
    """Refuse further sources without a name, of one name, or where validation is off; and an average without one."""
    key, given, names = f"{FIRST}s", config.validation.sources, set[str]()
    for text in given:
        named = _NAMED.fullmatch(text)
        if named is None:
            want = "NAME=SOURCE, with a name of letters, digits, - and _"
            problems.add(key, show(text), want, f"sources = [{show(f'more={text}')}]")
        elif named[1] in names:
            problems.add(key, show(text), f"one source of the name {named[1]}", "give each a name of its own")
        else:
            names.add(named[1])
    if given and not config.validation.enable:
        problems.add(key, show(given), "validation, but validation.enable = false", "validation.enable = true")
    _check_validated_weights(config, problems)


def _check_validated_weights(config: Config, problems: Problems) -> None:
    """Refuse to validate an average that there is not, or without validation."""
    key, asked = "validation.weights", config.validation.weights
    if asked == "model":
        return
    if not config.validation.enable:
        problems.add(key, show(asked), "validation, but validation.enable = false", "validation.enable = true")
    if not config.optimizer.ema_decay:
        want = "an average of the weights, but optimizer.ema_decay = 0"
        problems.add(key, show(asked), want, 'weights = "model", or optimizer.ema_decay = 0.999')
