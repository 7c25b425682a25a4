"""FSDP2, always: over a mesh of one if need be, so that bf16 compute with float32 masters holds in every layout.

Gradients are summed, not averaged, over the data-parallel ranks: the step divides the loss by the global number of
targets before backward.
"""

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from titanlite.config.schema import Config
from titanlite.float8.weight import local_data
from titanlite.kernels.chunk_cat import chunk_cat
from titanlite.parallel.mesh import Mesh


def apply_fsdp(model: nn.Module, config: Config, mesh: Mesh) -> None:
    """Shard each block, the embedding and the head as one unit each, in place.

    Args:
        model: has `tok_embeddings`, `layers`, `norm` and `output`.
        config: `training.mixed_precision_*` and `parallelism.fsdp_reshard_after_forward`.
        mesh: the mesh.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.training.mixed_precision_param),
        reduce_dtype=getattr(torch, config.training.mixed_precision_reduce),
        cast_forward_inputs=False,  # the rotary table stays float32; activations have the dtype of the embedding
    )
    reshard = config.parallelism.fsdp_reshard_after_forward
    # Parameters that are not sharded need not be freed: gathering them is a copy.
    blocks = reshard == "always" or (reshard == "default" and mesh.fsdp.size(-1) > 1)
    options: dict[str, Any] = {"mesh": mesh.fsdp, "mp_policy": policy}
    for block in model.layers:  # type: ignore[union-attr]
        fully_shard(block, reshard_after_forward=blocks, **options)
    if model.output.weight is not model.tok_embeddings.weight:  # type: ignore[union-attr]
        fully_shard(model.tok_embeddings, reshard_after_forward=blocks, **options)  # type: ignore[arg-type]
        fully_shard([model.norm, model.output], reshard_after_forward=reshard == "always", **options)  # type: ignore[list-item]
    fully_shard(model, reshard_after_forward=reshard == "always", **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # gloo cannot divide while it reduces, hence the plain sum.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def gather_once(model: nn.Module, config: Config, mesh: Mesh) -> None:
    """Gather each unit and free it, once its weights have memory: FSDP then moves shards that need padding.

    A single data-parallel rank has nobody to reduce gradients with. Each is handed to its master by a hook of the
    gathered weight, so that FSDP finds none: in memory of the compute stream, one by one, as activations are freed.

    Args:
        model: from `apply_fsdp`.
        config: `training.mixed_precision_reduce`.
        mesh: the mesh.
    """
    hand_over = partial(_hand_over, getattr(torch, config.training.mixed_precision_reduce))
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            masters = dict(unit.named_parameters())  # type: ignore[attr-defined]
            unit.unshard()
            for name, weight in unit.named_parameters():  # type: ignore[attr-defined]
                of_unit = weight is not masters[name]
                if mesh.dp_size == 1 and of_unit and weight.requires_grad:
                    weight.register_post_accumulate_grad_hook(partial(hand_over, masters[name]))
            unit.reshard()


def _hand_over(dtype: torch.dtype, master: nn.Parameter, weight: nn.Parameter) -> None:
    """Add the gradient of a gathered weight to that of its master, rounded as it would be on its way to other ranks."""
    assert weight.grad is not None  # noqa: S101
    grad, weight.grad = local_data(weight.grad).to(dtype), None
    if master.grad is not None:
        local_data(master.grad).add_(grad)
        return
    if grad.dtype != master.dtype:  # as `to`, whose kernel takes half as long again
        narrow, grad = grad, torch.empty(grad.shape, dtype=master.dtype, device=grad.device)
        chunk_cat([narrow], 1, grad.view(1, -1))
    master.grad = DTensor(grad, master._spec, requires_grad=False)  # type: ignore[attr-defined]


def _chunk_cat(tensors: list[Tensor], dim: int, num_chunks: int, out: Tensor) -> None:
    """In the place of torch's `fsdp::chunk_cat`, for whatever uses FSDP in this process."""
    if dim == 0 and len(out) == num_chunks and out.is_contiguous() and out.is_floating_point():
        chunk_cat(tensors, num_chunks, out)
    else:  # not what FSDP does with the gradients of our models
        torch._chunk_cat(tensors, dim, num_chunks, out=out)


_FSDP_OPERATORS = torch.library.Library("fsdp", "IMPL")  # ours as long as it lives
with warnings.catch_warnings():  # torch's C++ says so once in a process, for whichever operator comes first
    warnings.filterwarnings("ignore", message=r"(?s).*Overriding a previously registered kernel", category=UserWarning)
    _FSDP_OPERATORS.impl("chunk_cat", _chunk_cat, "CUDA", allow_override=True)
