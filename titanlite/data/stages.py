"""The stage table of a run: the length, number and source weights of the sequences in each step.

A row of the table begins with a certain step. A checkpoint stores the rows that training has reached; later rows follow
from the config. So a run that continues with other weights, or another batch size, adds a row at its next step and does
not change the past rows. A config is refused if its past stages differ from what was trained.

A stage begins with the first step before which `from_tokens` tokens were trained. This module does not import torch.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from titanlite.config.schema import Config
from titanlite.config.stages import AskedStage, asked_stages, longest_seq_len
from titanlite.errors import ConfigError, Problem, describe


@dataclass(frozen=True)
class StageRow:
    """A row of the stage table: the stage of all steps from one step up to the next row."""

    from_step: int  # steps done before the row begins
    from_sample: int  # sequences trained on before the row begins
    from_tokens: int  # tokens trained on before the row begins
    asked: AskedStage  # the stage in the config; for a past row, in the config of that time

    def samples(self, step: int) -> int:
        """Return the number of sequences trained on up to a step of this row."""
        return self.from_sample + (step - self.from_step) * self.asked.sequences

    def tokens(self, step: int) -> int:
        """Return the number of tokens trained on up to a step of this row."""
        return self.from_tokens + (step - self.from_step) * self.asked.tokens_per_step

    def to_json(self) -> dict[str, Any]:
        """Return the row as a checkpoint stores it, without local batch size and learning rate."""
        asked = self.asked
        return {
            "from_step": self.from_step,
            "from_sample": self.from_sample,
            "from_tokens": self.from_tokens,
            "stage": asked.from_tokens,
            "seq_len": asked.seq_len,
            "sequences": asked.sequences,
            "weights": dict(asked.weights),
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "StageRow":
        """Make a row from its JSON object in a checkpoint."""
        asked = AskedStage(None, row["stage"], row["seq_len"], row["sequences"], 1, row["weights"])
        return cls(row["from_step"], row["from_sample"], row["from_tokens"], asked)


@dataclass(frozen=True)
class Past:
    """The part of a run that was trained before this start."""

    step: int = 0  # the last step trained
    samples: int = 0  # number of sequences trained on
    rows: tuple[StageRow, ...] = ()  # the rows of the stage table so far
    unit_len: int = 0  # as in `StageTable`; 0: nothing was trained

    @property
    def tokens(self) -> int:
        """Return the number of tokens trained on."""
        row = self.rows[-1] if self.rows else None
        return 0 if row is None else row.from_tokens + (self.samples - row.from_sample) * row.asked.seq_len


class StageTable:
    """The rows of a run, in order, and the row, samples and tokens of each step.

    Args:
        unit_len: tokens of the samples that sources are cut into: the longest seq_len of all stages, past ones too.
        notes: messages about stages that have changed or are not reached, a line each.
    """

    def __init__(self, rows: Sequence[StageRow], steps: int, unit_len: int, notes: Sequence[str]) -> None:
        self.rows, self.steps, self.unit_len, self.notes = tuple(rows), steps, unit_len, tuple(notes)
        self._from_step = [row.from_step for row in rows]
        self.first_steps = frozenset(row.from_step + 1 for row in rows)

    def row(self, step: int) -> StageRow:
        """Return the row of a step; the first step is 1."""
        return self.rows[max(0, bisect_right(self._from_step, step - 1) - 1)]

    def samples(self, step: int) -> int:
        """Return the number of sequences trained on, over all ranks, up to and including a step."""
        return self.row(step + 1).samples(step)

    def tokens(self, step: int) -> int:
        """Return the number of tokens trained on, over all ranks, up to and including a step."""
        return self.row(step + 1).tokens(step)

    def past(self, step: int) -> list[dict[str, Any]]:
        """Return the rows that training has reached after a step, as a checkpoint stores them."""
        return [row.to_json() for row in self.rows if row.from_step < max(step, 1)]


def stage_table(config: Config, world_size: int | None, past: Past | None = None) -> StageTable:
    """Make the stage table for a start of a run: the past rows as they were trained, and later rows from the config.

    `world_size`: number of processes; None: the fewest possible. `past`: what the loaded checkpoint has trained.

    Raises:
        ConfigError: past stages of the config differ from what was trained, or a stage is shorter than a step.
    """
    asked, past = asked_stages(config, world_size), past or Past()
    rows, notes = list(past.rows), list[str]()
    unit_len = max(past.unit_len, longest_seq_len(config))
    if rows:
        _check_past(config, asked, past)
    step, samples, tokens = past.step, past.samples, past.tokens
    now = max(n for n, stage in enumerate(asked) if stage.from_tokens <= tokens)
    before = rows[-1].asked if rows else None
    if before is not None and before.from_tokens == asked[now].from_tokens and _takes_same(before, asked[now]):
        rows[-1] = replace(rows[-1], asked=asked[now])
    else:
        rows.append(StageRow(step, samples, tokens, asked[now]))
        if before is not None and before.from_tokens == asked[now].from_tokens:
            notes.append(f"from step {step + 1} on, after {tokens:,} tokens: {_difference(before, asked[now])}")
    for stage in asked[now + 1 :]:
        row = rows[-1]
        start = max(row.from_step, step)
        begins = start + -(-(stage.from_tokens - row.tokens(start)) // row.asked.tokens_per_step)
        if begins <= start:
            raise ConfigError(describe("data.stage", [_without_step(stage, row.asked)]))
        rows.append(StageRow(begins, row.samples(begins), row.tokens(begins), stage))
    end, reached = config.training.tokens, list[StageRow]()
    for row in rows:
        if row.from_step <= past.step or (row.from_tokens < end if end else row.from_step < config.training.steps):
            reached.append(row)
        else:
            notes.append(f"data.stage[{row.asked.at}] is not reached: it begins with step {row.from_step + 1}")
    steps, last = config.training.steps, reached[-1]
    if end:
        left = -(-(end - last.from_tokens) // last.asked.tokens_per_step)
        steps = max(past.step, last.from_step + left, 1)
    return StageTable(reached, steps, unit_len, notes)


def _check_past(config: Config, asked: Sequence[AskedStage], past: Past) -> None:
    """Raise a ConfigError if past stages of the config differ from what was trained."""
    last, problems = past.rows[-1], list[Problem]()
    tokens = past.tokens
    trained = {row.asked.from_tokens: row.asked for row in past.rows}  # the last row of each stage
    by_start = {stage.from_tokens: stage for stage in asked}
    done = tokens - last.asked.tokens_per_step if past.samples > last.from_sample else tokens
    too_early = [start for start in by_start if start not in trained and start <= done]
    goes_on = max(start for start in (*by_start, *trained) if start <= tokens and start not in too_early)
    for start, was in trained.items():
        stage = by_start.get(start)
        if stage is None:
            want = f"a stage from {start:,} tokens on, which was trained; {tokens:,} tokens are behind"
            problems.append(Problem("data.stage", "no such stage", want, f"from_tokens = {start}, as before"))
        elif start != goes_on and not _takes_same(was, stage, is_past=True):
            where = "data.mixture and training" if stage.at is None else f"data.stage[{stage.at}]"
            saw = f"another stage from {start:,} tokens on, {_difference(was, stage)}"
            want = f"what was trained, for {tokens:,} tokens are behind"
            fix = f"change a stage that goes on: one from {goes_on} tokens, or from {tokens} tokens on"
            problems.append(Problem(where, saw, want, fix))
    for start in too_early:
        where, fix = f"data.stage[{by_start[start].at}].from_tokens", f"from_tokens = {tokens}"
        want = f"at least {tokens}, the tokens that are behind: the past cannot be trained otherwise"
        problems.append(Problem(where, str(start), want, fix))
    new = [stage for start, stage in by_start.items() if start not in trained and done < start <= tokens]
    problems += [_without_step(stage, passed) for passed, stage in pairwise(new)]
    if problems:
        raise ConfigError(describe("data.stage", problems))


def _without_step(stage: AskedStage, before: AskedStage) -> Problem:
    want = f"at least a step, of {before.tokens_per_step:,} tokens, after the stage before it begins"
    return Problem(f"data.stage[{stage.at}].from_tokens", str(stage.from_tokens), want, "a larger from_tokens")


def _takes_same(a: AskedStage, b: AskedStage, is_past: bool = False) -> bool:
    """Return whether two stages train on the same samples; with `is_past`, the sequences per step may differ."""
    return a.seq_len == b.seq_len and a.shares == b.shares and (is_past or a.sequences == b.sequences)


def _difference(before: AskedStage, after: AskedStage) -> str:
    found: list[str] = []
    if before.seq_len != after.seq_len:
        found.append(f"seq_len {before.seq_len} → {after.seq_len}")
    if before.sequences != after.sequences:
        found.append(f"sequences per step {before.sequences} → {after.sequences}")
    if before.shares != after.shares:
        found.append(f"weights {weights_in_words(before)} → {weights_in_words(after)}")
    return ", ".join(found)


def weights_in_words(stage: AskedStage) -> str:
    """Return the weights of a stage as text: `web 0.7, code 0.3`; for a single source, `data.source`."""
    shown = {name: text.removesuffix(".0") for name, text in stage.weights.items()}
    return ", ".join(f"{name} {text}" if name else "data.source" for name, text in shown.items())
