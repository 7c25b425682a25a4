"""Timing a block: every part once, on every layout, and nothing left behind."""

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.support.needs import slow
from tests.support.ranks import run_ranks
from titanlite import recipes
from titanlite.config.recipe_schema import ModelDims
from titanlite.config.schema import Compile, Config, Model, Parallelism, Training
from titanlite.device import device_of
from titanlite.float8.convert import apply_float8
from titanlite.forecast.choose_save_list import RecomputeTimes, expensive
from titanlite.forecast.time_activations import time_block
from titanlite.forecast.traced_run import TracedRun, traced_run
from titanlite.kernels.collectives import Group
from titanlite.models.find import model_class
from titanlite.parallel.tensor import apply_tensor_parallel
from titanlite.sharding.layers import plan_layers

CPU = torch.device("cpu")
DIMS = ModelDims("", 1, 128, 4, 2, 256, vocab_size=32, rope_theta=1e4, norm_eps=1e-5)


def traced(
    model: nn.Module,
    dims: ModelDims = DIMS,
    float8: str | None = None,
    itemsize: int = 4,
    name: str = "llama3",
    ranks: int = 1,
) -> TracedRun:
    dtype = "bfloat16" if itemsize == 2 else "float32"
    training = Training(seq_len=64, local_batch_size=2, mixed_precision_param=dtype)
    own = Model(name=name)
    mesh = Parallelism(tensor_parallel_degree=ranks)
    config = Config(model=own, training=training, parallelism=mesh, compile=Compile(False))
    return traced_run(config, dims, recipes.load("float8", float8) if float8 else None, model)


def meta_model(dims: ModelDims = DIMS, name: str = "llama3") -> Any:
    with torch.device("meta"):
        return model_class(Model(name=name))(dims, 64)


def check(times: RecomputeTimes, of: TracedRun) -> None:
    assert set(times.activations) == {a for rule in expensive(of).values() for a in rule}
    assert all(seconds > 0 for seconds in (*times.activations.values(), times.elementwise))


def parameters_on_cpus() -> list[torch.nn.Parameter]:
    return [t for t in gc.get_objects() if type(t) is torch.nn.Parameter and t.device == CPU]


@pytest.mark.parametrize(
    ("float8", "itemsize"),
    [(None, 2), (None, 4), ("rowwise", 2), ("tensorwise", 4), *slow(("rowwise", 4), ("tensorwise", 2))],
)
def test_every_part_is_timed_and_nothing_stays(float8: str | None, itemsize: int) -> None:
    model = meta_model()
    if float8:
        apply_float8(model, recipes.load("float8", float8), ("output",), device_of(CPU), 128, shards=1)
    of = traced(model, float8=float8, itemsize=itemsize)
    before = dict(model.layers[0].named_parameters())
    others = parameters_on_cpus()  # that earlier tests have left; held, so that their ids stay theirs
    check(time_block(model.layers[0], of, None, CPU), of)
    assert dict(model.layers[0].named_parameters()) == before
    gc.collect()
    assert {id(p) for p in parameters_on_cpus()} <= {id(p) for p in others}


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "gemma3"])
def test_other_architectures(name: str) -> None:
    dims = recipes.load("model", f"{name}-debug")
    model = meta_model(dims, name)
    of = traced(model, dims, name=name)
    check(time_block(model.layers[0], of, None, CPU), of)


@pytest.mark.parametrize("fused", [False, *slow(True)])
def test_collectives_are_timed_among_their_ranks(fused: bool, tmp_path) -> None:
    def body() -> None:
        model = meta_model()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        group = Group(mesh.get_group().group_name, 2, dist.get_rank())
        apply_tensor_parallel(model, plan_layers(model, 128, 2).layers, mesh, group, asynchronous=fused)
        of = traced(model, ranks=2)
        check(time_block(model.layers[0], of, None, CPU), of)
        assert torch._C._distributed_c10d._get_work_registry_size() == 0  # each was waited for

    run_ranks(body, tmp_path)


def test_a_wider_matmul_takes_longer() -> None:
    """64 times the work: on a busy machine, too, the median of five is longer."""

    def of_w13(dims: ModelDims) -> float:
        model = meta_model(dims)
        times = time_block(model.layers[0], traced(model, dims), None, CPU).activations
        return next(s for a, s in times.items() if (a.op, a.layer) == ("aten.mm.default", "feed_forward.w13"))

    narrow_s, wide_s = of_w13(DIMS), of_w13(replace(DIMS, ffn_dim=64 * 256))
    assert wide_s > 4 * narrow_s
