"""What some tests need and not every run of the tests has: something of torch's, or time."""

from typing import Any

import numpy as np
import pytest
import torch


def _scales_by_row() -> bool:
    x, ones = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(x, x.t(), ones, ones.t(), out_dtype=torch.bfloat16)
    except RuntimeError as error:
        if "_scaled_mm only support" not in str(error):
            raise
        return False
    return True


SCALES_BY_ROW = pytest.mark.skipif(not _scales_by_row(), reason="this torch multiplies by no scales by row on CPUs")
DOUBLE_ATTENTION = pytest.mark.skipif(
    torch.__version__ < "2.12.0a0", reason="this torch's compiler loses float64 in the gradient of attention on CPUs"
)
LOOPS_BY_INTERPRETER = pytest.mark.skipif(
    torch.__version__ < "2.12.0a0" and np.lib.NumpyVersion(np.__version__) >= "2.4.0",
    reason="Triton 3.6, which torch 2.11 brings, interprets no loop to an argument under numpy 2.4",
)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def slow(*cases: Any) -> list[Any]:
    """Parameters that cost seconds and show for another value what those beside them show: `pytest -m slow` has them.

    Args:
        cases: of one parameter, or a tuple for each of several.
    """
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]
