"""Check that a step gives the same bits every time: torchrun --nproc-per-node 2 scripts/repeat_step.py [FLAGS]

Each step is taken of the first batch, at learning rate 0. Loss, norm, and of each gradient on each rank the sum of its
bits and of its magnitudes are compared with those of the first step; exit code 1 if any differs. With
`--training.deterministic` none should.
"""

from typing import Any

import torch
from torch import Tensor

from titanlite import train
from titanlite.exit_code import exit_code, leave
from titanlite.training import loop
from titanlite.training.build import Run
from titanlite.training.step import train_step

batches: list = []
sums: list[Tensor] = []  # of a step: [gradients, 2] int64
results: list[Tensor] = []  # of a step: [2] float32, loss and norm
names: list[str] = []


def fingerprint(gradient: Tensor) -> Tensor:
    """Return two numbers, [2] int64, of this rank's part, float32."""
    bits = gradient.view(torch.int32).sum(dtype=torch.int64)
    return torch.stack((bits, gradient.abs().sum(dtype=torch.float64).view(torch.int64)))


def step(run: Run, micro_batches: list, lr: float, *others: Any, **named: Any) -> dict[str, Tensor]:
    """Take a step of the first batch, in the place of `train_step`."""
    if not batches:
        batches.extend(micro_batches)
        norm = run.optimizer.norm

        def look_then_norm(gradients: dict[str, Tensor], *norms: Any) -> Tensor:
            names[:] = gradients
            sums.append(torch.stack([fingerprint(gradient) for gradient in gradients.values()]))
            return norm(gradients, *norms)

        run.optimizer.norm = look_then_norm
    out = train_step(run, batches, 0.0, *others, **named)
    results.append(torch.stack((out["loss"], out["grad_norm"])))
    return out


def compare() -> int:
    """Print which steps differ from the first; 1 if any does."""
    differ = [i for i in range(1, len(sums)) if not (torch.equal(sums[i], sums[0]) and results[i].equal(results[0]))]
    print(f"{len(sums)} steps, {len(differ)} unlike the first", flush=True)
    for i in differ[:3]:
        unlike = [name for name, other in zip(names, (sums[i] != sums[0]).any(1).tolist(), strict=True) if other]
        got, first = ((f"{number:.9g}" for number in result.tolist()) for result in (results[i], results[0]))
        print(f"step {i + 1}: loss {next(got)}, was {next(first)}; norm {next(got)}, was {next(first)}", flush=True)
        print(f"    {len(unlike)} of {len(names)} gradients: {', '.join(unlike[:3])}, …", flush=True)
    return int(bool(differ))


if __name__ == "__main__":
    loop.train_step = step
    leave(exit_code(train.main) or compare())
