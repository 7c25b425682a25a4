"""The only place that assembles a run: a flat list of calls, always in this order.

    model on the meta device → sharding plan and tensor-parallel layers → float8 → activation checkpointing → compile →
    FSDP → materialise and initialise → optimizer

Each feature says in the receipt what it did. The weights are fresh; `train.py` then restores a
checkpoint if there is one.
"""

import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

import titanlite
from titanlite.activation_checkpoint.apply import SaveListUse, apply_activation_checkpoint
from titanlite.checkpoint.collective import on_rank_0
from titanlite.checkpoint.rng import seed_all
from titanlite.config.check import uses_copy_engines
from titanlite.config.check_mesh import tokens_of_rank
from titanlite.config.recipe_schema import Float8Recipe, ModelDims, OptimizerRecipe, SaveList
from titanlite.config.schema import Config
from titanlite.config.stages import largest_stage, longest_seq_len
from titanlite.device import Device
from titanlite.errors import RecipeError
from titanlite.float8.convert import apply_float8, precompute_scales
from titanlite.float8.numerics import measurable
from titanlite.float8.receipt import emulation_cost, float8_entry
from titanlite.forecast.activation_cost import RuleCost, rule_costs
from titanlite.forecast.choose_save_list import Choice, choose
from titanlite.forecast.memory import Memory, MemoryModel
from titanlite.forecast.rank_model import sharding_plan
from titanlite.forecast.time_activations import time_block
from titanlite.kernels.cross_entropy import CrossEntropy
from titanlite.models.experts import GroupedProjection, MixtureOfExperts
from titanlite.models.find import build_model
from titanlite.models.matrices import matrices_of
from titanlite.observe.peak_flops import windows_of
from titanlite.parallel.compile import apply_compile
from titanlite.parallel.context import balance_over_sharers, context_entry, token_group
from titanlite.parallel.copy_engines import copy_engines_entry, no_copy_engines
from titanlite.parallel.expert import apply_expert_parallel
from titanlite.parallel.fsdp import apply_fsdp, finalize
from titanlite.parallel.initialise import fill_buffers, initialise
from titanlite.parallel.kept_state import state_of
from titanlite.parallel.mesh import Mesh, build_mesh, mesh_entry
from titanlite.parallel.parity import require_parity
from titanlite.parallel.process_group import ranks_of_a_host
from titanlite.parallel.tensor import apply_tensor_parallel, fused_layers_entry
from titanlite.receipt import Entry, Receipt
from titanlite.training.attention import choose_attention
from titanlite.training.optimizers.sharded import ShardedOptimizer
from titanlite.training.routers import Routers, routers_of
from titanlite.training.weight_average import WeightAverage


@dataclass
class Run:
    """Everything that a step needs.

    Attributes:
        memory: what is known of the run's.
        no_copy_engines: why they do not move blocks, although that was asked for or is the default; else None.
        chosen: the save-list, if it was chosen here to keep to a budget.
        predicted: the peak; None if the save-list has no price.
        rule_costs: of the save-list, or None.
    """

    config: Config
    dims: ModelDims
    memory: MemoryModel
    no_copy_engines: str | None
    save_list: SaveList
    chosen: Choice | None
    predicted: Memory | None
    rule_costs: list[RuleCost] | None
    mesh: Mesh
    model: nn.Module
    parameters: list[nn.Parameter]
    loss: Callable[..., Tensor]
    optimizer: ShardedOptimizer
    save_list_use: SaveListUse
    kept_state: dict[str, object]  # of checkpointed blocks, before the first step
    receipt: Receipt
    routers: Routers | None  # of a mixture of experts
    average: WeightAverage | None = None  # of its weights, if `optimizer.ema_decay` asks for it
    warnings: tuple[str, ...] = ()  # to be said before the first step

    @property
    def n_elements(self) -> int:
        """Return the number of the model's parameters, those of all ranks together, each shared one once."""
        return sum(parameter.numel() for parameter in self.model.parameters())  # of a split one, its whole

    @property
    def n_active(self) -> int:
        """Return the number of parameters that one token uses: of each layer's experts those that it goes to."""
        of_experts = [module for module in self.model.modules() if isinstance(module, GroupedProjection)]
        return self.n_elements - sum(layer.weight.numel() - layer.used_by_a_token for layer in of_experts)


