"""Open all that a run needs (data, processes, model, files, watchdog), run the loop, and report its end."""

import os
from contextlib import ExitStack

import torch
import torch.distributed as dist

from titanlite.checkpoint.background import Background
from titanlite.checkpoint.branch import remember_branch
from titanlite.checkpoint.collective import on_rank_0
from titanlite.checkpoint.resume import other_text
from titanlite.checkpoint.state import Checkpoints
from titanlite.config.check import last_step, sequences_per_step
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
from titanlite.observe.profiler import Profiler
from titanlite.observe.run_facts import run_facts, tags_of
from titanlite.observe.shared_wait import SharedWait
from titanlite.observe.stall_report import StallReport
from titanlite.observe.step_profile import OF_EXPERTS
from titanlite.observe.tensorboard import TensorBoardFile, tensorboard_entry
from titanlite.observe.trace_spans import ProfiledRun
from titanlite.observe.wandb import WandbRun
from titanlite.observe.watchdog import Watchdog
from titanlite.parallel.process_group import leave_limits_to_watchdog, ranks_of_a_host, start_process_group
from titanlite.preflight.checked_run import CheckedRun
from titanlite.preflight.launcher import Launcher
from titanlite.preflight.run_folder import RunFolder
from titanlite.training.attention import torch_order
from titanlite.training.build import Run, build
from titanlite.training.data import mask_entry, open_batches, open_data, report_data, require_same_data
from titanlite.training.data_check import DataCheck
from titanlite.training.data_wait import DataWait
from titanlite.training.evaluation import open_evaluation
from titanlite.training.feed import Feed
from titanlite.training.loop import Loop
from titanlite.training.out_of_memory import explained, foreseen, measure
from titanlite.training.report import Report
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
) -> None:
    """Train until the last step, `job.stop_after` or a signal, whichever comes first.

    Args:
        asked: the run, checked.
        folder: claimed by rank 0.
        notices: from the checks.
        warnings: from the checks.
        launcher: whose end ends the run; None: nobody's.

    Raises:
        TitanliteError: the user can fix it; the same on every rank.
    """
    with folder.write_errors_explained(), ExitStack() as cleanup:  # `close` after an error may raise it again
        rank, local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
        console = Console(rank, local_rank, asked.config.training.steps, folder.logs)
        cleanup.callback(console.close)
        for notice in notices:
            console.notice(notice)
        for warning in warnings:
            console.warning(warning)
        with Session(asked, folder, console, launcher) as session:  # reports the end before the cleanup, which may hang
            cleanup.enter_context(session.stop)
            with folder.write_errors_explained():
                _train_in_session(session, cleanup)


def _train_in_session(session: Session, cleanup: ExitStack) -> None:
    """Open, train, and report the end; `cleanup` closes."""
    asked, folder, console, status = session.asked, session.folder, session.console, session.status
    config = asked.config

    # Data and processes.
    data = open_data(asked, progress=session.local_rank == 0)
    cleanup.callback(data.close)
    device = start_process_group(config.comm)
    # After a failure connections remain open until this process ends, so that it can report first.
    cleanup.push(lambda error, *_: dist.destroy_process_group() if error is None else None)
    require_same_data(data)

    # The run, and where it is taken up.
    cleanup.enter_context(torch_order())
    run = _build(asked, device, console)
    report_data(data, run.receipt, asked, console, session.rank)
    checkpoints = Checkpoints(folder.checkpoints, config.checkpoint.keep_latest_k, console.warning)
    world = dist.get_world_size()
    per_step = sequences_per_step(config, world)
    assert per_step is not None  # noqa: S101  # the config is checked
    restored = restore(run, checkpoints, console, per_step)
    start, state = restored.step, restored.state
    now, strict = data.identity, config.job.strict
    if text := other_text(restored.folder, state, now["corpora"], now["tokenizer"], strict, now["inputs"]):
        console.warning(text)

    # What it reads.
    table = stage_table(config, world, state.past)
    require_same_steps(table, config)
    batches, validation = open_batches(data, asked, run.mesh, table, start, windows_of(run.model))
    cleanup.callback(batches.close)
    new = {name: n for name, n in batches.mixture.units.items() if data.keys.get(name) not in asked.inputs.tokens}
    for text in many_epochs(config, table, new) if session.rank == 0 else ():
        console.warning(text)
    cleanup.callback(data.stop_waiting)  # runs before `batches.close`, whose thread may wait
    run.receipt.add_later(lambda: mask_entry(data, config, batches))
    add_stages(run.receipt, config, batches.mixture, start)
    evaluation = open_evaluation(asked, run)

    # Its observers.
    observers = _open_observers(session, run, restored, table, cleanup)
    status.progress(start)
    console.measure_by(table.tokens)
    flops = token_flops_of(run.model, run.dims)
    report = Report(config, batches.mixture, world, flops, device, console, observers)
    report.skipped_in_a_row = state.skipped_in_a_row
    if session.rank == 0:
        for line in (*first_lines(run, data.train, batches.mixture, start, folder), *table.notes):
            console.notice(line)

    # Watchdog, profiler and checkpoints; then the steps.
    shared_wait = SharedWait(dist.distributed_c10d._get_default_store()) if data.growing and world > 1 else None
    if shared_wait is not None:
        session.stop.tell_others = shared_wait.stop
    watchdog = cleanup.enter_context(_watchdog(session, shared_wait))
    profiler = Profiler(config.profiling, folder.profile, _profiled(run), device, start + 1, console)
    cleanup.enter_context(profiler)
    background = None
    if config.checkpoint.enable and config.checkpoint.async_mode == "async":
        background = Background(checkpoints, tensors_of(run))
    leave_limits_to_watchdog()
    data_check = DataCheck(list(data.sources.values()))
    cleanup.callback(data_check.close)

    def stops() -> bool:
        return session.stop.received is not None or (background is not None and background.has_failed)

    wait = DataWait(data, run.dims.vocab_size, run.receipt, console, session.rank == 0, shared_wait)
    sharing = run.mesh.context.get_group() if run.mesh.context is not None else None
    loop = Loop(
        run=run,
        feed=Feed(batches, data_check, wait, sharing, watchdog, stops),
        validation=validation,
        evaluation=evaluation,
        checkpoints=checkpoints,
        background=background,
        report=report,
        profiler=profiler,
        watchdog=watchdog,
        folder=folder,
        identity_of_data=data.identity,
    )
    # Until here a signal ends the process at once: it may wait for a disk or other hosts, and has nothing to save.
    session.stop.begin_steps()
    cleanup.callback(session.stop.close)  # runs first: the cleanup has nothing to save either
    with explained(lambda: run.memory, run.save_list, device):
        for measure in loop.measures(start) if state.validation_due else ():
            measure(start)
        last = loop.train(start)
    session.ended(start, last)


