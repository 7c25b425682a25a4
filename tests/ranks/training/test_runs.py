"""Runs that end and go on: the same samples, losses and weights as without the interruption, or a clear refusal."""

import errno
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli
import torch
import torch.distributed as dist

from tests.support.launched import REPOSITORY, SMALL, Desk, Ended, rows, wait_for_step
from tests.support.needs import slow
from tests.unit.data.test_tokenizer import make_tokenizer
from titanlite.checkpoint import hugging_face, store
from titanlite.checkpoint.background import Background
from titanlite.checkpoint.resume import check_state
from titanlite.checkpoint.saved_state import SavedState
from titanlite.commands.export import run as export
from titanlite.config.schema import Config
from titanlite.errors import ConfigError
from titanlite.observe import console
from titanlite.observe.metrics import MetricsFile
from titanlite.observe.profiler import Profiler
from titanlite.recipes import load
from titanlite.training import data, loop
from titanlite.training.report import Outcome, Report

LAYOUTS = {
    "1": (1, ()),
    "FSDP 2": (2, ()),
    "TP 2": (2, ("--parallelism.tensor_parallel_degree=2",)),
    # FSDP gathers float8, by scales that follow from the weights that were loaded.
    "float8": (2, ("--float8.recipe=tensorwise", "--training.mixed_precision_param=bfloat16")),
}
TEN_STEPS = "--training.steps=10"


@pytest.fixture(scope="module", params=["1", "FSDP 2", "TP 2", *slow("float8")])
def undisturbed(request: pytest.FixtureRequest, desk: Desk) -> tuple[str, Ended]:
    world, flags = LAYOUTS[request.param]
    return request.param, desk.run(f"undisturbed {request.param}", world, *flags, TEN_STEPS)


# Under "float8" FSDP gathers and saves as in float32.
@pytest.mark.parametrize("undisturbed", ["1", "TP 2", *slow("float8", "FSDP 2")], indirect=True)
def test_stop_and_resume_is_bitwise_the_uninterrupted_run(desk: Desk, undisturbed: tuple[str, Ended]) -> None:
    layout, whole = undisturbed
    world, flags = LAYOUTS[layout]
    half = desk.run(f"stopped {layout}", world, *flags, TEN_STEPS, "--job.stop_after=5")
    assert half.status["state"] == "stopped"
    assert half.status["by"] == "job.stop_after"
    assert half.status["step"] == 5
    assert half.trained() == whole.trained()[:5]
    rest = desk.run(f"stopped {layout}", world, *flags, TEN_STEPS)
    assert rest.status["state"] == "finished"
    assert rest.trained() == whole.trained()
    assert [row["tokens"] for row in rest.rows] == [row["tokens"] for row in whole.rows]
    assert rest.content(10) == whole.content(10)
    assert "resumed from step 5" in rest.output
    assert rest.output.count("learning rate jumps") == 1  # in the hint for a longer run; this one goes on as it was


@pytest.mark.parametrize("undisturbed", ["FSDP 2", *slow("1", "TP 2", "float8")], indirect=True)
def test_checkpoints_written_in_the_background_are_those_that_training_waits_for(
    desk: Desk, undisturbed: tuple[str, Ended]
) -> None:
    layout, whole = undisturbed
    world, flags = LAYOUTS[layout]
    beside = TEN_STEPS, "--checkpoint.async_mode=async", "--checkpoint.interval=2", "--checkpoint.keep_latest_k=2"
    half = desk.run(f"beside {layout}", world, *flags, *beside, "--job.stop_after=5")
    assert half.checkpoints() == [4, 5]
    assert [line.split("step-")[1] for line in half.output.splitlines() if "saved " in line] == [
        f"{step:08d}" for step in (2, 4, 5)
    ]
    rest = desk.run(f"beside {layout}", world, *flags, *beside)
    assert rest.trained() == whole.trained()
    assert rest.content(10) == whole.content(10)


def before_writing(at_step: int, does: Callable[[Path], object]) -> Callable[[], None]:
    """A plant: what rank 0 does before it writes the checkpoint of a step."""

    def plant() -> None:
        write = store.write

        def later(folder: Path, *args: object) -> object:
            if folder.name == f"step-{at_step:08d}.tmp" and os.environ["RANK"] == "0":
                does(folder)
            return write(folder, *args)  # type: ignore[arg-type]

        store.write = later  # type: ignore[assignment]

    return plant


