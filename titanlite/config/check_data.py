"""Check keys of data, mixture, stages and validation against each other, without reading any data."""

import re
from operator import attrgetter

from titanlite.config.held_out import idle_keys
from titanlite.config.problems import COMMAND_LINE, Problems, show
from titanlite.config.schema import Config
from titanlite.config.stages import replaced_keys, stage_configs

_NAME = re.compile(r"[A-Za-z0-9_-]+")


def check_data(config: Config, problems: Problems) -> None:
    """Refuse keys of data, mixture, stages and learning-rate schedule that contradict each other."""
    data, tokens, refuse = config.data, config.training.tokens, problems.about(config)
    if data.prepare == "background" and not data.shuffle_window:
        want = '"first" without data.shuffle_window: an order of the whole source begins anywhere in it'
        refuse("data.prepare", want, f"shuffle_window = {1 << 26}", "data.shuffle_window")
    if data.prepare == "background" and data.packing == "best_fit":
        want = '"concat" with data.prepare = "background": how documents fit together is decided over all of them'
        refuse("data.packing", want, 'prepare = "first"', "data.prepare")
    lengths = sorted({config.training.seq_len, *(now.training.seq_len for _, _, now in stage_configs(config))})
    if 0 < data.shuffle_window < lengths[-1]:
        of = "training.seq_len" if lengths[-1] == config.training.seq_len else "the longest seq_len of data.stage"
        want = f"0, or at least the {lengths[-1]} tokens of a sample ({of})"
        refuse("data.shuffle_window", want, "shuffle_window = 0 (the whole source)")
    if data.packing == "best_fit" and len(lengths) > 1:
        want = (
            f'"concat" where stages have several seq_len ({", ".join(map(str, lengths))}): documents are packed for one'
        )
        refuse("data.packing", want, 'packing = "concat", or one seq_len in all stages')
    _check_mixture(config, problems)
    for key, by in replaced_keys(config).items():
        place, other = problems.origin.places.get(key), problems.origin.of(by)
        # A key of an extended file is not refused: the extending file replaces it.
        if place is not None and place.source in (other.source, problems.origin.source, COMMAND_LINE.source):
            shown = {"data.mixture": "[[data.mixture]]", "data.stage": "lr_decay_to in [[data.stage]]"}.get(by, by)
            fix = f"remove it, or {'make it a source of the mixture' if by == 'data.mixture' else shown}"
            refuse(key, f"not given with {shown}, which takes its place", fix)
    schedule = config.lr_scheduler
    if schedule.warmup_tokens is not None and not tokens:
        want = "not given without training.tokens: the learning rate follows steps"
        refuse("lr_scheduler.warmup_tokens", want, "give training.tokens")
    if schedule.decay_ratio is not None and any(stage.lr_decay_to is not None for stage in data.stage):
        want = "not given with lr_decay_to in data.stage, which says when the learning rate falls"
        refuse("lr_scheduler.decay_ratio", want, "remove it")
    begins = [stage.from_tokens for stage in data.stage]
    for n, begin in enumerate(begins):
        before = max([-1, *begins[:n]])
        if 0 <= begin <= before:  # a negative number is reported by its range
            want = f"more than {before:,}, where the stage before it begins"
            refuse(f"data.stage[{n}].from_tokens", want, "write stages in the order of training")
        if tokens and begin >= tokens:
            want = f"less than training.tokens = {tokens}, where the run ends"
            refuse(f"data.stage[{n}].from_tokens", want, "a larger training.tokens")
        _check_weights(config, n, problems)
    _check_lengths(config, problems)


