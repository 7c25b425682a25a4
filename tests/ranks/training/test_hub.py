"""Runs that start from a model of the hub and are pushed there, against a hub on loopback."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tomli

from tests.support import hub_server
from tests.support.hub_server import TOKEN, Server
from titanlite.commands.export import run as export
from titanlite.commands.generate import run as generate
from titanlite.commands.validate import run as validate
from titanlite.errors import HubError

if TYPE_CHECKING:
    from tests.support.launched import Desk, Ended

# Of httpx, as huggingface_hub calls it to upload.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
STILL = "--optimizer.lr=1e-30", "--data.tokenizer=hf:me/base"  # a step of so small a rate changes no weight by a bit
LOADS = "--checkpoint.initial_load_path=hf:me/base@main"


@pytest.fixture(scope="module")
def trained(desk: "Desk") -> "Ended":
    samples = '--validation.samples=["import "]', "--validation.sample_tokens=8", "--validation.steps=1"
    return desk.run("trained", 1, "--job.stop_after=2", "--validation.enable=true", "--validation.freq=1", *samples)


@pytest.fixture(scope="module")
def base(trained: "Ended", tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files of a model."""
    out = tmp_path_factory.mktemp("base") / "out"
    assert export([str(trained.folder), "--out", str(out), "--dtype", "float32"]) == 0
    return {path.name: path.read_bytes() for path in out.iterdir()} | {"pytorch_model.bin": b"not needed"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: dict[str, bytes]) -> Iterator[Server]:
    with Server() as server:
        server.publish("me/base", base)
        hub_server.use(monkeypatch, server, tmp_path / "home")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        (tmp_path / "home").mkdir()
        (tmp_path / "home" / "token").write_text(TOKEN)  # as `hf auth login` does
        yield server
        server.shutdown()


def require_no_token(*folders: Path, said: str) -> None:
    """No file and no line has the token."""
    assert TOKEN not in said
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file() and path.name != "token"):
        assert TOKEN.encode() not in path.read_bytes(), path


