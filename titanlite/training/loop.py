"""The training loop: restore, step, validate, save, stop.

Reading order of training: `build.py` assembles, `step.py` is one step, this file repeats it.
"""

import os
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import torch.distributed as dist
from torch import Tensor

from titanlite.checkpoint.collective import on_rank_0
from titanlite.checkpoint.rng import restore_rng, rng_state
from titanlite.checkpoint.state import Checkpoints
from titanlite.config.recipe_schema import Float8Recipe, ModelRecipe, SaveList
from titanlite.config.schema import Config
from titanlite.data.batches import Batch, TrainBatches, ValidationBatches
from titanlite.data.prepare import prepare
from titanlite.float8.convert import precompute_scales
from titanlite.observe.console import Console
from titanlite.observe.metrics import MetricsFile
from titanlite.observe.profiler import Profiler
from titanlite.observe.status import Status
from titanlite.observe.wandb import WandbRun
from titanlite.observe.watchdog import Watchdog
from titanlite.parallel.initialise import local_data
from titanlite.parallel.process_group import limit_collectives, start_process_group
from titanlite.run_folder import RunFolder
from titanlite.training.build import Run, build, fastest_attention
from titanlite.training.optimizer import as_laid_out
from titanlite.training.receipt import complete_receipt
from titanlite.training.report import InFlight, Report
from titanlite.training.schedule import learning_rate
from titanlite.training.step import train_step, validation_loss
from titanlite.training.stop import StopSignals

# A collective that hangs ends the run with NCCL's or gloo's own message first, which names it.
_WATCHDOG_GRACE_S = 60


def train(
    config: Config,
    sizes: ModelRecipe,
    save_list: SaveList,
    float8: Float8Recipe | None,
    folder: RunFolder,
    notices: list[str],
) -> None:
    """Train until the last step, `job.stop_after` or a signal, whichever comes first.

    Args:
        config: checked.
        sizes: the model's dimensions, overrides applied.
        save_list: which activations are kept.
        float8: arithmetic of the linear layers, or None.
        folder: claimed by rank 0.
        notices: what claiming it had to say.

    Raises:
        TitanliteError: what the user can mend, the same on every rank.
    """
    with ExitStack() as cleanup:
        rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
        console = Console(rank, local_rank, config.training.steps, folder.logs)
        cleanup.callback(console.close)
        for notice in notices:
            console.notice(notice)
        show_progress = local_rank == 0
        shards = prepare(config.data.source, config.data, sizes.vocab_size, show_progress)
        held_out = None
        if config.validation.enable:
            held_out = prepare(config.validation.source, config.data, sizes.vocab_size, show_progress)

        device = start_process_group(config.comm)
        # After a failure the connections stay until the process ends: the others wait, and it can say what failed.
        cleanup.push(lambda error, *_: dist.destroy_process_group() if error is None else None)
        cleanup.enter_context(fastest_attention())
        run = build(config, sizes, save_list, float8, device)
        per_step = config.training.global_batch_size or config.training.local_batch_size * run.mesh.dp_size
        checkpoints = Checkpoints(folder.checkpoints, config.checkpoint.keep_latest_k)
        start, state = _restore(run, checkpoints, console)
        samples = int(state["samples"])
        if state.get("corpus", shards.fingerprint) != shards.fingerprint:
            console.warning("data.source holds another text than before: the samples of this epoch are dealt anew")
        placed = {"dp_rank": run.mesh.dp_rank, "dp_size": run.mesh.dp_size, "device": device}
        placed |= {"local_batch_size": config.training.local_batch_size, "global_batch_size": per_step}
        seq_len, seed = config.training.seq_len, config.training.seed
        batches = TrainBatches(shards, seq_len=seq_len, seed=seed, position=samples, **placed)
        cleanup.callback(batches.close)
        validation = None
        if held_out is not None:
            validation = ValidationBatches(held_out, seq_len=seq_len, steps=config.validation.steps, **placed)

        status, metrics = _open(folder, start)
        wandb = WandbRun(config, folder.path, console.warning) if rank == 0 and config.metrics.wandb != "off" else None
        report = Report(
            config, sizes, device, dist.get_world_size(), samples, start, console, metrics, status, wandb, per_step
        )
        cleanup.push(lambda error, *_: wandb.finish(exit_code=int(error is not None)) if wandb else None)
        cleanup.callback(lambda: metrics.close() if metrics else None)
        limit, log = config.comm.init_timeout_seconds + _WATCHDOG_GRACE_S, folder.logs / f"rank{rank}.log"
        watchdog = cleanup.enter_context(Watchdog(limit, log, rank, on_timeout=status.failed if status else None))
        profiler = cleanup.enter_context(Profiler(config.profiling, folder.profile, rank, device, start + 1, console))
        # Not earlier: what waits for a disk or for other hosts must end at the first signal, and has nothing to save.
        stop = cleanup.enter_context(StopSignals())
        try:
            if validation is not None and state.get("validation_due"):
                report.validation(start, _validate(run, validation, start, watchdog))
            last = _loop(
                run,
                start,
                batches,
                validation,
                checkpoints,
                report,
                profiler,
                watchdog,
                stop,
                folder,
                shards.fingerprint,
            )
        except BaseException as error:
            with suppress(OSError):  # of a full disk, which may be the error itself
                if status:
                    status.failed(error)
            raise
        at_limit = 0 < config.job.stop_after <= last
        ended_by = stop.received or ("job.stop_after" if at_limit else "a signal to another rank")
        if last < config.training.steps:
            console.notice(f"stopped by {ended_by} after step {last}")
        if status and last < config.training.steps:
            status.stopped(last, ended_by)
        elif status:
            status.finished(last)


