"""The model of a run as one of its ranks has it, on the meta device, and the trace of one block of each kind.

It is the trainer's own model where there is one; else it is made here by what makes the trainer's: `build_model`, the
sharding plan and the tensor-parallel layers, and the float8 recipe. So nothing is said here of what a block is made of,
which layers compute in float8, or what is fused and gathered.
"""

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.utils import _pytree as pytree

from titanlite.config.recipe_schema import Float8Recipe, ModelDims
from titanlite.config.schema import Config, Model
from titanlite.errors import Problem, TitanliteError
from titanlite.float8.convert import Conversion, apply_float8
from titanlite.float8.weight import GatheredWeight, WeightShard
from titanlite.forecast.trace import OneKernel, trace
from titanlite.forecast.traced_block import TracedBlock
from titanlite.kernels.collectives import Group
from titanlite.models.block_kinds import kind_of
from titanlite.models.find import build_model
from titanlite.models.layers import Linear
from titanlite.parallel.tensor import LayerPlan, split_layers
from titanlite.sharding.layers import plan_layers
from titanlite.sharding.representative_blocks import PlannedLayers

HEAD = "output"
"""The linear layer behind the blocks."""


@dataclass(frozen=True)
class UnitSize:
    """The weights of one FSDP unit on a tensor-parallel rank.

    Attributes:
        elements: of all of them.
        gathered: bytes of what FSDP gathers: a byte an element where it gathers float8.
        scales: bytes of the scales of rows that travel with them.
        scaled_whole: number of weights that are gathered in float8 with one scale each.
    """

    elements: int
    gathered: int
    scales: int
    scaled_whole: int


