"""Check a user's own model for mistakes that raise no exception: missing modules, and weights in wrong places.

Weights must be in layers of `layers.py`, which have initial values and tensor-parallel versions. Each weight must have
one name, by which FSDP and the sharding plan find it. All other tensors must be buffers, which `fill_buffers` computes.
Any other tensor remains on the meta device, and the first step that uses it fails.
"""

import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from titanlite.config.schema import Model
from titanlite.errors import ConfigError, Problem, describe
from titanlite.models.layers import Embedding, LayerNorm, Projection, RMSNorm
from titanlite.models.mistakes import of_function, refused

_WEIGHTS = {Embedding: {"weight"}, LayerNorm: {"weight", "bias"}, Projection: {"weight", "bias"}, RMSNorm: {"weight"}}
_TIED = {"tok_embeddings.weight", "output.weight"}
_PARTS = {"tok_embeddings": nn.Module, "layers": nn.ModuleList, "norm": nn.Module, "output": nn.Module}


def require_trainable(made: nn.Module, file: str) -> None:
    """Raise ConfigError if a model on the meta device lacks a module that a run needs, or could not be trained
    correctly. The message lists all problems, a problem of several blocks only once.
    """
    want, fix = "fill_buffers() to compute the buffers", "def fill_buffers(self) -> None"
    kind: Any = type(made)
    with refused(file, want, fix, kind.fill_buffers):  # a run calls it when tensors have memory
        inspect.signature(kind.fill_buffers).bind(made)
    problems: dict[tuple[str, str], Problem] = {}
    for problem in (*_missing(made), *_shared(made), *_in_no_layer(made), *_drawn_alike(made), *_no_masters(made)):
        problems.setdefault((_of_any_block(problem.where), _of_any_block(problem.saw)), problem)
    if problems:
        raise ConfigError(describe(file, list(problems.values())))


def require_whole(shape: Sequence[int], want: list[int], model: nn.Module, said: Model) -> None:
    """Raise ConfigError unless a model's logits are [tokens, vocabulary].

    The loss would assume that ids which are missing in the logits are on other ranks.
    """
    if list(shape) != want:
        saw = f"logits of shape {list(shape)}"
        problem = of_function(type(model).forward, said.file, saw, f"{want}: [M, V]", "return all of them")
        raise ConfigError(describe(said.file or said.name, [problem]))


def _of_any_block(name: str) -> str:
    return re.sub(r"\blayers\.\d+\b", "layers.*", name)


def _missing(made: nn.Module) -> Iterator[Problem]:
    for name, kind in _PARTS.items():
        if not isinstance(has := getattr(made, name, None), kind):
            saw, fix = type(has).__name__, f"self.{name} = … in __init__, as in titanlite/models/llama3.py"
            yield Problem(f"{type(made).__name__}.{name}", saw, f"an nn.{kind.__name__}", fix)


def _shared(made: nn.Module) -> Iterator[Problem]:
    """Yield a problem for each weight that has several names, except that of a tied head."""
    places: dict[nn.Parameter, list[str]] = {}
    for name, weight in made.named_parameters(remove_duplicate=False):
        places.setdefault(weight, []).append(name)
    for first, *others in places.values():
        if others and {first, *others} != _TIED:
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            want = "one name for each weight, but for an output.weight that is tied to tok_embeddings.weight"
            fix = "one module, called as often as you like within its block; one of its own in another block"
            yield Problem(first, f"the same parameter as {others[0]}{more}", want, fix)


def _in_no_layer(made: nn.Module) -> Iterator[Problem]:
    for name, module in made.named_modules():
        known = next((own for kind, own in _WEIGHTS.items() if isinstance(module, kind)), set[str]())
        if odd := [own for own, parameter in module._parameters.items() if parameter is not None and own not in known]:
            kind = type(module)
            called = ("torch.nn." if kind.__module__.startswith("torch.nn.") else "") + kind.__name__
            want = "weights in layers of titanlite.models.layers alone: of others the initial values are not known"
            fix = "Linear, Embedding, RMSNorm or LayerNorm from there; register_buffer for what is not trained"
            yield Problem(name or "the model", f"{called} that holds {', '.join(odd)}", want, fix)


def _drawn_alike(made: nn.Module) -> Iterator[Problem]:
    """Yield a problem for each linear layer that would start with the same weights as another one."""
    drawn: dict[str, str] = {}
    for name, layer in made.named_modules():
        for part in layer.parts if isinstance(layer, Projection) else ():
            other = drawn.setdefault(f"{name.rpartition('.')[0]}.{part}", name)
            if other != name:
                want = "parts of other names than those of layers beside it: by them initial weights are drawn"
                yield Problem(name, f'a Linear with a part "{part}", as {other}', want, f'another name than "{part}"')


def _no_masters(made: nn.Module) -> Iterator[Problem]:
    for name, weight in made.named_parameters():
        if not weight.requires_grad or weight.dtype != torch.float32:
            saw = f"{weight.dtype}, requires_grad = {weight.requires_grad}"
            want = "torch.float32 that is trained; a step computes in training.mixed_precision_param"
            fix = "leave parameters as they are; lr_factor = 0.0 in a group of the optimizer's recipe freezes them"
            yield Problem(name, saw, want, fix)
            return