def _check_lengths(config: Config, problems: Problems) -> None:
    """Refuse sequence lengths that do not divide the longest. The problem names the length that fits fewest others."""
    given = {"training.seq_len": config.training.seq_len}
    given |= {f"data.stage[{n}].seq_len": stage.seq_len for n, stage in enumerate(config.data.stage) if stage.seq_len}
    lengths = [length for length in given.values() if length]
    if min(lengths, default=0) <= 0 or not any(max(lengths) % length for length in lengths):
        return

    def fit(key: str) -> int:
        return sum(max(given[key], other) % min(given[key], other) == 0 for other in lengths)

    odd = min(reversed(given), key=fit)  # of several, the last one in the file
    others = ", ".join(f"{given[key]} ({key})" for key in given if given[key] != given[odd])
    want = f"lengths that divide the longest, as samples are cut into pieces of it; the others are {others}"
    problems.add(odd, str(given[odd]), want, "powers of 2 divide each other")


def _check_mixture(config: Config, problems: Problems) -> None:
    """Check names and weights of the sources of a mixture."""
    mixture, refuse = config.data.mixture, problems.about(config)
    for n, source in enumerate(mixture):
        key = f"data.mixture[{n}].name"
        if not _NAME.fullmatch(source.name):
            plain = re.sub(r"[^A-Za-z0-9_-]+", "_", source.name) or "web"
            refuse(key, "a name of letters, digits, - and _", f'name = "{plain}"')
        elif source.name in [other.name for other in mixture[:n]]:
            refuse(key, "one source of that name", "give each a name of its own")
    if mixture and config.data.max_tokens:
        refuse("data.max_tokens", "0 with [[data.mixture]], whose sources are taken by weight", "max_tokens = 0")
    weights = [source.weight for source in mixture]
    if mixture and not any(weights) and min(weights) >= 0:
        want = "a sum above 0: the sources are taken by their share of it"
        problems.add("data.mixture", "weights that sum to 0", want, "give at least one source a weight")


def _check_weights(config: Config, n: int, problems: Problems) -> None:
    weights, names = config.data.stage[n].weights, [source.name for source in config.data.mixture]
    key = f"data.stage[{n}].weights"
    if weights and not names:
        want = "not given without [[data.mixture]]: there is one source"
        problems.add(key, ", ".join(weights), want, "remove it, or write the sources as [[data.mixture]]")
        return
    for name, weight in weights.items():
        if name not in names:
            problems.add(f"{key}.{name}", show(weight), f"one of {', '.join(names)}", "a source of the mixture")
        elif not 0 <= weight < float("inf"):
            problems.add(f"{key}.{name}", show(weight), "a number, at least 0", f"{name} = 0.0 leaves it out")
    if weights and not any(weights.values()):
        problems.add(key, "weights that sum to 0", "a sum above 0", "give at least one source a weight")


def check_held_out(config: Config, problems: Problems) -> None:
    """Refuse `validation.sources` that are malformed, and keys of validation that need a feature which is off.

    Where `validation.enable = false` is given, keys that need it only have no effect, so that a flag turns them off.
    """
    validation, refuse, names = config.validation, problems.about(config), set[str]()
    for text in validation.sources:
        name, _, source = text.partition("=")
        if not _NAME.fullmatch(name) or not source:
            want, fix = "NAME=SOURCE, with a name of letters, digits, - and _", f"sources = [{show(f'more={text}')}]"
            problems.add("validation.sources", show(text), want, fix)
        elif name in names:
            want = f"one source of the name {name}"
            problems.add("validation.sources", show(text), want, "give each a name of its own")
        names.add(name)
    is_chosen = "validation.enable" in problems.origin.places  # else it may have been forgotten
    for key in () if is_chosen else idle_keys(config):
        if key in problems.origin.places:
            want, default = "validation, but validation.enable = false", show(attrgetter(key)(Config()))
            refuse(key, want, f"validation.enable = true, or {key.removeprefix('validation.')} = {default}")
    if validation.enable and validation.weights != "model" and not config.optimizer.ema_decay:
        want = "an average of the weights, but optimizer.ema_decay = 0"
        refuse("validation.weights", want, 'weights = "model", or optimizer.ema_decay = 0.999')
