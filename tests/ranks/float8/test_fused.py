"""Float8 with its collectives fused: the casts are torchao's, and backward's products are as exact as its own."""

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.ranks import run_ranks, world_group
from tests.support.sqnr import sqnr
from titanlite import recipes
from titanlite.config.recipe_schema import Float8Recipe
from titanlite.device import CPU
from titanlite.float8.cast import cast
from titanlite.float8.emulated import EmulatedFloat8
from titanlite.float8.fused import feed_forward
from titanlite.float8.matmul import Float8Matmul
from titanlite.float8.scope import joins_feed_forward
from titanlite.float8.weight import GatheredWeight
from titanlite.kernels.collectives import gather_tokens, scatter_tokens
from titanlite.kernels.swiglu import swiglu

RECIPES = ("rowwise", "tensorwise")
M, K, N = 128, 64, 96


def numbers(seed: int, *shape: int, spread: bool = False) -> Tensor:
    """Normal numbers; with `spread`, tokens of very different sizes."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=rng, dtype=torch.float64)
    return x * torch.exp(torch.randn(shape[0], 1, generator=rng, dtype=torch.float64)) if spread else x


class Run:
    """A tensor-parallel layer in float8, fused and not, and in float64; forward and backward."""

    def __init__(self, recipe: Float8Recipe, gathers: bool, spread: bool = False) -> None:
        _, _, rank = group = world_group()
        matmul = Float8Matmul(recipe, CPU)
        tokens, whole, grad = numbers(0, M, K, spread=spread), numbers(1, N, K), numbers(2, M, N, spread=spread)
        x = tokens.chunk(2)[rank] if gathers else tokens.chunk(2, 1)[rank]
        w = whole.chunk(2, 0 if gathers else 1)[rank]
        g = grad.chunk(2, 1)[rank] if gathers else grad.chunk(2)[rank]

        def ran(function, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
            a, b = (t.to(dtype).requires_grad_() for t in (x, w))
            y = function(a, b)
            return y.detach(), *torch.autograd.grad(y, (a, b), g.to(dtype))

        if gathers:
            self.fused = ran(lambda a, b: matmul.fused.gathered(a, b, group), torch.float32)
            self.plain = ran(lambda a, b: matmul(gather_tokens(a, group), b), torch.float32)
            self.truth = ran(lambda a, b: gather_tokens(a, group) @ b.t(), torch.float64)
        else:
            self.fused = ran(lambda a, b: matmul.fused.scattered(a, b, group), torch.float32)
            self.plain = ran(lambda a, b: scatter_tokens(matmul(a, b), group), torch.float32)
            self.truth = ran(lambda a, b: scatter_tokens(a @ b.t(), group), torch.float64)


def test_products_are_as_exact_as_torchaos(tmp_path) -> None:
    def body() -> None:
        for recipe, gathers, spread in itertools.product(RECIPES, (False, True), (False, True)):
            run = Run(recipes.load("float8", recipe), gathers, spread)
            for name, fused, plain, truth in zip(("y", "d_x", "d_w"), run.fused, run.plain, run.truth, strict=True):
                ours, theirs = sqnr(fused, truth), sqnr(plain, truth)
                assert ours > theirs - 0.5, f"{recipe}, {name}: {ours:.1f} dB, torchao {theirs:.1f}"
                assert ours < 40, f"{recipe}, {name}: {ours:.1f} dB is not float8"
                if recipe == "rowwise" and name != "d_w":
                    # The same bits and scales, added in another order: float32's rounding, and no cast's.
                    assert sqnr(fused, plain) > 110, name

    run_ranks(body, tmp_path, 2)


class Called(TorchDispatchMode):
    """Notes the fused operators that run, with `fast_accum`, and every other collective; counts plain products."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[tuple[str, bool]] = []
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func.overloadpacket)
        self.products += name == "titanlite.scaled_matmul"
        if name in ("titanlite.all_gather_matmul", "titanlite.matmul_reduce_scatter"):
            self.names.append((name.removeprefix("titanlite."), args[-1] is True))
        elif func.namespace in ("_c10d_functional", "c10d"):
            self.names.append((name, False))
        return func(*args, **(kwargs or {}))


