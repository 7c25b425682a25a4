"""Secrets stay out of whatever leaves titanlite, in each of its forms and by each way out."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import quote

import pytest
import tomli

from titanlite.config.schema import Config, Data
from titanlite.config.write import to_toml
from titanlite.data.sources import resolve
from titanlite.errors import ConfigError, DataError
from titanlite.preflight.run_folder import RunFolder
from titanlite.redact import redact, redact_tree, redact_urls

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("GET https://user:pw@host/x: 401", "GET https://***@host/x: 401"),
        ("https://token@host:8080/x", "https://***@host:8080/x"),
        ("s3://KEY:secret@bucket/x", "s3://***@bucket/x"),
        ("s3://KEY:sec/ret+a/b@bucket/key@1", "s3://***@bucket/key@1"),
        ("s3://KEY:12345/secret@bucket", "s3://***@bucket"),
        ("s3://A:b/c@one,s3://D:e@two", "s3://***@one,s3://***@two"),
        ("https://user:p@ss:w0rd@host", "https://***@host"),
        ("https://user:p%40ss@host", "https://***@host"),
        (repr(["https://user:p%22w@host"]), "['https://***@host']"),
        (json.dumps({"url": "https://user:p\\w@host"}), '{"url": "https://***@host"}'),
        ("(https://user:pw@host),me@x.org", "(https://***@host),me@x.org"),
        ("ssh://user:22pw@host:22/x@y", "ssh://***@host:22/x@y"),
        (json.dumps("https://user:pw@host").replace("/", "\\/"), '"https:\\/\\/***@host"'),
        ("hf:https://user:pw@host/x::train", "hf:https://***@host/x::train"),
        ("to?next=https%3A%2F%2Fuser%3Apw%40host%2Fx", "to?next=https%3A%2F%2F***%40host%2Fx"),
        ("https://h/x?token=abc&rev=2", "https://h/x?token=***&rev=2"),
        ("https://h/x?v=2&X-Amz-Signature=ab12#top", "https://h/x?v=2&X-Amz-Signature=***#top"),
        ("?X-Amz-Credential=K%2F2026%2Fs3&X-Amz-Security-Token=T%3D", "?X-Amz-Credential=***&X-Amz-Security-Token=***"),
        ("?AWSAccessKeyId=K&Signature=s%3D&Expires=1", "?AWSAccessKeyId=***&Signature=***&Expires=1"),
        ("https://h/x?access_token=a&client_secret=b", "https://h/x?access_token=***&client_secret=***"),
        ("https://h/x?sv=1&sig=a/b%2Bc", "https://h/x?sv=1&sig=***"),
        ("{'url': 'https://h/?api_key=abc', 'n': 1}", "{'url': 'https://h/?api_key=***', 'n': 1}"),
        ("{'Authorization': 'Bearer abc.def', 'n': 1}", "{'Authorization': 'Bearer ***', 'n': 1}"),
        ("Authorization: a1b2c3d4e5f6a7b8c9d0", "Authorization: ***"),
        ("authorization: Basic dXNlcjpwdw==\n", "authorization: Basic ***\n"),
        ("token hf_" + "a1B2" * 9 + " is not valid", "token *** is not valid"),
    ],
)
def test_what_is_starred(monkeypatch: pytest.MonkeyPatch, text: str, shown: str) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # which holds the text, so that its passwords are in the environment
    assert redact(text) == shown
    assert redact(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "mail me@host: see https://host/x, or host:8080/x@y",
        "hf://datasets/allenai/c4@1588ec45/en/x.json.gz",
        "http://localhost:8080/repo@main",
        "http://[::1]:8080/repo@main",
        json.dumps("http://localhost:8080/repo@main").replace("/", "\\/"),
        "docker://registry:5000/img@sha256:ab",
        "git+ssh://host:22/repo@v1.0",
        "hdfs://namenode:8020/a/x@y",
        '{"url":"https://x.com","mail":"a@b.org"}',
        '{"url":"https://x.com:80","mail":"a@b.org"}',
        '{"image":"docker://alpine:3.20","mail":"a@b.org"}',
        quote('{"url":"https://x.com","mail":"a@b.org"}', safe=""),
        "(https://a.b),me@x.org; <https://a.b>me@x.org; `https://a.b`me@x.org; [https://a.b]me@x.org",
        "authorization: see docs",
        "authorization: https://h/how-to-authorize-yourself",
        "https://h/x?seed_key=12&key=a.jsonl&auth=no&eos_token=2&page_token=3",
        "a basic authorization of the tokenizer; eos_token = '</s>', data.text_key = 'text'",
        "https://h/x?keys=2&tokens=5&tokenizer=a",
        "step 1/2  loss  5.0",
    ],
)
def test_what_is_no_secret_stays(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # which holds the text, so that its passwords are in the environment
    assert redact(text) == text


def test_secrets_of_the_environment_in_every_spelling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    key, password = "wand\"b'k/e\\y+é", "p/w d@hub"
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("HF_ENDPOINT", f"https://someone:{quote(password, safe='')}@hub.example")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path))  # not a secret, but where one is
    monkeypatch.setenv("SHORT_TOKEN", "steps")
    for secret in (key, password):
        for spelt in (secret, quote(secret), quote(secret, safe=""), json.dumps(secret)[1:-1], repr(secret)[1:-1]):
            assert redact(f"said {spelt}, refused") == "said ***, refused"
    assert redact(f"5 steps of {tmp_path}") == f"5 steps of {tmp_path}"


@pytest.mark.parametrize("url", ["ssh://alexander@build", "ssh://alexander:@build", "http://alexander@proxy:3128"])
def test_a_user_of_the_environment_is_a_word_like_any(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("DOCKER_HOST", url)
    assert redact("/home/alexander/runs/x") == "/home/alexander/runs/x"


@pytest.mark.parametrize(
    "url",
    [
        "https://a1b2c3d4e5f6a7b8c9d0@host",
        "ssh://alexander:a1b2c3d4e5f6a7b8c9d0@host",
        "x,s3://K:a1b2c3d4e5f6a7b8c9d0@b",
    ],
)
def test_a_token_or_password_of_the_environment_is_starred_on_its_own(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("REMOTE", url)
    assert redact("refused a1b2c3d4e5f6a7b8c9d0") == "refused ***"


def test_the_environment_is_searched_when_it_has_changed_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    monkeypatch.setattr(os.path, "exists", lambda path: looked.append(path))
    for name in [name for name in os.environ if name != "PYTEST_CURRENT_TEST"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FIRST_TOKEN", "/no/file/has-it")
    for text in ("\n", "short", "said /no/file/has-it", "said nothing"):
        assert redact(text) == text.replace("/no/file/has-it", "***")
    assert looked == ["/no/file/has-it"]
    monkeypatch.setenv("FIRST_TOKEN", "another-one")
    assert redact("said /no/file/has-it, another-one") == "said /no/file/has-it, ***"
    monkeypatch.delenv("FIRST_TOKEN")
    assert redact("said another-one") == "said another-one"


def test_nested_values_and_what_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", "/data/wiki")
    value = {"a": ["x://u:p@h", 1, None], "b": {"c": "/data/wiki"}}
    assert redact_tree(value) == {"a": ["x://***@h", 1, None], "b": {"c": "***"}}
    assert redact_tree(value, redact_urls) == {"a": ["x://***@h", 1, None], "b": {"c": "/data/wiki"}}


def test_a_long_text_takes_no_time() -> None:
    began = time.process_time()
    for piece in ("a.b-", "://", "x:", "?a", "://x:y/", "%3A%2F%2F"):
        redact(piece * 20_000)
    assert time.process_time() - began < 5


SPEAKS = """
import logging, sys, threading, traceback, warnings
from titanlite.exit_code import exit_code
def act():
    url = "https://user:topsecret@host/x?token=abc123"
    print("printed", url)
    sys.stdout.writelines([f"lines {url}\\n"])
    sys.stderr.write(f"written {url}\\n")
    logging.getLogger("other").warning("logged %s", url)
    warnings.warn(f"warned {url}")
    thread = threading.Thread(target=open, args=(url,))
    thread.start()
    thread.join()
    try:
        raise OSError(url)
    except OSError:
        traceback.print_exc()
    from rich.console import Console
    Console(width=20, soft_wrap=True).print("rich", url, markup=False)
    raise KeyError(url)
