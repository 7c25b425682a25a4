"""Decide whether a run can continue with the optimizer state of a checkpoint. Does not import torch.

It can if each parameter has the same rule with state of the same dtype, and the rules of the user's own file keep the
same tensors. Settings of a rule, such as its learning rate or momentum, may change.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titanlite.checkpoint.saved_state import SavedState
from titanlite.config.build import show
from titanlite.config.parameter_groups import some_of
from titanlite.config.recipe_schema import OwnRule
from titanlite.config.schema import Optimizer
from titanlite.errors import CheckpointError, Problem, describe

PREFIX = "optimizer/"
"""Prefix of the names of the optimizer's tensors in a checkpoint."""


def optimizer_identity(config: Optimizer, rules: Mapping[str, str], own: Mapping[str, OwnRule]) -> dict[str, Any]:
    """Return `SavedState.optimizer`. `rules`: the rule of each parameter. `own`: the rules of the user's own file."""
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
    """Return whether a run starts with fresh optimizer state instead of the checkpoint's.

    `rules` is empty if the rules of the run's parameters are not known.

    Raises:
        CheckpointError: the saved state is of another optimizer, and `optimizer.fresh_state` is off.
    """
    if not (problems := _unlike(state, config, rules, own)):
        return False
    if config.fresh_state:
        return True
    raise CheckpointError(describe(str(folder), problems))


def afresh(folder: Path) -> str:
    """Return the notice that the optimizer state in the checkpoint `folder` is not used."""
    return f"the optimizer's state starts afresh: that of {folder.name} is of another optimizer"


def changed_file(state: SavedState, own: Mapping[str, OwnRule], step: int) -> list[str]:
    """Return a notice if the user's file of rules differs from the one at the checkpoint of `step`."""
    now = next((rule.sha256 for rule in own.values()), None)
    same = state.optimizer_file in (None, now)
    return [] if same else [f"changed: optimizer.file is not the one of step {step}: rules may update otherwise"]


def taken_by_branch(is_fresh: bool) -> str:
    """Describe what a run loads from another run's checkpoint. `is_fresh`: its optimizer's state starts afresh."""
    return "weights and place in the data" if is_fresh else "weights, optimizer and place in the data"


def _unlike(
    state: SavedState, config: Optimizer, rules: Mapping[str, str], own: Mapping[str, OwnRule]
) -> list[Problem]:
    saved, problems = state.optimizer, list[Problem]()
    before: Mapping[str, str] = saved.get("rules", {})
    changed: dict[str, list[str]] = {}
    for name, rule in rules.items():  # a parameter that is not in the checkpoint is reported elsewhere
        if (was := before.get(name, rule)) != rule:
            changed.setdefault(was, []).append(name)
    if changed:
        want = "; ".join(f"{show(was)} for {some_of(names)}" for was, names in changed.items())
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
