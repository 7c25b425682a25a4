"""The check before a run: one message, exit code 2, no torch, well under a second."""

import importlib
import importlib.metadata
import json
import os
import pwd
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tomli

import titanlite
import titanlite.train
from tests.cli.commands.conftest import Call
from tests.support.cpu import cpu_of_children
from tests.support.measured import MEASURED_CONFIGS
from tests.support.safetensors_header import header_of, write_header
from tests.unit.data.test_tokenizer import make_tokenizer
from titanlite.activation_checkpoint.operations import CLASSES, PIECE_ATTENTION
from titanlite.commands import COMMANDS, main, module_of
from titanlite.config.architectures import ARCHITECTURES
from titanlite.config.check import _FROM_HOME
from titanlite.config.hugging_face import config_json
from titanlite.config.toml_file import shipped_folder
from titanlite.data.tokenizer import FileTokenizer
from titanlite.errors import ConfigError, TitanliteError
from titanlite.preflight.checked_run import checked_run
from titanlite.recipes import load
from titanlite.training.assemble import try_assembly

CONFIGS = sorted(shipped_folder("configs").glob("*.toml"))
ROOT = shipped_folder("configs").parent
DEBUG = str(shipped_folder("configs") / "debug.toml")
LITTLE = "0.2% of the model's ids can occur"
WORLDS = {
    **dict.fromkeys(("debug", "qwen3_moe_debug"), (1, 2, 4)),
    **dict.fromkeys(("llama3_8b_128k", "qwen3_moe_30b_a3b"), (8, 16)),
    "llama3_70b": (16, 64),
    "llama3_405b": (128, 512),
}


@pytest.fixture(autouse=True)
def _where_nothing_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout may have an `outputs/debug`, of another run than these."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "run.toml"
    chosen = 'model.flavor = "debug"\ndata.source = "python_stdlib"\n'
    path.write_text(f"{chosen}[training]\nsteps = 100\n[lr_scheduler]\nwarmup_steps = 10\n")
    return str(path)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_shipped_config_passes(path: Path) -> None:
    for world in (None, *WORLDS.get(path.stem, (1, 8, 16))):
        checked = checked_run(["--config", str(path)], world_size=world)
        assert checked.config.job.name == path.stem
        assert checked.hints == ()
        is_small = checked.dims.vocab_size == 256  # the others name their model, and the ids of `bytes`
        warned = [text for text in checked.warnings if " epochs in " not in text]  # each Python has another library
        assert [LITTLE.partition("%")[2] in text for text in warned] == [True] * (not is_small)
    floats = checked_run(["--config", str(path), "--float8.recipe", "rowwise"], world_size=None)
    assert floats.float8 == load("float8", "rowwise")


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (("--training.steps", "3"), "is less than lr_scheduler.warmup_steps = 10: the learning rate rises to 0.3 of"),
        (("--lr_scheduler.warmup_steps", "200"), "the learning rate rises to 0.5 of optimizer.lr, and no further"),
        (("--job.stop_after", "3"), ""),
        (("--job.stop_after", "3", "--checkpoint.enable", "false"), ""),
    ],
)
def test_a_schedule_that_is_cut_is_a_warning_and_at_a_look_a_hint(file: str, flags: tuple[str, ...], hint: str) -> None:
    checked = checked_run([file, *flags])
    said, others = checked.warnings, checked.hints
    if "--training.steps" in flags:  # a look at a few steps
        said, others = others, tuple(text for text in said if "schedule" in text)
    assert len(said) == bool(hint)
    assert hint in "".join(said)
    assert others == ()


@pytest.mark.parametrize(
    ("interval", "freq", "said"),
    [
        (30, 50, "of 11 checkpoints 3 will have this loss"),  # of steps 150, 300 and 310, the last
        (10, 30, "of 31 checkpoints 11 will have this loss"),
        (10, 20, ""),  # half of them
        (25, 5, ""),
        (400, 30, ""),
    ],
)
def test_checkpoints_of_which_few_have_the_loss_that_is_kept_are_a_warning(
    file: str, interval: int, freq: int, said: str
) -> None:
    keep = "--training.steps=310", "--checkpoint.keep_best=validation_loss"
    flags = *keep, "--validation.enable", f"--validation.freq={freq}"
    warned = checked_run([file, *flags, f"--checkpoint.interval={interval}"]).warnings
    found = [text for text in warned if text.startswith('checkpoint.keep_best = "validation_loss": ')]
    assert len(found) == bool(said)
    assert said in "".join(found)


def test_what_needs_care_is_counted_as_a_warning(file: str, call: Call) -> None:
    out = call("validate", file, "--model.vocab_size", "260", "--lr_scheduler.warmup_steps", "101")
    assert out.startswith(f"{file}: 2 warnings\n  warning: model.vocab_size = 260 is not a multiple of 8 ")
    assert "\n  warning: training.steps = 100 is less than lr_scheduler.warmup_steps" in out


def test_what_needs_validation_has_no_effect_where_it_is_turned_off(file: str, call: Call) -> None:
    keys = 'validation.samples = ["x"]\nvalidation.sources = ["a=nowhere.txt"]\nvalidation.weights = "ema"\n'
    Path(file).write_text(keys + Path(file).read_text())
    assert "but validation.enable = false" in call("validate", file, ends=2)
    assert "but optimizer.ema_decay = 0" in call("validate", file, "--validation.enable", ends=2)
    hint = "without effect, because validation.enable = false: validation.sources, validation.weights, validation.sam"
    assert hint in call("validate", file, "--validation.enable=false")


