import contextlib
import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import titanlite.checkpoint.hugging_face
import titanlite.checkpoint.publish
import titanlite.checkpoint.saved_state
import titanlite.commands.export
from tests.support.forks import fork
from titanlite.checkpoint.resume import identity_of
from titanlite.checkpoint.saved_state import SavedState
from titanlite.checkpoint.state import Checkpoints
from titanlite.commands import main
from titanlite.commands.export import run
from titanlite.config.recipe_schema import ModelDims
from titanlite.config.schema import Config, Data, Model, Training
from titanlite.config.write import to_toml
from titanlite.data.encode import encode
from titanlite.data.sources import resolve
from titanlite.data.tally import Tally
from titanlite.data.tokenizer import load_tokenizer
from titanlite.errors import CheckpointError
from titanlite.models.find import build_model
from titanlite.preflight.run_folder import RunFolder

SIZES = ModelDims("", n_layers=2, dim=32, n_heads=4, n_kv_heads=2, ffn_dim=128, vocab_size=256, norm_eps=1e-5)


def make_run(
    folder: Path,
    architecture: str = "llama3",
    file: str = "",
    tokenizer: str = "bytes",
    fingerprint: str = "bytes",
    add_bos_token: bool = False,
    dims: ModelDims = SIZES,
) -> tuple[RunFolder, dict[str, Tensor]]:
    """A run with checkpoints of the steps 5 and 10, and the weights of the latter."""
    made, model = RunFolder(folder / "run"), Model(name=architecture, file=file)
    made.path.mkdir()
    data = Data(tokenizer=tokenizer, add_bos_token=add_bos_token)
    made.record(to_toml(Config(model=model, data=data, training=Training(seq_len=8))))
    built = build_model(Model(name="llama3"), dims, 8)
    weights = {f"model/{name}": torch.randn(parameter.shape) for name, parameter in built.named_parameters()}
    for step in (5, 10):
        tensors = {name: weight * (step / 10) for name, weight in weights.items()}
        Checkpoints(made.checkpoints, keep=0).save(
            step, tensors, SavedState(tokenizer=fingerprint, **identity_of(Config(), dims))
        )
    return made, weights


@pytest.fixture
def made(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path)[0]


def test_weights_in_the_dtype_of_the_run_of_the_newest_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, weights = make_run(tmp_path)
    assert run([str(made.path)]) == 0
    out = made.path / "hugging_face" / "step-00000010"
    assert capsys.readouterr().out.splitlines()[-1] == str(out)
    assert sorted(p.name for p in out.iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    ]  # fmt: skip
    assert not list(out.parent.glob("*.tmp"))
    exported = load_file(out / "model.safetensors")
    assert exported["model.norm.weight"].equal(weights["model/norm.weight"].bfloat16())
    q0, q1, k0 = weights["model/layers.1.attention.wqkv.weight"].unflatten(0, (2, 4, 8))[:, :3].unbind(1)
    assert exported["model.layers.1.self_attn.q_proj.weight"].equal(torch.stack([q0, q1], 1).flatten(0, 2).bfloat16())
    assert exported["model.layers.1.self_attn.k_proj.weight"].equal(k0.flatten(0, 1).bfloat16())
    config = json.loads((out / "config.json").read_text())
    assert (config["torch_dtype"], config["eos_token_id"], config["max_position_embeddings"]) == ("bfloat16", 0, 8)
    assert (out / "model.safetensors").stat().st_mode == (out / "config.json").stat().st_mode


def test_another_step_and_dtype(tmp_path: Path) -> None:
    made, weights = make_run(tmp_path)
    assert run([str(made.path), "--step", "5", "--dtype", "float32", "--out", str(tmp_path / "new/out")]) == 0
    exported = load_file(tmp_path / "new/out/model.safetensors")
    assert exported["model.norm.weight"].equal(weights["model/norm.weight"] / 2)


