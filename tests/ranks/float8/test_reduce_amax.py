"""With `reduce_amax` a rank multiplies the bytes of one process, by its scales; without it, others.

Equality is to the bit, and by argument: no sum is rounded.

    layers    whole numbers up to 112 = 7 · 2^4 or 80, of which casts keep four bits. 448, the range of e4m3, and 57344,
              that of e5m2, are 7 times powers of two: one scale of the whole tensor is a power of two, that of a part
              that goes to 80 is not. Products are whole numbers in units below 2^24, in float32.
    a block   in float64, by scales that are powers of two: products of two float8 numbers have 8 bits, and sums of all
              tokens, heads and features less than 53. What is between products is computed row by row, head by head or
              element by element.
"""

import functools
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from tests.support.count_collectives import CountCollectives
from tests.support.held_for_backward import Compiled
from tests.support.ranks import run_ranks
from tests.support.short_run import whole
from titanlite import recipes
from titanlite.config.recipe_schema import Float8Recipe, ModelDims
from titanlite.device import CPU, Device
from titanlite.float8.cast import cast
from titanlite.float8.convert import Conversion, apply_float8, precompute_scales
from titanlite.float8.weight import GatheredWeight
from titanlite.kernels import products
from titanlite.kernels.collectives import Group
from titanlite.models.layers import Linear, Sequences
from titanlite.models.llama3 import Llama3
from titanlite.parallel.copy_engines import param_group
from titanlite.parallel.placed_units import Arena, Range
from titanlite.parallel.reduction import Reduction
from titanlite.parallel.tensor import ColumnParallelLinear, LayerPlan, RowParallelLinear, apply_tensor_parallel
from titanlite.sharding.layers import plan_layers

M, K, N, S = 64, 96, 128, 32
SIZES = ModelDims("", 1, dim=64, n_heads=4, n_kv_heads=2, ffn_dim=256, vocab_size=64, rope_theta=1e4, norm_eps=1e-5)
LAYERS = ("attention.wqkv", "attention.wo", "feed_forward.w13", "feed_forward.w2")
MATRICES = ("weight", *(f"{layer}.weight" for layer in LAYERS))
TENSORWISE = replace(recipes.load("float8", "tensorwise"), fsdp_all_gather="high_precision")
WHOLE = replace(TENSORWISE, reduce_amax=True)


@functools.cache
def plan() -> dict[str, LayerPlan]:
    with torch.device("meta"):
        return plan_layers(Llama3(SIZES, S), M, 2).layers


class Product(NamedTuple):
    """The operands of a float8 product, as it is carried out."""

    left: Tensor
    right: Tensor
    left_scale_inv: Tensor
    right_scale_inv: Tensor


@pytest.fixture
def seen(monkeypatch) -> list[Product]:
    """All products, of this process and of those forked from it; exact in float64."""
    found: list[Product] = []
    multiply = products.scaled_product

    def note(left: Tensor, right: Tensor, a: Tensor | None, b: Tensor | None, dtype: torch.dtype, fast: bool):
        left_scale_inv, right_scale_inv = (torch.ones(()) if scale_inv is None else scale_inv for scale_inv in (a, b))
        if type(left) is Tensor and left.device.type != "meta":  # what tells a compiler shapes has no bytes
            # FSDP frees its weights.
            found.append(Product(*(t.clone() for t in (left, right, left_scale_inv, right_scale_inv))))
        if dtype != torch.float64:
            return multiply(left, right, left_scale_inv, right_scale_inv, dtype, fast)
        return (
            left.double()
            @ right.double()
            * left_scale_inv.double().reshape(-1, 1)
            * right_scale_inv.double().reshape(1, -1)
        )

    monkeypatch.setattr(products, "scaled_product", note)
    return found


class Ran(NamedTuple):
    """What forward and backward did: results, the weights' gradients by name, and all products in their order."""

    y: Tensor
    d_x: Tensor
    d_weights: dict[str, Tensor]
    products: tuple[Product, ...]


def part(of: Tensor, like: Tensor, rank: int) -> Tensor:
    """The part that a rank of two has: half of each dim that is longer than that of `like`."""
    for dim, (size, own) in enumerate(zip(of.shape, like.shape, strict=True)):
        if size != own:
            of = of.chunk(2, dim)[rank]
    return of


