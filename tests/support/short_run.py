"""A few real training steps of `configs/debug.toml`'s model under any layout, and everything that they did."""

import argparse
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.support.batches import batches_of_source
from tests.support.ranks import run_ranks
from tests.support.shared_plan import plan_for_all_ranks
from titanlite.checkpoint import store
from titanlite.config.schema import Config
from titanlite.config.stages import sequences_per_step
from titanlite.data.batches import TrainBatches
from titanlite.data.prepare import prepare
from titanlite.device import CPU
from titanlite.float8.weight import as_laid_out, local_data
from titanlite.models.llama3 import Llama3
from titanlite.observe.peak_flops import windows_of
from titanlite.optimizers.sharded import ShardedOptimizer
from titanlite.parallel import fsdp
from titanlite.parallel.context import token_group
from titanlite.parallel.initialise import initialise
from titanlite.parallel.mesh import Mesh
from titanlite.preflight.checked_run import CheckedRun, checked_run
from titanlite.training import assemble as assemble_file
from titanlite.training import build as build_file
from titanlite.training.attention import torch_order
from titanlite.training.build import Run, build
from titanlite.training.schedule import learning_rate
from titanlite.training.state import take_first_weights, tensors_of
from titanlite.training.step import train_step

DEBUG = Path(__file__).parents[2] / "configs" / "debug.toml"
STEPS = 20


@dataclass
class Trained:
    """What a run did. Tensors are whole, gathered from all ranks."""

    weights: dict[str, Tensor]  # before the first step
    gradients: dict[str, Tensor]  # of the first step, reduced, not clipped
    losses: Tensor  # [steps]
    norms: Tensor  # [steps]


def whole_model(run: Run) -> Llama3:
    """The model of a run in one piece, with the same first weights."""
    model = Llama3(run.dims, run.config.training.seq_len)
    model.fill_buffers()
    initialise(model, run.config.training.seed)
    return model


def checked(folder: Path, world: int, flags: Sequence[str] = ()) -> CheckedRun:
    """`configs/debug.toml` and flags, on a little real text and in batches that one CPU core is quick with."""
    text = folder / "corpus.txt"
    text.write_text(Path(argparse.__file__).read_text())
    small = {
        "data.source": str(text),
        "data.cache_dir": str(folder / "cache"),
        "training.steps": STEPS,
        "training.seq_len": 64,
        "training.local_batch_size": 1,
        "training.global_batch_size": 4,
        "validation.enable": "false",
        "data.document_mask": "false",
    }
    given = [word for key, value in small.items() for word in (f"--{key}", str(value))]
    asked = checked_run(["--config", str(DEBUG), *given, *flags], world_size=world)
    plan_for_all_ranks(asked)
    return asked


def assemble(asked: CheckedRun) -> Run:
    """The run, on this rank."""
    run = build(asked, CPU)
    take_first_weights(run)
    return run


def batches_of(run: Run) -> TrainBatches:
    """This rank's batches; close them."""
    config, mesh = run.config, run.mesh
    shards = prepare(config.data.source, config.data, run.dims.vocab_size, progress=False)
    return batches_of_source(
        shards,
        seq_len=config.training.seq_len,
        seed=config.training.seed,
        global_batch_size=sequences_per_step(config, dist.get_world_size()),
        local_batch_size=config.training.local_batch_size,
        dp_rank=mesh.data_rank,
        dp_size=mesh.data_size,
        device=mesh.device,
        context=token_group(mesh, windows_of(run.model)),
        separator=shards.separator if config.data.document_mask else None,
    )


def compute_in_float64() -> None:
    """Let this process assemble runs whose weights, activations and gradients are float64, and whose update is none."""
    model, policy, last = assemble_file.build_model, fsdp.MixedPrecisionPolicy, build_file.finalize

    def finalize_wide(model: nn.Module, config: Config, mesh: Mesh) -> None:
        last(model, replace(config, training=replace(config.training, mixed_precision_reduce="float64")), mesh)  # type: ignore[arg-type]

    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign,assignment]
    assemble_file.build_model = lambda *given: model(*given).double()
    fsdp.MixedPrecisionPolicy = lambda **_: policy(cast_forward_inputs=False)  # type: ignore[assignment,misc]
    build_file.finalize = finalize_wide
    ShardedOptimizer.step = lambda *_: None  # type: ignore[method-assign,assignment]


