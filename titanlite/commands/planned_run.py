"""Plan a run for `titanlite plan`: its placements, its collectives, and its predicted memory and speed."""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from titanlite import recipes
from titanlite.commands.forecast import Forecast, forecast, in_a_line
from titanlite.commands.validate import stages_in_words
from titanlite.config.recipe_schema import AdamWGroup, OptimizerRecipe, ParameterGroup, SaveList
from titanlite.config.schema import Config
from titanlite.config.stages import largest_stage
from titanlite.data.stages import StageTable
from titanlite.errors import ConfigError, TitanliteError
from titanlite.forecast.activation_cost import block_costs, no_cost_reasons
from titanlite.forecast.attended import AttendedShare, attended_share
from titanlite.forecast.device_specs import DEFAULT_DEVICE, Rates, measured_rates
from titanlite.forecast.memory import MemoryModel
from titanlite.forecast.update_work import ITEMSIZE, ITEMSIZE_OF_ROW
from titanlite.models.mistakes import mistake_of_model
from titanlite.preflight.checked_run import CheckedRun
from titanlite.receipt import Entry
from titanlite.recorder.record import record
from titanlite.recorder.recorder import CollectiveMatmul, Recorded
from titanlite.sharding.representative_blocks import PlannedLayers
from titanlite.sharding.sent_bytes import sent_bytes
from titanlite.sharding.split import sharding_plan
from titanlite.training.assemble import Assembly, assembled


@dataclass(frozen=True)
class PlannedRun:
    """The plan of a run.

    Attributes:
        memory: memory model of a rank; for the fewest ranks possible if the number of processes is not known.
        tokens: tokens of a step; of one data-parallel rank, if the number of processes is not known.
        sharding: placements by tensor parallelism, or None without it.
        collectives: number of calls of each collective in a step.
        pairs: number of calls of each pair of a collective and a matmul in a step.
        predicted: None if the number of processes is not known.
        notes: collectives that `collectives` leaves out; a line each.
        is_complete: whether `collectives` has every collective that is part of all steps.
    """

    memory: MemoryModel
    tokens: int
    sharding: PlannedLayers | None
    collectives: Mapping[Recorded, int]
    pairs: Mapping[CollectiveMatmul, int]
    predicted: Forecast | None
    notes: tuple[str, ...]
    is_complete: bool


def plan_run(
    checked: CheckedRun,
    file: str,
    world: int | None,
    device: str = DEFAULT_DEVICE,
    network: str | None = None,
    lists_collectives: bool = True,
) -> PlannedRun:
    """Plan a checked run. Without `lists_collectives` no step is recorded, and the plan has no collectives."""
    config = largest_stage(checked.config)  # it decides on memory, and its step is priced
    mesh, t = config.parallelism, config.parallelism.tensor_parallel_degree
    if t == mesh.context_parallel_degree == 1 and world is None:
        want = "more than 1, or --world N: with neither, nothing is sharded that a plan could show"
        fix = "--world 2, or --activation-checkpoint for what the save-list costs"
        raise ConfigError.of(file, "parallelism.tensor_parallel_degree", "1", want, fix)
    with assembled(checked, world, device) as made:
        return _plan(made, world, device, measured_rates(device, network), lists_collectives)


def _plan(made: Assembly, world: int | None, device: str, rates: Rates, lists_collectives: bool) -> PlannedRun:
    checked, memory = made.asked, made.memory
    config, cp = memory.config, memory.run.context_parallel
    tokens = memory.run.tokens * memory.micro_steps * memory.replicas * memory.shards
    predicted, attended = None, None
    if config.data.document_mask and (world or cp > 1):
        attended = attended_share(config, checked.table, checked.inputs.shards)
    if world:
        predicted = _of_stages(forecast(memory, checked.save_list, rates, attended), checked.table, tokens, config)
    notes, is_complete, collectives, pairs = list[str](), world is not None, {}, {}
    if stages := stages_in_words(checked.table):
        notes.append(f"stages, sequences × tokens of a step, of which the largest micro-step is priced: {stages}")
    if memory.run.no_trace_reason is not None:
        notes.append(f"the collectives are not listed: {in_a_line(memory.run.no_trace_reason)}")
        is_complete = False
    elif lists_collectives:
        save_list = checked.save_list or (predicted and predicted.save_list)
        repeats = max(config.parallelism.expert_parallel_degree, memory.run.tensor_parallel, cp) > 1
        if save_list is None and repeats:
            notes.append(
                "collectives that backward repeats are not listed: the save-list is chosen when the run starts"
            )
            is_complete = False
        try:
            collectives, pairs, entries = _recorded(made, save_list, device, attended)
            notes += _not_fused(entries)
        except TitanliteError:
            raise
        except Exception as error:  # raised by the user's model file, or by an operator that the file calls
            if not config.model.file:
                raise
            want, fix = "a model that trains on tensors without memory", "branch on no tensor's values"
            why = mistake_of_model(error, config.model.file, want, fix)
            notes.append(f"the collectives are not listed: {in_a_line(why)}")
            is_complete = False
    sharding = sharding_plan(config, checked.dims) if memory.run.tensor_parallel > 1 else None
    if world is None:
        notes.append("--world N adds the collectives of data-parallel ranks and the reductions over all ranks")
    elif world > 1:
        when = f"in a step that metrics.log_freq = {config.metrics.log_freq} logs"
        losses = "losses by source; " * (len(checked.inputs.trained) > 1)
        notes.append(f"not listed: {losses}{when}, sums of norms by group of the optimizer and of numbers of routers")
    return PlannedRun(memory, tokens, sharding, collectives, pairs, predicted, tuple(notes), is_complete)


