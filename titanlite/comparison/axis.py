"""Choose the limits of a chart's y axis such that a few extreme values do not hide the differences between the rest.

A training loss may begin at 12 and end at 3, and an axis from 0 to 12 would show no difference between two runs. So the
first 2 % of the run are ignored, and the axis covers the 1st to the 95th percentile of the other values. At each end it
also covers the values beyond, if they add no more than half of that range. `page/fit.js` does the same in the report.
"""

import math
from collections.abc import Sequence

import numpy as np

from titanlite.comparison.curves import Values

_START = 0.02  # share of the run, from its beginning, that is ignored
_LOW, _HIGH, _MORE = 0.01, 0.95, 0.5
_FEW = 50  # up to this number of values, all are shown
_MARGIN = 0.05


def fitted_limits(lines: Sequence[tuple[Values, Values]], left: float, right: float, end: float) -> tuple[float, float]:
    """Return the lower and upper limit of the y axis.

    Args:
        lines: x and y of each line, [n]; NaN where there is no value.
        left: least visible x.
        right: greatest visible x.
        end: greatest x of all lines.
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