def build(
    config: Config,
    dims: ModelDims,
    save_list: SaveList | None,
    float8: Float8Recipe | None,
    rules: OptimizerRecipe,
    device: Device,
    blocks: Sequence[int] | None = None,
) -> Run:
    """Assemble a run with fresh weights.

    Args:
        config: checked.
        dims: the model's dimensions, overrides applied.
        save_list: which activations are kept; None: the fastest list within `activation_checkpoint.budget_gib`.
        float8: arithmetic of the linear layers, or None.
        rules: how each parameter is updated.
        device: that is built for; the process group exists. For one that is only named weights stay without values, and
            nothing is compiled.
        blocks: numbers of those that are built; None: all of the model's.

    Returns:
        The run.
    """
    if config.training.deterministic and not device.is_named:  # saying no, too, would load the compiler
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it torch refuses every matmul on a GPU
        torch.use_deterministic_algorithms(True)
    largest = largest_stage(config)  # on which depends what has room
    model = build_model(config.model, dims, longest_seq_len(config))
    of_blocks = save_list and save_list.active(dims.n_layers)
    if blocks is not None:
        for n in {*range(dims.n_layers)}.difference(blocks):
            del model.layers._modules[str(n)]  # the others keep their names
        of_blocks = of_blocks and [of_blocks[n] for n in blocks]
    has_experts = any(isinstance(module, MixtureOfExperts) for module in model.modules())
    receipt, mesh = Receipt(), build_mesh(config.parallelism, device, has_experts)
    receipt.add(Entry("environment", None, _environment(device), count=1))
    if device.is_gpu:
        receipt.add(choose_attention(device, config, dims))
    receipt.add_later(partial(mesh_entry, config.parallelism, mesh))

    if mesh.tp_group is not None:
        plan = sharding_plan(largest, dims).layers
        if config.model.file and not device.is_named:
            receipt.add(require_parity(model, plan, mesh, config))
        is_asynchronous = config.parallelism.async_tensor_parallel
        split = apply_tensor_parallel(model, plan, mesh.tp, mesh.tp_group, is_asynchronous)
        receipt.add_later(lambda: split)
        if is_asynchronous:
            receipt.add_later(partial(fused_layers_entry, model, device))
    if mesh.context is not None:
        balance_over_sharers(model, mesh.micro_batch_group)
        receipt.add_later(partial(context_entry, model, largest))
    if mesh.experts is not None:
        tokens = tokens_of_rank(largest) // mesh.tp_size
        receipt.add(apply_expert_parallel(model, mesh, tokens))
    warnings = _apply_float8(model, config, float8, mesh, receipt) if float8 is not None else ()
    obstacle = no_copy_engines(mesh) if uses_copy_engines(config, mesh.fsdp.size(-1)) else None
    # What is predicted is what will run.
    parallelism = replace(config.parallelism, fsdp_copy_engines="never") if obstacle else config.parallelism
    as_it_is = replace(largest, parallelism=parallelism)
    host = device.host if device.is_named else ranks_of_a_host()
    memory, chosen = MemoryModel(as_it_is, dims, float8, rules, dist.get_world_size(), model, host), None
    if save_list is None:
        chosen = _choose_save_list(model, config, memory, mesh)
        save_list = chosen.save_list
    save_list_use = apply_activation_checkpoint(model, save_list, of_blocks)
    if config.compile.enable and not device.is_named:
        apply_compile(model)
    predicted = None if device.is_named else _peak(memory, save_list)
    apply_fsdp(model, config, mesh, memory.gradients_follow, memory.copy_engines)
    is_insisted = config.parallelism.fsdp_copy_engines == "always"
    if (is_insisted or device.is_gpu) and (memory.copy_engines or obstacle):
        receipt.add_later(partial(copy_engines_entry, model, is_insisted, obstacle))

    matrices, decay = matrices_of(model), config.optimizer.ema_decay
    with device.tensors():
        model.to_empty(device=mesh.device)
        if not device.is_named:
            fill_buffers(model)
            initialise(model, config.training.seed)
            # What a model draws, for dropout say, is the same on the ranks of a tensor-parallel group, in every run.
            seed_all((config.training.seed * 1_000_003 + mesh.dp_rank) % 2**32)  # a CPU's generator looks at no more
        finalize(model, config, mesh)  # before the optimizer, which must see where shards end up
        named = dict(model.named_parameters())
        parameters = list(named.values())
        precompute_scales(parameters, mesh.fsdp)
        optimizer = ShardedOptimizer(named, config.optimizer, rules, mesh, matrices)
        average = WeightAverage(named, optimizer.locals, decay, mesh) if decay else None
    receipt.add(optimizer.entry())
    return Run(
        config=config,
        dims=dims,
        memory=memory,
        no_copy_engines=obstacle,
        save_list=save_list,
        chosen=chosen,
        predicted=predicted,
        rule_costs=rule_costs(memory.run, save_list) if predicted else None,
        mesh=mesh,
        model=model,
        parameters=parameters,
        loss=CrossEntropy(
            mesh.tp_group,
            compile=config.compile.enable and not device.is_named,
            softcap=dims.logit_softcap,
            z_loss=config.training.z_loss,
        ),
        optimizer=optimizer,
        save_list_use=save_list_use,
        kept_state={} if device.is_named else state_of(model, save_list_use.checkpointed),
        receipt=receipt,
        routers=routers_of(model),
        average=average,
        warnings=warnings,
    )


