"""What a block holds between forward and backward, in bytes, measured: and what its backward multiplies again.

Eager: every storage that an operation of forward made and that is alive once forward is done. Compiled: what the graph
of forward hands to that of backward. The block's input counts in both, weights and output do not.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import partition_fn
from torch._inductor.decomposition import select_decomp_table
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import GraphModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titanlite import recipes
from titanlite.activation_checkpoint.apply import apply_activation_checkpoint
from titanlite.activation_checkpoint.operations import CLASSES, FUSED
from titanlite.config.recipe_schema import ModelDims, SaveList
from titanlite.device import CPU
from titanlite.float8.cast import cast
from titanlite.float8.convert import apply_float8
from titanlite.float8.weight import GatheredWeight, local_data
from titanlite.kernels.collectives import Group
from titanlite.models.layers import Linear, Sequences
from titanlite.models.llama3 import Llama3
from titanlite.parallel.initialise import initialise
from titanlite.parallel.tensor import LayerPlan, apply_tensor_parallel
from titanlite.sharding.layers import plan_layers

_MATMULS = (*CLASSES["matmul"], *CLASSES["experts"], *FUSED)


@dataclass(frozen=True)
class Held:
    """What backward gets of one block, and does again.

    Attributes:
        results: output, gradients of the input and of the weights.
    """

    bytes: int
    matmuls: int  # in backward; 8 are its own, of a mixture of experts 6, besides its weights' gradients
    results: tuple[Tensor, ...] = ()


@functools.cache
def plan_of(dims: ModelDims, seq_len: int, ranks: int, architecture: type[Any] = Llama3) -> dict[str, LayerPlan]:
    with torch.device("meta"):
        return plan_layers(architecture(dims, seq_len), 2 * seq_len, ranks).layers


def build(
    dims: ModelDims,
    seq_len: int,
    save_list: SaveList,
    float8: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    tokens: int = 0,
    fused: bool = False,
    architecture: type[Any] = Llama3,
) -> Any:
    """The model with a save-list, split over all ranks if there is a process group."""
    torch._dynamo.reset()
    world = dist.get_world_size() if dist.is_initialized() else 1
    with torch.device("meta"):
        model = architecture(dims, seq_len)
    if world > 1:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        group = Group(mesh.get_group().group_name, world, mesh.get_local_rank())
        apply_tensor_parallel(model, plan_of(dims, seq_len, world, architecture), mesh, group, asynchronous=fused)
    recipe = None
    if float8:  # FSDP, which would gather in float8, is not here
        recipe = replace(recipes.load("float8", float8), fsdp_all_gather="high_precision", min_compute_capability=0)
        apply_float8(model, recipe, ("output",), CPU, tokens, shards=1)
    apply_activation_checkpoint(model, save_list)
    model.to_empty(device="cpu")
    model.fill_buffers()
    initialise(model, seed=0)
    for module in model.layers.modules():  # the compiler would hand the mesh of a DTensor to backward, too
        for name, parameter in module._parameters.items():
            if parameter is not None:
                weight = local_data(parameter).to(dtype)
                if recipe and recipe.reduce_amax and isinstance(module, Linear):  # always gathered in float8
                    qdata, scale_inv = cast(weight, recipe.weight.output, recipe.weight.dtype, recipe.scale_rounding)
                    weight = GatheredWeight(qdata, scale_inv, dtype)
                module._parameters[name] = nn.Parameter(weight)
    return model


def stream(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """A residual stream [M/tp, D] that asks for a gradient."""
    generator = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    return torch.randn(rows, width, generator=generator).to(dtype).requires_grad_()


def _plain(*tensors: Tensor) -> list[Tensor]:
    """The tensors, or what those are made of that are wrappers."""
    found: list[Tensor] = []
    for tensor in tensors:
        names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else []  # type: ignore[attr-defined]
        found += [getattr(tensor, name) for name in names] or [tensor]
    return found


class _Storages(TorchDispatchMode):
    """Weak references to what every operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                for inner in _plain(tensor):
                    storage = inner.untyped_storage()
                    self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out


