"""Resolve the stages of a config: a key that a stage leaves out has the value of the previous stage.

Without `data.stage` a run is one stage. The first step of a stage depends on the steps that training has already done
(`titanlite/data/stages.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from titanlite.config.schema import Config

SOLE = ""
"""Name of the one source of a run without a mixture, `data.source`."""


@dataclass(frozen=True)
class AskedStage:
    """A stage of the run, with all values that the config asks for."""

    at: int | None  # index in `data.stage`; None: the first stage, if it has no table there
    from_tokens: int  # tokens trained on before the stage
    seq_len: int  # tokens per sequence (S)
    sequences: int  # sequences of a step, over all ranks
    local_batch_size: int
    weights: Mapping[str, str]  # source → weight, as decimal text, which is exact
    lr_decay_to: float | None = None  # learning rate at the end of the stage over its peak; None: no decay

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step over all ranks."""
        return self.sequences * self.seq_len

    @property
    def shares(self) -> dict[str, Fraction]:
        """Exact share of each source in the tokens of the stage, without sources of weight 0."""
        weights = {name: Fraction(text) for name, text in self.weights.items()}
        total = sum(weights.values())
        return {name: weight / total for name, weight in weights.items() if weight}


def source_keys(config: Config) -> dict[str, tuple[str, str]]:
    """Return name → (config key, source) for each source that a run trains on."""
    mixed = enumerate(config.data.mixture)
    named = {source.name: (f"data.mixture[{n}].source", source.source) for n, source in mixed}
    return named or {SOLE: ("data.source", config.data.source)}


def stage_configs(config: Config) -> Iterator[tuple[int | None, int, Config]]:
    """Yield (index in `data.stage`, tokens before it, config with its length and batch in `[training]`) per stage."""
    now, stages = config, config.data.stage
    if not stages or stages[0].from_tokens:
        yield None, 0, now
    for n, stage in enumerate(stages):
        given = {key: getattr(stage, key) for key in ("seq_len", "global_batch_size", "local_batch_size")}
        shape = {key: value for key, value in given.items() if value is not None}
        now = replace(now, training=replace(now.training, **shape))
        yield n, stage.from_tokens, now


def data_ranks(config: Config, world: int | None) -> int:
    """Return the number of data-parallel ranks, which have different samples; a lower bound if `world` is None.

    Degrees that are out of range, and reported elsewhere, raise no error.
    """
    p = config.parallelism
    if p.data_parallel_shard_degree != -1:
        return p.data_parallel_replicate_degree * p.data_parallel_shard_degree
    if world is not None:
        return max(1, world // max(1, p.tensor_parallel_degree * p.context_parallel_degree))
    return p.data_parallel_replicate_degree


def sequences_per_step(config: Config, world: int | None) -> int:
    """Return the sequences of a step over all ranks; a lower bound if `world` is None."""
    asked = config.training.global_batch_size
    return config.training.local_batch_size * data_ranks(config, world) if asked is None else asked


def asked_stages(config: Config, world_size: int | None) -> tuple[AskedStage, ...]:
    """Return the stages of a checked config. Without `world_size`, batches are those of the fewest possible ranks."""
    weights = {source.name: repr(source.weight) for source in config.data.mixture} or {SOLE: "1"}
    found: list[AskedStage] = []
    for n, from_tokens, now in stage_configs(config):
        stage = None if n is None else config.data.stage[n]
        if stage is not None and stage.weights:
            weights = {name: repr(stage.weights.get(name, 0.0)) for name in weights}
        decay_to = None if stage is None else stage.lr_decay_to
        shape = now.training.seq_len, sequences_per_step(now, world_size), now.training.local_batch_size
        found.append(AskedStage(n, from_tokens, *shape, weights, decay_to))
    return tuple(found)


def follows_ranks(config: Config, world_size: int | None) -> bool:
    """Return whether a stage's batch depends on the number of data-parallel ranks while this number is unknown."""
    is_known = world_size is not None or config.parallelism.data_parallel_shard_degree != -1
    return not is_known and any(now.training.global_batch_size is None for _, _, now in stage_configs(config))


def least_samples(config: Config, sequences: int, unit_len: int) -> int:
    """Return how many samples of `unit_len` tokens a source must have: those of a step, or 1 in a mixture."""
    return 1 if config.data.mixture else max(1, -(-sequences * config.training.seq_len // unit_len))


def longest_seq_len(config: Config) -> int:
    """Return the longest sequence of all stages: sources are cut into samples of that length."""
    return max(config.training.seq_len, *(now.training.seq_len for _, _, now in stage_configs(config)))


def largest_stage(config: Config) -> Config:
    """Return the config, without `data.stage`, of the stage with most tokens in a micro-step: it needs most memory."""
    shapes = [config, *(now for _, _, now in stage_configs(config))]
    most = max(shapes, key=lambda now: (now.training.seq_len * now.training.local_batch_size, now.training.seq_len))
    return replace(most, data=replace(most.data, stage=()))


def replaced_keys(config: Config) -> dict[str, str]:
    """Return the keys that have no effect, each with the key that replaces it."""
    found: dict[str, str] = {}
    if config.data.mixture:
        found["data.source"] = "data.mixture"
    if config.lr_scheduler.warmup_tokens is not None:
        found["lr_scheduler.warmup_steps"] = "lr_scheduler.warmup_tokens"
    if any(stage.lr_decay_to is not None for stage in config.data.stage):
        found["lr_scheduler.min_lr_factor"] = "data.stage"
    return found
