"""What is drawn on purpose passes through a guarded stream; what others wrote is escaped."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text
from tqdm import tqdm

from titanlite.streams import drawn, escaped, guard_stream, one_line, with_relative_paths


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ä 日本 \N{GRINNING FACE}\n\ttext", "plain, ä 日本 \N{GRINNING FACE}\n\ttext"),
        ("\x1b[31m\x07\x7f\x00", r"\x1b[31m\x07\x7f\x00"),
        ("\x9b31m \u202eabc\u2066 \u2028", r"\x9b31m \u202eabc\u2066 \u2028"),
        ("\rover\r\n", "\\rover\\r\n"),
        ("caf\udce9", r"caf\udce9"),
        ("\x1b[A", r"\x1b[A"),
    ],
)
def test_what_a_terminal_obeys_is_escaped(text: str, shown: str) -> None:
    stream = io.StringIO()
    guard_stream(stream)
    stream.write(text)
    assert stream.getvalue() == escaped(text) == shown
    assert one_line("a\n\tb") == r"a\n\tb"


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        (("a line", "\revil\x1b[31m", "\n"), "a line\\revil\\x1b[31m\n"),  # as print writes them
        (("a line\n", "\x1b[A", "\n", "\revil"), "a line\n\\x1b[A\n\revil"),
        (("a line\n", "\x1b[A\r    \n"), "a line\n\\x1b[A\\r    \n"),
        (("a line\n", "\rbar", "\n", "\rbar", "", "\x1b[A", "\x1b[A"), "a line\n\rbar\n\rbar\x1b[A\\x1b[A"),
        (("\rbar", "\r   \r", "\ra line\n", "\n\n", "\x1b[A\x1b[A"), "\rbar\r   \r\\ra line\n\n\n\x1b[A\x1b[A"),
    ],
)
def test_no_text_is_overwritten_but_a_bar(texts: tuple[str, ...], shown: str) -> None:
    stream = io.StringIO()
    guard_stream(stream)
    for text in texts:
        stream.write(text)
    assert stream.getvalue() == shown


@pytest.mark.parametrize("name", ["here", "my runs (2)"])
def test_paths_beneath_the_working_directory_are_relative(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here := tmp_path / name).mkdir()
    monkeypatch.chdir(here)
    text = f"saved {here}/outputs/a\n'{here}/b c' x={here}/.d"
    assert with_relative_paths(text) == "saved outputs/a\n'b c' x=.d"
    for other in (f"in {here}", f"in {here}/", f"{here}-2/a", f"/mnt{here}/a", f"file://{here}/a", f"{here}/-a"):
        assert with_relative_paths(other) == other
    monkeypatch.chdir("/")
    assert with_relative_paths(text) == text


def test_a_line_that_is_drawn_is_overwritten_by_nobody() -> None:
    stream = io.StringIO()
    guard_stream(stream)
    stream.write("\n\n")
    drawn(stream).write("\x1b[1ma line\x1b[0m\n")
    stream.write("\x1b[A")
    stream.write("\n")
    stream.write("\rbar")
    assert stream.getvalue() == "\n\n\x1b[1ma line\x1b[0m\n\\x1b[A\n\rbar"


def test_colours_of_our_own_stay() -> None:
    stream = io.StringIO()
    guard_stream(stream)
    console = Console(file=drawn(stream), force_terminal=True, color_system="standard")
    console.print(Text(escaped("warning: \x1b[2J"), "yellow"))
    assert stream.getvalue() == "\x1b[33mwarning: \\x1b[2J\x1b[0m\n"


def test_bars_of_other_libraries_move() -> None:
    stream = io.StringIO()
    guard_stream(stream)
    for outer in tqdm(range(2), file=stream, desc="out\x1b[31m", mininterval=0, ascii=True):
        for _ in tqdm(range(2), file=stream, desc=f"in {outer}", mininterval=0, leave=False, ascii=True):
            pass
    shown = stream.getvalue()
    assert r"out\x1b[31m" in shown
    assert "\r" in shown
    assert r"\r" not in shown
    assert "\x1b[A" in shown
    assert "\x1b[31m" not in shown
