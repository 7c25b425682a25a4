"""Train a few steps of a run, and write sketches of the tensors in each step, for `titanlite compare --layers`.

    torchrun --nproc-per-node 2 -m titanlite.training.sketch_steps OUT.npz STEPS --config FILE [--section.key VALUE ...]

A sketch has a few sums of a tensor's elements, with weights of ±1. A weight depends only on the element's place in the
full tensor, so that sums over ranks and micro-batches are the same under every layout. The relative difference of two
sketches is about that of their tensors. Sketches are made of the outputs of each block and its modules, the gradient of
each parameter, and each parameter after the update, in the order of a step.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from titanlite.config.check_mesh import tokens_of_rank
from titanlite.data.batches import Batch, TrainBatches
from titanlite.data.order import mix
from titanlite.data.stages import stage_table
from titanlite.device import device_of
from titanlite.exit_code import exit_code, leave
from titanlite.float8.weight import as_laid_out, local_data
from titanlite.observe.peak_flops import windows_of
from titanlite.parallel.process_group import start_process_group
from titanlite.preflight.checked_run import checked_run
from titanlite.training.assemble import try_assembly
from titanlite.training.attention import torch_order
from titanlite.training.build import Run, build
from titanlite.training.data import open_batches, open_data
from titanlite.training.schedule import learning_rate
from titanlite.training.state import take_first_weights
from titanlite.training.step import train_step

SUMS = 16
_COLUMNS = 1 << 40  # offset of column numbers, larger than any row number


def main() -> None:
    """Build the run that the flags define, and write sketches of its first steps."""
    out, steps, *flags = sys.argv[1:]
    world = int(os.environ.get("WORLD_SIZE", "1"))
    asked = checked_run(flags, world)
    try_assembly(asked, world)
    data = open_data(asked, progress=False)
    device = start_process_group(asked.config.comm)
    with torch_order():
        run = build(asked, device_of(device))
        take_first_weights(run)
        batches, _ = open_batches(data, asked, run.mesh, stage_table(asked.config, world), 0, windows_of(run.model))
        with closing(data), closing(batches):
            sketches = sketch_steps(run, batches, int(steps))
    if dist.get_rank() == 0:
        np.savez(Path(out), names=np.array(list(sketches)), sketches=torch.stack(list(sketches.values())).numpy())
    dist.destroy_process_group()


def sketch_steps(run: Run, batches: TrainBatches, steps: int) -> dict[str, Tensor]:
    """Train the first steps of a run with fresh weights, and sketch their tensors.

    Returns:
        "<step> <tensor>" → [SUMS] float64, the same on every rank, in the order in which a step computes them.
    """
    sketches: dict[str, Tensor] = {}
    for step in range(1, steps + 1):
        lr = learning_rate(step, run.config, batches.mixture.table)
        sketches |= {f"{step} {name}": x for name, x in _sketch_step(run, batches.next(), lr).items()}
    return sketches


def _sketch_step(run: Run, batches: list[Batch], lr: float) -> dict[str, Tensor]:
    named = dict(run.model.named_parameters())
    found: dict[str, Tensor] = {}
    outputs, update = Outputs(run), run.optimizer.step

    def sketch_gradients(*given: Any, **others: Any) -> None:
        found.update((f"gradient of {name}", _of_parameter(p.grad, p)) for name, p in reversed(named.items()))
        update(*given, **others)

    run.optimizer.step = sketch_gradients
    try:
        with outputs.recorded():
            train_step(run, batches, lr, False)
    finally:
        run.optimizer.step = update
    forward = {f"output of {name}": sketch for name, sketch in outputs.summed().items()}
    return forward | found | {f"{name} after the update": _of_parameter(p, p) for name, p in named.items()}


class Outputs:
    """Sketches the outputs of modules in the forward of a step, summed over its micro-batches.

    These modules have an output of [tokens, D]: the embedding, each block, its attention and feed-forward. Norms are
    left out, since shipped blocks fuse them with other operations.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._sums = run, dict[str, Tensor]()
        self._call, self._looking = -1, False  # number of the micro-batch; whether it is in its forward
        self._tokens = tokens_of_rank(run.config)
        self._places = torch.arange(self._tokens, device=run.mesh.device)  # of its tokens in the context-parallel group

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Sketch the modules' outputs within the context."""
        model, hooks = self._run.model, list[RemovableHandle]()
        compiled = self._run.config.compile.enable  # modules inside a compiled block call no hooks
        for name, module in model.named_modules():
            depth = name.count(".") + 1
            if name and depth <= (2 if compiled else 3):
                hooks.append(module.register_forward_hook(partial(self._look, name)))
        hooks.append(model.register_forward_pre_hook(self._begin, with_kwargs=True))
        hooks.append(model.register_forward_hook(lambda *_: self._end()))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def summed(self) -> dict[str, Tensor]:
        """Return the sketches by name of the module, summed over ranks. Collective."""
        for sums in self._sums.values():
            dist.all_reduce(sums)
        return {name: sums.cpu() for name, sums in self._sums.items()}

    def _begin(self, _module: nn.Module, _args: object, given: dict[str, Any]) -> None:
        self._call, self._looking = self._call + 1, True
        if (places := given["sequences"].places) is not None:
            self._places = places

    def _end(self) -> None:
        self._looking = False  # recomputation in backward is not sketched

    @torch.no_grad()
    def _look(self, name: str, _module: nn.Module, _inputs: object, y: object) -> None:
        mesh, dim = self._run.mesh, self._run.dims.dim
        if not self._looking or not isinstance(y, Tensor) or y.dim() != 2 or y.shape[1] != dim:
            return
        rows = len(y)
        if rows not in (self._tokens, self._tokens // mesh.tp_size):
            return
        first = (self._call * mesh.data_size + mesh.data_rank) * self._tokens * mesh.dp_size // mesh.data_size
        places, share = self._places, 1.0
        if rows == self._tokens:
            share /= mesh.tp_size  # every rank of the tensor-parallel group has all rows
        else:
            places = places[mesh.tp.get_local_rank() * rows :][:rows]
        sums = _sketch(y, first + places) * share
        self._sums[name] = self._sums[name] + sums if name in self._sums else sums


def _of_parameter(x: Tensor | None, parameter: nn.Parameter) -> Tensor:
    """Return the sketch of a parameter or its gradient `x`, gathered if it is sharded; zeros for None. Collective."""
    if x is None:
        return torch.zeros(SUMS, dtype=torch.float64)
    with torch.no_grad():
        laid_out = as_laid_out(local_data(x), parameter)  # type: ignore[arg-type]
        whole = laid_out.full_tensor() if isinstance(laid_out, DTensor) else laid_out
        return _sketch(whole.reshape(len(whole), -1), torch.arange(len(whole))).cpu()


def _sketch(x: Tensor, places: Tensor) -> Tensor:
    """Return [SUMS] float64: weighted sums of a matrix. `places`: numbers of its rows in the full tensor."""
    # Columns have other weights than rows, else a square matrix and its transpose would have the same sketch.
    rows, columns = (_weights(of, x.device) for of in (places, _COLUMNS + torch.arange(x.shape[1])))
    return ((rows.T @ x.double()) * columns.T).sum(dim=1)


def _weights(places: Tensor, device: torch.device) -> Tensor:
    """Return [n, SUMS] float64, each +1 or -1, which depends only on the place and the column."""
    numbers = places.cpu().numpy().astype(np.uint64)[:, None] * np.uint64(SUMS) + np.arange(SUMS, dtype=np.uint64)
    signs = (mix(numbers) & np.uint64(1)).astype(np.float64) * 2 - 1
    return torch.from_numpy(signs).to(device)


if __name__ == "__main__":
    leave(exit_code(main))
