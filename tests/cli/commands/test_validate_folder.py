"""`titanlite validate` on a run's folder: what a start would refuse is refused, and nothing is touched."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import titanlite.commands.validate
import titanlite.preflight.start
import titanlite.train
from tests.support.run_folder import saved_run
from titanlite.checkpoint.optimizer_state import optimizer_identity
from titanlite.checkpoint.publish import commit, hash_files, step_folder
from titanlite.commands import main
from titanlite.config.toml_file import shipped_folder
from titanlite.config.write import to_toml
from titanlite.exit_code import exit_code
from titanlite.models.find import build_model
from titanlite.preflight.checked_run import checked_run
from titanlite.preflight.run_folder import RunFolder

FLAGS = ["--config", "debug.toml", "--job.dump_folder", "runs"]
Validate = Callable[..., tuple[int, str]]
LARGE = 2**21  # bytes: not hashed


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run that has saved steps 50 and 100, with 4 sequences a step, as of two ranks."""
    monkeypatch.chdir(tmp_path)
    text = (shipped_folder("configs") / "debug.toml").read_text()
    Path("debug.toml").write_text(text.replace("global_batch_size = 8\n", ""))
    asked = checked_run(FLAGS, 2)
    model = build_model(asked.config.model, asked.dims, 1)
    rules = dict.fromkeys((name for name, _ in model.named_parameters()), "adamw")
    optimizer = optimizer_identity(asked.config.optimizer, rules, {})
    return saved_run(FLAGS, 2, 50, 100, weights=bytes(LARGE), optimizer=optimizer, tokenizer="")


def what_is_there() -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in Path("runs").rglob("*")}


@pytest.fixture
def validate(capsys: pytest.CaptureFixture[str]) -> Validate:
    """Exit code, and what it said on the stream that belongs to it; the folder is as it was."""

    def carry_out(*flags: str) -> tuple[int, str]:
        before = what_is_there()
        code = main(["validate", *FLAGS, *flags])
        assert what_is_there() == before
        out, err = capsys.readouterr()
        err = err.removeprefix("assembling the model for what only it can tell …\n")  # on a busy machine
        assert (out, err).count("") == 1
        return code, out + err

    return carry_out


def test_it_says_from_where_the_run_goes_on_and_what_has_changed(folder: RunFolder, validate: Validate) -> None:
    assert validate()[1].endswith(f"{folder.path}, resumes from step 100\n")
    code, said = validate("--optimizer.lr", "1e-3")
    assert (code, said.count("  changed since the last start: optimizer.lr: 0.002 → 0.001\n")) == (0, 1)
    average = "  the average of weights (optimizer.ema_decay = 0.9) begins at those of step 100\n"
    assert average in validate("--optimizer.ema_decay", "0.9")[1]
    assert "resumes" not in validate("--job.name", "new")[1]
    assert "nothing to do" not in said
    ended = "  nothing to do: the run ends at step 100 (job.stop_after), and step 100 is already done\n"
    assert ended in validate("--job.stop_after", "100")[1]


def test_it_says_from_where_a_branch_goes_on(folder: RunFolder, validate: Validate) -> None:
    flags = "--job.name=new", f"--checkpoint.initial_load_path={folder.path}", "--training.steps=200"
    said = validate(*flags, "--world=2")[1]
    assert f"  goes on from {step_folder(folder.checkpoints, 100)}: weights, optimizer and place in the data\n" in said
    assert "resumes from" not in said
    said = validate(*flags, "--world=2", "--optimizer.recipe=muon", "--optimizer.fresh_state=true")[1]
    assert "step-00000100: weights and place in the data\n" in said
    assert "  the optimizer's state starts afresh: that of step-00000100 is of another optimizer\n" in said


def test_it_says_that_a_checkpoint_is_of_another_optimizer(folder: RunFolder, validate: Validate) -> None:
    code, said = validate("--optimizer.recipe", "muon")
    assert code == 2
    assert 'optimizer.recipe = "muon"\n' in said
    assert "or optimizer.fresh_state = true" in said
    code, said = validate("--optimizer.recipe", "muon", "--optimizer.fresh_state", "true")
    assert code == 0
    assert "  the optimizer's state starts afresh: that of step-00000100 is of another optimizer\n" in said


def test_its_epochs_are_those_of_the_samples_until_there_and_of_the_steps_to_come(
    folder: RunFolder, validate: Validate
) -> None:
    state(step_folder(folder.checkpoints, 100), samples=400)
    Path("small.txt").write_text("x" * 256 * 100)
    config = folder.config.read_text()
    folder.config.write_text(config.replace('source = "python_stdlib"', 'source = "small.txt"'))
    flags = ("--data.source=small.txt", "--data.cache_dir=cache", "--training.seq_len=256")
    for more in (("--training.global_batch_size=8", "--world=2"), ("--training.global_batch_size=8",)):
        assert " tokens, 12 epochs in 200 steps\n" in validate(*flags, "--training.steps=200", *more)[1]
    assert " tokens, 4 epochs in 50 steps\n" in validate(*flags, "--training.steps=50")[1]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def state(folder: Path, **changes: object) -> None:
    """Another state.json, as it might have been saved."""
    saved = json.loads((folder / "state.json").read_text())
    saved |= changes
    (folder / "state.json").write_text(json.dumps(saved))
    (folder / "MANIFEST.json").unlink()
    moved = folder.rename(folder.with_suffix(".tmp"))
    commit(moved, hash_files(moved, ["state.json", "rank00000-0.safetensors"]))


