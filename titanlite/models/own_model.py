"""Check what a run needs of a model of the user's own, before it runs: its parts, and where it keeps its tensors.

Weights are in layers of `layers.py`, which have initial values and tensor-parallel layers, each under one name: FSDP
gathers a block's where the block stands, and the sharding plan of a layer is found by its name. All other tensors are
buffers, which `fill_buffers` computes. Whatever is elsewhere stays on the meta device.
"""

import inspect
import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from titanlite.errors import ConfigError, Problem, describe, nearest
from titanlite.models.layers import Embedding, LayerNorm, Projection, RMSNorm
from titanlite.models.mistakes import nearest_method, of_function

_WEIGHTS = {Embedding: {"weight"}, LayerNorm: {"weight", "bias"}, Projection: {"weight", "bias"}, RMSNorm: {"weight"}}
_TIED = {"tok_embeddings.weight", "output.weight"}
_OF_EVERY_MODULE = set(vars(nn.Module()))


def require_trainable(made: nn.Module, file: str) -> None:
    """Refuse a model that lacks a module that a run looks for by its name, or has what no run trains rightly.

    Args:
        made: the model, on the meta device.
        file: the user's, for messages.

    Raises:
        ConfigError: all problems are in the message, of blocks that are alike once.
    """
    found = [*_missing(made), *_uncallable(made)] or list(_hidden(made))
    found += [*_shared(made), *_in_no_layer(made), *_drawn_alike(made), *_no_masters(made)]
    problems: dict[tuple[str, str], Problem] = {}
    for problem in found:
        problems.setdefault((_of_any_block(problem.where), _of_any_block(problem.saw)), problem)
    if problems:
        raise ConfigError(describe(file, list(problems.values())))


def _of_any_block(name: str) -> str:
    return re.sub(r"\blayers\.\d+\b", "layers.*", name)


_PARTS = ("tok_embeddings", "layers", "norm", "output")


def _missing(made: nn.Module) -> Iterator[Problem]:
    for name in _PARTS:
        has, kind = getattr(made, name, None), nn.ModuleList if name == "layers" else nn.Module
        if not isinstance(has, kind):
            saw = "nothing" if has is None else type(has).__name__
            fix = f"self.{name} = … in __init__, as in titanlite/models/llama3.py"
            near = nearest(name, {key for key, _ in made.named_children()} - {*_PARTS})
            if has is None and near:
                fix = f"self.{name} in place of self.{near}"
            yield Problem(f"{type(made).__name__}.{name}", saw, f"an nn.{kind.__name__}", fix)


_CALLED = {
    "forward": (("tokens",), "which takes [M] token ids to logits [M, V]"),
    "fill_buffers": ((), "which computes the buffers, if there are any"),
}


def _uncallable(made: nn.Module) -> Iterator[Problem]:
    """Yield a problem for each method that a run needs and cannot call."""
    kind = type(made)
    file = inspect.getfile(kind)
    for name, (given, does) in _CALLED.items():
        method, call = getattr(kind, name), f"def {name}({', '.join(('self', *given))})"
        if method is getattr(nn.Module, name, None):
            meant = nearest_method(kind, name)
            fix = f"{call} in place of {meant.__name__}" if meant else f"write {call}"
            problem = of_function(meant or kind.__init__, file, "nothing", f"{call}, {does}", fix)
            yield problem._replace(where=f"{kind.__name__}.{name}")
            continue
        try:
            signature = inspect.signature(getattr(made, name))
            signature.bind(*given, **{key: None for key in ("sequences",) if key in signature.parameters})
        except TypeError as error:
            saw = f"{name}{inspect.signature(method)}: {error}"
            yield of_function(method, file, saw, f"{call}, {does}", f"write {call}")


def _shared(made: nn.Module) -> Iterator[Problem]:
    """Weights with several names, but for a head that is tied; of modules that are shared as a whole the outermost."""
    modules = dict(made.named_modules(remove_duplicate=False))
    weights = made.named_parameters(remove_duplicate=False)
    places: dict[nn.Module | nn.Parameter, dict[object, str]] = {}
    for name, held in [*((n, m) for n, m in modules.items() if n and [*m.parameters()]), *weights]:
        above, _, own = name.rpartition(".")
        places.setdefault(held, {}).setdefault((modules[above], own), name)
    for held, names in places.items():
        if len(names) == 1 or set(names.values()) == _TIED:
            continue
        first, *others = names.values()
        kind = "module" if isinstance(held, nn.Module) else "parameter"
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        want = "one name for all that has weights, but for an output.weight that is tied to tok_embeddings.weight"
        fix = f"one of the names, called as often as you like within its block; a {kind} of its own in another block"
        yield Problem(first, f"the same {kind} as {others[0]}{more}", want, fix)


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
    """Linear layers that would begin with equal weights."""
    drawn: dict[str, str] = {}
    for name, layer in made.named_modules():
        for part in layer.parts if isinstance(layer, Projection) else ():
            other = drawn.setdefault(f"{name.rpartition('.')[0]}.{part}", name)
            if other != name:
                want = "parts of other names than those of layers beside it: by them initial weights are drawn"
                yield Problem(name, f'a Linear with a part "{part}", as {other}', want, f'another name than "{part}"')


def _no_masters(made: nn.Module) -> Iterator[Problem]:
    named = dict(made.named_parameters())
    if frozen := [name for name, parameter in named.items() if not parameter.requires_grad]:
        want, fix = "parameters that are trained", "register_buffer for what is not, filled by fill_buffers"
        yield Problem(frozen[0], "requires_grad = False", want, fix)
    if cast := [name for name, parameter in named.items() if parameter.dtype != torch.float32]:
        want = "torch.float32, in which weights are updated; a step computes in training.mixed_precision_param"
        yield Problem(cast[0], str(named[cast[0]].dtype), want, "leave the dtype of parameters as it is")


def _hidden(made: nn.Module) -> Iterator[Problem]:
    """Tensors and modules where torch does not look for them."""
    registered, stays = set(made.modules()), "all others stay on the meta device"
    for name, module in made.named_modules():
        for key, value in vars(module).items():
            if key in _OF_EVERY_MODULE:
                continue
            leaves, where = pytree.tree_leaves(value), f"{name}.{key}".lstrip(".")
            if any(isinstance(x, Tensor) and x.is_meta for x in leaves):
                fix = f'register_buffer("{key}", …, persistent=False), filled by fill_buffers; or a layer'
                yield Problem(where, "a tensor that is no buffer", f"weights in layers, and buffers: {stays}", fix)
            unknown = [x for x in leaves if isinstance(x, nn.Module) and x not in registered]
            if any([*x.parameters(), *x.buffers()] for x in unknown):
                want, fix = f"modules in attributes or nn.ModuleList: {stays}", f"self.{key} = nn.ModuleList(…)"
                yield Problem(where, f"{type(unknown[0]).__name__} that torch does not find", want, fix)