def differences(got: Ran, want: Ran, rank: int) -> set[str]:
    """Everything that is not to the bit what one process has there."""
    pairs = {"y": (got.y, want.y), "d_x": (got.d_x, want.d_x)}
    pairs |= {name: (d_weight, want.d_weights[name]) for name, d_weight in got.d_weights.items()}
    for mine, other in zip(got.products, want.products, strict=True):
        for side in ("left", "right"):
            pairs[f"bytes {len(pairs)}"] = getattr(mine, side).float(), getattr(other, side).float()
            scale_inv = getattr(mine, f"{side}_scale_inv").unique()  # of each shard, as often as it has rows
            pairs[f"scale {len(pairs)}"] = (
                scale_inv,
                getattr(other, f"{side}_scale_inv").reshape(1).expand(len(scale_inv)),
            )
    return {name.split()[0] for name, (mine, other) in pairs.items() if not torch.equal(mine, part(other, mine, rank))}


def of_all_ranks(found: set[str]) -> set[str]:
    """One of them has the largest number, and so the scale of all."""
    said: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(said, found)
    return set().union(*said)


def numbers(seed: int, rows: int, columns: int) -> Tensor:
    """Whole numbers up to 80 but for the last one, which is 112: of the second rank of two, whatever dim is split."""
    x = torch.randint(-80, 81, (rows, columns), generator=torch.Generator().manual_seed(seed)).float()
    x[0, 0], x[-1, -1] = 80, 112
    return x


def ran(module: nn.Module, seen: list[Product], x: Tensor, grad: Tensor, *rest: object) -> Ran:
    """Forward and backward."""
    seen.clear()
    x = x.clone().requires_grad_()
    y = module(x, *rest)
    y.backward(grad)
    weights = {name: p for name, p in module.named_parameters() if name in MATRICES}
    gradients = {name: whole(p.grad) for name, p in weights.items()}  # type: ignore[arg-type]
    return Ran(y.detach(), x.grad, gradients, tuple(seen))  # type: ignore[arg-type]


def a_layer(
    kind: type[Linear],
    recipe: Float8Recipe,
    seen: list[Product],
    group: Group | None,
    asynchronous: bool = False,
    is_compiled: bool = False,
    device: Device = CPU,
) -> Ran:
    """One linear layer, of one process or of a rank of two.

    Args:
        kind: its class.
        recipe: the arithmetic.
        seen: all products.
        group: two ranks, or None.
        asynchronous: its collective is fused into its matmul.
        is_compiled: but for code generation, and with its weight as FSDP gathers it.
        device: whose arithmetic it is.
    """
    gathers, layer = kind is ColumnParallelLinear, Linear(K, {"w": N}, std=1)
    x, weight, grad = numbers(0, M, K), numbers(1, N, K), numbers(2, M, N)
    if group is not None:
        dims = (0, 0, 1) if gathers else (1, 1, 0)
        x, weight, grad = (t.chunk(2, dim)[group.rank] for t, dim in zip((x, weight, grad), dims, strict=True))
        layer.__class__ = kind
        layer.group, layer.asynchronous = group, asynchronous  # type: ignore[assignment]
    layer.weight = nn.Parameter(weight.contiguous())
    done = apply_float8(nn.ModuleDict({"it": layer}), recipe, (), device, M, shards=1)
    assert done.converted == ("it",)
    if not is_compiled:
        with CountCollectives() as collectives:
            found = ran(layer, seen, x, grad)
        assert collectives.counts["all_reduce"] == len(done.maxima)
        return found
    of_weight = cast(weight, "tensor", recipe.weight.dtype, recipe.scale_rounding, group)
    layer.weight = nn.Parameter(GatheredWeight(*of_weight, weight.dtype))
    graphs = Compiled(layer)
    found = ran(layer, seen, x, grad)
    nodes = [n for graph in (graphs.forward, graphs.backward) for n in graph.graph.nodes]  # type: ignore[union-attr]
    reduced = [n for n in nodes if str(n.target) == "_c10d_functional.all_reduce.default"]
    assert len(reduced) == sum(operand != "weight" for operand in done.maxima)
    return found


