"""Trace one block of each kind of a run's model, as one rank holds it, on the meta device.

The model is the trainer's, if it exists; else one is built and split as the trainer does it (`sharding/split.py`).
"""

import copy
import functools
import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite.config.check_mesh import tokens_of_rank
from titanlite.config.recipe_schema import Float8Recipe, ModelDims
from titanlite.config.schema import Config, Data
from titanlite.data.context_split import chunk_length
from titanlite.data.document_starts import room_of_run
from titanlite.device import named_device
from titanlite.errors import Problem, TitanliteError
from titanlite.float8.weight import GatheredWeight, WeightShard
from titanlite.forecast.trace import OneKernel, trace
from titanlite.forecast.traced_block import ExpertRanks, TracedBlock
from titanlite.kernels import flash_attention_4
from titanlite.kernels.attention import Bounds
from titanlite.kernels.context_attention import KeyChunks
from titanlite.kernels.products import MAX_RANKS
from titanlite.models.block_kinds import kind_of, with_blocks
from titanlite.models.experts import GroupedProjection, has_experts
from titanlite.models.find import build_model
from titanlite.models.layers import Linear, Sequences
from titanlite.models.mistakes import forward_refused, looks_at_values, mistake_of_model
from titanlite.models.own_model import require_whole
from titanlite.observe.peak_flops import windows_of
from titanlite.parallel.fake_world import fake_world
from titanlite.parallel.mesh import build_mesh
from titanlite.receipt import Receipt
from titanlite.sharding.split import plan_of_any_degree, split_model

HEAD = "output"
"""Key of the head's trace, beside those of blocks by kind."""


@dataclass(frozen=True)
class UnitSize:
    """Sizes of one FSDP unit on a tensor-parallel rank: elements, bytes when gathered, bytes of scales by row."""

    elements: int
    gathered: int
    scales: int

    @classmethod
    def of(cls, parts: Iterable["RankParameter"]) -> "UnitSize":
        """Add up the sizes of a unit's parameters."""
        found = [*parts]
        return cls(sum(p.elements for p in found), sum(p.gathered for p in found), sum(p.scales for p in found))


