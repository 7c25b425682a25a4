"""Warnings of settings that work, but are probably not as meant."""

from dataclasses import replace
from pathlib import Path

from titanlite.config.problems import Origin
from titanlite.config.schema import Config, Job
from titanlite.preflight.hints import of_another_folder
from titanlite.preflight.run_folder import RunFolder


def test_the_config_of_a_run_that_was_moved_is_warned_of(tmp_path: Path, monkeypatch) -> None:
    config = replace(Config(), job=Job(dump_folder="outputs", name="ref"))
    folder = RunFolder(tmp_path / "there" / "outputs" / "ref")
    step = folder.checkpoints / "step-00000002"
    step.mkdir(parents=True)
    origin = Origin(str(folder.config))
    monkeypatch.chdir(tmp_path)
    assert of_another_folder(config, origin) is None  # without a complete checkpoint
    (step / "MANIFEST.json").write_text("{}")
    said = of_another_folder(config, origin)
    assert said is not None
    assert said.endswith(f"--job.dump_folder {folder.path.parent} --job.name ref goes on with it")
    monkeypatch.chdir(tmp_path / "there")
    assert of_another_folder(config, origin) is None
    assert of_another_folder(config, Origin("debug.toml")) is None
