"""Products of groups of rows against a mask over all rows and groups, in float64."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.support.needs import DEVICES
from tests.support.numbers import normal
from titanlite.device import device_of
from titanlite.kernels.float8_cast import cast_rows, cast_transpose
from titanlite.kernels.grouped_matmul import (
    grouped_kernel,
    grouped_matmul,
    grouped_weight_gradient,
    scaled_grouped_gradient,
    scaled_grouped_matmul,
)

random = partial(normal, dtype=torch.float64)
COUNTS = [[5, 2, 0, 4], [0, 0, 7], [1, 1, 1, 1], [9], [0, 0]]
ON_GPUS = [  # of Hopper's kernel: less than half a tile, ends at and beside a half, no row, all rows
    [1, 63, 64, 65, 127, 128, 129, 0, 1000],
    [0, 2048, 0],
    [700, 0, 0, 0, 1348],
    [16] * 128,
]


def offsets_of(counts: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor([0, *counts], device=device).cumsum(0).int()


def masked(a: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    """Multiply all rows with all weights, and keep of each row what its own group gives."""
    group = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(a.device)
    every = torch.einsum("rk,gnk->rgn", a[: len(group)].double(), weight.double())
    return every[torch.arange(len(group), device=a.device), group]


def masked_gradient(grad: Tensor, x: Tensor, counts: list[int]) -> Tensor:
    group = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(x.device)
    own = torch.nn.functional.one_hot(group, len(counts)).double()
    weighed = own.t()[:, :, None] * grad[: len(group)].double()  # [G, R, N]
    return weighed.mT @ x[: len(group)].double()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("transposed", [False, True])
def test_each_row_meets_the_weight_of_its_group(counts: list[int], transposed: bool, device: str) -> None:
    """In float64: sums of 6 products of up to 16, exact within 6 · 16 · 6 · 1.1e-16."""
    R, G, N, K = sum(counts), len(counts), 5, 6
    a, weight = random(R, K, seed=0, device=device), random(G, N, K, seed=1, device=device)
    weight = weight.mT.contiguous().mT if transposed else weight
    got = grouped_matmul(a, weight, offsets_of(counts, device))
    assert got.shape == (R, N)
    assert torch.allclose(got, masked(a, weight, counts), rtol=0, atol=7e-14)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("counts", COUNTS)
def test_each_weight_has_the_gradient_of_its_rows(counts: list[int], device: str) -> None:
    """Rows behind the last group add nothing."""
    R, N, K = sum(counts) + 3, 5, 6
    grad, x = random(R, N, seed=0, device=device), random(R, K, seed=1, device=device)
    got = grouped_weight_gradient(grad, x, offsets_of(counts, device))
    assert got.shape == (len(counts), N, K)
    assert torch.allclose(got, masked_gradient(grad, x, counts), rtol=0, atol=1e-13)


def per_group(
    product: Callable[[Tensor, Tensor], Tensor], groups: Iterable[tuple[Tensor, Tensor]]
) -> list[list[Tensor]]:
    """Multiply each group's operands in float64: the truths, and the sizes of what is summed."""
    wide = [(a.double(), b.double()) for a, b in groups]
    return [[product(*pair) for pair in wide], [product(a.abs(), b.abs()) for a, b in wide]]


def rows_of_groups(a: Tensor, weight: Tensor, offsets: Tensor) -> list[Tensor]:
    """The product's truth and sizes, groups behind each other."""
    groups = ((a[i:j], w) for i, j, w in zip(offsets, offsets[1:], weight, strict=False))
    return [torch.cat(found) for found in per_group(lambda x, w: x @ w.t(), groups)]


def close(got: Tensor, truth: Tensor, sizes: Tensor, kept: float) -> bool:
    """Check a sum that is off by `kept` of the sizes of its terms, and then rounded to bfloat16's 8 bits."""
    return bool(((got.double() - truth).abs() <= sizes * kept + truth.abs() * 2.0**-8 + 1e-30).all())


WIDTHS = [(256, 128), (1536, 2048), (640, 384), (128, 1024)]  # N and K


@pytest.mark.gpu
@pytest.mark.parametrize("counts", ON_GPUS)
@pytest.mark.parametrize(("N", "K"), WIDTHS)
@pytest.mark.parametrize("transposed", [False, True])
def test_the_kernel_of_hopper_multiplies_as_the_definition(counts: list[int], N: int, K: int, transposed: bool) -> None:
    """Tensor cores keep 22 bits of a sum each time that a term is added."""
    R, G = sum(counts), len(counts)
    a = random(R, K, seed=0, device="cuda", dtype=torch.bfloat16)
    weight = random(G, N, K, seed=1, device="cuda", dtype=torch.bfloat16)
    weight = weight.mT.contiguous().mT if transposed else weight
    assert grouped_kernel(device_of(a.device), a.dtype, (N, K)) == "grouped_matmul"
    offsets = offsets_of(counts, "cuda")
    got = grouped_matmul(a, weight, offsets)
    assert close(got, *rows_of_groups(a, weight, offsets), K * 2.0**-22)
    assert torch.equal(got, grouped_matmul(a, weight, offsets))


