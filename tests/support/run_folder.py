"""Folders of runs, as a run leaves them, for what reads them."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from titanlite.checkpoint.publish import begin, commit, hash_files
from titanlite.checkpoint.resume import identity_of
from titanlite.checkpoint.saved_state import SavedState
from titanlite.comparison.runs import RunRecord
from titanlite.config.stages import sequences_per_step
from titanlite.config.write import to_toml
from titanlite.data.stages import stage_table
from titanlite.observe.metrics import MetricsFile
from titanlite.preflight.checked_run import checked_run
from titanlite.preflight.run_folder import RunFolder

STEP = {
    "step": 1,
    "loss": 5.0,
    "grad_norm": 0.5,
    "lr": 3e-4,
    "tokens": 1000,
    "epoch": 0.5,
    "tokens_per_second_per_gpu": 100.0,
    "tflops_per_gpu": 0.1,
    "mfu": 0.5,
    "memory_gib": 1.5,
    "memory_allocated_gib": 1.0,
    "seconds": 0.25,
    "data_wait_seconds": 0.01,
}


def make_run(
    folder: Path,
    losses: Sequence[float],
    lr: float = 3e-4,
    batch: int = 1,
    validations: Sequence[tuple[int, float]] = (),
    state: str = "finished",
    receipt: Sequence[Mapping[str, Any]] | None = None,
    **row: Any,
) -> str:
    """Write a run's folder of 1,000 tokens a step and sequence, and return its path."""
    file = MetricsFile(folder / "metrics.jsonl", 0)
    for step, loss in enumerate(losses, start=1):
        file.write(STEP | {"step": step, "loss": loss, "tokens": 1000 * batch * step} | row)
    for step, loss in validations:
        file.write({"step": step, "tokens": 1000 * batch * step, "validation_loss": loss})
    file.close()
    exclude = '["*norm.weight", "[red]x"]'
    (folder / "config.toml").write_text(
        f'[job]\nname = "run"\n[optimizer]\nlr = {lr}\nweight_decay_exclude = {exclude}\n'
        f"[training]\nlocal_batch_size = {batch}\n"
    )
    (folder / "status.json").write_text(json.dumps({"state": state}))
    if receipt is not None:
        (folder / "receipt.json").write_text(json.dumps(receipt))
    return str(folder)


def saved_run(argv: Sequence[str], world: int, *steps: int, weights: bytes = b"", **state: Any) -> RunFolder:
    """Leave the folder of a run that has ended, with checkpoints of `steps`; `state` is more of their state.json."""
    asked = checked_run(argv, world)
    config, folder = asked.config, RunFolder.of(asked.config)
    folder.claim(config)
    folder.release()
    folder.record(to_toml(config))
    (folder.path / "lock").unlink()
    n, stages = sequences_per_step(config, world), stage_table(config, world)
    for step in steps:
        tmp, files = begin(folder.checkpoints, step), ["state.json", *["rank00000-0.safetensors"] * bool(weights)]
        past = {"sequences_per_step": n, "samples": n * step, "stages": stages.past(step), **state}
        saved = {"tokenizer": asked.inputs.fingerprint, **past, **identity_of(config, asked.dims)}
        (tmp / "state.json").write_text(SavedState(step=step, **saved).to_json())
        for name in files[1:]:
            (tmp / name).write_bytes(weights)
        commit(tmp, hash_files(tmp, files))
    return folder


def record(name: str, steps: int, loss: Callable[[int], float | None], every: int = 1) -> RunRecord:
    """A run as it is read, of 1,000 tokens and half a second a step."""
    taken = range(every, steps + 1, every)
    rows = [{"step": step, "tokens": 1000 * step, "loss": loss(step), "seconds": 0.5} for step in taken]
    return RunRecord(name, rows, {"job.name": name}, "finished", None)


def falling(step: int) -> float:
    """A loss that begins at 12.5 and falls by a power law, with noise of ±0.05 that is the same in each run."""
    return 2.6 + 9.9 / (1 + step / 20) ** 0.6 + 0.05 * ((step * 7919 % 1009) / 504.5 - 1)
