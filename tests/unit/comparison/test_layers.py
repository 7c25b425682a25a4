"""The first tensor in which sketches part."""

import numpy as np
import torch

from titanlite.comparison.layers import Sketches, first_parting
from titanlite.training.sketch_steps import _sketch

SUMS = 16


def sketches(**changed: float) -> Sketches:
    """Three tensors in two steps; a changed one by a share of itself, as `b_2=0.1` of `b` in step 2."""
    ones = np.ones(SUMS)
    return {f"{step} {name}": ones * (1 + changed.get(f"{name}_{step}", 0.0)) for step in (1, 2) for name in "abc"}


def test_one_noisy_tensor_does_not_hide_the_others() -> None:
    found = first_parting(sketches(), sketches(a_1=0.5, b_2=0.01, c_2=0.01), sketches(a_1=0.5))
    assert found is not None
    assert (found.step, found.tensor, found.others) == (2, "b", 1)


def test_what_a_nudge_made_of_a_tensor_before_is_its_rounding_later() -> None:
    assert first_parting(sketches(), sketches(a_2=0.3), sketches(a_1=0.1)) is None
    assert first_parting(sketches(), sketches(a_2=0.6), sketches(a_1=0.1)) is not None


def test_a_transposed_square_matrix_has_another_sketch() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    sketch, of_transposed = (_sketch(matrix, torch.arange(len(matrix))) for matrix in (x, x.T))
    assert (sketch - of_transposed).norm() > 0.5 * sketch.norm()


def test_a_sketch_is_the_sum_of_those_of_its_rows() -> None:
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    places = torch.arange(len(x))
    parts = _sketch(x[:7], places[:7]) + _sketch(x[7:], places[7:])
    torch.testing.assert_close(parts, _sketch(x, places))
