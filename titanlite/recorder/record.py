"""Record a step: build the run for one rank of any world, and take its first step, on tensors without memory."""

from dataclasses import dataclass

import torch

from titanlite.data.batches import padding_of
from titanlite.kernels.lowering import Lowered, lowered
from titanlite.observe.peak_flops import windows_of
from titanlite.parallel.context import token_group
from titanlite.preflight.checked_run import CheckedRun
from titanlite.receipt import Entry
from titanlite.recorder.fake_world import fake_world
from titanlite.recorder.recorder import Collective, Recorder
from titanlite.training.build import build
from titanlite.training.step import train_step


@dataclass(frozen=True)
class Recording:
    """What one rank does in a step.

    Attributes:
        collectives: how often it calls each.
        flops: by direction.
        kept: bytes that the forward pass of a micro-step leaves for backward.
        fused: how often collective matmuls ran, and how.
        entries: of the receipt, as far as they are known after a step.
    """

    collectives: dict[Collective, int]
    flops: dict[str, int]
    kept: int
    fused: dict[Lowered, int]
    entries: list[Entry]


def record(checked: CheckedRun, world: int, device: str | None = None, rank: int = 0) -> Recording:
    """Record the first step of a run.

    Args:
        checked: the run; its save-list is given.
        world: number of processes.
        device: one of `forecast.device_specs.DEVICES`; None: a CPU.
        rank: the one that is recorded.
    """
    config = checked.config
    assert checked.save_list is not None  # noqa: S101
    with fake_world(device, rank, world) as named:
        run = build(config, checked.dims, checked.save_list, checked.float8, checked.optimizer, named)
        shape = config.training.local_batch_size, config.training.seq_len
        group = token_group(run.mesh, windows_of(run.model))
        batch = padding_of(shape, torch.device("cpu"), config.data.document_mask, group)
        recorder = Recorder(named, run.model)
        with named.tensors(), recorder:
            train_step(run, [batch] * run.memory.micro_steps, 1e-3, stop_requested=False)
        recorder.close()
        run.receipt.complete()
        return Recording(
            dict(recorder.collectives),
            dict(recorder.flops),
            max(recorder.kept),
            dict(lowered),
            run.receipt.entries,
        )
