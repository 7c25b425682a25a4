"""Resolve the stages of a config, each in full: what a stage does not give stays as it was before it.

Without `data.stage` a run is one stage, from its first token on. Which step each begins with depends on where training
stands; `titanlite/data/stages.py` says that.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from operator import attrgetter

from titanlite.config.build import show
from titanlite.config.check_mesh import data_ranks
from titanlite.config.problems import COMMAND_LINE, Problems
from titanlite.config.schema import Config

SOLE = ""
"""Name of the one source of a run without a mixture, `data.source`."""

_NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class AskedStage:
    """A stage as the config asks for it.

    Attributes:
        at: its place in `data.stage`; None: what holds from the start, without a table of its own.
        from_tokens: trained on before it.
        seq_len: S.
        sequences: of a step, over all ranks.
        local_batch_size: sequences of a micro-step on a data-parallel rank.
        weights: of each source by name, as the file writes them: `0.3` is three tenths.
        lr_decay_to: fraction of the peak that the learning rate reaches at its end; None: it does not change.
    """

    at: int | None
    from_tokens: int
    seq_len: int
    sequences: int
    local_batch_size: int
    weights: Mapping[str, str]
    lr_decay_to: float | None = None

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step over all ranks."""
        return self.sequences * self.seq_len

    @property
    def shares(self) -> dict[str, Fraction]:
        """Share of each source in the tokens, exactly; of those that have any."""
        weights = {name: Fraction(text) for name, text in self.weights.items()}
        total = sum(weights.values())
        return {name: weight / total for name, weight in weights.items() if weight}


def source_keys(config: Config) -> dict[str, tuple[str, str]]:
    """Return the sources that a run trains on by name: the key of each for messages, and what it names."""
    mixed = enumerate(config.data.mixture)
    named = {source.name: (f"data.mixture[{n}].source", source.source) for n, source in mixed}
    return named or {SOLE: ("data.source", config.data.source)}


def trained_keys(config: Config) -> tuple[str, ...]:
    """Return the keys of the sources that a run trains on."""
    return tuple(key for key, _ in source_keys(config).values())


def stage_configs(config: Config) -> Iterator[tuple[int | None, int, Config]]:
    """Yield of each stage its place in `data.stage`, its first token, and the config with its shape in `[training]`."""
    now, stages = config, config.data.stage
    if not stages or stages[0].from_tokens:
        yield None, 0, now
    for n, stage in enumerate(stages):
        given = {key: getattr(stage, key) for key in ("seq_len", "global_batch_size", "local_batch_size")}
        shape = {key: value for key, value in given.items() if value is not None}
        now = replace(now, training=replace(now.training, **shape))
        yield n, stage.from_tokens, now


def asked_stages(config: Config, world_size: int | None) -> tuple[AskedStage, ...]:
    """Return the stages of a config that was checked, over the fewest ranks if their number is not known."""
    weights = {source.name: repr(source.weight) for source in config.data.mixture} or {SOLE: "1"}
    found: list[AskedStage] = []
    for n, from_tokens, now in stage_configs(config):
        stage = None if n is None else config.data.stage[n]
        if stage is not None and stage.weights:
            weights = {name: repr(stage.weights.get(name, 0.0)) for name in weights}
        local, asked = now.training.local_batch_size, now.training.global_batch_size
        sequences = local * data_ranks(config, world_size) if asked is None else asked
        decay_to = None if stage is None else stage.lr_decay_to
        found.append(AskedStage(n, from_tokens, now.training.seq_len, sequences, local, weights, decay_to))
    return tuple(found)


def follows_ranks(config: Config, world_size: int | None) -> bool:
    """Return whether the batch of a stage follows from a number of data-parallel ranks that is not known."""
    is_known = world_size is not None or config.parallelism.data_parallel_shard_degree != -1
    return not is_known and any(now.training.global_batch_size is None for _, _, now in stage_configs(config))


