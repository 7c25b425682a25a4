"""Tell whether the state of a checkpoint's optimizer is that of a run's, without torch.

It is if each parameter has the same rule with state of the same dtype, and rules of the user's own file keep the same
tensors. Settings of a rule, as its learning rate or momentum, may change.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titanlite.checkpoint.saved_state import SavedState
from titanlite.config.build import show
from titanlite.config.parameter_groups import one_of_all_blocks
from titanlite.config.recipe_schema import OwnRule
from titanlite.config.schema import Optimizer
from titanlite.errors import CheckpointError, Problem, describe

PREFIX = "optimizer/"
"""The names of its tensors begin so."""


def optimizer_identity(config: Optimizer, rules: Mapping[str, str], own: Mapping[str, OwnRule]) -> dict[str, Any]:
    """Return `SavedState.optimizer`, from the rule of each parameter and the rules of the user's own file."""
    used = {*rules.values()}
    state = {name: list(rule.state) for name, rule in own.items() if name in used}
    return {"rules": dict(rules), "state_dtype": config.state_dtype, "state": state}


def leaves_state(
    folder: Path,
    state: SavedState,
    config: Optimizer,
    rules: Mapping[str, str],
    own: Mapping[str, OwnRule],
) -> bool:
    """Return whether a start leaves the optimizer's state in the checkpoint, and begins with a fresh one.

    The rules of a run's parameters are empty where they are not known.

    Raises:
        CheckpointError: it is of another optimizer, and `optimizer.fresh_state` is off.
    """
    if not (problems := _unlike(state, config, rules, own)):
        return False
    if config.fresh_state:
        return True
    raise CheckpointError(describe(str(folder), problems))


def afresh(folder: Path) -> str:
    """Return the notice that the state in a checkpoint is not used."""
    return f"the optimizer's state starts afresh: that of {folder.name} is of another optimizer"


def changed_file(state: SavedState, own: Mapping[str, OwnRule], step: int) -> list[str]:
    """Return a notice if the user's file of rules is another than at this step's checkpoint."""
    now = next((rule.sha256 for rule in own.values()), None)
    same = state.optimizer_file in (None, now)
    return [] if same else [f"changed: optimizer.file is not the one of step {step}: rules may update otherwise"]


def taken_by_branch(is_fresh: bool) -> str:
    """Return what a run takes from another run's checkpoint, in words."""
    return "weights and place in the data" if is_fresh else "weights, optimizer and place in the data"


def _unlike(
    state: SavedState, config: Optimizer, rules: Mapping[str, str], own: Mapping[str, OwnRule]
) -> list[Problem]:
    saved, problems = state.optimizer, list[Problem]()
    before: Mapping[str, str] = saved.get("rules", {})
    changed: dict[str, list[str]] = {}
    for name, rule in rules.items():  # another name is another model's, which has a message of its own
        if (was := before.get(name, rule)) != rule:
            changed.setdefault(was, []).append(name)
    if changed:
        want = "; ".join(f"{show(was)} for {_first_four(one_of_all_blocks(names))}" for was, names in changed.items())
        want = f"the rules by which the checkpoint's parameters were updated: {want}"
        problems.append(_of_another("recipe", show(config.recipe), want))
    if (was := saved.get("state_dtype", config.state_dtype)) != config.state_dtype:
        want = f"{show(was)}, as the checkpoint has it"
        problems.append(_of_another("state_dtype", show(config.state_dtype), want))
    for name, kept in saved.get("state", {}).items():
        if name in own and {*kept} != {*own[name].state}:
            saw = f"class {name} with state {_listed(own[name].state)}"
            problems.append(_of_another("file", saw, f"{_listed(kept)}, which the checkpoint has of this rule"))
    return problems


def _of_another(key: str, saw: str, want: str) -> Problem:
    fix = "the old one; or optimizer.fresh_state = true: weights and data go on, the optimizer's state starts afresh"
    return Problem(f"optimizer.{key}", saw, want, fix)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"


def _first_four(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
