"""Decide from which step a run resumes, and whether the checkpoint is of the same run. Does not import torch.

The step is decided by the names of folders alone. `train.py` decides it before it imports torch, so that a missing step
is refused within a second; `Checkpoints.choose` decides it again for all ranks. `titanlite validate` also reads the
small files of the checkpoint. The rules ensure that no work is lost silently:

- `auto` takes the newest complete checkpoint, a number takes exactly that step, `never` demands that there is none;
- a step that has newer checkpoints is refused, because a later `auto` would resume from those;
- a folder with only part of a checkpoint stops the run instead of being skipped.
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
"""Prefixes of the names of tensors in a checkpoint: of the model, and of the moving average of its weights."""


def nothing_to_do(config: Config, done: int) -> str | None:
    """Return a notice if a run has no step left after `done` steps, else None."""
    last = last_step(config)
    if done < last:
        return None
    key = "training.steps" if last == config.training.steps else "job.stop_after"
    return f"nothing to do: the run ends at step {last} ({key}), and step {done} is already done"


def step_to_resume(root: Path, resume: Literal["auto", "never"] | int) -> int | None:
    """Return the step to load, or None for a fresh start. No file is changed.

    Raises:
        CheckpointError: the named step does not exist or has newer ones, there are checkpoints in spite of `never`, or
            a folder has only part of a checkpoint.
    """
    steps = publish.complete_steps(root)
    if parts := publish.partial_folders(root):
        want = f"complete checkpoints only: one without {publish.MANIFEST} was copied in part or tampered with"
        fix = "copy it again, or move it away"
        raise CheckpointError(describe(str(root), [Problem(p, "incomplete", want, fix) for p in parts]))
    return chosen_step(steps, resume, str(root))


def chosen_step(steps: list[int], resume: Literal["auto", "never"] | int, root: str) -> int | None:
    """Return which of the complete `steps` in `root` to load; None for a fresh start. Raise as `step_to_resume`."""
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
            f"{publish.step_folder(Path(), resume).name} into its checkpoints folder"
        )
        raise _resume_refused(root, str(resume), want, fix)
    return resume


def start_of(root: Path, config: Config) -> tuple[Path, int] | None:
    """Return (folder of checkpoints, step) of the checkpoint to start from: the run's own, another run's, or None.

    Raises:
        CheckpointError: as in `step_to_resume` and `branch_point`.
    """
    step = step_to_resume(root, config.checkpoint.resume) if config.checkpoint.enable else None
    return branch_point(config.checkpoint.initial_load_path, root.parent) if step is None else (root, step)


def dims_of(folder: Path, state: SavedState) -> ModelDims:
    """Return the dimensions of the model that a checkpoint stores. The recipe may have changed since the save."""
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
    """Return a warning if a run resumes with other text or another tokenizer than the checkpoint was trained with.

    `corpora` has the fingerprint of each source's tokens, `tokenizer` is that of the tokenizer; "" if not known. For a
    source without a fingerprint, the hash of its files in `inputs` is compared.

    Raises:
        CheckpointError: with `strict`, if the tokenizer differs: the weights were trained on the meaning of its ids.
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
    """Return the fields `model`, `training` and `data` of `SavedState`, which must not change on resuming."""
    model = {key: value for key, value in asdict(dims).items() if key not in ("help", "refs")}
    training = {key: getattr(config.training, key) for key in ("seq_len", "seed")}
    data = {key: getattr(config.data, key) for key in ("shuffle_window", "packing")}
    return {"model": model, "training": training, "data": data}


def check_state(folder: Path, state: SavedState, config: Config, dims: ModelDims, per_step: int | None) -> None:
    """Refuse to resume with another model, seed, sequence length or order of data.

    Another batch size is refused, too, if it only follows from the number of ranks; one that the config sets may
    differ. `per_step` is the number of sequences in a step of this run, or None if it is not known.

    Raises:
        CheckpointError: the recipe of the model has changed since the save, or the checkpoint is of another run.
        ConfigError: the batch size differs, and `training.global_batch_size` is not set.
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
    """Raise CheckpointError if a checkpoint lacks the average of the weights that the option `--ema` requires."""
    if not state.has_average:
        want = "a checkpoint with an average of weights: this one has none, since optimizer.ema_decay was 0"
        fix = "leave --ema out, or train on with --optimizer.ema_decay 0.999 and take a later step"
        raise CheckpointError.of(where, "--ema", checkpoint.name, want, fix)


def changed_average(state: SavedState, config: Config, step: int) -> list[str]:
    """Return a notice if the run has an average of weights and the checkpoint of `step` has none, or the reverse."""
    decay = config.optimizer.ema_decay
    if decay and not state.has_average:
        return [f"the average of weights (optimizer.ema_decay = {decay}) begins at those of step {step}"]
    if state.has_average and not decay:
        return [f"the average of weights in the checkpoint of step {step} is left out: optimizer.ema_decay = 0"]
    return []


def changed_routing(state: SavedState, dims: ModelDims) -> list[str]:
    """Return a notice for each router setting that has changed since the checkpoint, as `check_state` allows."""
    was = state.model.get("experts")
    changes = _what_changed("experts", was, asdict(dims.experts)) if was and dims.experts else []
    return [f"changed: {name}: {show(before)} → {show(now)}" for name, before, now in changes]


def _what_changed(key: str, was: Any, now: Any) -> list[tuple[str, Any, Any]]:
    """Return [(key, before, now)] if a value has changed, else []. Two tables are compared key by key."""
    if not (isinstance(was, dict) and isinstance(now, dict)):
        return [(key, was, now)] * (was != now)
    before, after = cast(dict[str, Any], was), cast(dict[str, Any], now)
    pairs = {name: (before.get(name), after.get(name)) for name in {**before, **after}}
    return [(f"{key}.{name}", old, new) for name, (old, new) in pairs.items() if old != new]


def lasting(value: Any) -> Any:
    """Replace the settings of experts that may change by constants; return any other value as it is.

    The weights of router losses become 0, and the rate of the bias a bool, because only its presence must not change.
    """
    if not (isinstance(value, dict) and "balance_bias" in value):
        return value  # pyright: ignore[reportUnknownVariableType]
    experts = cast(dict[str, Any], value)
    return experts | {"balance_loss": 0.0, "z_loss": 0.0, "balance_bias": bool(experts["balance_bias"])}


def _resume_refused(root: str, saw: str, want: str, fix: str) -> CheckpointError:
    return CheckpointError.of(root, "checkpoint.resume", saw, want, fix)


def _list(steps: list[int]) -> str:
    return ", ".join(str(step) for step in steps)