def test_training_goes_on_while_a_checkpoint_is_written(desk: Desk) -> None:
    folder = desk.folder / "runs" / "goes on"
    plant = before_writing(4, lambda _: wait_for_step(folder, 8))
    flags = "--checkpoint.async_mode=async", "--checkpoint.interval=4", "--checkpoint.keep_latest_k=0"
    ended = desk.run("goes on", 2, *flags, "--training.steps=12", plant=plant)
    assert ended.checkpoints() == [4, 8, 12]
    assert ended.status["state"] == "finished"


def saves_before_the_next_step() -> None:
    """A plant: what is written in the background is written, or has failed, when training goes on."""
    save = Background.save

    def waits(self: Background, *args: Any) -> None:
        save(self, *args)
        assert self._writing is not None
        futures.wait([self._writing])

    Background.save = waits  # type: ignore[method-assign]


@pytest.mark.parametrize("last", [8, *slow(2000)])
def test_a_checkpoint_that_cannot_be_written_in_the_background_ends_every_rank(desk: Desk, last: int) -> None:
    """Within two steps, not at the next checkpoint; and also if no step follows."""

    def plant() -> None:
        before_writing(8, shutil.rmtree)()
        saves_before_the_next_step()

    flags = "--checkpoint.async_mode=async", "--checkpoint.interval=8", f"--training.steps={last}"
    ended = desk.run(f"failing beside {last}", 2, *flags, plant=plant, ends=2)
    assert "does not see it" in ended.output
    assert ended.output.count("a second attempt is made") == 1  # by the first rank of the host
    assert ended.checkpoints() == []
    assert ended.status["state"] == "failed"
    assert 8 <= ended.steps[-1]["step"] <= 10


@pytest.mark.parametrize("mode", ["async", *slow("disabled")])
def test_a_write_that_fails_once_is_told_and_made_again(desk: Desk, mode: str) -> None:
    def plant() -> None:
        hash_files, failures = store.hash_files, [OSError(errno.EIO, "Input/output error", "of a disk")]

        def fails_once(*args: Any) -> object:
            if os.environ["RANK"] == "1" and failures:
                raise failures.pop()
            return hash_files(*args)

        store.hash_files = fails_once

    flags = f"--checkpoint.async_mode={mode}", "--checkpoint.interval=4", "--training.steps=6"
    ended = desk.run(f"once {mode}", 2, *flags, plant=plant)
    assert ended.status["state"] == "finished"
    assert ended.checkpoints() == [4, 6]
    said = "warning: step-00000004 could not be written, and a second attempt is made: rank 1: OSError: "
    for rank in (0, 1):
        assert (ended.folder / "logs" / f"rank{rank}.log").read_text().count(said) == 1
    assert ended.content(4) == desk.run(f"at once {mode}", 2, *flags, "--job.stop_after=4").content(4)


@pytest.mark.parametrize("undisturbed", ["TP 2", *slow("1", "FSDP 2", "float8")], indirect=True)
def test_a_run_starts_from_weights_in_hugging_faces_layout(
    desk: Desk, undisturbed: tuple[str, Ended], tmp_path: Path
) -> None:
    layout, whole = undisturbed
    world, flags = LAYOUTS[layout]
    export([str(whole.folder), "--out", str(tmp_path / "out"), "--dtype", "float32"])
    # A step of so small a rate changes no weight by a bit.
    still = "--optimizer.lr=1e-30", f"--checkpoint.initial_load_path={tmp_path / 'out'}"
    began = desk.run(f"from {layout}", world, *flags, *still, "--job.stop_after=1")
    weights = {name: digest for name, digest in whole.content(10).items() if name.startswith("model/")}
    assert {name: began.content(1)[name] for name in weights} == weights
    assert "starts from the 21 weights of" in began.output
    assert began.receipt["initial_weights"]["applied"] == {"weights": 21}
    (tmp_path / "out").rename(tmp_path / "moved")  # what goes on does not need it
    went_on = desk.run(f"from {layout}", world, *flags, *still, "--job.stop_after=2")
    assert went_on.receipt["initial_weights"]["applied"] == "not looked at: resumed from step 1"


