"""All that `titanlite plan` says of a run, put together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from titanlite.commands.forecast import Forecast, forecast, in_a_line
from titanlite.config.check import check_config
from titanlite.config.recipe_schema import ModelDims, SaveList
from titanlite.config.schema import Config
from titanlite.config.stages import largest_stage
from titanlite.data.stages import StageTable
from titanlite.errors import ConfigError, Problem, describe
from titanlite.forecast.activation_cost import BlockCost, block_costs, no_cost_reasons
from titanlite.forecast.attended import attended_share
from titanlite.forecast.comm_volume import (
    Traffic,
    again,
    of_experts,
    of_keys,
    of_loss,
    of_matrices,
    of_update,
    of_weights,
)
from titanlite.forecast.device_specs import DEFAULT_DEVICE, Rates, measured_rates
from titanlite.forecast.memory import MemoryModel
from titanlite.preflight.checked_run import CheckedRun

if TYPE_CHECKING:
    from torch import nn

    from titanlite.commands.fused_pairs import CollectiveMatmul
    from titanlite.float8.convert import Maximum
    from titanlite.sharding.representative_blocks import PlannedLayers
    from titanlite.training.assemble import Assembly


@dataclass(frozen=True)
class PlannedRun:
    """All that is said of one run.

    Attributes:
        memory: of its ranks; of the fewest that there can be, if the number of processes is not known.
        tokens: that a step trains on; of one data-parallel rank, if the number of processes is not known.
        sharding: None without tensor parallelism.
        traffic: all collectives of a step that are known.
        pairs: those of them that are to be fused with matmuls, or not and why.
        maxima: that are reduced over the tensor-parallel ranks in a micro-step.
        predicted: None if the number of processes is not known.
        notes: what `traffic` leaves out; a line each.
        is_complete: whether `traffic` has all collectives of every step.
    """

    memory: MemoryModel
    tokens: int
    sharding: "PlannedLayers | None"
    traffic: Sequence[Traffic]
    pairs: "Sequence[CollectiveMatmul]"
    maxima: "Sequence[Maximum]"
    predicted: Forecast | None
    notes: tuple[str, ...] = ()
    is_complete: bool = True


def plan_run(checked: CheckedRun, file: str, world: int | None, device: str = DEFAULT_DEVICE) -> PlannedRun:
    """Plan a checked run.

    Args:
        checked: the run.
        file: its config, for messages.
        world: number of processes, if it is known.
        device: one of `device_specs.DEVICES`.

    Raises:
        TitanliteError: there is nothing to plan, or the trainer would refuse the model.
    """
    config = largest_stage(checked.config)  # which decides on memory; its step is the one that is priced
    mesh, t = config.parallelism, config.parallelism.tensor_parallel_degree
    if t == mesh.context_parallel_degree == 1 and world is None:
        want = "more than 1, or --world N: with neither, nothing is sharded that a plan could show"
        price = "--activation-checkpoint for what the save-list costs"
        can_split = only_tensor_parallel_degree(config, checked.dims) is None
        fix = f"--world 2, or {'--parallelism.tensor_parallel_degree 2, or ' * can_split}{price}"
        raise ConfigError(describe(file, [Problem("parallelism.tensor_parallel_degree", "1", want, fix)]))
    from titanlite.training.assemble import assembled

    with assembled(checked, world, device) as made:
        return _plan(made, world, measured_rates(device))


def _plan(made: "Assembly", world: int | None, rates: Rates) -> PlannedRun:
    """Plan an assembled run."""
    checked, memory = made.asked, made.memory
    config, t, cp = memory.config, memory.run.tensor_parallel, memory.run.context_parallel
    each, shards = memory.run.tokens, memory.shards
    tokens = each * memory.micro_steps * memory.replicas * shards
    predicted, attended = None, None
    if config.data.document_mask and (world or cp > 1):
        attended = attended_share(memory.config, checked.table, checked.inputs.shards)
    if world:
        predicted = _of_stages(forecast(memory, checked.save_list, rates, attended), checked.table, tokens, config)
    blocks, unknown = _block_prices(memory, checked.save_list or (predicted and predicted.save_list))
    exchanged = (*of_experts(memory, blocks), *of_keys(memory, blocks, attended))
    if t == 1:
        others, notes, is_complete = _traffic(checked, made.model, memory, world)
        if memory.run.expert_parallel == cp == 1:
            unknown = ()  # backward repeats no collective
        traffic, notes = (*exchanged, *others), (*_stages_in_words(checked), *unknown, *notes)
        return PlannedRun(memory, tokens, None, traffic, (), (), predicted, notes, is_complete and not unknown)
    import torch
    import torch.nn.functional as F

    from titanlite.commands.fused_pairs import NOT_ASKED, fused_pairs
    from titanlite.commands.sharding_table import token_traffic, whole_gradients
    from titanlite.parallel.tensor import ParallelLinear
    from titanlite.sharding.split import sharding_plan

    sharding, dtype = sharding_plan(config, checked.dims), getattr(torch, config.training.mixed_precision_param)
    pairs = fused_pairs(made.model, each, dtype) if config.parallelism.async_tensor_parallel else ()
    layers = {name: layer for name, layer in made.model.named_modules() if isinstance(layer, ParallelLinear)}
    in_float8 = [name for name, layer in layers.items() if layer.fused is not None and layer.matmul is not F.linear]
    maxima = made.float8.maxima if made.float8 is not None else ()
    repeated = [again(block) for block in blocks]
    of_tokens = token_traffic(sharding, in_float8, checked.float8, repeated, memory.micro_steps, cp)
    of_tokens.append(of_loss(each, t, memory.micro_steps))
    replicated = -(-whole_gradients(sharding) // shards)
    others, notes, is_complete = _traffic(checked, made.model, memory, world, replicated)
    if any(pair.obstacle == NOT_ASKED for pair in pairs):
        note = "what is fused is not known without Triton (pip install triton); a predicted time has all of them fused"
        notes = (*notes, note)
    notes = (*_stages_in_words(checked), *unknown, *notes)
    traffic, is_complete = (*of_tokens, *exchanged, *others), is_complete and not unknown
    return PlannedRun(memory, tokens, sharding, traffic, pairs, maxima, predicted, notes, is_complete)


def _of_stages(predicted: Forecast, table: StageTable, tokens: int, largest: Config) -> Forecast:
    """Say which of several stages is predicted; the run takes its tokens' time at that stage's speed."""
    if len(table.rows) == 1:
        return predicted
    seq_len, outlook = largest.training.seq_len, predicted.outlook
    if outlook is not None:
        outlook = replace(outlook, days=table.tokens(table.steps) / outlook.tokens_per_day)
    note = "the time of the whole run is that of all its tokens at the speed of the largest stage"
    notes = (*predicted.notes, note) if outlook else predicted.notes
    shape = f"{tokens // seq_len:,} × {seq_len:,} tokens"
    return replace(predicted, outlook=outlook, stage=shape, notes=notes)


def _stages_in_words(checked: CheckedRun) -> tuple[str, ...]:
    """Say of each stage which shape it has; nothing of a run with one."""
    rows = checked.table.rows
    shapes = [f"{row.asked.sequences} × {row.asked.seq_len} from step {row.from_step + 1}" for row in rows]
    what = "sequences × tokens of a step, of which the largest micro-step is priced"
    return (f"stages, {what}: {', '.join(shapes)}",) if len(rows) > 1 else ()


def _traffic(
    checked: CheckedRun, model: "nn.Module", memory: MemoryModel, world: int | None, replicated: int = 0
) -> tuple[tuple[Traffic, ...], tuple[str, ...], bool]:
    """The collectives of a step but for those of tokens, what is not listed of them, and whether all of a step are.

    `replicated` elements of gradients are added up by the ranks of a tensor-parallel group.
    """
    t = memory.run.tensor_parallel
    if world is None:
        note = "--world N adds the collectives of data-parallel ranks and the reductions over all ranks"
        return tuple(of_update(replicated, t, 1)), (note,), False
    from titanlite.models.experts import MixtureOfExperts
    from titanlite.training.optimizers.group_norms import KINDS

    layers = [part for part in model.modules() if isinstance(part, MixtureOfExperts)]
    of_biased = [layer.of.n_experts for layer in layers if layer.bias is not None]
    biased = len(of_biased) * max(of_biased, default=0)
    sources, notes = len(checked.inputs.trained), tuple[str, ...]()
    has_z_loss = memory.config.training.z_loss > 0
    of_step = of_update(replicated, t, world, sources if sources > 1 else 0, biased, has_z_loss)
    if world > 1:
        groups = len({own.group for own in memory.optimizer.settings.values()})
        more = [f"an all_reduce of {len(KINDS) * groups:,} norms by group of the optimizer in float32"]
        if layers:  # as `training/routers.py` sees them
            numbers = len(layers) * (max(layer.of.n_experts for layer in layers) + 3)
            more.append(f"one of {numbers:,} numbers of routers in float64")
        when = f"in a step that metrics.log_freq = {memory.config.metrics.log_freq} logs"
        notes = (f"not listed: {when}, {' and '.join(more)}",)
    if memory.run.no_trace_reason and world > t:
        why = in_a_line(memory.run.no_trace_reason)
        return (*of_step, *of_matrices(memory)), (f"the collectives of FSDP are not listed: {why}", *notes), False
    return (*of_weights(memory), *of_step, *of_matrices(memory)), notes, True


def _block_prices(memory: MemoryModel, save_list: SaveList | None) -> tuple[list[BlockCost], tuple[str, ...]]:
    """Return the price of each block, or why it, and what backward communicates again, is not known."""
    if memory.run.no_trace_reason is not None:
        why = in_a_line(memory.run.no_trace_reason)
    elif save_list is None:
        why = "the save-list is chosen when the run starts"
    elif unpriced := no_cost_reasons(save_list):
        why = f"save-list {memory.config.activation_checkpoint.recipe}, {in_a_line(unpriced[0])}"
    else:
        return block_costs(memory.run, save_list), ()
    return [], (f"collectives that backward repeats are not listed: {why}",)


def only_tensor_parallel_degree(config: Config, dims: ModelDims) -> str | None:
    """Return what the check of a config wants where a model were split over two tensor-parallel ranks; None: it may be.

    Args:
        config: of the run.
        dims: of its model.
    """
    key = "tensor_parallel_degree"
    try:
        check_config(replace(config, parallelism=replace(config.parallelism, **{key: 2})), dims, None)
    except ConfigError as error:
        found = [problem for report in error.args for problem in report.problems]
        return next((problem.want for problem in found if problem.where.endswith(key)), None)
    return None
