"""Name what a checkpoint says of its run beside the tensors: every key of `state.json`, read and written here alone.

`training/loop.py::Loop` gives the values, except those of the save itself (`Checkpoints.save`); `training/train.py`
takes them up at a start. A new field with a default needs no new version.

No torch here: commands read it before they import that.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, cast

import titanlite
from titanlite.checkpoint import publish
from titanlite.data.stages import Past, StageRow
from titanlite.errors import CheckpointError, Problem, describe
from titanlite.json_file import MALFORMED, read_json

STATE = "state.json"
VERSION = 3
_READ_BY = {"1": "62eae34d", "2": "07e5a3c5"}  # versions of before, and the last commit that reads each
QUICKLY_HASHED = 2**20  # bytes: state.json, and not the tensors of any real model


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """The state of a run at a step, except for its tensors.

    Attributes:
        step: the last one done.
        world_size: number of ranks that saved it.
        samples: sequences trained on, over all ranks.
        sequences_per_step: of the last step.
        stages: rows of the stage table that training has reached.
        unit_len: tokens of the samples that sources are cut into; 0: nothing was trained.
        validation_due: a signal came between this step and its validation.
        skipped_in_a_row: the last steps whose loss or gradient was not finite.
        learning_rate: of this step; None before the first.
        ema_decay: of the average of weights among the tensors; 0: there is none.
        tokenizer: fingerprint of what made the tokens; "": not known.
        corpora: fingerprint of the tokens of each source, by its name; "": not known then.
        inputs: hash of what these tokens are made of.
        training: of the config's `[training]`, what stays as it is.
        data: the same of `[data]`.
        optimizer: the rule of each parameter, dtype of the state, and what rules of the user's own file keep.
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
        """Return whether there is an average of the weights among the tensors."""
        return bool(self.ema_decay)

    @property
    def past(self) -> Past:
        """Return the part of the run up to here."""
        return Past(self.step, self.samples, tuple(map(StageRow.from_json, self.stages)), self.unit_len)

    def to_json(self) -> str:
        """Return the content of the file."""
        return json.dumps(asdict(self), indent=1)


def read_state(folder: Path, step: int) -> SavedState:
    """Read the `state.json` of a checkpoint, and look for damage as far as that takes no time.

    Raises:
        CheckpointError: it is damaged, of another version or of another step; or another file is missing, of another
            size or altered.
    """
    publish.verify(folder, largest=QUICKLY_HASHED)
    try:
        saved = cast(dict[str, Any], read_json(folder / STATE))
        state = SavedState(**{of.name: saved[of.name] for of in fields(SavedState) if of.name in saved})
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