def test_several_files_hold_what_one_does(tmp_path: Path, made: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    run([str(made.path), "--out", str(tmp_path / "one")])
    limit = 40_000
    monkeypatch.setattr(titanlite.checkpoint.hugging_face, "_FILE_BYTES", limit)
    run([str(made.path), "--out", str(tmp_path / "several")])
    index = json.loads((tmp_path / "several/model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("several/*.safetensors"))
    assert [p.name for p in files] == [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
    assert len(files) > 2
    parts = {path.name: load_file(path) for path in files}
    sizes = [sum(t.nbytes for t in tensors.values()) for tensors in parts.values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert max(sizes) <= limit
    assert index["weight_map"] == {name: file for file, tensors in parts.items() for name in tensors}
    whole = load_file(tmp_path / "one/model.safetensors")
    joined = {name: t for tensors in parts.values() for name, t in tensors.items()}
    assert joined.keys() == whole.keys()
    assert all(joined[name].equal(whole[name]) for name in whole)


def test_bytes_are_a_tokenizer_file(tmp_path: Path, made: RunFolder) -> None:
    import tokenizers

    run([str(made.path), "--out", str(tmp_path / "out")])
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))
    text = "naïve\n\0 日本 <0x41> <|x|>"
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert json.loads((tmp_path / "out/tokenizer_config.json").read_text())["eos_token"] == "<0x00>"


def test_the_tokenizer_of_the_run_goes_along(tmp_path: Path) -> None:
    import tokenizers
    from tokenizers import models

    theirs = tmp_path / "theirs"
    theirs.mkdir()
    words = {"a": 0, "<stop>": 1, "</s>": 2}
    tokenizers.Tokenizer(models.WordLevel(words, unk_token="a")).save(str(theirs / "tokenizer.json"))
    bare = load_tokenizer(str(theirs / "tokenizer.json")).fingerprint
    made, _ = make_run(tmp_path, tokenizer=str(theirs / "tokenizer.json"), fingerprint=bare)
    run([str(made.path), "--out", str(tmp_path / "one")])
    assert (tmp_path / "one/tokenizer.json").read_bytes() == (theirs / "tokenizer.json").read_bytes()
    assert json.loads((tmp_path / "one/tokenizer_config.json").read_text())["eos_token"] == "</s>"
    assert json.loads((tmp_path / "one/config.json").read_text())["eos_token_id"] == 2

    (theirs / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    with pytest.raises(CheckpointError, match="this file is not it, or was changed"):
        run([str(made.path), "--out", str(tmp_path / "other")])
    assert not (tmp_path / "other").exists()
    moved = theirs.rename(tmp_path / "moved")
    with pytest.raises(
        CheckpointError, match=r"(?s)there is no such file, seen from .*fix:  --tokenizer with the path"
    ):
        run([str(made.path), "--out", str(tmp_path / "other")])
    (moved / "tokenizer_config.json").unlink()
    assert run([str(made.path), "--out", str(tmp_path / "two"), "--tokenizer", str(moved / "tokenizer.json")]) == 0


def test_what_stands_beside_the_tokenizer_goes_along(tmp_path: Path) -> None:
    import tokenizers
    from tokenizers import models

    tokenizers.Tokenizer(models.WordLevel({"a": 0, "<stop>": 1}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<stop>", "chat_template": "{{ x }}"}')
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    made, _ = make_run(tmp_path, tokenizer=tokenizer.name, fingerprint=tokenizer.fingerprint)
    run([str(made.path), "--out", str(tmp_path / "out")])
    written = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert (written["eos_token"], written["chat_template"]) == ("<stop>", "{{ x }}")
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] == 1


def encoding_otherwise(path: Path, post_processor: str) -> None:
    """A tokenizer.json of which training leaves something out."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: n for n, token in enumerate(["<s>", "</s>", *alphabet, "ab"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")], dropout=0.5))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    special = [("<s>", 0), ("</s>", 1)]
    if post_processor:
        tokenizer.post_processor = processors.TemplateProcessing(post_processor, None, special)
    tokenizer.save(str(path))
    (path.parent / "tokenizer_config.json").write_text('{"add_bos_token": true, "tokenizer_class": "LlamaTokenizer"}')


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("post_processor", ["", "<s> $A", "<s> $A </s>"])
@pytest.mark.filterwarnings("default")  # transformers' own
def test_what_is_exported_encodes_as_training_did(tmp_path: Path, post_processor: str, add_bos: bool) -> None:
    import tokenizers

    (tmp_path / "theirs").mkdir()
    encoding_otherwise(tmp_path / "theirs/tokenizer.json", post_processor)
    tokenizer, text = load_tokenizer(str(tmp_path / "theirs/tokenizer.json"), add_bos), "Hello world, abababab"
    made, _ = make_run(tmp_path, tokenizer=tokenizer.name, fingerprint=tokenizer.fingerprint, add_bos_token=add_bos)
    run([str(made.path), "--out", str(tmp_path / "out")])

    file = tmp_path / "a.txt"
    file.write_text(text)
    tally = Tally(str(file), "data.source", 0)
    ((encoded,),) = encode(resolve(str(file)), "text", tokenizer, tally)
    trained = encoded.ids.tolist()
    assert trained.pop() == tokenizer.separator_id == 1
    assert (trained[0] == 0) == add_bos
    assert len(trained) == add_bos + 18  # each "ab" is one token, of " abababab" too
    exported = tokenizers.Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))
    assert [exported.encode(text).ids for _ in range(3)] == [trained] * 3
    assert exported.decode(trained).strip() == text
    assert json.loads((tmp_path / "out/config.json").read_text())["bos_token_id"] == (0 if add_bos else 1)
    config = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert config["add_bos_token"] == add_bos
    assert config["add_prefix_space"]
    with contextlib.suppress(ImportError):
        import transformers

        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
        assert theirs(text).input_ids == trained


def test_of_token_files_the_tokenizer_is_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, _ = make_run(tmp_path, fingerprint="")
    run([str(made.path), "--out", str(tmp_path / "out")])
    assert "no tokenizer: the run read token files" in capsys.readouterr().out
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] is None


@pytest.mark.parametrize("step", ["7", "-1", "two", f"1{'0' * 5000}"])
def test_a_step_that_was_not_saved_is_answered_with_those_that_were(made: RunFolder, step: str) -> None:
    with pytest.raises(CheckpointError, match=r"(?s)--step = .*one of 5, 10\n.*fix:  --step 10"):
        run([str(made.path), "--step", step])


@pytest.mark.parametrize(
    ("name", "dims", "said"),
    [
        ("gpt2", SIZES, r"n_kv_heads = 2\n +want: \d+, which every GPT2LMHeadModel"),
        ("llama3", replace(SIZES, logit_softcap=30.0), r"logit_softcap = 30\.0\n.*0, which every LlamaForCausalLM"),
    ],
)
def test_what_no_class_there_computes_is_refused(name: str, dims: ModelDims, said: str, tmp_path: Path) -> None:
    made, _ = make_run(tmp_path, dims=dims)
    made.record(to_toml(Config(model=Model(name=name))))
    with pytest.raises(CheckpointError, match=said):
        run([str(made.path)])


def test_a_damaged_checkpoint_and_one_of_another_model_leave_nothing(
    tmp_path: Path, made: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.record(to_toml(Config(model=Model(name="qwen3"))))
    with pytest.raises(CheckpointError, match=r"missing in the checkpoint = .*k_norm"):
        run([str(made.path), "--out", str(tmp_path / "out")])
    damaged = made.checkpoints / "step-00000010/rank00000-0.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    with pytest.raises(CheckpointError, match="another SHA-256"):
        run([str(made.path), "--out", str(tmp_path / "out")])
    monkeypatch.setattr(titanlite.checkpoint.saved_state, "QUICKLY_HASHED", damaged.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="another SHA-256"):
        run([str(made.path)])
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    assert not (made.path / "hugging_face").exists()
    monkeypatch.setattr(titanlite.checkpoint.hugging_face.shutil, "rmtree", lambda *_, **__: None)
    with pytest.raises(CheckpointError, match="another SHA-256"):  # not that the folder cannot be removed
        run([str(made.path)])


def test_what_is_asked_wrongly_is_said_before_all_of_a_checkpoint_is_read(
    made: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = made.checkpoints / "step-00000010/rank00000-0.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    monkeypatch.setattr(titanlite.checkpoint.saved_state, "QUICKLY_HASHED", shard.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"data.tokenizer = 'none.json'"):
        run([str(made.path), "--tokenizer", "none.json"])
    with pytest.raises(CheckpointError, match=r"--out = .*Not a directory"):
        run([str(made.path), "--out", str(made.config / "out")])
    with pytest.raises(CheckpointError, match="another SHA-256"):
        run([str(made.path)])


def test_a_folder_of_the_name_that_is_written_first_stays(tmp_path: Path, made: RunFolder) -> None:
    mine = tmp_path / "out.tmp"
    mine.mkdir()
    (mine / "file").touch()
    with pytest.raises(CheckpointError, match=f"want: no {mine}, where an export writes first"):
        run([str(made.path), "--out", str(tmp_path / "out")])
    assert (mine / "file").exists()
    shutil.rmtree(mine)
    verify = titanlite.commands.export.publish.verify

    def meanwhile(*args: object, **kwargs: object) -> None:
        mine.mkdir(exist_ok=True)
        verify(*args, **kwargs)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(titanlite.commands.export.publish, "verify", meanwhile)
        with pytest.raises(CheckpointError, match=r"File exists: .*out\.tmp"):
            run([str(made.path), "--out", str(tmp_path / "out")])
    assert mine.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_export_leaves_nothing(
    number: signal.Signals, tmp_path: Path, made: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log").touch()

    def export() -> int:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        return main(["export", str(made.path), "--out", str(tmp_path / "out")])

    monkeypatch.setattr(titanlite.checkpoint.hugging_face, "save_file", lambda *_, **__: signal.raise_signal(number))
    pid = fork(export, tmp_path / "log")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + number
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log", "run"]


def test_a_file_that_cannot_be_read_is_said(made: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(titanlite.checkpoint.publish, "_sha256", denied)
    with pytest.raises(CheckpointError, match=r"(?s)step-00000010/.* = Permission denied\n.*files that can be read"):
        run([str(made.path)])


def test_a_disk_that_is_full_when_the_tokenizer_is_written_is_said(
    tmp_path: Path, made: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = titanlite.checkpoint.hugging_face._write_json

    def then_full(path: Path, content: dict[str, object]) -> None:
        write(path, content)
        path.with_name("tokenizer.json").symlink_to("/dev/full")

    monkeypatch.setattr(titanlite.checkpoint.hugging_face, "_write_json", then_full)
    with pytest.raises(CheckpointError, match=r"--out = .* No space left on device"):
        run([str(made.path), "--out", str(tmp_path / "out")])
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_disk_without_room_is_said_before_anything_is_written(
    tmp_path: Path, made: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = titanlite.checkpoint.hugging_face.shutil._ntuple_diskusage(100, 100, 0)  # type: ignore[attr-defined]
    monkeypatch.setattr(titanlite.checkpoint.hugging_face.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"needs .* MiB, 0.0 MiB are free"):
        run([str(made.path), "--out", str(tmp_path / "out")])
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("name", ["out", "out.tmp"])
def test_a_link_in_the_place_of_what_is_written_is_not_followed(tmp_path: Path, made: RunFolder, name: str) -> None:
    other = tmp_path / "of somebody"
    (tmp_path / name).symlink_to(other)
    for there in (False, True):
        if there:
            other.mkdir()
        with pytest.raises(CheckpointError, match="--out"):
            run([str(made.path), "--out", str(tmp_path / "out")])
        assert other.exists() == there
    assert not list(other.iterdir())
    assert (tmp_path / name).is_symlink()
