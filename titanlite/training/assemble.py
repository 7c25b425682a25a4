"""Assemble the part of a run that one rank has, up to its weights: for training, and for commands that examine a run.

    model on the meta device → names in the config → sharding plan, tensor and context parallelism, experts, float8
    (`sharding/split.py`) → memory → activation checkpointing

Every check that needs the model is here: whether patterns, filters and rules match something in the model, whether the
model can be split and converted to float8, and whether a save-list matches its operations.
"""

import math
import platform
import re
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import titanlite
from titanlite.activation_checkpoint.apply import SaveListUse, apply_activation_checkpoint, check_names
from titanlite.checkpoint.collective import on_rank_0
from titanlite.checkpoint.hugging_face import check_weights
from titanlite.config.build import show
from titanlite.config.check import uses_copy_engines
from titanlite.config.parameter_groups import UpdateSettings, update_settings
from titanlite.config.problems import Problems
from titanlite.config.recipe_schema import FROZEN, SaveList
from titanlite.config.stages import largest_stage, longest_seq_len
from titanlite.device import Device, named_device
from titanlite.errors import Problem, RecipeError, Together
from titanlite.float8.convert import Conversion
from titanlite.float8.numerics import measurable
from titanlite.float8.receipt import emulation_cost
from titanlite.float8.scope import obstacle, odd_sizes, require_matches
from titanlite.forecast.activation_cost import check_matches
from titanlite.forecast.choose_save_list import Choice, choose
from titanlite.forecast.device_specs import measured_rates
from titanlite.forecast.memory import MemoryModel
from titanlite.forecast.search import check_budget
from titanlite.forecast.time_activations import time_block
from titanlite.hub import missing_weights, read_name
from titanlite.models.experts import GroupedProjection, count_parameters, has_experts, product_names
from titanlite.models.find import build_model
from titanlite.models.layers import Linear, Projection
from titanlite.observe.peak_flops import windows_of
from titanlite.parallel.context import token_group
from titanlite.parallel.copy_engines import no_copy_engines
from titanlite.parallel.fake_world import fake_world
from titanlite.parallel.mesh import Mesh, build_mesh, mesh_entry
from titanlite.parallel.process_group import ranks_of_a_host
from titanlite.preflight.checked_run import CheckedRun, resumes
from titanlite.preflight.start import branch_of
from titanlite.receipt import Entry, Receipt
from titanlite.sharding.split import sharding_plan, split_model
from titanlite.training.attention import choose_attention
from titanlite.update_rules.find import try_rules


@dataclass
class Assembly:
    """A run on one rank, without weights."""

    asked: CheckedRun
    model: nn.Module  # on the meta device: this rank's part of each layer, with activation checkpointing
    mesh: Mesh
    n_elements: int  # of all parameters, over all ranks; a shared parameter counts once
    n_active: int  # of the parameters that one token uses
    settings: Mapping[str, UpdateSettings]  # by name of the parameter
    float8: Conversion | None
    memory: MemoryModel
    no_copy_engines: str | None  # why FSDP cannot use copy engines, if the config wants them
    save_list: SaveList | None  # None: not chosen yet, as the device is only named
    chosen: Choice | None  # the choice of `save_list`, if it was made here for a memory budget
    save_list_use: SaveListUse | None  # counts of matches of its rules
    receipt: Receipt
    warnings: tuple[str, ...] = ()  # for the console, before the first step


@dataclass(frozen=True)
class Foreseen:
    """Facts about a run that are found from its model before a start."""

    rules: Mapping[str, str]  # update rules by name of the parameter
    n_elements: int  # as in `Assembly`; so is `n_active`
    n_active: int
    n_trained: int  # of parameters that are not frozen
    saved: int  # bytes of one checkpoint
    no_forecast: Problem | None = None  # why memory, time and collectives are not predicted

    @property
    def warning(self) -> str | None:
        """Return a warning if memory and time of the run cannot be predicted, else None."""
        why = self.no_forecast
        return why and f"this run trains without a forecast: {why.where.rstrip(':')}: {why.saw}; {why.fix}"

    @property
    def trained(self) -> int:
        """Return the bytes of weights and gradients in float32, and of the optimizer's state."""
        return self.saved + 4 * self.n_trained