DAMAGE: dict[str, tuple[Callable[[Path], object], list[str], str]] = {
    "truncated": (
        lambda at: os.truncate(at / "rank00000-0.safetensors", 5),
        [],
        f"rank00000-0.safetensors = 5 bytes\n    want: {LARGE}",
    ),
    "missing": (lambda at: (at / "rank00000-0.safetensors").unlink(), [], "rank00000-0.safetensors = missing"),
    "a flipped bit": (lambda at: flip(at / "state.json"), [], "state.json = another SHA-256"),
    "no manifest": (lambda at: (at / "MANIFEST.json").unlink(), [], "step-00000100 = incomplete"),
    "another recipe": (lambda at: state(at, model={"norm_eps": 1.0}), [], "model.norm_eps = 1e-05\n    want: 1.0"),
    "another batch": (
        lambda at: None,
        ["--world", "4"],
        "training.global_batch_size = not given: local_batch_size × data-parallel ranks make 8 sequences per step",
    ),
    "no such step": (lambda at: None, ["--checkpoint.resume=70"], "checkpoint.resume = 70\n    want: one of 50, 100"),
    "an older step": (lambda at: None, ["--checkpoint.resume=50"], "checkpoint.resume = 50\n    want: the newest"),
}


@pytest.mark.parametrize(("damage", "flags", "said"), DAMAGE.values(), ids=DAMAGE)
def test_a_checkpoint_that_cannot_be_resumed_from(
    folder: RunFolder, validate: Validate, damage: Callable[[Path], object], flags: list[str], said: str
) -> None:
    damage(step_folder(folder.checkpoints, 100))
    code, message = validate(*flags)
    assert code == 2
    assert said.replace("\n", "\n  ") in message


def test_a_checkpoint_that_was_copied_alone_is_of_its_run(folder: RunFolder, validate: Validate) -> None:
    shutil.copytree(folder.checkpoints, folder.path.with_name("branch") / "checkpoints")
    assert "resumes from step 100" in validate("--job.name=branch")[1]
    code, message = validate("--job.name=branch", "--training.seq_len=128", "--training.seed=1")
    assert code == 2
    assert "step-00000100: 2 problems\n  training.seq_len = 128\n      want: 256, as the checkpoint has it\n" in message
    fix = "      fix:  the old value; or begin anew from its weights"
    assert f"training.seed = 1\n      want: 0, as the checkpoint has it\n{fix}" in message


def test_it_says_of_prepared_text_that_it_is_another(
    folder: RunFolder, tmp_path: Path, validate: Validate, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, at = f"--data.cache_dir={tmp_path}/cache", step_folder(folder.checkpoints, 100)
    state(at, corpora={"": "another"}, tokenizer="bytes")
    other = "  warning: data.source holds different text than before (fingerprint "
    assert "different" not in validate(cache)[1]  # nobody knows yet
    assert main(["prepare", *FLAGS, cache]) == 0
    capsys.readouterr()
    assert validate(cache)[1].count(other) == 1
    (shards,) = checked_run([*FLAGS, cache, "--validation.enable=false"]).inputs.shards.values()
    state(at, corpora={"": shards.fingerprint})
    assert "different" not in validate(cache)[1]


def test_another_tokenizer_is_refused_before_its_text_is_prepared(
    folder: RunFolder,
    tmp_path: Path,
    validate: Validate,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    state(step_folder(folder.checkpoints, 100), corpora={"": "another"}, tokenizer="another")
    cache = f"--data.cache_dir={tmp_path}/cache"
    code, said = validate(cache)
    assert code == 2
    assert (
        "data.tokenizer = one of fingerprint bytes\n      want: the one that the weights know, of fingerprint anot"
        in said
    )
    assert validate(cache, "--job.strict=false")[1].count("  warning: data.tokenizer is another than before") == 1
    # So does a start; the rest of that is what is said here.
    monkeypatch.setattr("sys.argv", ["train.py", *FLAGS, cache])
    assert exit_code(titanlite.train.main) == 2
    assert capsys.readouterr().err.splitlines()[1:] == said.splitlines()[1:]
    assert not (tmp_path / "cache").exists()


def test_a_branch_from_an_older_checkpoint_has_its_dimensions(folder: RunFolder, validate: Validate) -> None:
    older = f"--checkpoint.initial_load_path={step_folder(folder.checkpoints, 50)}"
    code, said = validate("--job.name=branch", "--model.flavor=from_checkpoint", older)
    assert code == 0, said
    assert "1,705,216 parameters" in said


def test_a_branch_in_the_folder_of_another_run_is_refused_by_that(folder: RunFolder, validate: Validate) -> None:
    """And nothing is said of weights, which the other run's folder has not."""
    config = checked_run([*FLAGS, "--job.name=b", "--training.seq_len=128"], 2).config
    own = RunFolder.of(config)
    own.claim(config)
    own.release()
    own.record(to_toml(config))
    (own.path / "lock").unlink()
    flags = "--job.name=b", f"--checkpoint.initial_load_path={folder.path}"
    code, said = validate(*flags, "--training.steps=200")
    assert code == 2
    assert "output folder of a different run" in said
    assert "safetensors" not in said