@pytest.mark.slow
def test_a_run_with_the_dimensions_of_a_folder_goes_on_without_it(desk: Desk, tmp_path: Path) -> None:
    whole = desk.run("dimensions", 1, "--job.stop_after=1")
    export([str(whole.folder), "--out", str(tmp_path / "out"), "--dtype", "float32"])
    own = "--model.flavor=from_checkpoint", f"--checkpoint.initial_load_path={tmp_path / 'out'}"
    dimensions = [key for key in SMALL if key.startswith("model.") and key != "model.name"]
    with pytest.MonkeyPatch.context() as patch:
        for key in dimensions:
            patch.delitem(SMALL, key)
        undisturbed = desk.run("all of the folder", 1, *own, "--job.stop_after=4")
        began = desk.run("of the folder", 1, *own, "--job.stop_after=2")
        assert "starts from the" in began.output
        (tmp_path / "out").rename(tmp_path / "moved")
        rest = desk.run("of the folder", 1, *own, "--job.stop_after=4")
        assert "not looked at: resumed from step 2" in str(rest.receipt["initial_weights"])
        assert rest.content(4) == undisturbed.content(4)
        assert tomli.loads((rest.folder / "config.toml").read_text())["model"]["flavor"] == "from_checkpoint"
        other = desk.run("of the folder", 1, *own, "--model.n_layers=1", ends=2)
        assert "model.n_layers = 1" in other.output
        assert "output folder of a different run" in other.output
        fresh = desk.run("a new one", 1, *own, ends=2)
        assert f'checkpoint.initial_load_path = "{tmp_path / "out"}"' in fresh.output
    assert export([str(rest.folder), "--out", str(tmp_path / "again")]) == 0
    said = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("moved", "again")]
    assert said[0] | {"torch_dtype": ""} == said[1] | {"torch_dtype": ""}


def test_other_weights_on_another_rank_end_every_rank(desk: Desk, tmp_path: Path) -> None:
    run = desk.run("of weights", 1, "--job.stop_after=1")
    export([str(run.folder), "--out", str(tmp_path / "out")])

    def plant() -> None:
        if os.environ["RANK"] == "1":
            read = hugging_face.our_weight
            other = lambda *of: read(*of) * (2 if "wo" in of[2] else 1)  # noqa: E731
            hugging_face.our_weight = other  # type: ignore[assignment]

    load = f"--checkpoint.initial_load_path={tmp_path / 'out'}"
    ended = desk.run("other weights", 2, load, plant=plant, ends=2)
    assert ended.output.count("on rank 1 the weights that rank 0 has read") >= 1


def test_every_generator_follows_from_the_seed_and_goes_on_where_it_was(desk: Desk) -> None:
    def plant() -> None:
        for seed in (random.seed, np.random.seed, torch.manual_seed):  # as whatever started the rank left them
            seed(time.monotonic_ns() % 2**32)
        take = loop.train_step

        def draws(*args: Any, **more: Any) -> dict[str, torch.Tensor]:
            print("drew", random.random(), np.random.rand(), torch.rand(()).item())
            return take(*args, **more)

        loop.train_step = draws

    def drawn(run: Ended) -> list[list[str]]:
        ranks = run.output.split("--- rank ")[1:]
        return [[line for line in of.splitlines() if line.startswith("drew")] for of in ranks]

    half = desk.run("random", 2, "--job.stop_after=2", plant=plant)
    rest = desk.run("random", 2, "--job.stop_after=4", plant=plant)
    whole = desk.run("random whole", 2, "--job.stop_after=4", plant=plant)
    assert [a + b for a, b in zip(drawn(half), drawn(rest), strict=True)] == drawn(whole)
    assert rest.content(4, rng=True) == whole.content(4, rng=True)
    assert len(rest.content(4, rng=True)) == 2 * 3
    tensor_parallel = "--parallelism.tensor_parallel_degree=2", "--job.stop_after=2"
    ranks = [*drawn(half), *drawn(desk.run("random TP", 2, *tensor_parallel, plant=plant))]
    other = desk.run("random other", 1, "--training.seed=7", "--job.stop_after=2", plant=plant)
    assert ranks[2] == ranks[3] == ranks[0]  # of one tensor-parallel group, and the first of them
    numbers = [draw.split()[1:] for of in (*ranks[:2], *drawn(other)) for draw in of]
    assert all(len(set(of_one)) == 3 * 2 for of_one in zip(*numbers, strict=True))


