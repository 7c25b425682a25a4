"""Arguments that no command has: exit code 2 and one message with what was meant, whichever the command."""

from pathlib import Path

import pytest

from titanlite.commands import main
from titanlite.config.schema import Config
from titanlite.config.write import to_toml
from titanlite.preflight.run_folder import RunFolder

EXPORT = "titanlite export RUN [--step N] [--ema] [--out FOLDER] [--dtype DTYPE] [--tokenizer FILE]"
FLAGS = "a flag of this command:"
OF_COMPARE = "--floor, --seeds, --tolerance, --layers, --out, --wandb, --report"
MISTAKES = {
    "export run --stp=2": ("--stp = 2\n", f"{FLAGS} --step, --ema, --out", "did you mean --step?"),
    "export run --out --step 2": ("--out\n", "a value", "--out FOLDER\n"),
    "export run --step two": ("--step = two\n", "one of 2, 10\n", "--step 10"),
    f"export run --step 1{'0' * 5000}": (
        f"--step = 1{'0' * 1999}… (5,001 characters)\n",
        "one of 2, 10\n",
        "--step 10",
    ),
    "export run --step -1": ("--step = -1\n", "one of 2, 10\n", "--step 10"),
    "export run --step 1": ("--step = 1\n", "one of 2, 10\n", "--step 10"),
    "validate run.toml --wrld 2": ("--wrld\n", f"{FLAGS} --config, --world\n", "did you mean --world?"),
    "validate run.toml more": ("more\n", "a flag, such as --training.steps 100", "leave it out"),
    "validate more.toml run.toml": ("FILE = more.toml run.toml\n", "one config", "titanlite validate more.toml"),
    "validate run.toml --config other.toml": (
        "FILE = run.toml other.toml\n",
        "one config",
        "titanlite validate run.toml ",
    ),
    "validate run.toml --world 2 --config=run.toml": (
        "FILE = run.toml run.toml\n",
        "one config",
        "titanlite validate run",
    ),
    "validate --config": ("--config\n", "a value", "--config FILE\n"),
    "validate run.toml -world 2": ("-world\n", f"{FLAGS} --config, --world\n", "did you mean --world?"),
    "validate --confg run.toml": ("--confg\n", f"{FLAGS} --config, --world\n", "did you mean --config?"),
    "validate --world --config run.toml": ("--world\n", "a value", "--world N\n"),
    "validate run.toml --world 1000000000": ("--world = 1000000000\n", "a number of processes", "--world 8"),
    "plan run.toml --device_gib 80": ("--device_gib\n", f"{FLAGS} --config, --world", "did you mean --device-gib?"),
    "plan run.toml --why --activation-checkpoint": ("--why\n", "a value", "--why TENSOR\n"),
    "plan run.toml --world 2 --diff=": ("FILE\n", "one config", "titanlite plan configs/debug.toml --world 2\n"),
    "completion bash": ("completion\n", "one of new, ", "titanlite --tyro-print-completion bash\n"),
    "recipes float8 --measure": ("--measure\n", "no flag", "scripts/bench/float8_layers.py of a checkout\n"),
    "prepare": ("FILE\n", "one config, as the first", "titanlite prepare configs/debug.toml\n"),
    "verify-resume run.toml --step=2": (
        "--step = 2\n",
        f"{FLAGS} --config, --world, --steps\n",
        "did you mean --steps?",
    ),
}


@pytest.mark.parametrize("line", MISTAKES)
def test_what_is_no_argument_is_said(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    RunFolder("run").path.mkdir()
    RunFolder("run").record(to_toml(Config()))
    for step in (2, 10):
        checkpoint = RunFolder("run").checkpoints / f"step-{step:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "MANIFEST.json").touch()
    (tmp_path / "run" / "metrics.jsonl").touch()
    assert main(line.split()) == 2
    said = capsys.readouterr()
    where, want, fix = MISTAKES[line]
    assert said.out == ""
    assert "1 problem\n" in said.err
    assert f"\n  {where}      want: {want}" in said.err
    assert f"\n      fix:  {fix}" in said.err


@pytest.mark.parametrize("command", ["export", "compare"])
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_names_every_flag_on_a_line_of_its_own(
    command: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "run", flag])
    assert not ended.value.code
    usage, _, rest = capsys.readouterr().out.partition("\n\n")
    flags, lines = [word.strip("[]") for word in usage.split() if word.startswith("[--")], rest.splitlines()
    assert "--out" in flags
    assert [line.split()[0] for line in lines if line.startswith("  ")] == ["RUN", *flags]
    assert max(map(len, [*usage.splitlines(), *lines])) <= 120
    assert all(line.count("[") == line.count("]") for line in usage.splitlines())  # none ends within a flag
