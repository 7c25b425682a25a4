"""Name the held-out sources of a run: `validation.source`, and those that `validation.sources` adds."""

from titanlite.config.schema import Config

FIRST = "validation.source"


def held_out_sources(config: Config) -> dict[str, str]:
    """Return the sources of validation by key: `validation.source`, then each `validation.sources.NAME`."""
    if not config.validation.enable:
        return {}
    more = (text.partition("=") for text in config.validation.sources)
    return {FIRST: config.validation.source} | {f"{FIRST}s.{name}": source for name, _, source in more}


def name_of_source(key: str) -> str:
    """Return NAME of a key `validation.sources.NAME`; "" for `validation.source`."""
    return key.removeprefix(FIRST).removeprefix("s.")
