"""FSDP2, always: over a mesh of one if need be, so that bf16 compute with float32 masters holds in every layout.

Gradients are summed, not averaged, over the data-parallel ranks: the step divides the loss by the global number of
targets before backward.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from titanlite.config.schema import Config
from titanlite.kernels.chunk_cat import chunk_cat
from titanlite.parallel.mesh import Mesh


def apply_fsdp(model: nn.Module, config: Config, mesh: Mesh, in_place: bool = False) -> None:
    """Shard each block, the embedding and the head as one unit each, in place.

    Args:
        model: has `tok_embeddings`, `layers`, `norm` and `output`.
        config: `training.mixed_precision_*` and `parallelism.fsdp_reshard_after_forward`.
        mesh: the mesh.
        in_place: leave gradients where they are put together; of a single data-parallel rank, whose gradients are
            float32 and of one micro-step.
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
            if mesh.dp_size > 1:  # a single rank divides by its count of one anyway, without a pass over the gradient
                module.set_gradient_divide_factor(1.0)
            elif in_place:
                module.set_custom_reduce_scatter(_OneRank())  # type: ignore[arg-type]


class _OneRank:
    """The sum over one rank: the memory of what FSDP has put together, which it would copy otherwise.

    No kernel of the stream that reduces touches it then, so that it is the compute stream's alone, which allocates it,
    and takes for the next layers' gradients what the last ones' activations leave.
    """

    def __init__(self) -> None:
        self._input: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP asks for the input, fills it, and asks for the sum."""
        if self._input is None:
            self._input = torch.empty(*size, dtype=dtype, device=device)
            return self._input
        the_sum, self._input = self._input, None
        return the_sum

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Not called: FSDP knows that there is nobody to reduce with."""
        raise AssertionError("a reduce-scatter over one rank")


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
