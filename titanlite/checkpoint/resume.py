"""Decide which step a run goes on from, and whether it is the same run; no torch here.

The step is decided by the names of folders alone. `train.py` asks before it imports torch, so that a step that is not
there is refused in a second; `Checkpoints.choose` asks again for all ranks. `titanlite validate` also looks into the
checkpoint, as far as that takes no time. The rules are chosen so that no work is lost in silence:

- `auto` takes the newest complete checkpoint, a step number exactly that one, `never` demands that there is none;
- resuming behind newer checkpoints is refused, for a later `auto` would take the abandoned branch;
- a folder that is only part of a checkpoint stops the run, it is not skipped.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, cast

from titanlite.checkpoint import publish
from titanlite.checkpoint.branch import branch_point
from titanlite.checkpoint.saved_state import SavedState
from titanlite.config.build import from_table, show
from titanlite.config.check import last_step
from titanlite.config.problems import Origin, Problems
from titanlite.config.recipe_schema import ModelDims
from titanlite.config.schema import Config
from titanlite.config.stages import SOLE, longest_seq_len
from titanlite.errors import CheckpointError, ConfigError, Problem, describe

MODEL, AVERAGE = "model/", "ema/"
"""Beginnings of the names of the tensors of a model, and of an average of its weights."""


def nothing_to_do(config: Config, done: int) -> str | None:
    """Return a notice if a run that has done so many steps takes no more."""
    last = last_step(config)
    if done < last:
        return None
    key = "training.steps" if last == config.training.steps else "job.stop_after"
    return f"nothing to do: the run ends at step {last} ({key}), and step {done} is already done"


def step_to_resume(root: Path, resume: Literal["auto", "never"] | int) -> int | None:
    """Return the step to load, or None for a fresh start; nothing is touched.

    Raises:
        CheckpointError: the named step is not there, newer ones exist, there are some in spite of `never`, or a folder
            is only part of a checkpoint.
    """
    steps = publish.complete_steps(root)
    if parts := publish.partial_folders(root):
        want = f"complete checkpoints only: one without {publish.MANIFEST} was copied in part or tampered with"
        fix = "copy it again, or move it away"
        raise CheckpointError(describe(str(root), [Problem(p, "incomplete", want, fix) for p in parts]))
    if resume == "auto":
        return steps[-1] if steps else None
    if resume == "never":
        if steps:
            fix = 'choose another job.name, or set checkpoint.resume = "auto"'
            raise _resume_refused(root, f'"never", and there are {_list(steps)}', "a folder without checkpoints", fix)
        return None
    if resume not in steps:
        want = f"one of {_list(steps)}" if steps else f"a complete checkpoint in {root}; there is none"
        raise _resume_refused(root, str(resume), want, 'name one that is there, or set checkpoint.resume = "auto"')
    if newer := [step for step in steps if step > resume]:
        want = f"the newest, {newer[-1]}: a later start would take up the abandoned branch ({_list(newer)}) again"
        fix = (
            f"move the newer ones away or delete them; or choose another job.name and copy "
            f"{publish.step_folder(root, resume).name} into its checkpoints folder"
        )
        raise _resume_refused(root, str(resume), want, fix)
    return resume


def start_of(root: Path, config: Config) -> tuple[Path, int] | None:
    """Return (folder of checkpoints, step) that a start goes on from, of the run or of another; None if there is none.

    Raises:
        CheckpointError: as `step_to_resume` and `branch_point` say.
    """
    step = step_to_resume(root, config.checkpoint.resume) if config.checkpoint.enable else None
    return branch_point(config.checkpoint.initial_load_path, root.parent) if step is None else (root, step)


def dims_of(folder: Path, state: SavedState) -> ModelDims:
    """Return the dimensions that a checkpoint was saved with; the recipe may have changed since."""
    given = {key: value for key, value in state.model.items() if value is not None}
    problems = Problems(Origin(str(folder)))
    dims = from_table(ModelDims, {"help": "", **given}, problems)
    problems.raise_all()
    return cast(ModelDims, dims)


def other_text(
    folder: Path,
    state: SavedState,
    corpora: Mapping[str, str],
    tokenizer: str,
    strict: bool,
    inputs: Mapping[str, str] | None = None,
) -> str | None:
    """Return a warning if a run goes on with other text than it was saved with, or with ids of another tokenizer.

    A fingerprint is "" where it is not known; there the hashes of a source's files, `inputs`, are compared.

    Raises:
        CheckpointError: with `strict`, if the tokenizer is another: what ids mean is part of what the weights know.
    """
    made_by, before = state.tokenizer or tokenizer, state.corpora
    if tokenizer and made_by != tokenizer:
        where = "data.tokenizer"
        if strict:
            saw, want = f"one of fingerprint {tokenizer}", f"the one that the weights know, of fingerprint {made_by}"
            fix = "restore its file and data.add_bos_token, or use another job.name; job.strict = false goes on"
            raise CheckpointError.of(str(folder), where, saw, want, fix)
        saw = f"{where} is another than before (fingerprint {tokenizer}, before {made_by})"
        return f"{saw}, and its ids are not those that the weights know; restore the old file, or use another job.name"
    pairs = {name: (corpus, before.get(name)) for name, corpus in corpora.items()}
    for name, (corpus, was) in pairs.items():
        if not corpus or was == "":
            pairs[name] = (inputs or {}).get(name, ""), state.inputs.get(name)
    others = [name for name, (now, was) in pairs.items() if now and was not in (None, "", now)]
    if not others:
        return None
    now, was = pairs[others[0]]
    which = ", ".join(f"{name} of data.mixture" if name != SOLE else "data.source" for name in others)
    saw = f"{which} holds different text than before (fingerprint {now}, before {was})"
    return f"{saw}: this epoch's samples are shuffled anew"


def identity_of(config: Config, dims: ModelDims) -> dict[str, Any]:
    """Return `model`, `training` and `data` of `SavedState`: what must be the same in any folder it is resumed in."""
    model = {key: value for key, value in asdict(dims).items() if key not in ("help", "refs")}
    training = {key: getattr(config.training, key) for key in ("seq_len", "seed")}
    data = {key: getattr(config.data, key) for key in ("shuffle_window", "packing")}
    return {"model": model, "training": training, "data": data}


def check_state(folder: Path, state: SavedState, config: Config, dims: ModelDims, per_step: int | None) -> None:
    """Refuse to resume with another model, seed, sequence length or order of data.

    A batch that differs only because the layout does is refused, too; one that is given may differ. The sequences of a
    step of this run are None if the number of ranks is not known.

    Raises:
        CheckpointError: the recipe of the model has changed since, or the checkpoint is of another run.
        ConfigError: the batch differs, and `training.global_batch_size` is not given.
    """
    fixes = {
        "model": "the old value, or restore the recipe",
        "data": "the old value, in which order the checkpoint was trained",
        "training": "the old value; or begin anew from its weights: titanlite export, checkpoint.initial_load_path",
    }
    problems: list[Problem] = []
    for section, values in identity_of(config, dims).items():
        saved: Mapping[str, Any] = getattr(state, section)
        for key, value in values.items():
            before = saved.get(key, value)
            of_another = {name for name, _, _ in _what_changed(key, lasting(before), lasting(value))}
            for name, was, now in (c for c in _what_changed(key, before, value) if c[0] in of_another):
                want = f"{show(was) or was}, as the checkpoint has it"
                if name == "experts.balance_bias":
                    want += "; its rate may change, but a bias is there or is not: to hold it, a rate of 1e-12"
                problems.append(Problem(f"{section}.{name}", show(now) or str(now), want, fixes[section]))
    if problems:
        raise CheckpointError(describe(str(folder), problems))
    unit_len = longest_seq_len(config)
    cut = state.unit_len or unit_len
    if cut % unit_len:
        want = f"a divisor of {cut}: the samples that the sources were cut into would not be where they were"
        fix = "begin anew from its weights: titanlite export, checkpoint.initial_load_path"
        raise CheckpointError.of(str(folder), "the longest seq_len of all stages", str(unit_len), want, fix)
    batch, given = state.sequences_per_step, [stage.global_batch_size for stage in config.data.stage]
    if config.training.global_batch_size is not None or any(given) or per_step is None or batch in (None, per_step):
        return
    seen = f"not given: local_batch_size × data-parallel ranks make {per_step} sequences per step"
    want = f"{batch} sequences per step, with which the checkpoint was trained"
    fix = f"--training.global_batch_size {batch}, or the number that it is to go on with"
    raise ConfigError.of(str(folder), "training.global_batch_size", seen, want, fix)


def require_average(where: str, checkpoint: Path, state: SavedState) -> None:
    """Raise CheckpointError if a checkpoint has no average of the weights, which `--ema` asks for."""
    if not state.has_average:
        want = "a checkpoint with an average of weights: this one has none, since optimizer.ema_decay was 0"
        fix = "leave --ema out, or train on with --optimizer.ema_decay 0.999 and take a later step"
        raise CheckpointError.of(where, "--ema", checkpoint.name, want, fix)


def changed_average(state: SavedState, config: Config, step: int) -> list[str]:
    """Return a notice if only one of a run and the checkpoint of a step has an average of weights."""
    decay = config.optimizer.ema_decay
    if decay and not state.has_average:
        return [f"the average of weights (optimizer.ema_decay = {decay}) begins at those of step {step}"]
    if state.has_average and not decay:
        return [f"the average of weights in the checkpoint of step {step} is left out: optimizer.ema_decay = 0"]
    return []


def changed_routing(state: SavedState, dims: ModelDims) -> list[str]:
    """Return a notice for each setting of routers that differs from the checkpoint's; `check_state` allows them."""
    was = state.model.get("experts")
    changes = _what_changed("experts", was, asdict(dims.experts)) if was and dims.experts else []
    return [f"changed: {name}: {show(before)} → {show(now)}" for name, before, now in changes]


def _what_changed(key: str, was: Any, now: Any) -> list[tuple[str, Any, Any]]:
    """Return (key, before, now) of a value that differs; of two tables, of each key."""
    if not (isinstance(was, dict) and isinstance(now, dict)):
        return [(key, was, now)] * (was != now)
    before, after = cast(dict[str, Any], was), cast(dict[str, Any], now)
    pairs = {name: (before.get(name), after.get(name)) for name in {**before, **after}}
    return [(f"{key}.{name}", old, new) for name, (old, new) in pairs.items() if old != new]


def lasting(value: Any) -> Any:
    """Return a value without what may change: how routers are trained, but not whether they have a bias."""
    if not (isinstance(value, dict) and "balance_bias" in value):
        return value  # pyright: ignore[reportUnknownVariableType]
    experts = cast(dict[str, Any], value)
    return experts | {"balance_loss": 0.0, "z_loss": 0.0, "balance_bias": bool(experts["balance_bias"])}


def _resume_refused(root: Path, saw: str, want: str, fix: str) -> CheckpointError:
    return CheckpointError.of(str(root), "checkpoint.resume", saw, want, fix)


def _list(steps: list[int]) -> str:
    return ", ".join(str(step) for step in steps)
