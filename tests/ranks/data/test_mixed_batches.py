"""The batches of all ranks, put together, against the oracle of `test_mixture.py`: any ranks, any batch, any resume."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.data.test_mixture import WEIGHTS, Oracle, Sample, config_of, past_of
from tests.unit.data.test_shards import make_shards
from titanlite.config.schema import Stage
from titanlite.data.batches import TrainBatches
from titanlite.data.mixture import Mixture
from titanlite.data.samples import Samples
from titanlite.data.stages import Past, StageTable, stage_table

UNIT, STEPS = 16, 9
UNITS = {"a": 53, "b": 29, "c": 17}
FIRST = {"a": 0, "b": 10_000, "c": 20_000}  # token i of a source is this and i, so that a sample shows where it is from


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Samples]:
    tokens = {name: FIRST[name] + np.arange(n * UNIT + 5) for name, n in UNITS.items()}
    return {name: Samples(make_shards(tmp_path / name, ids, shard_tokens=1000), UNIT) for name, ids in tokens.items()}


def step_of(sources: dict[str, Samples], table: StageTable, step: int, ranks: int, local: int = 1) -> list[Sample]:
    """The samples of one step in the global order, of ranks that each begin at it."""
    micros: list[list[list[Sample]]] = []
    for rank in range(ranks):
        where = {"dp_rank": rank, "dp_size": ranks, "seed": 0, "step": step - 1}
        with closing(TrainBatches(sources, table, device=torch.device("cpu"), **where)) as batches:
            assert batches.position == table.samples(step - 1)
            read = batches.next()
            assert batches.position == table.samples(step)
            names = batches.names
        micros.append([])
        for batch in read:
            tokens = batch.tokens.reshape(local, -1)
            assert torch.equal(batch.targets, batch.tokens + 1)
            assert batch.sources is not None
            firsts = zip(tokens[:, 0].tolist(), [names[n] for n in batch.sources], strict=True)
            micros[-1].append([(name, first - FIRST[name], tokens.shape[1]) for first, name in firsts])
    return [sample for turn in zip(*micros, strict=True) for of_rank in turn for sample in of_rank]


@pytest.mark.parametrize("batch", [12, 24, 36])
@pytest.mark.parametrize("ranks", [1, 2, 4, 6])
def test_any_ranks_take_what_the_oracle_says(sources: dict[str, Samples], ranks: int, batch: int) -> None:
    """Resumed at every step, with other weights at three of them, over two epochs of the smallest source."""
    oracle, past, seen = Oracle(UNITS, UNIT, 0), Past(), list[Sample]()
    for step in range(1, STEPS + 1):
        weights = {name: WEIGHTS[(step - 1) // 2 % 4].get(name, 0.0) for name in UNITS}
        if step % 2 and step < 8:
            oracle.begin(weights, UNIT)
        weights = weights if step < 8 else {name: WEIGHTS[3].get(name, 0.0) for name in UNITS}
        table = stage_table(config_of(weights, steps=STEPS, batch=batch, seq_len=UNIT), ranks, past)
        got = step_of(sources, table, step, ranks)
        assert got == [oracle.next() for _ in range(batch)]
        seen += got
        past = past_of(table, step)
    assert len(past.rows) == 4
    for name, n in UNITS.items():  # none lost, none repeated
        own = [first for of, first, _ in seen if of == name]
        whole = len(own) // n * n
        for first in range(0, whole, n):
            assert sorted(own[first : first + n]) == list(range(0, n * UNIT, UNIT))
        assert len(set(own[whole:])) == len(own) - whole


def test_a_ramp_of_batch_and_length_is_what_the_oracle_says(sources: dict[str, Samples]) -> None:
    """From 8 sequences of 4 tokens to 32 of 16, which all are cut into from the start; resumed at each step."""
    weights, last = {"a": 0.5, "b": 0.3, "c": 0.2}, {"a": 1.0, "b": 3.0, "c": 0.5}
    stages = (
        Stage(70, seq_len=8),
        Stage(200, global_batch_size=16, local_batch_size=2),
        Stage(500, last, seq_len=16, global_batch_size=32, local_batch_size=4),
    )
    config, past, oracle = config_of(weights, stages, 12, 8, 4), Past(), Oracle(UNITS, 16, 0)
    rows = [row.to_json() for row in stage_table(config, 2).rows]
    shapes, tokens, samples, shape = {0: (8, 4, 1), 70: (8, 8, 1), 200: (16, 8, 2), 500: (32, 16, 4)}, 0, 0, (0, 0, 0)
    for step in range(1, 13):
        now = shapes[max(start for start in shapes if start <= tokens)]
        if now[:2] != shape[:2]:
            oracle.begin(last if now == shapes[500] else weights, now[1])
        shape, table = now, stage_table(config, 2, past)
        assert ([row.to_json() for row in table.rows], table.steps, table.notes) == (rows, 12, ())
        assert step_of(sources, table, step, 2, shape[2]) == [oracle.next() for _ in range(shape[0])]
        tokens, samples, past = tokens + shape[0] * shape[1], samples + shape[0], past_of(table, step)
        assert (past.tokens, past.samples) == (table.tokens(step), table.samples(step)) == (tokens, samples)
        skipped = Mixture(table, UNITS).skipped(step)
        assert skipped == {name: oracle.skipped[name] for name in UNITS}
    assert sum(skipped.values()) > 0  # else the case is not there
    assert shape == (32, 16, 4)
