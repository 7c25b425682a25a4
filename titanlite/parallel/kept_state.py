"""Find checkpointed blocks of a user's model that write buffers or attributes in forward.

With a save-list, backward computes a block's forward again. If forward writes a buffer or counts its calls, the second
forward begins with other values, and gradients are silently wrong. So a run checks after its first step whether a
checkpointed block has written a buffer, by the version that torch counts for each tensor, or a number.
"""

from collections.abc import Sequence

from torch import nn

from titanlite.errors import Problem, RecipeError, describe
from titanlite.models.experts import MixtureOfExperts

_OF_EVERY_MODULE = set(vars(nn.Module()))
_OF_A_MIXTURE = ("bias", "share", "counts", "sums")
"""Buffers that may change: the trainer writes `bias` and `share` between forwards, and `counts` and `sums` are not
written again when forward is recomputed."""


def state_of(model: nn.Module, blocks: Sequence[int]) -> dict[str, object]:
    """Return by name, for some blocks, each buffer's identity and version, and each number that is an attribute."""
    state: dict[str, object] = {}
    for n in blocks:
        for name, module in model.layers[n].named_modules(prefix=f"layers.{n}"):  # type: ignore[index]
            left_out = _OF_A_MIXTURE if isinstance(module, MixtureOfExperts) else ()
            buffers = {own: x for own, x in module.named_buffers(recurse=False) if own not in left_out}
            state |= {f"{name}.{own}": (id(x), x._version) for own, x in buffers.items()}
            held = [vars(kind) for kind in reversed(type(module).__mro__)] + [vars(module)]  # numbers of classes, too
            numbers = {own: value for each in held for own, value in each.items() if isinstance(value, int | float)}
            state |= {f"{name}.{own}": value for own, value in numbers.items() if own not in _OF_EVERY_MODULE}
    return state


def written(before: dict[str, object], after: dict[str, object], file: str) -> RecipeError | None:
    """Return the error if a checkpointed block changed a buffer or attribute in forward, else None.

    `before`, `after`: results of `state_of` before and after a step. `file`: the model's file.
    """
    changed = [name for name, value in before.items() if after.get(name) != value]
    if not changed:
        return None
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    want = "only read there: the save-list computes this forward again in backward, and would write it twice"
    fix = 'write it in the model\'s forward, outside its blocks; or activation_checkpoint.recipe = "none"'
    return RecipeError(describe(file, [Problem(f"{changed[0]}{more}", "written in forward of a block", want, fix)]))
