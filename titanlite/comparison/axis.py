"""Choose the limits of an axis by the values that matter, not by the largest.

A training loss begins at 12 and ends at 3, and an axis from 0 to 12 would show no difference between two runs. So the
first 2 % of the run do not count, and of the rest the 1st to the 95th percentile is shown, and what is beyond these if
it adds no more than half of their range at its end. `page/fit.js` has the same rule for the page.
"""

import math
from collections.abc import Sequence

import numpy as np

from titanlite.comparison.curves import Values

_START = 0.02  # of the run, which does not count
_LOW, _HIGH, _MORE = 0.01, 0.95, 0.5
_FEW = 50  # values, up to which all are shown
_MARGIN = 0.05


def fitted_limits(lines: Sequence[tuple[Values, Values]], left: float, right: float, end: float) -> tuple[float, float]:
    """Return the lower and upper limit of an axis.

    Args:
        lines: x and y of each line, [n]; NaN where there is no value.
        left: the least x that is visible.
        right: the greatest.
        end: the greatest x of all lines.
    """
    after = _START * end if right > 2 * _START * end else -math.inf
    shown = [y[(x >= max(left, after)) & (x <= right) & np.isfinite(y)] for x, y in lines]
    values = np.sort(np.concatenate(shown)) if shown else np.array([])
    if not len(values):
        return (0.0, 1.0)
    low, high = float(values[0]), float(values[-1])
    if len(values) > _FEW:
        some, most = (float(values[math.floor(share * (len(values) - 1))]) for share in (_LOW, _HIGH))
        room = _MORE * (most - some)
        low, high = (low if some - low <= room else some), (high if high - most <= room else most)
    margin = _MARGIN * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin
