"""Name what a run validates: `validation.source`, the sources that `validation.sources` adds, losses and samples."""

from titanlite.config.schema import Config

FIRST = "validation.source"


def held_out_sources(config: Config) -> dict[str, str]:
    """Return the sources of validation by key: `validation.source`, then each `validation.sources.NAME`."""
    if not config.validation.enable:
        return {}
    more = (text.partition("=") for text in config.validation.sources)
    return {FIRST: config.validation.source} | {f"{FIRST}s.{name}": source for name, _, source in more}


def validation_losses(config: Config) -> list[str]:
    """Return the keys of the losses that each validation logs, as `validation_loss` and `validation_loss_ema.NAME`."""
    of = {"model": ("",), "ema": ("_ema",), "both": ("", "_ema")}[config.validation.weights]
    names = [name_of_source(key) for key in held_out_sources(config)]
    return [f"validation_loss{weights}{f'.{name}' if name else ''}" for weights in of for name in names]


def name_of_source(key: str) -> str:
    """Return NAME of a key `validation.sources.NAME`; "" for `validation.source`."""
    return key.removeprefix(FIRST).removeprefix("s.")


def samples_of(config: Config) -> tuple[str, ...]:
    """Return the texts that the model continues at each validation; none without validation."""
    return config.validation.samples if config.validation.enable else ()


def idle_keys(config: Config) -> list[str]:
    """Return the keys that ask for something of each validation, where there is none."""
    asked = config.validation
    given = {"sources": asked.sources, "weights": asked.weights != "model", "samples": asked.samples}
    return [f"validation.{key}" for key, is_given in given.items() if is_given and not asked.enable]
