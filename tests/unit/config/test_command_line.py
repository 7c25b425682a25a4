"""Flags win over the file, and bad ones are reported like bad keys."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from titanlite.config.command_line import parse_what_is_right
from titanlite.config.explain import table_of
from titanlite.config.problems import Origin, Place
from titanlite.config.schema import Config, schema_keys, sections
from titanlite.errors import ConfigError

DETERMINISTIC = "training.deterministic"


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "run.toml"
    path.write_text("[training]\nsteps = 7\nseed = 3\n[validation]\nenable = true\n")
    return str(path)


def parse(argv: Sequence[str], usage: str) -> tuple[Config, Origin]:
    config, problems = parse_what_is_right(argv, usage)
    problems.raise_all()
    return config, problems.origin


def config_of(*argv: str) -> Config:
    return parse(argv, "train.py --config FILE")[0]


def message(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config_of(*argv)
    return str(caught.value)


def test_the_command_line_wins_over_the_file(file: str) -> None:
    argv = ["--training.steps", "9", "--optimizer.lr=1e-3", "--config", file, "--training.seq-len", "64"]
    config, origin = parse(argv, "train.py")
    assert (config.training.steps, config.training.seed, config.training.seq_len) == (9, 3, 64)
    assert config.optimizer.lr == 1e-3
    assert origin.of("training.steps") == Place("command line")
    assert origin.of("training.seed") == Place(file, 3)


def test_a_pattern_without_quotes_is_told_what_the_shell_did(file: str, tmp_path: Path) -> None:
    texts = [str(tmp_path / f"{name}.txt") for name in "abc"]
    for text in texts:
        Path(text).touch()
    said = message("--config", file, "--data.source", *texts)
    assert f"--data.source = {texts[0]} and 2 more\n" in said
    assert "fix:  put the pattern in quotes, as --data.source '*.txt'" in said
    Path(texts[1]).unlink()
    assert f'fix:  --data.source "{" ".join(texts)}"' in message("--config", file, "--data.source", *texts)


@pytest.mark.parametrize(
    ("argv", "key", "value"),
    [
        (["--parallelism.data_parallel_shard_degree", "-1"], "parallelism.data_parallel_shard_degree", -1),
        (["--validation.steps=-1"], "validation.steps", -1),
        *((["--training.deterministic", *on, "--training.steps", "1"], DETERMINISTIC, True) for on in ([], ["true"])),
        *(([f"--training.deterministic={on}"], DETERMINISTIC, True) for on in ("true", "True")),
        *(([f"--validation.enable={off}"], "validation.enable", False) for off in ("false", "False")),
        (["--validation.enable", "False", "--training.steps", "1"], "validation.enable", False),
        (["--job.recipe_dirs", "a", "b"], "job.recipe_dirs", ("a", "b")),
        (["--job.recipe_dirs", "a,b"], "job.recipe_dirs", ("a", "b")),
        (["--job.recipe_dirs", '["a", "b"]'], "job.recipe_dirs", ("a", "b")),
        (["--job.recipe_dirs", "[a,", "b]"], "job.recipe_dirs", ("a", "b")),
        (["--job.recipe_dirs=[]"], "job.recipe_dirs", ()),
        (["--job.recipe_dirs=a"], "job.recipe_dirs", ("a",)),
        (["--float8.filter_fqns"], "float8.filter_fqns", ()),
        (["--checkpoint.resume", "never"], "checkpoint.resume", "never"),
        (["--checkpoint.resume", "100"], "checkpoint.resume", 100),
        (["--training.global_batch_size", "64"], "training.global_batch_size", 64),
        (["--lr_scheduler.decay_ratio", "0.5"], "lr_scheduler.decay_ratio", 0.5),
        (["--data.source", "hf:allenai/c4:en"], "data.source", "hf:allenai/c4:en"),
        (["--job.name=--odd"], "job.name", "--odd"),
        (["--metrics.wandb_group="], "metrics.wandb_group", ""),
        (["--metrics.wandb_group", "training.steps"], "metrics.wandb_group", "training.steps"),
        (["--metrics.wandb_group", "a=b"], "metrics.wandb_group", "a=b"),
        (["--optimizer.lr", "1"], "optimizer.lr", 1.0),
        (["--training.steps", "1", "--training.steps", "2"], "training.steps", 2),
    ],
)
def test_values(file: str, argv: list[str], key: str, value: object) -> None:
    section, _, name = key.partition(".")
    got = getattr(getattr(config_of("--config", file, *argv), section), name)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--training.stepz", "5"], ["--training.stepz = 5", "did you mean training.steps?"]),
        (["--lr", "5"], ["--lr = 5", "did you mean optimizer.lr?"]),
        (["--learning-rate", "5"], ["did you mean optimizer.lr?"]),
        (["--optimizer.ema", "0.9"], ["did you mean optimizer.ema_decay?"]),
        (["--optimizer.momentum", "0.9"], ["write momentum in a group of a recipe of your own: docs/optimizers.md"]),
        (["--training"], ["--training", "see --help training"]),
        (["--activation_checkpoint.mode", "full"], ['fix:  use --activation_checkpoint.recipe "full"']),
        (["--training.compile"], ["fix:  use --compile.enable true"]),
        (["--training.batch_size", "3"], ["fix:  use --training.local_batch_size 3"]),
        (["--validation.dataset", "c4_test"], ['fix:  use --validation.source "hf:./tests/assets/c4_test"']),
        (["--optimizer.name", "adamw"], ['fix:  use --optimizer.recipe "adamw"']),
        (["--model.converters", "float8", "mx"], ["fix:  remove it, a key of torchtitan's; titanlite has no"]),
        (["--checkpoint.async_mode", "async_with_pinned_mem"], ['fix:  --checkpoint.async_mode "async"']),
        (["--training.steps", "1e4"], ["want: a whole number", "fix:  --training.steps 10000"]),
        (["--training.steps", "many"], ["--training.steps = many", "fix:  --training.steps 10000 (the default)"]),
        (["--training.steps"], ["want: a whole number"]),
        (["--training.steps", "9" * 4300], ["want: a whole number", "… (4,300 characters)"]),
        (["--training.steps", "9" * 5000], ["want: a whole number"]),
        (["--training.steps", str(2**63)], [f"--training.steps = {2**63}\n", "want: a whole number"]),
        (["--training.steps", "5", "6"], ["--training.steps = 5 6", "want: a whole number"]),
        (["--training.deterministic", "maybe"], ["--training.deterministic = maybe", "want: true or false"]),
        (["--checkpoint.resume", "None"], ["--checkpoint.resume = None", '"auto", "never" or a whole number']),
        (["--checkpoint.resume", "nevr"], ['"auto", "never" or a whole number', 'did you mean "never"?']),
        (["--no-such"], ["--no_such"]),
        (["--job.name", "caf\udce9"], ["caf\udce9", "want: a word in UTF-8"]),
        (["--no-validation.enable"], ["fix:  --validation.enable false"]),
        (["--validation.no-enable"], ["fix:  --validation.enable false"]),
        (["training.steps=5"], ["training.steps=5", "fix:  --training.steps=5"]),
        (["-training.seq-len", "5"], ["-training.seq-len", "fix:  --training.seq-len"]),
        (["--validation.enable", "training.steps=5"], ["fix:  --training.steps=5"]),
        (["more"], ["  more\n", "want: a flag, such as --training.steps 100", "fix:  leave it out, or write the flag"]),
        (["-v"], ["  -v\n", "want: a flag, such as --training.steps 100", "fix:  leave it out, or write the flag"]),
        (["--data.mixture", "x"], ["want: tables in the config file, and no flag"]),
        (["--data.source"], ["want: a string\n", 'fix:  --data.source "python_stdlib" (the default)']),
    ],
)
def test_one_bad_flag(file: str, argv: list[str], parts: list[str]) -> None:
    said = message("--config", file, *argv)
    assert said.startswith("command line: 1 problem\n")
    for part in parts:
        assert part in said


def test_bad_flags_and_a_bad_file_are_reported_together(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("[training]\nstepz = 5\n")
    said = message("--config", str(bad), "--optimizer.lr", "fast", "--optimzer.lr", "1", "--training.seed", "x")
    assert f"{bad}: 1 problem\n  line 2  training.stepz = 5" in said
    assert "command line: 3 problems" in said
    for part in ("--optimizer.lr = fast", "--optimzer.lr = 1", "--training.seed = x"):
        assert part in said


def test_the_config_must_be_named_once(file: str) -> None:
    assert "fix:  name it: train.py configs/debug.toml" in message("--training.steps", "5")
    for nothing in (["--config"], ["--config="], ["--config", ""]):
        assert "--config\n      want: one TOML file" in message(*nothing)
    misspelt = message("--confg", file)
    assert f"--confg = {file}\n" in misspelt
    assert "fix:  did you mean --config?" in misspelt
    assert "a flag, such as" in message(file, file)
    assert "want: one TOML file\n      fix:  extends = " in message("--config", file, "--config", file)


def test_the_config_may_stand_first_without_its_flag(file: str) -> None:
    assert config_of(file, "--training.steps", "9") == config_of("--training.steps", "9", "--config", file)
    assert "want: one TOML file\n" in message(file, "--config", file)


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_fits_a_screen_and_lists_every_section(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    with pytest.raises(SystemExit) as caught:
        config_of(flag)
    assert caught.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    for section in sections():
        assert sum(line.startswith(f"  {section} ") for line in lines) == 1


def test_help_of_a_section_explains_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    for section in sections():
        with pytest.raises(SystemExit):
            config_of("--help", section)
        page = capsys.readouterr().out
        for key in schema_keys():
            head = f"[[{key}]]" if table_of(schema_keys()[key]) else f"--{key}"
            assert (f"\n{head}  " in page) == key.startswith(f"{section}.")
    assert "Profiling" not in page
    with pytest.raises(SystemExit):
        config_of("--config", "x.toml", "--help", "training")
    page = capsys.readouterr().out
    assert '--training.on_nonfinite  "stop" or "skip"; default: "stop"' in page
    assert "--training.global_batch_size  a whole number, at least 1; default: not given" in page
    assert "Sequences per data-parallel rank per micro-step." in page
    assert "did you mean [training]?" in message("--help", "trainin")
    for spelling in (["--help=training"], ["--help", "training.steps"], ["--help", "--training.seq-len"]):
        with pytest.raises(SystemExit):
            config_of(*spelling)
        assert capsys.readouterr().out == page
