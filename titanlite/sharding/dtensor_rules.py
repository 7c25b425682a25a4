"""Find DTensor's sharding rules of one operator over the ranks of one mesh axis.

DTensor's sharding propagator gets every combination of whole and sharded inputs, without a process group. Combinations
that it would run without moving an input are rules. Inputs are never partial: a plan resolves partial sums where they
arise.

The propagator is private; only this file uses it. `self_test` compares its rules with known ones. The private names:

    DTensor._op_dispatcher.sharding_propagator      .propagate_op_sharding_non_cached(OpSchema) → OutputSharding
    …op_strategy_funcs, op_single_dim_strategy_funcs   whether DTensor has a rule at all
    …op_to_schema_info, …_for_single_dim_strategy   without them an operator on a list of tensors gives wrong rules
    OutputSharding.redistribute_schema              None, or what DTensor would move its inputs to
    DeviceMesh(…, _init_backend=False, _rank=0)     a mesh without processes
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

aten = torch.ops.aten

Rule = tuple[tuple[Placement, ...], tuple[Placement, ...]]
"""Placements of the tensor inputs, and of the outputs."""


def rules(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], size: int) -> list[Rule]:
    """Return the rules with a sharded input by which DTensor runs an operator on `size` ranks without communication.

    Tensors among `args` and `kwargs`, the operator's arguments, are on the meta device.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    tables = (propagator.op_to_schema_info, getattr(propagator, "op_to_schema_info_for_single_dim_strategy", {}))
    info = next((table[op] for table in tables if op in table), None)
    mesh = _mesh(size)
    leaves, tree = pytree.tree_flatten((tuple(args), dict(kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    found: list[Rule] = []
    for placements in itertools.product(*(_choices(tensor, size) for tensor in tensors)):
        if not any(isinstance(p, Shard) for p in placements):
            continue
        given: Iterator[Placement] = iter(placements)
        specs = [_spec(leaf, next(given), mesh) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        spec_args, spec_kwargs = pytree.tree_unflatten(specs, tree)
        try:
            result = propagator.propagate_op_sharding_non_cached(OpSchema(op, spec_args, spec_kwargs, info))
        except Exception:  # DTensor refuses a combination with any error
            continue
        wanted = result.redistribute_schema
        if wanted is not None:
            asked = pytree.tree_leaves((wanted.args_schema, wanted.kwargs_schema))
            if [s.placements[0] for s in asked if isinstance(s, DTensorSpec)] != list(placements):
                continue
        outputs = [s for s in pytree.tree_leaves(result.output_spec) if isinstance(s, DTensorSpec)]
        found.append((placements, tuple(s.placements[0] for s in outputs)))
    return found


def knows(op: torch._ops.OpOverload) -> bool:
    """Return whether DTensor has rules for an operator."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    tables = (propagator.op_strategy_funcs, getattr(propagator, "op_single_dim_strategy_funcs", {}))
    return any(op in table for table in tables)


def self_test() -> list[str]:
    """Return the differences between the installed torch's rules and known ones, in words; empty if none."""
    x, y = (torch.empty(8, 4, device="meta") for _ in range(2))
    whole = Replicate()
    known: list[tuple[torch._ops.OpOverload, tuple[Any, ...], set[Rule]]] = [
        # A list of tensors, which cannot be sharded along the dim of the concatenation.
        (aten.cat.default, ([x, y], 1), {((Shard(0), Shard(0)), (Shard(0),))}),
        # A reduced dim gives a partial sum.
        (aten.sum.dim_IntList, (x, [1]), {((Shard(0),), (Shard(0),)), ((Shard(1),), (Partial("sum"),))}),
        # An operator with several outputs: the dim that it splits into pieces cannot be sharded.
        (aten.split.Tensor, (x, 2, 1), {((Shard(0),), (Shard(0), Shard(0)))}),
        (aten.mm.default, (x, y.t()), {
            ((Shard(0), whole), (Shard(0),)),
            ((whole, Shard(1)), (Shard(1),)),
            ((Shard(1), Shard(0)), (Partial("sum"),)),
        }),
    ]  # fmt: skip
    wrong = [f"{op}: no rules" for op, _, _ in known if not knows(op)]
    for op, args, expected in known:
        got = set(rules(op, args, {}, 2))
        if got != expected:
            wrong.append(f"{op}: rules {sorted(map(str, got))}, known {sorted(map(str, expected))}")
    return wrong


@functools.lru_cache
def _mesh(size: int) -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(size, device="cpu"), _init_backend=False, _rank=0)


def _choices(tensor: Tensor, size: int) -> list[Placement]:
    """Return the placements to try for a tensor: whole, and a shard of each dim that `size` ranks divide."""
    return [Replicate(), *(Shard(d) for d, n in enumerate(tensor.shape) if n > 1 and n % size == 0)]


def _spec(tensor: Tensor, placement: Placement, mesh: DeviceMesh) -> DTensorSpec:
    return DTensorSpec(mesh, (placement,), tensor_meta=TensorMeta(tensor.shape, tensor.stride(), tensor.dtype))
