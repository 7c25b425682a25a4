"""Calls of torch's operators: their arguments by name, and which of them draw random numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node


def draws(op: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Say whether a call draws random numbers: dropout does not with a probability of 0, or out of training.

    Args:
        op: an operator of torch's, with its overload; anything else draws none.
        args: its arguments.
        kwargs: those by name.
    """
    if not isinstance(op, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    given = arguments(op, args, kwargs)
    return all(given.get(name, True) for name in ("p", "dropout_p", "train", "training"))


def arguments(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Give a call's arguments by name, defaults included.

    Args:
        op: the operator.
        args: as it is called.
        kwargs: those by name.
    """
    schema = {a.name: a.default_value if a.has_default_value() else None for a in op._schema.arguments}
    return schema | dict(zip(schema, args, strict=False)) | dict(kwargs)


def arguments_of(node: Node) -> dict[str, Any]:
    """Give those of a call in a graph: of an operator by name, of a function of Python's by number."""
    if isinstance(node.target, torch._ops.OpOverload):
        return arguments(node.target, node.args, node.kwargs)
    return {str(i): value for i, value in enumerate(node.args)} | node.kwargs
