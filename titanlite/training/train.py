"""Everything around the steps: data, processes, the run, its folder; then the loop, and how it ended."""

import math
import os
import re
import signal
from contextlib import ExitStack, suppress

import torch.distributed as dist

from titanlite.checkpoint.background import Background
from titanlite.checkpoint.collective import on_all_ranks, on_rank_0
from titanlite.checkpoint.publish import complete_steps, step_folder
from titanlite.checkpoint.resume import other_text
from titanlite.checkpoint.state import Checkpoints
from titanlite.config.check import last_step, sequences_per_step
from titanlite.config.recipe_schema import Float8Recipe, ModelDims, SaveList
from titanlite.config.schema import Config
from titanlite.config.write import to_toml
from titanlite.data.batches import TrainBatches, ValidationBatches
from titanlite.data.order import epochs
from titanlite.data.prepare import prepare
from titanlite.errors import DataError, FolderLostError, Problem, describe
from titanlite.forecast.memory import MemoryModel
from titanlite.forecast.suggest_flags import LEAST
from titanlite.kernels.device.channel import peer_failure
from titanlite.models.mistakes import blamed
from titanlite.observe.console import Console
from titanlite.observe.guard import Guard
from titanlite.observe.metrics import MetricsFile
from titanlite.observe.peak_flops import flops_per_token
from titanlite.observe.profiler import Profiler
from titanlite.observe.stall_report import RollCall
from titanlite.observe.status import Status
from titanlite.observe.wandb import WandbRun
from titanlite.observe.watchdog import Watchdog
from titanlite.parallel.process_group import leave_limits_to_watchdog, start_process_group
from titanlite.preflight.launcher import Launcher
from titanlite.preflight.run_folder import RunFolder
from titanlite.training.build import Run, build, fastest_attention
from titanlite.training.data_check import DataCheck
from titanlite.training.loop import Loop
from titanlite.training.out_of_memory import explained, foreseen, measure
from titanlite.training.receipt import add_data
from titanlite.training.report import Report
from titanlite.training.state import restore, tensors_of
from titanlite.training.stop import StopSignals

_PEER_ENDED = "another rank has ended, or the connection to it broke: its log or the launcher's output says why"
# By gloo and NCCL, among much else.
_SAID_OF_A_PEER = re.compile("connection (closed|reset) by peer|remote process exiting", re.IGNORECASE)


def train(
    config: Config,
    dims: ModelDims,
    save_list: SaveList | None,
    float8: Float8Recipe | None,
    folder: RunFolder,
    notices: list[str],
    warnings: list[str],
    launcher: Launcher | None = None,
) -> None:
    """Train until the last step, `job.stop_after` or a signal, whichever comes first.

    Args:
        config: checked.
        dims: the model's dimensions, overrides applied.
        save_list: which activations are kept; None: chosen to keep to `activation_checkpoint.budget_gib`.
        float8: arithmetic of the linear layers, or None.
        folder: claimed by rank 0.
        notices: what the checks and claiming it had to say.
        warnings: what of it the user may want to change.
        launcher: whose end ends the run; None: nobody's.

    Raises:
        TitanliteError: what the user can mend, the same on every rank.
    """
    with folder.write_errors_explained(), ExitStack() as cleanup:  # also where closing what failed fails again
        rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
        console = Console(rank, local_rank, config.training.steps, folder.logs)
        cleanup.callback(console.close)
        for notice in notices:
            console.notice(notice)
        for warning in warnings:
            console.warning(warning)
        saved = complete_steps(folder.checkpoints)
        step = saved[-1] if saved else 0
        guard = Guard(folder.status, rank)
        status = Status(folder.status, step, rank, console.warning, lambda: folder.is_ours)
        if rank == 0:
            guard.runs(math.inf)  # the others' first word comes when the file is that of this run

        def say_stopped() -> None:
            by = stop.received or signal.SIGINT.name
            if not stop.is_in_steps:
                status.stopped(step, by)
                console.notice(f"stopped by {by} before step {step + 1}")
                if by == signal.SIGTERM.name and int(os.environ.get("WORLD_SIZE", "1")) > 1:
                    console.notice("torchrun sends it, too, when another process has ended: its output says which")
                return
            done, by, saved = status.step, f"a second signal, {by}", complete_steps(folder.checkpoints)
            status.stopped(done, by)
            kept = f"the newest checkpoint is of step {saved[-1]}" if saved else "there is no checkpoint"
            console.notice(f"stopped at once by {by}, after step {done}; {kept}")

        def last_words() -> None:
            say_stopped()
            guard.close()

        stop = StopSignals(config.checkpoint.enable, last_words, launcher=launcher)
        try:
            cleanup.enter_context(stop)
            with folder.write_errors_explained():
                _train(config, dims, save_list, float8, folder, console, status, guard, stop, cleanup)
        except KeyboardInterrupt:
            with suppress(OSError):
                say_stopped()
            raise
        except BaseException as error:  # said before the cleanup, which may hang on what failed
            peer = peer_failure()
            if status.stall and isinstance(error, RuntimeError):  # of a rank that its own watchdog has ended
                peer = peer or TimeoutError(status.stall)
            if isinstance(error, RuntimeError) and _SAID_OF_A_PEER.search(str(error)):
                peer = peer or ConnectionError(_PEER_ENDED)
            mine = None
            if config.model.file and not peer:
                mine = blamed(error, os.path.abspath(config.model.file), folder.logs / f"rank{rank}.log")
            with suppress(OSError):  # of a full disk, which may be the error itself
                console.failed(peer or error)  # with the traceback
            if not isinstance(error, FolderLostError):  # of another job's folder, whose status is that one's
                with suppress(OSError):
                    status.failed(peer or mine or error)
            if told := peer or mine:
                raise told from error
            raise
        finally:
            guard.close()


