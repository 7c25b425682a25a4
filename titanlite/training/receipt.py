"""The receipt's last entries: what can only be known once the first step has run.

Everything is read off the run itself: dtypes off real tensors, the attention back end off torch's own choice for this
run's shapes, the rules of the save-list off their matches.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from titanlite.models.layers import Embedding, Linear
from titanlite.observe.console import Console
from titanlite.observe.receipt import Skipped
from titanlite.parallel.initialise import local_data
from titanlite.run_folder import RunFolder
from titanlite.training.build import Run


def complete_receipt(run: Run, folder: RunFolder, console: Console) -> None:
    """Add what the first step showed, write the file, and hold it against the config.

    Args:
        run: after its first step.
        folder: `receipt.json` is written by rank 0.
        console: says it where `job.strict` is off.

    Raises:
        StrictError: on every rank, if something that was asked for was not applied.
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
        split = [m for m in run.model.modules() if isinstance(m, Linear | Embedding) and hasattr(m, "group")]
        key = "parallelism.tensor_parallel_degree"
        receipt.add("tensor_parallel", run.mesh.tp_size, {"layers": len(split)}, count=len(split), key=key)

    dtypes = _dtypes(run, blocks[0])
    wanted = config.training.mixed_precision_param
    receipt.add("dtypes", wanted, dtypes, count=dtypes["compute"] == wanted, key="training.mixed_precision_param")
    receipt.add("attention", "fastest", _attention_backend(run), count=1)
    compiled = sum(block._compiled_call_impl is not None for block in blocks)
    receipt.add("compile", config.compile.enable, {"blocks": compiled}, count=compiled, key="compile.enable")

    use = run.save_list_use
    rules = [f"{rule.action} {rule.op} {' '.join(rule.module)}".strip() for rule in use.rules]
    receipt.add(
        "activation_checkpoint",
        config.activation_checkpoint.recipe,
        {rule: use.matches[i] for i, rule in enumerate(rules)},
        count=1 if not rules else use.matches.total(),
        missed=[Skipped(rules[use.rules.index(rule)], "matched no operation") for rule in use.unmatched()],
        key="activation_checkpoint.recipe",
    )
    if dist.get_rank() == 0:
        receipt.write(folder.receipt)
    receipt.enforce(config.job.strict, console.warning)


def _dtypes(run: Run, block: nn.Module) -> dict[str, str]:
    """Of the masters, of the weights that compute uses, and of the gradient reduction."""
    assert isinstance(block, FSDPModule)  # noqa: S101
    block.unshard()
    compute = {str(p.dtype).removeprefix("torch.") for p in block.parameters()}
    block.reshard()
    group = block._get_fsdp_state()._fsdp_param_group
    reduce = group and (group._reduce_dtype or group._orig_dtype)
    masters = {str(local_data(p).dtype).removeprefix("torch.") for p in run.parameters}
    return {
        "parameters": ", ".join(sorted(masters)),
        "compute": ", ".join(sorted(compute)),
        "reduction": str(reduce).removeprefix("torch."),
        "optimizer_state": run.config.optimizer.state_dtype,
    }


@torch.no_grad()
def _attention_backend(run: Run) -> str:
    """The kernel that torch chooses for this run's shapes and dtype."""
    sizes, training = run.sizes, run.config.training
    E, dtype = sizes.dim // sizes.n_heads, getattr(torch, training.mixed_precision_param)
    shape = training.local_batch_size, training.seq_len
    with torch.device(run.mesh.device):
        q = torch.empty(*shape, sizes.n_heads // run.mesh.tp_size, E, dtype=dtype).transpose(1, 2)
        k = torch.empty(*shape, sizes.n_kv_heads // run.mesh.tp_size, E, dtype=dtype).transpose(1, 2)
    choice = torch._fused_sdp_choice(q, k, k, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return torch.nn.attention.SDPBackend(choice).name.lower()