class RankParameter(NamedTuple):
    """The part of a parameter on a rank before FSDP splits it.

    Attributes:
        apart: whether it belongs to experts that FSDP splits over other ranks than the other parameters.
        gathered: bytes of the elements as FSDP gathers them; `scales`: bytes of float8 scales by row.
    """

    shape: tuple[int, ...]
    apart: bool
    gathered: int
    scales: int

    @property
    def elements(self) -> int:
        """Return the number of elements of this part."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class TracedRun:
    """The traces of a model's blocks on one rank, and the sizes of its FSDP units.

    Attributes:
        tokens: M, the tokens of a micro-step on this data-parallel rank.
        expert_parallel: P, the degree; `exchange_by_nccl`: whether a collective returns rows to the owners of tokens.
        itemsize: bytes of an element of the compute dtype.
        float8: the recipe, if any layer computes in float8.
        blocks: the trace of each block; blocks that are alike share one.
        head: the trace of the last norm and the head.
        block_units: size of each block, without `expert_units`.
        expert_units: size of each block's experts if FSDP splits them over other ranks than the other weights, which it
            does under expert or tensor parallelism; else 0.
        embedding: size of all weights before the blocks; with tied weights, of all outside of the blocks.
        output: size of the last norm and the head; 0 with tied weights.
        no_trace_reason: why the model could not be traced, or None.
    """

    dims: ModelDims
    tokens: int
    seq_len: int
    tensor_parallel: int
    context_parallel: int
    expert_parallel: int
    exchange_by_nccl: bool
    itemsize: int
    compiled: bool
    float8: Float8Recipe | None
    blocks: tuple[TracedBlock, ...]
    head: TracedBlock | None
    block_units: tuple[UnitSize, ...]
    expert_units: tuple[UnitSize, ...]
    embedding: UnitSize
    output: UnitSize
    parameters: Mapping[str, RankParameter]
    no_trace_reason: Problem | None = None

    @property
    def layers(self) -> tuple[str, ...]:
        """Return the names of the linear layers of blocks, each once."""
        return tuple(dict.fromkeys(name for block in self.blocks for name in block.layers))

    @property
    def windows(self) -> set[int]:
        """Return the windows of attention that are shorter than the sequence."""
        return {window for block in self.blocks for window in block.windows if 0 < window < self.seq_len}


_runs: dict[object, TracedRun] = {}


def traced_run(
    config: Config,
    dims: ModelDims,
    float8: Float8Recipe | None,
    model: nn.Module | None = None,
    experts_across_hosts: bool = False,
) -> TracedRun:
    """Trace one block of each kind of a run, or return the cached trace of this layout.

    `model` is the trainer's, split and converted, before checkpointing; None: one is built.
    `experts_across_hosts`: whether an expert-parallel group is on several hosts.
    """
    experts, mesh = _experts_of(config, experts_across_hosts), config.parallelism
    if model is None:
        trace_alike([config], dims, float8, experts_across_hosts)
        return _runs[_run_key(config, dims, float8, dims.n_layers, experts)]
    key = _run_key(config, dims, float8, len(model.layers), experts)  # type: ignore[arg-type]
    # Trace again: a float8 layer depends on the device, and a split layer, which `auto` times, on the rank's group.
    is_split = max(mesh.tensor_parallel_degree, mesh.expert_parallel_degree) > 1
    if key not in _runs or float8 is not None or is_split:
        _runs[key] = _traced(config, dims, float8, model, experts)
    return _runs[key]


def trace_alike(
    configs: Sequence[Config], dims: ModelDims, float8: Float8Recipe | None, experts_across_hosts: bool = False
) -> None:
    """Trace runs that differ only in their micro-batch with one split model; `traced_run` then finds the traces."""
    experts = _experts_of(configs[0], experts_across_hosts)
    missing = {
        key: each for each in configs if (key := _run_key(each, dims, float8, dims.n_layers, experts)) not in _runs
    }
    if missing:
        with _split_alone(configs[0], dims, float8) as model:
            _runs.update({key: _traced(each, dims, float8, model, experts) for key, each in missing.items()})


def _experts_of(config: Config, across_hosts: bool) -> ExpertRanks:
    ranks = config.parallelism.expert_parallel_degree
    return ExpertRanks(ranks, ranks > 1 and (across_hosts or ranks > MAX_RANKS))


def _run_key(
    config: Config, dims: ModelDims, float8: Float8Recipe | None, n_blocks: int, experts: ExpertRanks
) -> object:
    """Return a cache key: all facts that the trace of a run depends on."""
    training, mesh = config.training, config.parallelism
    of_layout = training.local_batch_size, training.seq_len, training.mixed_precision_param, config.compile.enable
    degrees = mesh.tensor_parallel_degree, mesh.context_parallel_degree, mesh.expert_parallel_degree
    split = *degrees, mesh.async_tensor_parallel
    of_model = config.model, dims, n_blocks, float8, config.float8.filter_fqns
    of_attention = _masks_documents(config.data), flash_attention_4.served()
    return of_model, of_layout, split, of_attention, experts


@contextmanager
def _split_alone(config: Config, dims: ModelDims, float8: Float8Recipe | None) -> Generator[nn.Module]:
    """Build a model and split it as for rank 0 of the smallest world that the config's parallel degrees allow."""
    mesh, model = config.parallelism, build_model(config.model, dims, config.training.seq_len)
    t, cp = mesh.tensor_parallel_degree, mesh.context_parallel_degree
    plan = plan_of_any_degree(config, dims) if t > 1 else {}
    # Convert as on a device that supports the recipe.
    recipe = replace(float8, min_compute_capability=0) if float8 else None
    with fake_world(0, math.lcm(t * cp, mesh.expert_parallel_degree)):
        placed = build_mesh(replace(mesh, data_parallel_replicate_degree=1), named_device(), has_experts(model))
        split_model(model, config, recipe, placed, plan, Receipt())
        yield model


def _masks_documents(data: Data) -> bool:
    """Return whether training masks documents, judged by the source's name: files of tokens need `separator_id`."""
    return data.document_mask and (data.separator_id is not None or not data.source.endswith(".bin"))


def _traced(
    config: Config, dims: ModelDims, float8: Float8Recipe | None, model: nn.Module, experts: ExpertRanks
) -> TracedRun:
    training = config.training
    dtype, tokens = getattr(torch, training.mixed_precision_param), tokens_of_rank(config)
    own, blocks = {model.norm, model.output}, list(model.layers)  # type: ignore[arg-type]
    is_tied = model.output.weight is model.tok_embeddings.weight  # type: ignore[union-attr]
    of_head = set[Tensor]() if is_tied else {p for module in own for p in module.parameters()}  # type: ignore[union-attr]
    kinds = [kind_of(block) for block in blocks]
    apart = max(experts.count, config.parallelism.tensor_parallel_degree) > 1
    layers = [part for block in blocks for part in block.modules() if isinstance(part, GroupedProjection) and apart]
    of_experts = {weight for layer in layers for weight in layer.parameters()}
    parts: dict[Tensor, RankParameter] = {p: _part(p, dtype, p in of_experts) for p in model.parameters()}
    of_blocks = [[parts[p] for p in block.parameters()] for block in blocks]
    others = {*parts} - of_head - {p for block in blocks for p in block.parameters()}
    traces, why = dict[str, TracedBlock](), None
    try:
        traces, logits = _traces(model, kinds, _sequences(config, model), tokens, dtype, experts)
        if config.parallelism.tensor_parallel_degree == 1:  # tensor parallelism checks the head itself
            require_whole(logits, [tokens, dims.vocab_size], model, config.model)
    except TitanliteError:
        raise
    except Exception as error:  # raised by the user's model file, or by an operator that it calls
        if not config.model.file:
            raise
        want = "a model that runs on the meta device, of which predictions are made"
        fix = "branch on no tensor's values, so that memory and time can be predicted"
        why = mistake_of_model(error, config.model.file, want, fix)
    return TracedRun(
        dims=dims,
        tokens=tokens,
        seq_len=training.seq_len,
        tensor_parallel=config.parallelism.tensor_parallel_degree,
        context_parallel=config.parallelism.context_parallel_degree,
        expert_parallel=experts.count,
        exchange_by_nccl=experts.by_nccl,
        itemsize=dtype.itemsize,
        compiled=config.compile.enable,
        float8=float8,
        blocks=tuple(traces[kind] for kind in kinds if traces),
        head=traces.get(HEAD),
        block_units=tuple(UnitSize.of(part for part in own if not part.apart) for own in of_blocks),
        expert_units=tuple(UnitSize.of(part for part in own if part.apart) for own in of_blocks),
        embedding=UnitSize.of(parts[p] for p in others),
        output=UnitSize.of(parts[p] for p in of_head),
        parameters={name: parts[p] for name, p in model.named_parameters()},
        no_trace_reason=why,
    )