def try_assembly(asked: CheckedRun, world: int | None) -> Foreseen:
    """Assemble a run without memory, for the checks and facts that need its model.

    `world` is the number of processes; None: the fewest that the run can have. Initial weights of the hub that this
    host lacks are not compared with the model: a start fetches them before it calls this.

    Raises:
        TitanliteError: as `assembled` raises it, or the initial weights are of another model.
    """
    config, path = asked.config, asked.config.checkpoint.initial_load_path
    if path and not resumes(config) and branch_of(config) is None and not missing_weights(path):
        check_weights(path, config.model.name, build_model(config.model, asked.dims, longest_seq_len(config)))
    with assembled(asked, world) as made:
        rules = {name: own.rule for name, own in made.settings.items()}
        why = made.memory.run.no_trace_reason
        update = made.memory.optimizer
        n_trained = sum(group.elements for group in update.groups().values() if group.rule not in (FROZEN, ""))
        return Foreseen(rules, made.n_elements, made.n_active, n_trained, update.saved, why)


def device_to_plan_for(gpu: str | None) -> Device:
    """Return the named device for `gpu`, one of `forecast.device_specs.DEVICES`, or a named CPU for None."""
    return named_device() if gpu is None else named_device(gpu, measured_rates(gpu).host)


@contextmanager
def assembled(asked: CheckedRun, world: int | None, gpu: str | None = None) -> Generator[Assembly]:
    """Assemble a run as rank 0 of a fake process group, which exists within the context.

    `world` is its size; None: the smallest that the run can have. `gpu` names the device; None: an unknown device that
    can run the float8 recipe.

    Raises:
        TitanliteError: as `assemble` raises it, or the save-list cannot keep to the memory budget.
    """
    mesh = asked.config.parallelism
    t, cp, shards = mesh.tensor_parallel_degree, mesh.context_parallel_degree, mesh.data_parallel_shard_degree
    of_replica = math.lcm(t * cp, mesh.expert_parallel_degree) if shards == -1 else shards * t * cp
    with fake_world(0, world or mesh.data_parallel_replicate_degree * of_replica):
        able = asked.float8 and replace(asked.float8, min_compute_capability=0)
        found = assemble(asked if gpu else replace(asked, float8=able), device_to_plan_for(gpu))
        if world is not None:
            check_budget(found.memory, asked.save_list, asked.origin, measured_rates(gpu) if gpu else None)
        yield found


def assemble(asked: CheckedRun, device: Device, blocks: Sequence[int] | None = None) -> Assembly:
    """Assemble a run up to its weights; with `blocks`, only the blocks with these numbers. The process group exists.

    Raises:
        TitanliteError: a user's update rule fails when it is tried. The model cannot be built or split. A pattern
            matches no parameter or layer. An optimizer group has no parameter, or one that its rule cannot update, or a
            parameter has no group. float8 converts no layer, fewer than it should, one that is to be fused, or a weight
            that FSDP cannot gather. A save-list names no operation of torch, keeps an elementwise one, or has a rule
            without a match.
    """
    config, dims, float8 = asked.config, asked.dims, asked.float8

    # The model, and checks of the names in the config.
    user_rules, groups = asked.optimizer.own_rules, asked.optimizer.groups.values()
    try_rules((user_rules[group.rule], group.own) for group in groups if group.rule in user_rules)
    model = build_model(config.model, dims, longest_seq_len(config))
    settings = _find_what_is_named(asked, model)
    n_elements, n_active = count_parameters(model)
    # The save-list's active rules in each remaining block. None: the model has all its blocks, of which a user's file
    # may have more or fewer than its recipe.
    of_blocks = None
    if blocks is not None:
        for n in {*range(dims.n_layers)}.difference(blocks):
            del model.layers._modules[str(n)]  # the remaining blocks keep their names
        of_blocks = asked.save_list and [asked.save_list.active(dims.n_layers)[n] for n in blocks]

    # The mesh, and this rank's part of each layer, in float8 where the recipe converts it.
    receipt, mesh = Receipt(), build_mesh(config.parallelism, device, has_experts(model))
    versions = {"titanlite": titanlite.__version__, "torch": torch.__version__, "python": platform.python_version()}
    receipt.add(Entry("environment", None, {**versions, "device": device.name}, count=1))
    for pin in asked.pins:
        receipt.add(Entry(pin.key, pin.asked, {"commit": read_name(pin.name, pin.key).revision}, count=1))
    if device.is_gpu:
        receipt.add(choose_attention(device, config, dims))
    receipt.add_later(partial(mesh_entry, config.parallelism, mesh))
    largest_config = largest_stage(config)  # with the batch and length of the training stage that needs most memory
    plan = sharding_plan(largest_config, dims).layers if mesh.tp_group is not None else {}
    converted = split_model(model, largest_config, float8, mesh, plan, receipt)  # also converts to float8
    warnings: tuple[str, ...] = ()
    if converted is not None:
        if config.job.strict:
            _check_converted(asked, converted)
        if freq := config.metrics.float8_numerics_freq:
            n, key = len(measurable(model)), "metrics.float8_numerics_freq"
            receipt.add(Entry("float8_numerics", freq, {"layers": n}, count=n, key=key))
        cost = emulation_cost(converted, device)
        warnings = (f'float8.recipe = "{config.float8.recipe}" is {cost}',) if cost else ()

    # The memory model of the run, and activation checkpointing.
    why_no_engines = None
    if (device.is_gpu or not device.is_named) and uses_copy_engines(config, mesh.fsdp.size(-1)):
        why_no_engines = no_copy_engines(mesh)
    parallelism = replace(config.parallelism, fsdp_copy_engines="never") if why_no_engines else config.parallelism
    actual_config = replace(largest_config, parallelism=parallelism)
    host = device.host if device.is_named else ranks_of_a_host()
    whole = model if blocks is None else None
    memory = MemoryModel(actual_config, dims, float8, asked.optimizer, dist.get_world_size(), whole, host)
    save_list, chosen, use = asked.save_list, None, None
    if save_list is None and not device.is_named:
        chosen = _choose_save_list(asked, model, memory, mesh)
        save_list = chosen.save_list
    if save_list is not None:
        use = apply_activation_checkpoint(model, save_list, of_blocks)
        check_matches(save_list, memory.run, config.job.strict)
    return Assembly(
        asked=asked,
        model=model,
        mesh=mesh,
        n_elements=n_elements,
        n_active=n_active,
        settings=settings,
        float8=converted,
        memory=memory,
        no_copy_engines=why_no_engines,
        save_list=save_list,
        chosen=chosen,
        save_list_use=use,
        receipt=receipt,
        warnings=warnings,
    )


