"""Complete the receipt after the first step, and enforce it.

The entries come from the run itself: dtypes from its tensors, the attention backend from torch's choice for its shapes,
memory from the allocator.
"""

import math
from collections.abc import Iterable
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from titanlite.activation_checkpoint.receipt import save_list_entry
from titanlite.config.recipe_schema import ROUTER_TRAINING
from titanlite.config.schema import Config
from titanlite.errors import Problem, StrictError, describe
from titanlite.float8.weight import local_data
from titanlite.forecast.activation_cost import rule_costs
from titanlite.forecast.choose_save_list import in_words
from titanlite.forecast.memory import GIB, usable
from titanlite.forecast.search import LEAST
from titanlite.kernels.attention import attention_kernel
from titanlite.kernels.grouped_matmul import grouped_kernel
from titanlite.models.experts import MixtureOfExperts
from titanlite.models.layers import CausalAttention
from titanlite.observe.console import Console
from titanlite.observe.memory import is_allocators, memory_gib
from titanlite.parallel.compile import compile_entry
from titanlite.parallel.fsdp import dtype_of_reduction, units_of
from titanlite.parallel.kept_state import state_of, written
from titanlite.preflight.run_folder import RunFolder
from titanlite.receipt import Entry, Skipped
from titanlite.training.build import Run


def complete_receipt(run: Run, folder: RunFolder, console: Console, is_masked: bool) -> None:
    """Add the entries that need a step, write the file on rank 0, and enforce the receipt.

    `is_masked`: whether samples of the step consist of separate documents.

    Raises:
        StrictError: on every rank: a request was not applied, or the run exceeds its memory budget on a GPU.
        RecipeError: on every rank: the save-list keeps attention without its q, k and v, or recomputes a forward that
            writes a buffer.
    """
    config, receipt, use = run.config, run.receipt, run.save_list_use
    after, file = state_of(run.model, use.checkpointed), config.model.file or config.model.name
    if error := use.refused or written(run.kept_state, after, file):
        raise error
    add_entries(run, is_masked)
    memory, over_budget = _memory(run)
    receipt.add(memory)
    if dist.get_rank() == 0:
        receipt.write(folder.receipt)
        news = [memory, *(entry for entry in receipt.entries if entry.is_news and entry is not memory)]
        console.digest(
            [entry.summary() for entry in receipt.entries],
            [entry.summary(is_brief=True) for entry in news],
            lambda more: f"receipt, with {f'{more} more, ' * (more > 0)}each layer, rule and shape: {folder.receipt}",
        )
    receipt.enforce(config.job.strict, console.warning)
    if over_budget is not None:
        message = describe("the run exceeds its memory budget", [over_budget])
        if config.job.strict:
            raise StrictError(message)
        console.warning(message)


def add_entries(run: Run, is_masked: bool) -> None:
    """Add the entries about how a run is built. Arguments are as in `complete_receipt`."""
    receipt = run.receipt
    receipt.complete()
    receipt.add(_dtypes(run))
    receipt.add(_attention_entry(run, is_masked))
    if mixtures := [m for m in run.model.modules() if isinstance(m, MixtureOfExperts)]:
        receipt.add(_experts_entry(run, mixtures))
    if not run.mesh.built_for.is_named:  # on a named device nothing is compiled
        receipt.add(compile_entry(run.model, run.config.compile.enable))
    receipt.add(_save_list_entry(run))


def _save_list_entry(run: Run) -> Entry:
    chosen = run.chosen
    choice: dict[str, object] = {}
    if chosen is not None:
        again, took = round(chosen.seconds * 1e3, 1), round(chosen.prepared_s, 3)
        choice = {"keeps": in_words(chosen), "recomputes_ms": again, "prepared_s": took}
    held = [price.held for price in rule_costs(run.memory.run, run.save_list)] if run.predicted else None
    return save_list_entry(run.save_list_use, run.save_list, run.config.activation_checkpoint.recipe, choice, held)


def _memory(run: Run) -> tuple[Entry, Problem | None]:
    """Return the entry of peak and predicted memory, and a problem if the peak on a GPU exceeds the budget."""
    peaks = torch.tensor(memory_gib(run.mesh.device), device=run.mesh.device)
    dist.all_reduce(peaks, dist.ReduceOp.MAX)
    reserved, allocated = (round(gib, 2) for gib in peaks.tolist())
    predicted = round(run.predicted.total / GIB, 2) if run.predicted else "unknown"
    applied: dict[str, object] = {"predicted_gib": predicted, "reserved_gib": reserved, "allocated_gib": allocated}
    budget, key = run.config.activation_checkpoint.budget_gib, "activation_checkpoint.budget_gib"
    if not is_allocators(run.mesh.device):
        return Entry("memory", budget, applied | {"measured": "the process"}, count=1, key=key), None
    if budget is None or reserved <= budget:
        return Entry("memory", budget, applied, count=1, key=key), None
    over = Skipped("peak", f"{reserved} GiB are reserved; predicted: {predicted}")
    fix = _use_less(run, budget, reserved)
    fix += "; job.strict = false trains on" if run.config.job.strict else ""
    problem = Problem(key, f"{budget:g}", f"a peak of at most that; {over.why}", fix)
    return Entry("memory", budget, applied, count=1, skipped=(over,), key=key), problem


