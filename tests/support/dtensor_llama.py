"""Llama's block as others write it, split and recomputed as torchtitan does: by DTensor and torch's checkpointing.

Its layers are apart where titanlite's are joined (wq, wk and wv; w1 and w3), and share what was gathered for them.

Source of the plan: torchtitan v0.2.2, `models/llama3/infra/parallelize.py`, `apply_tp`; of what is recomputed, its
`distributed/activation_checkpoint.py`.
"""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from titanlite.activation_checkpoint.operations import CLASSES


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class Attention(nn.Module):
    """With twice as many query heads as key/value heads. Keys have no bias: its gradient would be zero."""

    def __init__(self, width: int, head_width: int, bias: bool) -> None:
        super().__init__()
        self.head_width = head_width
        self.wq, self.wo = (nn.Linear(width, width, bias) for _ in range(2))
        self.wk, self.wv = nn.Linear(width, width // 2, bias=False), nn.Linear(width, width // 2, bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).view(*x.shape[:2], -1, self.head_width).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width: int, ffn_width: int, bias: bool) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(width, ffn_width, bias) for _ in range(2))
        self.w2 = nn.Linear(ffn_width, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """A layer of Llama, as others write it."""

    def __init__(self, width: int = 16, head_width: int = 4, ffn_width: int = 8, bias: bool = False) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = Norm(width), Norm(width)
        self.attention = Attention(width, head_width, bias)
        self.feed_forward = FeedForward(width, ffn_width, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


def parallel(block: Block) -> Block:
    """Tensor parallelism with a sequence split between the matmuls, through DTensor."""
    column, row = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1))
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan: dict[str, Any] = {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
    plan |= {"attention": whole, "feed_forward": whole, "attention.wo": row, "feed_forward.w2": row}
    plan |= dict.fromkeys(
        ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"), column
    )
    mesh = init_device_mesh(block.ffn_norm.weight.device.type, (dist.get_world_size(),))
    return parallelize_module(block, mesh, plan)  # type: ignore[return-value]


def recomputed(block: nn.Module, per_op: bool = False) -> nn.Module:
    """Under checkpointing: all of it, or per op, where attention, what is reduced and every second matmul is kept."""
    options: dict[str, Any] = {"context_fn": _contexts} if per_op else {}
    return checkpoint_wrapper(block, **options)


def _contexts() -> tuple[Any, Any]:
    matmuls = Counter[bool]()
    kept = {*CLASSES["attention"], *CLASSES["matmul"], "_c10d_functional.reduce_scatter_tensor.default"}

    def decide(ctx: Any, func: Any, *_: object, **__: object) -> CheckpointPolicy:
        matmuls[ctx.is_recompute] += (is_matmul := str(func) in CLASSES["matmul"])
        is_kept = str(func) in kept and not (is_matmul and matmuls[ctx.is_recompute] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)
