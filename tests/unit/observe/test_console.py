import codecs
import contextlib
import io
import math
import os
import pty
import re
import sys
import threading

import pytest
from rich.cells import cell_len

from titanlite.errors import DataError
from titanlite.observe.console import Console, duration, step_line
from titanlite.observe.observer import Sample
from titanlite.streams import guard_stream, guard_streams

ROW = {
    "step": 120,
    "loss": 2.43131,
    "grad_norm": 0.5129,
    "lr": 3e-4,
    "tokens": 7_864_320,
    "tokens_per_second_per_gpu": 9912.4,
    "mfu": 0.5812,
    "memory_gib": 52.34,
    "seconds": 1.0,
    "data_wait_seconds": 0.002,
}
STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ "


def run(rank, local_rank, folder):
    stream = io.StringIO()
    console = Console(rank, local_rank, 10_000, folder, stream)
    console.notice("8 processes [mesh 2x4]")
    console.write(ROW | {"seconds": 3.0})
    console.warning("no peak")
    console.write({"step": 120, "tokens": 1, "validation_loss": 2.5})
    numbers = {"output_sqnr_db": (28.5, 24.52), "input_saturated": (0.0, 0.001), "weight_flushed": (0.25, 0.5)}
    layers = {f"float8_{name}.layers.{n}.w": value[n] for name, value in numbers.items() for n in (0, 1)}
    console.write({"step": 120, "tokens": 1, **layers})
    log = (folder / f"rank{rank}.log").read_text()  # while the run goes on, which may be killed
    console.close()
    return stream.getvalue(), log


def test_plain_output_is_stable(tmp_path):
    out, log = run(0, 0, tmp_path / "logs")
    assert out == (
        "8 processes [mesh 2x4]\n"
        "step   120/10000  loss  2.4313  grad  0.513    9,912 tok/s/gpu  mfu 58.1%   52.3 GiB  eta 8h 14m\n"
        "warning: no peak\n"
        "step   120/10000  validation loss 2.5000\n"
        "step   120/10000  float8 at least 24.5 dB, layers.1.w; at most 0.10% beyond the range, 50.00% became\n"
        "    zero\n"
    )
    assert [re.sub("^" + STAMP, "", line) for line in log.splitlines()] == out.replace("\n    ", " ").splitlines()
    assert all(re.match(STAMP, line) for line in log.splitlines())


def test_who_writes_what(tmp_path):
    out, log = run(8, 0, tmp_path)  # first rank of the second host
    assert out == "[rank 8] 8 processes [mesh 2x4]\n[rank 8] warning: no peak\n"
    assert len(log.splitlines()) == 5
    out, log = run(9, 1, tmp_path)
    assert out == ""
    assert len(log.splitlines()) == 5


def test_columns_stay_aligned_and_can_be_parsed():
    lines = [
        step_line(row, 10_000, 60)
        for row in (
            ROW,
            ROW
            | {"step": 1, "loss": 12.1, "grad_norm": 101.5, "tokens_per_second_per_gpu": 123_456, "memory_gib": 139.1},
            ROW | {"step": 9999, "loss": math.nan, "grad_norm": math.inf},
        )
    ]
    assert len({line.index("eta") for line in lines}) == 1
    assert "loss     nan" in lines[2]
    for line in lines:
        assert line.isascii()
        assert re.fullmatch(
            r"step +\d+/10000  loss +\S+  grad +\S+  +[\d,]+ tok/s/gpu  mfu +\S+  +[\d.]+ GiB  eta 1m 00s", line
        )


def test_a_line_fits_100_columns():
    """Of a million steps, for days, with a large model's norm and a small one's speed."""
    row = ROW | {"step": 1_000_000, "loss": 12.5, "grad_norm": 1234.5, "mfu": 1.25, "memory_gib": 139.1}
    for speed in (412.0, 1_234_567.0):
        line = step_line(row | {"tokens_per_second_per_gpu": speed}, 1_000_000, 12.5 * 86_400)
        assert line.endswith("139.1 GiB  eta 12d")
        assert len(line) <= 100


def test_a_longer_line_is_folded_between_words_and_is_whole_in_the_log(tmp_path):
    stream, path = io.StringIO(), f"/srv/{'versions-' * 20}3.11.7/a.py"
    console = Console(0, 0, 10, tmp_path, stream)
    text = f"data.source: {'tokens 5, ' * 20}except {path}: not UTF-8"
    console.notice(text)
    warning = f"1 problem\n      want: {'a number ' * 20}"
    console.warning(warning)
    console.close()
    lines = stream.getvalue().splitlines()
    assert [line for line in lines if len(line) > 100] == [f"    {path}:"]
    before, after = stream.getvalue().split("warning: ")
    assert before.split() == text.split()
    assert after.split() == warning.split()
    assert after.splitlines()[2].startswith(" " * 10 + "number ")
    assert f"Z {text}\n" in (tmp_path / "rank0.log").read_text()


