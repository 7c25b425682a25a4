"""Faults of both collective matmuls are found by their cases, and operands that do not fit are refused."""

import inspect
import re
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.collective_cases import BF16, E4M3, check_case, gathers, groups, rolled, scatters
from tests.support.ranks import run_ranks
from titanlite.kernels import all_gather_matmul as gather_stem
from titanlite.kernels import matmul_reduce_scatter as scatter_stem
from titanlite.kernels.collectives import Group, gather_tokens

GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"
STEMS: dict[str, ModuleType] = {GATHER: gather_stem, SCATTER: scatter_stem}
CASES = {GATHER: {case.id: case for case in gathers("cpu")}, SCATTER: {case.id: case for case in scatters("cpu")}}


class Call(SimpleNamespace):
    """A call's arguments by name, which a fault may change, and the operator itself."""

    def __init__(self, real: Callable, *args: object, **options: object) -> None:
        super().__init__(**inspect.signature(real).bind(*args, **options).arguments)
        self.given, self.real = dict(vars(self)), real

    def again(self, **changed: object) -> Any:
        return self.real(**self.given | changed)


def halves(c: Call) -> list[Tensor]:
    """Each gathered product, K summed in two parts that are rounded."""
    gathered, *_ = c.again()
    n = gathered.shape[-1] // 2
    return [gathered, *(gathered[..., :n] @ o[:n] + gathered[..., n:] @ o[n:] for o in c.others)]


def rows_of_wrong_rank(c: Call) -> list[Tensor]:
    gathered, *products = c.again()
    return [gathered, *(rolled(product, c.dim) for product in products)]


def bias_after_rounding(c: Call) -> list[Tensor]:
    gathered, *products = c.again(biases=())
    return [gathered, *(p + bias for p, bias in zip(products, c.biases, strict=True))]


def scale_of_wrong_rank(c: Call) -> list[Tensor]:
    scales = gather_tokens(c.scale.view(1), Group(c.group, 2, dist.get_rank()))
    return c.again(scale=scales[1 - dist.get_rank()])


def each_product_rounded(c: Call) -> Tensor:
    pairs = zip(c.lefts, c.rights, strict=True)
    return torch.stack([c.again(lefts=[left], rights=[right]) for left, right in pairs]).sum(0)


def halves_of_k_rounded(c: Call) -> Tensor:
    lefts, rights = [left.chunk(2, -1) for left in c.lefts], [right.chunk(2, 0) for right in c.rights]
    return sum(c.again(lefts=[x[i] for x in lefts], rights=[x[i] for x in rights]) for i in (0, 1))


# One of each kind: numbers of another rank, a rounding too many, another scale. Of which operator, and the case.
FAULTS: list[tuple[str, Callable[[Call], Any], str]] = [
    (GATHER, rows_of_wrong_rank, "rows-bfloat16"),
    (GATHER, halves, "rows-bfloat16"),
    (GATHER, bias_after_rounding, "four-dims-2-bfloat16"),
    (GATHER, scale_of_wrong_rank, "e4m3-by-shard-batch"),
    (SCATTER, lambda c: c.again(lefts=[rolled(left, c.dim) for left in c.lefts]), "rows-bfloat16"),
    (SCATTER, each_product_rounded, "two-products-bfloat16"),
    (SCATTER, halves_of_k_rounded, "rows-bfloat16"),
    (SCATTER, lambda c: c.again(left_scales=c.left_scales[::-1]), "e4m3-by-row-batch"),
]


def own_rows_twice(grad, others, dim, size, group):
    gathered = torch.cat([grad, grad], dim)
    return [gathered, *(gathered @ other for other in others)]


def in_place_of(op: str, wrong: Callable[[Call], Any]) -> Callable:
    real = getattr(STEMS[op], op)
    return lambda *args, **options: wrong(Call(real, *args, **options))


OF_GRADIENTS: list[tuple[str, str, Callable]] = [
    (GATHER, "_grad_of_gathered", lambda grad, other, form: (rolled(grad, 0), other.t())),
    (GATHER, "_grad_of_other", lambda gathered, grad, *rest: rolled(gathered, 0).t() @ grad),
    (GATHER, "scatter_dim", lambda grad, dim, group: grad.chunk(2, dim)[group.rank]),
    (SCATTER, "all_gather_matmul", own_rows_twice),
]


def test_faults_are_found(tmp_path):
    """By the bounds of all cases: some of the eight would pass under bounds that are a rounding wider."""

    def body() -> None:
        group = groups(2)["all-2"]
        planted = [(op, op, in_place_of(op, wrong), case) for op, wrong, case in FAULTS]
        planted += [(op, name, fault, "rows-float64") for op, name, fault in OF_GRADIENTS]
        for number, (op, name, fault, case) in enumerate(planted):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(STEMS[op], name, fault)
                said: list[list[str]] = [[], []]
                dist.all_gather_object(said, check_case(CASES[op][case], "cpu", group))
            assert any(said), (number, op, name, case)

    run_ranks(body, tmp_path)


