"""Open everything that a run needs (data, processes, model, files, watchdog), run the loop, and report its end."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import torch
import torch.distributed as dist

from titanlite.checkpoint.background import Background
from titanlite.checkpoint.branch import remember_branch
from titanlite.checkpoint.collective import on_rank_0
from titanlite.checkpoint.mirror import STOP_S, Mirror
from titanlite.checkpoint.state import Checkpoints
from titanlite.config.check import last_step
from titanlite.config.held_out import samples_of
from titanlite.config.stages import largest_stage
from titanlite.config.write import to_toml
from titanlite.data.mixture import many_epochs
from titanlite.data.stages import StageTable, stage_table
from titanlite.device import device_of
from titanlite.float8.weight import local_data
from titanlite.forecast.memory import MemoryModel
from titanlite.forecast.search import LEAST
from titanlite.observe.console import Console
from titanlite.observe.experts_file import ExpertsFile
from titanlite.observe.metrics import MetricsFile, Observer
from titanlite.observe.peak_flops import token_flops_of, windows_of
from titanlite.observe.peak_memory import GATHERED
from titanlite.observe.profiler import Profiler
from titanlite.observe.run_facts import run_facts, tags_of
from titanlite.observe.samples_file import SamplesFile
from titanlite.observe.shared_wait import SharedWait
from titanlite.observe.stall_report import StallReport
from titanlite.observe.step_profile import OF_EXPERTS
from titanlite.observe.tensorboard import TensorBoardFile, tensorboard_entry
from titanlite.observe.trace_spans import ProfiledRun
from titanlite.observe.wandb import WandbRun
from titanlite.observe.watchdog import Watchdog
from titanlite.parallel.fsdp import memory_of_gathered
from titanlite.parallel.process_group import leave_limits_to_watchdog, ranks_of_a_host, start_process_group
from titanlite.preflight.checked_run import CheckedRun
from titanlite.preflight.launcher import Launcher
from titanlite.preflight.run_folder import RunFolder
from titanlite.preflight.take_up_mirror import claim_of
from titanlite.training.attention import torch_order
from titanlite.training.build import Run, build
from titanlite.training.data import mask_entry, open_batches, open_data, report_data, require_same_data
from titanlite.training.data_check import DataCheck
from titanlite.training.data_wait import DataWait
from titanlite.training.evaluation import open_evaluation
from titanlite.training.feed import Feed
from titanlite.training.loop import Loop
from titanlite.training.measures import measures_of
from titanlite.training.out_of_memory import explained, foreseen, measure
from titanlite.training.report import Report
from titanlite.training.samples import Sampler
from titanlite.training.schedule import change_of_rate
from titanlite.training.session import Session
from titanlite.training.stages import add_stages, require_same_steps
from titanlite.training.state import Start, restore, tensors_of
from titanlite.training.summary import first_lines


def train(
    asked: CheckedRun,
    folder: RunFolder,
    notices: list[str],
    warnings: list[str],
    launcher: Launcher | None = None,
    is_verbose: bool = False,
) -> None:
    """Train until the last step, `job.stop_after` or a signal, whichever comes first.

    Args:
        asked: the checked run.
        folder: of the run; rank 0 has claimed it.
        notices: of the checks, to be logged.
        warnings: of the checks, to be logged.
        launcher: when it ends, the run stops; None: it is not watched.
        is_verbose: whether to print all that is logged.

    Raises:
        TitanliteError: an error that the user can fix; the same on every rank.
    """
    with folder.write_errors_explained(), ExitStack() as cleanup:  # also for errors when files are closed
        rank, local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
        steps, validates = asked.config.training.steps, asked.config.validation.enable
        console = Console(rank, local_rank, steps, folder.logs, has_validation=validates, is_verbose=is_verbose)
        cleanup.callback(console.close)
        for notice in notices:
            console.notice(notice)
        for warning in warnings:
            console.warning(warning)
        last = cleanup.enter_context(ExitStack())
        with Session(asked, folder, console, launcher) as session:  # reports the end before the cleanup, which may hang
            cleanup.enter_context(session.stop)
            with folder.write_errors_explained():
                _train_in_session(session, cleanup, last)


def _train_in_session(session: Session, cleanup: ExitStack, last_cleanup: ExitStack) -> None:
    """Open what the run needs, train, and report the end. `cleanup` closes everything later, then `last_cleanup`."""
    asked, folder, console, config = session.asked, session.folder, session.console, session.asked.config

    # Data and processes. After a failure connections remain open until this process ends, so that it can report first.
    data = cleanup.enter_context(closing(open_data(asked, progress=session.local_rank == 0)))
    device, world = start_process_group(config.comm), dist.get_world_size()
    cleanup.push(lambda error, *_: dist.destroy_process_group() if error is None else None)
    require_same_data(data)

    # The run, and the step from which it goes on.
    cleanup.enter_context(torch_order())
    run = _build(asked, device, console)
    report_data(data, run.receipt, asked, console, session.rank)
    keep, best = config.checkpoint.keep_latest_k, config.checkpoint.keep_best
    checkpoints = Checkpoints(folder.checkpoints, keep, console.warning, best)
    restored = restore(run, checkpoints, console, data.identity)
    start, state = restored.step, restored.state

    # Its batches. `data.stop_waiting` runs before `batches.close`, whose thread may wait for tokens.
    table = stage_table(config, world, state.past)
    require_same_steps(table, config)
    batches, validation = open_batches(data, asked, run.mesh, table, start, windows_of(run.model))
    cleanup.callback(batches.close)
    cleanup.callback(data.stop_waiting)
    new = {name: n for name, n in batches.mixture.units.items() if data.keys.get(name) not in asked.inputs.tokens}
    run.receipt.add_later(lambda: mask_entry(data, config, batches))
    add_stages(run.receipt, config, batches.mixture, start)
    evaluation = open_evaluation(asked, run)
    measured = measures_of(config, validation, restored, console.warning)

    # The observers, and the lines before the first step.
    observers = _open_observers(session, run, restored, table, cleanup)
    observers += _open_mirror(session, checkpoints, last_cleanup)
    session.status.progress(start)
    console.measure_by(table.tokens)
    report = Report(config, batches.mixture, world, token_flops_of(run.model, run.dims), device, console, observers)
    report.skipped_in_a_row = state.skipped_in_a_row
    if session.rank == 0:
        for text in many_epochs(config, table, new):
            console.warning(text)
        for line in (*first_lines(run, data.train, batches.mixture, start, folder), *table.notes):
            console.notice(line)

    # Work beside the steps: watchdog, traces, checkpoints in the background, checks of the hashes of data.
    shared_wait = SharedWait(_store()) if data.growing and world > 1 else None
    if shared_wait is not None:
        session.stop.tell_others = shared_wait.stop
    watchdog = cleanup.enter_context(_watchdog(session, shared_wait))
    profiler = cleanup.enter_context(_profiler(session, run, start))
    is_async = config.checkpoint.enable and config.checkpoint.async_mode == "async"
    background = Background(checkpoints, tensors_of(run)) if is_async else None
    leave_limits_to_watchdog()
    data_check = cleanup.enter_context(closing(DataCheck(list(data.sources.values()))))

    def stops() -> bool:
        return session.stop.received is not None or (background is not None and background.has_failed)

    # The steps. Before and after the steps a signal ends the process at once: the process has nothing to save, and may
    # be waiting for a disk or other hosts.
    wait = DataWait(data, run.dims.vocab_size, run.receipt, console, session.rank == 0, shared_wait)
    loop = Loop(
        run=run,
        feed=Feed(batches, data_check, wait, run.mesh.context, watchdog, stops, config.checkpoint.enable),
        validation=validation,
        sampler=Sampler(asked, run) if samples_of(config) else None,
        evaluation=evaluation,
        checkpoints=checkpoints,
        background=background,
        report=report,
        profiler=profiler,
        watchdog=watchdog,
        folder=folder,
        identity_of_data=data.identity,
        measured=measured,
    )
    session.stop.begin_steps()
    cleanup.callback(session.stop.close)
    with explained(lambda: run.memory, run.save_list, device):
        loop.measures_due = state.validation_due and not loop.measure(start)
        last = start if loop.measures_due else loop.train(start)
    session.ended(start, last, table, loop.measures_due)


def _build(asked: CheckedRun, device: torch.device, console: Console) -> Run:
    """Build the run, and log its warnings."""

    def memory() -> MemoryModel:
        largest, world, host = largest_stage(asked.config), dist.get_world_size(), ranks_of_a_host()
        return MemoryModel(largest, asked.dims, asked.float8, asked.optimizer, world, host=host)

    with explained(memory, asked.save_list or LEAST, device):
        run = build(asked, device_of(device))
    if text := foreseen(run.memory, asked.save_list, measure(device)):
        console.warning(text)
    for text in run.warnings:
        console.warning(text)
    return run


def _open_observers(
    session: Session, run: Run, restored: Start, table: StageTable, cleanup: ExitStack
) -> list[Observer]:
    """Return the observers: console and status; on rank 0 also files, wandb and TensorBoard, which `cleanup` closes.

    If rank 0 cannot open a file, every rank raises.
    """
    observers: list[Observer] = [session.console, session.status]

    def open_all() -> None:
        with session.folder.write_errors_explained():
            for observer in _files_and_pages(session, run, restored, table):
                observers.append(observer)
                cleanup.push(lambda error, *_, of=observer: of.close(has_failed=error is not None))

    on_rank_0(open_all)
    if session.asked.config.metrics.tensorboard:
        shown = next((each for each in observers if isinstance(each, TensorBoardFile)), None)
        run.receipt.add_later(lambda: tensorboard_entry(session.folder.tensorboard, shown))
    return observers


def _open_mirror(session: Session, checkpoints: Checkpoints, last_cleanup: ExitStack) -> list[Observer]:
    """Return the mirror of checkpoints, on rank 0 of a run that has one. `last_cleanup` waits for it."""
    config, stop = session.asked.config, session.stop
    if session.rank != 0 or not config.checkpoint.mirror:
        return []
    mirror = Mirror(config.checkpoint, session.folder.path, claim_of(session.folder, config), session.console)
    checkpoints.held = mirror.held

    def wait(error: type[BaseException] | None, *_: object) -> None:
        if error is not None and not stop.is_in_steps:  # nothing was saved
            return
        is_done = error is None and not stop.received and session.status.step >= last_step(config)
        left_s = (stop.received_at or time.monotonic()) + STOP_S - time.monotonic()
        mirror.wait(config.checkpoint.mirror_wait_seconds if is_done else max(0.0, left_s))

    last_cleanup.push(wait)
    return [mirror]


def _files_and_pages(session: Session, run: Run, restored: Start, table: StageTable) -> Iterator[Observer]:
    """Yield the files, wandb run and TensorBoard page that a run writes on rank 0, and record its config."""
    config, folder, console, start = session.asked.config, session.folder, session.console, restored.step
    is_idle = start >= last_step(config)
    yield (metrics := MetricsFile(folder.metrics, start, restored.state.validation_due))
    if metrics.earlier is not None:
        console.notice(f"starting at step 0; the metrics of the earlier start are kept in {metrics.earlier}")
    # Rows are on disk before a checkpoint is saved, so missing rows were lost afterwards.
    if not restored.is_branch and metrics.last_step < start - start % config.metrics.log_freq:
        console.warning(f"{folder.metrics} has no rows of the steps from {metrics.last_step + 1} to {start}")
    if samples_of(config) or folder.samples.exists():  # rows of steps that are trained again go
        yield SamplesFile(folder.samples, start, restored.state.validation_due)
    if run.routers is not None:
        yield ExpertsFile(folder.experts, start, config.training.steps)
    if not is_idle or not folder.config.exists():  # else the config of the last training remains
        if restored.is_branch:
            remember_branch(config.checkpoint.initial_load_path, folder.path, start)
        kept = folder.record(to_toml(config), to_toml(run.save_list) if run.chosen is not None else None)
        if kept is not None:
            console.notice(f"the config that was in the folder is kept in {kept}")
    if not is_idle and (text := change_of_rate(config, start, restored.state.learning_rate, table)):
        console.notice(text)
    if config.metrics.wandb != "off" or config.metrics.tensorboard:
        facts = run_facts(run.n_elements, dist.get_world_size(), run.mesh.device)
    if config.metrics.wandb != "off":
        tags = tags_of(config, facts)
        yield WandbRun(config, folder.path, folder.metrics, console.warning, facts=facts, tags=tags)
    if config.metrics.tensorboard:
        yield (page := TensorBoardFile(folder.tensorboard, folder.metrics, folder.samples, console.warning))
        page.describe(config, facts)


def _profiler(session: Session, run: Run, start: int) -> Profiler:
    """Make the profiler, with the facts of a run that a profile needs besides its trace."""
    axes = {name: run.mesh.all[name].get_group() for name in ("dp_replicate", "dp_shard", "tp")}
    if run.mesh.context is not None:
        axes["cp"] = run.mesh.context.get_group()
    if (experts := run.mesh.experts) is not None:
        axes["ep"] = experts["ep"].get_group()
        axes |= {f"{name}{OF_EXPERTS}": experts[name].get_group() for name in ("dp_replicate", "dp_shard")}
    shards = [local_data(parameter) for parameter in run.parameters]
    averages = [] if run.average is None else [*run.average.shards.values()]
    held = {
        "parameters": shards,
        "optimizer": [*run.optimizer.state_tensors(), *averages],
        GATHERED: memory_of_gathered(run.model),
    }
    traced = ProfiledRun(
        rank=session.rank,
        world=dist.get_world_size(),
        device=run.mesh.device.type,
        axes={group.group_name: name for name, group in axes.items() if group.size() > 1},
        groups={name: dist.get_process_group_ranks(group) for name, group in axes.items()},
        held={name: sum(tensor.nbytes for tensor in tensors) for name, tensors in held.items()},
        forecast=run.predicted.categories() if run.predicted is not None else {},
    )
    profiling, folder = session.asked.config.profiling, session.folder.profile
    return Profiler(profiling, folder, traced, run.mesh.device, start + 1, session.console)


def _watchdog(session: Session, shared_wait: SharedWait | None) -> Watchdog:
    """Make this rank's watchdog. If a rank hangs, all ranks report their current work before it is ended."""
    world = dist.get_world_size()
    stall_report = StallReport(_store(), session.rank, world) if world > 1 else None
    limit, log = session.asked.config.comm.init_timeout_seconds, session.folder.logs / f"rank{session.rank}.log"
    is_excused = shared_wait.is_on if shared_wait else None
    return Watchdog(limit, log, session.rank, session.status, stall_report, session.guard, is_excused)


def _store() -> dist.Store:
    """Return the key-value store that the ranks share."""
    return dist.distributed_c10d._get_default_store()
