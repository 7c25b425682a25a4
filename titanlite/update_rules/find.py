"""Import the update rules of a user's file, and try each on a few elements before a run trains with it."""

import hashlib
import inspect
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titanlite.config.build import show
from titanlite.config.problems import Origin, Problems
from titanlite.config.recipe_schema import COMMON_KEYS, FROZEN, GROUP_OF_RULE, OwnRule, ParameterGroup, Value
from titanlite.errors import ConfigError, Problem, describe
from titanlite.models.find import imported
from titanlite.models.mistakes import line_of, of_function, refused
from titanlite.update_rules.elementwise import ElementwiseRule

_N = 96  # elements on which a rule is tried, all at once and in pieces
_PIECES = (1, 40, 55)
_ROUNDING = 1e-4  # relative difference of pieces that is allowed: kernels may round the end of a vector differently


def rules_of_file(file: str, origin: Origin) -> dict[str, OwnRule]:
    """Import `optimizer.file`, which must exist, and return its rules by class name.

    Raises:
        ConfigError: the file cannot be imported or has no rule; the name of a rule, of its state or of a key is already
            in use; or the default of a key has the wrong type, or is not finite.
    """
    module, sha256 = imported(file, "optimizer.file"), hashlib.sha256(Path(file).read_bytes()).hexdigest()
    kinds = [each for each in vars(module).values() if inspect.isclass(each) and issubclass(each, ElementwiseRule)]
    found = dict[str, OwnRule]()
    for kind in (kind for kind in kinds if kind.__module__ == module.__name__):
        defaults = {key: _default_of_key(kind, key, of) for key, of in _keys(kind).items()}
        keys = {key: value for key, value in defaults.items() if value is not None}
        found[kind.__name__] = OwnRule(kind.__name__, file, sha256, kind.state, keys, kind)
    if wrong := [p._replace(line=line_of(rule.kind, file)) for rule in found.values() for p in _mistakes(rule)]:
        raise ConfigError(describe(file, wrong))
    if not found:
        problems, want = Problems(origin), f"a class that derives from {ElementwiseRule.__name__}"
        fix = f"class Mine({ElementwiseRule.__name__}), as in docs/how_to/own_optimizer.md"
        problems.add("optimizer.file", f"{show(file)}, with no rule", want, fix)
        problems.raise_all()
    return found


def _keys(kind: type[ElementwiseRule]) -> dict[str, type[Value]]:
    """Return the keys that a rule adds to its groups: its public attributes annotated with a type of TOML."""
    types: dict[object, type[Value]] = {of: of for of in (float, int, bool, str)}
    types |= {of.__name__: of for of in types.values()}  # for `from __future__ import annotations`
    said = {name: hint for each in reversed(kind.__mro__) for name, hint in inspect.get_annotations(each).items()}
    return {name: types[hint] for name, hint in said.items() if hint in types and name[0] != "_"}


def _default_of_key(kind: type[ElementwiseRule], name: str, of: type[Value]) -> Value | None:
    """Return the default of a key of type `of`; None if it has another type or is not finite. Ints become floats."""
    value = getattr(kind, name, None)
    if of is float and isinstance(value, (float, int)) and not isinstance(value, bool):
        with suppress(OverflowError):  # an int may be too large for a float
            return float(value) if math.isfinite(value) else None
    return value if type(value) is of is not float else None


def _mistakes(rule: OwnRule) -> Iterator[Problem]:
    """Yield a problem for each name that is already in use, and for each default of the wrong type or not finite."""
    for key, of in _keys(rule.kind).items():
        if key not in rule.keys:
            want = f"a default that is {'a finite number' if of is float else f'of type {of.__name__}'}"
            fix = f"correct it, or call it _{key} if no group is to say it"
            yield Problem(f"{rule.name}.{key}", repr(getattr(rule.kind, key, None)), want, fix)
    if rule.name in (*GROUP_OF_RULE, FROZEN):
        want = f"a name of its own; titanlite has a rule {show(rule.name)}"
        yield Problem(f"class {rule.name}", "", want, "rename the class")
    for key in rule.keys.keys() & {*COMMON_KEYS, *dir(ParameterGroup)}:
        want = f"another name: {key} is {'a key' if key in COMMON_KEYS else 'an attribute'} of every group"
        yield Problem(f"{rule.name}.{key}", show(rule.keys[key]), want, "rename it")
    state: object = rule.state
    is_words = isinstance(state, tuple) and all(isinstance(name, str) and name.isidentifier() for name in rule.state)
    if not is_words or len({*rule.state, "updates"}) <= len(rule.state):
        want, fix = (
            'a tuple of words, each once; "updates" is taken',
            'state = ("momentum",); without state, leave it out',
        )
        yield Problem(f"{rule.name}.state", repr(state), want, fix)