def a_block(
    recipe: Float8Recipe, seen: list[Product], mesh: DeviceMesh | None = None, asynchronous: bool = False
) -> tuple[Ran, Conversion]:
    """The first block of a model, of one process or of a rank of a mesh.

    Args:
        recipe: the arithmetic; with weights gathered in float8, FSDP splits the block over the ranks of "dp".
        seen: all products.
        mesh: of "dp" and "tp", two ranks each, or None. Ranks of "dp" have the same tokens.
        asynchronous: collectives are fused into matmuls.
    """
    model = Llama3(SIZES, S)
    model.fill_buffers()
    drawn = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=drawn, dtype=torch.float64) * 0.1
    x, grad = (torch.randn(M, SIZES.dim, generator=drawn, dtype=torch.float64) for _ in range(2))
    x *= torch.randn(M, 1, generator=drawn).exp()  # tokens that differ in size, so that ranks' maxima do
    if mesh is not None:
        tp = mesh["tp"]
        group = Group(tp.get_group().group_name, 2, tp.get_local_rank())
        apply_tensor_parallel(model, plan(), tp, group, asynchronous)
        x, grad = (t.chunk(2)[group.rank] for t in (x, grad))
    done = apply_float8(model, recipe, ("output",), CPU, M, shards=2)
    assert len(done.converted) == len(LAYERS)
    if mesh is not None and recipe.fsdp_all_gather == "float8":
        unit = fully_shard(model.layers[0], mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64))
        weights = param_group(unit)
        assert weights is not None
        Arena(mesh["dp"].get_group(), Reduction(follows=False)).add(weights, Range())
        precompute_scales(list(model.parameters()), mesh["dp"])
    with CountCollectives() as collectives:
        found = ran(model.layers[0], seen, x, grad, model.cos, model.sin, Sequences(model.seq_len))
    if isinstance(model.layers[0], FSDPModule):  # sums of two ranks with the same tokens
        found = found._replace(d_weights={name: total / 2 for name, total in found.d_weights.items()})
    assert collectives.counts["all_reduce"] == len(done.maxima)
    return found, done


def test_a_rank_has_the_bytes_and_scales_of_one_process(seen, tmp_path, monkeypatch):
    """Layers and blocks, their collectives beside and inside of their matmuls, compiled, emulated, and gathered."""
    old = Device(CPU.of_tensors, "A100", (8, 0))  # which emulates
    pow2 = replace(WHOLE, scale_rounding="pow2_floor")
    alone = {kind: a_layer(kind, WHOLE, seen, None) for kind in (ColumnParallelLinear, RowParallelLinear)}
    emulated = {kind: a_layer(kind, WHOLE, seen, None, device=old) for kind in alone}
    assert not any(ran.products for ran in emulated.values())  # they are torch's own
    block, done = a_block(pow2, seen)
    assert done.maxima == done.joined == ()
    plan()  # once, for all ranks

    def body() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        rank = mesh["tp"].get_local_rank()
        group = Group(mesh["tp"].get_group().group_name, 2, rank)
        for kind, want in alone.items():
            for asynchronous in (False, True):
                got = a_layer(kind, WHOLE, seen, group, asynchronous=asynchronous)
                assert differences(got, want, rank) == set(), (kind, asynchronous)
                ranks_own = a_layer(kind, TENSORWISE, seen, group, asynchronous=asynchronous)
                found = of_all_ranks(differences(ranks_own, want, rank))
                assert found == {"bytes", "scale", "y", "d_x", "weight"}, (kind, asynchronous)
            got = a_layer(kind, WHOLE, seen, group, asynchronous=True, is_compiled=True)
            assert differences(got, want, rank) == set(), kind
            got = a_layer(kind, WHOLE, seen, group, asynchronous=True, device=old)
            assert differences(got, emulated[kind], rank) == set(), kind
        for gathered in ("high_precision", "float8"):
            recipe = replace(pow2, fsdp_all_gather=gathered)
            for asynchronous, n in ((False, 1), (True, 2)):  # maxima of inputs and gradients
                got, done = a_block(recipe, seen, mesh, asynchronous)
                assert differences(got, block, rank) == set(), (gathered, asynchronous)
                assert len(done.maxima) == len(LAYERS) * (n + 2 * (gathered == "high_precision"))
                ranks_own, done = a_block(replace(recipe, reduce_amax=False), seen, mesh, asynchronous)
                found = of_all_ranks(differences(ranks_own, block, rank))
                assert found > {"bytes", "scale"}, (gathered, asynchronous)  # powers of two lose the smallest alone
                assert done.maxima == ()

    run_ranks(body, tmp_path, 4)