def _build(asked: CheckedRun, device: torch.device, console: Console) -> Run:
    """Build the run, with its warnings."""

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
    config, folder, console, start = session.asked.config, session.folder, session.console, restored.step
    observers: list[Observer] = [console, session.status]
    shown: list[TensorBoardFile] = []

    def add(observer: Observer) -> None:
        observers.append(observer)
        cleanup.push(lambda error, *_: observer.close(has_failed=error is not None))

    def open_files() -> MetricsFile:
        with folder.write_errors_explained():
            add(metrics := MetricsFile(folder.metrics, start, restored.state.validation_due))
            if run.routers is not None:
                add(ExpertsFile(folder.experts, start, config.training.steps))
            # A start that has nothing to train keeps the config that the run was trained with.
            if start < last_step(config) or not folder.config.exists():
                if restored.is_branch:
                    remember_branch(config.checkpoint.initial_load_path, folder.path, start)
                kept = folder.record(to_toml(config), to_toml(run.save_list) if run.chosen is not None else None)
                if kept is not None:
                    console.notice(f"the config that was in the folder is kept in {kept}")
            return metrics

    def add_pages() -> None:
        """Open Weights & Biases and TensorBoard as the config says."""
        facts = run_facts(run.n_elements, dist.get_world_size(), run.mesh.device)
        if config.metrics.wandb != "off":
            tags = tags_of(config, facts)
            add(WandbRun(config, folder.path, folder.metrics, console.warning, facts=facts, tags=tags))
        if config.metrics.tensorboard:
            add(tensorboard := TensorBoardFile(folder.tensorboard, folder.metrics, console.warning))
            tensorboard.describe(config, facts)
            shown.append(tensorboard)

    opened: list[MetricsFile] = []  # on rank 0
    on_rank_0(lambda: opened.append(open_files()))
    for metrics in opened:
        if metrics.earlier is not None:
            console.notice(f"starting at step 0; the metrics of the earlier start are kept in {metrics.earlier}")
        # Rows are on disk before their checkpoint, so these were lost afterwards.
        if not restored.is_branch and metrics.last_step < start - start % config.metrics.log_freq:
            console.warning(f"{folder.metrics} has no rows of the steps from {metrics.last_step + 1} to {start}")
        was = restored.state.learning_rate
        if start < last_step(config) and (text := change_of_rate(config, start, was, table)):
            console.notice(text)
        if config.metrics.wandb != "off" or config.metrics.tensorboard:
            add_pages()
    if config.metrics.tensorboard:
        run.receipt.add_later(lambda: tensorboard_entry(folder.tensorboard, *shown))
    return observers


def _profiled(run: Run) -> ProfiledRun:
    """Return the facts of a run that a profile needs besides its trace."""
    axes = {name: run.mesh.all[name].get_group() for name in ("dp_replicate", "dp_shard", "tp")}
    if run.mesh.context is not None:
        axes["cp"] = run.mesh.context.get_group()
    if (experts := run.mesh.experts) is not None:
        axes["ep"] = experts["ep"].get_group()
        axes |= {f"{name}{OF_EXPERTS}": experts[name].get_group() for name in ("dp_replicate", "dp_shard")}
    shards = [local_data(parameter) for parameter in run.parameters]
    averages = [] if run.average is None else [*run.average.shards.values()]
    held = {"parameters": shards, "optimizer": [*run.optimizer.state_tensors(), *averages]}
    return ProfiledRun(
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        device=run.mesh.device.type,
        axes={group.group_name: name for name, group in axes.items() if group.size() > 1},
        groups={name: dist.get_process_group_ranks(group) for name, group in axes.items()},
        held={name: sum(tensor.nbytes for tensor in tensors) for name, tensors in held.items()},
        forecast=run.predicted.categories() if run.predicted is not None else {},
    )


def _watchdog(session: Session, shared_wait: SharedWait | None) -> Watchdog:
    """Make this rank's watchdog; with several ranks, all report where they are before one is ended."""
    world = dist.get_world_size()
    stall_report = StallReport(dist.distributed_c10d._get_default_store(), session.rank, world) if world > 1 else None
    limit, log = session.asked.config.comm.init_timeout_seconds, session.folder.logs / f"rank{session.rank}.log"
    is_excused = shared_wait.is_on if shared_wait else None
    return Watchdog(limit, log, session.rank, session.status, stall_report, session.guard, is_excused)
