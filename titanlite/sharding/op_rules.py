"""Sharding rules of torch's operators for which DTensor has no rules, or differs for dims of length 1 or uneven parts.

DTensor has no rules for operators that are not decomposed. With the placements of a rule, an operator computes this
rank's part of its output from this rank's parts of its inputs. The rule "everything whole" is in `rules.py`;
titanlite's own operators have their rules beside their definitions (`kernels/operators.py`).

Random tensors without an input get the placement that their consumers need. If they are whole, or if a whole tensor
goes through dropout, all ranks need the same random numbers.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from titanlite.kernels.operators import SPLITS
from titanlite.sharding.plan import PARTIAL, REPLICATE
from titanlite.sharding.reshape import moved_shards

aten = torch.ops.aten


class Rule(NamedTuple):
    """Placements with which an operator runs without communication."""

    inputs: tuple[Placement, ...]  # of each tensor among its arguments
    output: Placement  # of all its results


_Own = Callable[..., Iterable[Rule]]
_OWN: dict[object, _Own] = {}

RESHAPES = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.view_as.default,
}
MATMULS = {aten.linear.default, aten.matmul.default, aten.mm.default, aten.bmm.default}
_ELEMENTWISE = {
    aten.to.dtype,
    aten.to.device,
    aten.to.dtype_layout,
    aten.type_as.default,
    aten.contiguous.default,
    aten.clone.default,
    aten.detach.default,
    aten.detach_.default,  # this and the next: of a constant in the model
    aten.lift_fresh_copy.default,
    aten.alias.default,
    aten.__and__.Tensor,
    aten.__or__.Tensor,
    aten.dropout.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.bernoulli.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
}
_FACTORIES = {
    aten.rand.default,
    aten.randn.default,
    aten.zeros.default,
    aten.ones.default,
    aten.full.default,
    aten.empty.memory_format,
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.scalar_tensor.default,
}


def own_rules(
    op: torch._ops.OpOverload, inputs: list[Tensor], out: Tensor, arguments: dict[str, Any], size: int
) -> Iterable[Rule] | None:
    """Return an operator's rules on `size` ranks, without "everything whole"; None if this file has no rules for it.

    `inputs` are the tensors among its `arguments`, `out` its result or the first of several.
    """
    if op in SPLITS:
        fitting = [split for split in SPLITS[op] if len(split.inputs) == len(inputs)]
        return [Rule(tuple(_shard(d) for d in split.inputs), Shard(split.output)) for split in fitting]
    if op in _OWN:
        return _OWN[op](inputs, out, arguments, size)
    if op in _FACTORIES:
        return [Rule((), Shard(d)) for d in range(out.ndim)]
    if op in _ELEMENTWISE or torch.Tag.pointwise in op.tags:
        return _elementwise_rules(inputs, out)
    return None


def _shard(dim: int | None) -> Placement:
    return REPLICATE if dim is None else Shard(dim)


def _rules_for(*targets: object) -> Callable[[_Own], _Own]:
    def add(function: _Own) -> _Own:
        _OWN.update(dict.fromkeys(targets, function))
        return function

    return add


def _elementwise_rules(inputs: list[Tensor], out: Tensor) -> Iterable[Rule]:
    """Split each dim of the output, and of all inputs that have it; a dim of length 1 is whole on every rank."""
    for dim in range(out.ndim):
        if out.shape[dim] == 1:
            continue
        own = [dim - out.ndim + tensor.ndim for tensor in inputs]
        has = [d >= 0 and tensor.shape[d] != 1 for d, tensor in zip(own, inputs, strict=True)]
        yield Rule(tuple(Shard(d) if h else REPLICATE for d, h in zip(own, has, strict=True)), Shard(dim))


@_rules_for(*RESHAPES)
def _reshape_rules(inputs: list[Tensor], out: Tensor, _: dict[str, Any], size: int) -> Iterable[Rule]:
    others = (REPLICATE,) * (len(inputs) - 1)
    for before, after in moved_shards(inputs[0].shape, out.shape, size).items():
        yield Rule((Shard(before), *others), Shard(after))


def _einsum_rules(left: str, right: str, out: str) -> Iterable[Rule]:
    """Split one dim, named by a letter, in all tensors that have it; a contracted dim gives a partial sum."""
    for letter in dict.fromkeys(left + right):
        places = [Shard(t.index(letter)) if letter in t else REPLICATE for t in (left, right)]
        yield Rule((places[0], places[1]), Shard(out.index(letter)) if letter in out else PARTIAL)


@_rules_for(aten.linear.default)
def _linear_rules(inputs: list[Tensor], *_: object) -> Iterable[Rule]:
    batch = "abcdefgh"[: inputs[0].ndim - 1]
    return _einsum_rules(f"{batch}k", "nk", f"{batch}n")


@_rules_for(aten.mm.default, aten.bmm.default, aten.matmul.default)
def _matmul_rules(inputs: list[Tensor], out: Tensor, *_: object) -> Iterable[Rule]:
    left, right = inputs
    if min(left.ndim, right.ndim) < 2:
        a, b = ("k" if left.ndim == 1 else "abcdefgh"[: left.ndim - 1] + "k"), "k"
        if right.ndim > 1:
            b = "abcdefgh"[: right.ndim - 2] + "kn"
        yield from _einsum_rules(a, b, "".join(c for c in a + b if c != "k"))
        return
    batch = "abcdefgh"[: out.ndim - 2]
    letters = []
    for tensor, ends in ((left, "mk"), (right, "kn")):
        own = batch[len(batch) - (tensor.ndim - 2) :]
        # A batch dim of length 1 is broadcast: it gets an upper-case letter, which the output does not have.
        sizes = tensor.shape[: tensor.ndim - 2]
        letters.append("".join(c if n > 1 else c.upper() for c, n in zip(own, sizes, strict=True)) + ends)
    for rule in _einsum_rules(letters[0], letters[1], batch + "mn"):
        if not _is_broadcast(rule, inputs):
            yield rule


def _is_broadcast(rule: Rule, inputs: list[Tensor]) -> bool:
    pairs = zip(rule.inputs, inputs, strict=True)
    return any(isinstance(p, Shard) and t.shape[p.dim] == 1 for p, t in pairs)


@_rules_for(aten.layer_norm.default, aten.rms_norm.default)
def _norm_rules(inputs: list[Tensor], out: Tensor, arguments: dict[str, Any], _: int) -> Iterable[Rule]:
    others = (REPLICATE,) * (len(inputs) - 1)
    for dim in range(out.ndim - len(arguments["normalized_shape"])):
        yield Rule((Shard(dim), *others), Shard(dim))


@_rules_for(aten.softmax.int, aten.log_softmax.int, aten.chunk.default, aten.cumsum.default)
def _other_dims_rules(inputs: list[Tensor], out: Tensor, arguments: dict[str, Any], _: int) -> Iterable[Rule]:
    """Split every dim except the one that the operator works along."""
    worked = arguments["dim"] % out.ndim
    return [Rule((Shard(d),), Shard(d)) for d in range(out.ndim) if d != worked]


@_rules_for(aten.pad.default)
def _pad_rules(inputs: list[Tensor], out: Tensor, arguments: dict[str, Any], _: int) -> Iterable[Rule]:
    padded = {out.ndim - 1 - i // 2 for i, n in enumerate(arguments["pad"]) if n}  # `pad` begins with the last dim
    return [Rule((Shard(d),), Shard(d)) for d in range(out.ndim) if d not in padded]


@_rules_for(aten.scaled_dot_product_attention.default)
def _attention_rules(inputs: list[Tensor], out: Tensor, arguments: dict[str, Any], _: int) -> Iterable[Rule]:
    """Split queries [B, H, S, E] and keys and values [B, K, S, E] over the batch B, or over heads H and K."""
    mask = inputs[3:]
    if arguments.get("dropout_p"):
        return
    for dim in range(out.ndim - 2):
        own = [dim - out.ndim + m.ndim for m in mask]
        split = (Shard(d) if d >= 0 and m.shape[d] != 1 else REPLICATE for d, m in zip(own, mask, strict=True))
        yield Rule((Shard(dim),) * 3 + tuple(split), Shard(dim))


@_rules_for(aten.embedding.default)
def _embedding_rules(inputs: list[Tensor], out: Tensor, *_: object) -> Iterable[Rule]:
    """Split the table's rows (other ranks' rows give zeros: a partial sum), its columns, or the indices."""
    yield Rule((Shard(0), REPLICATE), PARTIAL)
    yield Rule((Shard(1), REPLICATE), Shard(out.ndim - 1))
    for dim in range(inputs[1].ndim):
        yield Rule((REPLICATE, Shard(dim)), Shard(dim))


@_rules_for(aten.cross_entropy_loss.default)
def _cross_entropy_rules(inputs: list[Tensor], out: Tensor, arguments: dict[str, Any], _: int) -> Iterable[Rule]:
    """Split logits [M, V] over the vocabulary V, or logits and targets [M] over tokens M unless the loss is a mean.

    Over V, ranks exchange two statistics per token.
    """
    logits, targets, *weight = inputs
    if weight or targets.is_floating_point() or logits.ndim != 2:
        return
    if not arguments["label_smoothing"]:
        yield Rule((Shard(1), REPLICATE), REPLICATE)
    if arguments["reduction"] != _MEAN:  # a rank's mean would count only its own targets
        yield Rule((Shard(0), Shard(0)), Shard(0) if out.ndim else PARTIAL)


_MEAN = 1