def own_rule(rule: OwnRule, keys: Mapping[str, Value]) -> ElementwiseRule:
    """Make an object of a user's rule with a group's keys. Raise ConfigError if that fails or it has no `update`."""
    want = f"{rule.name}() to make the rule: what a group says is in its attributes when update is called"
    with refused(rule.file, want, "write update in the class, and no __init__", rule.kind):
        made: ElementwiseRule = rule.kind()
    vars(made).update({**rule.keys, **keys})
    return made


def try_rules(rules: Iterable[tuple[OwnRule, Mapping[str, Value]]]) -> None:
    """Try two updates of each rule, with the keys of a group, on a few elements.

    Raises:
        ConfigError: as in `own_rule`; or an update raises, changes the parameter, returns or keeps a tensor that is not
            [n] float32 or not finite, or depends on other elements of the parameter.
    """
    for rule, keys in rules:
        made = own_rule(rule, keys)
        _after_two_steps(rule, made, "meta", (_N,))
        whole, parts = (_after_two_steps(rule, made, "cpu", sizes) for sizes in ((_N,), _PIECES))
        for name, truth in whole.items():
            if not truth.isfinite().all():
                want = "finite numbers, also where gradients, state and parameters are zero"
                raise _refusal(rule, f"{name} with NaN or Inf", want, "add a small number to a divisor")
            if ((truth - parts[name]).abs() > _ROUNDING * (truth.abs() + truth.abs().mean())).any():
                saw = f"another {name} where a rank has fewer numbers of the parameter"
                want = "each number from those of its own place alone: a rank has a part of a parameter, anywhere in it"
                fix = "operations that go number by number: no norm, mean or random number"
                raise _refusal(rule, saw, want, fix)


def _after_two_steps(rule: OwnRule, made: ElementwiseRule, device: str, sizes: tuple[int, ...]) -> dict[str, Tensor]:
    """Update `_N` elements twice, in pieces of these sizes. Return directions and final state, concatenated."""
    found = dict[str, list[Tensor]]()
    parameters, *gradients = torch.randn(3, _N, generator=torch.Generator().manual_seed(0))
    for tensor in (parameters, *gradients):
        tensor[::7] = 0.0  # as for tokens that do not occur in a batch
    kept = [{name: torch.zeros(n, device=device) for name in rule.state} for n in sizes]
    called = f"{rule.name}.update(gradient, parameter, state, updates)"
    for step, gradient in enumerate(gradients, start=1):
        updates = torch.tensor(float(step), device=device)
        for state, p, g in zip(kept, parameters.split(sizes), gradient.split(sizes), strict=True):
            parameter = p.to(device, copy=True)
            want = f"{called} to run on a few numbers on any device, also on tensors without values"
            fix = "change that line; decide by torch.where, and make tensors by torch.zeros_like and the like"
            with torch.no_grad(), refused(rule.file, want, fix, rule.kind.update):
                direction = made.update(g.to(device, copy=True), parameter, state, updates)
            _require_a_number_for_each(rule, len(p), direction, state)
            if device != "meta" and not torch.equal(parameter, p):
                want = "the parameter left as it is: the optimizer moves it against what update returns"
                raise _refusal(rule, "a change of the parameter", want, "return the direction alone")
            found.setdefault("direction", []).append(direction)
    found |= {f"state {name}": [state[name] for state in kept] for name in rule.state}
    return {name: torch.cat(parts) for name, parts in found.items()}


def _require_a_number_for_each(rule: OwnRule, n: int, direction: object, state: Mapping[str, object]) -> None:
    """Refuse a direction or state that is not [n] float32, and state that the class does not declare."""

    def seen(x: object) -> str:
        return f"{list(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__

    given = {"direction": seen(direction)} | {f"state {name}": seen(x) for name, x in state.items()}
    wanted = dict.fromkeys(("direction", *(f"state {name}" for name in rule.state)), f"[{n}] torch.float32")
    if given != wanted:
        saw, want = (", ".join(f"{name} {what}" for name, what in each.items()) for each in (given, wanted))
        fix = "return one number for each; what is kept is what `state` of the class names"
        raise _refusal(rule, saw, f"{want}: a number for each of the gradient's", fix)


def _refusal(rule: OwnRule, saw: str, want: str, fix: str) -> ConfigError:
    return ConfigError(describe(rule.file, [of_function(rule.kind.update, rule.file, saw, want, fix)]))


def bytes_of_update(rule: OwnRule) -> int:
    """Return the bytes per element that the operations of an update read and write, with the defaults of its keys."""
    made = own_rule(rule, {})
    gradient, parameter, *kept = torch.empty(2 + len(rule.state), _N, device="meta").unbind()
    state = dict(zip(rule.state, kept, strict=True))
    with torch.no_grad(), _Moved() as moved:
        made.update(gradient, parameter, state, torch.empty((), device="meta"))
    return moved.total // _N


class _Moved(TorchDispatchMode):
    """Adds up the bytes of the arguments and results of all operations, except views."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [t for t in tree_leaves((args, kwargs, returned)) if isinstance(t, Tensor)]
            self.total += sum(t.numel() * t.itemsize for t in tensors)
        return returned
