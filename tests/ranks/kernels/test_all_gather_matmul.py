"""Gathers and multiplies what it says, in every form, shape and dtype that the docstring names."""

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.collective_cases import BF16, E4M3, gathers, groups, print_problems, rolled
from tests.support.ranks import run_ranks
from titanlite.kernels import all_gather_matmul as stem
from titanlite.kernels.collectives import Group, gather_tokens

CASES = {case.id: case for case in gathers("cpu")}


def g_of_wrong_order(real, shard, others, dim, *rest, **options):
    gathered, *products = real(shard, others, dim, *rest, **options)
    return [rolled(gathered, dim), *products]


def rows_of_wrong_rank(real, shard, others, dim, *rest, **options):
    gathered, *products = real(shard, others, dim, *rest, **options)
    return [gathered, *(rolled(product, dim) for product in products)]


def own_shard_twice(real, shard, others, dim, *rest, **options):
    gathered, *_ = real(shard, others, dim, *rest, **options)
    return [gathered, *(torch.cat([shard, shard], dim) @ other for other in others)]


def last_rows_missing(real, shard, others, dim, *rest, **options):
    gathered, *products = real(shard, others, dim, *rest, **options)
    last = shard.shape[dim] * 2 - 1
    return [gathered, *(product.index_fill(dim, torch.tensor([last]), 0) for product in products)]


def products_swapped(real, shard, others, *rest, **options):
    gathered, *products = real(shard, others, *rest, **options)
    return [gathered, *reversed(products)]


def no_bias(real, *args, **options):
    return real(*args, **{**options, "biases": ()})


def bias_twice(real, *args, **options):
    return real(*args, **{**options, "biases": [2 * bias for bias in options["biases"]]})


def bias_after_rounding(real, *args, **options):
    gathered, *products = real(*args, **{**options, "biases": ()})
    return [gathered, *(p + bias for p, bias in zip(products, options["biases"], strict=True))]


def summed_in_bfloat16(real, shard, others, dim, *rest, **options):
    gathered, *_ = real(shard, others, dim, *rest, **options)
    half = gathered.shape[-1] // 2
    return [gathered, *(gathered[..., :half] @ o[:half] + gathered[..., half:] @ o[half:] for o in others)]


def own_scale_for_all(real, *args, **options):
    return real(*args, **{**options, "scale_of": "tensor"})


def scale_of_wrong_rank(real, shard, others, dim, size, group, **options):
    scales = gather_tokens(options["scale"].view(1), Group(group, 2, dist.get_rank()))
    return real(shard, others, dim, size, group, **{**options, "scale": scales[1 - dist.get_rank()]})


def scales_of_wrong_rows(real, *args, **options):
    return real(*args, **{**options, "scale": options["scale"].flip(-2)})


def returned_scales_of_wrong_rank(real, *args, **options):
    *results, scales = real(*args, **options)
    return [*results, rolled(scales, 0)]


def first_of_the_other_scales(real, *args, **options):
    return real(*args, **{**options, "other_scales": [scale.flatten()[0] for scale in options["other_scales"]]})


@pytest.mark.parametrize(
    ("fault", "case"),
    [
        (g_of_wrong_order, "rows-bfloat16"),
        (rows_of_wrong_rank, "rows-bfloat16"),
        (rows_of_wrong_rank, "four-dims-2-bfloat16"),
        (own_shard_twice, "batch-2-bfloat16"),
        (last_rows_missing, "batch-3-bfloat16"),
        (products_swapped, "right_t-contracted-bfloat16"),
        (no_bias, "bias-float64"),
        (bias_twice, "four-dims-2-bfloat16"),
        (bias_after_rounding, "four-dims-2-bfloat16"),
        (summed_in_bfloat16, "rows-bfloat16"),
        (own_scale_for_all, "e4m3-by-shard"),
        (scale_of_wrong_rank, "e4m3-by-shard-batch"),
        (scales_of_wrong_rows, "e4m3-by-row-contracted"),
        (returned_scales_of_wrong_rank, "e4m3-by-row"),
        (returned_scales_of_wrong_rank, "e4m3-by-shard"),
        (first_of_the_other_scales, "e4m3-by-row"),
    ],
)
def test_faults_are_found(fault: Callable, case: str, tmp_path, monkeypatch):
    real = stem.all_gather_matmul
    assert not any(run_ranks(lambda: print_problems(CASES[case]), tmp_path, 2))
    monkeypatch.setattr(stem, "all_gather_matmul", lambda *args, **options: fault(real, *args, **options))
    assert any(run_ranks(lambda: print_problems(CASES[case]), tmp_path, 2))


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("_grad_of_gathered", lambda grad, other, form: (rolled(grad, 0), other.t())),
        ("_grad_of_other", lambda gathered, grad, *rest: rolled(gathered, 0).t() @ grad),
        ("scatter_dim", lambda grad, dim, group: grad.chunk(2, dim)[group.rank]),
    ],
)
def test_faults_of_the_gradient_are_found(name: str, fault: Callable, tmp_path, monkeypatch):
    monkeypatch.setattr(stem, name, fault)
    assert any(run_ranks(lambda: print_problems(CASES["rows-float64"]), tmp_path, 2))


