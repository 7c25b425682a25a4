"""Experts in float8 against a loop over experts in float64, and where places of groups lie."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.needs import DEVICES
from tests.support.sqnr import sqnr
from tests.unit.kernels.test_experts import choices_of, one_by_one, random
from titanlite import recipes
from titanlite.config.schema import Config, Float8
from titanlite.device import CPU
from titanlite.float8.convert import Conversion, apply_float8
from titanlite.float8.experts import Float8Experts
from titanlite.float8.receipt import float8_entry
from titanlite.float8.weight import GatheredWeight, WeightShard
from titanlite.kernels.aligned_rows import aligned_places, aligned_rows
from titanlite.kernels.experts import experts
from titanlite.kernels.float8_cast import cast_rows
from titanlite.kernels.routing import expert_rows
from titanlite.models.experts import MixtureOfExperts
from titanlite.models.moe import Qwen3MoE

E = 5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["random", "one expert", "an expert without tokens"])
@pytest.mark.parametrize(("D", "F"), [(256, 128), (128, 256)])
def test_results_and_gradients_are_as_near_as_float8_by_row_is(kind: str, D: int, F: int, device: str) -> None:
    """A cast to e4m3 adds noise of 31.6 dB below (0.0007 of the power), so a product of two 0.0014. The gate has two
    noisy factors, 0.0028, and the second product 0.0014 more: 0.0042, 23.8 dB. Back through a weight, which meets it
    cast twice, 0.0021; through the gate 0.0028; cast, and through the first weight, 0.0021: 0.007, 21.5 dB for the
    gradient of x, and so for that of w13, whose other operand is cast twice. Those of w2 and of the weights have the
    gate's noise and three casts or a product: 0.0049, 23.1 dB. Each may fall short by 0.6 dB."""
    M, K = 300, 2
    bf16 = {"device": device, "dtype": torch.bfloat16}
    given = [
        random(M, D, seed=0, **bf16),
        random(M, K, seed=1, device=device, dtype=torch.float32).abs(),
        (random(E * 2 * F, D, seed=2) / D**0.5).to(**bf16),
        (random(E * D, F, seed=3) / F**0.5).to(**bf16),
    ]
    choices, grad = choices_of(kind, M, K, device), random(M, D, seed=4, **bf16)
    float8 = Float8Experts(recipes.load("float8", "rowwise"))
    own = [t.detach().requires_grad_() for t in given]
    y = float8(*own[:2], choices, *own[2:], E)
    got = [y, *torch.autograd.grad(y, own, grad)]
    x, weights, w13, w2 = (t.double().detach().requires_grad_() for t in given)
    y = one_by_one(x, weights, choices, w13.unflatten(0, (E, -1)), w2.unflatten(0, (E, -1)))
    truth = [y, *torch.autograd.grad(y, [x, weights, w13, w2], grad.double())]
    for ours, wanted, least in zip(got, truth, (23.2, 20.9, 22.5, 20.9, 22.5), strict=True):
        assert ours.dtype in (torch.bfloat16, torch.float32)
        assert sqnr(ours, wanted) > least


def test_a_weight_that_came_in_float8_gives_the_same_bits() -> None:
    M, K, D, F = 40, 2, 128, 128
    x, weights = random(M, D, seed=0, dtype=torch.bfloat16), torch.rand(M, K)
    w13, w2 = (random(n, k, seed=k, dtype=torch.bfloat16) for n, k in ((E * 2 * F, D), (E * D, F)))
    choices, float8 = choices_of("random", M, K), Float8Experts(recipes.load("float8", "rowwise"))
    gathered = [GatheredWeight(*cast_rows(w, torch.float8_e4m3fn), w.dtype) for w in (w13, w2)]
    assert torch.equal(float8(x, weights, choices, w13, w2, E), float8(x, weights, choices, *gathered, E))


class Gradients(TorchDispatchMode):
    """Counts products that are gradients of experts' weights, and layouts of rows for them."""

    count = laid_out = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket._qualified_op_name
        self.count += name.endswith(("grouped_weight_gradient", "grouped_gradient"))
        self.laid_out += name.endswith("aligned_rows")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("compute", [experts, Float8Experts(recipes.load("float8", "rowwise"))])
