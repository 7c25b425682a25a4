"""Import the update rules of a user's own file, and try each on a few numbers before a run trains with it."""

import inspect
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titanlite.config.recipe_schema import OwnRule, Value
from titanlite.errors import ConfigError, Problem, describe
from titanlite.models.find import imported
from titanlite.models.mistakes import mistake, of_function
from titanlite.update_rules.elementwise import ElementwiseRule

_N = 96  # numbers that a rule is tried on, as a whole and in pieces
_PIECES = (1, 40, 55)
_ROUNDING = 1e-4  # of what a piece gives and the whole: kernels may round otherwise at the end of a vector
_UPDATE = "def update(self, gradient, parameter, state, updates)"


def own_rule(rule: OwnRule, keys: Mapping[str, Value]) -> ElementwiseRule:
    """Make a rule of the user's own with the keys of a group.

    Args:
        rule: as the file describes it.
        keys: that a group gives.

    Raises:
        ConfigError: the file cannot be imported; the class is not the one it describes, cannot be made, or has no
            method `update` that takes what one is given.
    """
    file = os.path.abspath(rule.file)
    try:
        kind = getattr(imported(file), rule.name, None)
    except (Exception, SystemExit) as error:
        want, fix = "a Python file that can be imported", f"run `python {rule.file}` until it has nothing to say"
        raise _refusal(rule, mistake(error, file, want, fix)) from error
    if not (inspect.isclass(kind) and issubclass(kind, ElementwiseRule)):
        want = "a class that derives from titanlite.update_rules.elementwise.ElementwiseRule"
        raise _refusal(
            rule, Problem(f"class {rule.name}", repr(kind), want, "import that, and derive from it", rule.line)
        )
    if tuple(kind.state) != rule.state:
        want = f"state as the class says it: {rule.state}, from which its memory follows"
        fix = "state = (…) in the class, and nothing else that sets it"
        raise _refusal(rule, Problem(f"{rule.name}.state", str(kind.state), want, fix, rule.line))
    method, want = kind.update, f"{_UPDATE} -> Tensor"
    try:
        inspect.signature(method).bind(*["self", "gradient", "parameter", "state", "updates"])
    except TypeError as error:
        saw = f"update{inspect.signature(method)}: {error}"
        raise _refusal(rule, of_function(method, file, saw, want, f"write {_UPDATE}")) from error
    try:
        made = kind()
    except Exception as error:
        fix = f"{_UPDATE} in the class, and no __init__"
        if kind.__abstractmethods__:
            raise _refusal(rule, Problem(f"class {rule.name}", "no method update", want, fix, rule.line)) from error
        want = f"{rule.name}() to make the rule: what a group says is in its attributes when update is called"
        raise _refusal(rule, mistake(error, file, want, fix, kind.__init__)) from error
    vars(made).update({**rule.keys, **keys})
    return made


def try_rules(rules: Iterable[tuple[OwnRule, Mapping[str, Value]]]) -> None:
    """Refuse rules that cannot be carried out on shards, or not on all that may come.

    Args:
        rules: each with the keys of a group.

    Raises:
        ConfigError: as `own_rule` says; or an update raises, returns something else than one number for each, changes
            the parameter or the shape of the state, is not finite, or depends on other numbers of the parameter.
    """
    for rule, keys in rules:
        _Trial(rule, own_rule(rule, keys)).run()


def bytes_of_update(rule: OwnRule) -> int:
    """Count the bytes that an update itself reads and writes for each number, operation by operation.

    Args:
        rule: of the user's own file; it has the defaults of its keys.
    """
    made = own_rule(rule, {})
    gradient, parameter, *kept = torch.empty(2 + len(rule.state), _N, device="meta").unbind()
    state = dict(zip(rule.state, kept, strict=True))
    with torch.no_grad(), _Moved() as moved:
        made.update(gradient, parameter, state, torch.empty((), device="meta"))
    return moved.total // _N