def test_gradient_of_a_bias_that_is_wider_than_the_product(tmp_path):
    def body() -> None:
        bias = torch.zeros(3, requires_grad=True)
        x, w = torch.zeros(129 - dist.get_rank(), 4, dtype=BF16), torch.zeros(4, 3, dtype=BF16)
        _, product = stem.all_gather_matmul(x, [w], 0, 257, groups(2)["all-2"].name, biases=[bias])
        product.sum().backward()
        assert bias.grad is not None
        assert bias.grad.tolist() == [257.0] * 3  # bfloat16 has no such number

    run_ranks(body, tmp_path)


def operands(**changed):
    """Of a call that is right on two ranks, and what is changed of them."""
    right = {"shard": torch.zeros(4, 6), "others": [torch.zeros(6, 3)], "dim": 0, "size": 8}
    return right | changed


def float8(*shape: int) -> Tensor:
    return torch.zeros(shape).to(E4M3)


SCALED = {"shard": float8(4, 6), "others": [float8(6, 3)], "scale": torch.ones(()), "other_scales": [torch.ones(())]}
ERRORS = [
    (operands(form="top"), "form 'top'; want one of left, right, left_t, right_t"),
    (operands(dim=2), "dim 2 of a shard with 2 dims; want -2 to 1"),
    (operands(dim=-3), "dim -3 of a shard with 2 dims; want -2 to 1"),
    (operands(shard=torch.zeros(6)), "a shard of 1 dims; want 2 to 4 dims"),
    (operands(shard=torch.zeros(4, 1, 1, 1, 6)), "a shard of 5 dims; want 2 to 4 dims"),
    (operands(shard=torch.zeros(4, 1, 6), form="right"), "a shard of 3 dims; want 2 dims for the form 'right'"),
    (operands(size=9), "passes 4 of 9 rows along dim 0; want {own}: chunks of 5"),
    (operands(others=[torch.zeros(1, 6, 3)]), "others[0] has 3 dims; want [K, N]"),
    (operands(others=[torch.zeros(5, 3)]), "others[0] of shape [5, 3] contracts 5; the gathered tensor 6"),
    (operands(form="right"), "others[0] of shape [6, 3] contracts 3; the gathered tensor 8"),
    (operands(form="left_t"), "others[0] of shape [6, 3] contracts 6; the gathered tensor 8"),
    (operands(others=[torch.zeros(6, 3, dtype=BF16)]), "others[0] is torch.bfloat16, shard is torch.float32"),
    (operands(others=[float8(6, 3)]), "others[0] is torch.float8_e4m3fn, shard is torch.float32; want equal dtypes"),
    (operands(biases=[torch.zeros(3)] * 2), "2 biases for 1 products; want one each"),
    (operands(biases=[torch.zeros(1)]), "biases[0] of shape [1]; want [3]"),
    (operands(biases=[torch.zeros(8, 3)]), "biases[0] of shape [8, 3]; want [3]"),
    (operands(scale=torch.ones(())), "torch.float32 operands need no scale"),
    (operands(shard=float8(4, 6), others=[float8(6, 3)]), "torch.float8_e4m3fn operands need both scales"),
    (operands(**SCALED, scale_of="column"), "scale_of 'column'; want one of tensor, shard, row"),
    (operands(**SCALED | {"other_scales": [torch.ones(())] * 2}), "2 other_scales for 1 products; want one each"),
    (operands(**SCALED | {"other_scales": [torch.ones(6)]}), "other_scales[0] has 6 numbers; want one, or 3"),
    (operands(**SCALED, scale_of="row"), "a scale of 1 numbers, one for each row; want 4 numbers, one for each row"),
    (operands(**SCALED | {"scale": torch.ones(4)}), "a scale of 4 numbers, one for each tensor; want one number"),
    (
        operands(**SCALED | {"others": [float8(8, 3)]}, form="left_t", scale_of="shard"),
        "scales by shard along the contracted dim of the form 'left_t'; want one scale",
    ),
    (
        operands(**SCALED | {"others": [float8(12, 3)]}, dim=1, size=12, scale_of="shard"),
        "scales by shard of a tensor split along the contracted dim; want one scale",
    ),
]


def test_errors(tmp_path):
    def body() -> None:
        group = groups(2)["all-2"]
        for given, text in ERRORS:
            text = text.format(own=[5, 4][group.me])
            if given["size"] == 9 and group.me == 1:
                continue  # which has the 4 rows it should have
            with pytest.raises(ValueError, match="all_gather_matmul: .*" + re.escape(text)):
                stem.all_gather_matmul(**given, group=group.name)
        bias = torch.zeros(3, requires_grad=True)
        _, product = stem.all_gather_matmul(**operands(**SCALED), group=group.name, biases=[bias])
        with pytest.raises(NotImplementedError, match="float8 operands have no gradient"):
            product.sum().backward()

    run_ranks(body, tmp_path)
