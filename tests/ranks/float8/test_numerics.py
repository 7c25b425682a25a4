"""A look at float8 in training: right numbers under every layout, and training that does not notice it."""

import math
from contextlib import closing
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

from tests.support.needs import slow
from tests.support.ranks import run_ranks
from tests.support.short_run import assemble, batches_of, checked, take_steps
from titanlite import recipes
from titanlite.config.recipe_schema import Granularity
from titanlite.device import CPU
from titanlite.float8 import fused, numerics, weight
from titanlite.float8.cast import DTYPES, Cast, cast
from titanlite.float8.matmul import Float8Matmul
from titanlite.float8.numerics import float8_numerics
from titanlite.kernels.float8_scales import cast_to
from titanlite.models.layers import Linear, Sequences
from titanlite.training.attention import torch_order
from titanlite.training.build import Run
from titanlite.training.step import train_step

SMALL = ["--training.seq_len", "128", "--training.global_batch_size", "2"]
FLOAT8 = ["--training.mixed_precision_param", "bfloat16", *SMALL, "--float8.recipe"]
LAYERS = ("attention.wqkv", "attention.wo", "feed_forward.w13", "feed_forward.w2")
LAYOUTS = {
    "one process": (1, []),
    "HSDP 2 × 2": (4, ["--parallelism.data_parallel_replicate_degree", "2", "--training.global_batch_size", "4"]),
    "FSDP 2 × TP 2": (4, ["--parallelism.tensor_parallel_degree", "2"]),
    "TP 2, async": (
        2,
        ["--parallelism.tensor_parallel_degree", "2", "--parallelism.async_tensor_parallel"],
    ),
}


def look(run: Run, is_counted: Tensor | None = None) -> dict[str, float]:
    seq_len = run.config.training.seq_len
    tokens = torch.randint(256, (seq_len,), generator=torch.Generator().manual_seed(0))
    return float8_numerics(run.model, tokens, run.mesh.fsdp, Sequences(seq_len), is_counted)


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        ("tensorwise", "one process"),
        ("tensorwise", "HSDP 2 × 2"),
        *slow(("rowwise", "TP 2, async"), ("tensorwise", "FSDP 2 × TP 2")),
        *slow(("blockwise", "FSDP 2 × TP 2")),
    ],
)
def test_every_layer_is_measured_under_every_layout(recipe: str, layout: str, tmp_path) -> None:
    world, flags = LAYOUTS[layout]
    asked = checked(tmp_path, world, [*FLOAT8, recipe, *flags])

    def body() -> None:
        run = assemble(asked)
        take_steps(run, 1)
        found = look(run)
        names = [f"layers.{n}.{layer}" for n in range(run.dims.n_layers) for layer in LAYERS]
        assert sorted(name.partition(".")[2] for name in found if "sqnr" in name) == sorted(names)
        contract = recipes.load("float8", recipe).contract
        assert contract is not None
        for name in names:
            assert contract.sqnr_db.output - 2 < found[f"float8_output_sqnr_db.{name}"] < contract.sqnr_below_db.output
            for operand in ("input", "weight"):
                assert found[f"float8_{operand}_saturated.{name}"] == 0  # scales are of the tensors themselves
                assert 0 <= found[f"float8_{operand}_flushed.{name}"] < 0.1
        of_ranks: list[object] = [None] * world
        dist.all_gather_object(of_ranks, found)
        assert of_ranks == [found] * world

    run_ranks(body, tmp_path, world)


def test_tokens_that_pad_are_not_counted(tmp_path) -> None:
    """The shares of all tokens are the means of those of either half; of none there is nothing to say."""
    asked = checked(tmp_path, 1, [*FLOAT8, "tensorwise"])
    is_first = torch.arange(128) < 64

    def body() -> None:
        found: list[dict[str, float]] = []
        for is_counted in (None, is_first, ~is_first, is_first & False):
            run = assemble(asked)
            take_steps(run, 1)
            found.append(look(run, is_counted))
        of_all, first, second, of_none = found
        assert of_none == {}
        assert first != second
        for name in filter(lambda name: "input_flushed" in name, of_all):
            assert (first[name] + second[name]) / 2 == pytest.approx(of_all[name], rel=1e-12)

    run_ranks(body, tmp_path, 1)


