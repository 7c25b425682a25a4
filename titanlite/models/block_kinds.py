"""Find blocks of a model that do the same work, so that one of them can represent all."""

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn

_OF_EVERY_MODULE = {k for k in vars(nn.Module()) if k.startswith("_")}


def kind_of(block: nn.Module) -> str:
    """Return a text that is equal for blocks of this process with the same code, shapes, dtypes and attributes."""
    seen: list[Any] = []
    for name, module in block.named_modules():
        shapes = [(n, None if p is None else (tuple(p.shape), p.dtype)) for n, p in module._parameters.items()]
        buffers = [(n, None if b is None else (tuple(b.shape), b.dtype)) for n, b in module._buffers.items()]
        hooks = [list(h.values()) for k, h in vars(module).items() if k.endswith("_hooks") and h]
        plain = {k: _described(v) for k, v in vars(module).items() if k not in _OF_EVERY_MODULE}
        seen.append((name, id(type(module)), shapes, buffers, hooks, plain))
    return repr(seen)


def with_blocks(model: nn.Module, blocks: Iterable[nn.Module]) -> nn.Module:
    """Return a shallow copy of a model with these blocks instead of its own."""
    other = copy.copy(model)
    other._modules = {**model._modules, "layers": nn.ModuleList(blocks)}
    return other


def _described(value: object) -> str:
    """Return the repr of an attribute's value; instead of an object's address, its class and attributes."""
    if type(value).__repr__ is object.__repr__ and hasattr(value, "__dict__"):
        return f"{type(value).__qualname__} {id(type(value))} {vars(value)}"
    return repr(value)