sys.exit(exit_code(act))
"""


def test_whoever_writes_to_the_streams() -> None:
    done = subprocess.run([sys.executable, "-c", SPEAKS], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 1
    said = done.stdout + done.stderr
    for word in (
        "printed",
        "lines",
        "written",
        "logged",
        "warned",
        "FileNotFoundError",
        "OSError:",
        "rich",
        "KeyError:",
    ):
        assert word in said
    assert "topsecret" not in said
    assert "abc123" not in said
    assert said.count("https://***@host/x?token=***") >= 9


def test_a_command_shows_no_secret(tmp_path: Path) -> None:
    source = "s3://AKIA:sec/ret123@bucket/x.jsonl"
    for command in ("validate", "prepare"):
        words = ["--config", "configs/debug.toml", "--data.source", source, "--job.dump_folder", "s3://K:sec/ret123@b"]
        done = subprocess.run(
            [sys.executable, "-m", "titanlite", command, *words], capture_output=True, text=True, cwd=ROOT, timeout=300
        )
        assert done.returncode == 2
        assert "s3://***@bucket/x.jsonl" in done.stderr
        assert 'job.dump_folder = "s3://***@b"' in done.stderr
        assert "ret123" not in done.stdout + done.stderr


def test_who_a_run_is_does_not_depend_on_a_password(tmp_path: Path) -> None:
    def of(source: str, tokenizer: str = "bytes") -> Config:
        return Config(data=Data(source=source, tokenizer=tokenizer))

    def claim(config: Config, changed: list[str]) -> None:
        folder = RunFolder(tmp_path)
        assert folder.claim(config) == changed
        folder.record(to_toml(config))
        folder.release()

    claim(of("https://me:first@host/x?token=a"), [])
    assert tomli.loads((tmp_path / "config.toml").read_text())["data"]["source"] == "https://***@host/x?token=***"
    claim(of("https://me:first@host/x?token=a"), [])
    claim(of("https://me:changed@host/x?token=b"), [])
    claim(of("https://***@host/x?token=***"), [])  # what is recorded
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.toml", "lock"]  # and no earlier config
    with pytest.raises(ConfigError, match=r"different run") as raised:
        claim(of("https://me:topsecret@other/x?token=a"), [])
    assert "https://***@other/x" in str(raised.value)
    assert "topsecret" not in str(raised.value)
    with pytest.raises(ConfigError, match=r"different run"):
        claim(of("https://me:first@host/y?token=a"), [])
    # A record of a version that starred nothing is of the same run, too.
    (tmp_path / "config.toml").write_text(to_toml(of("https://me:first@host/x?token=a")))
    claim(of("https://me:first@host/x?token=a"), [])
    assert ":first" not in (tmp_path / "config.toml").read_text()


def test_what_is_missing_from_a_record_is_said() -> None:
    with pytest.raises(DataError, match=r"left user and password out\n.*\n.*fix:  write them where \*\*\* stands"):
        resolve("https://***@host/x.txt")


def test_a_run_records_no_secret_and_goes_on_from_what_it_recorded(tmp_path: Path) -> None:
    corpus = tmp_path / "x.txt"
    corpus.write_text(Path(os.__file__).read_text())
    small = {
        "data.cache_dir": "cache", "job.name": "mine", "training.steps": 2, "training.seq_len": 32,
        "training.global_batch_size": 2, "lr_scheduler.warmup_steps": 1, "validation.enable": "false",
        "checkpoint.interval": 1, "metrics.wandb": "offline", "metrics.wandb_group": "x://me:topsecret@y",
    }  # fmt: skip
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    environment |= {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "WANDB_API_KEY": "deadbeef" * 5}

    def start(config: str, *flags: str) -> str:
        words = [f"--{key}={value}" for key, value in small.items()]
        command = [sys.executable, "-m", "titanlite.train", "--config", config, *words, *flags]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        written = [path for path in (tmp_path / "outputs", tmp_path / "cache") for path in path.rglob("*")]
        assert {"meta.json", "state.json", "receipt.json", "status.json"} <= {path.name for path in written}
        for text in (said.encode(), *(path.read_bytes() for path in written if path.is_file())):
            assert b"topsecret" not in text
            assert b"deadbeef" not in text
        assert not any("topsecret" in path.name for path in written)
        return said

    said = start(str(ROOT / "configs/debug.toml"), "--data.source=x.txt", "--job.stop_after=1")
    assert "preparing x.txt" in said
    recorded = tomli.loads((tmp_path / "outputs/mine/config.toml").read_text())
    assert recorded["metrics"]["wandb_group"] == "x://***@y"
    said = start("outputs/mine/config.toml", "--job.stop_after=0")
    assert "resumed from step 1" in said
    assert "preparing" not in said