def _train(
    config: Config,
    dims: ModelDims,
    save_list: SaveList | None,
    float8: Float8Recipe | None,
    folder: RunFolder,
    console: Console,
    status: Status,
    guard: Guard,
    stop: StopSignals,
    cleanup: ExitStack,
) -> None:
    """Make ready, train, and say how it ended; whatever is opened is closed by `cleanup`."""
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    shards = prepare(config.data.source, config.data, dims.vocab_size, progress=local_rank == 0)
    held_out = None
    if config.validation.enable:
        held_out = prepare(
            config.validation.source, config.data, dims.vocab_size, progress=local_rank == 0, key="validation.source"
        )

    device = start_process_group(config.comm)
    # After a failure the connections stay until the process ends: the others wait, and it can say what failed.
    cleanup.push(lambda error, *_: dist.destroy_process_group() if error is None else None)
    _check_same("data.source", shards.fingerprint)
    if held_out is not None:  # ranks that validate on unequal numbers of batches would wait for each other
        _check_same("validation.source", held_out.fingerprint)
    cleanup.enter_context(fastest_attention())
    memory = MemoryModel(config, dims, float8, dist.get_world_size())
    with explained(memory, save_list or LEAST, device):
        run = build(config, dims, save_list, float8, device)
    if text := foreseen(run.memory, save_list, measure(device)):
        console.warning(text)
    for text in run.warnings:
        console.warning(text)
    sources = {"data.source": shards} | ({"validation.source": held_out} if held_out else {})
    for key, source in sources.items():
        if source.files:
            console.notice(f"{key}: {source.files}")
        if any(shard.tokens and not shard.hashes for shard in source.meta.shards):
            what = "its token shards are of a version without hashes: of damage, only ids that are too large are found"
            console.notice(f"{key}: {what}; delete {source.folder}, and they are made again")
        for text in add_data(run.receipt, key, source.meta, dims.vocab_size):
            if rank == 0:
                console.warning(text)
    checkpoints = Checkpoints(folder.checkpoints, config.checkpoint.keep_latest_k, console.warning)
    per_step = sequences_per_step(config, dist.get_world_size())
    assert per_step is not None  # noqa: S101  # the config is checked
    start, state = restore(run, checkpoints, console, per_step)
    samples = int(state["samples"])
    data = {"corpus": shards.fingerprint, "tokenizer": shards.tokenizer}
    if text := other_text(step_folder(checkpoints.root, start), state, **data, strict=config.job.strict):
        console.warning(text)

    placed = {"dp_rank": run.mesh.dp_rank, "dp_size": run.mesh.dp_size, "device": device}
    placed |= {"local_batch_size": config.training.local_batch_size, "global_batch_size": per_step}
    seq_len, seed = config.training.seq_len, config.training.seed
    batches = TrainBatches(shards, seq_len=seq_len, seed=seed, position=samples, **placed)
    cleanup.callback(batches.close)
    count = epochs(config.training.steps, per_step, batches.n_samples, start, samples)
    console.notice(f"data.source: {shards.tokens:,} tokens, {count} in {config.training.steps:,} steps")
    validation = None
    if held_out is not None:
        validation = ValidationBatches(held_out, seq_len=seq_len, steps=config.validation.steps, **placed)

    validates_first = validation is not None and bool(state.get("validation_due"))
    metrics = _open(folder, run, start, validates_first, console)
    cleanup.callback(lambda: metrics.close() if metrics else None)
    if metrics is not None and metrics.earlier is not None:
        console.notice(f"starting at step 0; the metrics of the earlier start are kept in {metrics.earlier}")
    # Rows are on disk before the checkpoint that counts on them: somebody, or the disk, has lost these.
    if metrics is not None and metrics.last_step < start - start % config.metrics.log_freq:
        console.warning(f"{folder.metrics} has no rows of the steps from {metrics.last_step + 1} to {start}")
    status.progress(start)
    wandb = None
    if metrics is not None and config.metrics.wandb != "off":
        wandb = WandbRun(config, folder.path, folder.metrics, console.warning)
    cleanup.push(lambda error, *_: wandb.finish(exit_code=int(error is not None)) if wandb else None)
    flops = flops_per_token(run.model, dims, seq_len)
    report = Report(
        config,
        flops,
        device,
        dist.get_world_size(),
        samples,
        start,
        console,
        metrics,
        status,
        wandb,
        per_step,
        batches.n_samples,
    )
    report.skipped_in_a_row = int(state.get("skipped_in_a_row", 0))
    limit, log = config.comm.init_timeout_seconds, folder.logs / f"rank{rank}.log"
    world = dist.get_world_size()
    roll_call = RollCall(dist.distributed_c10d._get_default_store(), rank, world) if world > 1 else None
    watchdog = Watchdog(limit, log, rank, status.failed, roll_call, status.stalled, guard)
    cleanup.enter_context(watchdog)
    profiler = cleanup.enter_context(Profiler(config.profiling, folder.profile, rank, device, start + 1, console))
    background = None
    if config.checkpoint.enable and config.checkpoint.async_mode == "async":
        background = Background(checkpoints, tensors_of(run))
    leave_limits_to_watchdog()
    check = DataCheck(list(sources.values()))
    cleanup.callback(check.close)
    loop = Loop(
        run, batches, validation, checkpoints, background, report, profiler, watchdog, stop, folder, check, data
    )
    # Not earlier: what waits for a disk or for other hosts must end at the first signal, and has nothing to save.
    stop.begin_steps()
    cleanup.callback(stop.close)  # before what else is closed, which has nothing to save either
    with explained(run.memory, run.save_list, device):
        if validates_first:
            loop.validate(start)
        last = loop.train(start)
    is_idle = start >= last_step(config)  # which `restore` has said
    if is_idle and status.idle(last >= config.training.steps):
        return
    if last >= config.training.steps:
        status.finished(last)
        return
    at_limit = 0 < config.job.stop_after <= last
    ended_by = stop.received or ("job.stop_after" if at_limit else stop.of_another)
    if not is_idle:
        console.notice(f"stopped by {ended_by} after step {last}")
    status.stopped(last, ended_by)