@pytest.mark.parametrize("undisturbed", ["FSDP 2"], indirect=True)
@pytest.mark.parametrize("layout", ["TP 2", *slow("1")])
def test_a_run_goes_on_under_another_layout(desk: Desk, undisturbed: tuple[str, Ended], layout: str) -> None:
    _, whole = undisturbed
    world, flags = LAYOUTS[layout]
    name = f"from FSDP 2 to {layout}"
    desk.run(name, 2, TEN_STEPS, "--job.stop_after=5")
    rest = desk.run(name, world, *flags, TEN_STEPS)
    assert [row["tokens"] for row in rest.steps] == [row["tokens"] for row in whole.steps]  # the same samples,
    assert rest.losses() == pytest.approx(whole.losses(), rel=1e-6)  # or the losses would differ in the first digit


@pytest.mark.slow
def test_another_number_of_ranks_makes_no_other_batch_unasked(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(SMALL, "training.global_batch_size")
    assert desk.run("batch", 1, "--job.stop_after=2").steps[-1]["tokens"] == 2 * 2 * 64
    refused = desk.run("batch", 2, ends=2)
    assert refused.output.count("local_batch_size × data-parallel ranks make 4 sequences per step") == 2
    assert "want: 2 sequences per step, with which the checkpoint was trained" in refused.output
    assert "fix:  --training.global_batch_size 2" in refused.output
    assert refused.status["error"]["type"] == "ConfigError"
    asked = desk.run("batch", 2, "--training.global_batch_size=8", "--job.stop_after=3")
    assert "training.global_batch_size: not given → 8" in asked.output
    assert asked.steps[-1]["tokens"] == (2 * 2 + 8) * 64
    state = asked.folder / "checkpoints" / "step-00000003" / "state.json"
    assert json.loads(state.read_text())["sequences_per_step"] == 8


def test_a_checkpoint_that_does_not_say_its_batch_or_order_is_taken_up() -> None:
    folder, sizes = Path("step-00000002"), load("model", "llama3-8B")
    check_state(folder, SavedState(), Config(), sizes, 4)
    with pytest.raises(ConfigError, match=r"step-00000002: 1 problem\n  training\.global_batch_size = not given"):
        check_state(folder, SavedState(sequences_per_step=2), Config(), sizes, 4)


def test_the_written_config_gives_the_same_run(desk: Desk) -> None:
    first = desk.run("written", 1, "--job.stop_after=5", "--optimizer.weight_decay_exclude=*norm.weight")
    desk.rerun(first.folder / "config.toml", "--job.name", "read back")
    again = Ended(desk.folder / "runs" / "read back", "")
    assert again.trained() == first.trained()
    assert again.content(5) == first.content(5)


def test_a_disk_without_room_for_checkpoints_is_told_before_the_first_step(desk: Desk) -> None:
    def plant() -> None:
        usage = shutil.disk_usage("/")
        shutil.disk_usage = lambda path: usage._replace(free=2**20)

    output = desk.run("no room", 1, "--job.stop_after=1", plant=plant, ends=2).output
    before, _, after = output.partition("step  1/20")
    assert "the disk has no room for the checkpoints: 1 more of " in before
    assert "free space = 1.0 MiB free" in after


def test_a_rank_that_does_not_share_the_folder_is_named_before_the_first_step(desk: Desk) -> None:
    def plant() -> None:
        (there := desk.folder / f"host of {os.environ['RANK']}").mkdir()
        os.chdir(there)

    output = desk.run("apart", 2, "--job.dump_folder=runs", plant=plant, ends=2).output
    assert re.search(r"rank 1 on .* = does not see it\n +want: one folder for all ranks", output)
    assert "step  1/" not in output
    assert list((desk.folder / "host of 0" / "runs" / "apart").glob("**/seen-*")) == []


def test_a_corpus_may_have_more_files_than_a_process_descriptors(desk: Desk) -> None:
    (files := desk.folder / "many").mkdir()
    for n in range(200):
        np.full(100, n % 256, "<u2").tofile(files / f"{n:03}.bin")

    def plant() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))

    given = f"--data.source={files}/*.bin", "--training.local_batch_size=25", "--training.global_batch_size=50"
    given += ("--model.n_layers=1",)
    # Of 312 samples, each of one file or two, each rank reads 150: some 140 files.
    run = desk.run("many files", 2, *given, "--training.steps=6", plant=plant)
    assert run.status["state"] == "finished"


