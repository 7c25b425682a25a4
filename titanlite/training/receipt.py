"""The receipt's entries that no feature adds by itself: what the first step shows.

Everything is read off the run itself: dtypes off real tensors, the attention back end off torch's own choice for this
run's shapes, the rules of the save-list off their matches.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titanlite.activation_checkpoint.rules import rule_in_words
from titanlite.config.recipe_schema import SaveList, SaveRule
from titanlite.errors import Problem, StrictError, describe
from titanlite.float8.weight import local_data
from titanlite.forecast.choose_save_list import in_words
from titanlite.forecast.memory import GIB
from titanlite.kernels.lowering import lowered
from titanlite.models.layers import CausalAttention, Embedding, Linear
from titanlite.observe.console import Console
from titanlite.observe.memory import memory_gib
from titanlite.parallel.fsdp import PushedAllGather, dtype_of_reduction
from titanlite.parallel.kept_state import state_of, written
from titanlite.parallel.tensor import ParallelLinear, VocabParallelEmbedding, is_replicated
from titanlite.preflight.run_folder import RunFolder
from titanlite.receipt import Receipt, Skipped
from titanlite.training.build import Run


def complete_receipt(run: Run, folder: RunFolder, console: Console) -> None:
    """Add what the first step showed, write the file, and hold it against the config.

    Args:
        run: after its first step.
        folder: `receipt.json` is written by rank 0.
        console: says it where `job.strict` is off.

    Raises:
        StrictError: on every rank, if something that was asked for was not applied, or the run holds more than it may.
        RecipeError: on every rank, if the save-list keeps attention without its q, k and v, or recomputes what a block
            writes for its next call.
    """
    config, receipt = run.config, run.receipt
    blocks: list[nn.Module] = list(run.model.layers)  # type: ignore[arg-type]
    layout = {"data_parallel_replicate": run.mesh.replicas, "tensor_parallel": run.mesh.tp_size}
    layout["data_parallel_shard"] = run.mesh.dp_size // run.mesh.replicas
    degrees = config.parallelism
    requested = [
        degrees.data_parallel_replicate_degree,
        degrees.data_parallel_shard_degree,
        degrees.tensor_parallel_degree,
    ]
    receipt.add("parallelism", requested, layout, count=dist.get_world_size())
    if run.mesh.tp_size > 1:
        layers = [(name, m) for name, m in run.model.named_modules() if isinstance(m, Linear | Embedding)]
        whole = [
            Skipped(name, "annotated to be replicated on every rank") for name, m in layers if is_replicated(m.weight)
        ]
        key, split = "parallelism.tensor_parallel_degree", len(layers) - len(whole)
        receipt.add("tensor_parallel", run.mesh.tp_size, {"layers": split}, count=split, skipped=whole, key=key)

    if config.parallelism.async_tensor_parallel:
        _add_async_tensor_parallel(run, receipt)
    matters = config.parallelism.fsdp_copy_engines == "always" or run.mesh.device.type == "cuda"
    if matters and (run.memory.copy_engines or run.no_copy_engines):
        _add_copy_engines(run, blocks, receipt)
    _add_dtypes(run, blocks[0], receipt)
    _add_attention(run, len(blocks), receipt)
    _add_compile(config.compile.enable, blocks, receipt)

    use, chosen = run.save_list_use, run.chosen
    if use.refused is not None:
        raise use.refused
    after = state_of(run.model, use.checkpointed)
    if (error := written(run.kept_state, after, config.model.file or config.model.name)) is not None:
        raise error
    rules, unmatched = _labels(use.rules), use.unmatched()
    of_auto: dict[str, object] = {}
    if chosen is not None:
        again, took = round(chosen.seconds * 1e3, 1), round(chosen.prepared_s, 3)
        of_auto = {"keeps": in_words(chosen), "recomputes_ms": again, "prepared_s": took}
    receipt.add(
        "activation_checkpoint",
        config.activation_checkpoint.recipe,
        {
            **of_auto,
            "blocks": use.blocks,
            "matches": {rule: use.matches[i] for i, rule in enumerate(rules)},
            **_held(run, rules),
        },
        count=len(rules) - len(unmatched) if rules else len(blocks),  # what rules do not say, `default` says
        missed=[Skipped(rules[i], f"matched no operation{_place(run.save_list, i)}") for i in unmatched],
        key="activation_checkpoint.recipe",
    )
    over_budget = _add_memory(run, receipt)
    if dist.get_rank() == 0:
        receipt.write(folder.receipt)
        for entry in receipt.entries:
            console.notice(entry.summary())
        console.notice(f"receipt, with each layer, rule and shape: {folder.receipt}")
    receipt.enforce(config.job.strict, console.warning)
    if over_budget is not None:
        message = describe("the run exceeds its memory budget", [over_budget])
        if config.job.strict:
            raise StrictError(message)
        console.warning(message)


def _labels(rules: Sequence[SaveRule]) -> list[str]:
    """Rules in words; those that another has said before, as may be without `job.strict`, with their numbers."""
    words = [rule_in_words(rule) + (f", blocks {rule.layers}" if rule.layers != ":" else "") for rule in rules]
    return [f"{rule} (rule {i})" if rule in words[: i - 1] else rule for i, rule in enumerate(words, 1)]


def _held(run: Run, rules: list[str]) -> dict[str, object]:
    """MiB that each rule keeps of a block that it is for, on this rank in a micro-step, as its price says."""
    if not rules:
        return {}
    if run.rule_prices is None:
        return {"predicted_mib_per_layer": "unknown"}
    prices = zip(rules, run.rule_prices, strict=True)
    return {"predicted_mib_per_layer": {rule: round(price.held / 2**20, 3) for rule, price in prices}}


def _place(save_list: SaveList, rule: int) -> str:
    """Return the file and the line of a rule in brackets, if it is from a file."""
    place = save_list.origin.of(f"rules[{rule}].op")
    return f" ({place.source}, line {place.line})" if place.line is not None else ""


def _add_memory(run: Run, receipt: Receipt) -> Problem | None:
    """Add the peak so far beside what was predicted and allowed; return a problem if it is more than was allowed."""
    peaks = torch.tensor(memory_gib(run.mesh.device), device=run.mesh.device)
    dist.all_reduce(peaks, dist.ReduceOp.MAX)  # of the rank with the highest
    reserved, allocated = (round(gib, 2) for gib in peaks.tolist())
    predicted = round(run.predicted.total / GIB, 2) if run.predicted else "unknown"
    applied = {"predicted_gib": predicted, "reserved_gib": reserved, "allocated_gib": allocated}
    budget, key, over = run.config.activation_checkpoint.budget_gib, "activation_checkpoint.budget_gib", []
    if budget is not None and reserved > budget:
        over = [Skipped("peak", f"{reserved} GiB are reserved; predicted: {predicted}")]
    receipt.add("memory", budget, applied, count=1, skipped=over, key=key)
    if budget is None or not over:
        return None
    want = f"a peak of at most that; {over[0].why}"
    less = f"budget_gib = {2 * budget - reserved:.2f}" if reserved < 2 * budget else "a save-list by name"
    fix = f"{less}; job.strict = false trains on"
    return Problem(key, f"{budget:g}", want, fix)


def _add_async_tensor_parallel(run: Run, receipt: Receipt) -> None:
    """Layers that are to be fused; on GPUs also the operators that were, as a shape may stand in the way."""
    modules = list(run.model.named_modules())
    layers = [(name, m) for name, m in modules if isinstance(m, ParallelLinear)]
    looked_up = [
        Skipped(n, "no matmul: an embedding looks tokens up")
        for n, m in modules
        if isinstance(m, VocabParallelEmbedding)
    ]
    plain = [
        Skipped(name, "its collectives were not fused with its matmuls") for name, m in layers if not m.asynchronous
    ]
    count = sum(m.fused is not None for _, m in layers)
    applied: dict[str, object] = {"layers": count, "lowering": "definition"}
    if run.mesh.device.type == "cuda":
        each = {f"{call.op} {call.shapes}": n for call, n in lowered.items() if call.reason is None}
        fused = sum(each.values())
        applied = {"layers": count, "fused": fused, "plain": lowered.total() - fused, "lowering": "fused kernels"}
        applied["each"] = each
        count = sum(call.reason is None for call in lowered)  # shapes, as what was missed
    receipt.add(
        "async_tensor_parallel",
        True,
        applied,
        count=count,
        skipped=looked_up
        + [Skipped(name, m.unfused) for name, m in layers if m.unfused and m.asynchronous]
        + [Skipped(f"{op} {shapes}", why) for (op, shapes, why, expected) in lowered if why and expected],
        missed=plain
        + [Skipped(f"{op} {shapes}", why) for (op, shapes, why, expected) in lowered if why and not expected],
        key="parallelism.async_tensor_parallel",
    )


def _add_copy_engines(run: Run, blocks: list[nn.Module], receipt: Receipt) -> None:
    """Blocks whose weights are gathered by them; gradients are then reduced by them, too."""
    units = [block._get_fsdp_state()._fsdp_param_group for block in blocks if isinstance(block, FSDPModule)]
    groups = [group for group in units if group is not None]  # else it has no weights
    count = sum(isinstance(group._all_gather_comm, PushedAllGather) for group in groups)
    why = "" if count == len(groups) else run.no_copy_engines or "not applied"
    asked = "always" if run.config.parallelism.fsdp_copy_engines == "always" else None
    applied = {"blocks": count, "by NCCL, because": why} if why else {"blocks": count}
    missed = [Skipped("blocks", why)] if why else []
    receipt.add("fsdp_copy_engines", asked, applied, count=count, missed=missed, key="parallelism.fsdp_copy_engines")


def _add_dtypes(run: Run, block: nn.Module, receipt: Receipt) -> None:
    """Add the dtypes of master weights, of weights in compute, of the gradient reduction and of the moments."""
    assert isinstance(block, FSDPModule)  # noqa: S101
    block.unshard()
    compute, reduction = _names(list(block.parameters())), dtype_of_reduction(block)
    block.reshard()
    moments = [*run.optimizer.exp_avg.values(), *run.optimizer.exp_avg_sq.values()]
    found = {
        "parameters": _names([local_data(p) for p in run.parameters]),
        "compute": compute,
        "reduction": reduction,
        "optimizer_state": _names(moments),
    }
    training, optimizer = run.config.training, run.config.optimizer
    wanted = {
        "parameters": ("float32", "training"),
        "compute": (training.mixed_precision_param, "training.mixed_precision_param"),
        "reduction": (training.mixed_precision_reduce, "training.mixed_precision_reduce"),
        "optimizer_state": (optimizer.state_dtype, "optimizer.state_dtype"),
    }
    missed = [
        Skipped(key, f"{what} in {found[what]}, not in {dtype}")
        for what, (dtype, key) in wanted.items()
        if found[what] != dtype
    ]
    requested = {what: dtype for what, (dtype, _) in wanted.items()}
    key = missed[0].what if missed else "training"
    receipt.add("dtypes", requested, found, count=len(wanted) - len(missed), missed=missed, key=key)


def _names(tensors: list[Tensor]) -> str:
    """Their dtypes, each once."""
    return ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors}))


def _add_compile(requested: bool, blocks: list[nn.Module], receipt: Receipt) -> None:
    """Blocks that asked to be compiled, and whether the compiler made anything: the environment can turn it off."""
    if not requested:
        receipt.add("compile", False, "off", count=0)
        return
    from torch._dynamo.utils import counters  # slow to import

    plain = [i for i, block in enumerate(blocks) if block._compiled_call_impl is None]
    missed = [Skipped(f"layers.{i}", "is not compiled") for i in plain]
    applied = {"blocks": len(blocks) - len(plain), "graphs": counters["stats"]["unique_graphs"]}
    count = applied["blocks"] if applied["graphs"] else 0
    receipt.add("compile", True, applied, count=count, missed=missed, key="compile.enable")


def _add_attention(run: Run, blocks: int, receipt: Receipt) -> None:
    """Add the kernel that torch chooses for this run's shapes and dtype; on a CPU its definition is as good as any."""
    backend, dtype = _attention_backend(run), run.config.training.mixed_precision_param
    fused, skipped = "math" not in backend or run.mesh.device.type == "cpu", []
    if not fused and dtype == "float32":
        skipped = [Skipped("attention", "no fused kernel supports float32 with grouped-query heads or a window")]
    if not backend:
        skipped = [Skipped("attention", "it is no CausalAttention: its kernel is not known")]
    count = blocks if fused or skipped else 0
    receipt.add("attention", "fused", backend or "not known", count=count, skipped=skipped, key="model.n_heads")


def _attention_backend(run: Run) -> str:
    """Name the kernels that are chosen for this run's shapes and dtype, for each window that layers have."""
    dims, training = run.dims, run.config.training
    shape, dtype = (training.local_batch_size, training.seq_len), getattr(torch, training.mixed_precision_param)
    # Some kernels have no backward for some shapes, hence requires_grad.
    q, k, v = (
        torch.empty(
            *shape, heads // run.mesh.tp_size, dims.head_width, dtype=dtype, device=run.mesh.device, requires_grad=True
        ).transpose(1, 2)
        for heads in (dims.n_heads, dims.n_kv_heads, dims.n_kv_heads)
    )
    windows = sorted({m.window for m in run.model.modules() if isinstance(m, CausalAttention)})
    return ", ".join(dict.fromkeys(CausalAttention(window).kernel(q, k, v) for window in windows))