@pytest.mark.parametrize("frozen", [("w13",), ("w2",), ("w13", "w2")])
def test_frozen_weights_have_no_gradient_and_change_no_other(compute: Any, frozen: tuple[str, ...]) -> None:
    M, K, D, F = 40, 2, 128, 128
    sizes = {"x": (M, D), "weights": (M, K), "w13": (E * 2 * F, D), "w2": (E * D, F)}
    choices, grad = choices_of("random", M, K), random(M, D, seed=4, dtype=torch.bfloat16)

    def gradients(without: tuple[str, ...]) -> tuple[dict[str, Tensor], int]:
        given = {n: random(*s, seed=i, dtype=torch.bfloat16) for i, (n, s) in enumerate(sizes.items())}
        leaves = {name: t.requires_grad_() for name, t in given.items() if name not in without}
        y = compute(given["x"], given["weights"].float(), choices, given["w13"], given["w2"], E)
        with Gradients() as made:
            y.backward(grad)
        assert made.laid_out == (compute is not experts and made.count > 0)
        return {name: t.grad for name, t in leaves.items()}, made.count  # type: ignore[misc]

    every, products = gradients(())
    some, fewer = gradients(frozen)
    assert (products, fewer) == (2, 2 - len(frozen))
    assert all(torch.equal(gradient, every[name]) for name, gradient in some.items())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["random", "one expert", "an expert without tokens"])
def test_places_of_a_group_begin_at_multiples_of_sixteen(kind: str, device: str) -> None:
    M, K = 75, 2
    _, slots, offsets = expert_rows(choices_of(kind, M, K, device), 0, E)
    row_of, token_of, begins = (t.tolist() for t in aligned_rows(slots, offsets, K))
    assert len(row_of) == len(token_of) == aligned_places(M * K, E)
    wanted, ends = [-1] * len(row_of), offsets.tolist()
    assert begins[0] == 0
    for group in range(E):
        n = ends[group + 1] - ends[group]
        assert begins[group + 1] == begins[group] + -(-n // 16) * 16
        wanted[begins[group] : begins[group] + n] = range(ends[group], ends[group + 1])
    assert row_of == wanted
    assert token_of == [-1 if row < 0 else int(slots[row]) // K for row in wanted]


def test_there_is_room_however_the_rows_fall() -> None:
    for counts in ([1] * 20, [17] * 20, [16] * 20, [0] * 20, [320] + [1] * 19):
        assert sum(-(-n // 16) * 16 for n in counts) <= aligned_places(sum(counts), len(counts))


@pytest.mark.parametrize(
    ("shards", "of_experts", "each", "summary"),
    [
        (1, 2, ("weight cast once", "weight gathered in float8"), "float8 of 4 layers; 4 each rank has whole"),
        (2, 1, ("weight gathered in float8", "weight cast once"), "float8 of 4 layers; 4 each rank has whole"),
        (2, None, ("weight gathered in float8", "weight gathered in float8"), "float8"),
        (1, 1, ("weight cast once", "weight cast once"), "nothing: each rank has its weights whole"),
    ],
)
def test_the_receipt_says_what_is_gathered_of_experts_and_of_all_else(
    shards: int, of_experts: int | None, each: tuple[str, str], summary: str
) -> None:
    """Tensor parallelism alone splits experts over its ranks; expert parallelism leaves each rank its own, whole."""
    recipe = recipes.load("float8", "rowwise")
    with torch.device("meta"):
        model = Qwen3MoE(recipes.load("model", "qwen3_moe-debug"), 64)
    done = apply_float8(model, recipe, ("output",), CPU, 128, shards, of_experts)
    config = Config(float8=Float8(recipe="rowwise", filter_fqns=("output",)))
    applied = float8_entry(model, done, recipe, config, CPU).applied
    assert str(applied["fsdp_all_gather"]).startswith(summary)
    said = applied["each"]
    assert [said[f"layers.0.{name}"].split(", ")[-1] for name in ("attention.wqkv", "experts.w13")] == [*each]


def test_a_recipe_converts_both_projections_or_neither() -> None:
    """By row they are cast before FSDP gathers them; experts have no arithmetic for other scales; a filter keeps one
    projection, and with it the other, in high precision."""
    dims = recipes.load("model", "qwen3_moe-debug")

    def converted(name: str, filters: tuple[str, ...]) -> tuple[MixtureOfExperts, Conversion]:
        with torch.device("meta"):
            model = Qwen3MoE(dims, 64)
        done = apply_float8(model, recipes.load("float8", name), ("output", *filters), CPU, 128, 2)
        return model.layers[0].experts, done

    layer, done = converted("rowwise", ())
    assert isinstance(layer.compute, Float8Experts)
    assert isinstance(layer.w13.weight.data, WeightShard)
    assert {"layers.0.experts.w13", "layers.0.experts.w2"} <= set(done.converted)
    for name, filters, why in (("tensorwise", (), "scales by row"), ("rowwise", ("experts.w2",), "filter_fqns")):
        layer, done = converted(name, filters)
        assert layer.compute is experts
        for part in ("w13", "w2"):
            assert why in done.skipped[f"layers.0.experts.{part}"]
            assert not isinstance(getattr(layer, part).weight.data, WeightShard)
    left = "float8.filter_fqns has 'experts.w2'"
    assert done.skipped["layers.0.experts.w2"] == left
    assert done.skipped["layers.0.experts.w13"] == f"all are converted or none, and of w2 {left}"
