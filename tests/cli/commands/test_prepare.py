"""`titanlite prepare`: what it prints, and that a run finds what it made."""

import json
from pathlib import Path

import pytest

from tests.cli.commands.conftest import Call
from titanlite.commands import main
from titanlite.commands.prepare import run
from titanlite.config.architectures import ARCHITECTURES
from titanlite.config.hugging_face import config_json
from titanlite.config.schema import Data
from titanlite.data import inputs
from titanlite.data.prepare import prepare
from titanlite.errors import TitanliteError
from titanlite.recipes import load


def write_run(tmp_path: Path, vocab_size: int = 256, **data: object) -> list[str]:
    (tmp_path / "in").mkdir(exist_ok=True)
    (tmp_path / "in" / "a.jsonl").write_text('{"text": "one"}\noops\n{"text": "two"}\n')
    (tmp_path / "held_out.txt").write_text("three")
    values = {"source": f"{tmp_path}/in", "cache_dir": f"{tmp_path}/cache", "max_bad_records": 1, **data}
    lines = [f"{k} = {json.dumps(v)}" for k, v in values.items()]
    # Nothing here depends on a shipped flavor: this one is the test's own.
    flavor = 'help = "for tests"\nn_layers = 1\ndim = 128\nn_heads = 2\nn_kv_heads = 1\nffn_dim = 128\n'
    flavor += f"vocab_size = {vocab_size}\nrope_theta = 10000.0\nnorm_eps = 1e-5\n"
    (tmp_path / "recipes" / "model").mkdir(parents=True, exist_ok=True)
    (tmp_path / "recipes" / "model" / "llama3-tiny_test.toml").write_text(flavor)
    text = "[data]\n" + "\n".join(lines)
    text += f'\n[job]\nrecipe_dirs = ["{tmp_path}/recipes"]\n[model]\nflavor = "tiny_test"\n[training]\nseq_len = 3\n'
    text += f'[validation]\nenable = true\nsource = "{tmp_path}/held_out.txt"\n'
    (tmp_path / "run.toml").write_text(text)
    return ["--config", str(tmp_path / "run.toml")]


def test_both_sources_are_prepared_and_described(tmp_path: Path, call: Call) -> None:
    argv = write_run(tmp_path)
    (tmp_path / "in" / "README.md").touch()
    said = call("prepare", *argv).splitlines()
    out = said[said.index(f"{tmp_path}/in") :]  # behind the warnings
    data = Data(f"{tmp_path}/in", max_bad_records=1, cache_dir=f"{tmp_path}/cache")
    shards = prepare(data.source, data, 256, progress=False)
    assert out[:8] == [
        f"{tmp_path}/in",
        "  files        1 file taken; passed over: 1 .md",
        "  documents    2",
        "  tokens       8 as uint16, by bytes",
        "  trained on   5,000 epochs in 10,000 steps, times the number of data-parallel ranks",
        f"  bytes        {(tmp_path / 'in' / 'a.jsonl').stat().st_size} read",
        "  bad records  1",
        f"    {tmp_path}/in/a.jsonl:2: not JSON: Expecting value: line 1 column 1 (char 0)",
    ]
    assert out[8] == f"  folder       {shards.folder}"
    assert out[9:17] == [
        "  packing      data.packing = concat; both, of 2 documents:",
        "                                   concat  best_fit",
        "    samples of 3 tokens                 2         3",
        "    documents cut that fit              0         0",
        "    documents cut that are longer       2         2",
        "    tokens padded                       0         1",
        "    share of padding                0.00%    11.11%",
        "    tokens dropped                      1         0",
    ]
    assert out[17:19] == [f"{tmp_path}/held_out.txt", "  files        1 file taken"]
    assert out[19:21] == ["  documents    1", "  tokens       6 as uint16, by bytes"]
    assert len(out) == 24  # held-out text is not packed
    assert len([line for line in out if "epoch" in line]) == 1  # held-out text is not trained on
    few = "--training.global_batch_size=2", "--training.steps=3", "--lr_scheduler.warmup_steps=1"
    assert "  trained on   3 epochs in 3 steps\n" in call("prepare", *argv, *few)


@pytest.mark.parametrize("is_known_before", [True, False])
def test_a_run_of_many_epochs_is_warned_of_once(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch, is_known_before: bool
) -> None:
    monkeypatch.setattr(inputs, "_SMALL_BYTES", 1 << 20 if is_known_before else 0)
    said = call("prepare", *write_run(tmp_path), "--training.steps=10", "--lr_scheduler.warmup_steps=1")
    assert said.count(f'warning: data.source = "{tmp_path}/in": 5 epochs in 10 steps') == 1


