"""Name the arguments of calls of torch's operators, and find calls that draw random numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node


def draws(op: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call draws random numbers. Dropout with a probability of 0, or outside of training, does not."""
    if not isinstance(op, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    given = arguments(op, args, kwargs)
    return all(given.get(name, True) for name in ("p", "dropout_p", "train", "training"))


def arguments(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by name, including defaults."""
    schema = {a.name: a.default_value if a.has_default_value() else None for a in op._schema.arguments}
    return schema | dict(zip(schema, args, strict=False)) | dict(kwargs)


def arguments_of(node: Node) -> dict[str, Any]:
    """Return the arguments of a call in a graph: of an operator by name, of a Python function by position."""
    if isinstance(node.target, torch._ops.OpOverload):
        return arguments(node.target, node.args, node.kwargs)
    return {str(i): value for i, value in enumerate(node.args)} | node.kwargs
