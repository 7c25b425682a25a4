"""What a config file may say, and what is said about one that is wrong."""

import dataclasses
import os
from pathlib import Path

import pytest

from titanlite.config import toml_file
from titanlite.config.build import from_table
from titanlite.config.problems import Origin, Place, Problems
from titanlite.config.read import read_config, suggest_key
from titanlite.config.recipe_schema import ModelDims
from titanlite.config.schema import Config, schema_keys
from titanlite.config.synonyms import SYNONYMS
from titanlite.config.toml_file import shipped_folder
from titanlite.config.torchtitan import answer_to_key
from titanlite.errors import ConfigError


def write(folder: Path, text: str, name: str = "run.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def message(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    return str(caught.value)


def test_values_have_the_types_of_the_schema(tmp_path: Path) -> None:
    path = write(tmp_path, '[training]\nmax_norm = 1\n[job]\nrecipe_dirs = ["a", "b"]\n[checkpoint]\nresume = 7\n')
    config, origin = read_config(path)
    assert type(config.training.max_norm) is float
    assert config.job.recipe_dirs == ("a", "b")
    assert config.checkpoint.resume == 7
    assert origin.of("training.max_norm") == Place(str(path), 2)
    assert origin.of("training.steps") == Place(str(path), None)
    unsaid = dataclasses.replace(config, training=Config().training, job=Config().job, checkpoint=Config().checkpoint)
    assert unsaid == Config()


def test_all_problems_come_at_once_each_with_its_line(tmp_path: Path) -> None:
    text = "# a run\n[training]\nstepz = 5\nlr = 3e-4\nsteps = '100'\n\n[job]\nstrict = 'yes'\n[trainin]\nsteps = 1\n"
    said = message(path := write(tmp_path, text)).splitlines()
    assert [line for line in said if not line.startswith("    ")] == [
        f"{path}: 5 problems",
        "  line 3  training.stepz = 5",
        "  line 4  training.lr = 0.0003",
        '  line 5  training.steps = "100"',
        '  line 8  job.strict = "yes"',
        "  line 9  trainin",
    ]
    assert said[2].startswith("      want: one of steps, tokens, seq_len, ")
    assert said[5] == "      want: one of the same, above"


FIXES = {
    "training = 5": "write it as a table: [training]",
    "training_steps = 5": "did you mean training.steps?",
    "steps = 5": "did you mean training.steps or validation.steps or profiling.steps?",
    "job.strict = 0": "strict = false",
    "job.strict = 'No'": "strict = false",
    "job.strict = 'maybe'": "strict = true (the default)",
    "data.source = 5": 'source = "python_stdlib" (the default)',
    "job.recipe_dirs = 'mine'": 'recipe_dirs = ["mine"]',
    "training.steps = '100'": "steps = 100",
    "training.seq_len = 4096.0": "seq_len = 4096",
    "training.deterministic = 1": "deterministic = true",
    "training.on_nonfinite = 'skipp'": 'did you mean "skip"?',
    "trainin.steps = 1": "did you mean [training]?",
    "checkpoint.resume = '100'": "resume = 100",
    "checkpoint.async_mode = 'async_with_pinned_mem'": 'async_mode = "async"',
    "metrics.enable_wandb = true": 'this is torchtitan\'s; titanlite convert FILE writes metrics.wandb = "online"',
    "activation_checkpoint.mode = ['full']": "titanlite convert FILE writes activation_checkpoint.recipe",
    "[training]\nextends = 'base.toml'": "move it above the first table",
    "training.shuffle_need = 1": "remove it",  # no nearer to training.seed than to any other
    "training.dataset_seed = 1": "remove it",
    "experts.top_k = 1": "write it in the table [experts] of a recipe of your own",
    "model.n_experts = 1": "write it in the table [experts] of a recipe of your own",
    "optimizer.groups.a.rule = 'muon'": "write groups in a recipe of your own",
    "training.sed = 1": "did you mean training.seed?",
    "training.lr = 1": "did you mean optimizer.lr?",
    "[[data.stage]]\nfrom_tokens = 1\nseqlen = 1": "did you mean data.stage[0].seq_len?",
    "[[data.stage]]\nfrom_tokens = 1\nlr = 1": "remove it",
    "[[data.stage]]\nfrom_tokens = 1\nbatch_size = 1": "did you mean data.stage[0].global_batch_size?",
    "model.name = 'qwen2'": 'choose one of these; "llama3" is the default',  # another, not misspelt
    "zzz.x = 1": "remove it",
    "dataset.x = 1": "did you mean [data]?",
    "optimizer.name = 'adamw'": 'recipe = "adamw" in its place',
    "parallelism.context_parallel_degre = 2": "did you mean parallelism.context_parallel_degree?",
}


@pytest.mark.parametrize("text", FIXES)
def test_one_problem_has_the_fix_that_was_meant(tmp_path: Path, text: str) -> None:
    """That each is found, and in which line, has tests/data/refusals.toml."""
    said = message(write(tmp_path, text))
    assert "1 problem\n" in said
    assert FIXES[text] in said.partition("fix:  ")[2]


def test_names_of_other_trainers_are_none_here_and_lead_to_keys_that_are() -> None:
    names = {key.partition(".")[2] for key in schema_keys()}
    for name, meant in SYNONYMS.items():
        assert name not in names
        assert {key for key in meant.split() if "." in key} <= schema_keys().keys()
        for path in (name, f"trainer.{name}", f"{meant.partition('.')[0]}.{name}"):
            assert suggest_key(path) == f"did you mean {meant}?" or answer_to_key(path)
    from_table(ModelDims, {"hidden_size": 64}, problems := Problems(Origin("recipe")))
    assert "did you mean dim?" in [problem.fix for problem in problems.found()]


def test_a_folder_and_a_binary_file_are_no_config(tmp_path: Path) -> None:
    assert "is a directory" in message(tmp_path)
    (tmp_path / "x.toml").write_bytes(b"[job]\n\xff")
    assert "byte 6" in message(tmp_path / "x.toml")
    assert "UTF-8" in message(tmp_path / "x.toml")
    (tmp_path / "x.toml").write_bytes(b"\xef\xbb\xbf[job]\nnam = 'x'\n")  # as editors of Windows begin a file
    assert "line 2  job.nam" in message(tmp_path / "x.toml")


def test_the_place_of_a_file_that_is_extended_has_no_detour(tmp_path: Path) -> None:
    for folder in ("mine", "configs", "elsewhere/deep"):
        (tmp_path / folder).mkdir(parents=True)
    write(tmp_path, "[training]\nseed = 1\n", "configs/base.toml")
    path = write(tmp_path, 'extends = ["../configs/base.toml"]\n', "mine/run.toml")
    assert read_config(path)[1].of("training.seed") == Place(str(tmp_path / "configs/base.toml"), 2)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere/deep")  # whose `..` is elsewhere
    write(tmp_path, "[training]\nseed = 2\n", "elsewhere/base.toml")
    write(tmp_path, "[training]\nseed = 3\n", "base.toml")
    path = write(tmp_path, 'extends = ["link/../base.toml"]\n')
    config, origin = read_config(path)
    assert config.training.seed == 2
    assert origin.of("training.seed") == Place(str(tmp_path / "link/../base.toml"), 2)


def test_extends_merges_in_order_and_the_file_itself_wins(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    first = write(tmp_path, "[training]\nsteps = 1\nseed = 1\nseq_len = 64\n", "base/first.toml")
    write(tmp_path, '[training]\nseed = 2\n[job]\nrecipe_dirs = ["a", "b"]\n', "base/second.toml")
    write(tmp_path, 'extends = ["second.toml"]\n', "base/third.toml")
    path = write(
        tmp_path,
        'extends = ["base/first.toml", "base/third.toml"]\n[training]\nsteps = 3\n[job]\nrecipe_dirs = ["c"]\n',
    )
    config, origin = read_config(path)
    assert (config.training.steps, config.training.seed, config.training.seq_len) == (3, 2, 64)
    assert config.job.recipe_dirs == ("c",)  # a list is replaced, not continued
    assert origin.of("training.steps") == Place(str(path), 3)
    assert origin.of("training.seq_len") == Place(str(first), 4)
    assert "job.recipe_dirs[1]" not in origin.places
    # What extends a file twice, by ways of different length, sees it as it is.
    write(tmp_path, 'extends = ["base/first.toml"]\n[training]\nsteps = 8\n', "over.toml")
    assert read_config(write(tmp_path, 'extends = ["over.toml", "base/first.toml"]'))[0].training.steps == 1


def test_problems_of_a_base_file_are_under_its_name(tmp_path: Path) -> None:
    base = write(tmp_path, "\n[training]\nstepz = 1\n", "base.toml")
    path = write(tmp_path, 'extends = ["base.toml"]\n[optimizer]\nlr = "x"\n')
    said = message(path)
    assert f"{base}: 1 problem\n  line 3  training.stepz" in said
    assert f"{path}: 1 problem\n  line 3  optimizer.lr" in said


def test_a_circle_of_extends_is_shown(tmp_path: Path) -> None:
    a = write(tmp_path, 'extends = ["b.toml"]', "a.toml")
    b = write(tmp_path, '\nextends = ["a.toml"]', "b.toml")
    said = message(a)
    assert f"{b}: 1 problem\n  line 2  extends" in said
    assert f"{a} → {b} → {a}" in said
    itself = write(tmp_path, 'extends = ["c.toml"]', "c.toml")
    assert f"{itself} → {itself}" in message(itself)


def test_a_long_chain_of_extends_ends_in_words(tmp_path: Path) -> None:
    for n in range(1100):
        write(tmp_path, f'extends = ["{n + 1}.toml"]', f"{n}.toml")
    want = f"at most 32 files that extend each other, from {tmp_path / '0.toml'} on"
    assert f'{tmp_path / "31.toml"}: 1 problem\n  line 1  extends = "32.toml"\n      want: {want}' in message(
        tmp_path / "0.toml"
    )


BEYOND = {
    "nested": (
        "data.source = " + "[" * 2000 + "]" * 2000,
        "nested more than the allowed 400 levels\n      want: tables",
    ),
    "dotted": (
        ".".join("a" * 5000) + " = 1",
        "more than the allowed 1000 parts\n      want: tables and lists at most 32",
    ),
    "digits": ("training.steps = " + "9" * 5000, "5000 digits\n      want: whole numbers of at most 64 bits"),
    "hexadecimal": ("seeds = [0x" + "f" * 9999 + "]", "line 1  seeds[0] = a number of 39,996 bits\n      want: whole"),
    "large": ("#" * 200_000, "  200,000 bytes, which no config has\n      want: a TOML file"),
    "keys": ("".join(f"k{n} = 1\n" for n in range(500)), "line 100  k99 = 1\n"),
    "a key": ("k" * 5000 + " = 1", f"line 1  {'k' * 2000}… (5,000 characters) = 1\n"),
}


@pytest.mark.parametrize(("text", "said"), BEYOND.values(), ids=BEYOND)
def test_what_no_config_says_ends_in_words(tmp_path: Path, text: str, said: str) -> None:
    found = message(write(tmp_path, text))
    assert said in found
    assert len(found) < 30_000
    if text.startswith("k0"):
        assert found.endswith("\n  and 400 more")


def test_the_largest_numbers_are_read(tmp_path: Path) -> None:
    path = write(tmp_path, f"[training]\nsteps = {2**63 - 1}\nseed = {-(2**63) + 1}\nmax_norm = nan\n")
    assert read_config(path)[0].training.steps == 2**63 - 1


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    assert "a pipe or a device\n      want: a TOML file" in message(tmp_path / "pipe.toml")
    assert "a pipe or a device\n" in message(Path("/dev/zero"))


def test_a_shipped_config_or_one_that_is_near_may_have_been_meant(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").touch()
    assert f"did you mean {shipped_folder('configs') / 'debug.toml'}?" in message(tmp_path / "debug.toml")
    said = message(tmp_path / "mime.toml")
    assert said.startswith(f"{tmp_path / 'mime.toml'}: 1 problem\n  no such file or directory\n")
    assert f"did you mean {tmp_path / 'mine.toml'}?" in said
    other = message(tmp_path / "other.toml")
    assert "did you mean" not in other
    assert "llama3_8b.toml" in other  # no neighbour is near: the shipped ones are named


@pytest.mark.parametrize("name", [".", "loop.toml", "x" * 300])
def test_what_extends_names_must_be_a_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    said = message(write(tmp_path, f'extends = "{name}"'))
    assert f'line 1  extends = "{name}"\n      want: the path of an existing TOML file; ' in said
    assert "did you mean loop.toml?" not in said


def test_a_file_that_cannot_be_read_is_not_proposed_instead_of_itself(tmp_path: Path) -> None:
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    said = message(tmp_path / "loop.toml")
    assert "too many levels of symbolic links" in said
    assert "did you mean" not in said


def test_a_file_that_is_extended_often_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, of = list[Path](), toml_file._read_one
    monkeypatch.setattr(toml_file, "_read_one", lambda path: (read.append(path), of(path))[1])
    for n in range(8):
        write(tmp_path, f'extends = ["{n + 1}.toml", "{n + 1}.toml"]', f"{n}.toml")
    write(tmp_path, "[training]\nsteps = 5\n", "8.toml")
    assert read_config(tmp_path / "0.toml")[0].training.steps == 5
    assert len(read) == 9
