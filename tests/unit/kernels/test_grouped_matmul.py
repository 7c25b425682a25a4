"""Products of groups of rows against a mask over all rows and groups, in float64."""

from functools import partial

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


def within_bfloat16(got: Tensor, truth: Tensor, sizes: Tensor, terms: int) -> bool:
    """Check a product of bfloat16: its sum is off by 2^-22 of the sizes of its terms each time that one is added (what
    tensor cores keep), and rounded to 8 bits."""
    bound = sizes * (terms * 2.0**-22) + truth.abs() * 2.0**-8 + 1e-30
    return bool(((got.double() - truth).abs() <= bound).all())


@pytest.mark.gpu
@pytest.mark.parametrize("counts", ON_GPUS)
@pytest.mark.parametrize(("N", "K"), [(256, 128), (1536, 2048), (640, 384), (128, 1024)])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_kernel_of_hopper_multiplies_as_the_definition(counts: list[int], N: int, K: int, transposed: bool) -> None:
    R, G = sum(counts), len(counts)
    a = random(R, K, seed=0, device="cuda", dtype=torch.bfloat16)
    weight = random(G, N, K, seed=1, device="cuda", dtype=torch.bfloat16)
    weight = weight.mT.contiguous().mT if transposed else weight
    assert grouped_kernel(device_of(a.device), a.dtype, (N, K)) == "grouped_matmul"
    offsets = offsets_of(counts, "cuda")
    got = grouped_matmul(a, weight, offsets)
    truth = torch.cat([a[i:j].double() @ w.double().t() for i, j, w in zip(offsets, offsets[1:], weight, strict=False)])
    sizes = torch.cat(
        [a[i:j].double().abs() @ w.double().abs().t() for i, j, w in zip(offsets, offsets[1:], weight, strict=False)]
    )
    assert within_bfloat16(got, truth, sizes, K)
    assert torch.equal(got, grouped_matmul(a, weight, offsets))


@pytest.mark.gpu
@pytest.mark.parametrize("counts", ON_GPUS)
@pytest.mark.parametrize(("N", "K"), [(256, 128), (1536, 2048), (640, 384), (128, 1024)])
def test_the_kernel_of_hopper_has_the_gradient_of_the_definition(counts: list[int], N: int, K: int) -> None:
    """Rows of nobody are there, and add nothing."""
    R = sum(counts) + 100
    grad = random(R, N, seed=0, device="cuda", dtype=torch.bfloat16)
    x = random(R, K, seed=1, device="cuda", dtype=torch.bfloat16)
    offsets = offsets_of(counts, "cuda")
    got = grouped_weight_gradient(grad, x, offsets)
    for i, j, own in zip(offsets, offsets[1:], got, strict=False):
        truth, sizes = grad[i:j].double().t() @ x[i:j].double(), grad[i:j].double().abs().t() @ x[i:j].double().abs()
        assert within_bfloat16(own, truth, sizes, int(j - i))
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


@pytest.mark.parametrize(
    ("device", "counts", "N", "K"),
    [
        ("cpu", [5, 2, 0, 4], 16, 32),
        *(
            pytest.param("cuda", counts, N, K, marks=pytest.mark.gpu)
            for counts in ON_GPUS
            for N, K in [(256, 128), (1536, 2048), (640, 384)]
        ),
    ],
)
@pytest.mark.parametrize("fast", [False, True])
def test_float8_products_are_of_what_the_bytes_stand_for(
    device: str, counts: list[int], N: int, K: int, fast: bool
) -> None:
    """Forward, and with weights of the groups beside each other, with one scale for a column of all of them. Tensor
    cores keep 14 bits of a sum: each of its terms is off by 2^-13 of the largest, at most of their sizes together; a
    split sum is off so within its steps alone."""
    a, a_inv, weight, weight_inv = in_float8(counts, N, K, device)
    G, offsets = len(counts), offsets_of(counts, device)
    got = scaled_grouped_matmul(a, weight, a_inv, weight_inv, offsets, torch.bfloat16, fast)
    truth_of = a.double() * a_inv, weight.double() * weight_inv[:, :, None]
    truth = masked_rows(*truth_of, offsets)
    sizes = masked_rows(truth_of[0].abs(), truth_of[1].abs(), offsets)
    assert within_float8(got, truth, sizes)
    beside = weight.permute(1, 0, 2).contiguous().permute(1, 0, 2)  # memory [N, G, K]
    ones = torch.ones(1, N, device=device)
    got = scaled_grouped_matmul(a, beside, a_inv, ones, offsets, torch.bfloat16, fast)
    truth, sizes = (masked_rows(f(truth_of[0]), f(weight.double()), offsets) for f in (lambda t: t, torch.abs))
    assert within_float8(got, truth, sizes)
    assert len(weight) == G


@pytest.mark.parametrize(
    ("device", "counts", "N", "K"),
    [
        ("cpu", [5, 2, 0, 4], 16, 32),
        *(
            pytest.param("cuda", counts, N, K, marks=pytest.mark.gpu)
            for counts in ON_GPUS
            for N, K in [(256, 128), (1536, 2048), (640, 384)]
        ),
    ],
)
@pytest.mark.parametrize("fast", [False, True])
def test_float8_gradients_contract_the_rows_of_a_group(
    device: str, counts: list[int], N: int, K: int, fast: bool
) -> None:
    """Groups begin at multiples of 16; between them, and behind them, are rows of nobody, zeros or none of theirs."""
    counts = [-(-n // 16) * 16 for n in counts]
    R = sum(counts) + 32
    grad, x = (random(R, n, seed=n, device=device, dtype=torch.bfloat16) for n in (N, K))
    ones, offsets = torch.ones(R, 1, device=device), offsets_of(counts, device)
    (grad, grad_inv), (x, x_inv) = (cast_transpose(t, ones, True, torch.float8_e4m3fn, True) for t in (grad, x))
    for scales in ((grad_inv, x_inv), (None, x_inv), (grad_inv, None)):
        got = scaled_grouped_gradient(grad, x, *scales, offsets, torch.bfloat16, fast)
        by = [1 if scale is None else scale.double() for scale in scales]
        of_grad, of_x = grad.double() * by[0], x.double() * by[1]
        for i, j, own in zip(offsets, offsets[1:], got, strict=False):
            truth, sizes = (f(of_grad[:, i:j]) @ f(of_x[:, i:j]).t() for f in (lambda t: t, torch.abs))
            assert within_float8(own, truth, sizes)
        assert torch.equal(got, scaled_grouped_gradient(grad, x, *scales, offsets, torch.bfloat16, fast))


def masked_rows(a: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return torch.cat([a[i:j] @ w.t() for i, j, w in zip(offsets, offsets[1:], weight, strict=False)])


def within_float8(got: Tensor, truth: Tensor, sizes: Tensor) -> bool:
    return bool(((got.double() - truth).abs() <= sizes * 2.0**-11 + truth.abs() * 2.0**-8 + 1e-30).all())