def take_steps(run: Run, steps: int = STEPS) -> Tensor:
    """Train; returns [steps, 2], loss and gradient norm of each step."""
    with closing(batches_of(run)) as batches, torch_order():
        rates = [learning_rate(step, run.config) for step in range(1, steps + 1)]
        found = [train_step(run, batches.next(), lr, False) for lr in rates]
        return torch.stack([torch.stack((result["loss"], result["grad_norm"])) for result in found])


def count_graphs(file: Path) -> Callable[[Run], None]:
    """Write into a file, in each step of each rank, how many graphs have been compiled since now."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def counted(run: Run) -> None:
        norm = run.optimizer.norm

        def count_then_norm(*given: object) -> Tensor:
            with file.open("a") as lines:
                lines.write(f"{torch._dynamo.utils.counters['stats']['unique_graphs']}\n")
            return norm(*given)  # type: ignore[arg-type]

        run.optimizer.norm = count_then_norm  # type: ignore[method-assign,assignment]

    return counted


def whole(parameter: Tensor) -> Tensor:
    """A copy of a parameter or gradient, gathered from all ranks."""
    laid_out = as_laid_out(local_data(parameter), parameter)  # type: ignore[arg-type]
    return laid_out.full_tensor().clone() if isinstance(laid_out, DTensor) else laid_out.clone()


def require_loads(before: CheckedRun, after: CheckedRun, folder: Path) -> None:
    """Train two steps, and load the checkpoint into another run: equal weights, moments, averages; a rank's part.

    Args:
        before: whose checkpoint is written.
        after: into which it is read, of another layout.
        folder: for the checkpoint.
    """
    folder.mkdir(exist_ok=True)
    first, second = map(assemble, (before, after))
    take_steps(first, 2)
    store.write(folder, tensors_of(first))
    store.read(folder, tensors_of(second))
    theirs, ours = tensors_of(first), tensors_of(second)
    assert theirs.keys() == ours.keys()
    names = [name for name in theirs if name.startswith(("model/", "optimizer/", "ema/"))]
    # Each is gathered by all ranks, which must not stop at the first.
    assert any([bool(whole(theirs[name]).any()) for name in names if "exp_avg" in name])  # noqa: C419
    different = [name for name in names if not torch.equal(whole(theirs[name]), whole(ours[name]))]
    assert not different, different
    dist.barrier()


def train(
    folder: Path,
    world: int,
    flags: Sequence[str] = (),
    *,
    steps: int = STEPS,
    change: Callable[[Run], object] = lambda run: None,
    wide: bool = False,
    timeout_s: float = 60,
) -> Trained:
    """Train on `world` ranks and return what they did.

    Args:
        folder: for the corpus, its shards and the ranks' logs.
        world: number of ranks.
        flags: of the command line.
        steps: to take.
        change: called with the assembled run before its first step, to break or to observe it.
        wide: compute in float64, without updates.
        timeout_s: for all of it.
    """
    asked = checked(folder, world, flags)

    def body() -> None:
        if wide:
            compute_in_float64()
        run = assemble(asked)
        named = dict(run.model.named_parameters())
        weights = {name: whole(p) for name, p in named.items()}
        change(run)
        gradients, update = {}, run.optimizer.step

        def record_then_update(*args: object) -> None:
            if not gradients:
                gradients.update({name: whole(p.grad) for name, p in named.items()})
            update(*args)

        run.optimizer.step = record_then_update
        results = take_steps(run, steps)
        if dist.get_rank() == 0:
            torch.save(Trained(weights, gradients, results[:, 0], results[:, 1]), folder / "trained.pt")

    run_ranks(body, folder, world, timeout_s)
    return torch.load(folder / "trained.pt", weights_only=False)