# --- what is refused ---------------------------------------------------------------------------------------------


def float8(*shape: int) -> Tensor:
    return torch.zeros(shape).to(E4M3)


ONE = torch.ones(())
RIGHT: dict[str, dict[str, Any]] = {  # arguments of calls that are right on two ranks
    GATHER: {"shard": torch.zeros(4, 6), "others": [torch.zeros(6, 3)], "dim": 0, "size": 8},
    SCATTER: {"lefts": [torch.zeros(8, 6)], "rights": [torch.zeros(6, 3)], "dim": 0},
}
SCALED: dict[str, dict[str, Any]] = {  # changed to float8
    GATHER: {"shard": float8(4, 6), "others": [float8(6, 3)], "scale": ONE, "other_scales": [ONE]},
    SCATTER: {"lefts": [float8(8, 6)], "rights": [float8(6, 3)], "left_scales": [ONE], "right_scales": [ONE]},
}
OF_FLOAT8 = SCALED[GATHER]
ADDRESSED = [  # one scale of either side, and what kernels that get addresses could not tell
    (0, torch.ones((), dtype=torch.float64), "a scale of torch.float64; want torch.float32"),
    (1, torch.ones((), dtype=BF16), "a scale of torch.bfloat16; want torch.float32"),
    (1, torch.ones((), device="meta"), "operands on cpu, meta; want one device"),
]
PAIR = {"lefts": [torch.zeros(8, 6), torch.zeros(8, 5)]}
# What is changed of a call, and what the message says.
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    GATHER: [
        ({"form": "top"}, "form 'top'; want one of left, right, left_t, right_t"),
        *(({"dim": dim}, f"dim {dim} of a shard with 2 dims; want -2 to 1") for dim in (2, -3)),
        *(
            ({"shard": torch.zeros(shape)}, f"a shard of {len(shape)} dims; want 2 to 4 dims")
            for shape in ((6,), (4, 1, 1, 1, 6))
        ),
        ({"shard": torch.zeros(4, 1, 6), "form": "right"}, "a shard of 3 dims; want 2 dims for the form 'right'"),
        ({"size": 9}, "passes 4 of 9 rows along dim 0; want 5: chunks of 5"),
        ({"others": [torch.zeros(1, 6, 3)]}, "others[0] has 3 dims; want [K, N]"),
        ({"others": [torch.zeros(5, 3)]}, "others[0] of shape [5, 3] contracts 5; the gathered tensor 6"),
        ({"form": "right"}, "others[0] of shape [6, 3] contracts 3; the gathered tensor 8"),
        ({"form": "left_t"}, "others[0] of shape [6, 3] contracts 6; the gathered tensor 8"),
        *(
            ({"others": [torch.zeros(6, 3).to(dtype)]}, f"others[0] is {dtype}, shard is torch.float32")
            for dtype in (BF16, E4M3)
        ),
        ({"biases": [torch.zeros(3)] * 2}, "2 biases for 1 products; want one each"),
        *(({"biases": [torch.zeros(shape)]}, f"biases[0] of shape {shape}; want [3]") for shape in ([1], [8, 3])),
        ({"scale": ONE}, "torch.float32 operands need no scale"),
        ({"shard": float8(4, 6), "others": [float8(6, 3)]}, "torch.float8_e4m3fn operands need both scales"),
        (OF_FLOAT8 | {"scale_of": "column"}, "scale_of 'column'; want one of tensor, shard, row"),
        (OF_FLOAT8 | {"other_scales": [ONE] * 2}, "2 other_scales for 1 products; want one each"),
        (OF_FLOAT8 | {"other_scales": [torch.ones(6)]}, "other_scales[0] has 6 numbers; want one, or 3"),
        (OF_FLOAT8 | {"scale_of": "row"}, "a scale of 1 numbers, one for each row; want 4 numbers"),
        *(
            (OF_FLOAT8 | ({"other_scales": [scale]} if side else {"scale": scale}), text)
            for side, scale, text in ADDRESSED
        ),
        (OF_FLOAT8 | {"scale": torch.ones(4)}, "a scale of 4 numbers, one for each tensor; want one number"),
        (
            OF_FLOAT8 | {"others": [float8(8, 3)], "form": "left_t", "scale_of": "shard"},
            "scales by shard along the contracted dim of the form 'left_t'; want one scale",
        ),
        (
            OF_FLOAT8 | {"others": [float8(12, 3)], "dim": 1, "size": 12, "scale_of": "shard"},
            "scales by shard of a tensor split along the contracted dim; want one scale",
        ),
    ],
    SCATTER: [
        ({"lefts": []}, "0 lefts and 1 rights; want as many of each, at least one"),
        ({"lefts": [], "rights": []}, "0 lefts and 0 rights; want as many of each, at least one"),
        (PAIR, "2 lefts and 1 rights; want as many of each, at least one"),
        *(
            ({"lefts": [torch.zeros(shape)]}, f"dim 0 of a product of {len(shape)} dims; want 2 to 4 dims")
            for shape in ((6,), (8, 1, 1, 1, 6))
        ),
        *(({"dim": dim}, f"dim {dim} of a product of 2 dims; want 2 to 4 dims, and one of them") for dim in (2, -3)),
        ({"rights": [torch.zeros(5, 3)]}, "product 0 is [8, 6] @ [5, 3], product 0 [8, 6] @ [5, 3]; want […, K] @"),
        ({"rights": [torch.zeros(1, 6, 3)]}, "product 0 is [8, 6] @ [1, 6, 3]"),
        (PAIR | {"rights": [torch.zeros(6, 3), torch.zeros(5, 4)]}, "product 1 is [8, 5] @ [5, 4], product 0 [8, 6]"),
        (
            {"lefts": [torch.zeros(8, 6), torch.zeros(2, 4, 6)], "rights": [torch.zeros(6, 3)] * 2},
            "product 1 is [2, 4,",
        ),
        ({"rights": [torch.zeros(6, 3, dtype=BF16)]}, "operands of torch.bfloat16, torch.float32; want equal dtypes"),
        ({"rights": [float8(6, 3)]}, "operands of torch.float32, torch.float8_e4m3fn; want equal dtypes"),
        ({"left_scales": [ONE], "right_scales": [ONE]}, "torch.float32 operands need no scale"),
        ({"right_scales": [ONE]}, "torch.float32 operands need no scale"),
        *((SCALED[SCATTER] | {f"{side}_scales": []}, "operands need both scales") for side in ("left", "right")),
        *(
            (SCALED[SCATTER] | {f"{side}_scales": [ONE] * 2}, f"2 {side}_scales for 1 products; want one each")
            for side in ("left", "right")
        ),
        *(
            (
                SCALED[SCATTER] | {f"{side}_scales": [torch.ones(n)]},
                f"{side}_scales[0] has {n} numbers; want one, or {m}",
            )
            for side, n, m in (("left", 4, 8), ("right", 6, 3))
        ),
        *(
            (SCALED[SCATTER] | {("left_scales", "right_scales")[side]: [scale]}, text)
            for side, scale, text in ADDRESSED
        ),
        ({"bias": torch.zeros(1)}, "a bias of shape [1]; want [3]"),
        ({"bias": torch.zeros(3), "dim": 1}, "a bias of shape [3]; want [{own}]"),
    ],
}


