"""With `async_tensor_parallel` every collective of a block is inside a matmul, and nothing else changes.

A block has eight pairs of a collective and a matmul. They are counted as they run, by layer and direction, in eager
mode and in compiled graphs, along with the plain collectives that are left: none. On a CPU the fused operators are
their definitions, the same matmuls and the same collectives in the same order, so results are equal to the bit. Where
sums are formed in another order (on a GPU) or in another dtype (inductor keeps in float32 what eager mode rounds), see
`allowed`.
"""

import dataclasses
import functools
import math
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from typing import NamedTuple

import pytest
import torch
import torch._dynamo  # the first call of an operator imports it: once here, not in every forked rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.gpu.collective_checks import Between, delay, spoil
from tests.gpu.ranks_on_gpus import run_on_gpus
from tests.support.collective_cases import Ranks
from tests.support.count_collectives import CountCollectives
from tests.support.needs import slow
from tests.support.ranks import run_ranks
from titanlite import recipes
from titanlite.activation_checkpoint.apply import apply_activation_checkpoint
from titanlite.activation_checkpoint.operations import FUSED
from titanlite.config.recipe_schema import ModelDims, SaveList, SaveRule
from titanlite.kernels.collectives import Group
from titanlite.kernels.lowering import lowered
from titanlite.models.layers import Linear, Sequences
from titanlite.models.llama3 import Llama3
from titanlite.parallel.initialise import initialise
from titanlite.parallel.replicated_gradients import reduce_replicated_gradients
from titanlite.parallel.tensor import LayerPlan, apply_tensor_parallel
from titanlite.sharding.layers import plan_layers

# No two layers of a block have local weights of the same shape, transposed or not: a call tells its layer.
SIZES = {
    "cpu": ModelDims("", 1, dim=64, n_heads=4, n_kv_heads=2, ffn_dim=256, vocab_size=32, rope_theta=1e4, norm_eps=1e-5),
    "cuda": ModelDims(
        "", 1, 1024, n_heads=8, n_kv_heads=8, ffn_dim=4096, vocab_size=512, rope_theta=1e4, norm_eps=1e-5
    ),
}
S = {"cpu": 16, "cuda": 256}
LAYERS, MICRO_BATCHES = 3, 2
BACKEND = "aot_eager_decomp_partition"  # inductor's graphs, without its code generation

GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"
FORWARD = [f"{GATHER} wqkv", f"{SCATTER} wo", f"{GATHER} w13", f"{SCATTER} w2"]
BACKWARD = [f"{GATHER} w2", f"{SCATTER} w13", f"{GATHER} wo", f"{SCATTER} wqkv"]

NONE = SaveList("", "save")
TWO_MATMULS = SaveList("", "recompute", (SaveRule("matmul", "save", module=("wqkv", "w13")),))
SAVE_LISTS = {name: recipes.load("activation_checkpoint", name) for name in recipes.names("activation_checkpoint")}
SAVE_LISTS["two matmuls"] = TWO_MATMULS
QUICK = ["balanced"]
# A fused operation that gathers is kept if its matmul is; one that scatters, also if what it communicates is. In eager
# mode w2 runs again although only its operands are needed: an operator saves them once it has run, a matmul before.
RECOMPUTED = {
    "full": FORWARD,
    "attention": FORWARD[1:],
    "balanced_tight": [FORWARD[2]],
    "two matmuls": [FORWARD[1], FORWARD[3]],
}


class Calls(CountCollectives):
    """`fused` lists the fused operators by layer, `counts` the plain collectives.

    Args:
        layers: by the shape of this rank's part of the weight.
    """

    def __init__(self, layers: dict[frozenset[int], str]) -> None:
        super().__init__()
        self.layers, self.fused = layers, list[str]()

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Graphs that are compiled already run under it; under another mode the compiler would give up."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func) in FUSED:
            weights = [self.layers[frozenset(right.shape)] for right in args[1]]
            self.fused.append(" ".join([func.overloadpacket.__name__, *weights]))
        return super().__torch_dispatch__(func, types, args, kwargs)


class Case(NamedTuple):
    """What a block is run with."""

    batch: int = 2
    dtype: torch.dtype = torch.float32
    save_list: SaveList = NONE
    backend: str | None = None  # of the compiler


class Ran(NamedTuple):
    """What it did."""

    results: dict[str, Tensor]  # output and gradients, this rank's parts
    forward: Calls
    backward: Calls


@functools.cache
def plan_of(device: str, dims: ModelDims, ranks: int) -> dict[str, LayerPlan]:
    with torch.device("meta"):
        return plan_layers(Llama3(dims, S[device]), 2 * S[device], ranks).layers


@pytest.fixture(scope="module", autouse=True)
def _planned() -> None:
    """Before the fork, once for all ranks."""
    for n_layers in (1, LAYERS):
        plan_of("cpu", dataclasses.replace(SIZES["cpu"], n_layers=n_layers), 2)