def _recorded(
    made: Assembly, save_list: SaveList | None, device: str, attended: AttendedShare | None
) -> tuple[Mapping[Recorded, int], Mapping[CollectiveMatmul, int], Sequence[Entry]]:
    """Record a step of the first rank, with AdamW; return its collectives, its pairs and the entries of its receipt.

    The exchanges of an optimizer that distributes matrices over ranks are added as the mean over all ranks. To record
    them, all blocks would be needed, because these decide which rank owns which matrix.
    """
    checked, memory = made.asked, made.memory
    adamw = dict[str, ParameterGroup]()
    for name, own in checked.optimizer.groups.items():
        adamw[name] = AdamWGroup("adamw", own.pattern, own.shape, own.optional, own.lr_factor)
    listed = save_list or recipes.load("activation_checkpoint", "none")
    config = replace(memory.config, optimizer=replace(memory.config.optimizer, weight_decay_exclude=()))
    run = replace(checked, config=config, save_list=listed, optimizer=OptimizerRecipe("", adamw))
    starts: Sequence[np.ndarray] = ()
    if attended and (ranks := memory.run.context_parallel) > 1:  # documents decide which keys ranks exchange
        starts = attended.starts(memory.run.tokens * ranks, memory.micro_steps)
    step = record(run, memory.world, device, documents=starts)
    found, pairs = Counter[Recorded](step.collectives), step.pairs
    if config.compile.enable and not no_cost_reasons(listed):  # a compiler recomputes only what backward uses
        again = {(a.op.split(".")[1], a.layer) for block in block_costs(memory.run, listed) for a in block.recomputed}
        found = Counter({each: n for each, n in found.items() if _is_repeated(each, each.operator, again)})
        pairs = {each: n for each, n in pairs.items() if _is_repeated(each, _OPERATORS[each.kind], again)}
    for _, shared in memory.optimizer.shared if memory.world > 1 else ():
        n = len(shared.buckets)
        for elements in (sum(b.elements for b in shared.buckets), sum(b.handed for b in shared.buckets)):
            sent = sent_bytes("all_to_all", ITEMSIZE * (elements // n), memory.world)
            found[Recorded("all_to_all", "update", "matrices", memory.world, sent)] += n
    if memory.world > 1 and (rows := sum(memory.optimizer.rows.values())):
        found[Recorded("all_reduce", "update", "matrices", memory.world, ITEMSIZE_OF_ROW * rows)] += 1
    return +found, pairs, step.entries


_OPERATORS = {"all_gather": "all_gather_matmul", "reduce_scatter": "matmul_reduce_scatter"}


def _is_repeated(each: Recorded | CollectiveMatmul, operator: str, again: Collection[tuple[str, str]]) -> bool:
    """Return whether compiled code calls a recorded collective. A recomputed one is called only if it is in `again`.

    `operator`: operator that contains the collective, or "". `again`: (operator, layer) that backward recomputes.
    """
    if each.direction != "recomputation":
        return True
    at = each.module.removeprefix("layers.*.")  # for a feed-forward that is one function, its own name
    return any(
        (name == operator if operator else each.kind in name)
        and (f"{layer}.".startswith(f"{at}.") or f"{at}.".startswith(f"{layer}."))
        for name, layer in again
    )


def _not_fused(entries: Sequence[Entry]) -> list[str]:
    """Return a note for each reason why layers are not fused with their collectives although the config asks for it."""
    names = defaultdict[str, dict[str, None]](dict)
    for entry in entries:
        for case in entry.skipped if entry.feature == "async_tensor_parallel" else ():
            if case.why.startswith("has "):
                names[case.why][re.sub(r"\.\d+\.", ".*.", case.what)] = None
    return [f"not fused with its collectives: {', '.join(layers)}, which {why}" for why, layers in names.items()]


def _of_stages(predicted: Forecast, table: StageTable, tokens: int, largest: Config) -> Forecast:
    """Add the stage's shape to a forecast of a run with several stages, and predict the days of the whole run.

    The days are the time of all tokens at the speed of the largest stage.
    """
    if len(table.rows) == 1:
        return predicted
    seq_len, outlook = largest.training.seq_len, predicted.outlook
    if outlook is not None:
        outlook = replace(outlook, days=table.tokens(table.steps) / outlook.tokens_per_day)
    note = "the time of the whole run is that of all its tokens at the speed of the largest stage"
    notes = (*predicted.notes, note) if outlook else predicted.notes
    shape = f"{tokens // seq_len:,} × {seq_len:,} tokens"
    return replace(predicted, outlook=outlook, stage=shape, notes=notes)