def _environment(device: Device) -> dict[str, str]:
    """Return the versions and the device that the run computes with."""
    return {
        "titanlite": titanlite.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device.name,
    }


def _choose_save_list(model: nn.Module, config: Config, memory: MemoryModel, mesh: Mesh) -> Choice:
    """Time a block on every rank and let rank 0 choose for all."""
    budget = config.activation_checkpoint.budget_gib
    assert budget is not None  # noqa: S101  # `config/check.py` sees to it
    began = time.monotonic()
    context = token_group(mesh, windows_of(model))
    times = time_block(model.layers[0], memory.run, context, mesh.device)  # type: ignore[arg-type]
    chosen = on_rank_0(lambda: choose(memory, times, budget))
    return replace(chosen, prepared_s=time.monotonic() - began)


def _peak(memory: MemoryModel, save_list: SaveList) -> Memory | None:
    """Predict the peak; None if it has no price: of what a list keeps without naming it, and of some architectures."""
    with suppress(RecipeError):
        return memory.peak_under(save_list)
    return None


def _apply_float8(
    model: nn.Module, config: Config, recipe: Float8Recipe, mesh: Mesh, receipt: Receipt
) -> tuple[str, ...]:
    """Convert the linear layers of a model; return warnings."""
    tokens, shards = tokens_of_rank(config), mesh.fsdp.size(-1)
    of_experts = None if mesh.experts is None else mesh.expert_shards.size(-1)
    done = apply_float8(model, recipe, config.float8.filter_fqns, mesh.built_for, tokens, shards, of_experts)
    receipt.add(float8_entry(model, done, recipe, config, mesh.built_for))
    if freq := config.metrics.float8_numerics_freq:
        n = len(measurable(model))
        key = "metrics.float8_numerics_freq"
        receipt.add(Entry("float8_numerics", freq, {"layers": n}, count=n, key=key))
    cost = emulation_cost(done, mesh.built_for)
    return (f'float8.recipe = "{config.float8.recipe}" is {cost}',) if cost else ()