@dataclass(frozen=True)
class TracedRun:
    """How one rank runs a model.

    Attributes:
        dims: the model's dimensions.
        tokens: M, of a micro-step of this data-parallel rank.
        seq_len: S.
        tensor_parallel: t.
        itemsize: bytes of an element of the compute dtype.
        compiled: whether blocks are compiled.
        float8: the recipe, if any layer computes in float8.
        blocks: the trace of each block; those that are alike share one.
        head: the trace of the last norm and the head.
        block_units: of each block.
        embedding: of all in front of the blocks; with tied weights, of all but the blocks.
        output: of the last norm and the head; of nothing with tied weights.
        no_trace_reason: why the model could not be traced, or None.
    """

    dims: ModelDims
    tokens: int
    seq_len: int
    tensor_parallel: int
    itemsize: int
    compiled: bool
    float8: Float8Recipe | None
    blocks: tuple[TracedBlock, ...]
    head: TracedBlock | None
    block_units: tuple[UnitSize, ...]
    embedding: UnitSize
    output: UnitSize
    no_trace_reason: Problem | None = None

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the linear layers of blocks, each once."""
        return tuple(dict.fromkeys(name for block in self.blocks for name in block.layers))

    @property
    def windows(self) -> set[int]:
        """Windows of attention that are shorter than the sequence."""
        return {window for block in self.blocks for window in block.windows if 0 < window < self.seq_len}


_runs: dict[object, TracedRun] = {}
_plans: dict[object, Mapping[str, LayerPlan]] = {}
_groups: dict[int, dist.ProcessGroup] = {}  # torch knows a group by its name as long as somebody holds it


def traced_run(
    config: Config, dims: ModelDims, float8: Float8Recipe | None, model: nn.Module | None = None
) -> TracedRun:
    """Trace one block of each kind of a run; once in a process for each layout.

    Args:
        config: checked.
        dims: the model's dimensions.
        float8: arithmetic of the linear layers, or None.
        model: the trainer's, split and converted, before checkpointing; None: one is made.
    """
    training, mesh = config.training, config.parallelism
    of_layout = training.local_batch_size, training.seq_len, training.mixed_precision_param, config.compile.enable
    split = mesh.tensor_parallel_degree, mesh.async_tensor_parallel
    key = config.model, dims, float8, config.float8.filter_fqns, of_layout, split
    # What float8 makes of a layer depends on the device; without it the trainer's model is the one traced before.
    if key not in _runs or (model is not None and float8 is not None):
        _runs[key] = _traced(config, dims, float8, model or rank_model(config, dims, float8).model)
    return _runs[key]


def sharding_plan(config: Config, dims: ModelDims) -> PlannedLayers:
    """Derive the tensor-parallel plan of a run's model, of one micro-step; once in a process.

    Args:
        config: checked.
        dims: the model's dimensions.

    Raises:
        ShardingError: there is none.
    """
    training, t = config.training, config.parallelism.tensor_parallel_degree
    tokens = training.local_batch_size * training.seq_len
    return _derived_plan(config.model, dims, training.seq_len, tokens, t, training.mixed_precision_param)


@functools.lru_cache(maxsize=4)
def _derived_plan(model: Model, dims: ModelDims, seq_len: int, tokens: int, ranks: int, dtype: str) -> PlannedLayers:
    planned = plan_layers(build_model(model, dims, seq_len), tokens, ranks, getattr(torch, dtype), dims.widths)
    _plans[model, dims] = planned.layers
    return planned


class RankModel(NamedTuple):
    """The model of a run as one tensor-parallel rank has it, and what float8 has converted of it."""

    model: nn.Module
    float8: Conversion | None


def rank_model(
    config: Config, dims: ModelDims, float8: Float8Recipe | None, model: nn.Module | None = None, shards: int = 1
) -> RankModel:
    """Make the model of a run as one tensor-parallel rank has it, without the other ranks.

    Args:
        config: checked.
        dims: the model's dimensions.
        float8: arithmetic of the linear layers, or None.
        model: on the meta device, to be changed in place; None: one is built.
        shards: ranks over which FSDP splits each weight.

    Returns:
        It; its parameters have the dtype that a step computes in.

    Raises:
        TitanliteError: it cannot be built, split or converted.
    """
    training, mesh = config.training, config.parallelism
    t, tokens = mesh.tensor_parallel_degree, training.local_batch_size * training.seq_len
    made: nn.Module = model or build_model(config.model, dims, training.seq_len)
    for parameter in made.parameters():
        parameter.data = parameter.data.to(getattr(torch, training.mixed_precision_param))
    if t > 1:
        if (config.model, dims) not in _plans:  # that of other degrees says the same of each layer
            sharding_plan(config, dims)
        split_layers(made, _plans[config.model, dims], _group(t), mesh.async_tensor_parallel, _part(t))
    if float8 is None:
        return RankModel(made, None)
    recipe = replace(float8, min_compute_capability=0)  # as on a device that has what the recipe needs
    converted = apply_float8(made, recipe, config.float8.filter_fqns, torch.device("cpu"), tokens, shards)
    return RankModel(made, converted)


def _part(ranks: int) -> Any:
    def part(x: Tensor, placement: Placement) -> Tensor:
        shape = list(x.shape)
        if isinstance(placement, Shard):
            shape[placement.dim] //= ranks
        return torch.empty(shape, dtype=x.dtype, device="meta")

    return part


def _group(size: int) -> Group:
    """A group of ranks that exists by its name alone: on the meta device nothing is sent."""
    name = f"titanlite.forecast.{size}"
    try:
        dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    except RuntimeError:  # torch forgets all groups when one is destroyed
        _groups[size] = dist.ProcessGroup(0, size)  # type: ignore[call-arg]
        torch._C._distributed_c10d._register_process_group(name, _groups[size])  # type: ignore[attr-defined]
    return Group(name, size, 0)


def _traced(config: Config, dims: ModelDims, float8: Float8Recipe | None, model: nn.Module) -> TracedRun:
    training = config.training
    dtype, tokens = getattr(torch, training.mixed_precision_param), training.local_batch_size * training.seq_len
    own, blocks = {model.norm, model.output}, list(model.layers)  # type: ignore[arg-type]
    is_tied = model.output.weight is model.tok_embeddings.weight  # type: ignore[union-attr]
    of_head = [p for module in own for p in module.parameters()]  # type: ignore[union-attr,operator]
    in_blocks = {p for block in blocks for p in block.parameters()}
    others = [p for p in model.parameters() if p not in in_blocks and (is_tied or all(p is not q for q in of_head))]
    kinds = [kind_of(block) for block in blocks]
    units = {kind: _unit_size(list(block.parameters()), dtype) for kind, block in zip(kinds, blocks, strict=True)}
    traces, why = dict[str, TracedBlock](), None
    try:
        traces = _traces(model, kinds, tokens, dtype)
    except TitanliteError:
        raise
    except Exception as error:  # of a file of the user's own
        if not config.model.file:
            raise
        want = "a model that runs on the meta device, of which predictions are made"
        fix = "no branch on a tensor's values; without it there are no predictions"
        why = Problem("model.file", f'"{config.model.file}" ({type(error).__name__}: {error})', want, fix)
    return TracedRun(
        dims=dims,
        tokens=tokens,
        seq_len=training.seq_len,
        tensor_parallel=config.parallelism.tensor_parallel_degree,
        itemsize=dtype.itemsize,
        compiled=config.compile.enable,
        float8=float8,
        blocks=tuple(traces[kind] for kind in kinds if traces),
        head=traces.get(HEAD),
        block_units=tuple(units[kind] for kind in kinds),
        embedding=_unit_size(others, dtype),
        output=_unit_size([] if is_tied else of_head, dtype),
        no_trace_reason=why,
    )


def _unit_size(parameters: list[nn.Parameter], dtype: torch.dtype) -> UnitSize:
    elements = gathered = scales = scaled_whole = 0
    for weight in map(_rank_part, parameters):
        is_narrow = isinstance(weight, WeightShard)
        elements += weight.numel()
        gathered += weight.numel() * (1 if is_narrow else dtype.itemsize)
        if is_narrow and weight.how.by_row:
            scales += 4 * len(weight)
        scaled_whole += is_narrow and not weight.how.by_row
    return UnitSize(elements, gathered, scales, scaled_whole)


def _rank_part(parameter: Tensor) -> Tensor:
    """Give this rank's part of a parameter, which may be one that FSDP casts before it gathers it."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def _gathered_for_compute(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Make what FSDP makes of a parameter for compute."""
    local = _rank_part(parameter)
    if not isinstance(local, WeightShard):
        return torch.empty(local.shape, dtype=dtype, device="meta")
    bits = torch.empty(local.shape, dtype=local.how.dtype, device="meta")
    unit = torch.empty((len(local), 1) if local.how.by_row else (), device="meta")
    return GatheredWeight(bits, unit, dtype)