def _find_what_is_named(asked: CheckedRun, model: nn.Module) -> dict[str, UpdateSettings]:
    """Return the settings of each parameter; refuse patterns, filters and rules that match nothing in the model."""
    config, origin, save_list = asked.config, asked.origin, asked.save_list
    layers = [name for name, module in model.named_modules() if isinstance(module, Linear | GroupedProjection)]
    in_blocks = [re.sub(r"^layers\.\d+\.", "", name) for name in product_names(model) if name.startswith("layers.")]
    of_matrices = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Projection)}
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    checks = Together()
    settings = checks.attempt(lambda: update_settings(asked.optimizer, config.optimizer, shapes, origin, of_matrices))
    if asked.float8 is not None:
        checks.attempt(lambda: require_matches(config.float8.filter_fqns, layers, origin))
    if save_list is not None:
        names, n = [*dict.fromkeys(in_blocks)], asked.dims.n_layers
        checks.attempt(lambda: check_names(save_list, names, n if config.job.strict else None))
    checks.raise_all()
    return settings or {}


def _check_converted(asked: CheckedRun, done: Conversion) -> None:
    """Refuse a float8 recipe that converts no layer, fewer than the filters allow, or all layers to be fused."""
    config, problems, why = asked.config, Problems(asked.origin), asked.float8 and obstacle(asked.float8)
    filters, recipe = config.float8.filter_fqns, show(config.float8.recipe)
    odd = odd_sizes(done.skipped, filters)
    if not done.converted:
        first, why = next(iter(done.skipped.items()))
        want = f"at least one linear layer to convert; all are skipped, e.g. {first} ({why})"
        fix = "change float8.recipe or what the reason names; job.strict = false trains without float8"
        problems.add("float8.recipe", recipe, want, fix)
    elif odd:
        names = list(dict.fromkeys(re.sub(r"^layers\.\d+\.", "", name) for name in odd))
        first, why = next(iter(odd.items()))
        want = f"filters that name what float8.recipe = {recipe} leaves alone: {first} ({why})"
        fix = f"filter_fqns = {show([*filters, *names])}; job.strict = false trains with what is converted"
        problems.add("float8.filter_fqns", show(filters), want, fix, against="float8.recipe")
    elif config.parallelism.async_tensor_parallel and why and not done.skipped:
        want = f"false where all linear layers are in float8 and float8.recipe = {recipe} {why}"
        fix = "async_tensor_parallel = false; job.strict = false trains with nothing fused"
        problems.add("parallelism.async_tensor_parallel", "true", want, fix, against="float8.recipe")
    problems.raise_all(RecipeError)


def _choose_save_list(asked: CheckedRun, model: nn.Module, memory: MemoryModel, mesh: Mesh) -> Choice:
    """Time one block on every rank, and let rank 0 choose a save-list for all ranks. Collective."""
    budget = asked.config.activation_checkpoint.budget_gib
    assert budget is not None  # noqa: S101  # checked in `config/check.py`
    began = time.monotonic()
    context = token_group(mesh, windows_of(model))
    times = time_block(model.layers[0], memory.run, context, mesh.device)  # type: ignore[arg-type]
    chosen = on_rank_0(lambda: choose(memory, times, budget))
    return replace(chosen, prepared_s=time.monotonic() - began)
