"""The verdict on one run and the first, as the report and the picture take it."""

from dataclasses import dataclass

from titanlite.comparison.curves import Values


@dataclass(frozen=True)
class Verdict:
    """How the loss of one run differs from that of the first.

    Attributes:
        run: the name of the run that is compared with the first.
        kind: "equal bits", "within rounding", "within seed noise", "within tolerance", "no difference shown" or
            "differs".
        line: the verdict in one line, as the command prints it.
        mean_difference: its loss less that of the first, in nats per token.
        low: the lower end of the mean's interval; -inf for too few steps, NaN where there is no mean.
        high: the upper end of it; inf or NaN likewise.
        tokens: how many the runs had trained on where the mean was taken.
        band: tokens trained on, [n], ascending, and the difference in loss within which rounding is taken to be the
            cause, [n] nats per token; None where it is not known.
        is_short: whether one of the two has ended before the last step of its config, so that less was compared.
    """

    run: str
    kind: str
    line: str
    mean_difference: float
    low: float
    high: float
    tokens: int
    band: tuple[Values, Values] | None = None
    is_short: bool = False

    @property
    def passes(self) -> bool:
        """Return whether the run can be taken for the first as far as both were to go."""
        return self.kind != "differs" and not self.is_short
