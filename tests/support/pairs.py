"""Pairs of runs for a verdict: equal ones, which differ in rounding alone, and ones with a planted change."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import titanlite.training.step as step
from tests.support.short_run import train
from titanlite.comparison.judge import FLOORS
from titanlite.comparison.runs import RunRecord
from titanlite.float8.convert import precompute_scales
from titanlite.training.build import Run

STEPS = 40
Change = Callable[[Run], object]


def nothing(run: Run) -> None:
    """Leave the run as it is."""


def turn_sign(module: str) -> Change:
    """Let a module return the opposite of what it computes."""
    return lambda run: run.model.get_submodule(module).register_forward_hook(lambda m, x, y: -y)


def shift_labels(run: Run) -> None:
    """Train on the token after the next."""
    run.loss = lambda logits, targets, loss=run.loss, **more: loss(logits, targets.roll(-1), **more)


def keep_scale(run: Run) -> None:
    """Go on with the scale that one weight had when it was a sixteenth as large."""

    def stale(parameters: list[nn.Parameter], mesh: DeviceMesh) -> None:
        precompute_scales(parameters, mesh)
        shard = run.model.get_parameter("layers.0.feed_forward.w2.weight")._local_tensor  # type: ignore[attr-defined]
        shard.scale, shard.scale_inv = shard.scale * 16, shard.scale_inv / 16

    stale(run.parameters, run.mesh.fsdp)
    step.precompute_scales = stale


def leave_out_reduction(run: Run) -> None:
    """Let each tensor-parallel rank keep its own part of a replicated weight's gradient."""
    step.reduce_replicated_gradients = lambda parameters, group: None


@dataclass(frozen=True)
class Pair:
    """A run, and what is different in another.

    Attributes:
        arithmetic: flags of both.
        world: ranks of the other; the first has one.
        flags: of the other.
        change: to the other.
        base_world: ranks of the first.
    """

    arithmetic: str = ""
    world: int = 1
    flags: str = ""
    change: Change = nothing
    base_world: int = 1

    @property
    def in_words(self) -> str:
        """The arithmetic's name."""
        return {FLOAT32: "float32", BFLOAT16: "bfloat16"}.get(self.arithmetic, "float8")


FLOAT32 = ""
BFLOAT16 = "--training.mixed_precision_param bfloat16"
ROWWISE = "--float8.recipe rowwise"
TENSORWISE = "--float8.recipe tensorwise"
TP, ASYNC = "--parallelism.tensor_parallel_degree 2", " --parallelism.async_tensor_parallel"
HSDP = "--parallelism.data_parallel_replicate_degree 2 --parallelism.data_parallel_shard_degree 2"
FULL, BALANCED = "--activation_checkpoint.recipe full", "--activation_checkpoint.recipe balanced"
COMPILED = "--compile.enable"

EQUAL: Mapping[str, Pair] = {
    "fsdp 2": Pair(world=2),
    "fsdp 4": Pair(world=4),
    "hsdp 2 x 2": Pair(world=4, flags=HSDP),
    "tp 2": Pair(world=2, flags=TP),
    "tp 2 async": Pair(world=2, flags=TP + ASYNC),
    "fsdp 2 x tp 2": Pair(world=4, flags=TP),
    "fsdp 2 x tp 2 async": Pair(world=4, flags=TP + ASYNC),
    "full": Pair(flags=FULL),
    "compiled": Pair(flags=COMPILED),
    "compiled, full": Pair(flags=f"{COMPILED} {FULL}"),
    "compiled, balanced, fsdp 2": Pair(world=2, flags=f"{COMPILED} {BALANCED}"),
    "micro-batches of two": Pair(flags="--training.local_batch_size 2"),
    "bfloat16, fsdp 2": Pair(BFLOAT16, world=2),
    "bfloat16, tp 2": Pair(BFLOAT16, world=2, flags=TP),
    "bfloat16, tp 2 async": Pair(BFLOAT16, world=2, flags=TP + ASYNC),
    "bfloat16, compiled": Pair(BFLOAT16, flags=COMPILED),
    "bfloat16, micro-batches of two": Pair(BFLOAT16, flags="--training.local_batch_size 2"),
    "rowwise, fsdp 2": Pair(ROWWISE, world=2),
    "rowwise, tp 2": Pair(ROWWISE, world=2, flags=TP),
    "rowwise, tp 2 async, full": Pair(ROWWISE, world=2, flags=f"{TP}{ASYNC} {FULL}"),
}

