"""The verdict on one run and the first, as the report and the picture take it."""

import math
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
        low: the lower end of the interval of its mean loss less the first's, in nats per token; -inf for too few steps,
            NaN where there is no mean.
        high: the upper end of it; inf or NaN likewise.
        band: tokens trained on, [n], ascending, and the difference in loss within which rounding is taken to be the
            cause, [n] nats per token; None where it is not known.
        is_short: whether one of the two has ended before the last step of its config, so that less was compared.
    """

    run: str
    kind: str
    line: str
    low: float = math.nan
    high: float = math.nan
    band: tuple[Values, Values] | None = None
    is_short: bool = False

    @property
    def passes(self) -> bool:
        """Return whether the run can be taken for the first as far as both were to go."""
        return self.kind != "differs" and not self.is_short