def _sequences(config: Config, model: nn.Module) -> Sequences:
    """Return the sequences of a micro-step on one rank, as meta tensors."""
    tokens, seq_len, ranks = tokens_of_rank(config), config.training.seq_len, config.parallelism.context_parallel_degree

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    of_tokens = functools.partial(empty, tokens, dtype=torch.int32)
    if ranks == 1:
        bounds = Bounds(empty(2, room_of_run(tokens), dtype=torch.int32), empty(1, 5))
        return Sequences(seq_len, of_tokens(), {0: bounds}) if _masks_documents(config.data) else Sequences(seq_len)
    n, windows = tokens // chunk_length(ranks * tokens, seq_len, ranks), {0, *windows_of(model)}
    bounds = Bounds(empty(2, room_of_run(tokens) + 16 * n, dtype=torch.int32), empty(n, 5))
    bounds_of = dict.fromkeys(windows, bounds)
    exchanges = dict.fromkeys(windows, KeyChunks(empty(2, (ranks - 1) * n), empty(2, ranks)))
    return Sequences(seq_len, of_tokens(), bounds_of, of_tokens(), exchanges, "cp")


def _part(parameter: Tensor, dtype: torch.dtype, apart: bool) -> RankParameter:
    """Describe this rank's part of a parameter, and its bytes when FSDP gathers it for compute in a dtype."""
    local = _part_of_rank(parameter)
    is_narrow = isinstance(local, WeightShard)
    scales = 4 * len(local) if is_narrow and local.how.by_row else 0
    return RankParameter(tuple(local.shape), apart, local.numel() * (1 if is_narrow else dtype.itemsize), scales)


def _part_of_rank(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter; a `WeightShard` if FSDP casts it before the all-gather."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def _gathered_for_compute(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return, as a meta tensor, a parameter as FSDP gathers it for compute in a dtype."""
    local = _part_of_rank(parameter)
    if not isinstance(local, WeightShard):
        return torch.empty(local.shape, dtype=dtype, device="meta")
    bits = torch.empty(local.shape, dtype=local.how.dtype, device="meta")
    unit = torch.empty((len(local), 1) if local.how.by_row else (), device="meta")
    return GatheredWeight(bits, unit, dtype)


def _traces(
    model: nn.Module, kinds: list[str], sequences: Sequences, tokens: int, dtype: torch.dtype, experts: ExpertRanks
) -> tuple[dict[str, TracedBlock], tuple[int, ...]]:
    """Trace the first block of each kind, and the head. Return traces by kind or `HEAD`, and the logits' shape."""
    first: dict[str, nn.Module] = {}
    for kind, block in zip(kinds, model.layers, strict=True):  # type: ignore[arg-type]
        first.setdefault(kind, block)
    fewer = with_blocks(model, (first[kind] for kind in kinds))
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
            logits = fewer(torch.empty(tokens, dtype=torch.long, device="meta"), sequences=sequences)
    except Exception as error:
        if looks_at_values(error):
            raise
        with forward_refused(model):
            raise
    finally:
        for module in watched:
            del module.forward
    found: dict[str, TracedBlock] = {}
    for kind, block in zip(kinds, fewer.layers, strict=True):  # type: ignore[arg-type]
        if kind not in found:
            found[kind] = trace(block, *calls[block][:2], experts)
    head = [module for module in (fewer.norm, fewer.output) if module in calls]  # a model file may skip the norm's call
    found[HEAD] = trace(nn.Sequential(*head), *calls[head[0]][:2], experts)  # type: ignore[arg-type,index]
    return found, tuple(logits.shape)


def _run_once(
    module: nn.Module, forward: Any, calls: dict[nn.Module, tuple[Any, Any, Any]], *args: Any, **kwargs: Any
) -> Any:
    """Run a module's forward on the first call, record its arguments, and return the same result from then on."""
    if module not in calls:
        calls[module] = args, kwargs, forward(*args, **kwargs)
    return calls[module][2]