@pytest.mark.slow
def test_training_does_not_notice(tmp_path) -> None:
    world, flags = LAYOUTS["FSDP 2 × TP 2"]
    asked = checked(tmp_path, world, [*FLOAT8, "tensorwise", *flags, "--activation_checkpoint.recipe", "balanced"])

    def body() -> None:
        results, states = [], []
        for looks in (False, True):
            run, steps, drawn = assemble(asked), [], []
            run.model.register_forward_pre_hook(lambda *_: torch.rand(1) and None)  # as dropout does
            matmuls = [module.matmul for module in run.model.modules() if isinstance(module, Linear)]
            with closing(batches_of(run)) as batches, torch_order():
                for _ in range(2):
                    steps += train_step(run, batches.next(), 1e-3, stop_requested=False).values()
                    drawn.append(torch.get_rng_state())
                    if looks:
                        look(run)
            assert matmuls == [module.matmul for module in run.model.modules() if isinstance(module, Linear)]
            results.append(torch.stack(steps))
            states.append(torch.stack(drawn))
        assert torch.equal(*results)
        assert torch.equal(*states)

    run_ranks(body, tmp_path, world)


@pytest.mark.slow
@pytest.mark.usefixtures("without_machine_code")
def test_compiled_code_stays_and_is_not_compiled_again(tmp_path) -> None:
    asked = checked(tmp_path, 1, [*FLOAT8, "rowwise", "--compile.enable"])

    def body() -> None:
        run = assemble(asked)
        take_steps(run, 1)
        graphs = counters["stats"]["unique_graphs"]
        assert graphs > 0
        calls = [block._compiled_call_impl for block in run.model.layers]
        found = look(run)
        take_steps(run, 1)
        assert counters["stats"]["unique_graphs"] == graphs
        assert calls == [block._compiled_call_impl for block in run.model.layers]
        assert min(number for name, number in found.items() if "sqnr" in name) > 25

    run_ranks(body, tmp_path, 1)


def test_what_is_lost_is_counted() -> None:
    x = torch.tensor([[448.0, 463.0, 465.0, -1e4], [0.0, 2.0**-11, 2.0**-9, math.inf]])
    data = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    saturated, flushed, n = numerics._count(x, Cast(data, torch.ones(())))
    assert (saturated, flushed, n) == (3, 1, 8)  # 463 rounds to 448, and 465 would to 480; half the least number to 0
    x = torch.tensor([[57344.0, 61439.0, 61441.0]])
    data = x.clamp(-57344, 57344).to(torch.float8_e5m2)
    assert numerics._count(x, Cast(data, torch.ones(())))[0] == 1


def test_a_scale_that_is_not_of_the_tensor_is_seen(tmp_path, monkeypatch) -> None:
    """Of weights a quarter as large, and of inputs 1e6 times as large."""
    asked = checked(tmp_path, 1, [*FLOAT8, "rowwise"])

    def stale(factor: float, x: Tensor, of: Granularity, dtype: str, rounding: str, over: object = None) -> Cast:
        scale_inv = cast(x, of, dtype, rounding).scale_inv / factor
        return Cast(cast_to(x, 1 / scale_inv, DTYPES[dtype]), scale_inv)

    def stale_rows(x: Tensor, scale: None, out: Tensor) -> Tensor:
        found = stale(4, x, "row", "e4m3", "pow2_floor")
        out.copy_(found.qdata.flatten())
        return found.scale_inv

    def body() -> None:
        run = assemble(asked)
        monkeypatch.setattr(weight, "cast_into", stale_rows)  # as FSDP has them cast
        for module in (fused, numerics):
            monkeypatch.setattr(module, "cast", partial(stale, 1e-6))
        found = look(run)
        for layer in LAYERS:
            assert 0.01 < found[f"float8_weight_saturated.layers.0.{layer}"] < 1
            assert found[f"float8_input_saturated.layers.0.{layer}"] == 0
        for layer in LAYERS[::2]:  # the others' inputs come from these, and are zero
            assert 0.5 < found[f"float8_input_flushed.layers.0.{layer}"] <= 1
            assert found[f"float8_output_sqnr_db.layers.0.{layer}"] < 15

    run_ranks(body, tmp_path, 1)


def test_nothing_in_float8_is_not_measurable() -> None:
    assert numerics.measurable(nn.Linear(2, 2)) == {}


def test_a_layer_that_is_called_twice_is_measured_twice() -> None:
    layer = Linear(128, {"w": 128}, std=0.1)
    nn.init.normal_(layer.weight)
    matmul = Float8Matmul(recipes.load("float8", "rowwise"), CPU)
    look = numerics._Look(matmul, layer.weight, None)  # type: ignore[arg-type]
    one, other = torch.randn(2, 64, 128).unbind()
    look(one, layer.weight)
    first = look.sums.clone()
    look(other, layer.weight)
    both = look.sums.clone()
    look.sums.zero_()
    look(other, layer.weight)
    assert torch.equal(both, first + look.sums)
    assert both[2] == 2 * one.numel()
