"""The commands that the documentation's pages show are right, and print what the page says they print.

A page is a sequence: its files are written, its commands run in their order, in a folder that has the checkout's files.
Checks that answer in seconds run as they are. Of what would train, tokenize or start other hosts, `titanlite validate`
sees the same config and flags; `-m slow` runs all that one machine without a GPU can.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.run_folder import make_run
from tests.unit.data.test_tokenizer import make_tokenizer
from titanlite.commands import main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*(DOCS / f"{name}.md" for name in ("index", "first_run", "concepts", "data", "when_it_fails"))]
PAGES += sorted(page for page in (DOCS / "how_to").glob("*.md") if re.search("\n```(sh|yaml)", page.read_text()))
FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
STARTS = "train", "prepare", "verify-resume"  # validate sees what they would start
SLOW = {"outputs/first", "outputs/first/config.toml", "layout.toml"}  # those that a run has made; a search of layouts
Run = Callable[[Sequence[str]], tuple[int, str]]


@pytest.fixture
def _checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the files of the checkout, and some text."""
    for name in ("configs", "recipes", "scripts", "titanlite", "train.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "corpus").mkdir()
    records = "\n".join(json.dumps({"text": f"once upon a time {i}"}) for i in range(100_000))
    for name in ("corpus/a.jsonl", "held_out.jsonl"):
        (tmp_path / name).write_text(records)
    (tmp_path / "llama3").mkdir()
    make_tokenizer(tmp_path / "llama3" / "tokenizer.json")
    monkeypatch.setenv("HOME", str(tmp_path))  # of the default data.cache_dir
    monkeypatch.chdir(tmp_path)


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """Return a page's fenced blocks, as their language, title and text."""
    return [(found[1], found[2] or "", found[3]) for found in FENCE.finditer(page.read_text())]


def as_validated(words: list[str]) -> list[str] | None:
    """Return the flags by which `titanlite validate` sees what a command would start; None: it would start nothing."""
    if words[:1] == ["titanlite"] and words[1] in STARTS:
        flags = words[2:]
        for own, instead in (("--gpus", ["--world"]), ("--steps", None)):
            if own in flags:
                at = flags.index(own)
                flags[at : at + 2] = [*instead, flags[at + 1]] if instead else []
        return flags
    if words[0] == "torchrun":
        hosts, ranks = (int(words[words.index(flag) + 1]) for flag in ("--nnodes", "--nproc-per-node"))
        return [*words[words.index("train.py") + 1 :], "--world", str(hosts * ranks)]
    scripts = [i for i, word in enumerate(words) if word.startswith("scripts/launch/")]
    if scripts:
        assert (ROOT / words[scripts[0]]).exists()
        return words[words.index("--config") :]
    return None


def printed(shown: str, text: str) -> list[str]:
    """Return the lines of a shown output that a text does not have in this order; "…" stands for anything."""
    missing, rest = list[str](), [" ".join(line.split()) for line in text.splitlines()]
    for line in shown.splitlines():
        pattern = re.compile(r".*".join(re.escape(part) for part in " ".join(line.split()).split("…")))
        at = next((i for i, have in enumerate(rest) if pattern.fullmatch(have)), None)
        if line.strip() == "…":
            continue
        if at is None:
            missing.append(line)
        else:
            rest = rest[at + 1 :]
    return missing


def answers(words: list[str], for_real: bool) -> list[str] | None:
    """Return the command line of titanlite that stands for what a page shows; None for what is not run here."""
    started = as_validated(words)
    ours = words[0] == "titanlite"
    if ours and (started is None or for_real) and (for_real or not set(words) & SLOW):
        return words[1:]
    return ["validate", *started] if started and not set(words) & SLOW else None


def follow(page: Path, run: Run, for_real: bool) -> int:
    """Do what a page shows, and return how many of its commands were run."""
    done, parts = 0, blocks(page)
    for (language, title, text), (after, _, shown) in zip(parts, [*parts[1:], ("", "", "")], strict=True):
        if title:
            Path(title).parent.mkdir(parents=True, exist_ok=True)
            Path(title).write_text(text)
        lines = {"sh": text.splitlines(), "yaml": re.findall(r"torchrun .*", text)}.get(language, [])
        for line in lines:
            words = shlex.split(line)
            if words[0] in ("mkdir", "cp") and (for_real or "outputs" not in line):
                subprocess.run(words, check=True)
            if argv := answers(words, for_real):
                code, output = run(argv)
                exact = argv == words[1:] or shown.startswith("command line:")
                shows = shown if after == "text" and line == lines[-1] and exact else ""
                wanted = (2,) if re.search(r"\d problem", shown) else (0, 1) if argv[0] == "compare" else (0,)
                assert code in wanted, (line, output)
                assert not printed(shows, output)
                done += 1
    return done


@pytest.mark.usefixtures("_checkout")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_are_accepted_and_print_what_is_shown(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, name in enumerate(("bf16", "rowwise"), start=1):
        make_run(Path("outputs") / name, [5 - step / 100 + number / 1000 for step in range(40)])

    def run(argv: Sequence[str]) -> tuple[int, str]:
        capsys.readouterr()
        code = main(argv)
        out, err = capsys.readouterr()
        return code, out + err

    assert follow(page, run, for_real=False) > 0


@pytest.mark.slow
@pytest.mark.usefixtures("_checkout")
@pytest.mark.parametrize(
    "page", ["first_run", "choose_a_layout", "own_data", "own_model", "diverging_run", "when_it_fails"]
)
def test_pages_can_be_followed(page: Path) -> None:
    """Each command for real, in a process of its own, as a reader has it."""

    def run(argv: Sequence[str]) -> tuple[int, str]:
        command = [sys.executable, "-m", "titanlite", *argv]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        ended = subprocess.run(command, capture_output=True, text=True, env=env)
        return ended.returncode, ended.stdout + ended.stderr

    if page == "diverging_run":  # it goes on from a run of the first page
        make_run(Path("outputs/bf16"), [5 - step / 100 for step in range(40)])
        follow(DOCS / "first_run.md", run, for_real=True)
    assert follow(next(path for path in PAGES if path.stem == page), run, for_real=True) > 0


def test_what_a_command_does_not_print_is_found() -> None:
    text = "a 1\n  b 2\nc 3\n"
    assert not printed("a 1\n…\nc …\n", text)
    assert printed("c 3\na 1\n", text) == ["a 1"]
    assert printed("b 3\n", text) == ["b 3"]