@pytest.mark.parametrize("op", STEMS)
def test_what_does_not_fit_is_refused(op: str, tmp_path):
    def body() -> None:
        group = groups(2)["all-2"]
        call = getattr(STEMS[op], op)
        for changed, text in REFUSED[op]:
            if changed.get("size") == 9 and group.me == 1:
                continue  # which has the 4 rows it should have
            text = text.replace("{own}", str(2 - group.me))
            with pytest.raises(ValueError, match=f"{op}: .*" + re.escape(text)):
                call(**RIGHT[op] | changed, group=group.name)

    run_ranks(body, tmp_path)


@pytest.mark.parametrize(
    ("op", "rows", "options"),
    [(GATHER, (129, 128), {"size": 257}), (SCATTER, (514, 514), {})],
)
def test_gradient_of_a_bias_that_is_wider_than_the_product(op: str, rows: tuple, options: dict, tmp_path):
    def body() -> None:
        bias, group = torch.zeros(3, requires_grad=True), groups(2)["all-2"]
        x, w = torch.zeros(rows[group.me], 4, dtype=BF16), torch.zeros(4, 3, dtype=BF16)
        if op == GATHER:
            result = gather_stem.all_gather_matmul(x, [w], 0, group=group.name, biases=[bias], **options)[1]
        else:
            result = scatter_stem.matmul_reduce_scatter([x], [w], 0, group.name, bias=bias)
        result.sum().backward()
        assert bias.grad is not None
        assert bias.grad.tolist() == [257.0] * 3  # bfloat16 has no such number

    run_ranks(body, tmp_path)


@pytest.mark.parametrize("op", STEMS)
def test_float8_operands_their_biases_and_scales_have_no_gradient(op: str, tmp_path):
    def body() -> None:
        sides = ("left_scales", "right_scales") if op == SCATTER else ("scale", "other_scales")
        for name in (*sides, "bias" if op == SCATTER else "biases"):
            own = torch.ones(3 if "bias" in name else (), requires_grad=True)
            given = own if name in ("bias", "scale") else [own]
            out = getattr(STEMS[op], op)(**RIGHT[op] | SCALED[op] | {name: given}, group=groups(2)["all-2"].name)
            with pytest.raises(NotImplementedError, match="float8 operands have no gradient"):
                (out if op == SCATTER else out[1]).float().sum().backward()

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
        out = scatter_stem.matmul_reduce_scatter([x], [w], 0, groups(2)["all-2"].name)
        assert type(out.grad_fn).__name__ == "matmul_reduce_scatterBackward"
        (NoGradient.apply(out) if dist.get_rank() else out).sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        assert x.grad.sum(1).tolist() == [18.0] * 4 + [0.0] * 4

    run_ranks(body, tmp_path)
