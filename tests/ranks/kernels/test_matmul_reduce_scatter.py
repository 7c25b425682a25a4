"""Multiplies, sums and scatters what it says, in every shape and dtype that the docstring names."""

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.collective_cases import BF16, E4M3, F64, Numbers, groups, print_problems, rolled, scatters
from tests.support.needs import slow
from tests.support.ranks import run_ranks
from titanlite.kernels import matmul_reduce_scatter as stem
from titanlite.kernels.all_gather_matmul import all_gather_matmul

CASES = {case.id: case for case in scatters("cpu")}


def chunk_of_wrong_rank(real, lefts, rights, dim, *rest, **options):
    return real([rolled(left, dim) for left in lefts], rights, dim, *rest, **options)


def columns_of_wrong_rank(real, lefts, rights, *rest, **options):
    return real(lefts, [rolled(right, 1) for right in rights], *rest, **options)


def own_part_only(real, lefts, rights, dim, group, **options):
    products = [left @ right for left, right in zip(lefts, rights, strict=True)]
    return torch.stack(products).sum(0).chunk(2, dim)[dist.get_rank()]


def one_part_missing(real, lefts, *rest, **options):
    return real([left * dist.get_rank() for left in lefts], *rest, **options)


def one_part_twice(real, lefts, *rest, **options):
    return real([left * (1 + dist.get_rank()) for left in lefts], *rest, **options)


def one_product_missing(real, lefts, rights, *rest, **options):
    return real(lefts[:-1], rights[:-1], *rest, **options)


def bias_of_every_rank(real, *args, **options):
    return real(*args, **{**options, "bias": 2 * options["bias"]})


def no_bias(real, *args, **options):
    return real(*args, **{**options, "bias": None})


def products_summed_in_bfloat16(real, lefts, rights, *rest, **options):
    pairs = zip(lefts, rights, strict=True)
    return torch.stack([real([left], [right], *rest, **options) for left, right in pairs]).sum(0)


def summed_along_k_in_bfloat16(real, lefts, rights, dim, group, **options):
    halves = [(left.chunk(2, -1), right.chunk(2, 0)) for left, right in zip(lefts, rights, strict=True)]
    firsts, seconds = ([(left[i], right[i]) for left, right in halves] for i in (0, 1))
    return sum(real(*zip(*half, strict=True), dim, group, **options) for half in (firsts, seconds))


def scales_of_the_other_product(real, *args, **options):
    return real(*args, **{**options, "left_scales": options["left_scales"][::-1]})


def scales_of_wrong_columns(real, *args, **options):
    return real(*args, **{**options, "right_scales": [scale.flip(-1) for scale in options["right_scales"]]})


def first_of_the_scales(real, *args, **options):
    return real(*args, **{**options, "left_scales": [scale.flatten()[0] for scale in options["left_scales"]]})


@pytest.mark.parametrize(
    ("fault", "case"),
    [
        (chunk_of_wrong_rank, "rows-bfloat16"),
        (chunk_of_wrong_rank, "four-dims-1-bfloat16"),
        (columns_of_wrong_rank, "columns-bfloat16"),
        (own_part_only, "batch-2-bfloat16"),
        (one_part_missing, "batch-3-bfloat16"),
        (one_part_twice, "ragged-columns-bfloat16"),
        (one_product_missing, "two-products-bfloat16"),
        (bias_of_every_rank, "bias-bfloat16"),
        (bias_of_every_rank, "columns-bias-float64"),
        (no_bias, "ragged-batch-float64"),
        (products_summed_in_bfloat16, "two-products-bfloat16"),
        (summed_along_k_in_bfloat16, "rows-bfloat16"),
        (scales_of_the_other_product, "e4m3-by-row-batch"),
        (scales_of_wrong_columns, "e4m3-by-row-columns"),
        (first_of_the_scales, "e4m3-by-row-and-tensor"),
    ],
)
def test_faults_are_found(fault: Callable, case: str, tmp_path, monkeypatch):
    real = stem.matmul_reduce_scatter
    assert not any(run_ranks(lambda: print_problems(CASES[case]), tmp_path, 2))
    monkeypatch.setattr(stem, "matmul_reduce_scatter", lambda *args, **options: fault(real, *args, **options))
    assert any(run_ranks(lambda: print_problems(CASES[case]), tmp_path, 2))