def test_collectives_and_accumulation_are_those_of_the_recipe(tmp_path) -> None:
    """Nothing but the two fused operators, no maximum among them; forward is fast, backward is not."""

    def body() -> None:
        _, _, rank = group = world_group()
        for recipe, gathers in itertools.product(RECIPES, (True, False)):
            matmul = Float8Matmul(recipes.load("float8", recipe), CPU)
            function = matmul.fused.gathered if gathers else matmul.fused.scattered
            x, w = numbers(rank, M, K).float().requires_grad_(), numbers(1, N, K).float().requires_grad_()
            with Called() as called:
                y = function(x, w, group)
                y.backward(torch.ones_like(y))
            order = ["all_gather_matmul", "matmul_reduce_scatter"]
            want = list(zip(order if gathers else order[::-1], (True, False), strict=True))
            inside = [name for name in called.names if name in want]
            assert inside == want, called.names
            # On CPUs an operator is its definition, whose one collective is seen too.
            assert len(called.names) <= len(want) + 3, called.names
            assert not any("reduce_" in name and "scatter" not in name for name, _ in called.names), called.names

    run_ranks(body, tmp_path, 2)


def test_a_weight_that_was_gathered_in_float8(tmp_path) -> None:
    def body() -> None:
        _, _, rank = group = world_group()
        for recipe in RECIPES:
            chosen = recipes.load("float8", recipe)
            matmul = Float8Matmul(chosen, CPU)
            for function in (matmul, matmul.fused.gathered, matmul.fused.scattered):
                results = []
                for in_float8 in (False, True):
                    x, w = numbers(rank, M, K).float().requires_grad_(), numbers(1, N, K).float()
                    if in_float8:
                        w = GatheredWeight(*cast(w, chosen.weight.output, "e4m3", chosen.scale_rounding), w.dtype)
                    y = function(x, w) if function is matmul else function(x, w, group)
                    results.append((y.detach(), *torch.autograd.grad(y, x, torch.ones_like(y))))
                (y, d_x), (y_cast, d_x_cast) = results
                assert torch.equal(y, y_cast)
                # Rows were cast before they were cast by column, which rounds what was too small for one of the two.
                assert torch.equal(d_x, d_x_cast) if recipe == "tensorwise" else sqnr(d_x_cast, d_x) > 28

    run_ranks(body, tmp_path, 2)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("wide", ["grad", "x"])
def test_a_layer_by_itself_is_as_exact_as_torchaos(recipe: str, wide: str) -> None:
    """Whichever factor of the weight's gradient is the wider one, and so is not cast again."""
    chosen = recipes.load("float8", recipe)
    ours, theirs = Float8Matmul(chosen, CPU), EmulatedFloat8(chosen)
    K, N = (64, 160) if wide == "grad" else (160, 64)
    x, w, g = numbers(0, M, K, spread=True), numbers(1, N, K), numbers(2, M, N, spread=True)

    def ran(function, dtype: torch.dtype) -> tuple[Tensor, ...]:
        a, b = (t.to(dtype).requires_grad_() for t in (x, w))
        y = function(a, b)
        return y.detach(), *torch.autograd.grad(y, (a, b), g.to(dtype))

    truth, got, want = ran(lambda a, b: a @ b.t(), torch.float64), ran(ours, torch.float32), ran(theirs, torch.float32)
    for name, mine, torchaos, exact in zip(("y", "d_x", "d_w"), got, want, truth, strict=True):
        if recipe == "tensorwise" or name != "d_w":
            assert sqnr(mine, torchaos) > 110, name  # the same bits and scales, added in another order
        assert sqnr(torchaos, exact) - 0.5 < sqnr(mine, exact) < 40, name


