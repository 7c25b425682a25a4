"""Tell whether the state of a checkpoint's optimizer is that of a run's, without torch.

It is if each parameter has the rule that it had, and state of the same dtype. What a rule is given, as its learning
rate or momentum, may change.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanlite.config.build import show
from titanlite.config.parameter_groups import one_of_all_blocks
from titanlite.config.schema import Optimizer
from titanlite.errors import CheckpointError, Problem, describe

PREFIX = "optimizer/"
"""The names of its tensors begin so."""
_FIRST = "adamw"  # the only rule of versions whose checkpoints do not say them


def optimizer_identity(config: Optimizer, rules: Mapping[str, str]) -> dict[str, Any]:
    """Return what a checkpoint says of its optimizer, as JSON.

    Args:
        config: `[optimizer]`.
        rules: of each parameter.
    """
    return {"optimizer": {"rules": dict(rules), "state_dtype": config.state_dtype}}


def leaves_state(folder: Path, state: Mapping[str, Any], config: Optimizer, rules: Mapping[str, str]) -> bool:
    """Decide whether a start leaves the optimizer's state in the checkpoint, and begins with a fresh one.

    Args:
        folder: the checkpoint, or where there is one.
        state: what it says beside the tensors.
        config: `[optimizer]` of the run.
        rules: of each of its parameters.

    Raises:
        CheckpointError: it is of another optimizer, and `optimizer.fresh_state` is off.
    """
    if not (problems := _unlike(state, config, rules)):
        return False
    if config.fresh_state:
        return True
    raise CheckpointError(describe(str(folder), problems))


def afresh(folder: Path) -> str:
    """Say that the state in a checkpoint is left there."""
    return f"the optimizer's state starts afresh: that of {folder.name} is of another optimizer"


def _unlike(state: Mapping[str, Any], config: Optimizer, rules: Mapping[str, str]) -> list[Problem]:
    saved, problems = state.get("optimizer", {}), list[Problem]()
    before = saved.get("rules") or dict.fromkeys(rules, _FIRST)
    changed: dict[str, list[str]] = {}
    for name, rule in rules.items():  # another name is another model's, which has a message of its own
        if (was := before.get(name, rule)) != rule:
            changed.setdefault(was, []).append(name)
    if changed:
        want = "; ".join(f"{show(was)} for {_first_four(one_of_all_blocks(names))}" for was, names in changed.items())
        want = f"the rules by which the checkpoint's parameters were updated: {want}"
        problems.append(_of_another("recipe", config.recipe, want))
    if (was := saved.get("state_dtype", config.state_dtype)) != config.state_dtype:
        problems.append(_of_another("state_dtype", config.state_dtype, f"{show(was)}, as the checkpoint has it"))
    return problems


def _of_another(key: str, saw: str, want: str) -> Problem:
    fix = "the old one; or optimizer.fresh_state = true: weights and data go on, the optimizer's state starts afresh"
    return Problem(f"optimizer.{key}", show(saw), want, fix)


def _first_four(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