def least_samples(config: Config, sequences: int, unit_len: int) -> int:
    """Return the samples of `unit_len` tokens that a source must have: a step's, or one of a mixture."""
    return 1 if config.data.mixture else max(1, -(-sequences * config.training.seq_len // unit_len))


def longest_seq_len(config: Config) -> int:
    """Return the longest sequence of a run: its sources are cut into samples of that, and positions reach so far."""
    return max(config.training.seq_len, *(now.training.seq_len for _, _, now in stage_configs(config)))


def largest_stage(config: Config) -> Config:
    """Return the config of the stage that has most tokens in a micro-step, as of a run without stages.

    It decides on memory.
    """
    shapes = [config, *(now for _, _, now in stage_configs(config))]
    most = max(shapes, key=lambda now: (now.training.seq_len * now.training.local_batch_size, now.training.seq_len))
    return replace(most, data=replace(most.data, stage=()))


def replaced_keys(config: Config) -> dict[str, str]:
    """Return the keys that have no effect, as another key takes the place of each: that one by the key."""
    found: dict[str, str] = {}
    if config.data.mixture:
        found["data.source"] = "data.mixture"
    if config.lr_scheduler.warmup_tokens is not None:
        found["lr_scheduler.warmup_steps"] = "lr_scheduler.warmup_tokens"
    if any(stage.lr_decay_to is not None for stage in config.data.stage):
        found["lr_scheduler.min_lr_factor"] = "data.stage"
    return found


def check_stages(config: Config, problems: Problems) -> None:
    """Refuse mixtures and stages that cannot be: nothing of them needs data or torch."""
    _check_mixture(config, problems)
    for key, by in replaced_keys(config).items():
        _check_replaced(config, key, by, problems)
    schedule = config.lr_scheduler
    if schedule.warmup_tokens is not None and not config.training.tokens:
        want = "not given without training.tokens: the learning rate follows steps"
        problems.add("lr_scheduler.warmup_tokens", str(schedule.warmup_tokens), want, "give training.tokens")
    if schedule.decay_ratio is not None and any(stage.lr_decay_to is not None for stage in config.data.stage):
        want = "not given with lr_decay_to in data.stage, which says when the learning rate falls"
        problems.add("lr_scheduler.decay_ratio", show(schedule.decay_ratio), want, "remove it")
    before = -1
    for n, stage in enumerate(config.data.stage):
        key = f"data.stage[{n}]"
        if 0 <= stage.from_tokens <= before:  # below, its range says so
            want = f"more than {before:,}, where the stage before it begins"
            problems.add(f"{key}.from_tokens", str(stage.from_tokens), want, "write stages in the order of training")
        if config.training.tokens and stage.from_tokens >= config.training.tokens:
            want = f"less than training.tokens = {config.training.tokens}, where the run ends"
            problems.add(f"{key}.from_tokens", str(stage.from_tokens), want, "a larger training.tokens")
        before = max(before, stage.from_tokens)
        _check_weights(config, n, problems)
        if config.data.packing == "best_fit" and stage.seq_len not in (None, config.training.seq_len):
            want = f"training.seq_len = {config.training.seq_len}: best_fit packs documents into samples of one length"
            problems.add(f"{key}.seq_len", str(stage.seq_len), want, 'packing = "concat"')
    _check_lengths(config, problems)


def _check_lengths(config: Config, problems: Problems) -> None:
    """Refuse lengths of which not each divides the longest, at the one that fits the others least."""
    given = {"training.seq_len": config.training.seq_len}
    given |= {f"data.stage[{n}].seq_len": stage.seq_len for n, stage in enumerate(config.data.stage) if stage.seq_len}
    lengths = [length for length in given.values() if length]
    if min(lengths, default=0) <= 0 or not any(max(lengths) % length for length in lengths):
        return

    def fit(key: str) -> int:
        return sum(max(given[key], other) % min(given[key], other) == 0 for other in lengths)

    odd = min(reversed(given), key=fit)  # of equals the last, which was written to be another
    others = ", ".join(f"{given[key]} ({key})" for key in given if given[key] != given[odd])
    want = f"lengths that divide the longest, as samples are cut into pieces of it; the others are {others}"
    problems.add(odd, str(given[odd]), want, "powers of 2 divide each other")


def _check_replaced(config: Config, key: str, by: str, problems: Problems) -> None:
    """Refuse a key that is given though another takes its place; of a file that is extended it is replaced."""
    place, other = problems.origin.places.get(key), problems.origin.of(by)
    if place is not None and place.source in (other.source, problems.origin.source, COMMAND_LINE.source):
        shown = {"data.mixture": "[[data.mixture]]", "data.stage": "lr_decay_to in [[data.stage]]"}.get(by, by)
        fix = "remove it, or make it a source of the mixture" if by == "data.mixture" else f"remove it, or {shown}"
        problems.add(key, show(attrgetter(key)(config)), f"not given with {shown}, which takes its place", fix)


def _check_mixture(config: Config, problems: Problems) -> None:
    """Check names, and that there is something to mix."""
    mixture, seen = config.data.mixture, set[str]()
    for n, source in enumerate(mixture):
        key = f"data.mixture[{n}].name"
        if not _NAME.fullmatch(source.name):
            plain = re.sub(r"[^A-Za-z0-9_-]+", "_", source.name) or "web"
            problems.add(key, show(source.name), "a name of letters, digits, - and _", f'name = "{plain}"')
        elif source.name in seen:
            problems.add(key, show(source.name), "one source of that name", "give each a name of its own")
        seen.add(source.name)
    if mixture and config.data.max_tokens:
        want = "0 with [[data.mixture]], whose sources are taken by weight"
        problems.add("data.max_tokens", str(config.data.max_tokens), want, "max_tokens = 0")
    if mixture and not any(source.weight for source in mixture) and min(source.weight for source in mixture) >= 0:
        want = "a sum above 0: the sources are taken by their share of it"
        problems.add("data.mixture", "weights that sum to 0", want, "give at least one source a weight")


def _check_weights(config: Config, n: int, problems: Problems) -> None:
    """Check the weights of one stage."""
    weights, names = config.data.stage[n].weights, [source.name for source in config.data.mixture]
    key = f"data.stage[{n}].weights"
    if not weights:
        return
    if not names:
        want = "not given without [[data.mixture]]: there is one source"
        problems.add(key, ", ".join(weights), want, "remove it, or write the sources as [[data.mixture]]")
        return
    for name, weight in weights.items():
        if name not in names:
            problems.add(f"{key}.{name}", show(weight), f"one of {', '.join(names)}", "a source of the mixture")
        elif not 0 <= weight < float("inf"):
            problems.add(f"{key}.{name}", show(weight), "a number, at least 0", f"{name} = 0.0 leaves it out")
    if not any(weights.values()):
        problems.add(key, "weights that sum to 0", "a sum above 0", "give at least one source a weight")
