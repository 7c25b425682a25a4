"""The one interface by which a run tells what happens to whatever shows or keeps it."""

from collections.abc import Mapping, Sequence


class Observer:
    """A console, a file or a page that is told of a run as it goes on; each takes what concerns it."""

    def write(self, row: Mapping[str, float]) -> None:
        """Take a row that is logged."""

    def progress(self, step: int) -> None:
        """Take that a step is done, whether it is logged or not."""

    def experts(self, step: int, tokens: int, experts: Mapping[str, Sequence[int]]) -> None:
        """Take, by layer, the tokens of each expert since the last call, up to `step` and `tokens` in all."""

    def sync(self) -> None:
        """Return when all that was taken is on disk: a checkpoint will rely on it."""

    def close(self, has_failed: bool = False) -> None:
        """Take that the run has ended, and close what is open."""