class Peak(_Storages):
    """The most bytes that are alive at once of what operations make; what is inside of one operator is not seen.

    Args:
        apart: tensors that were there before.
    """

    def __init__(self, apart: list[Tensor]) -> None:
        super().__init__()
        self.apart, self.bytes = {t.untyped_storage()._cdata for t in apart}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.made = {key: made for key, made in self.made.items() if not made[0].expired()}
        self.bytes = max(self.bytes, sum(size for key, (_, size) in self.made.items() if key not in self.apart))
        return out


class _Matmuls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += str(func) in _MATMULS
        return func(*args, **(kwargs or {}))


def tables(model: Any) -> tuple[Tensor, ...]:
    """The first block's rotary table, if it has one."""
    if not hasattr(model, "cos"):
        return ()
    return (model.local_cos, model.local_sin) if model.layers[0].attention.attend.window else (model.cos, model.sin)


def beside(model: Any) -> tuple[object, ...]:
    """What the first block takes besides the stream: its tables and, of a shipped model, the sequences."""
    return (*tables(model), Sequences(model.seq_len)) if hasattr(model, "seq_len") else tables(model)


def held_eager(model: Any, x: Tensor) -> Held:
    """Run forward and backward of the first block."""
    block = model.layers[0]
    with _Storages() as storages:
        given = x * 1
        out = block(given, *beside(model))
        del given
    apart = {t.untyped_storage()._cdata for t in (*_plain(*block.parameters()), *tables(model), out)}
    alive = {key: size for key, (ref, size) in storages.made.items() if not ref.expired() and key not in apart}
    with _Matmuls() as matmuls:
        out.float().square().mean().backward()
    return Held(sum(alive.values()), matmuls.count, _results(out, x, block))


class Compiled:
    """A block compiled but for its code generation; the partitioner is inductor's.

    Args:
        block: compiled in place.
    """

    def __init__(self, block: nn.Module) -> None:
        self.forward: GraphModule | None = None
        self.backward: GraphModule | None = None
        block.compile(
            fullgraph=True,
            dynamic=False,
            backend=aot_autograd(
                fw_compiler=self._keep("forward"),
                bw_compiler=self._keep("backward"),
                partition_fn=partition_fn,
                decompositions=select_decomp_table,
            ),
        )

    def _keep(self, name: str) -> Callable[[GraphModule, object], Callable]:
        def keep(graph: GraphModule, _: object) -> Callable:
            setattr(self, name, graph)
            return make_boxed_func(graph.forward)

        return keep


def held_compiled(model: Any, x: Tensor) -> Held:
    """Compile the first block and read its two graphs."""
    graphs = Compiled(model.layers[0])
    result = model.layers[0](x, *beside(model))
    result.float().square().mean().backward()
    assert graphs.forward is not None
    assert graphs.backward is not None
    nodes = graphs.forward.graph.nodes
    inputs = [n.meta["val"] for n in nodes if n.op == "placeholder" and isinstance(n.meta["val"], Tensor)]
    others = {value.untyped_storage()._cdata for value in inputs if value.shape != x.shape}
    made = next(n for n in nodes if n.op == "output").args[0]
    returned = next(i for i, n in enumerate(made) if n.meta["val"].shape == x.shape)  # behind buffers that it changes
    out, *held = made[returned:]
    apart = {out.meta["val"].untyped_storage()._cdata, *others}
    sizes: dict[int, int] = {}
    for node in held:
        value = node.meta["val"]
        # A CPU keeps the state of its random generator for attention that is recomputed: not an activation.
        if isinstance(value, Tensor) and value.dtype != torch.uint8 and value.untyped_storage()._cdata not in apart:
            sizes[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
    targets = [n.target for n in graphs.backward.graph.nodes if n.op == "call_function"]
    again = sum(str(t) in _MATMULS for t in targets)
    return Held(sum(sizes.values()), again, _results(result, x, model.layers[0]))


def _results(out: Tensor, x: Tensor, block: nn.Module) -> tuple[Tensor, ...]:
    return out.detach(), *(t.grad for t in (x, *block.parameters()) if t.grad is not None)