@pytest.mark.gpu
@pytest.mark.parametrize("counts", ON_GPUS)
@pytest.mark.parametrize(("N", "K"), WIDTHS)
def test_the_kernel_of_hopper_has_the_gradient_of_the_definition(counts: list[int], N: int, K: int) -> None:
    """Rows of nobody are there, and add nothing."""
    R = sum(counts) + 100
    grad = random(R, N, seed=0, device="cuda", dtype=torch.bfloat16)
    x = random(R, K, seed=1, device="cuda", dtype=torch.bfloat16)
    offsets = offsets_of(counts, "cuda")
    got = grouped_weight_gradient(grad, x, offsets)
    groups = [(grad[i:j], x[i:j]) for i, j in pairwise(offsets)]
    found = per_group(lambda grad, x: grad.t() @ x, groups)
    assert all(close(*each, n * 2.0**-22) for *each, n in zip(got, *found, counts, strict=True))
    assert torch.equal(got, grouped_weight_gradient(grad, x, offsets))


@pytest.mark.gpu
def test_a_graph_of_launches_follows_the_groups() -> None:
    """Captured once, replayed with other groups: nothing about them is known to the host."""
    counts, others = ON_GPUS[0], [200] * 7 + [177, 0]
    assert sum(counts) == sum(others)
    a = random(sum(counts), 256, seed=0, device="cuda", dtype=torch.bfloat16)
    weight = random(len(counts), 256, 256, seed=1, device="cuda", dtype=torch.bfloat16)
    offsets = offsets_of(counts, "cuda")
    grouped_matmul(a, weight, offsets), grouped_weight_gradient(a, a, offsets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product, gradient = grouped_matmul(a, weight, offsets), grouped_weight_gradient(a, a, offsets)
    offsets.copy_(offsets_of(others, "cuda"))
    graph.replay()
    assert torch.equal(product, grouped_matmul(a, weight, offsets))
    assert torch.equal(gradient, grouped_weight_gradient(a, a, offsets))


def in_float8(counts: list[int], N: int, K: int, device: str) -> tuple[Tensor, ...]:
    """Rows and weights as bytes with inverse scales, the latter [G, N, K] and [G, N]."""
    R, G = sum(counts), len(counts)
    a = random(R, K, seed=0, device=device, dtype=torch.bfloat16)
    weight = random(G * N, K, seed=1, device=device, dtype=torch.bfloat16)
    (a, a_inv), (weight, weight_inv) = (cast_rows(t, torch.float8_e4m3fn) for t in (a, weight))
    return a, a_inv, weight.view(G, N, K), weight_inv.view(G, N)


IN_FLOAT8 = [
    ("cpu", [5, 2, 0, 4], 16, 32),
    *(pytest.param("cuda", counts, *of, marks=pytest.mark.gpu) for counts in ON_GPUS for of in WIDTHS[:3]),
]
# Tensor cores keep 14 bits of a sum: each of its terms is off by 2^-13 of the largest, at most of their sizes together;
# a split sum is off so within its steps alone.
KEPT_OF_FLOAT8 = 2.0**-11
RESULTS = [torch.bfloat16, torch.float32]  # a run may compute in float32, which Hopper's kernel does not write


@pytest.mark.parametrize(("device", "counts", "N", "K"), IN_FLOAT8)
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("dtype", RESULTS)
def test_float8_products_are_of_what_the_bytes_stand_for(
    device: str, counts: list[int], N: int, K: int, fast: bool, dtype: torch.dtype
) -> None:
    """Forward, and with weights of the groups beside each other, with one scale for a column of all of them."""
    a, a_inv, weight, weight_inv = in_float8(counts, N, K, device)
    offsets, ones = offsets_of(counts, device), torch.ones(1, N, device=device)
    beside = weight.permute(1, 0, 2).contiguous().permute(1, 0, 2)  # memory [N, G, K]
    for of, scale_inv in ((weight, weight_inv), (beside, ones)):
        got = scaled_grouped_matmul(a, of, a_inv, scale_inv, offsets, dtype, fast)
        assert got.dtype == dtype
        truth = rows_of_groups(a.double() * a_inv, of.double() * scale_inv[:, :, None], offsets)
        assert close(got, *truth, KEPT_OF_FLOAT8)


@pytest.mark.parametrize(("device", "counts", "N", "K"), IN_FLOAT8)
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("dtype", RESULTS)
def test_float8_gradients_contract_the_rows_of_a_group(
    device: str, counts: list[int], N: int, K: int, fast: bool, dtype: torch.dtype
) -> None:
    """Groups begin at multiples of 16; between them, and behind them, are rows of nobody, zeros or none of theirs."""
    counts = [-(-n // 16) * 16 for n in counts]
    R = sum(counts) + 32
    grad, x = (random(R, n, seed=n, device=device, dtype=torch.bfloat16) for n in (N, K))
    ones, offsets = torch.ones(R, 1, device=device), offsets_of(counts, device)
    (grad, grad_inv), (x, x_inv) = (cast_transpose(t, ones, True, torch.float8_e4m3fn, True) for t in (grad, x))
    for scales in ((grad_inv, x_inv), (None, x_inv), (grad_inv, None)):
        got = scaled_grouped_gradient(grad, x, *scales, offsets, dtype, fast)
        of_grad, of_x = (t.double() * (1 if by is None else by) for t, by in zip((grad, x), scales, strict=True))
        groups = [(of_grad[:, i:j], of_x[:, i:j]) for i, j in pairwise(offsets)]
        found = per_group(lambda grad, x: grad @ x.t(), groups)
        assert all(close(*each, KEPT_OF_FLOAT8) for each in zip(got, *found, strict=True))
        assert torch.equal(got, scaled_grouped_gradient(grad, x, *scales, offsets, dtype, fast))