def assembled(mesh: DeviceMesh, fused: bool, dims: ModelDims, save_list: SaveList) -> Llama3:
    device = mesh.device_type
    with torch.device("meta"):
        model = Llama3(dims, S[device])
    group = Group(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())
    apply_tensor_parallel(model, plan_of(device, dims, mesh.size()), mesh, group, fused)
    apply_activation_checkpoint(model, save_list)
    model.to_empty(device=device)
    model.fill_buffers()
    initialise(model, seed=0)
    return model


def layers_by_shape(model: Llama3) -> dict[frozenset[int], str]:
    linears = [(name.rpartition(".")[2], m) for name, m in model.named_modules() if isinstance(m, Linear)]
    return {frozenset(m.weight.to_local().shape): name for name, m in linears}  # type: ignore[operator]


def gradients(module: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in module.named_parameters()}
    return {
        name: grad.to_local() if isinstance(grad, DTensor) else grad for name, grad in found.items() if grad is not None
    }


def run_block(mesh: DeviceMesh, case: Case, fused: bool) -> Ran:
    device, ranks, rank = mesh.device_type, mesh.size(), mesh.get_local_rank()
    dims, tokens = SIZES[device], case.batch * S[device]
    model = assembled(mesh, fused, dims, case.save_list)
    block, given = model.layers[0].to(case.dtype), (model.cos, model.sin, Sequences(model.seq_len))
    rng = torch.Generator().manual_seed(case.batch)
    whole = [torch.randn(tokens, dims.dim, generator=rng) for _ in range(2)]
    x, upstream = (t.chunk(ranks)[rank].to(device, case.dtype) for t in whole)
    x.requires_grad_()
    if case.backend:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        block.compile(fullgraph=True, dynamic=False, backend=case.backend)
        block(x, *given).backward(upstream)
        block.zero_grad()
        x.grad = None
    forward, backward = Calls(layers_by_shape(model)), Calls(layers_by_shape(model))
    with forward:
        out = block(x, *given)
    with backward:
        out.backward(upstream)
    if case.backend:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "what was counted is not the first graph"
    assert x.grad is not None
    return Ran({"output": out.detach(), "input": x.grad, **gradients(block)}, forward, backward)


def allowed(dtype: torch.dtype, pairs: int) -> float:
    """How far two runs may be apart, as a part of the norm of what they compute.

    A rounding errs by up to eps/2 of a number, one run independently of the other, so errors add as squares. A pair
    rounds two numbers, partial sum and sum; what stands between it and the next one (norm, residual, rope and softmax,
    or the gate) rounds about as many again. No part of a block makes relative errors larger on the whole.
    """
    runs, roundings = 2, 4
    return math.sqrt(runs * roundings * pairs) * torch.finfo(dtype).eps / 2


def assert_same(got: dict[str, Tensor], truth: dict[str, Tensor], allowed: float = 0.0) -> None:
    assert got.keys() == truth.keys()
    for name, wanted in truth.items():
        assert wanted.isfinite().all(), name
        assert wanted.any(), name
        error = ((got[name].double() - wanted.double()).norm() / wanted.double().norm()).item()
        assert error <= allowed, f"{name} is off by {error:.1e} of its norm, allowed are {allowed:.1e}"


def check_block(mesh: DeviceMesh, case: Case, recomputed: list[str], tolerance: float = 0.0) -> None:
    """Fused against plain: eight pairs become eight operators, and those that the save-list recomputes."""
    backend = None if case.backend == "inductor" else case.backend  # which is slow, and not needed for the truth
    plain, fused = run_block(mesh, case._replace(backend=backend), fused=False), run_block(mesh, case, fused=True)
    assert not plain.forward.fused
    assert not plain.backward.fused
    assert plain.forward.counts == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}
    assert plain.backward.counts.total() >= 4
    assert fused.forward.fused == FORWARD
    assert Counter(fused.backward.fused) == Counter([*BACKWARD, *recomputed])
    assert not fused.forward.counts
    assert not fused.backward.counts
    assert_same(fused.results, plain.results, tolerance)


def tensor_parallel_mesh(device: str = "cpu", ranks: int = 2) -> DeviceMesh:
    return init_device_mesh(device, (ranks,), mesh_dim_names=("tp",))


@pytest.mark.parametrize("save_list", [*QUICK, *slow(*(name for name in SAVE_LISTS if name not in QUICK))])
def test_block(save_list, tmp_path):
    def body() -> None:
        mesh = tensor_parallel_mesh()
        for dtype in (torch.float32, torch.bfloat16):
            for batch in (1, 2, 3):
                check_block(mesh, Case(batch, dtype, SAVE_LISTS[save_list]), RECOMPUTED.get(save_list, []))

    run_ranks(body, tmp_path)


COMPILED = {
    "none": Case(batch=1),
    "full": Case(dtype=torch.bfloat16),
    "balanced": Case(batch=3),
    "matmuls": Case(),
    "two matmuls": Case(dtype=torch.bfloat16),
}


