"""The errors that titanlite raises on purpose, and their messages.

A message has four parts: where, what was seen, what is wanted, and the change that fixes it (`Problem`). The user can
fix a `TitanliteError`: the command line prints it without a traceback and exits with 2. Any other error is a bug.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Self, TypeVar

T = TypeVar("T")
_LONGEST, _MOST = 2_000, 100  # characters per part, and problems per source, in a message


class TitanliteError(Exception):
    """Base of all errors raised on purpose. Each argument is a message: from `describe` about one source, or a text."""

    @classmethod
    def of(cls, source: str, where: str, saw: str, want: str, fix: str) -> Self:
        """Make an error with one problem of `source`, such as a file; the other arguments are fields of `Problem`."""
        return cls(describe(source, [Problem(where, saw, want, fix)]))

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


class ConfigError(TitanliteError):
    """The config asks for something unknown or impossible. Raised before any device is touched."""


class RecipeError(ConfigError):
    """A recipe, such as for float8 or a save-list, is missing, malformed, or cannot be used in this run."""


class ShardingError(ConfigError):
    """The model cannot be sharded by the annotations of its layers and the configured degrees of parallelism."""


class DataError(TitanliteError):
    """A source, record, token shard or tokenizer cannot be used."""


class HubError(DataError):
    """A model or tokenizer of the Hugging Face hub cannot be fetched, or a folder cannot be pushed to it."""


class NoMoreDataError(DataError):
    """A source has no more data. The tokens read so far are valid, and so are the weights trained on them."""


class CheckpointError(TitanliteError):
    """A checkpoint is missing, incomplete, damaged, or belongs to another run."""


class StepError(TitanliteError):
    """A training step gave a result, such as a loss that is not finite, which must not reach the weights."""


class OutOfMemoryError(TitanliteError):
    """The device has too little memory for the run."""


class FolderLostError(TitanliteError):
    """Another job has taken the run's folder."""


class RunFailedError(TitanliteError):
    """A run that was started from Python has failed."""


class StrictError(TitanliteError):
    """A request of the config was not applied, and `job.strict` is on."""


class Problem(NamedTuple):
    """One thing wrong with a file or a command line."""

    where: str  # dotted key, e.g. "parallelism.tensor_parallel_degree"
    saw: str  # the value, as the user wrote it; "" if there is no value
    want: str
    fix: str
    line: int | None = None  # line of the value in its file; None for a flag or a default

    def __str__(self) -> str:
        place = f"line {self.line}  " if self.line is not None else ""
        where, saw, want, fix = map(_shown, (self.where.replace("\n", r"\n"), self.saw, self.want, self.fix))
        return f"{place}{where}{f' = {saw}' if saw else ''}\n    want: {want}\n    fix:  {fix}"


def _shown(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text):,} characters)"


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice that `word` was probably meant to be, ignoring case; None if no choice is similar.

    A word of three letters may lack a letter ("ful" for "full"), a word of two may not ("7B" is not "70B"), and one of
    four may not lack a letter and have a wrong one ("test" is not "texts"). A number in the word must be the same in
    the choice, unless the choice has none ("llama4").
    """
    import difflib  # imported here: the guard process of each rank does not need it

    number = re.sub(r"\D", "", word)
    spelling = {c.lower(): c for c in choices if not number or re.sub(r"\D", "", c) in ("", number)}
    cutoff = 0.6 if len(word) > 4 else 0.7 if len(word) > 3 else 0.85
    near = difflib.get_close_matches(word.lower(), spelling, n=1, cutoff=cutoff)
    return spelling[near[0]] if near else None


class ErrorReport(str):
    """The message about one source, with the source and its problems, so that several reports can be merged."""

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


class Together:
    """Runs checks that do not depend on each other, and raises their errors as one."""

    def __init__(self) -> None:
        self.errors: list[TitanliteError] = []

    def attempt(self, check: Callable[[], T]) -> T | None:
        """Return the result of a check, or None if it fails."""
        try:
            return check()
        except TitanliteError as error:
            self.errors.append(error)
            return None

    def raise_all(self) -> None:
        """Raise a single error as it is, several as one ConfigError: a report for each source, then other messages."""
        if len(self.errors) == 1:
            raise self.errors[0]
        by_source: dict[str, list[Problem]] = {}
        others: list[object] = []
        for message in (message for error in self.errors for message in error.args):
            if isinstance(message, ErrorReport):
                by_source.setdefault(message.source, []).extend(message.problems)
            else:
                others.append(message)
        if self.errors:
            raise ConfigError(*(describe(source, found) for source, found in by_source.items()), *others)