def test_resume_says_what_there_is(desk: Desk) -> None:
    flags = ("--checkpoint.interval=2", "--job.stop_after=5")
    run = desk.run("asked", 1, *flags)
    assert run.checkpoints() == [2, 4, 5]
    for resume, said in (
        ("4", "would take up the abandoned branch (5) again"),
        ("never", "the folder has checkpoints"),
    ):
        refused = desk.run("asked", 1, *flags, f"--checkpoint.resume={resume}", ends=2)
        assert said in refused.output
        assert "Traceback" not in refused.output
    assert run.checkpoints() == [2, 4, 5]
    config, receipt = (run.folder / "config.toml").read_text(), run.receipt
    assert 'resume = "auto"' in config  # those that were refused left no trace
    status = json.loads((run.folder / "status.json").read_text()) | {"by": "SIGINT"}
    (run.folder / "status.json").write_text(as_it_was := json.dumps(status, indent=2) + "\n")
    nothing = desk.run("asked", 1, *flags, "--optimizer.lr=7e-4")
    assert "stopped by" not in nothing.output
    assert (run.folder / "status.json").read_text() == as_it_was
    (run.folder / "status.json").write_text(as_it_was.replace('"stopped"', '"running"'))  # it was killed at its end
    assert desk.run("asked", 1, *flags).status["by"] == "job.stop_after"
    assert "nothing to do: the run ends at step 5 (job.stop_after), and step 5 is already done" in nothing.output
    assert "optimizer.lr: 0.002 → 0.0007" in nothing.output
    assert (run.folder / "config.toml").read_text() == config
    desk.run("asked", 1, "--job.stop_after=6", "--optimizer.lr=7e-4")
    assert "lr = 0.0007" in (run.folder / "config.toml").read_text()
    assert (run.folder / "config.earlier-1.toml").read_text() == config
    kept = json.loads((run.folder / "receipt.earlier-1.json").read_text())
    assert {entry["feature"]: entry for entry in kept} == receipt
    assert run.receipt.keys() == receipt.keys()
    (run.folder / "checkpoints").rename(run.folder / "elsewhere")
    (run.folder / "checkpoints").touch()
    unreadable = desk.run("asked", 1, *flags, ends=2)
    assert f"{run.folder}/checkpoints = Not a directory" in unreadable.output
    assert "Traceback" not in unreadable.output
    assert len(run.steps) == 6


@pytest.mark.slow
def test_a_start_anew_keeps_the_metrics_that_are_there_and_says_so(desk: Desk) -> None:
    run = desk.run("anew", 2, "--job.stop_after=3")
    before = (run.folder / "metrics.jsonl").read_text()
    shutil.rmtree(run.folder / "checkpoints")
    again, earlier = desk.run("anew", 2, "--job.stop_after=2"), run.folder / "metrics.earlier-1.jsonl"
    assert again.output.count(f"starting at step 0; the metrics of the earlier start are kept in {earlier}\n") == 1
    assert earlier.read_text() == before
    assert [row["step"] for row in again.rows] == [1, 2]


