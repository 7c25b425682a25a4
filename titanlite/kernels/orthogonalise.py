"""Compute the nearest matrix with orthonormal rows or columns by polynomials, that is, by matmuls alone.

With X = U S Vᵀ, an odd polynomial p(x) = a x + b x³ + c x⁵ of X is U p(S) Vᵀ = P X, where P = a + b G + c G G is a
polynomial of the symmetric G = X Xᵀ. A few such polynomials, applied one after the other, move each singular value in
(0, 1] near 1. All P and G of one X commute. So two steps need only G, [R, R], and not X, [R, C] with R ≤ C:

    G = X Xᵀ
    Q ← P Q;  G ← (P G) P        [R, R], symmetric: half of each product is computed
    X ← Q X

The eigenvalues of G are the squares of the singular values. Rounding loses the smallest: G of a matrix of low rank gets
negative eigenvalues, which the polynomials enlarge. So each row's rounding error is added on the diagonal. Two steps in
float16 are then more exact than a new G in each step in bfloat16, whatever the singular values are. A third step with
the same G makes gradients of an 8B model infinite: rounded matrices do not quite commute, so a product is not quite
symmetric, and computing only half of it errs by more than the rounding (`tests/unit/kernels/test_orthogonalise.py`).

The products need R ≤ C. A tall matrix is transposed while it is converted to float16 (float32 on a CPU), and back while
the result is written (`scaled_copy.py`).

Sources:

- Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks": one quintic with a steep slope at 0,
  applied five times. Singular values in [0.01, 1] end between 0.68 and 1.14.
- Amsel, Persson, Musco and Gower 2025, "The Polar Express: Optimal Matrix Sign Methods and Their Application to the
  Muon Algorithm", algorithm 1: each step has the best quintic for the interval to which earlier steps map [0.001, 1].
  The first five are used. Each divides its argument by 1.01, as rounding may push values above 1. Singular values in
  [0.001, 1] end between 0.84 and 1.13.
"""

import torch
from torch import Tensor

from titanlite.kernels.scaled_copy import scaled_copy
from titanlite.kernels.symmetric_product import symmetric_product

Polynomials = tuple[tuple[float, float, float], ...]
"""Coefficients a, b, c of each step."""

_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)

ITERATIONS: dict[str, Polynomials] = {
    "newton_schulz": ((3.4445, -4.7750, 2.0315),) * 5,
    "polar_express": tuple((a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in _POLAR_EXPRESS),
}
"""Published sequences, by name."""

STEPS_OF_GRAM = 2
"""Maximum number of steps that one G serves, before X is updated and gives a new G."""
INSIDE = {"cuda": torch.float16}
"""By device type, the dtype in which bfloat16 matrices are multiplied. Other devices take float32: CPUs are slow in
float16. On one thread of an EPYC four products X X of 256 × 256 matrices took 101 ms in float16 and 2.2 ms in float32,
X Xᵀ 21 and 2.5 ms; four steps of `configs/debug.toml` with `muon` took 16.6 s and 5.8 s of a processor."""
_UNIT = 2.0**12
"""X and G are stored times this factor: large matrices have small elements, and float16 no numbers below 6e-8."""


def orthogonalise(x: Tensor, polynomials: Polynomials, eps: float = 1e-7, out: Tensor | None = None) -> Tensor:
    """Move the singular values of B matrices near 1. Return [B, R, C], in the dtype of `x`.

    Args:
        x: [B, R, C].
        polynomials: applied one after the other.
        eps: least norm by which a matrix is divided, so that a zero matrix remains zero.
        out: receives the result; may be `x` itself. None: new memory.
    """
    out = x.new_empty(x.shape) if out is None else out
    wide, result = (x.mT, out.mT) if x.shape[1] > x.shape[2] else (x, out)
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    inside = INSIDE.get(x.device.type, torch.float32) if x.dtype == torch.bfloat16 else x.dtype
    y = scaled_copy(wide, x.new_empty(wide.shape, dtype=inside), _UNIT, norm, eps)
    for first in range(0, len(polynomials), STEPS_OF_GRAM):
        y = _factor(y, polynomials[first : first + STEPS_OF_GRAM]) @ y
    scaled_copy(y, result, 1 / _UNIT)
    return out


def _factor(x: Tensor, polynomials: Polynomials) -> Tensor:
    """Return Q, [B, R, R], the product of the matrices P of all polynomials for X, [B, R, C]."""
    gram, product = symmetric_product(x, alpha=1 / _UNIT), None
    if x.dtype == torch.float16:  # add the rounding error, so that no eigenvalue is below 0
        rows = torch.linalg.vector_norm(gram, dim=2, dtype=torch.float32)
        gram.diagonal(dim1=1, dim2=2).add_(rows, alpha=torch.finfo(gram.dtype).eps / 2)
    for i, (a, b, c) in enumerate(polynomials):
        p = symmetric_product(gram, added=gram, alpha=c / _UNIT**2, beta=b / _UNIT, diagonal=a)
        product = p if product is None else symmetric_product(p, product)
        if i + 1 < len(polynomials):
            gram = symmetric_product(symmetric_product(p, gram), p)
    assert product is not None  # noqa: S101
    return product


def orthogonalise_flops(rows: int, columns: int, steps: int) -> int:
    """Return the floating-point operations to orthogonalise one matrix. Symmetric products count in full."""
    short, long = sorted((rows, columns))
    times = -(-steps // STEPS_OF_GRAM)
    # Each step computes G G; all but the last before X is updated also P G and (P G) P; all but the first also P Q.
    return times * 4 * short * short * long + (steps + 3 * (steps - times)) * 2 * short**3
