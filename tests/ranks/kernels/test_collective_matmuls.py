"""Both collective matmuls: every case, and what autograd, the compiler and the counter of operations make of them."""

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.support.collective_cases import (
    F64,
    Case,
    Gather,
    Given,
    Numbers,
    call_of,
    check_cases,
    contracted,
    families,
    gathers,
    given_of,
    groups,
    run_case,
    scatters,
    sizes,
    truths_of,
)
from tests.support.needs import slow
from tests.support.ranks import run_ranks
from titanlite.kernels.all_gather_matmul import all_gather_matmul
from titanlite.kernels.matmul_reduce_scatter import matmul_reduce_scatter

WORLD = 4  # and in it groups of four, three, and twice two ranks
FAMILIES = {
    f"{op} {name}": cases
    for op, every in (("gather", gathers("cpu")), ("scatter", scatters("cpu")))
    for name, cases in families(every).items()
}
# float64 takes the same code as what is rounded, of 16 bits as of 32; here one form of it is exact.
QUICK = [name for name in FAMILIES if not name.endswith(("float64", "float16", "left-float8"))]
QUICK.append("gather right-float64")
CASES: dict[str, Case] = {f"gather {case.id}": case for case in gathers("cpu")}
CASES |= {f"scatter {case.id}": case for case in scatters("cpu")}
ONE_OF_EACH_KIND = [
    *(
        f"gather {case}-float64"
        for case in ("three-products-bias", "right-bias", "left_t-columns", "right_t-contracted")
    ),
    *(f"scatter {case}-float64" for case in ("three-products-bias", "columns-bias")),
]


@pytest.mark.parametrize("family", QUICK)
def test_cases(family: str, tmp_path):
    run_ranks(lambda: check_cases(FAMILIES[family], WORLD, everywhere=False), tmp_path, WORLD)


@pytest.mark.slow  # any case in any group: above, each is in the world and in turn in one kind of smaller group
@pytest.mark.parametrize("family", FAMILIES)
def test_cases_in_every_group(family: str, tmp_path):
    run_ranks(lambda: check_cases(FAMILIES[family], WORLD), tmp_path, WORLD)


