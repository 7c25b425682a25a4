"""Timing a block: every part once, on every layout, and nothing left behind."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.support.ranks import run_ranks
from titanlite import recipes
from titanlite.config.architectures import ARCHITECTURES, Block
from titanlite.config.recipe_schema import ModelDims
from titanlite.config.schema import Model
from titanlite.float8.convert import apply_float8
from titanlite.forecast.activation_bytes import Layout
from titanlite.forecast.choose_save_list import Times, dear
from titanlite.forecast.time_activations import time_block
from titanlite.kernels.collectives import Group
from titanlite.models.find import model_class
from titanlite.models.llama3 import Llama3
from titanlite.parallel.tensor import apply_tensor_parallel
from titanlite.sharding.layers import plan_layers

CPU = torch.device("cpu")
LAYERS = Block().layers
SIZES = ModelDims("", 1, 128, 4, 2, 256, vocab_size=32, rope_theta=1e4, norm_eps=1e-5)


def layout(**options: object) -> Layout:
    common = {"dims": SIZES, "tokens": 128, "seq_len": 64, "itemsize": 4, "compiled": False}
    return Layout(**{**common, **options})  # type: ignore[arg-type]


def meta_model(dims: ModelDims = SIZES) -> Llama3:
    with torch.device("meta"):
        return Llama3(dims, 64)


def check(times: Times, of: Layout) -> None:
    listed = [dear(of, window) for window in of.dims.windows]
    assert set(times.activations) == {a for rules in listed for rule in rules.values() for a in rule}
    assert all(seconds > 0 for seconds in (*times.activations.values(), times.elementwise))


def parameters_on_cpus() -> list[torch.nn.Parameter]:
    return [t for t in gc.get_objects() if type(t) is torch.nn.Parameter and t.device == CPU]


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("float8", [None, "rowwise", "tensorwise"])
def test_every_part_is_timed_and_nothing_stays(float8: str | None, itemsize: int) -> None:
    of, model = layout(itemsize=itemsize), meta_model()
    if float8:
        recipe = recipes.load("float8", float8)
        apply_float8(model, recipe, ("output",), CPU, of.tokens, shards=1)
        of = layout(itemsize=itemsize, float8=recipe, converted=LAYERS)
    before = dict(model.layers[0].named_parameters())
    others = parameters_on_cpus()  # that earlier tests have left; held, so that their ids stay theirs
    check(time_block(model.layers[0], of, CPU), of)  # type: ignore[arg-type]
    assert dict(model.layers[0].named_parameters()) == before
    gc.collect()
    assert {id(p) for p in parameters_on_cpus()} <= {id(p) for p in others}


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "gemma3"])
def test_other_architectures(name: str) -> None:
    dims = recipes.load("model", f"{name}-debug")
    with torch.device("meta"):
        model = model_class(Model(name=name))(dims, 64)  # type: ignore[arg-type]
    of = layout(dims=dims, block=ARCHITECTURES[name].block)
    check(time_block(model.layers[0], of, CPU), of)


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_a_block_of_ones_own_may_call_its_norms_otherwise(name: str) -> None:
    dims = recipes.load("model", f"{name}-debug")
    with torch.device("meta"):
        block = model_class(Model(name=name))(dims, 64).layers[0]  # type: ignore[arg-type,index]
    block.norm1 = block.attention_norm
    del block.attention_norm
    of = layout(dims=dims, block=ARCHITECTURES[name].block)
    check(time_block(block, of, CPU), of)


@pytest.mark.parametrize("fused", [False, True])
def test_collectives_are_timed_among_their_ranks(fused: bool, tmp_path) -> None:
    def body() -> None:
        model, of = meta_model(), layout(tensor_parallel=2, fused=fused)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        group = Group(mesh.get_group().group_name, 2, dist.get_rank())
        apply_tensor_parallel(model, plan_layers(model, 128, 2).layers, mesh, group, asynchronous=fused)
        check(time_block(model.layers[0], of, CPU), of)  # type: ignore[arg-type]

    run_ranks(body, tmp_path)


def test_a_wider_matmul_takes_longer() -> None:
    """64 times the work: on a busy machine, too, the median of five is longer."""
    wide = ModelDims("", 1, 128, 4, 2, 64 * 256, vocab_size=32, rope_theta=1e4, norm_eps=1e-5)

    def of_w13(dims: ModelDims) -> float:
        times = time_block(meta_model(dims).layers[0], layout(dims=dims), CPU).activations
        return next(seconds for a, seconds in times.items() if (a.op, a.layer) == ("aten.mm.default", LAYERS[2]))

    narrow_s, wide_s = of_w13(SIZES), of_w13(wide)
    assert wide_s > 4 * narrow_s