def _open(folder: RunFolder, run: Run, start: int, validates_first: bool, console: Console) -> MetricsFile | None:
    """Open the files that rank 0 owns. If one cannot be used, every rank hears of it and ends."""
    opened: list[MetricsFile] = []

    def open_all() -> None:
        with folder.write_errors_explained():
            opened.append(MetricsFile(folder.metrics, start, validates_first, console.warning, lambda: folder.is_ours))
            # A start that has nothing to train leaves the config that the run was trained with.
            if start < last_step(run.config) or not folder.config.exists():
                kept = folder.record(to_toml(run.config), to_toml(run.save_list) if run.chosen is not None else None)
                if kept is not None:
                    console.notice(f"the config that was in the folder is kept in {kept}")

    on_rank_0(open_all)
    return opened[0] if opened else None


def _check_same(key: str, corpus: str) -> None:
    """Raise if ranks hold different data, as hosts with different files, or Pythons, do."""
    of_ranks = on_all_ranks(lambda: corpus)
    different = [rank for rank, other in enumerate(of_ranks) if other != of_ranks[0]]
    if different:
        seen = f"different tokens on rank {different[0]} than on rank 0"
        want, fix = (
            "the same files on every host",
            "name files of your own; python_stdlib differs between Python versions",
        )
        raise DataError(describe("data", [Problem(key, seen, want, fix)]))
