"""Runs, plans and text from Python: what the commands do, with their errors as exceptions."""

import shutil
from pathlib import Path

import pytest

import titanlite
from tests.support.launched import Desk
from titanlite.errors import ConfigError, RunFailedError


@pytest.fixture(scope="module")
def config(shared_path: Path) -> str:
    desk = Desk(shared_path)
    return desk.flags("called")[1]


def test_a_run_is_trained_and_says_text(config: str, capfd: pytest.CaptureFixture[str]) -> None:
    changes = {
        "training.steps": 3,
        "validation.enable": True,
        "validation.samples": ["a, b", "é 😀"],
        "validation.sample_tokens": 5,
    }
    run = titanlite.run(config, changes)
    assert [row["step"] for row in run.metrics if "loss" in row] == [1, 2, 3]
    assert "step 3/3" in capfd.readouterr().out
    ((step, samples),) = run.samples
    assert (step, [sample.prompt for sample in samples]) == (3, ["a, b", "é 😀"])
    assert run.load().generate(["a, b", "é 😀"], 5) == [sample.text for sample in samples]


@pytest.mark.slow
def test_a_launched_run_on_a_new_disk_goes_on_from_its_mirror(
    config: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    changes = {"job.name": "mirrored", "training.steps": 2, "checkpoint.mirror": f"file://{tmp_path}/mirror"}
    shutil.rmtree(titanlite.run(config, changes).folder)
    titanlite.run(config, changes | {"checkpoint.resume": 2, "training.steps": 3})
    assert "that of step 2 was taken from file:" in " ".join(capfd.readouterr().out.split())


def test_mistakes_are_exceptions(config: str) -> None:
    with pytest.raises(ConfigError, match=r"training\.stesp"):
        titanlite.run(config, {"training.stesp": 3})
    with pytest.raises(RunFailedError, match=r"exit code 2:\n(.|\n)*not finite"):
        titanlite.run(config, {"job.name": "diverges", "optimizer.lr": 1e38}, show=False)
    with pytest.raises(ConfigError, match=r"job\.name = .*\n +want: a value that TOML has"):
        titanlite.run(config, {"job.name": Path()})
    for gpus in (0, -1, True, "2"):
        with pytest.raises(ConfigError, match=rf"gpus = {gpus!r}\n +want: a number of GPUs, at least 1\n"):
            titanlite.run(config, gpus=gpus)  # type: ignore[arg-type]
    for world in (0, "8", None):
        with pytest.raises(ConfigError, match=rf"world = {world!r}\n +want: a number of processes, at least 1\n"):
            titanlite.plan(config, world=world)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        titanlite.trian  # noqa: B018


def test_a_plan_is_what_the_command_writes(config: str, tmp_path: Path) -> None:
    planned = titanlite.plan(config, {"parallelism.tensor_parallel_degree": 2}, world=2)
    assert planned["world"] == 2
    assert planned["memory_bytes"]["total"] > 0