def test_waiting_for_data_is_warned_of_once(tmp_path):
    stream = io.StringIO()
    console = Console(0, 0, 1_000, tmp_path, stream, has_validation=True)
    for step in range(1, 61):  # the first twenty wait for 2 %, all others for a quarter
        console.write(ROW | {"step": step, "data_wait_seconds": 0.02 if step <= 20 else 0.25})
    console.close()
    before, after = stream.getvalue().split("warning: ")
    assert 20 < before.count("\n") < 35
    assert stream.getvalue().count("\nstep ") == 59  # a pipe has every step
    assert after.startswith("1")  # of the last twenty lines' time, just above a tenth
    assert "% of the last 20 lines' time went by waiting for data: " in after


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00:00"), (-3, "0:00:00"), (11525, "3:12:05"), (2 * 86400 + 59.6, "2d 0:01:00")]
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_the_compiling_first_step_does_not_spoil_the_estimate(tmp_path):
    stream = io.StringIO()
    console = Console(0, 0, 103, tmp_path, stream)
    for step, seconds in ((1, 300.0), (2, 1.0), (3, 1.0)):
        console.write(ROW | {"step": step, "seconds": seconds})
    assert stream.getvalue().endswith("eta 1m 40s\n")
    for step in range(4, 64):
        console.write(ROW | {"step": step, "seconds": 4.0 if step < 44 else 2.0})
    assert stream.getvalue().endswith("eta 1m 20s\n")  # of the last twenty lines
    console.close()


def test_the_time_left_is_of_the_tokens_left(tmp_path):
    """Of steps of 8 tokens, then of 64."""
    stream = io.StringIO()
    console = Console(0, 0, 20, tmp_path, stream)
    console.measure_by(lambda step: 8 * min(step, 10) + 64 * max(0, step - 10))
    console.write(ROW | {"step": 10, "seconds": 2.0})
    assert stream.getvalue().endswith("eta 2m 40s\n")  # 640 tokens at four a second
    console.write(ROW | {"step": 11, "seconds": 16.0})
    assert stream.getvalue().endswith("eta 2m 24s\n")
    console.close()


def test_the_time_left_counts_validations_and_checkpoints_that_are_to_come(tmp_path):
    stream = io.StringIO()
    console = Console(0, 0, 25, tmp_path, stream)
    for step, eta in ((10, "0m 15s"), (11, "2m 14s"), (20, "2m 05s"), (21, "1m 04s"), (25, "1m 00s")):
        console.write(ROW | {"step": step, "seconds": 1.0})
        assert stream.getvalue().endswith(f"eta {eta}\n")
        if step % 10 == 0:  # also after the last step, so that two are to come after step 10
            console.took("validation", 50.0, 10)
            console.took("checkpoint", 10.0, 10)
    console.close()


def test_a_secret_in_a_message_is_not_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    stream = io.StringIO()
    guard_stream(stream)  # as a run does with standard output
    console = Console(0, 0, 1, tmp_path, stream)
    console.notice("using hf_abcdefgh")
    console.warning("bad hf_abcdefgh")
    console.close()
    assert stream.getvalue() == "using ***\nwarning: bad ***\n"
    assert "hf_abcdefgh" not in (tmp_path / "rank0.log").read_text()


def test_a_restart_continues_the_log(tmp_path):
    for _ in range(2):
        run(0, 0, tmp_path)
    assert len((tmp_path / "rank0.log").read_text().splitlines()) == 10


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_what_nobody_reads_any_more_does_not_end_a_run(tmp_path, kind):
    ours, theirs = os.pipe() if kind == "pipe" else pty.openpty()
    with os.fdopen(theirs, "w") as stream:
        console = Console(0, 0, 240, tmp_path, stream)
        console.write(ROW)
        os.close(ours)
        console.write(ROW)
        console.notice("saved")
        console.close()
        os.dup2(os.open(os.devnull, os.O_WRONLY), theirs)  # for what the stream still holds
    log = (tmp_path / "rank0.log").read_text()
    assert log.count("warning: the terminal is lost") == 1
    assert log.endswith(" saved\n")