def test_best_fit_is_packed_ahead_and_counted(tmp_path: Path, call: Call) -> None:
    argv = [*write_run(tmp_path), "--data.packing=best_fit", "--training.seq_len=6", "--validation.enable=false"]
    out = call("prepare", *argv, "--training.steps=4", "--lr_scheduler.warmup_steps=1")
    assert "trained on   2 epochs in 4 steps" in out
    assert "data.packing = best_fit; both, of 2 documents:\n" in out
    assert "    documents cut that fit              1         0\n" in out
    assert "    tokens padded                       0         4\n" in out
    assert "    share of padding                0.00%    33.33%\n" in out
    assert len(list((tmp_path / "cache").glob("*.packed-6-0/spans.bin"))) == 1


def test_a_source_of_one_sample_is_enough_if_it_is_packed(tmp_path: Path, call: Call) -> None:
    """Its 8 tokens are no sample of 8 and a target; packed, each document ends in it."""
    argv = [*write_run(tmp_path), "--training.seq_len=8", "--validation.enable=false"]
    argv += ["--training.steps=2", "--lr_scheduler.warmup_steps=1"]
    assert "want: at least 9 tokens" in call("validate", *argv, ends=2)
    for command in ("validate", "prepare"):
        assert "2 epochs in 2 steps" in call(command, *argv, "--data.packing=best_fit")


def test_documents_of_token_files_are_not_known_without_a_separator(tmp_path: Path, call: Call) -> None:
    (tmp_path / "t.bin").write_bytes(bytes([1, 0, 2, 0, 5, 0, 1, 0, 5, 0]))
    argv = [*write_run(tmp_path), f"--data.source={tmp_path}/t.bin", "--validation.enable=false"]
    said = call("prepare", *argv)
    assert "  packing      not known: data.separator_id says which id" in said
    assert "  documents    not known\n" in said
    said = call("prepare", *argv, "--data.separator_id=5")
    assert "of 2 documents:" in said
    assert "  documents    2\n" in said


def test_too_little_for_a_step_is_said_once_it_is_known(tmp_path: Path) -> None:
    """A large source is not counted beforehand."""
    argv = write_run(tmp_path)
    (tmp_path / "in" / "a.jsonl").write_text(json.dumps({"text": "one"}) + "\n" + json.dumps({"text": "x" * 2_000_000}))
    argv += ["--validation.enable=false", "--training.seq_len=3_000_000"]
    with pytest.raises(TitanliteError, match=r"which has 2,000,005 tokens\n.*want: at least 3,000,001 tokens"):
        run(argv)
    assert (tmp_path / "cache").exists()


def test_what_max_tokens_leaves_out_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(write_run(tmp_path, max_tokens=4)) == 0
    out, error = capfd.readouterr()
    assert f"preparing {tmp_path}/in, data.max_tokens 4\n" in error
    assert out[out.index("  documents") :].splitlines()[:3] == [
        "  documents    1",
        "  tokens       4 as uint16, by bytes",
        "  cut          the source has more; data.max_tokens = 4 leaves it out",
    ]
    assert out.count("cut  ") == 1  # held-out text is whole


def test_nothing_is_prepared_if_something_is_wrong(tmp_path: Path) -> None:
    argv = write_run(tmp_path, vocab_size=100, text_key="txt")
    (tmp_path / "held_out.txt").unlink()
    with pytest.raises(TitanliteError) as e:
        run([*argv, "--optimizer.lr", "-1", "--float8.recipe", "rowise"])
    wrong = "model.vocab_size = 100\n", "data.text_key = 'txt'\n", "held_out.txt', which matches no file"
    for said in (*wrong, "optimizer.lr = -1.0\n", 'float8.recipe = "rowise"\n'):
        assert said in str(e.value)
    assert not (tmp_path / "cache").exists()


def test_the_weights_of_a_run_may_be_elsewhere(tmp_path: Path) -> None:
    assert run([*write_run(tmp_path), "--checkpoint.initial_load_path", "/on/another/host"]) == 0


def test_of_a_folder_that_has_the_dimensions_the_config_json_is_enough(tmp_path: Path) -> None:
    flags = ["--model.flavor", "from_checkpoint", "--checkpoint.initial_load_path", str(tmp_path / "theirs")]
    with pytest.raises(TitanliteError, match=r"checkpoint.initial_load_path = .*theirs"):
        run([*write_run(tmp_path), *flags])
    (tmp_path / "theirs").mkdir()
    said = config_json(ARCHITECTURES["llama3"], load("model", "llama3-debug"), 64, "float32", 0)
    (tmp_path / "theirs/config.json").write_text(json.dumps(said))
    assert run([*write_run(tmp_path), *flags]) == 0


def test_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("titanlite.commands.prepare.prepare", interrupt)
    assert main(["prepare", *write_run(tmp_path)]) == 130


def test_numbers_out_of_range(tmp_path: Path, call: Call) -> None:
    said = call("prepare", *write_run(tmp_path, max_bad_records=-1), "--training.seq_len", "0", ends=2)
    assert f"{tmp_path / 'run.toml'}: 1 problem\n  line 4  data.max_bad_records = -1\n" in said
    assert "command line: 1 problem\n  training.seq_len = 0\n" in said
    assert not (tmp_path / "cache").exists()
