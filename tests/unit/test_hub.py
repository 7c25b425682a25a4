"""Names of the hub: what is fetched of them into which cache, and the one message of each thing that can go wrong."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import pytest

from tests.support import hub_server
from tests.support.hub_server import TOKEN, Server
from titanlite.errors import ConfigError, HubError
from titanlite.hub import HubName, fetch_description, fetch_tokenizer, fetch_weights, folder_of, read_name, resolve_name
from titanlite.preflight.checked_run import checked_run

MODEL = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": bytes(1000)}
SHARDS = {
    "config.json": b"{}",
    "model.safetensors.index.json": b'{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}',
    **{f"{name}.safetensors": bytes(9) for name in ("model-1", "model-2", "consolidated")},
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with Server() as server:
        server.publish("me/base", MODEL)
        server.publish("me/shards", SHARDS)
        server.publish("me/pickles", {"config.json": b"{}", "pytorch_model.bin": b"x"})
        server.publish("me/bare", {"model.safetensors": b"x"})
        server.publish("me/gated", MODEL)
        server.gated.add("me/gated")
        hub_server.use(monkeypatch, server, tmp_path)
        monkeypatch.setattr("time.sleep", lambda _: None)  # between the library's tries
        yield server
        server.shutdown()


def fetch(text: str) -> Path:
    """As a start does it."""
    name, _ = resolve_name(text, "checkpoint.initial_load_path")
    fetch_description(name, "checkpoint.initial_load_path")
    fetch_weights(name, "checkpoint.initial_load_path")
    return folder_of(name)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("hf:Qwen/Qwen3-0.6B-Base", HubName("Qwen/Qwen3-0.6B-Base", "")),
        ("hf:me/base@refs/pr/1", HubName("me/base", "refs/pr/1")),
        ("hf:gpt2", "write the model's name"),
        ("hf:me/base@", "hf:me/base"),
        ("hf:me/base@a b", "hf:me/base"),
        ("hf://me/base@v1", "fix:  hf:me/base@v1"),
        ("hf:./base", "leave hf: out"),
        ("hf:/data/base", "leave hf: out"),
        ("hf:me/base/more", "write the model's name"),
        ("hf:me/../base", "write the model's name"),
        ("hf:me/base@../../x", "hf:me/base"),
    ],
)
def test_names(text: str, found: HubName | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(found, HubName):
        assert read_name(text, "") == found
        return
    with pytest.raises(HubError) as caught:
        read_name(text, "data.tokenizer")
    assert found in str(caught.value)
    # Told with all other mistakes, before anything of the network.
    monkeypatch.setattr("huggingface_hub.HfApi", None)
    shipped = ["--config", "configs/debug.toml", "--job.dump_folder", str(tmp_path), "--training.stepz=1"]
    for key in ("data.tokenizer", "checkpoint.initial_load_path"):
        with pytest.raises(ConfigError) as told:
            checked_run([*shipped, f"--{key}={text}"])
        assert found in str(told.value)
        assert "training.steps?" in str(told.value)
    with pytest.raises(ConfigError, match=r"training.steps\?"):
        checked_run([*shipped, "--data.tokenizer=hf:me/base"])


def test_only_what_is_needed_is_fetched_and_once(hub: Server) -> None:
    for model, has in (("me/base", MODEL), ("me/shards", SHARDS)):
        folder = fetch(f"hf:{model}")
        assert {path.name for path in folder.iterdir()} == {*has} - {"consolidated.safetensors"}
        before = len(hub.asked)
        assert fetch(f"hf:{model}@{hub.branches[model]['main']}") == folder
        assert len(hub.asked) == before
    hub.publish("me/base", MODEL | {"config.json": b"[]"})  # files that did not change are the cache's
    assert (fetch("hf:me/base") / "config.json").read_bytes() == b"[]"
    assert len(hub.got("model.safetensors")) == 1


REFUSED: dict[str, tuple[str, Callable[[Server], object], str, str]] = {
    "missing": ("hf:me/nosuch", lambda _: 0, "refuses it (401)", "of a private one, log in with `hf auth login`"),
    "gated": ("hf:me/gated", lambda _: 0, "a gated model (403)", "accept its licence at http://127.0.0.1:"),
    "revision": ("hf:me/base@v9", lambda _: 0, "no such revision (404)", "/me/base/commits"),
    "commit": (f"hf:me/base@{'0' * 40}", lambda _: 0, "no such revision (404)", "/me/base/commits"),
    "file": ("hf:me/bare", lambda _: 0, "has no config.json (404)", "another model or revision"),
    "no safetensors": ("hf:me/pickles", lambda _: 0, "has no model.safetensors", "that has safetensors"),
    "down": ("hf:me/base", lambda hub: setattr(hub, "up", False), "the hub answered 503", "start again later"),
    "no network": ("hf:me/base", lambda hub: hub.server_close(), "cannot be asked", "see whether the network is there"),
    "offline": ("hf:me/base", lambda _: 0, "HF_HUB_OFFLINE is set", "hf download me/base"),
    "full": ("hf:me/base", lambda _: 0, "the disk is full: ", "set HF_HOME to a folder of another disk"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_each_refusal_is_one_message(
    case: str, hub: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    text, change, saw, fix = REFUSED[case]
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    if case == "no network":
        hub.shutdown()
    change(hub)
    if case == "offline":
        hub_server.use(monkeypatch, hub, tmp_path, offline=True)
    if case == "full":

        def write(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(huggingface_hub.file_download, "http_get", write)
    with pytest.raises(HubError) as caught:
        fetch(text)
    said = str(caught.value)
    assert said.startswith(f"Hugging Face hub: 1 problem\n  checkpoint.initial_load_path = '{text}")
    assert saw in said
    assert fix in said.partition("fix: ")[2]
    assert TOKEN not in said + "".join(capfd.readouterr())


def test_a_cache_without_network_has_what_was_fetched(
    hub: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fetch_tokenizer("hf:me/base", "data.tokenizer")  # has no tokenizer_config.json, which the cache remembers
    hub_server.use(monkeypatch, hub, tmp_path, offline=True)
    assert fetch_tokenizer("hf:me/base", "data.tokenizer") == path
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set"):  # its weights were not fetched
        fetch("hf:me/base")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    hub.up = False
    assert resolve_name("hf:me/base", "") == (f"hf:me/base@{hub.branches['me/base']['main']}", False)