def _traces(model: nn.Module, kinds: list[str], tokens: int, dtype: torch.dtype) -> dict[str, TracedBlock]:
    """Trace the first block of each kind, by its kind, and the head."""
    first: dict[str, nn.Module] = {}
    for kind, block in zip(kinds, model.layers, strict=True):  # type: ignore[arg-type]
        first.setdefault(kind, block)
    fewer = copy.copy(model)
    fewer._modules = {**model._modules, "layers": nn.ModuleList(first[kind] for kind in kinds)}
    plain: dict[int, object] = {}
    for module in fewer.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                plain[id(parameter)] = nn.Parameter(_gathered_for_compute(parameter, dtype), parameter.requires_grad)
        if isinstance(module, Linear):
            plain[id(module.matmul)] = module.matmul
    fewer = copy.deepcopy(fewer, plain)
    calls: dict[nn.Module, tuple[Any, Any, Any]] = {}
    watched = {*fewer.layers, fewer.norm, fewer.output}  # type: ignore[misc]
    for module in watched:
        module.forward = functools.partial(_run_once, module, module.forward, calls)
    try:
        with OneKernel():
            fewer(torch.empty(tokens, dtype=torch.long, device="meta"))
    finally:
        for module in watched:
            del module.forward
    found: dict[str, TracedBlock] = {}
    for kind, block in zip(kinds, fewer.layers, strict=True):  # type: ignore[arg-type]
        if kind not in found:
            found[kind] = _trace(block, *calls[block][:2])
    head = nn.Sequential(fewer.norm, fewer.output)  # type: ignore[arg-type]
    found[HEAD] = _trace(head, *calls[fewer.norm][:2])  # type: ignore[index]
    return found


def _run_once(
    module: nn.Module, forward: Any, calls: dict[nn.Module, tuple[Any, Any, Any]], *args: Any, **kwargs: Any
) -> Any:
    """Run a module the first time, and give the same result from then on."""
    if module not in calls:
        calls[module] = args, kwargs, forward(*args, **kwargs)
    return calls[module][2]


def _trace(module: nn.Module, args: Any, kwargs: Any) -> TracedBlock:
    def apart(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad)

    args, kwargs = pytree.tree_map_only(Tensor, apart, (args, kwargs))
    return trace(module, args, kwargs)