def test_a_missing_step_is_refused_before_torch_is_imported(desk: Desk) -> None:
    code = (
        "import sys, train; from titanlite.exit_code import exit_code; "
        "code = exit_code(train.main); print(*sys.modules); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, *desk.flags("not there", "--checkpoint.resume=7")]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2, ended.stderr
    assert "checkpoint.resume = 7\n    want: a complete checkpoint in" in ended.stderr.replace("\n  ", "\n")
    assert "torch" not in ended.stdout.split()


def test_a_start_that_fails_says_so_in_status_and_log(desk: Desk) -> None:
    run = desk.run("fails", 2, "--job.stop_after=2")
    config = (run.folder / "config.toml").read_text()
    for shard in (run.folder / "checkpoints" / "step-00000002").glob("*.safetensors"):
        shard.write_bytes(shard.read_bytes()[:-1])
    again = desk.run("fails", 2, "--optimizer.lr=7e-4", ends=2)
    assert (again.status["state"], again.status["step"]) == ("failed", 2)
    assert again.status["error"]["type"] == "CheckpointError"
    assert "no older one is undamaged" in again.status["error"]["message"]
    for rank in (0, 1):
        log = (run.folder / "logs" / f"rank{rank}.log").read_text()
        assert "failed: " in log
        assert "no older one is undamaged" in log
        assert "Traceback" not in log
    assert (run.folder / "config.toml").read_text() == config


def test_another_tokenizer_in_the_same_file_is_not_taken_for_another_text(desk: Desk) -> None:
    tokenizer = make_tokenizer(desk.folder / "tokenizer.json")
    flags = (f"--data.tokenizer={tokenizer}", "--model.vocab_size=512")
    desk.run("retrained", 1, *flags, "--job.stop_after=1")
    assert "than before" not in desk.run("retrained", 1, *flags, "--job.stop_after=2").output
    make_tokenizer(tokenizer, special=("<other>", "<|endoftext|>"))
    again = (*flags, "--job.stop_after=3")
    assert "1 problem\n  data.tokenizer = one of fingerprint" in desk.run("retrained", 1, *again, ends=2).output
    said = desk.run("retrained", 1, *again, "--job.strict=false").output
    assert "warning: data.tokenizer is another than before" in said
    assert "different text" not in said


@pytest.mark.parametrize("key", ["validation.source", *slow("data.source")])
def test_other_text_on_another_rank_ends_every_rank(desk: Desk, key: str) -> None:
    other = desk.folder / "other.txt"
    other.write_text("another text " * 500)

    def plant() -> None:
        if os.environ["RANK"] == "1":
            prepare = data.prepare
            named = str(desk.folder / ("train.txt" if key == "data.source" else "held_out.txt"))
            data.prepare = lambda source, *args, **kw: prepare(str(other) if source == named else source, *args, **kw)

    run = desk.run(f"other {key}", 2, "--validation.enable=true", plant=plant, ends=2)
    assert run.output.count(f"{key} = different tokens on rank 1 than on rank 0") == 2


@pytest.mark.slow
def test_a_model_recipe_that_changed_under_a_run_is_refused(desk: Desk, tmp_path: Path) -> None:
    recipe = tmp_path / "model" / "llama3-mine.toml"
    recipe.parent.mkdir()
    recipe.write_text('help = "mine"\nextends = ["llama3-debug"]\n')
    flags = (f"--job.recipe_dirs={tmp_path}", "--model.flavor=mine")
    desk.run("recipe", 2, *flags, "--job.stop_after=2")
    recipe.write_text(
        'help = "still mine"\nextends = ["llama3-debug"]\nrope_theta = 500000.0\ntied_embeddings = true\n'
    )
    run = desk.run("recipe", 2, *flags, ends=2)
    assert run.output.count("model.rope_theta = 500000.0") == 2
    assert "want: 10000.0" in run.output
    # And not the tensors that are not there.
    assert "model.tied_embeddings = true\n      want: false, as the checkpoint has it\n" in run.output
    assert "2 problems\n" in run.output
    recipe.write_text('help = "mine again"\nextends = ["llama3-debug"]\n')
    assert desk.run("recipe", 2, *flags, "--job.stop_after=3").status["step"] == 3


def test_damaged_metrics_end_every_rank(desk: Desk) -> None:
    run = desk.run("damaged", 2, "--job.stop_after=2")
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    (run.folder / "metrics.jsonl").write_text("\n".join(["\0" * 20, *lines]) + "\n")
    again = desk.run("damaged", 2, "--job.stop_after=4", ends=2)
    for said in again.output.split("--- rank ")[1:]:
        assert "delete this line" in said
        assert "Traceback" not in said
    assert again.status["error"]["type"] == "RunError"


@pytest.mark.parametrize("folder", ["checkpoints", *slow(".", "logs")])
def test_a_folder_of_a_run_may_be_on_another_disk(desk: Desk, folder: str, tmp_path: Path) -> None:
    run = f"elsewhere {folder}"
    place = desk.folder / "runs" / run / folder
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(tmp_path)
    desk.run(run, 1, "--job.stop_after=2")
    ended = desk.run(run, 1, "--job.stop_after=4")
    assert [row["step"] for row in ended.rows] == [1, 2, 3, 4]
    assert ended.checkpoints() == [2, 4]
    assert list(tmp_path.iterdir())


def test_metrics_that_cannot_be_made_durable_are_everyones(desk: Desk) -> None:
    def plant() -> None:
        def full(self: MetricsFile) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        MetricsFile.sync = full

    run = desk.run("not durable", 2, "--job.stop_after=1", plant=plant, ends=2)
    assert run.output.count("want: a folder that takes the run's log, metrics and status") == 2
    assert run.checkpoints() == []


def test_a_job_whose_folder_is_not_its_own_any_more_is_told_once_and_writes_nothing_there(
    desk: Desk, tmp_path: Path
) -> None:
    """Its lock was deleted and a second job let in."""
    flags = ("--checkpoint.interval=4", "--training.steps=12")
    folder, go = desk.folder / "runs" / "lost", tmp_path / "go"

    def plant() -> None:
        take, taken = loop.train_step, list[int]()

        def waits(*args: Any, **more: Any) -> dict[str, torch.Tensor]:
            taken.append(1)
            while len(taken) == 7 and not go.exists():
                time.sleep(0.05)
            return take(*args, **more)

        loop.train_step = waits

    job = desk.start("lost", 2, *flags, plant=plant)
    wait_for_step(folder, 5)
    (folder / "lock").unlink()
    second = desk.run("lost", 1, *flags)
    go.touch()
    assert job.wait() == [2, 2], job.output()
    assert job.output().count("lock = not this job's any more\n      want: the file that this job has locked") == 2
    assert "Traceback" not in job.output()
    after = Ended(folder, "")
    assert (after.rows, after.status, after.checkpoints()) == (second.rows, second.status, second.checkpoints())


@pytest.mark.slow
def test_a_log_that_cannot_be_written_is_said(desk: Desk) -> None:
    def plant() -> None:
        console.append_plain = lambda _: open("/dev/full", "a", buffering=1)  # noqa: SIM115

    run = desk.run("no log", 1, "--job.stop_after=1", plant=plant, ends=2)
    assert "No space left on device" in run.output
    assert "want: a folder that takes the run's log" in run.output
    assert "Traceback" not in run.output


def test_lost_metrics_are_told(desk: Desk) -> None:
    def lost(*flags: str) -> str:
        return desk.run("lost rows", 1, *flags).output

    freq = "--metrics.log_freq=2"
    assert "no rows" not in lost(freq, "--job.stop_after=3") + lost(freq, "--job.stop_after=4")
    path = desk.folder / "runs" / "lost rows" / "metrics.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    assert f"{path} has no rows of the steps from 3 to 4" in lost(freq, "--job.stop_after=5")
    path.unlink()
    assert f"{path} has no rows of the steps from 1 to 5" in lost(freq, "--job.stop_after=6")


def test_no_group_has_a_clock_of_its_own_that_a_suspended_job_would_run_out_of(desk: Desk) -> None:
    def plant() -> None:
        take = loop.train_step

        def said(*args: Any, **more: Any) -> dict[str, torch.Tensor]:
            groups = [group._get_backend(torch.device("cpu")) for group in dist.distributed_c10d._world.pg_map]
            print("limits", {group.options._timeout.days for group in groups}, len(groups))
            return take(*args, **more)

        loop.train_step = said

    flags = ("--checkpoint.async_mode=async", "--job.stop_after=2")
    run = desk.run("limits", 2, *flags, "--parallelism.tensor_parallel_degree=2", plant=plant)
    found = [line.split() for line in run.output.splitlines() if line.startswith("limits")]
    assert len(found) == 4
    assert all(limits == "{365}" and int(groups) > 2 for _, limits, groups in found)


@pytest.mark.slow
def test_a_job_that_is_suspended_beyond_its_limits_goes_on(desk: Desk) -> None:
    def plant() -> None:
        take = loop.train_step
        loop.train_step = lambda *args, **more: (time.sleep(0.05), take(*args, **more))[1]

    job = desk.start("suspended", 2, "--comm.train_timeout_seconds=5", "--training.steps=30", plant=plant)
    folder = desk.folder / "runs" / "suspended"
    wait_for_step(folder, 5)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in job.pids:
            os.kill(pid, number)
        time.sleep(7.5 if number == signal.SIGSTOP else 0)
    assert job.wait() == [0, 0], job.output()
    assert Ended(folder, "").status["state"] == "finished"
    assert [row["step"] for row in rows(folder)] == list(range(1, 31))
    assert "watchdog" not in job.output()


PLACES = r"step.py:\d+ in train_step", r"loop.py:\d+ in train"


def test_a_rank_that_hangs_is_named_and_given_up_after_the_limit_of_a_step(desk: Desk) -> None:
    def plant() -> None:
        if os.environ["RANK"] == "1":
            write = Report.step

            def late(self: Report, outcome: Outcome) -> None:
                time.sleep(600 if outcome.step == 5 else 0)
                write(self, outcome)

            Report.step = late

    job = desk.start("hangs", 2, "--comm.train_timeout_seconds=6", plant=plant)
    assert job.wait() == [1, 1], job.output()
    of_rank_0 = job.output().partition("--- rank 1")[0]
    waits, late = (
        rf"step \d+, in step, titanlite/training/{file}: rank {n} \(host .*, process \d+\)"
        for n, file in enumerate(PLACES)
    )
    where = rf"made no progress for \d+ s at step \d+; where each rank is:\n    {waits}\n    {late}"
    assert re.search(f"watchdog: rank 0 {where}", of_rank_0)
    assert re.search(rf"TimeoutError: rank 0 {where}$|rank 0 made no progress for \d+ s", of_rank_0.rstrip())
    assert "where each rank is" not in job.output().partition("--- rank 1")[2]
    status = Ended(desk.folder / "runs" / "hangs", "").status
    assert (status["state"], status["error"]["type"]) == ("failed", "TimeoutError")
    assert re.search(where, status["stalled"])


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named_though_it_hosts_the_store(desk: Desk) -> None:
    def plant() -> None:
        take = loop.train_step
        loop.train_step = lambda *args, **more: (time.sleep(0.05), take(*args, **more))[1]

    job = desk.start("stopped host", 3, "--training.global_batch_size=6", "--comm.train_timeout_seconds=6", plant=plant)
    folder = desk.folder / "runs" / "stopped host"
    wait_for_step(folder, 3)
    os.kill(job.pids[0], signal.SIGSTOP)
    deadline = time.monotonic() + 300
    while (said := Ended(folder, "").status)["state"] == "running":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(job.pids[0], signal.SIGKILL)
    assert job.wait() == [-signal.SIGKILL, 1, 1]
    silent = "the job's store does not answer, so what hosts it is stopped, gone or cut off: rank 0, on 127.0.0.1"
    places = rf"rank 1 made no progress for \d+ s at step \d+; where each rank is:\n.*: rank 1\n    {silent}"
    assert re.fullmatch(places, said["stalled"])
    assert f"    {silent}\n" in job.output()


@pytest.mark.slow
def test_a_trace_counts_as_the_time_of_no_step_and_holds_nothing_but_steps(desk: Desk) -> None:
    slow_s = 2.5  # no step takes as long, on a busy machine either

    def plant() -> None:
        write, validate = Profiler._write, loop.Loop.validate

        def late(self: Profiler, trace: object) -> None:
            time.sleep(slow_s)
            write(self, trace)

        def slow(self: loop.Loop, step: int) -> None:
            time.sleep(slow_s if step == 4 else 0)
            validate(self, step)

        Profiler._write, loop.Loop.validate = late, slow

    window = ("--profiling.enable=true", "--profiling.start_step=5", "--profiling.steps=3")
    validate = ("--validation.enable=true", "--validation.freq=4", "--validation.steps=1")
    run = desk.run("traced", 2, *window, *validate, "--job.stop_after=12", plant=plant)
    assert max(row["seconds"] for row in run.steps) < slow_s
    profile = json.loads((run.folder / "profile" / "rank0.json").read_text())
    assert len(profile["steps"]) == 3
    assert profile["clock_us"] < 1e6 * slow_s  # without the validation after step 4
