"""The errors that titanlite raises on purpose, and their messages.

A message has four parts: where, what was seen, what is wanted, and the change that fixes it (`Problem`). The user can
fix a `TitanliteError`: the command line prints it without a traceback and exits with 2. Any other error is a bug.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

_LONGEST, _MOST = 2_000, 100  # characters of a part, and problems of a source, that a message shows


class TitanliteError(Exception):
    """Base of all errors raised on purpose; its arguments are messages of `describe`, one for each source."""

    @classmethod
    def of(cls, source: str, where: str, saw: str, want: str, fix: str) -> Self:
        """Make the error of one problem of a source, whose four parts are those of `Problem`."""
        return cls(describe(source, [Problem(where, saw, want, fix)]))

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


class ConfigError(TitanliteError):
    """The config asks for something unknown or impossible. Raised before any device is touched."""


class RecipeError(ConfigError):
    """A float8 recipe or a save-list is missing, malformed or not legal here."""


class ShardingError(ConfigError):
    """Annotations, degrees and model do not make a sharding plan."""


class DataError(TitanliteError):
    """A source, record, token shard or tokenizer cannot be used."""


class NoMoreDataError(DataError):
    """A source has no more data; tokens read so far are right, and so are the weights."""


class CheckpointError(TitanliteError):
    """A checkpoint is missing, incomplete, damaged or of another run."""


class StepError(TitanliteError):
    """A training step gave a result that must not reach the weights."""


class OutOfMemoryError(TitanliteError):
    """The device has no room for the run."""


class FolderLostError(TitanliteError):
    """Another job has taken the run's folder."""


class StrictError(TitanliteError):
    """A request of the config was not applied, and `job.strict` is on."""


class Problem(NamedTuple):
    """One thing wrong with a file or a command line."""

    where: str  # dotted key, e.g. "parallelism.tensor_parallel_degree"
    saw: str  # the value, as the user wrote it; "" where there is none to show
    want: str
    fix: str
    line: int | None = None  # in the file it came from; None for a flag or a default

    def __str__(self) -> str:
        place = f"line {self.line}  " if self.line is not None else ""
        where, saw, want, fix = map(_shown, (self.where.replace("\n", r"\n"), self.saw, self.want, self.fix))
        return f"{place}{where}{f' = {saw}' if saw else ''}\n    want: {want}\n    fix:  {fix}"


def _shown(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text):,} characters)"


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice that was probably meant, whatever its case; None if none is near.

    One letter of a short word may differ ("ful"), no letter of one with two ("7B", "70B"), and no number ("llama4").
    """
    import difflib  # here, as the process beside each rank does not need it

    number = re.sub(r"\D", "", word)
    spelling = {c.lower(): c for c in choices if not number or re.sub(r"\D", "", c) in ("", number)}
    near = difflib.get_close_matches(word.lower(), spelling, n=1, cutoff=0.6 if len(word) > 3 else 0.85)
    return spelling[near[0]] if near else None


class ErrorReport(str):
    """The message about one source, with its parts, so that reports of several checks can be merged."""

    source: str
    problems: tuple[Problem, ...]


def describe(source: str, problems: Sequence[Problem]) -> ErrorReport:
    """Format the problems of one source: a headline, and four parts per problem."""
    noun = "problem" if len(problems) == 1 else "problems"
    body = "\n  ".join(str(p).replace("\n", "\n  ") for p in problems[:_MOST])
    if len(problems) > _MOST:
        body += f"\n  and {len(problems) - _MOST:,} more"
    report = ErrorReport(f"{source}: {len(problems)} {noun}\n  {body}")
    report.source, report.problems = source, tuple(problems)
    return report