def test_a_model_that_cannot_be_exported_is_said_before_it_is_trained(file: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    recipe = 'extends = "qwen3_moe-debug"\n[experts]\nbalance_bias = 0.001\n'
    (tmp_path / "model" / "qwen3_moe-mine.toml").write_text(recipe)
    flags = ["--config", file, "--model.name", "qwen3_moe", "--job.recipe_dirs", str(tmp_path), "--model.flavor"]
    assert checked_run([*flags, "debug"]).hints == ()
    (hint,) = checked_run([*flags, "mine"]).hints
    assert hint.startswith(
        "titanlite export will refuse this model: experts.balance_bias = 0.001 is computed by no class"
    )


def test_the_shipped_configs_are_those_of_the_published_sizes() -> None:
    assert [p.stem for p in CONFIGS] == [
        "debug",
        *(f"llama3_{size}" for size in ("150m", "1b", "1b_8gpus", "3b", "405b", "70b", "8b", "8b_128k")),
        "olmoe_1b_7b",
        "qwen3_moe_30b_a3b",
        "qwen3_moe_30b_a3b_64gpus",
        "qwen3_moe_debug",
    ]


def test_validation_on_text_that_is_trained_on(file: str, tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("x" * 10_000)
    flags = ["--config", file, "--validation.enable", "--data.source"]

    def warnings(source: str, held_out: str, *more: str) -> tuple[str, ...]:
        found = checked_run([*flags, source, "--validation.source", held_out, *more]).warnings
        return tuple(text for text in found if " epochs in " not in text)

    said = "is part of data.source (2 of its 2 files): it is trained on, and its loss is not that of held-out text"
    assert warnings(f"{tmp_path}", f"{tmp_path}/[bc].txt") == (f'validation.source = "{tmp_path}/[bc].txt" {said}',)
    (cut,) = warnings(f"{tmp_path}", f"{tmp_path}", "--data.max_tokens=9")
    assert "(3 of its 3 files): it is trained on, unless data.max_tokens leaves it out, and its loss" in cut
    assert warnings(f"{tmp_path}/a.txt", f"{tmp_path}/[bc].txt") == ()
    assert "(the same dataset, config and split)" in warnings(f"hf:{tmp_path}", f"hf:{tmp_path}")[0]
    assert warnings(f"hf:{tmp_path}", f"hf:{tmp_path}::test") == ()


def test_a_start_from_foreign_weights(file: str, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    layout, sizes = ARCHITECTURES["llama3"], load("model", "llama3-debug")
    sizes = replace(sizes, vocab_size=320)
    (folder / "config.json").write_text(json.dumps(config_json(layout, sizes, 2048, "float32", 0)))
    write_header(folder / "model.safetensors", header_of("llama3", sizes))
    make_tokenizer(folder / "tokenizer.json")
    own = make_tokenizer(tmp_path / "tokenizer.json", special=("</s>",))
    given = ["--config", file, "--model.vocab_size", "320", "--job.dump_folder", str(tmp_path)]
    given += ["--checkpoint.initial_load_path", str(folder)]

    def hints(*flags: str) -> tuple[str, ...]:
        checked = checked_run([*given, *flags])
        others = "not chosen", "ids can occur", " epochs in "
        return (*checked.hints, *(text for text in checked.warnings if not any(said in text for said in others)))

    for tokenizer in ("bytes", str(own)):
        hint = hints("--data.tokenizer", tokenizer)[-1]
        assert f'data.tokenizer = "{tokenizer}" is not {folder / "tokenizer.json"}' in hint
    (unused,) = hints("--data.tokenizer", str(folder / "tokenizer.json"))
    assert "its truncation to 4 tokens is switched off, its padding is switched off, its post_processor, " in unused
    exported = FileTokenizer("", folder / "tokenizer.json").as_used()
    (folder / "tokenizer.json").write_text(exported)
    make_tokenizer(own)
    assert [text[:20] for text in hints("--data.tokenizer", str(own))] == [unused[:20]]
    assert hints("--data.tokenizer", str(folder / "tokenizer.json")) == ()
    (tmp_path / "ids.bin").write_bytes(bytes(10_000))
    assert hints("--data.source", str(tmp_path / "ids.bin")) == ()
    for content, n in (({"model": {"vocab": dict.fromkeys(map(str, range(256)))}}, 0), ({}, 1), ("no tokenizer", 1)):
        (folder / "tokenizer.json").write_text(json.dumps(content))  # of bytes; and what this run does not need
        assert len(hints()) == n
    (folder / "tokenizer.json").unlink()
    assert hints() == ()
    assert "--model.vocab_size" not in str(
        hints("--parallelism.tensor_parallel_degree=1", "--training.mixed_precision_param=bfloat16")
    )

    (folder / "model.safetensors").unlink()
    saved = tmp_path / "run/checkpoints/step-00000001"
    saved.mkdir(parents=True)
    (saved / "MANIFEST.json").touch()
    assert hints("--job.name", "run") == ()  # it goes on from there
    with pytest.raises(ConfigError, match=r"checkpoint.initial_load_path"):
        hints("--job.name", "run", "--checkpoint.enable", "false")


def test_what_was_not_chosen_and_ids_that_cannot_occur(tmp_path: Path) -> None:
    def warnings(text: str, *flags: str) -> tuple[str, ...]:
        (tmp_path / "mine.toml").write_text(text)
        found = checked_run(["--config", str(tmp_path / "mine.toml"), *flags]).warnings
        return tuple(text for text in found if " epochs in " not in text)

    (tmp_path / "text.txt").write_text("x" * 100_000)
    left, few = warnings("")
    assert left.startswith('model.flavor = "8B", data.source = "python_stdlib", data.tokenizer = "bytes": not chosen,')
    assert few.startswith('data.tokenizer = "bytes" has 256 ids and model.vocab_size is 128,256: 0.2% of the model')
    chosen = f'model.flavor = "1B"\ndata.source = "{tmp_path}/text.txt"\n'
    left, few = warnings(chosen)
    assert left.startswith('data.tokenizer = "bytes": not chosen,')
    assert LITTLE in few
    assert LITTLE in warnings(chosen, "--data.tokenizer=bytes")[0]  # chosen, and still not the model's
    assert warnings(chosen, "--model.vocab_size=256") == ()  # the ids of `bytes` are its own
    assert warnings(chosen, "--model.vocab_size=280") == ()  # padded
    assert len(warnings(chosen, "--model.vocab_size=288")) == 2
    (held_out,) = warnings(chosen, "--model.vocab_size=256", "--validation.enable")
    assert held_out.startswith('validation.source = "python_stdlib_held_out": not chosen')
    own = str(make_tokenizer(tmp_path / "tokenizer.json", special=("</s>",)))
    (few,) = warnings(chosen, "--data.tokenizer", own)
    assert "ids can occur" in few
    assert few.endswith("or set model.vocab_size = 384")  # 271 ids, and a multiple of 128: nothing more is said of it
    assert warnings(chosen, "--model.vocab_size=384", "--data.tokenizer", own) == ()
    (tmp_path / "ids.bin").write_bytes(bytes(100_000))  # which has no use for a tokenizer
    (few,) = warnings(chosen, f"--data.source={tmp_path}/ids.bin")
    assert few.startswith(f"data.source = {tmp_path}/ids.bin has 1 id")  # all are 0


def test_a_folder_with_other_dimensions(file: str, tmp_path: Path) -> None:
    """What the message says leads to a run, in one step, where a tokenizer of that folder is named as well."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    sizes = replace(load("model", "qwen3-debug"), vocab_size=272, ffn_dim=384, norm_eps=3e-6, tied_embeddings=False)
    content = config_json(ARCHITECTURES["qwen3"], sizes, 2048, "float32", 0)
    (folder / "config.json").write_text(json.dumps(content))
    write_header(folder / "model.safetensors", header_of("qwen3", sizes))
    tokenizer = make_tokenizer(folder / "tokenizer.json")  # of 271 ids, more than the 256 of a debug size
    given = ["--config", file, "--job.dump_folder", str(tmp_path), "--checkpoint.initial_load_path", str(folder)]
    given += ["--data.tokenizer", str(tokenizer)]
    with pytest.raises(ConfigError) as refused:
        checked_run(given)
    (report,) = refused.value.args
    (problem,) = report.problems
    assert problem.where == "model.name"
    assert problem.fix == 'name = "qwen3", with flavor = "from_checkpoint"'

    given += ["--model.name", "qwen3"]
    with pytest.raises(ConfigError) as refused:
        checked_run(given)
    (report,) = refused.value.args
    (problem,) = report.problems  # and nothing of a vocabulary
    assert "norm_eps = 1e-06 (the folder has 3e-06)" in problem.want
    assert problem.fix.startswith('model.flavor = "from_checkpoint", and no other dimensions')

    checked = checked_run([*given, "--model.flavor", "from_checkpoint"])
    assert replace(checked.dims, help="", refs=()) == replace(sizes, help="", refs=())
    assert checked.warnings == ()
    (folder / "config.json").write_text(json.dumps(content | {"intermediate_size": 400}))
    with pytest.raises(
        ConfigError, match=r"model.ffn_dim = 400\n +want: a multiple of 128\n +fix:  name another folder"
    ):
        checked_run([*given, "--model.flavor", "from_checkpoint"])
    (folder / "config.json").write_text(json.dumps(content | {"vocab_size": 264}))
    write_header(folder / "model.safetensors", header_of("qwen3", replace(sizes, vocab_size=264)))
    with pytest.raises(ConfigError, match=r"model.vocab_size = 264(.|\n)*name the tokenizer of the weights of"):
        checked_run([*given, "--model.flavor", "from_checkpoint"])


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> str:
    """That of a container whose user has no entry; what is said of it."""

    def no_entry(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    return f"want: a path that leads somewhere; HOME is not set, and user {os.geteuid()} has none\n"


def test_a_cache_in_a_home_that_is_not_there(no_home: str, file: str, call: Call) -> None:
    assert f'\n  data.cache_dir = "~/.cache/titanlite/data"\n      {no_home}' in call("validate", file, ends=2)


@pytest.mark.parametrize("key", _FROM_HOME)
def test_a_path_from_a_home_that_is_not_there(key: str, no_home: str, file: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        checked_run(["--config", file, "--data.cache_dir=cache", f"--{key}=~/x"])
    assert f'\n  {key} = "~/x"\n      {no_home}' in str(refusal.value)


def test_the_home_of_nobody(file: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"data.source = \"~nobody_here/x.txt\"\n *want: .*; no user is nobody_here\n"
    ):
        checked_run(["--config", file, "--data.source", "~nobody_here/x.txt"])
    (tmp_path / "~nobody_here").mkdir()  # the working directory has a folder of that name
    (tmp_path / "~nobody_here" / "x.txt").write_text("x" * 100_000)
    assert len(checked_run(["--config", file, "--data.source", "~nobody_here/x.txt"]).inputs.sources) == 1


def test_summary(file: str, call: Call) -> None:
    argv = ["validate", file, "--world", "8", "--training.global_batch_size", "32"]
    said = call(*argv, "--parallelism.tensor_parallel_degree", "2")
    assert said.startswith(f"{file}: no problems\n")
    assert "llama3 debug, 1,705,216 parameters" in said
    assert "replicate 1 × shard 4 × tensor 2: 8 processes" in said
    assert "65,536 tokens a step, 6,553,600 in 100 steps; 8 micro-steps" in said
    assert " files taken\n  folder " in said
    assert os.path.join("outputs", "run") in said
    said = call("validate", file, "--model.dim", "512")
    assert "llama3 debug with dim 512, " in said
    assert "any number of processes" in said
    assert ": 2 processes" in call("validate", file, "--world", "8", "--world=2")


def test_summary_has_the_epochs_of_what_is_small_or_prepared(
    file: str, tmp_path: Path, call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    def data(*flags: str) -> str:
        capsys.readouterr()
        assert main(["validate", file, "--training.seq_len=100", f"--data.cache_dir={tmp_path}/cache", *flags]) == 0
        return next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  data "))

    (tmp_path / "small.txt").write_text("x" * 10_000)
    small = f"--data.source={tmp_path}/small.txt"
    assert data(small).endswith("bytes; 10,001 tokens, 1 epoch in 100 steps, times the number of data-parallel ranks")
    assert data(small, "--world=4").endswith("bytes; 10,001 tokens, 4 epochs in 100 steps")
    assert data(small, "--parallelism.data_parallel_shard_degree=2").endswith(", 2 epochs in 100 steps")
    assert data(small, "--training.global_batch_size=64").endswith(", 64 epochs in 100 steps")
    (tmp_path / "large.txt").write_text("x" * 2_000_000)
    large = [f"--data.source={tmp_path}/large.txt", "--world=4"]
    assert data(*large).endswith("tokenizer bytes")
    assert main(["prepare", "--config", file, f"--data.cache_dir={tmp_path}/cache", *large[:1]]) == 0
    assert data(*large).endswith("bytes; 2,000,001 tokens, 0.02 epochs in 100 steps")
    said = call("validate", file, f"--data.cache_dir={tmp_path}/cache", *large, "--training.seq_len=1_000_000", ends=2)
    assert "which has 2,000,001 tokens\n" in said
    (tmp_path / "ids.bin").write_bytes(bytes([7, 0]) * 501)
    ids = [f"--data.source={tmp_path}/ids.bin", "--data.tokenizer=nowhere/tokenizer.json", "--world=1"]
    assert data(*ids).endswith("/ids.bin, token files; 501 tokens, 20 epochs in 100 steps")


def test_cache_and_folder_of_a_run_that_cannot_be_written_are_said_at_once(
    file: str, bound_by_permissions: None, call: Call
) -> None:
    for mode in (0o500, 0o000, 0o600):
        Path("closed").mkdir()
        Path("closed").chmod(mode)
        for cache in ("closed", "closed/cache", "closed/below/cache"):
            flags = ["run.toml", f"--data.cache_dir={cache}", "--data.source=hf:a/b", "--job.dump_folder=closed"]
            said = call("validate", *flags, ends=2)
            assert f"data.cache_dir = '{cache}': [Errno 13] Permission denied" in said
            assert "that can be entered and written\n      fix:  make it writable, or set data.cache_dir" in said
            assert "job.dump_folder = closed" in said
            checked_run(["--config", *flags[:3]])  # a plan, which need not be made on the host that prepares
        Path("closed").rmdir()


def test_what_wandb_would_read_from_the_environment(file: str, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WANDB_PROJECT", "ours"), ("WANDB_MODE", "offline"), ("WANDB_RUN_NAME", "first")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WANDB_NAME", raising=False)
    assert "WANDB" not in call("validate", file)  # of no concern
    said = call("validate", file, "--metrics.wandb", "offline")
    assert '  WANDB_PROJECT=ours of the environment is not used; metrics.wandb_project = "titanlite" is\n' in said
    assert '  WANDB_RUN_NAME=first of the environment is not used; job.name = "run" is\n' in said
    assert said.count("WANDB") == 2
    same = ["--metrics.wandb_project", "ours", "--job.name", "first"]
    assert "WANDB" not in call("validate", file, "--metrics.wandb", "offline", *same)


def test_summary_of_a_source_on_the_hub(file: str, call: Call) -> None:
    out = call("validate", file, "--data.source", "hf:allenai/c4:en")
    assert (
        ": 1 warning\n  warning: hf:allenai/c4:en is on the hub, and all of it is tokenized before the first step"
        in out
    )
    assert "data.max_tokens limits it\n" in out
    limit = ["--data.max_tokens", "2_000_000"]
    out = call("validate", file, "--data.source", "hf:allenai/c4:en", *limit)
    assert "is on the hub" not in out
    assert "data      hf:allenai/c4:en, data.max_tokens 2,000,000, tokenizer bytes\n" in out
    said = call("validate", file, *limit, "--validation.enable", "--validation.source", "hf:a/b")
    assert "no problems\n  hf:a/b is on the hub, and all of it" in said  # held-out text is small


def test_summary_of_what_was_prepared_from_the_hub(
    file: str, tmp_path: Path, call: Call, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    (there := tmp_path / "hub").mkdir()
    (there / "a.jsonl").write_text(json.dumps({"text": "x" * 5000}))
    load = datasets.load_dataset_builder
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_: load(str(there)))
    flags = [f"--data.cache_dir={tmp_path}/cache", "--data.source=hf:allenai/c4:en", "--training.global_batch_size=2"]
    assert main(["prepare", "--config", file, *flags]) == 0
    capsys.readouterr()
    out = call("validate", file, *flags)
    assert "is on the hub" not in out
    assert "hf:allenai/c4:en, tokenizer bytes; 5,001 tokens, " in out


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ([], ["model.vocab_size = 50257 is not a multiple of 8 (16 bytes in bfloat16):", "--model.vocab_size 50304 "]),
        (["--model.vocab_size", "50304"], []),
        (["--model.vocab_size", "50264"], []),
        (
            ["--model.vocab_size", "50264", "--parallelism.tensor_parallel_degree", "2"],
            ["is not a multiple of 16 (16 bytes in bfloat16 on each of 2 ranks)", "--model.vocab_size 50304 "],
        ),
        (["--training.mixed_precision_param", "float32"], []),
    ],
)
def test_a_vocabulary_without_an_aligned_kernel(file: str, call: Call, flags: list[str], parts: list[str]) -> None:
    gpt2 = ("--model.name", "gpt2", "--model.flavor", "774M", "--training.seq_len", "1024")
    said = call("validate", file, *gpt2, *flags)
    assert ("several times slower" in said) == bool(parts)
    for part in parts:
        assert part in said


def refused(file: str, *flags: str, world: int | None = None) -> str:
    """What `plan` and the start of a run say, which import torch; nothing if they would go on."""
    try:
        try_assembly(checked_run(["--config", file, *flags], world), world)
    except TitanliteError as error:
        return str(error)
    return ""


def rule(op: str, more: str = "", action: str = "save") -> str:
    return f'[[rules]]\nop = "{op}"\n{more}\naction = "{action}"\n'


GPT2 = ("--model.name=gpt2", "--model.flavor=774M")
TP = ("--parallelism.tensor_parallel_degree=2",)
ASYNC = (*TP, "--parallelism.async_tensor_parallel")
ROWWISE, MIXTURE, LENIENT = ("--float8.recipe=rowwise",), ("--model.name=qwen3_moe",), ("--job.strict=false",)
PARTLY = (*ROWWISE, "--float8.filter_fqns", "layers.0.")
W13, WQKV, WV = ('module = ["w13"]', 'module = ["wqkv"]', 'module = ["wv"]')
BALANCED = (shipped_folder("recipes") / "activation_checkpoint/balanced.toml").read_text().partition("[[")
KERNEL = CLASSES["attention"][0]
LATE, MATCHES_NOTHING = 'layers = "100:"', "it matches nothing"
SAVE_LISTS: list[tuple[str, tuple[str, ...], str]] = [  # rules, behind another default if so, flags, what is said
    (rule("matmul", W13), (), ""),
    (rule("matmul", W13), GPT2, "want: a linear layer of a block: wqkv, wo, w1, w2"),
    (f'default = "save"\n{rule("matmul", W13, "recompute")}', (), ""),
    (f'default = "save"\n{rule("matmul", W13, "recompute")}', GPT2, "want: a linear layer of a block: wqkv, wo, w1"),
    (f'default = "save"\n{rule("matmul", WQKV, "recompute")}', ASYNC, "wqkv would be recomputed"),
    (f'default = "save"\n{rule("matmul", WQKV.replace("qkv", "o"), "recompute")}', ASYNC, ""),
    (rule("block", LATE), ASYNC, "line 5  rules[0].layers = |some of the model's 2 blocks|or set optional = true"),
    (rule("block", LATE), (*ASYNC, *LENIENT), ""),
    (rule("block", f"{LATE}\noptional = true"), ASYNC, ""),
    (rule("block", 'layers = "1:"'), ASYNC, ""),
    (rule("communication") + rule("attention"), ASYNC, "wqkv would be recomputed"),  # in a fused operation
    (rule("matmul", WV), (), 'line 5  rules[0].module = "wv"|did you mean "wqkv"?'),
    (rule("aten._scaled_dot_product_flash_attention.default"), (), 'module = ["wqkv"]'),
    (rule("communication"), (), f"line 4  rules[0].op|{MATCHES_NOTHING}|set optional = true"),
    (rule("cast", 'module = ["w2"]'), (), MATCHES_NOTHING),
    (rule("titanlite.scaled_matmul.default"), (), MATCHES_NOTHING),
    (rule("titanlite.scaled_mm.default"), (), 'did you mean "titanlite.scaled_matmul.default"?'),
    (rule("matmul", 'module = ["wqkw"]'), PARTLY, 'did you mean "wqkv"?'),
    (rule("attention"), PARTLY, "the matmuls behind attention's q, k and v kept as well"),
    (rule("cast", 'layers = ":1"'), PARTLY, MATCHES_NOTHING),
    (rule("cast", 'layers = "1:"'), PARTLY, ""),
    *(
        (text, (*MIXTURE, *flags), said)
        for flags in ((), ROWWISE)
        for text, said in (
            (rule("attention"), "the matmuls behind attention's q, k and v kept as well"),
            (rule("route", action="recompute"), "where tokens go is always kept"),
            (rule("titanlite.route.default", action="recompute"), "where tokens go is always kept"),
            (rule("titanlite.rout.default"), 'did you mean "titanlite.route.default"?'),
            (rule("matmul", 'module = ["w13", "w3"]'), 'did you mean "w13"?'),
            (rule("dispatch", 'layers = "2:"'), "some of the model's 2 blocks"),
            (rule("matmul", WQKV) + rule("attention"), ""),
        )
    ),
    (rule("matmul", WQKV) + rule("communication"), LENIENT, ""),
    (rule("matmul", WQKV) + rule("communication"), TP, ""),
    (rule("matmul", WQKV) + rule("titanlite.scaled_matmul.default"), ROWWISE, ""),
    (  # which of them runs shows on the device; the matmul that q, k and v come from is there
        "".join([rule("matmul", WQKV), *map(rule, (*CLASSES["attention"][:3], PIECE_ATTENTION))]),
        ("--data.document_mask=false",),
        "",
    ),
    ("".join(BALANCED[1:]) + rule(KERNEL), (), f'rules[3].op = "{KERNEL}"\n'),  # behind all of them
]


@pytest.mark.parametrize(("rules", "flags", "said"), SAVE_LISTS)
def test_a_save_list_that_cannot_work_here_is_refused_in_its_file(
    file: str, tmp_path: Path, rules: str, flags: tuple[str, ...], said: str
) -> None:
    """In the list that has the rule, where the config names another that extends it."""
    base, mine = tmp_path / "base.toml", tmp_path / "mine.toml"
    default = "" if rules.startswith("default") else 'default = "recompute"\n'
    base.write_text(f'help = ""\n{default}{rules}')
    mine.write_text('extends = "base.toml"\nhelp = "mine"\n')
    for name in (base, mine):
        found = refused(file, f"--activation_checkpoint.recipe={name}", "--training.seq_len=1024", *flags)
        assert found.startswith(f"{base}: 1 problem\n  line ") if said else found == ""
        for part in said.split("|"):
            assert part in found


def test_a_save_list_that_will_be_chosen(file: str, call: Call) -> None:
    auto = ("--activation_checkpoint.recipe", "auto", "--activation_checkpoint.budget_gib")
    said = call("validate", file, *auto, "8", "--world", "2")
    assert "activation_checkpoint auto within 8 GiB, float8 none" in said


@pytest.mark.parametrize("config", [["{file}"], ["--config", "{file}"], ["--config={file}"]])
def test_the_config_stands_first_or_behind_its_flag(file: str, call: Call, config: list[str]) -> None:
    """Of every command that takes one."""
    named = [word.format(file=file) for word in config]
    assert call("validate", "--world", "2", *named, "--training.steps", "30").startswith(f"{file}: no problems\n")
    for command in (["plan"], ["prepare"], ["verify-resume"]):
        said = call(*command, *named, "--training.stepz", "30", ends=2).startswith(
            "command line: 1 problem\n  --training.stepz = 30\n"
        )
        assert said


@pytest.mark.parametrize(
    ("flags", "want"),
    [
        ([], "at least 257 tokens: 1 sample of training.seq_len = 256, and 1"),
        (["--world", "2"], "at least 513 tokens: 2 samples"),
        (["--world", "4", "--parallelism.tensor_parallel_degree", "2"], "at least 513 tokens: 2 samples"),
        (["--training.global_batch_size", "8"], "at least 2,049 tokens: 8 samples"),
    ],
)
@pytest.mark.parametrize("kind", ["txt", "bin"])
def test_a_source_too_short_for_one_step_is_refused(
    file: str, tmp_path: Path, call: Call, kind: str, flags: list[str], want: str
) -> None:
    short = tmp_path / f"short.{kind}"
    short.write_bytes(b"x" * 255 if kind == "txt" else b"x\0" * 256)  # 256 tokens, with the separator
    argv = ["validate", file, "--data.source", str(short), "--training.seq_len", "256", *flags]
    said = call(*argv, ends=2)
    assert "1 problem\n" in said
    assert f"data.source = {str(short)!r}, which has 256 tokens" in said
    assert want in said
    if not flags:
        assert main([*argv, "--training.seq_len", "255"]) == 0


def heads(text: str, folder: Path, *flags: str, world: int | None = None) -> list[str]:
    """What is said to be wrong with a file, without what is wanted."""
    path = folder / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        checked_run(["--config", str(path), *flags], world_size=world)
    lines = str(caught.value).replace(str(folder), "").splitlines()
    return [line.strip().partition(",")[0] for line in lines if not line.startswith("      ")]


EVERY_STAGE = """[model]
flavor = "debug"
[optimizer]
lrr = 1
[training]
global_batch_size = -1
[data]
source = "/no/such"
[float8]
recipe = "rowwise"
filter_fqns = ["wkqv"]
[activation_checkpoint]
recipe = "list.toml"
[parallelism]
tensor_parallel_degree = 2
[checkpoint]
interval = "often"
[metrics]
wandb_project = ""
wandb = "offline"
[evaluation]
tasks = ["helaswag"]
"""


def test_all_stages_report_at_once_under_one_heading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rule = '[[rules]]\nop = "block"\naction = "save"\nlayers = "5:"\n'
    (tmp_path / "list.toml").write_text(f'help = ""\ndefault = "recompute"\n{rule}')
    said = heads(EVERY_STAGE, tmp_path, "--profiling.steps", "few", "--job.name", "a/b", world=3)
    assert said == [
        "/run.toml: 7 problems",
        "line 4  optimizer.lrr = 1",
        "line 6  training.global_batch_size = -1",
        "line 8  data.source = '/no/such'",
        "line 15  parallelism.tensor_parallel_degree = 2",
        'line 17  checkpoint.interval = "often"',
        'line 19  metrics.wandb_project = ""',
        'line 22  evaluation.tasks = "helaswag"',
        "command line: 2 problems",
        "--profiling.steps = few",
        'job.name = "a/b"',
    ]


NO_SOURCE = 'source = "nosuch.txt"\ntokenizer = '


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f'[data]\npacking = "foo"\n{NO_SOURCE}"nosuch.json"\n', "2 data.packing, 3 data.source, 4 data.tokenizer"),
        (f'[validation]\nfreq = -1\n[data]\n{NO_SOURCE}"nosuch.json"\n', "2 validation.freq, 4 data.source, 5 data.to"),
        (f'[optimizer]\nlr = -1\n[data]\n{NO_SOURCE}"hf:no/body"\n', "2 optimizer.lr, 4 data.source"),
        (
            f'[data]\ntokeniser = "a"\nadd_bos_token = true\n{NO_SOURCE}5\n',
            "2 data.tokeniser, 4 data.source, 5 data.to",
        ),
        (
            '[[data.mixture]]\nname = "a"\nweight = -1\nsource = "nosuch.txt"\n',
            "3 data.mixture[0].we, 4 data.mixture[0].so",
        ),
    ],
)
def test_a_key_and_the_data_are_refused_at_once(text: str, said: str, tmp_path: Path) -> None:
    first, *rest = heads(text, tmp_path)
    assert first == f"/run.toml: {len(rest)} problems"
    for line, expected in zip(rest, said.split(", "), strict=True):
        assert line.startswith("line {}  {}".format(*expected.split()))


@pytest.mark.parametrize(
    ("text", "silent"),
    [
        ("[training]\nstep = 5\n[job]\nstop_after = 20000\n", "stop_after"),  # of how many steps
        ("[training]\nseq = 64\n[parallelism]\ntensor_parallel_degree = 3\n", "degree"),
        ('[job]\nrecipe_dir = ["a"]\n[float8]\nrecipe = "mine"\n', "float8"),
        ('[job]\nrecipe_dirs = "a"\n[float8]\nrecipe = "mine"\n', "float8"),
        ('[float8]\nrecip = "mine"\n[metrics]\nfloat8_numerics_freq = 5\n', "numerics"),
        ('[model]\nnam = "gpt2"\nflavor = "124M"\n', "flavor"),
        ('[model]\nflavor = "debugg"\n[float8]\nrecipe = "rowwise"\nfilter_fqns = ["wkqv"]\n', "filter"),
        ('[float8]\nrecipe = "rowise"\nfilter_fqns = ["wkqv"]\n', "filter"),
        ('[model]\nflavor = "debugg"\n[optimizer]\nweight_decay_exclude = ["x"]\n', "exclude"),
        ('[training]\nseq_len = 0\n[activation_checkpoint]\nrecipe = "list.toml"\n', "rules"),
    ],
)
def test_what_depends_on_a_mistake_waits_until_it_is_mended(
    text: str, silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rule = '[[rules]]\nop = "communication"\naction = "save"\n'
    (tmp_path / "list.toml").write_text(f'help = ""\ndefault = "recompute"\n{rule}')
    said = heads(text, tmp_path)
    assert said[0] == "/run.toml: 1 problem"
    assert silent not in said[1]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--job.recipe_dirs /no/such/folder --float8.recipe rowwise", "job.recipe_dirs = "),
        ("--data.source=in.txt --data.max_bad_records=-1", "data.max_bad_records = -1"),
        ("--data.source=in.bin --data.max_bad_records=-1", "data.max_bad_records = -1"),
    ],
)
def test_one_mistake_is_told_once(file: str, flags: str, said: str) -> None:
    Path("in.txt").write_text("a" * 10_000)
    Path("in.bin").write_bytes(b"a\0" * 10_000)
    with pytest.raises(ConfigError) as caught:
        checked_run(["--config", file, *flags.split()])
    assert str(caught.value).count("want:") == str(caught.value).count(said) == 1


def python(*argv: str, ends: int = 0) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == ends, done.stderr
    return done


def test_a_bad_file_is_refused_in_a_moment_and_without_torch(file: str) -> None:
    """One second is usual, of which the processor takes half; importing torch alone takes more."""
    code = "import sys; from titanlite.commands import main; x = main(sys.argv[1:]); print(*sys.modules); sys.exit(x)"
    flags = ["--parallelism.tensor_parallel_degree", "3", "--float8.recipe", "rowwise"]
    with cpu_of_children(2.0):
        done = python("-c", code, "validate", file, *flags, ends=2)
    modules = done.stdout.splitlines()[-1].split()
    assert "titanlite.config.check" in modules
    assert not {"torch", "torchao", "wandb", "datasets", "matplotlib"} & set(modules)


@pytest.mark.parametrize(
    "program",
    [["train.py", "--config"], ["-m", "titanlite", "validate"]],
    ids=["train", "titanlite"],
)
def test_a_working_directory_that_was_deleted(program: list[str], file: str, tmp_path: Path) -> None:
    repository, gone = shipped_folder("configs").parent, tmp_path / "gone"
    gone.mkdir()
    python = [sys.executable, *(str(repository / word) if word == "train.py" else word for word in program), file]
    command = ["sh", "-c", 'rmdir "$PWD"; exec "$@"', "sh", *python]
    environment = os.environ | {"PYTHONPATH": str(repository)}
    done = subprocess.run(command, cwd=gone, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "this process: 1 problem\n  working directory = No such file or directory\n"
        "      want: one that exists\n      fix:  cd to another\n"
    )


def test_help_and_version_import_no_torch_and_the_overview_no_command() -> None:
    """All of it in four seconds of the processor, where one is usual."""
    code = (
        "import sys; from titanlite.commands import COMMANDS, main; main(['--help']); "
        "print(*[m for m in sys.modules if m.startswith('titanlite.commands.')]); main(['--version'])\n"
        "for command in COMMANDS:\n    try:\n        main([command, '--help'])\n    except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    with cpu_of_children(4.0):
        said = python("-c", code).stdout.partition("\nusage: titanlite new ")[0]
    *lines, modules, version = said.splitlines()
    assert modules == ""
    shown = dict(line.split(maxsplit=1) for line in lines[2:])
    names = (
        "new train validate convert plan recipes prepare data compare explain generate evaluate export verify-resume"
    )
    assert list(shown) == [*names.split(), "schema"]
    assert all(len(line) <= 120 for line in lines)
    assert version == f"titanlite {titanlite.__version__}, torch {importlib.metadata.version('torch')}"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_says_what_it_does_and_explains_its_flags(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "-h"])
    assert not ended.value.code
    text = capsys.readouterr().out
    usage, about, _ = text.split("\n\n", 2)
    module = importlib.import_module(f"titanlite.commands.{module_of(command)}")
    assert usage.startswith(f"usage: titanlite {command} ")
    assert all(line.count("[") == line.count("]") for line in usage.splitlines())  # none ends within a flag
    assert about == (module.__doc__ or "").partition("\n\n")[0].strip()
    lines = text.splitlines()
    for row, help_text in module.COMMAND.rows.items():
        assert row in " ".join(usage.split()) or not row.startswith("-")
        (shown,) = (line for line in lines if line.startswith(f"  {row}  "))
        assert shown.split("  ")[-1].strip() in help_text
    assert max(map(len, lines[1:])) <= 120


def test_the_version_is_that_of_the_package() -> None:
    text = (Path(titanlite.__file__).parents[1] / "pyproject.toml").read_text()
    assert tomli.loads(text)["project"]["version"] == titanlite.__version__


def test_a_secret_in_a_message_is_not_shown(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    assert "command line: 1 problem\n  ***\n" in call("hf_abcdefgh", ends=2)


def test_shards_that_fsdp_cannot_gather_in_float8() -> None:
    argv, world = (str(MEASURED_CONFIGS / "llama3_8b.toml"), "--float8.recipe"), 6
    assert "the 6 shards of FSDP; attention.wo has 4096, and so for 3 layers" in refused(*argv, "rowwise", world=world)
    assert refused(*argv, "rowwise_with_gw_hp", world=world) == ""
    said = refused(*argv, "rowwise", "--float8.filter_fqns", "output", "layers.0.", world=world)
    assert "attention.wo has 4096" in said  # others are gathered
    world = 512  # which divide the rows of blocks
    assert refused(*argv, "rowwise", world=world) == ""
    said = refused(*argv, "rowwise", "--float8.filter_fqns", world=world)
    assert "the 512 shards of FSDP; output has 128256, and so for 1 layers" in said


FILTER, ODD = "--float8.filter_fqns", "--training.seq_len=100"
NO_COLLECTIVES = "which no fused kernel takes\n      fix:  --parallelism.async_tensor_parallel false;"
WITHOUT_DECAY = "--optimizer.weight_decay_exclude"
PATTERNS = "want: a pattern that matches a parameter: tok_embeddings.weight, layers.*.attention_norm.weight"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--float8.recipe=rowwise", *flags], said)
        for flags, said in (
            ([FILTER, "outptu"], 'float8.filter_fqns = "outptu"\n'),
            ([FILTER, "layers.2."], "linear layer: wqkv, wo, w13, w2, output, …"),
            ([FILTER, "layers,output"], "all are skipped, e.g. layers.0.attention.wqkv (float8.filter_fqns has 'layer"),
            ([FILTER, "layers.1."], ""),
            ([FILTER, "layers"], ""),  # the head is left
            ([FILTER, "wqkvv"], 'did you mean "wqkv"?'),
            ([FILTER, "layers.1.atention.wo"], 'did you mean "layers.1.attention.wo"?'),
            ([FILTER, "attention.wk"], 'did you mean "attention.wqkv"?'),
            ([FILTER, "w3"], 'did you mean "w13"?'),
            ([FILTER, "output", "head"], "name one of these, or remove it"),
            ([*ASYNC, FILTER], ""),
        )
    ]
    + [
        (["--float8.recipe=blockwise", *flags], said)
        for flags, said in (
            ([ODD], "all are skipped, e.g. layers.0.attention.wqkv (sizes (512, 256), "),
            ([ODD, *LENIENT], ""),
            ([*ASYNC, FILTER], NO_COLLECTIVES),
            (ASYNC, ""),  # the head is left
            ([*ASYNC, FILTER, "layers.1.attention.wo"], ""),
            ([*ASYNC, "--model.vocab_size=258", FILTER], "  float8.filter_fqns = []\n"),  # odd
            ([*ASYNC, FILTER, *LENIENT], ""),
        )
    ]
    + [
        ([WITHOUT_DECAY, "*norms.weight"], 'fix:  did you mean "*norm.weight"?'),
        ([WITHOUT_DECAY, "layers.*.atention_norm.weight"], 'fix:  did you mean "layers.*.attention_norm.weight"?'),
        ([WITHOUT_DECAY, "tok_embedings.weight"], 'fix:  did you mean "tok_embeddings.weight"?'),
        ([WITHOUT_DECAY, "*norm.weight", "*.bias"], f'exclude = "*.bias"\n      {PATTERNS}'),
        ([WITHOUT_DECAY, "layers.2.*"], "fix:  remove it"),  # of two, they are 0 and 1
        ([WITHOUT_DECAY, "*norm.weight", "output.*", "layers.1.feed_forward.w1?.weight"], ""),
        ([WITHOUT_DECAY], ""),
    ],
)
def test_what_only_the_model_tells_is_refused(flags: list[str], said: str) -> None:
    found = refused(DEBUG, *flags)
    assert said in found if said else found == ""


@pytest.mark.parametrize("strict", ["true", "false"])
def test_float8_numerics_of_outputs_that_are_not_in_float8(strict: str, tmp_path: Path, call: Call) -> None:
    recipe = tmp_path / "gradients.toml"
    recipe.write_text('extends = "tensorwise"\nhelp = "x"\nfsdp_all_gather = "high_precision"\n')
    recipe.write_text(recipe.read_text() + '[input]\noutput = "none"\n[weight]\noutput = "none"\n')
    flags = ["--float8.recipe", str(recipe), "--metrics.float8_numerics_freq", "5", "--job.strict", strict]
    said = call("validate", DEBUG, *flags, ends=2 if strict == "true" else 0)
    assert ("no output is in float8\n      fix:  --metrics.float8_numerics_freq 0\n" in said) == (strict == "true")


def test_a_wrong_annotation_of_a_model_file_is_refused_with_what_would_help(call: Call, tmp_path: Path) -> None:
    source = (ROOT / "titanlite" / "models" / "llama3.py").read_text()
    (tmp_path / "mine.py").write_text(source.replace('feed_forward.w13.weight"', 'feed_forward.w31.weight"'))
    (tmp_path / "model").mkdir()
    shutil.copy(ROOT / "recipes" / "model" / "llama3-debug.toml", tmp_path / "model" / "mine-debug.toml")
    own = "--model.file", str(tmp_path / "mine.py"), "--job.recipe_dirs", f'["{tmp_path}"]'
    said = call("validate", DEBUG, *own, "--world", "2", "--parallelism.tensor_parallel_degree", "2", ends=2)
    assert "feed_forward.w31.weight = tp:0\n" in said
    assert "Traceback" not in said
