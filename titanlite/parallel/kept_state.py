"""Find what blocks of a model file of one's own keep for their next call, in buffers and in numbers of theirs.

A save-list computes the forward of a block again in backward. Where that forward writes a buffer or counts its calls,
it begins from other values then, and leaves others: gradients are those of another function, in silence. So a run
looks after its first step whether a block under checkpointing has written something, by the version that torch counts
for each tensor, compiled or not.
"""

from collections.abc import Sequence

from torch import nn

from titanlite.errors import Problem, RecipeError, describe
from titanlite.models.experts import MixtureOfExperts

_OF_EVERY_MODULE = set(vars(nn.Module()))
_OF_A_MIXTURE = ("bias", "share", "counts", "sums")
"""The trainer writes two of them between forwards, and the counts are not repeated by recomputation."""


def state_of(model: nn.Module, blocks: Sequence[int]) -> dict[str, object]:
    """Everything that tells whether a block has kept something.

    Args:
        model: has `layers`; its buffers are filled.
        blocks: numbers of those to look at.

    Returns:
        Name → a buffer's identity and version, or the value of a number that is an attribute.
    """
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
    """The error for what blocks have written in their forward, if they have.

    Args:
        before: of `state_of`, in front of a step.
        after: of it, behind the step.
        file: the model's, for the message.
    """
    changed = [name for name, value in before.items() if after.get(name) != value]
    if not changed:
        return None
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    want = "only read there: the save-list computes this forward again in backward, and would write it twice"
    fix = 'write it in the model\'s forward, outside its blocks; or activation_checkpoint.recipe = "none"'
    return RecipeError(describe(file, [Problem(f"{changed[0]}{more}", "written in forward of a block", want, fix)]))
