"""Define the interface through which a run reports its events to all consoles, files and pages that show them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Sample(NamedTuple):
    """A text that the model has continued.

    Attributes:
        prompt: the text of `validation.samples`.
        text: what the model has added.
    """

    prompt: str
    text: str


class Observer:
    """Base of consoles, files and pages that receive a run's events. A method that is not overridden does nothing."""

    def write(self, row: Mapping[str, float]) -> None:
        """Receive a logged row of metrics, by key."""

    def progress(self, step: int) -> None:
        """Receive the number of a finished step, whether the step is logged or not."""

    def experts(self, step: int, tokens: int, experts: Mapping[str, Sequence[int]]) -> None:
        """Receive each expert's tokens since the last call, by layer. `tokens`: all tokens trained on up to `step`."""

    def samples(self, step: int, tokens: int, samples: Sequence[Sample]) -> None:
        """Take the samples of the model after `step`, trained on `tokens` tokens."""

    def sync(self) -> None:
        """Return once everything received is on disk. Called before a checkpoint is published."""

    def close(self, has_failed: bool = False) -> None:
        """Close files and processes at the end of the run. `has_failed`: the run ended with an error."""
