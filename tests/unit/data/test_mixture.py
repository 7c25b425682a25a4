"""Mixtures and stages against an oracle in plain Python, which merges sources one sample after the other."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from titanlite.checkpoint.saved_state import SavedState
from titanlite.config.schema import Config, Data, MixtureSource, Stage, Training
from titanlite.data.mixture import LONGEST_PERIOD, Mixture, many_epochs, seed_of, turns, whole_shares
from titanlite.data.order import samples_at
from titanlite.data.stages import Past, StageTable, stage_table
from titanlite.errors import ConfigError

Sample = tuple[str, int, int]
"""Of a source, the first of some tokens in its row, and how many."""


def config_of(
    weights: dict[str, float], stages: tuple[Stage, ...] = (), steps: int = 40, batch: int = 4, seq_len: int = 8
) -> Config:
    mixture = tuple(MixtureSource(name, f"{name}.txt", weight) for name, weight in weights.items())
    training = Training(steps=steps, seq_len=seq_len, global_batch_size=batch)
    return Config(data=Data(mixture=mixture, stage=stages), training=training)


class Oracle:
    """Training, one sample after the other: what is next, and nothing that is computed from a position."""

    def __init__(self, units: dict[str, int], unit_len: int, seed: int) -> None:
        self.units, self.unit_len, self.seed = units, unit_len, seed
        self.behind, self.skipped = Counter[str](), Counter[str]()
        self.shares: dict[str, Fraction] = {}

    def begin(self, weights: dict[str, float], seq_len: int) -> None:
        total = sum(Fraction(str(w)) for w in weights.values())
        self.shares = {name: Fraction(str(w)) / total for name, w in weights.items() if w}
        self.place, self.given, self.seq_len = 0, Counter[str](), seq_len
        for name in self.shares:
            while self.behind[name] % seq_len:
                self.behind[name] += 1
                self.skipped[name] += 1

    def next(self) -> Sample:
        def window(name: str) -> tuple[int, int]:
            k, share = self.given[name] + 1, self.shares[name]
            first, end = Fraction(k - 1) / share, Fraction(k) / share
            return int(first), -int(-end // 1)

        may = [name for name in sorted(self.shares) if window(name)[0] <= self.place]
        name = min(may, key=lambda name: window(name)[1])
        unit, within = divmod(self.behind[name], self.unit_len)
        at = int(samples_at(np.array([unit]), self.units[name], seed_of(self.seed, name))[0])
        self.place, self.given[name] = self.place + 1, self.given[name] + 1
        self.behind[name] += self.seq_len
        return name, at * self.unit_len + within, self.seq_len


@pytest.mark.parametrize(
    "whole", [(1,), (1, 1), (7, 2, 1), (1, 1, 1, 1, 1), (997, 2, 1), (5, 0, 3), (33, 31, 29, 7), (1, 9999)]
)
def test_shares_are_within_one_sample_at_every_point(whole: tuple[int, ...]) -> None:
    period, given, of = sum(whole), [0] * len(whole), turns(whole)
    for place in range(2 * period + 3):
        source, before = of.at(np.array([place]))
        assert before[0] == given[source[0]]  # the samples of a source come in their order, none left out
        given[source[0]] += 1
        for s, count in enumerate(whole):
            assert abs(given[s] * period - (place + 1) * count) < period
        assert of.given(place + 1).tolist() == given


def test_a_long_period_is_rounded() -> None:
    thirds = [Fraction(1, 3), Fraction(1, 7), Fraction(11, 21)]
    assert whole_shares(thirds) == [7, 3, 11]
    weights = [Fraction("0.1234567"), Fraction("0.8765432"), Fraction("0.0000001")]
    taken = whole_shares(weights)
    assert sum(taken) == LONGEST_PERIOD
    assert taken[2] == 1  # not none
    for count, share in zip(taken, weights, strict=True):
        assert abs(Fraction(count, LONGEST_PERIOD) - share) < Fraction(2, LONGEST_PERIOD)


WEIGHTS = [{"a": 0.7, "b": 0.3}, {"a": 0.2, "b": 0.5, "c": 0.3}, {"c": 1.0, "a": 3.0}, {"b": 0.1, "a": 0.2, "c": 0.4}]
UNITS = {"a": 13, "b": 7, "c": 5}


def past_of(table: StageTable, step: int) -> Past:
    """As a checkpoint has it."""
    return SavedState(step=step, samples=table.samples(step), stages=table.past(step), unit_len=table.unit_len).past


def test_realised_shares_at_every_step() -> None:
    stages = (Stage(160, {"a": 0.2, "b": 0.5, "c": 0.3}), Stage(640, {"c": 1.0, "a": 3.0}))
    table = stage_table(config_of({"a": 0.7, "b": 0.3, "c": 0.0}, stages), 1)
    mixture = Mixture(table, UNITS)
    for before, row in enumerate(table.rows):
        end = table.rows[before + 1].from_step if before + 1 < len(table.rows) else 40
        at_start = mixture.tokens(row.from_step), mixture.asked(row.from_step)
        for step in range(row.from_step, end + 1):
            for name in UNITS:
                took = mixture.tokens(step)[name] - at_start[0][name]
                assert abs(took - (mixture.asked(step)[name] - at_start[1][name])) < 8
    assert sum(mixture.tokens(40).values()) == table.tokens(40) == 40 * 4 * 8


def test_tokens_end_a_run() -> None:
    config = config_of({"a": 1.0}, (Stage(100, global_batch_size=8),))
    config = replace(config, training=replace(config.training, tokens=1000))
    table = stage_table(config, 1)
    assert [row.from_step for row in table.rows] == [0, 4]
    assert table.tokens(table.steps - 1) < 1000 <= table.tokens(table.steps)
    done = Past(table.steps, table.samples(table.steps), table.rows)
    assert stage_table(config, 1, done).steps == table.steps


@pytest.mark.parametrize("from_tokens", [95, 85, 65])
def test_a_stage_whose_step_is_past_the_end_cuts_nothing_off(from_tokens: int) -> None:
    config = config_of({"a": 1.0}, (Stage(from_tokens, global_batch_size=1),), batch=3, seq_len=10)
    table = stage_table(replace(config, training=replace(config.training, tokens=100)), 1)
    reached = [row.from_tokens for row in table.rows]
    if from_tokens > 90:
        assert (reached, table.notes) == ([0], ("data.stage[0] is not reached: it begins with step 5",))
    else:
        assert (reached, table.notes) == ([0, 90], ())
    assert table.tokens(table.steps - 1) < 100 <= table.tokens(table.steps)


def test_one_source_of_a_mixture_is_in_the_order_of_a_source() -> None:
    """Bit for bit, apart from the seed."""
    table = stage_table(config_of({"a": 5.0}), 1)
    taken = Mixture(table, {"a": 13}).taken(table.rows[0], np.arange(200))
    assert taken.unit.tolist() == list(range(200))
    assert not taken.piece.any()
    assert seed_of(3, "") == 3
    assert len({seed_of(seed, name) for seed in (0, 1) for name in ("a", "b", "")}) == 6


def test_the_order_in_the_file_does_not_matter() -> None:
    taken: list[list[int]] = []
    for names in ("abc", "cba"):
        table = stage_table(config_of(dict.fromkeys(names, 1.0)), 1)
        mixture = Mixture(table, {name: UNITS[name] for name in names})
        assert mixture.names == ("a", "b", "c")
        of = mixture.taken(table.rows[0], np.arange(160))
        taken.append([*of.source, *of.unit, *of.piece])
    assert taken[0] == taken[1]


EVEN = Stage(320, {"a": 1.0, "b": 1.0})


def trained(config: Config, step: int) -> Past:
    return past_of(stage_table(config, 1), step)


@pytest.mark.parametrize(
    ("weights", "stages", "wants"),
    [
        ((3, 1), (), "a stage from 320 tokens on, which was trained"),
        ((3, 1), (Stage(160, seq_len=8), EVEN), r"stage\[0\].from_tokens = 160\n.*at least 960"),
        ((3, 1), (Stage(352, {"a": 1.0, "b": 1.0}),), "a stage from 320 tokens on, which was trained"),
        ((1, 1), (EVEN,), r"data.mixture and training.*another stage from 0 tokens on, .* 3.* → .* 1"),
        # They would not be trained with, and the next resume would refuse them.
        ((3, 1), (Stage(320, {"a": 2.0, "b": 3.0}), Stage(960, {"a": 1.0, "b": 4.0})), "another stage from 320 tokens"),
    ],
)
def test_another_past_is_refused(weights: tuple[float, float], stages: tuple[Stage, ...], wants: str) -> None:
    past = trained(config_of({"a": 3, "b": 1}, (EVEN,)), 30)
    assert past.tokens == 960
    with pytest.raises(ConfigError, match=wants):
        stage_table(config_of(dict(zip("ab", weights, strict=True)), stages), 1, past)


def test_a_stage_that_is_refused_is_not_one_that_goes_on() -> None:
    past = trained(config_of({"a": 3, "b": 1}), 30)
    early, late = (config_of({"a": 1, "b": 1}, (Stage(at, {"a": 1.0, "b": 4.0}),)) for at in (160, 960))
    with pytest.raises(ConfigError, match=r"1 problem\n  data.stage\[0\].from_tokens = 160\n.*at least 960") as refused:
        stage_table(early, 1, past)
    assert "goes on" not in str(refused.value)
    with pytest.raises(ConfigError, match="change a stage that goes on: one from 960 tokens"):
        stage_table(late, 1, past)
    past = trained(config_of({"a": 3, "b": 1}, (EVEN,)), 30)
    with pytest.raises(ConfigError, match=r"3 problems(.|\n)*one from 320 tokens(.|\n)*from_tokens = 160\n"):
        stage_table(early, 1, past)  # what was trained from 320 tokens on is missing


def test_weights_of_the_stage_that_goes_on_may_change() -> None:
    past = trained(config_of({"a": 3, "b": 1}, (EVEN,)), 20)
    table = stage_table(config_of({"a": 3, "b": 1}, (Stage(320, {"a": 1.0, "b": 4.0}),)), 1, past)
    assert table.notes == ("from step 21 on, after 640 tokens: weights a 1, b 1 → a 1, b 4",)
    assert [row.from_step for row in table.rows] == [0, 10, 20]


def test_a_stage_that_a_resume_would_pass_over_is_refused() -> None:
    """As at a fresh start; else the next resume would miss it in what was trained."""
    config = config_of({"a": 1.0}, batch=3, seq_len=10)
    past = trained(config, 3)
    assert past.tokens == 90
    two = replace(config, data=replace(config.data, stage=(Stage(85, seq_len=10), Stage(90, global_batch_size=6))))
    for before in (past, None):
        with pytest.raises(ConfigError, match=r"stage\[1\].from_tokens = 90\n.*at least a step, of 30 tokens"):
            stage_table(two, 1, before)


def test_sources_that_are_gone_through_five_times_are_named_unless_they_say_how_often_they_may() -> None:
    config = config_of(dict.fromkeys("abcd", 1.0))
    *others, last = config.data.mixture
    config = replace(config, data=replace(config.data, mixture=(*others, replace(last, max_epochs=1e6))))
    units = {"a": 8, "b": 9, "c": None, "d": 1}  # of each 40 samples are trained on
    (text,) = many_epochs(config, stage_table(config, 1), units)
    assert text.startswith("data.mixture[0].source = ")
    assert ": 5 epochs in 40 steps" in text
