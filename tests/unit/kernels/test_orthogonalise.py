"""Polynomials of matrices against the same of their singular values."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.support.needs import DEVICES
from titanlite.kernels.orthogonalise import INSIDE, ITERATIONS, Polynomials, orthogonalise, orthogonalise_flops

SHAPES = [(24, 40), (40, 24), (32, 32), (1, 7)]


def of_numbers(x: Tensor, polynomials: Polynomials) -> Tensor:
    for a, b, c in polynomials:
        x = a * x + b * x**3 + c * x**5
    return x


def steepest(polynomials: Polynomials) -> float:
    """The largest factor by which they move a difference of matrices: that of numbers between 0 and 1."""
    x = torch.linspace(0, 1, 100_001, dtype=torch.float64, requires_grad=True)
    (slopes,) = torch.autograd.grad(of_numbers(x, polynomials).sum(), x)
    return slopes.abs().max().item()


def matrices(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Three of [R, C], whose sizes differ a lot."""
    x = torch.randn(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return (x * torch.tensor([1e-3, 1.0, 1e4], dtype=torch.float64)[:, None, None]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ITERATIONS)
def test_singular_values_are_moved_and_vectors_stay(name, shape, dtype):
    x, polynomials = matrices(shape, dtype), ITERATIONS[name]
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    s /= s.norm(dim=1, keepdim=True)
    truth = u @ torch.diag_embed(of_numbers(s, polynomials)) @ vh
    ours = orthogonalise(x, polynomials)
    assert ours.shape == x.shape
    assert ours.dtype == dtype
    # The bound is that of the plain iteration: a matrix of norm 1 is rounded once; then in each step X Xᵀ, the
    # polynomial of it and the product, each relative to a norm that has grown to that of the result. What a step rounds
    # is moved by those after it. Steps without X are held to the same; a CPU multiplies bfloat16 in float32, and rounds
    # the result once.
    grown, rounding, left = 1.0, 0.0, polynomials
    while left:
        rounding += 3 * grown * steepest(left)
        grown, left = of_numbers(s, polynomials[: len(polynomials) - len(left) + 1]).norm(dim=1).max().item(), left[1:]
    inside = torch.float32 if dtype == torch.bfloat16 else dtype
    bound = torch.finfo(inside).eps * (rounding + 3 * grown) + torch.finfo(dtype).eps / 2 * grown
    error = torch.linalg.matrix_norm(ours.double() - truth)
    assert (error <= bound).all(), (error, bound)


@pytest.mark.parametrize(
    ("name", "start", "least", "most"), [("newton_schulz", 0.01, 0.68, 1.14), ("polar_express", 0.001, 0.84, 1.13)]
)
def test_values_end_near_one(name, start, least, most):
    y = of_numbers(torch.linspace(start, 1, 100_001, dtype=torch.float64), ITERATIONS[name])
    assert least <= y.min() <= least + 0.02
    assert most - 0.02 <= y.max() <= most


def plain_bfloat16(x: Tensor, polynomials: Polynomials) -> Tensor:
    """Take a new X Xᵀ in each step, all rounded to bfloat16, as the field does."""
    y = (x / x.norm()).bfloat16()
    for a, b, c in polynomials:
        gram = y @ y.mT
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y


def uneven(kind: str, rows: int, columns: int) -> Tensor:
    """Make a matrix of few or many large singular values, as gradients have them."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    if kind.startswith("rank"):
        rank = int(kind.removeprefix("rank "))
        return normal(rows, rank) @ normal(rank, columns) + 1e-4 * normal(rows, columns)
    if kind == "one number":
        x = 1e-3 * normal(rows, columns)
        x[3, 5] = 1
        return x
    if kind == "rows and columns":
        return normal(rows, columns) * torch.logspace(0, -4, rows)[:, None] * torch.logspace(0, -3, columns)
    u, v = (torch.linalg.qr(normal(n, rows)).Q for n in (rows, columns))
    if kind == "one and many":
        s = torch.full((rows,), 0.7 / math.sqrt(rows), dtype=torch.float64)
        s[0] = 1
    elif kind == "one over i":
        s = 1 / torch.arange(1, rows + 1, dtype=torch.float64)
    else:
        s = torch.logspace(0, math.log10(float(kind)), rows, dtype=torch.float64)
    return (u * s) @ v.mT


UNEVEN = ["1", "1e-1", "1e-2", "1e-3", "1e-6", "rank 1", "rank 8", "one number", "rows and columns"]
UNEVEN += ["one and many", "one over i"]  # three steps without the matrix diverge


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", UNEVEN)
@pytest.mark.parametrize("name", ITERATIONS)
def test_a_large_matrix_is_rounded_less_than_by_bfloat16(name, kind, device, monkeypatch):
    """A number: that of the smallest singular value, the largest is 1. The matrix itself is one of bfloat16."""
    monkeypatch.setitem(INSIDE, "cpu", torch.float16)  # as a GPU multiplies it
    x = uneven(kind, 192, 512).bfloat16()
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    truth = (u * of_numbers(s / s.norm(), ITERATIONS[name])) @ vh
    ours, theirs = orthogonalise(x[None].to(device), ITERATIONS[name])[0].cpu(), plain_bfloat16(x, ITERATIONS[name])
    errors = [((y.double() - truth).norm() / truth.norm()).item() for y in (ours, theirs)]
    assert errors[0] < 0.9 * errors[1], errors


LARGE = list(product(["rank 1", "rank 8", "one number", "rows and columns"], [(4096, 14336), (14336, 4096)]))
LARGE += [("one and many", (2048, 4096)), ("one over i", (2048, 4096))]


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "shape"), LARGE)
def test_large_matrices_stay_finite(kind, shape):
    """No singular value leaves what the polynomials take numbers to, 1.13: seen by a power iteration."""
    x = uneven(kind, *shape).bfloat16().cuda()[None]
    y = orthogonalise(x, ITERATIONS["polar_express"])[0].float()
    v = torch.randn(shape[1], 1, generator=torch.Generator().manual_seed(0)).cuda()
    for _ in range(50):
        v = y.mT @ (y @ (v / v.norm()))
    assert v.norm().sqrt() < 1.15


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_zeros_stay_zeros(dtype):
    x = torch.zeros(2, 4, 6, dtype=dtype)
    x[1] = 1
    ours = orthogonalise(x, ITERATIONS["polar_express"])
    assert not ours[0].any()
    assert ours[1].all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [*SHAPES, (200, 72)])
def test_the_result_may_take_the_place_of_the_matrices(shape, dtype, device):
    whole = torch.ones(16 + 3 * math.prod(shape) + 5, dtype=dtype, device=device)
    x = whole[16:-5].view(3, *shape).copy_(matrices(shape, dtype))
    wanted = orthogonalise(x, ITERATIONS["polar_express"])
    assert wanted.is_contiguous()
    assert not torch.equal(x, wanted)
    assert orthogonalise(x, ITERATIONS["polar_express"], out=x) is x
    assert torch.equal(x, wanted)
    assert (torch.cat((whole[:16], whole[-5:])) == 1).all()


def test_operations_of_a_matrix_are_those_of_its_products():
    from torch.utils.flop_counter import FlopCounterMode

    for shape in SHAPES:
        with FlopCounterMode(display=False) as counted:
            orthogonalise(torch.randn(1, *shape), ITERATIONS["newton_schulz"])
        assert counted.get_total_flops() == orthogonalise_flops(*shape, 5)