def _loop(
    run: Run,
    start: int,
    batches: TrainBatches,
    validation: ValidationBatches | None,
    checkpoints: Checkpoints,
    report: Report,
    profiler: Profiler,
    watchdog: Watchdog,
    stop: StopSignals,
    folder: RunFolder,
    corpus: str,
) -> int:
    """Take the steps after `start`; returns the last one taken."""
    config = run.config
    last = min(config.training.steps, config.job.stop_after or config.training.steps)
    in_flight: deque[InFlight] = deque()
    stopping, step = False, start
    if start >= last:
        report.console.notice(f"nothing to do: {last} steps were asked for, {start} are done")
    report.restart_clock()
    for step in range(start + 1, last + 1):
        watchdog.progress(step, "step")
        micro_batches, lr = batches.next(), learning_rate(step, config)
        result = train_step(run, micro_batches, lr, stop.received is not None)
        in_flight.append(InFlight(step, lr, result, batches.wait_seconds))
        profiler.step(step)

        validate = validation is not None and (step % config.validation.freq == 0 or step == config.training.steps)
        save = config.checkpoint.enable and (step % config.checkpoint.interval == 0 or step == last)
        # Steps are read one step late, but before anything that relies on them. All ranks read the same numbers.
        while len(in_flight) > (0 if validate or save or stopping or step in (start + 1, last) else 1):
            outcome = in_flight.popleft().read()
            stopping |= outcome.stop_asked
            report.step(outcome)
        if step == start + 1:
            complete_receipt(run, folder, report.console)
            _limit(config.comm.train_timeout_seconds, watchdog)
            report.restart_clock()
        if validate and validation is not None and not stopping:
            _limit(config.comm.init_timeout_seconds, watchdog)
            report.validation(step, _validate(run, validation, step, watchdog))
        if save or (stopping and config.checkpoint.enable):
            watchdog.progress(step, "checkpoint")
            _limit(config.comm.init_timeout_seconds, watchdog)
            report.sync()
            state = {"samples": batches.position, "corpus": corpus, "validation_due": validate and stopping}
            path = checkpoints.save(step, _tensors(run), state)
            report.console.notice(f"saved {path}")
        if validate or save:
            _limit(config.comm.train_timeout_seconds, watchdog)
            report.restart_clock()
        if stopping:
            break
    return step


def _limit(seconds: float, watchdog: Watchdog) -> None:
    """Set how long a collective, and a phase, may take: short in a step, long where a disk or a compiler is at work."""
    limit_collectives(seconds)
    watchdog.set_timeout(seconds + _WATCHDOG_GRACE_S)


def _validate(run: Run, validation: ValidationBatches, step: int, watchdog: Watchdog) -> float:
    """Mean loss over all targets of the held-out source, the same on every rank and under any layout."""

    def watched() -> Iterator[Batch]:
        for batch in validation:
            watchdog.progress(step, "validation")  # it may take longer than any one batch is allowed to
            yield batch

    run.model.eval()
    total, targets = validation_loss(run, watched()).tolist()
    run.model.train()
    return total / targets


def _tensors(run: Run) -> dict[str, Tensor]:
    """Everything of a run that a checkpoint holds; loading into these tensors restores it."""
    names = dict(run.model.named_parameters())
    weights = {f"model/{name}": as_laid_out(local_data(p), p) for name, p in names.items()}
    return {**weights, **run.optimizer.state(), **rng_state()}


def _open(folder: RunFolder, start: int) -> tuple[Status, MetricsFile] | tuple[None, None]:
    """The files that rank 0 owns. If one cannot be used, every rank hears of it and ends."""
    opened: list[tuple[Status, MetricsFile]] = []

    def open_both() -> None:
        metrics = MetricsFile(folder.metrics, start)
        opened.append((Status(folder.status, start), metrics))

    on_rank_0(open_both)
    return opened[0] if opened else (None, None)


def _restore(run: Run, checkpoints: Checkpoints, console: Console) -> tuple[int, dict[str, Any]]:
    """Load the checkpoint that `checkpoint.resume` names.

    Returns:
        The last step done, and what was saved beside the tensors; 0 and no samples for a fresh start.
    """
    fresh = 0, {"samples": 0}
    if not run.config.checkpoint.enable:
        return fresh
    step = checkpoints.choose(run.config.checkpoint.resume)
    if step is None:
        return fresh
    tensors = _tensors(run)
    state, notices = checkpoints.load(step, tensors)
    restore_rng(tensors)
    precompute_scales(run.parameters, run.mesh.fsdp)
    for notice in (f"resumed from step {step}", *notices):
        console.notice(notice)
    return step, state
