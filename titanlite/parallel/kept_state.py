"""Find checkpointed blocks of a user's model that write buffers or attributes in forward.

A save-list computes a block's forward again in backward. If that forward writes a buffer or counts its calls, it begins
from other values then, and gradients are silently wrong. So a run checks after its first step whether a checkpointed
block has written something, by the version that torch counts for each tensor, compiled or not.
"""

from collections.abc import Sequence

from torch import nn

from titanlite.errors import Problem, RecipeError, describe
from titanlite.models.experts import MixtureOfExperts

_OF_EVERY_MODULE = set(vars(nn.Module()))
_OF_A_MIXTURE = ("bias", "share", "counts", "sums")
"""The trainer writes `bias` and `share` between forwards; recomputation does not repeat counts and sums."""


def state_of(model: nn.Module, blocks: Sequence[int]) -> dict[str, object]:
    """Return name → a buffer's identity and version, or the value of a number that is an attribute, of some blocks."""
    state: dict[str, object] = {}
    for n in blocks:
        for name, module in model.layers[n].named_modules(prefix=f"layers.{n}"):  # type: ignore[index]
            left_out = _OF_A_MIXTURE if isinstance(module, MixtureOfExperts) else ()
            buffers = {own: x for own, x in module.named_buffers(recurse=False) if own not in left_out}
            state |= {f"{name}.{own}": (id(x), x._version) for own, x in buffers.items()}
            held = [vars(kind) for kind in reversed(type(module).__mro__)] + [vars(module)]  # a class may count
            numbers = {own: value for each in held for own, value in each.items() if isinstance(value, int | float)}
            state |= {f"{name}.{own}": value for own, value in numbers.items() if own not in _OF_EVERY_MODULE}
    return state


def written(before: dict[str, object], after: dict[str, object], file: str) -> RecipeError | None:
    """Return the error if a checkpointed block changed a buffer or attribute in forward, else None.

    `before` and `after` are `state_of` around a step, `file` is the model's.
    """
    changed = [name for name, value in before.items() if after.get(name) != value]
    if not changed:
        return None
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    want = "only read there: the save-list computes this forward again in backward, and would write it twice"
    fix = 'write it in the model\'s forward, outside its blocks; or activation_checkpoint.recipe = "none"'
    return RecipeError(describe(file, [Problem(f"{changed[0]}{more}", "written in forward of a block", want, fix)]))