def own_rows_twice(grad, others, dim, size, group):
    gathered = torch.cat([grad, grad], dim)
    return [gathered, *(gathered @ other for other in others)]


def test_faults_of_the_gradient_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(stem, "all_gather_matmul", own_rows_twice)
    assert any(run_ranks(lambda: print_problems(CASES["rows-float64"]), tmp_path, 2))


@pytest.mark.parametrize("backend", ["aot_eager", *slow("inductor")])  # whose code runs in test_async_tp.py
def test_compiled_between_layers(backend, tmp_path):
    rng = Numbers("layers", "cpu", terms=8)
    x, w_in, w_out = (rng.operand(shape, F64) for shape in ([6, 4], [4, 8], [8, 4]))

    def body() -> None:
        group = groups(2)["all-2"]
        mine = x.chunk(2)[group.me], w_in.chunk(2, 1)[group.me], w_out.chunk(2)[group.me]

        def layers(x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
            _, hidden = all_gather_matmul(x, [w_in], 0, 6, group.name)
            return stem.matmul_reduce_scatter([hidden.relu()], [w_out], 0, group.name)

        leaves = [t.clone().requires_grad_() for t in (x, w_in, w_out)]
        true = (leaves[0] @ leaves[1]).relu() @ leaves[2]
        true.square().sum().backward()
        parts = [leaf.grad.chunk(2, dim)[group.me] for leaf, dim in zip(leaves, (0, 1, 0), strict=True)]
        for run in (layers, torch.compile(layers, fullgraph=True, backend=backend)):
            own = [t.clone().requires_grad_() for t in mine]
            out = run(*own)
            out.square().sum().backward()
            assert torch.equal(out, true.chunk(2)[group.me])
            assert all(torch.equal(t.grad, part) for t, part in zip(own, parts, strict=True))

    run_ranks(body, tmp_path)


def test_gradient_of_a_bias_that_is_wider_than_the_product(tmp_path):
    def body() -> None:
        bias = torch.zeros(3, requires_grad=True)
        x, w = torch.zeros(514, 4, dtype=BF16), torch.zeros(4, 3, dtype=BF16)
        stem.matmul_reduce_scatter([x], [w], 0, groups(2)["all-2"].name, bias=bias).sum().backward()
        assert bias.grad is not None
        assert bias.grad.tolist() == [257.0] * 3  # bfloat16 has no such number

    run_ranks(body, tmp_path)


class NoGradient(torch.autograd.Function):
    """The identity, with an undefined gradient."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> None:
        return None


def test_an_undefined_gradient_is_zero_and_gathered(tmp_path):
    """A rank that left backward out would let the others wait."""

    def body() -> None:
        x, w = torch.ones(8, 6, requires_grad=True), torch.ones(6, 3)
        out = stem.matmul_reduce_scatter([x], [w], 0, groups(2)["all-2"].name)
        assert type(out.grad_fn).__name__ == "matmul_reduce_scatterBackward"
        (NoGradient.apply(out) if dist.get_rank() else out).sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        assert x.grad.sum(1).tolist() == [18.0] * 4 + [0.0] * 4

    run_ranks(body, tmp_path)


def test_a_scale_has_no_gradient(tmp_path):
    def body() -> None:
        x, w = torch.ones(8, 6).to(E4M3), torch.ones(6, 3).to(E4M3)
        for i in range(2):
            scales = [torch.ones((), requires_grad=i == j) for j in range(2)]
            group = groups(2)["all-2"].name
            out = stem.matmul_reduce_scatter(
                [x], [w], 0, group, left_scales=scales[:1], right_scales=scales[1:], out_dtype=torch.float32
            )
            gathered = all_gather_matmul(x, [w], 0, 16, group, scale=scales[0], other_scales=scales[1:])[1]
            for result in (out, gathered):
                with pytest.raises(NotImplementedError, match="float8 operands have no gradient"):
                    result.float().sum().backward()

    run_ranks(body, tmp_path)


def arguments(**changed):
    """Of a call that is right on two ranks, and what is changed of them."""
    return {"lefts": [torch.zeros(8, 6)], "rights": [torch.zeros(6, 3)], "dim": 0} | changed


def float8(*shape: int) -> Tensor:
    return torch.zeros(shape).to(E4M3)


ONE = torch.ones(())
SCALED = {"lefts": [float8(8, 6)], "rights": [float8(6, 3)], "left_scales": [ONE], "right_scales": [ONE]}
PAIR = {"lefts": [torch.zeros(8, 6), torch.zeros(8, 5)]}
ERRORS = [
    (arguments(lefts=[]), "0 lefts and 1 rights; want as many of each, at least one"),
    (arguments(lefts=[], rights=[]), "0 lefts and 0 rights; want as many of each, at least one"),
    (arguments(**PAIR), "2 lefts and 1 rights; want as many of each, at least one"),
    (arguments(lefts=[torch.zeros(6)]), "dim 0 of a product of 1 dims; want 2 to 4 dims, and one of them"),
    (arguments(lefts=[torch.zeros(8, 1, 1, 1, 6)]), "dim 0 of a product of 5 dims; want 2 to 4 dims, and one of them"),
    (arguments(dim=2), "dim 2 of a product of 2 dims; want 2 to 4 dims, and one of them"),
    (arguments(dim=-3), "dim -3 of a product of 2 dims; want 2 to 4 dims, and one of them"),
    (arguments(rights=[torch.zeros(5, 3)]), "product 0 is [8, 6] @ [5, 3], product 0 [8, 6] @ [5, 3]; want […, K] @"),
    (arguments(rights=[torch.zeros(1, 6, 3)]), "product 0 is [8, 6] @ [1, 6, 3]"),
    (
        arguments(**PAIR, rights=[torch.zeros(6, 3), torch.zeros(5, 4)]),
        "product 1 is [8, 5] @ [5, 4], product 0 [8, 6]",
    ),
    (arguments(lefts=[torch.zeros(8, 6), torch.zeros(2, 4, 6)], rights=[torch.zeros(6, 3)] * 2), "product 1 is [2, 4,"),
    (
        arguments(rights=[torch.zeros(6, 3, dtype=BF16)]),
        "operands of torch.bfloat16, torch.float32; want equal dtypes",
    ),
    (arguments(rights=[float8(6, 3)]), "operands of torch.float32, torch.float8_e4m3fn; want equal dtypes"),
    (arguments(left_scales=[ONE], right_scales=[ONE]), "torch.float32 operands need no scale"),
    (arguments(right_scales=[ONE]), "torch.float32 operands need no scale"),
    (arguments(**SCALED | {"left_scales": []}), "torch.float8_e4m3fn operands need both scales"),
    (arguments(**SCALED | {"right_scales": []}), "torch.float8_e4m3fn operands need both scales"),
    (arguments(**SCALED | {"left_scales": [ONE] * 2}), "2 left_scales for 1 products; want one each"),
    (arguments(**SCALED | {"right_scales": [ONE] * 2}), "2 right_scales for 1 products; want one each"),
    (arguments(**SCALED | {"left_scales": [torch.ones(4, 1)]}), "left_scales[0] has 4 numbers; want one, or 8"),
    (arguments(**SCALED | {"right_scales": [torch.ones(6)]}), "right_scales[0] has 6 numbers; want one, or 3"),
    (arguments(bias=torch.zeros(1)), "a bias of shape [1]; want [3]"),
    (arguments(bias=torch.zeros(3), dim=1), "a bias of shape [3]; want [{own}]"),
]


def test_errors(tmp_path):
    def body() -> None:
        group = groups(2)["all-2"]
        for given, text in ERRORS:
            text = text.format(own=[2, 1][group.me]) if "own" in text else text
            with pytest.raises(ValueError, match="matmul_reduce_scatter: .*" + re.escape(text)):
                stem.matmul_reduce_scatter(**given, group=group.name)
        bias = torch.zeros(3, requires_grad=True)
        out = stem.matmul_reduce_scatter(**arguments(**SCALED), group=group.name, bias=bias)
        with pytest.raises(NotImplementedError, match="float8 operands have no gradient"):
            out.sum().backward()

    run_ranks(body, tmp_path)