@pytest.mark.parametrize("wide", ["x", "grad"])
def test_what_is_cast_again_has_a_scale_for_each_column(wide: str) -> None:
    """A feature that small tokens alone have: beside the largest of all it would be zero, as its weights' gradient."""
    sizes = (K, N) if wide == "grad" else (N, K)  # of the two, the narrower is cast again
    x, grad = numbers(0, M, sizes[0]), numbers(1, M, sizes[1])
    narrow = x if wide == "grad" else grad
    narrow[: M // 2, 0] = 0
    narrow[M // 2 :] *= 2.0**-20
    weight = numbers(2, sizes[1], sizes[0]).bfloat16().requires_grad_()
    out = Float8Matmul(recipes.load("float8", "rowwise"), CPU)(x.bfloat16(), weight)
    (got,) = torch.autograd.grad(out, weight, grad.bfloat16())
    truth = grad.T @ x
    of_feature = (slice(None), 0) if wide == "grad" else 0
    # Each factor is rounded by up to 2⁻⁴ of itself, 2⁻⁴/√3 in the mean if its place between two numbers is random.
    assert sqnr(got[of_feature], truth[of_feature]) > -20 * math.log10(2**-4 * math.sqrt(2 / 3))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("wanted", ["x", "weight"])
def test_a_gradient_that_nobody_wants_is_not_computed(recipe: str, wanted: str) -> None:
    operands = {"x": numbers(0, M, K).bfloat16(), "weight": numbers(1, N, K).bfloat16()}
    operands[wanted].requires_grad_()
    out = Float8Matmul(recipes.load("float8", recipe), CPU)(**operands)
    with Called() as called:
        torch.autograd.grad(out, operands[wanted], numbers(2, M, N).bfloat16())
    assert called.products == 1


@pytest.mark.parametrize("wanted", ["x", "w13", "w2"])
def test_a_feed_forward_computes_no_gradient_that_nobody_wants(wanted: str) -> None:
    """Backward then has two products: of the gradient with w2, and the one that is wanted."""
    shapes = {"x": (M, K), "w13": (1024, K), "w2": (K, 512)}
    operands = {name: numbers(n, *shape).bfloat16() for n, (name, shape) in enumerate(shapes.items())}
    operands[wanted].requires_grad_()
    out = feed_forward(**operands, group=None, recipe=recipes.load("float8", "rowwise"))
    with Called() as called:
        torch.autograd.grad(out, operands[wanted], numbers(3, M, K).bfloat16())
    assert called.products == 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_feed_forward_in_one_is_as_exact_as_in_parts(recipe: str, tmp_path) -> None:
    """By itself, and where tokens are gathered before it and scattered after it."""
    chosen = recipes.load("float8", recipe)
    matmul, F = Float8Matmul(chosen, CPU), 512

    def body() -> None:
        _, _, rank = group = world_group()
        for ranks in (group, None):
            if not joins_feed_forward(chosen, ranks is not None):
                assert recipe == "tensorwise"
                continue
            n = 1 if ranks is None else 2
            x, g = numbers(rank, M, K, spread=True), numbers(2, M, K, spread=True)
            w13, w2 = numbers(3, 2 * F, K).chunk(n)[rank % n] / 8, numbers(4, K, F).chunk(n, 1)[rank % n] / 8

            def ran(function, dtype: torch.dtype) -> tuple[Tensor, ...]:
                args = [t.to(dtype).requires_grad_() for t in (x, w13, w2)]  # noqa: B023
                y = function(*args)
                return y.detach(), *torch.autograd.grad(y, args, g.to(dtype))  # noqa: B023

            def plain(x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
                if ranks is None:  # noqa: B023
                    return swiglu(x @ w13.t()) @ w2.t()
                return scatter_tokens(swiglu(gather_tokens(x, ranks) @ w13.t()) @ w2.t(), ranks)  # noqa: B023

            def parts(x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
                if ranks is None:  # noqa: B023
                    return matmul(swiglu(matmul(x, w13)), w2)
                return matmul.fused.scattered(swiglu(matmul.fused.gathered(x, w13, ranks)), w2, ranks)  # noqa: B023

            joined = ran(lambda x, w13, w2: feed_forward(x, w13, w2, ranks, chosen), torch.float32)  # noqa: B023
            apart, truth = ran(parts, torch.float32), ran(plain, torch.float64)
            assert torch.equal(joined[0], apart[0])
            for name, one, two, exact in zip(("y", "d_x", "d_w13", "d_w2"), joined, apart, truth, strict=True):
                assert sqnr(two, exact) - 0.3 < sqnr(one, exact) < 40, name
                assert sqnr(one, two) > 50, name  # a gradient's last place, which few casts show

    run_ranks(body, tmp_path, 2)


def test_finer_scales_for_weight_gradients_are_not_fused() -> None:
    """Channels of very different sizes: one scale for all of them would lose the small ones."""
    tensorwise = dataclasses.replace(recipes.load("float8", "tensorwise"), scale_rounding="pow2_floor")
    finer = dataclasses.replace(
        tensorwise,
        input=dataclasses.replace(tensorwise.input, grad_weight="row"),
        grad_output=dataclasses.replace(tensorwise.grad_output, grad_weight="row", dtype="e4m3"),
    )
    matmul = Float8Matmul(finer, CPU)
    assert "finer scales" in str(matmul.unfused)
    x, w, g = numbers(0, M, K).float(), numbers(1, N, K).float().requires_grad_(), numbers(2, M, N).float()
    x[:, :4] *= 2.0**14
    (d_w,) = torch.autograd.grad(matmul(x, w), w, g)
    assert sqnr(d_w[:, 4:], (g.double().t() @ x.double())[:, 4:]) > 20


def test_scales_by_row_that_are_no_powers_of_two_are_not_fused() -> None:
    exact = dataclasses.replace(recipes.load("float8", "rowwise"), scale_rounding="exact")
    assert "are not powers of two" in str(Float8Matmul(exact, CPU).unfused)