def test_the_terminal_is_standard_output(tmp_path, capsys):
    console = Console(0, 0, 240, tmp_path)
    console.notice("saved")
    console.close()
    assert capsys.readouterr().out == "saved\n"


@contextlib.contextmanager
def terminal(monkeypatch):
    """A terminal's stream, and a list that will have all that was written to it."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.delenv("NO_COLOR", raising=False)
    ours, theirs = pty.openpty()
    chunks, decoder = [], codecs.getincrementaldecoder("utf-8")()  # a chunk may end within a character

    def read():  # a terminal takes a page at a time
        with contextlib.suppress(OSError):  # it is closed
            while chunk := os.read(ours, 100_000):
                chunks.append(decoder.decode(chunk))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with os.fdopen(theirs, "w") as stream:
        yield stream, chunks
    reader.join()
    os.close(ours)


def plain(chunks):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", "".join(chunks)).replace("\r\n", "\n").replace("\r", "\n")


def test_a_terminal_gets_colours_and_a_bar_and_the_log_does_not(tmp_path, monkeypatch):
    with terminal(monkeypatch) as (stream, chunks):
        console = Console(0, 0, 240, tmp_path, stream)
        console.notice("[red]text in brackets is not markup[/red]")
        console.notice("x" * 200)
        others = sys.stdout, sys.stderr, threading.enumerate()
        console.write(ROW)
        console.write(ROW)
        assert (
            sys.stdout,
            sys.stderr,
            threading.enumerate(),
        ) == others  # the bar leaves prints alone, and has no thread
        console.close()
    out = "".join(chunks)
    assert "\x1b[" in out
    assert "120/240" in out.rsplit("eta", 1)[1]  # the bar, after the line
    assert " 50%" in out
    assert "[red]text in brackets is not markup[/red]" in out
    assert step_line(ROW, 240, 120) in plain(chunks)
    assert "x" * 200 in plain(chunks)
    assert "\x1b" not in (tmp_path / "rank0.log").read_text()
    assert "\x1b[?25h" in out  # the cursor is shown again
    before, _ = out.split("\x1b[?25l")  # which one bar hides, when it comes
    assert "[/red]" in before
    assert "loss" not in before


@pytest.mark.parametrize(
    ("validates", "verbose", "kept"),
    [
        (False, False, [11, *range(15, 75, 5), 73]),  # of 100, a twentieth; the first, and the last of a stopped run
        (True, False, [11, 73]),
        (True, True, [*range(11, 74)]),
    ],
)
def test_a_terminal_keeps_lines_of_few_steps_and_its_bar_shows_all(tmp_path, monkeypatch, validates, verbose, kept):
    with terminal(monkeypatch) as (stream, chunks):
        console = Console(0, 0, 100, tmp_path, stream, has_validation=validates, is_verbose=verbose)
        for step in range(11, 74):
            console.write(ROW | {"step": step, "loss": step / 8})
        for step in (73, 74):
            console.write({"step": step, "tokens": 1, "validation_loss": 2.5})
        console.show_newest()
        console.notice("stopped")
        console.close()
    text = plain(chunks)
    after = "".join(chunks).rpartition("73/100")[2]
    assert "\x1b[1A\x1b[2K" in after  # the bar and its figures are erased at the end
    assert [int(step) for step in re.findall(r"^step +(\d+)/100  loss", text, re.MULTILINE)] == kept
    assert text.index("step  73/100  loss") < text.index("stopped")
    assert all(text.count(f"\nloss {step / 8:7.4f}  grad") for step in range(11, 74))
    assert "\nstep  73/100  train loss 9.1250  validation loss 2.5000\n" in text
    assert "\nstep  74/100  train loss 9.1250 at step 73  validation loss 2.5000\n" in text
    assert len((tmp_path / "rank0.log").read_text().splitlines()) == 63 + 2 + 1


def test_samples_are_folded_to_two_lines_and_an_empty_one_is_said_to_be(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    stream, text = io.StringIO(), "words and " * 9 + "hf_abcdefgh" + " more\nwords" * 20
    for rank in (0, 1):  # samples of all ranks are the same
        console = Console(rank, 0, 10, tmp_path, stream)
        console.samples(5, 1, [Sample("def f", text), Sample("a", ""), Sample("b", " \n ")])
        console.close()
    first, second, *rest = stream.getvalue().splitlines()
    assert first.startswith("sample  def f → words and ")
    assert second.startswith("    ")
    assert second.endswith(" …")
    assert max(len(first), len(second)) <= 100
    assert rest == ["sample  a → (nothing)", "sample  b → (white space)"]
    assert "hf_abc" not in stream.getvalue()
    assert "more words " * 19 in (tmp_path / "rank0.log").read_text()


@pytest.mark.parametrize(
    "text",
    ["日本語" * 99, "x" * 300, "word " * 17 + "y" * 300, "e\u0301" * 150, "👩\u200d👩\u200d👧 " * 60],
    ids=["wide", "one word", "a word at the end", "combined", "joined"],
)
def test_two_lines_of_a_sample_are_full_of_what_it_says_whatever_its_script(tmp_path, text):
    stream = io.StringIO()
    console = Console(0, 0, 10, tmp_path, stream)
    console.samples(5, 1, [Sample("p", text)])
    console.close()
    first, second = stream.getvalue().splitlines()
    for line in (first, second):
        assert cell_len(line) <= 100
        assert max(cell_len(line), len(line)) > 80
    assert second.endswith(" …")
    shown = first.removeprefix("sample  p → ") + second.removesuffix(" …")
    assert text.replace(" ", "").startswith(shown.replace(" ", ""))


def test_a_digest_is_twelve_lines_and_the_log_has_all(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    details, brief = [f"detail {i}" for i in range(30)], ["memory", "long " * 100, *(f"brief {i}" for i in range(9))]

    def last(more):
        return f"{more} more in {tmp_path}/{'folders/' * 9}receipt.json"  # one line, as it is relative

    stream = io.StringIO()
    console = Console(0, 0, 10, tmp_path, stream)
    console.digest(details, brief, last)
    console.close()
    assert stream.getvalue().count("\n") == 12
    said = [*brief[:6], f"5 more in {'folders/' * 9}receipt.json"]
    assert stream.getvalue().split() == " ".join(said).split()
    log = (tmp_path / "rank0.log").read_text()
    assert all(f" {detail}\n" in log for detail in details)
    assert f" 0 more in {tmp_path}/folders/" in log
    assert "brief" not in log
    verbose = Console(0, 0, 10, tmp_path, stream := io.StringIO(), is_verbose=True)
    verbose.digest(details, brief, last)
    verbose.close()
    assert stream.getvalue().splitlines()[:-1] == details


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a 1024×1024 matmul", r"a 1024\xd71024 matmul"),
        ("caf\udce9.jsonl", r"caf\udce9.jsonl"),  # Python's way to write a byte of a file's name that is no UTF-8
    ],
)
def test_what_a_terminal_cannot_show_ends_no_run(tmp_path, monkeypatch, text, shown):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    guard_streams()  # as every process does
    console = Console(0, 0, 10, tmp_path)
    console.notice(text)
    console.close()
    assert stream.buffer.getvalue().decode() == f"{shown}\n"
    assert (tmp_path / "rank0.log").read_bytes().endswith(f"Z {text}\n".encode(errors="backslashreplace"))


def test_what_ended_a_rank_is_in_its_log_alone(tmp_path):
    stream = io.StringIO()
    console = Console(0, 0, 10, tmp_path, stream)
    console.failed(DataError("data: 1 problem"))
    try:
        raise ZeroDivisionError("planted")
    except ZeroDivisionError as bug:
        console.failed(bug)
    console.close()
    lines = (tmp_path / "rank0.log").read_text().splitlines()
    assert lines[0].endswith("Z failed: data: 1 problem")
    assert lines[1].endswith("Z failed: Traceback (most recent call last):")
    assert lines[-1] == "ZeroDivisionError: planted"
    assert stream.getvalue() == ""


def test_validations_of_weights_and_of_their_average_are_told_apart(tmp_path):
    stream, bits = io.StringIO(), "validation_bits_per_byte"
    console = Console(0, 0, 10, tmp_path, stream)
    average = {"validation_loss_ema": 2.0, f"{bits}_ema": 2.75, "validation_loss_ema.wiki": 1.75}
    weights = {"validation_loss": 2.5, bits: 3.5, "validation_loss.wiki": 2.25}
    console.write({"step": 5, "tokens": 1, **weights, **average})
    console.write({"step": 6, "tokens": 1, **average})
    console.close()
    of_average = "validation loss of the average 2.0000 (2.7500 bits/byte)  wiki 1.7500\n"
    of_weights = "validation loss 2.5000 (3.5000 bits/byte)  wiki 2.2500  "
    said = stream.getvalue().replace("\n    ", " ")  # the first is folded
    assert said == f"step  5/10  {of_weights}{of_average}step  6/10  {of_average}"