class _Moved(TorchDispatchMode):
    """Adds up the bytes of what operations take and return, but for views."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [t for t in tree_leaves((args, kwargs, returned)) if isinstance(t, Tensor)]
            self.total += sum(t.numel() * t.itemsize for t in tensors)
        return returned


class _Trial:
    """A rule, updating a few numbers."""

    def __init__(self, rule: OwnRule, made: ElementwiseRule) -> None:
        self.rule, self.made, self.file = rule, made, os.path.abspath(rule.file)

    def run(self) -> None:
        """Hold what the rule does with parts of some numbers against what it does with all of them."""
        self._after_two_steps(torch.device("meta"), (_N,))
        whole, parts = (self._after_two_steps(torch.device("cpu"), sizes) for sizes in ((_N,), _PIECES))
        for name, truth in whole.items():
            if not truth.isfinite().all():
                want = "finite numbers, also where gradients, state and parameters are zero"
                raise self._refused(f"{name} with NaN or Inf", want, "add a small number to a divisor")
            if ((truth - parts[name]).abs() > _ROUNDING * (truth.abs() + truth.abs().mean())).any():
                saw = f"another {name} where a rank has fewer numbers of the parameter"
                want = "each number from those of its own place alone: a rank has a part of a parameter, anywhere in it"
                raise self._refused(saw, want, "operations that go number by number: no norm, mean or random number")

    def _after_two_steps(self, device: torch.device, sizes: tuple[int, ...]) -> dict[str, Tensor]:
        """Update some numbers twice, in pieces of the given sizes; return the directions and the state of all."""
        found = dict[str, list[Tensor]]()
        parameters, *gradients = torch.randn(3, _N, generator=torch.Generator().manual_seed(0))
        for tensor in (parameters, *gradients):
            tensor[::7] = 0.0  # as those of a token that no text has had
        kept = [{name: torch.zeros(n, device=device) for name in self.rule.state} for n in sizes]
        for step, gradient in enumerate(gradients, start=1):
            updates = torch.tensor(float(step), device=device)
            for state, p, g in zip(kept, parameters.split(sizes), gradient.split(sizes), strict=True):
                parameter = p.to(device, copy=True)
                direction = self._update(g.to(device, copy=True), parameter, state, updates)
                found.setdefault("direction", []).append(direction)
                if device.type != "meta" and not torch.equal(parameter, p):
                    want = "the parameter left as it is: the optimizer moves it against what update returns"
                    raise self._refused("a change of the parameter", want, "return the direction alone")
        found |= {f"state {name}": [state[name] for state in kept] for name in self.rule.state}
        return {name: torch.cat(parts) for name, parts in found.items()}

    @torch.no_grad()
    def _update(self, gradient: Tensor, parameter: Tensor, state: dict[str, Tensor], updates: Tensor) -> Tensor:
        """Call `update`, and refuse results that are not of the gradient's shape, or other state than was said."""
        declared, shape = self.rule.state, gradient.shape
        try:
            direction = self.made.update(gradient, parameter, state, updates)
        except Exception as error:
            want = "an update of a few numbers on any device, as titanlite has tried it: of tensors without values, too"
            fix = "change that line; decide by torch.where, and make tensors by torch.zeros_like and the like"
            problem = mistake(error, self.file, want, fix, type(self.made).update)
            raise ConfigError(describe(self.rule.file, [problem])) from error
        if extra := [name for name in state if name not in declared]:
            want = f"only what the class says that it keeps: {', '.join(declared) or 'nothing'}"
            names = ", ".join(f'"{name}"' for name in (*declared, *extra))
            raise self._refused(f"state {', '.join(extra)}", want, f"state = ({names},) in the class")
        if lost := [name for name in declared if name not in state]:
            want = "the state that the class says, after each update"
            raise self._refused(f"no state {', '.join(lost)}", want, "take nothing out of state")
        for name, tensor in {"direction": direction, **{f"state {name}": state[name] for name in declared}}.items():
            seen = f"{list(tensor.shape)} {tensor.dtype}" if isinstance(tensor, Tensor) else type(tensor).__name__
            if seen != f"{list(shape)} {torch.float32}":
                want = f"float32 of the gradient's shape, {list(shape)} here: a number for each"
                raise self._refused(f"{name}: {seen}", want, "return one number for each, and keep one for each")
        return direction

    def _refused(self, saw: str, want: str, fix: str) -> ConfigError:
        return _refusal(self.rule, of_function(type(self.made).update, self.file, saw, want, fix))


def _refusal(rule: OwnRule, problem: Problem) -> ConfigError:
    return ConfigError(describe(rule.file, [problem]))
