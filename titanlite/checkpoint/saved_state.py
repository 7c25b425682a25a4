"""Define `state.json`: everything that a checkpoint stores about its run beside the tensors. Only this file reads it.

`training/loop.py::Loop` supplies the values, except those that `Checkpoints.save` sets; `training/train.py` restores
them at a start. A new field with a default needs no new version.

Does not import torch, because commands read the state before they import torch.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, cast

import titanlite
from titanlite.checkpoint import publish
from titanlite.data.stages import Past, StageRow
from titanlite.errors import CheckpointError, Problem, describe
from titanlite.json_file import MALFORMED, read_json

STATE = "state.json"
VERSION = 3
_READ_BY = {"1": "62eae34d", "2": "07e5a3c5"}  # earlier versions, and the last commit that reads each
QUICKLY_HASHED = 2**20  # bytes: more than state.json has, and less than the tensors of any real model


class RankedLoss(NamedTuple):
    """A loss of a validation, and the step after which losses are measured as it was, on the same samples."""

    loss: float
    since: int


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """The state of a run at a step, except for its tensors.

    Attributes:
        step: number of steps done.
        world_size: number of ranks that saved the checkpoint.
        samples: number of sequences trained on, over all ranks.
        sequences_per_step: number of sequences in the last step.
        stages: rows of the stage table that training has reached.
        unit_len: number of tokens in the samples that sources are cut into; 0: nothing was trained.
        losses: finite losses of a validation at this step, before the save, by key of metrics.jsonl.
        measured_on: what each loss of a validation is measured on, by key: a fingerprint of its samples.
        measured_since: the step after which it is, by key.
        validation_due: whether a signal stopped the run between this step and its validation.
        skipped_in_a_row: number of consecutive last steps whose loss or gradient was not finite.
        learning_rate: learning rate of the last step; None before the first.
        ema_decay: decay of the average of weights; 0: the checkpoint has no average.
        tokenizer: fingerprint of the tokenizer that made the tokens; "": not known.
        corpora: fingerprint of the tokens of each source, by its name; "": not known at the save.
        inputs: hash of the files that these tokens are made of, by the name of the source.
        training: settings of the config's `[training]` that must not change on resuming.
        data: settings of the config's `[data]` that must not change on resuming.
        optimizer: the rule of each parameter, the dtype of the state, and names of the state of a user's own rules.
        optimizer_file: hash of the user's file of rules; None: there is none.
    """

    version: int = VERSION
    step: int = 0
    world_size: int = 1
    torch: str = ""
    titanlite: str = titanlite.__version__
    samples: int = 0
    sequences_per_step: int | None = None
    stages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    unit_len: int = 0
    losses: Mapping[str, float] = field(default_factory=dict[str, float])
    measured_on: Mapping[str, str] = field(default_factory=dict[str, str])
    measured_since: Mapping[str, int] = field(default_factory=dict[str, int])
    validation_due: bool = False
    skipped_in_a_row: int = 0
    learning_rate: float | None = None
    ema_decay: float = 0.0
    tokenizer: str = ""
    corpora: Mapping[str, str] = field(default_factory=dict[str, str])
    inputs: Mapping[str, str] = field(default_factory=dict[str, str])
    model: Mapping[str, Any] = field(default_factory=dict[str, Any])
    training: Mapping[str, Any] = field(default_factory=dict[str, Any])
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
    optimizer: Mapping[str, Any] = field(default_factory=dict[str, Any])
    optimizer_file: str | None = None

    @property
    def has_average(self) -> bool:
        """Return whether the checkpoint's tensors include an average of the weights."""
        return bool(self.ema_decay)

    @property
    def past(self) -> Past:
        """Return the step, number of samples and stages that the run had reached at the save."""
        return Past(self.step, self.samples, tuple(map(StageRow.from_json, self.stages)), self.unit_len)

    def measured(self, key: str) -> RankedLoss | None:
        """Return the loss `key` that was measured at this step, or None."""
        return RankedLoss(self.losses[key], self.measured_since.get(key, 0)) if key in self.losses else None

    def to_json(self) -> str:
        """Return the content of `state.json`."""
        return json.dumps(asdict(self), indent=1)


def read_state(folder: Path, step: int) -> SavedState:
    """Read the `state.json` of a checkpoint. Check the sizes of all its files, and the hashes of small ones.

    Raises:
        CheckpointError: `state.json` is damaged, of another version or of another step; or a file of the checkpoint is
            missing, of another size or altered.
    """
    publish.verify(folder, largest=QUICKLY_HASHED)
    try:
        saved = cast(dict[str, Any], read_json(folder / STATE))
        state = state_from_json(saved)
    except (OSError, TypeError, *MALFORMED) as e:
        want, fix = "what titanlite writes", "move this checkpoint's folder away or delete it"
        raise CheckpointError.of(str(folder), STATE, f"{type(e).__name__}: {e}", want, fix) from None
    if saved.get("version") != VERSION:
        want = f"version {VERSION}, which titanlite {titanlite.__version__} reads"
        last = _READ_BY.get(str(saved.get("version")))
        fix = "use the titanlite that wrote it" + (f": commit {last} is the last one that reads it" if last else "")
        problem = Problem(STATE, f"version {saved.get('version')}", want, fix)
    elif saved.get("step") != step:
        problem = Problem(STATE, f"step {saved.get('step')}", f"step {step}, as the folder says", "rename the folder")
    else:
        return state
    raise CheckpointError(describe(str(folder), [problem]))


def state_from_json(saved: Mapping[str, Any]) -> SavedState:
    """Return the state in the parsed content of a `state.json`. Raise TypeError if it is none."""
    return SavedState(**{of.name: saved[of.name] for of in fields(SavedState) if of.name in saved})


def best_of(losses: Mapping[int, RankedLoss | None]) -> int | None:
    """Return the step with the lowest loss, the earliest of equal ones; None if no step has one.

    Losses on other samples than those of the newest loss are not compared with it.
    """
    found = {step: measured for step, measured in losses.items() if measured is not None}
    since = found[max(found)].since if found else 0
    return min((step for step in found if step > since), key=lambda step: (found[step].loss, step), default=None)


def losses_of(root: Path, key: str, known: dict[int, RankedLoss | None]) -> dict[int, CheckpointError]:
    """Let `known` have the loss `key` of each complete checkpoint by its step, None where it was not measured.

    What `known` has is not read again. Return the steps whose state cannot be read, each with its error.
    """
    steps, unread = publish.complete_steps(root), dict[int, CheckpointError]()
    for step in known.keys() - {*steps}:
        del known[step]
    for step in steps:
        if step not in known:
            try:
                known[step] = read_state(publish.step_folder(root, step), step).measured(key)
            except CheckpointError as error:
                unread[step] = error
    return unread