@pytest.mark.parametrize("save_list", slow("balanced", "none", "full", "matmuls", "two matmuls"))
def test_compiled_block(save_list, tmp_path):
    case = COMPILED[save_list]._replace(save_list=SAVE_LISTS[save_list], backend=BACKEND)
    # The compiler sees that backward does not need what w2 returns.
    recomputed = [call for call in RECOMPUTED.get(save_list, []) if "w2" not in call]

    def body() -> None:
        # torch 2.13 on a CPU mixes up what a graph with DTensors keeps for backward if it recomputes an operation that
        # could have drawn random numbers, such as attention in one kernel.
        with sdpa_kernel(SDPBackend.MATH) if recomputed else nullcontext():
            check_block(tensor_parallel_mesh(), case, recomputed)

    run_ranks(body, tmp_path, timeout_s=120)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="the compiler's CPU back end needs g++")
def test_block_compiled_to_machine_code(tmp_path):
    case = Case(dtype=torch.bfloat16, save_list=SAVE_LISTS["attention"], backend="inductor")

    def body() -> None:
        check_block(tensor_parallel_mesh(), case, FORWARD[1:3], allowed(case.dtype, pairs=8))

    run_ranks(body, tmp_path, timeout_s=120)


def accumulate(mesh: DeviceMesh, fused: bool, dtype: torch.dtype, save_list: SaveList, between: Callable) -> Ran:
    """The gradients of several layers, summed over micro-batches of different tokens."""
    device = mesh.device_type
    dims = dataclasses.replace(SIZES[device], n_layers=LAYERS)
    model = assembled(mesh, fused, dims, save_list).to(dtype)
    model.fill_buffers()
    rng, losses = torch.Generator().manual_seed(0), []
    forward, backward = Calls(layers_by_shape(model)), Calls(layers_by_shape(model))
    for _ in range(MICRO_BATCHES):
        tokens = torch.randint(dims.vocab_size, (2 * S[device],), generator=rng).to(device)
        with Between(between), forward:
            loss = model(tokens).float().square().sum()
        with Between(between), backward:
            loss.backward()
        losses.append(loss.detach())
    group = Group(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())
    reduce_replicated_gradients(list(model.parameters()), group)
    return Ran({"losses": torch.stack(losses), **gradients(model)}, forward, backward)


def check_accumulation(mesh: DeviceMesh, dtype: torch.dtype, save_list: SaveList, recomputed: list[str]) -> None:
    device, group = mesh.device_type, mesh.get_group()
    ranks = Ranks(group.group_name, tuple(range(mesh.size())), mesh.get_local_rank())
    plain = accumulate(mesh, False, dtype, save_list, lambda: None)
    turn = count()

    def spoil_and_delay() -> None:
        spoil(device, ranks)
        delay(device, ranks, next(turn))

    fused = accumulate(mesh, True, dtype, save_list, spoil_and_delay)
    head = f"{GATHER} output", f"{SCATTER} output"
    assert fused.forward.fused == [*FORWARD * LAYERS, head[0]] * MICRO_BATCHES
    assert Counter(fused.backward.fused) == Counter([*(BACKWARD + recomputed) * LAYERS, head[1]] * MICRO_BATCHES)
    # The embedding's, which has no matmul.
    assert fused.forward.counts == {"reduce_scatter_tensor": MICRO_BATCHES}
    assert fused.backward.counts == {"all_gather_into_tensor": MICRO_BATCHES}
    exact = device == "cpu"
    assert_same(fused.results, plain.results, 0.0 if exact else allowed(dtype, pairs=8 * LAYERS + 2))


@pytest.mark.parametrize("save_list", slow("balanced", "none", "full"))
def test_gradient_accumulation(save_list, tmp_path):
    def body() -> None:
        for dtype in (torch.float32, torch.bfloat16):
            check_accumulation(tensor_parallel_mesh(), dtype, SAVE_LISTS[save_list], RECOMPUTED.get(save_list, []))

    run_ranks(body, tmp_path)


def blocks_and_layers(device: str) -> None:
    """Blocks; then layers and micro-batches, with NaN in all buffers ahead of each operator, on ranks late in turn."""
    mesh, dtype = tensor_parallel_mesh(device, dist.get_world_size()), torch.bfloat16
    tolerance = allowed(dtype, pairs=8)
    for save_list in ("none", "full", "balanced"):
        recomputed = RECOMPUTED.get(save_list, [])
        for batch in (1, 2, 3):
            check_block(mesh, Case(batch, dtype, SAVE_LISTS[save_list]), recomputed, tolerance)
        check_accumulation(mesh, dtype, SAVE_LISTS[save_list], recomputed)
    assert bool(lowered) == (device == "cuda")
    assert not {how.reason for how in lowered if how.reason}


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_on_gpus(tmp_path):
    run_on_gpus(blocks_and_layers, tmp_path)