@pytest.mark.parametrize("case", [*ONE_OF_EACH_KIND[1:], *slow(ONE_OF_EACH_KIND[0])])
def test_gradients_that_are_asked_for(case: str, tmp_path):
    def body() -> None:
        group, of = groups(2)["all-2"], CASES[case]
        every = [given_of(of, "cpu", group, r, "exact") for r in range(2)]
        operands, grads = every[group.me].operands, every[group.me].grads
        leaves = [[t.clone().requires_grad_() for t in given.operands] for given in every]
        true_outs = truths_of(of, every)(*(leaf for ts in leaves for leaf in ts))
        n = len(grads)
        for used in ([0], [1], [n - 1], list(range(1, n)), list(range(n))) if n > 1 else ([0],):
            true = [out for outs in true_outs for i, out in enumerate(outs) if i in used]
            upstream = [grad for given in every for i, grad in enumerate(given.grads) if i in used]
            wanted = torch.autograd.grad(
                true, leaves[group.me], upstream, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            for needed in itertools.product([False, True], repeat=len(operands)):
                if not any(needed):
                    continue
                mine = [t.clone().requires_grad_(need) for t, need in zip(operands, needed, strict=True)]
                outs = run_case(of, "cpu", Given(mine), group.name)
                torch.autograd.backward([outs[i] for i in used], [grads[i] for i in used])
                for leaf, need, want in zip(mine, needed, wanted, strict=True):
                    got = leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
                    assert torch.equal(got, want) if need else leaf.grad is None, (used, needed)

    run_ranks(body, tmp_path)


# The compiler checks an operator's shapes and gradients, too: what is compiled in one test is not checked in the other.
# Of products whose operands are of any kind, the most general is in both.
IN_BOTH = [name for name in ONE_OF_EACH_KIND if "three-products" in name]
CHECKED = ["gather right-bias-float64", "gather no-product-float64", "scatter ragged-batch-columns-float64"]
COMPILED = ["gather left_t-columns-float64", "gather right_t-contracted-float64", "scatter columns-bias-float64"]
COMPILED += [*IN_BOTH, "gather batch-1-float64"]
MORE_CHECKED = [*COMPILED[:3], "gather batch-1-bfloat16", "scatter batch-1-bfloat16"]
MORE_COMPILED = ["gather right-bias-float64", "scatter batch-1-float64"]


@pytest.mark.parametrize("cases", [IN_BOTH, *slow(CHECKED, MORE_CHECKED)])
def test_operators(cases: list[str], tmp_path):
    def body() -> None:
        group = groups(2)["all-2"]
        for case in cases:
            of = CASES[case]
            given = given_of(of, "cpu", group, group.me, "normal")
            args = tuple(call_of(of, "cpu", Given([t.requires_grad_() for t in given.operands]), group.name))
            name = "all_gather_matmul" if isinstance(of, Gather) else "matmul_reduce_scatter"
            op = getattr(torch.ops.titanlite, name).default
            torch.library.opcheck(op, args)
            results = op(*args)
            results = results if isinstance(results, list) else [results]
            assert not any(result._is_view() for result in results), "FSDP warns of a module that returns a view"

    run_ranks(body, tmp_path)


@pytest.mark.parametrize("cases", slow(COMPILED, MORE_COMPILED))
def test_compiled(cases: list[str], tmp_path):
    def body() -> None:
        group = groups(2)["all-2"]
        for case in cases:
            of = CASES[case]
            given, ran = given_of(of, "cpu", group, group.me, "normal"), []

            def squares(*operands: Tensor, of=of) -> list[Tensor]:
                outs = run_case(of, "cpu", Given([2 * t for t in operands]), group.name)
                return [out.square() for out in outs]

            for run in (squares, torch.compile(squares, fullgraph=True, backend="aot_eager")):
                leaves = [t.clone().requires_grad_() for t in given.operands]
                outs = run(*leaves)
                torch.autograd.backward(outs, given.grads)
                ran.append([*outs, *(leaf.grad for leaf in leaves)])
            assert all(torch.equal(a, b) for a, b in zip(*ran, strict=True)), case

    run_ranks(body, tmp_path)


@pytest.mark.parametrize("case", [*ONE_OF_EACH_KIND[1:], *slow(ONE_OF_EACH_KIND[0])])
def test_flops(case: str, tmp_path):
    of = CASES[case]
    if isinstance(of, Gather):
        columns = sum(math.prod(sizes(other, "cpu")) for other in of.others)
        each = 2 * columns * math.prod(sizes(of.whole, "cpu")) // contracted(of, "cpu")
    else:
        each = 2 * math.prod(sizes(f"{of.rows} {of.columns}", "cpu")) * sum(sizes(K, "cpu")[0] for K in of.inner)

    def body() -> None:
        group = groups(2)["all-2"]
        given = given_of(of, "cpu", group, group.me, "normal")
        leaves = [t.requires_grad_() for t in given.operands]
        with FlopCounterMode(display=False) as forward:
            outs = run_case(of, "cpu", Given(leaves), group.name)
        assert forward.get_total_flops() == each
        with FlopCounterMode(display=False) as backward:
            torch.autograd.backward(outs, given.grads)
        assert backward.get_total_flops() == 2 * each  # one product for either operand

    run_ranks(body, tmp_path)


@pytest.mark.parametrize("backend", ["aot_eager", *slow("inductor")])  # whose code runs in test_async_tp.py
def test_compiled_between_layers(backend, tmp_path):
    rng = Numbers("layers", "cpu", terms=8)
    x, w_in, w_out = (rng.operand(shape, F64) for shape in ([6, 4], [4, 8], [8, 4]))

    def body() -> None:
        group = groups(2)["all-2"]
        mine = x.chunk(2)[group.me], w_in.chunk(2, 1)[group.me], w_out.chunk(2)[group.me]

        def layers(x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
            _, hidden = all_gather_matmul(x, [w_in], 0, 6, group.name)
            return matmul_reduce_scatter([hidden.relu()], [w_out], 0, group.name)

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