def test_ranks_fetch_each_file_once_and_later_starts_keep_the_commit(
    desk: "Desk", trained: "Ended", base: dict[str, bytes], hub: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = hub.branches["me/base"]["main"]
    began = desk.run("named", 2, *STILL, LOADS, "--job.stop_after=1")
    assert [len(hub.got(file)) for file in FILES] == [1, 1, 1, 1], hub.asked
    assert hub.got("pytorch_model.bin") == []
    recorded = tomli.loads((began.folder / "config.toml").read_text())
    assert recorded["checkpoint"]["initial_load_path"] == recorded["data"]["tokenizer"] == f"hf:me/base@{first}"
    for key, asked in (("checkpoint.initial_load_path", "hf:me/base@main"), ("data.tokenizer", "hf:me/base")):
        assert (began.receipt[key]["requested"], began.receipt[key]["applied"]) == (asked, {"commit": first})
        assert f"{key} = {asked} is commit {first}, as the hub says now" in began.output

    # The branch moves, to another tokenizer and no weights; the run keeps its commit, without asking.
    second = hub.publish("me/base", {"config.json": b"{}", "tokenizer.json": b"{}"})
    assert hub.asked.count("GET /api/models/me/base") == 2  # by rank 0: whether it is there, and where the branch is
    asked = len(hub.asked)
    went_on = desk.run("named", 2, *STILL, LOADS, "--job.stop_after=2")
    assert len(hub.asked) == asked
    assert f"hf:me/base is commit {first}, as at this run's first start" in went_on.output
    assert went_on.content(2).keys() == began.content(1).keys()
    hub.publish("me/base", base | {"README.md": b"of another commit"}, "v2")
    other = desk.run("named", 1, *STILL, LOADS, "--data.tokenizer=hf:me/base@v2", ends=2)
    assert "output folder of a different run" in other.output

    # A fresh run of the cache alone: the branch is what the cache knows of it.
    hub.publish("me/base", base | {"README.md": b"a third"})
    alone = desk.run("of the third", 1, *STILL, LOADS, "--job.stop_after=1")
    weights = {name: digest for name, digest in trained.content(2).items() if name.startswith("model/")}
    assert {name: alone.content(1)[name] for name in weights} == weights
    assert export([str(alone.folder), "--out", str(tmp_path / "out"), "--push", "me/more"]) == 0
    card = hub.commits["me/more"][hub.branches["me/more"]["main"]]["README.md"].decode()
    assert "base_model: me/base\n" in card
    assert "wide: its weights at step 1 of a run, which began from `hf:me/base@" in card
    hub_server.use(monkeypatch, hub, tmp_path / "home", offline=True)
    asked = len(hub.asked)
    offline = desk.run("offline", 1, *STILL, LOADS, "--job.stop_after=1")
    third = hub.branches["me/base"]["main"]
    assert f"is commit {third}, as this host's cache has it: the hub cannot be asked" in offline.output
    assert len(hub.asked) == asked
    assert second not in offline.output
    (began.folder / "hub.json").write_text("{")
    assert "delete it, and the names are resolved anew" in desk.run("named", 1, *STILL, LOADS, ends=2).output
    require_no_token(desk.folder, tmp_path, said=began.output + went_on.output + other.output + offline.output)


def test_a_mirror_keeps_the_commit_for_a_new_disk(desk: "Desk", hub: Server, tmp_path: Path) -> None:
    first = hub.branches["me/base"]["main"]
    flags = *STILL, LOADS, f"--checkpoint.mirror=file://{tmp_path}/mirror"
    desk.run("copied", 1, *flags, "--job.stop_after=1")
    hub.publish("me/base", {"config.json": b"{}", "tokenizer.json": b"{}"})
    old_disk = desk.run("copied", 1, *flags, "--job.stop_after=2")
    shutil.rmtree(old_disk.folder)
    new_disk = desk.run("copied", 2, *flags, "--job.stop_after=3")
    assert "that of step 2 was taken from" in new_disk.output
    assert new_disk.receipt["data.tokenizer"]["applied"] == {"commit": first}
    assert new_disk.checkpoints() == [2, 3]


def test_validate_fetches_no_weights_and_a_transfer_that_breaks_off_is_taken_up(
    desk: "Desk", hub: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = desk.flags("broken off", *STILL, LOADS, "--job.stop_after=1", "--model.flavor=debug")
    assert validate(flags) == 0
    assert "1 file of weights of hf:me/base@" in capsys.readouterr().out
    assert hub.got("model.safetensors") == []
    assert not (desk.folder / "runs" / "broken off").exists()  # only a start records
    hub.cut["model.safetensors"] = [0] * 6  # the library gives up

    def patch() -> None:
        monkeypatch.setattr("time.sleep", lambda _: None)
        monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)

    refused = desk.run("broken off", 1, *STILL, LOADS, "--job.stop_after=1", plant=patch, ends=2)
    assert "the hub cannot be asked, or the transfer broke off (" in refused.output
    before = len(hub.got("config.json"))
    hub.cut["model.safetensors"] = [5000]
    desk.run("broken off", 1, *STILL, LOADS, "--job.stop_after=1", plant=patch)
    assert hub.got("model.safetensors")[-1].endswith(" from 5000")
    assert len(hub.got("config.json")) == before


def test_what_is_pushed_is_read_back(
    trained: "Ended", base: dict[str, bytes], hub: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (trained.folder / "evaluation.json").write_text(
        json.dumps({"model": "runs/x/checkpoints/step-00000002", "tasks": {"quiz": {"accuracy": 0.25}}})
    )
    out = tmp_path / "out"
    given = [str(trained.folder), "--dtype", "float32", "--out", str(out), "--push"]
    assert export([*given, "me/mine"]) == 0
    said, pushed = capsys.readouterr().out, hub.commits["me/mine"][hub.branches["me/mine"]["main"]]
    assert f"  pushed to {hub.url}/me/mine/commit/{hub.branches['me/mine']['main']}\n" in said
    assert hub.private["me/mine"]
    assert {name: pushed[name] for name in FILES} == {name: base[name] for name in FILES}
    card = pushed["README.md"].decode()
    for part in (
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "# mine\n\nLlamaForCausalLM of 2 layers, 128 wide: its weights at step 2 of a run.\n",
        "| data.source | `train.txt`, ",
        "| layout | 1 process |",
        "| loss | ",
        "| validation_loss | ",
        "| quiz | 25.00% | 2 |",
        "```text\nimport ",
    ):
        assert part in card
    assert str(tmp_path.parent) not in card
    assert "base_model" not in card
    assert generate(["hf:me/mine", "--prompt", "import", "--tokens", "4", "--temperature", "0"]) == 0
    assert generate([str(trained.folder), "--prompt", "import", "--tokens", "4", "--temperature", "0"]) == 0
    texts = [line for line in capsys.readouterr().out.splitlines() if line.startswith("import")]
    assert texts[0] == texts[1]
    require_no_token(tmp_path, trained.folder, said=said)

    # Refused: the folder stays, and the message says how to go on.
    hub.refused.add("me/closed")
    with pytest.raises(HubError, match=r"refuses it \(403\)(.|\n)*then push again: hf upload me/closed .*/again"):
        export([*given[:-2], str(tmp_path / "again"), "--push", "me/closed"])
    assert (tmp_path / "again" / "README.md").exists()


def test_a_push_without_a_login_is_refused_before_the_export(trained: "Ended", hub: Server, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for token, name, want in (("", "me/mine", "hf auth login"), ("hf_x", "me/mine", "401"), (TOKEN, "mine", "OWNER/")):
        (tmp_path / "home" / "token").write_text(token)
        with pytest.raises(HubError, match=want):
            export([str(trained.folder), "--out", str(out), "--push", name])
    assert not out.exists()


def test_transformers_reads_what_was_pushed(trained: "Ended", hub: Server, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    assert export([str(trained.folder), "--out", str(tmp_path / "out"), "--push", "me/theirs"]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained("me/theirs")
    tokenizer = transformers.AutoTokenizer.from_pretrained("me/theirs")
    assert model.config.num_hidden_layers == 2
    assert tokenizer("a")["input_ids"] == [ord("a")]
    assert "transformers" in sys.modules