def _use_less(run: Run, budget: float, reserved: float) -> str:
    """Return what would keep the peak within a budget: for `auto` a budget that is smaller by what was exceeded."""
    if run.chosen is None:
        return "a save-list that keeps less"
    lower = math.floor((2 * budget - reserved) * 100) / 100
    if run.memory.needed_under(LEAST) <= usable(lower):
        return f"budget_gib = {lower:.2f}"
    return "more ranks or a smaller batch: no save-list keeps so much less"


def _dtypes(run: Run) -> Entry:
    """Return the entry of dtypes: of master weights, gathered weights, gradient reduction and moments.

    They are those of the first block that is trained. If all blocks are frozen, there is no reduction.
    """
    blocks: list[nn.Module] = list(run.model.layers)  # type: ignore[arg-type]
    block = next((each for each in blocks if any(p.requires_grad for p in each.parameters())), blocks[0])
    for unit in units_of(block):
        unit.unshard()
    compute, nothing = dtype_names(block.parameters()), "none: blocks are frozen"
    reduction = dtype_of_reduction(block) or nothing
    for unit in units_of(block):
        unit.reshard()
    found = {
        "parameters": dtype_names(map(local_data, run.parameters)),
        "compute": compute,
        "reduction": reduction,
        "optimizer_state": dtype_names(run.optimizer.state_tensors()),
    }
    keys = {
        "parameters": "training",
        "compute": "training.mixed_precision_param",
        "reduction": "training.mixed_precision_reduce",
        "optimizer_state": "optimizer.state_dtype",
    }
    requested, default = (
        {what: "float32" if what == "parameters" else attrgetter(key)(of) for what, key in keys.items()}
        for of in (run.config, Config())
    )
    missed = tuple(
        Skipped(keys[what], f"{what} in {found[what]}, not in {dtype}")
        for what, dtype in requested.items()
        if found[what] not in (dtype, nothing)
    )
    key = missed[0].what if missed else "training"
    return Entry("dtypes", requested, found, count=len(keys) - len(missed), missed=missed, key=key, default=default)


def dtype_names(tensors: Iterable[Tensor]) -> str:
    """Return the names of the dtypes of tensors, each name once."""
    return ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors}))


def _attention_entry(run: Run, is_masked: bool) -> Entry:
    """Return the entry of the attention kernel for this run's shapes and dtype. Any kernel on a CPU counts as fused."""
    backend, dtype = _attention_backend(run, is_masked), run.config.training.mixed_precision_param
    fused, skipped = "math" not in backend or not run.mesh.built_for.is_gpu, ()
    if not fused and dtype == "float32":
        skipped = (Skipped("attention", "no fused kernel supports float32 with grouped-query heads or a window"),)
    if not backend:
        skipped = (Skipped("attention", "it is no CausalAttention: its kernel is not known"),)
    count = len(run.model.layers) if fused or skipped else 0  # type: ignore[arg-type]
    asked, key = "fused", "model.n_heads"
    return Entry("attention", asked, backend or "not known", count=count, skipped=skipped, key=key, default=asked)


def _experts_entry(run: Run, mixtures: list[MixtureOfExperts]) -> Entry:
    """Return the entry of the experts' kernel. On a GPU a loop over experts, which is slow, is noted as skipped."""
    device, (first, *_) = run.mesh.built_for, mixtures
    dtype = getattr(torch, run.config.training.mixed_precision_param)
    shapes = [projection.shape_of_expert for projection in (first.w13, first.w2)]
    kernels = {grouped_kernel(device, dtype, shape) for shape in shapes}
    is_slow, why = "loop" in kernels, "a product for each expert, for which the host waits: wants a Hopper GPU, 16 bits"
    skipped = (Skipped("products", f"{why}, and widths of 128"),) if is_slow and device.is_gpu else ()
    applied: dict[str, object] = {"kernel": "loop" if is_slow else "grouped_matmul"}
    applied |= {key: value for key in ROUTER_TRAINING if (value := getattr(first.of, key))}
    asked, key = "grouped_matmul", "model.flavor"
    return Entry("experts", asked, applied, count=len(mixtures), skipped=skipped, key=key, default=asked)


def _attention_backend(run: Run, is_masked: bool) -> str:
    """Return the names of the attention kernels for this run's shapes and dtype, over the windows of all layers."""
    dims, training = run.dims, run.config.training
    shape, dtype = (training.local_batch_size, training.seq_len), getattr(torch, training.mixed_precision_param)
    # Some kernels have no backward for some shapes, hence requires_grad.
    q, k, v = (
        torch.empty(
            *shape, heads // run.mesh.tp_size, dims.head_width, dtype=dtype, device=run.mesh.device, requires_grad=True
        ).transpose(1, 2)
        for heads in (dims.n_heads, dims.n_kv_heads, dims.n_kv_heads)
    )
    names = dict[str, None]()
    for window in sorted(
        {m.window_in(training.seq_len) for m in run.model.modules() if isinstance(m, CausalAttention)}
    ):
        name = attention_kernel(q, is_plain=not (is_masked or run.mesh.context or window))
        if name == "torch":
            choice = torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=dims.n_heads > dims.n_kv_heads)
            name = SDPBackend(choice).name.lower()
        names[name] = None
    return ", ".join(names)
