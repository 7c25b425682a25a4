"""Save-lists: which activations of a block are kept for backward and which are recomputed.

A save-list (`recipes/activation_checkpoint/*.toml`) is a list of rules over operations; the first that matches decides,
in eager mode and under `torch.compile` alike. Operations are named by class. A matmul is counted by its place in the
block, so that a rule for `wqkv` holds whatever arithmetic the layer runs in.

Whether a rule was used is counted: a rule that matched nothing is reported, and without `optional` it is an error.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titanlite.config.recipe_schema import SaveList, SaveRule
from titanlite.models.layers import Linear

_CLASSES: dict[str, tuple[str, ...]] = {
    "attention": (
        "aten._scaled_dot_product_cudnn_attention.default",
        "aten._scaled_dot_product_flash_attention.default",
        "aten._scaled_dot_product_efficient_attention.default",
        "aten._scaled_dot_product_fused_attention_overrideable.default",
        "aten._scaled_dot_product_attention_math.default",
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
    ),
    "matmul": ("aten.mm.default", "aten.addmm.default", "aten._scaled_mm.default"),
    "communication": (
        "_c10d_functional.all_gather_into_tensor.default",
        "_c10d_functional.reduce_scatter_tensor.default",
    ),
}
"""The operations behind each class that a rule can name. What is not listed here is recomputed unless named itself."""


@dataclass
class SaveListUse:
    """What a save-list did: how often each rule matched, over all blocks and forward passes so far."""

    rules: tuple[SaveRule, ...]
    matches: Counter[int] = field(default_factory=Counter)

    def unmatched(self) -> list[SaveRule]:
        """Rules that matched no operation though they are not optional."""
        return [rule for i, rule in enumerate(self.rules) if not self.matches[i] and not rule.optional]


def apply_activation_checkpoint(model: nn.Module, save_list: SaveList) -> SaveListUse:
    """Wrap each block of a model, in place. A list that saves everything wraps nothing.

    Args:
        model: has `layers`.
        save_list: the rules.

    Returns:
        Counts that fill up as the model runs.
    """
    use = SaveListUse(save_list.rules)
    if save_list.default == "save" and not save_list.rules:
        return use
    blocks: list[nn.Module] = list(model.layers)  # type: ignore[arg-type]
    classes: dict[frozenset[int], type[nn.Module]] = {}  # blocks with the same rules share one class
    for number, block in enumerate(blocks):
        rules = frozenset(i for i, rule in enumerate(save_list.rules) if number in rule.blocks(len(blocks)))
        if rules not in classes:
            options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
            if rules or save_list.default == "save":
                options["context_fn"] = partial(_contexts, save_list, rules, _matmul_names(block), use)
            classes[rules] = _checkpointed(type(block), options)
        block.__class__ = classes[rules]
    return use


def _checkpointed(block: type[nn.Module], options: dict[str, Any]) -> type[nn.Module]:
    """A block class whose forward runs under checkpointing.

    Not a wrapper module, so that parameters keep their names; and one class for many blocks, so that they share one
    compiled graph.
    """

    class Checkpointed(block):
        def forward(self, *args: Tensor) -> Tensor:
            return checkpoint(super().forward, *args, **options)  # type: ignore[return-value]

    Checkpointed.__name__ = f"Checkpointed{block.__name__}"
    return Checkpointed


def _matmul_names(block: nn.Module) -> tuple[str, ...]:
    """Names of the linear layers of a block, in the order in which they run: that of their definition."""
    return tuple(name for name, module in block.named_modules() if isinstance(module, Linear))


def _contexts(save_list: SaveList, rules: frozenset[int], matmuls: tuple[str, ...], use: SaveListUse):
    """Fresh contexts for one forward pass of one block, and its recomputation."""
    return create_selective_checkpoint_contexts(_policy(save_list, rules, matmuls, use))


def _policy(
    save_list: SaveList, rules: frozenset[int], matmuls: tuple[str, ...], use: SaveListUse
) -> Callable[..., CheckpointPolicy]:
    """Decide for one operation at a time. Forward and recomputation count separately, so that they agree."""
    ops = [frozenset(_CLASSES.get(rule.op, (rule.op,))) for rule in save_list.rules]
    mms = frozenset(_CLASSES["matmul"])
    counts: dict[bool, Counter[object]] = {False: Counter(), True: Counter()}
    actions = {"save": CheckpointPolicy.MUST_SAVE, "recompute": CheckpointPolicy.PREFER_RECOMPUTE}

    def decide(ctx, func, *args: object, **kwargs: object) -> CheckpointPolicy:
        name, count = str(func), counts[ctx.is_recompute]
        layer = ""
        if name in mms:
            layer = matmuls[count["matmul"] % len(matmuls)]
            count["matmul"] += 1
        for i, rule in enumerate(save_list.rules):
            if (
                i not in rules
                or name not in ops[i]
                or (rule.module and not any(layer.endswith(m) for m in rule.module))
            ):
                continue
            if not ctx.is_recompute:
                use.matches[i] += 1
            count[i] += 1
            if (count[i] - 1) % rule.every == 0:
                return actions[rule.action]
            return actions["recompute" if rule.action == "save" else "save"]
        return actions[save_list.default]

    return decide


def is_pointwise(op: str) -> bool:
    """Whether an operation is cheap elementwise work, which a save-list must not keep by name.

    Args:
        op: like "aten.abs.default".
    """
    packet = torch.ops
    for part in op.split("."):
        packet = getattr(packet, part)
    return torch.Tag.pointwise in packet.tags  # type: ignore[attr-defined]