CHANGED: Mapping[str, Pair] = {
    "learning rate x 1.05": Pair(flags="--optimizer.lr 2.1e-3"),
    "learning rate x 1.05, tp 2": Pair(world=2, flags=f"--optimizer.lr 2.1e-3 {TP}"),
    "bfloat16, learning rate x 1.05": Pair(BFLOAT16, flags="--optimizer.lr 2.1e-3"),
    "rowwise, learning rate x 1.1": Pair(ROWWISE, flags="--optimizer.lr 2.2e-3"),
    "sign of attention 0": Pair(change=turn_sign("layers.0.attention")),
    "sign of attention 1": Pair(change=turn_sign("layers.1.attention")),
    "sign of feed-forward 0": Pair(change=turn_sign("layers.0.feed_forward")),
    "bfloat16, sign of feed-forward 1": Pair(BFLOAT16, change=turn_sign("layers.1.feed_forward")),
    "stale scale": Pair(TENSORWISE, world=2, base_world=2, change=keep_scale),
    "stale scale, fsdp 4": Pair(TENSORWISE, world=4, base_world=2, change=keep_scale),
    "missing reduction": Pair(world=2, flags=TP, change=leave_out_reduction),
    "missing reduction, fsdp 2": Pair(world=4, flags=TP, change=leave_out_reduction),
    "bfloat16, missing reduction": Pair(BFLOAT16, world=2, flags=TP, change=leave_out_reduction),
    "weight decay on norms": Pair(flags="--optimizer.weight_decay_exclude=[]"),
    "weight decay on norms, fsdp 2": Pair(world=2, flags="--optimizer.weight_decay_exclude=[]"),
    "shifted label": Pair(change=shift_labels),
    "bfloat16, shifted label": Pair(BFLOAT16, change=shift_labels),
    "RoPE base of llama3": Pair(flags="--model.rope_theta 500000"),
    "RoPE base of llama3, fsdp 2": Pair(world=2, flags="--model.rope_theta 500000"),
    "RoPE base of llama3, tp 2 async": Pair(world=2, flags=f"{TP}{ASYNC} --model.rope_theta 500000"),
}


class Runs:
    """Trains the runs of pairs, each once.

    Args:
        folder: for what they write.
        steps: of each run.
        floors: nudged runs of each first run.
    """

    def __init__(self, folder: Path, steps: int = STEPS, floors: int = FLOORS) -> None:
        self._folder, self._steps, self._floors = folder, steps, floors
        self._text = folder / "text.txt"  # torch's own, which decides the bits, too; each Python has another library
        self._text.write_text(Path(nn.functional.__file__).read_text())

    @functools.cache  # noqa: B019  # as long as the tests
    def record(self, world: int, flags: str, change: Change = nothing) -> RunRecord:
        """Train, and return what a run's folder would hold of it."""
        folder = self._folder / f"{abs(hash((world, flags, change)))}"
        folder.mkdir()
        shared = ["--training.steps", str(STEPS), "--lr_scheduler.warmup_steps", "5", "--data.source", str(self._text)]
        trained = train(folder, world, [*flags.split(), *shared], steps=self._steps, change=change, timeout_s=600)
        rows: list[dict[str, Any]] = [
            {"step": i, "tokens": i * 256, "loss": loss, "grad_norm": norm}
            for i, (loss, norm) in enumerate(zip(trained.losses.tolist(), trained.norms.tolist(), strict=True), start=1)
        ]
        return RunRecord(f"{flags} on {world}", rows, {}, "finished", None)

    def of(self, pair: Pair) -> tuple[RunRecord, RunRecord, list[RunRecord]]:
        """Return the first run, the other, and the first's nudged ones."""
        first = self.record(pair.base_world, pair.arithmetic)
        other = self.record(pair.world, f"{pair.arithmetic} {pair.flags}", pair.change)
        seeds = range(1, self._floors + 1)
        nudged = [self.record(pair.base_world, f"{pair.arithmetic} --training.nudge {seed}") for seed in seeds]
        return first, other, nudged
