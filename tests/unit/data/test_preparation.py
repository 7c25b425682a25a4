"""Preparation: once, complete or absent, by one of many processes; and the quick check before it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.prepared import prepare_here
from tests.unit.data.test_sources import write_parquet
from tests.unit.data.test_tokenizer import make_tokenizer
from titanlite.config.schema import Config, Data, Training, Validation
from titanlite.data.corpus import Corpus
from titanlite.data.inputs import check_cache, check_inputs
from titanlite.data.prepare import prepare, whole_from_hub
from titanlite.data.progress import Progress
from titanlite.data.sources import resolve
from titanlite.data.tokenizer import load_tokenizer
from titanlite.errors import DataError

ROOT = Path(__file__).parents[3]


def write_texts(folder: Path, *texts: str) -> str:
    folder.mkdir(exist_ok=True, parents=True)
    for i, text in enumerate(texts):
        (folder / f"{i}.txt").write_text(text, encoding="utf-8")
    return str(folder)


def test_documents_are_separated(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "in", "one", "", "zwö")
    shards = prepare_here(tmp_path, source)
    assert bytes(shards.read(0, shards.tokens).tolist()) == "one\0zwö\0".encode()
    meta = shards.meta
    assert (meta.documents, meta.input_bytes, meta.dtype, meta.n_bad_records) == (2, 7, "uint16", 0)


def test_bytes_of_the_text_are_those_of_good_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titanlite.data.encode._BATCH_CHARACTERS", 1)
    source = write_texts(tmp_path / "in", "größer", "a\0bad one", "", "x" * 10)
    meta = prepare_here(tmp_path, source, max_bad_records=1).meta
    assert meta.text_bytes == 8 + 10  # ö and ß are two bytes each
    assert meta.tokens_per_byte == (18 + 2) / 18
    assert replace(meta, text_bytes=0).tokens_per_byte is None  # of token files
    cut = prepare_here(tmp_path, write_texts(tmp_path / "cut", "first", "second", "third"), max_tokens=8).meta
    assert cut.text_bytes == len("firstsecond")


@pytest.mark.parametrize(("largest", "dtype"), [(65535, "uint16"), (65536, "uint32")])
def test_ids_are_as_wide_as_the_vocabulary(tmp_path: Path, largest: int, dtype: str) -> None:
    from tokenizers import Tokenizer, models

    path = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "b": largest}, unk_token="a")).save(str(path))
    shards = prepare_here(tmp_path, write_texts(tmp_path / "in", "b"), largest + 1, tokenizer=str(path))
    assert shards.meta.dtype == dtype
    assert shards.read(0, 2).tolist() == [largest, 1]
    assert shards.tokenizer == load_tokenizer(str(path)).fingerprint  # checkpoints hold it


def test_what_is_wrong_is_said_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"model.vocab_size = 255\n.*want: at least 256, (.|\n)*vocab_size = 256, or"):
        prepare_here(tmp_path, write_texts(tmp_path / "in", "one"), 255)
    with pytest.raises(DataError, match=r"validation.source = 'nope', which matches no file"):
        prepare("nope", Data(cache_dir=str(tmp_path / "cache")), 256, progress=False, key="validation.source")
    assert not (tmp_path / "cache").exists()


def test_what_decides_the_content_decides_the_folder(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "in", "one")
    first = prepare_here(tmp_path, source)
    assert prepare_here(tmp_path, source).folder == first.folder
    tokenizer = prepare_here(tmp_path, source, 300, tokenizer=str(make_tokenizer(tmp_path / "tokenizer.json")))
    text_key = prepare_here(tmp_path, source, text_key="body")
    os.utime(tmp_path / "in" / "0.txt", (1, 1))
    touched = prepare_here(tmp_path, source)
    (tmp_path / "in" / "0.txt").write_text("ONE")
    changed = prepare_here(tmp_path, source)
    cut, cut_elsewhere = (prepare_here(tmp_path, source, max_tokens=n) for n in (1, 2))
    assert len({s.folder for s in (first, tokenizer, text_key, touched, changed, cut, cut_elsewhere)}) == 7
    assert touched.fingerprint == first.fingerprint == text_key.fingerprint
    assert changed.fingerprint != first.fingerprint


@pytest.mark.parametrize("batch_characters", [1, 5, 100])
@pytest.mark.parametrize("max_tokens", [0, 1, 4, 5, 9, 14, 15])
def test_preparation_ends_with_the_document_that_reaches_max_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_characters: int, max_tokens: int
) -> None:
    monkeypatch.setattr("titanlite.data.encode._BATCH_CHARACTERS", batch_characters)
    source, is_cut = write_texts(tmp_path / "in", "one", "two", "three"), 0 < max_tokens < 9
    shards = prepare_here(tmp_path, source, max_tokens=max_tokens)
    expected = b"one\0two\0three\0"[: {1: 4, 4: 4, 5: 8}.get(max_tokens)]
    assert bytes(shards.read(0, shards.tokens).tolist()) == expected
    assert shards.meta.documents == expected.count(0)
    assert shards.meta.max_tokens == is_cut * max_tokens  # said of a source only if something of it is left out
    whole = prepare_here(tmp_path, source, cache_dir=str(tmp_path / "other"))
    assert (shards.fingerprint == whole.fingerprint) != is_cut


@pytest.mark.parametrize("between", [[], ["x" * 5_000_000]], ids=["near", "far"])
@pytest.mark.parametrize("behind", [["bad"], ["good", "bad"], ["bad", "good"]], ids="-".join)
def test_bad_records_behind_max_tokens_do_not_count(behind: list[str], between: list[str], tmp_path: Path) -> None:
    """However far it was read ahead."""
    lines = ['{"txt": "bad"}', '{"text": "one"}', '{"text": "\\u0000"}', '{"text": "two"}']
    lines += [json.dumps({"text": text}) for text in between]
    lines += ['{"text": "three"}' if what == "good" else '{"txt": "bad"}' for what in behind]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    shards = prepare_here(tmp_path, str(tmp_path / "in.jsonl"), max_tokens=8, max_bad_records=2)
    assert bytes(shards.read(0, shards.tokens).tolist()) == b"one\0two\0"
    assert shards.meta.n_bad_records == len(shards.meta.bad_records) == 2
    assert shards.meta.max_tokens == 8


def test_max_tokens_is_for_text_that_is_trained_on(tmp_path: Path) -> None:
    held_out = write_texts(tmp_path / "in", "one", "two")
    data = Data("python_stdlib", max_tokens=1, cache_dir=str(tmp_path / "cache"))
    assert prepare(held_out, data, 256, progress=False, key="validation.source").tokens == 8
    same = replace(data, source=held_out)
    assert prepare(held_out, same, 256, progress=False).tokens == 4
    assert prepare(held_out, same, 256, progress=False, key="validation.source").tokens == 8
    np.arange(10, dtype="<u2").tofile(tmp_path / "a.bin")
    source = f"{tmp_path}/a.bin"
    with pytest.raises(DataError, match=r"data.max_tokens = 5\n.*want: 0 for token files such as '.*a\.bin'"):
        prepare_here(tmp_path, source, 10, max_tokens=5)


def test_all_of_the_hub_is_told_beforehand(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found, folder = resolve("hf:allenai/c4:en"), resolve(f"hf:{write_texts(tmp_path / 'in', 'one')}")
    notice = whole_from_hub(found, Data())
    assert notice == (
        "hf:allenai/c4:en is on the hub, and all of it is tokenized before the first step, whatever its size; "
        "data.max_tokens limits it"
    )
    assert "a smaller config or split" in whole_from_hub(resolve("hf:a/b", "validation.source"), Data(max_tokens=5))
    for source, data in ((found, Data(max_tokens=5)), (folder, Data()), (resolve("python_stdlib"), Data())):
        assert whole_from_hub(source, data) == ""
    with Progress("preparing it", enable=True, notice=notice):
        pass
    assert capfd.readouterr().err == f"{notice}\npreparing it\n"


@pytest.mark.parametrize("batch_characters", [1, 100])
def test_a_separator_inside_a_text_is_a_bad_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_characters: int
) -> None:
    monkeypatch.setattr("titanlite.data.encode._BATCH_CHARACTERS", batch_characters)
    source = write_texts(tmp_path / "in", "good", "with \0 NUL")
    with pytest.raises(DataError, match=r"1\.txt: holds NUL, which separates documents"):
        prepare_here(tmp_path, source)
    shards = prepare_here(tmp_path, source, max_bad_records=1)
    assert bytes(shards.read(0, shards.tokens).tolist()) == b"good\0"
    with pytest.raises(DataError, match=r"1\.txt: holds NUL"):  # prepared for a run that allows it; this one does not
        prepare_here(tmp_path, source)


def test_a_failed_preparation_leaves_nothing(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "in", "x" * 1000)
    (tmp_path / "in" / "1.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="1 bad record so far"):
        prepare_here(tmp_path, source)
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".lock"]
    (tmp_path / "in" / "1.txt").unlink()
    (tmp_path / "in" / "0.txt").write_text("")
    with pytest.raises(DataError, match="which holds no text\n"):
        prepare_here(tmp_path, source)
    (tmp_path / "in" / "1.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"which holds no text but bad records, as .*1\.txt:1: not UTF-8: byte 0xff"):
        prepare_here(tmp_path, source, max_bad_records=1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda file: file.write_text("another"), "whose files changed during reading"),
        (lambda file: file.unlink(), r"data.source = .*1\.txt: No such file"),
    ],
)
def test_input_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object], said: str
) -> None:
    from titanlite.data.tokenizer import ByteTokenizer

    source, encode = write_texts(tmp_path / "in", "one", "two"), ByteTokenizer.encode_batch

    def change_and_encode(self: ByteTokenizer, texts: list[str]) -> list[np.ndarray]:
        change(tmp_path / "in" / "1.txt")
        return encode(self, texts)

    monkeypatch.setattr(ByteTokenizer, "encode_batch", change_and_encode)
    with pytest.raises(DataError, match=said):
        prepare_here(tmp_path, source)


def test_a_cache_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file is in the way")
    with pytest.raises(DataError, match=r"data.cache_dir = .*File exists(.|\n)*fix:  make room, or set"):
        prepare_here(tmp_path, write_texts(tmp_path / "in", "x"))


@pytest.mark.parametrize(
    ("pattern", "cache", "is_taken"),
    [
        *((pattern, "in/sub/cache", False) for pattern in ("", "hf:")),  # its shards would be of the source next time
        *((pattern, "in_cache", True) for pattern in ("", "hf:")),
        ("/**", "in/cache", False),
        ("/*", "in/cache", False),
        ("/*.txt", "in/cache", True),
        *((pattern, "in/.cache/here", True) for pattern in ("", "/", "/*", "/**", "/**/*.txt")),  # which is not entered
        *((pattern, "in/.cache/here", False) for pattern in ("/.*", "/**/.cache/**")),
    ],
)
def test_a_cache_folder_that_is_part_of_a_source_is_refused(
    pattern: str, cache: str, is_taken: bool, tmp_path: Path
) -> None:
    write_texts(tmp_path / "in" / ".cache", "two")
    folder = write_texts(tmp_path / "in", "one")
    data = Data(f"hf:{folder}" if pattern == "hf:" else folder + pattern, cache_dir=str(tmp_path / cache))
    run = Config(data=data, validation=Validation(enable=False))
    if is_taken:
        check_inputs(run, 256)
        for _ in range(2):
            assert prepare(data.source, data, 256, progress=False).meta.documents == 1
        return
    for check in (lambda: prepare(data.source, data, 256, progress=False), lambda: check_inputs(run, 256)):
        with pytest.raises(DataError, match=r"data.cache_dir = .*\n.*outside of data.source = '.*', which shards"):
            check()


SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # which shells turn off in their background
from titanlite.config.schema import Data
from titanlite.data import cache as waits, encode as module
from titanlite.data.prepare import prepare
from titanlite.data.tokenizer import ByteTokenizer

encode, source, cache = ByteTokenizer.encode_batch, *sys.argv[1:]
def slowly(self, texts):
    print("encoding", flush=True)
    sys.stdin.readline()  # until it is told to go on
    return encode(self, texts)
class Clock:
    def sleep(seconds):
        print("waiting", flush=True)
        time.sleep(seconds)
ByteTokenizer.encode_batch, waits.time = slowly, Clock
module._BATCH_CHARACTERS = 1
shards = prepare(source, Data(cache_dir=cache), 256, progress=True)
print("tokens", shards.tokens, shards.fingerprint)
"""


def start_slow(source: str, cache: Path) -> "subprocess.Popen[str]":
    command, pipe = [sys.executable, "-c", SLOW, source, str(cache)], subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def go_on(process: "subprocess.Popen[str]") -> None:
    """Let it come to its end."""
    assert process.stdin is not None
    process.stdin.close()
    process.stdin = None


def does(process: "subprocess.Popen[str]") -> str:
    """The first word, or the next one, that it says of what it does."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_of_several_processes_one_prepares_and_another_when_it_is_killed(tmp_path: Path) -> None:
    source, cache = write_texts(tmp_path / "in", "a", "b", "c"), tmp_path / "cache"
    killed = start_slow(source, cache)
    assert does(killed) == "encoding"
    assert len(list(cache.glob("*.unfinished"))) == 1
    processes = [start_slow(source, cache) for _ in range(2)]
    assert [*map(does, processes)] == ["waiting", "waiting"]
    killed.kill()
    killed.communicate()
    for process in processes:
        go_on(process)
    out = [p.communicate(timeout=300) for p in processes]
    assert [p.returncode for p in processes] == [0, 0], out
    assert sorted(o.count("encoding") for o, _ in out) == [0, 3]
    assert not list(cache.glob("*.unfinished"))
    assert all(f"preparing {source}" in e for _, e in out)
    assert len({re.findall(r"tokens 6 \w+", o)[0] for o, _ in out}) == 1


def test_an_interrupted_preparation_says_where_the_next_start_goes_on(tmp_path: Path) -> None:
    source, cache = write_texts(tmp_path / "in", "a" * 2_000_000, "b"), tmp_path / "cache"
    interrupted = start_slow(source, cache)
    assert does(interrupted) == "encoding"
    assert interrupted.stdin is not None
    print(file=interrupted.stdin, flush=True)
    assert does(interrupted) == "encoding"
    interrupted.send_signal(signal.SIGINT)
    error = interrupted.communicate(timeout=300)[1]
    assert f"preparing {source}: interrupted after 2 MB; the next start goes on from the last document" in error


def test_a_failure_is_shared_with_those_who_waited(tmp_path: Path) -> None:
    source, cache = write_texts(tmp_path / "in", "with \0 NUL"), tmp_path / "cache"
    first = start_slow(source, cache)
    assert does(first) == "encoding"
    waiting = [start_slow(source, cache) for _ in range(2)]
    assert [does(process) for process in waiting] == ["waiting", "waiting"]
    for process in (first, *waiting):
        go_on(process)
    for process in (first, *waiting):
        out, error = process.communicate(timeout=300)
        assert process.returncode == 1
        assert "0.txt: holds NUL" in error
        assert "encoding" not in out
    (tmp_path / "in" / "0.txt").write_text("mended")
    assert prepare_here(tmp_path, source).tokens == 7


def test_a_run_that_allows_more_bad_records_does_not_fail_with_one_that_it_waited_for(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "in", "with \0 NUL", "good")
    first = start_slow(source, tmp_path / "cache")
    assert does(first) == "encoding"
    threading.Timer(0.3, go_on, [first]).start()
    assert prepare_here(tmp_path, source, max_bad_records=1).tokens == 5
    assert "data.max_bad_records = 0" in first.communicate(timeout=300)[1]


def test_a_failure_may_name_half_a_surrogate_pair(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(r'{"\ud83d": "x"}')
    with pytest.raises(DataError, match="no field 'text' among \ud83d"):
        prepare_here(tmp_path, str(tmp_path / "a.jsonl"))


def config(source: str, tokenizer: str = "bytes", held_out: str = "") -> Config:
    validation = Validation(enable=bool(held_out), source=held_out or "nope")
    return Config(data=Data(source=source, tokenizer=tokenizer), validation=validation)


def test_check_inputs_passes_what_can_be_prepared(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "in", "one")
    check_inputs(config("python_stdlib", held_out="python_stdlib_held_out"), 256)
    check_inputs(config(source, str(make_tokenizer(tmp_path / "tokenizer.json"))), 300)
    np.arange(10, dtype="<u2").tofile(tmp_path / "a.bin")
    check_inputs(config(f"{tmp_path}/a.bin", "no tokenizer is needed"), 10)
    for unchecked in (source, f"{tmp_path}/a.bin"):
        check_inputs(config(unchecked), None)


def test_check_inputs_reports_all_problems_at_once(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "in", "one")
    (tmp_path / "in" / "1.txt").write_bytes("café".encode("latin-1"))
    with pytest.raises(DataError) as e:
        check_inputs(config(source, held_out="nothing/*.txt"), 128)
    for part in ("1.txt:1: not UTF-8", "validation.source = 'nothing/*.txt'", "fix:  set model.vocab_size = 256"):
        assert part in str(e.value)
    for name, said in ((source, r"1\.txt:1: not UTF-8"), ("nothing", "nothing', which matches no file")):
        with pytest.raises(DataError, match=said) as e:
            check_inputs(config(name, "nope.json"), 128)
        assert "data.tokenizer = 'nope.json'" in str(e.value)
    (tmp_path / "in" / "0.txt").unlink()
    with pytest.raises(DataError, match=r"1\.txt:1: not UTF-8"):
        check_inputs(config(source), 256)


def test_check_inputs_holds_what_is_small_against_a_step(tmp_path: Path) -> None:
    source, held_out = write_texts(tmp_path / "in", "x" * 96), write_texts(tmp_path / "held_out", "x" * 16)
    run = replace(config(source, held_out=held_out), training=Training(seq_len=16))
    check_inputs(run, 256, sequences=6)
    said = r"data.source = .*, which has 97 tokens\n.*at least 113 tokens: 7 samples(.|\n)*training.global_batch_size"
    with pytest.raises(DataError, match=said):
        check_inputs(run, 256, sequences=7)
    cut = replace(run, data=replace(run.data, max_tokens=40))
    check_inputs(cut, 256, sequences=6)  # in one document, which ends first
    write_texts(tmp_path / "in", "x" * 47, "x" * 47)
    said = r"has 48 tokens, cut by data.max_tokens = 40\n.*at least 97 tokens(.|\n)*fix:  raise data.max_tokens, or"
    with pytest.raises(DataError, match=said):
        check_inputs(cut, 256, sequences=6)
    write_texts(tmp_path / "held_out", "x" * 15)
    with pytest.raises(DataError, match=r"has 16 tokens\n.*17 tokens: 1 sample (.|\n)*smaller training.seq_len\Z"):
        check_inputs(run, 256, sequences=6)
    write_texts(tmp_path / "held_out", "")
    with pytest.raises(DataError, match=r"validation.source = .*, which holds no text"):
        check_inputs(run, 256)


def test_check_inputs_holds_what_is_prepared_against_a_step(tmp_path: Path) -> None:
    source, held_out = (
        write_texts(tmp_path / "in", "x" * 1_100_000),
        write_texts(tmp_path / "held_out", "y" * 1_100_000),
    )
    run = config(source, held_out=held_out)
    run = replace(run, data=replace(run.data, cache_dir=str(tmp_path / "cache")), training=Training(seq_len=1000))
    found = check_inputs(run, 256, sequences=1101)
    assert (found.tokens, found.shards) == ({}, {})  # it is too large to be counted
    shards = prepare(source, run.data, 256, progress=False)
    found = check_inputs(run, 256, sequences=1100)
    assert found.tokens == {"data.source": 1_100_001}
    assert found.shards["data.source"].fingerprint == shards.fingerprint
    with pytest.raises(
        DataError, match=r"data.source = .*, which has 1,100,001 tokens\n.*want: at least 1,101,001 tok"
    ):
        check_inputs(run, 256, sequences=1101)
    check_inputs(replace(run, data=replace(run.data, text_key="another")), 256, sequences=1101)
    prepare(held_out, run.data, 256, progress=False)
    with pytest.raises(
        DataError, match=r"validation.source = .*, which has 1,100,001 tokens\n.*: 1 sample of training"
    ):
        check_inputs(replace(run, training=Training(seq_len=1_100_001)), 256, sequences=1)
    with pytest.raises(DataError) as e:
        check_inputs(run, 100)
    assert str(e.value).count("model.vocab_size = 100") == 1  # and nothing of the ids of "x" and "y"
    (shards.folder / "shard-00000.bin").write_bytes(b"cut")
    with pytest.raises(DataError, match=r"shard-00000\.bin has 3 bytes"):
        check_inputs(run, 256)


def test_check_inputs_counts_prepared_token_files_and_checks_their_ids(tmp_path: Path) -> None:
    np.full(1_000_000, 300, "<u2").tofile(tmp_path / "large.bin")
    run = config(f"{tmp_path}/large.bin")
    run = replace(run, data=replace(run.data, cache_dir=str(tmp_path / "cache")))
    prepare(run.data.source, run.data, 512, progress=False)
    assert check_inputs(run, 512).tokens == {"data.source": 1_000_000}
    with pytest.raises(DataError, match=r"id 300 at token 0 of .*large\.bin"):
        check_inputs(run, 256)
    np.arange(300, dtype="<u2").tofile(tmp_path / "a.bin")  # which is small
    with pytest.raises(DataError, match=r"id 299 at token 299 of .*a\.bin"):
        check_inputs(config(f"{tmp_path}/a.bin"), 256)


def test_a_cache_folder_that_cannot_be_written_is_found_before_it_is_needed(bound_by_permissions: None) -> None:
    with tempfile.TemporaryDirectory() as own:  # nobody's, and so is the way to it
        source, above = write_texts(Path(own) / "in", "one"), Path(own) / "above"
        above.mkdir()
        data = Data(source, cache_dir=str(above / "cache"))
        run = Config(data=data, validation=Validation(enable=False))
        for mode in (0o500, 0o000):
            above.chmod(mode)
            for data in (Data(source, cache_dir=str(above / "cache")), Data(source, cache_dir=str(above))):
                inputs = check_inputs(replace(run, data=data), 256)  # which also `plan` calls, on another host
                said = rf"data.cache_dir = '{data.cache_dir}': .*Permission denied(.|\n)*fix:  make it writable, or"
                with pytest.raises(DataError, match=said):
                    check_cache(inputs, data)
                with pytest.raises(DataError, match=said):
                    prepare(source, data, 256, progress=False)
        data = run.data
        above.chmod(0o700)
        prepare(source, data, 256, progress=False)
        (above / "cache").chmod(0o500)
        check_cache(check_inputs(run, 256), data)  # nothing is to be written
        held_out = Validation(enable=True, source=write_texts(Path(own) / "held_out", "two"))
        with pytest.raises(DataError, match="Permission denied"):
            check_cache(check_inputs(replace(run, validation=held_out), 256), data)
        (above / "cache").chmod(0o700)


def test_shards_that_may_not_be_read_are_not_to_be_deleted(bound_by_permissions: None) -> None:
    with tempfile.TemporaryDirectory() as own:  # nobody's, and so is the way to it
        folder = prepare_here(Path(own), write_texts(Path(own) / "in", "one")).folder
        for closed in (folder / "meta.json", folder):
            closed.chmod(0)
            with pytest.raises(
                DataError, match=r"meta\.json = Permission denied\n(.|\n)*fix:  make it readable, or set"
            ):
                Corpus(folder)
            closed.chmod(0o700)
        shards = Corpus(folder)
        (folder / "shard-00000.bin").chmod(0)
        with pytest.raises(DataError, match=r"shard-00000\.bin = Permission denied"):
            shards.read(0, 1)


def test_check_inputs_leaves_for_later_what_takes_long(tmp_path: Path) -> None:
    (tmp_path / "large.txt").write_bytes(b"\xff" * 2_000_000)
    np.full(1_000_000, 300, "<u2").tofile(tmp_path / "large.bin")
    for source in (f"{tmp_path}/large.txt", f"{tmp_path}/large.bin", f"hf:{tmp_path}"):
        check_inputs(config(source), 256)


def test_check_inputs_looks_for_the_field_at_the_beginning(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    line = json.dumps({"content": "x" * 1000, "url": "y"}) + "\n"
    lines.write_bytes(b"\xef\xbb\xbf" + line.encode() * 3000)
    write_parquet(tmp_path / "b.parquet", content=["x" * 1000], url=["y"])
    write_parquet(tmp_path / "c.parquet", other=["x"])  # it is read when it is its turn
    for source, file in ((lines, lines), (tmp_path, tmp_path / "b.parquet")):

        def check(text_key: str, max_bad_records: int = 0, source: Path = source) -> None:
            data = Data(str(source), text_key=text_key, max_bad_records=max_bad_records)
            check_inputs(Config(data=data), 256)

        check("content")
        said = rf"data.text_key = 'contnt'\n.*want: one of the fields of {file}: content, url\n.*text_key = \"content\""
        with pytest.raises(DataError, match=said):
            check("contnt")
        with pytest.raises(DataError, match="fix:  name the one that holds the text"):
            check("body")
        with pytest.raises(DataError, match=r"data.text_key = 'contnt'"):
            check("contnt", 900)
    for good in (line.replace("content", "contnt"), '{"contnt": "it is there now and then"}\n'):
        lines.write_text('no JSON\n[]\n"contnt"\n' + line + good + line * 3000)
        check_inputs(Config(data=Data(str(lines), text_key="contnt")), 256)  # bad records are for who reads them
    lines.write_text(line * 2000)
    check_inputs(Config(data=Data(str(lines), text_key="contnt", max_bad_records=1100)), 256)
    lines.write_text('{"x": "' + "x" * 2_000_000 + '"}')  # its end is not seen
    check_inputs(Config(data=Data(str(lines), text_key="contnt")), 256)


def test_check_inputs_needs_neither_torch_nor_time(tmp_path: Path) -> None:
    script = (
        "import sys, time; from titanlite.config.schema import Config\n"
        "from titanlite.data.inputs import check_inputs\n"
        "start = time.process_time(); check_inputs(Config(), 256)\n"
        "heavy = {'torch', 'datasets', 'pyarrow', 'rich', 'tokenizers'} & set(sys.modules)\n"
        "print(time.process_time() - start, heavy)"
    )
    out = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    seconds, _, heavy = out.strip().partition(" ")
    assert heavy == "set()"
    assert float(seconds) < 0.3


def test_links_in_a_cache_that_others_share_are_not_followed(tmp_path: Path) -> None:
    source, other = write_texts(tmp_path / "in", "one"), tmp_path / "of somebody"
    folder = prepare_here(tmp_path, source).folder
    lock = folder.with_name(f"{folder.name}.lock")
    shutil.rmtree(folder)
    other.mkdir()
    (other / "file").write_text("something else")
    folder.with_name(f"{folder.name}.unfinished").symlink_to(other)
    lock.unlink()
    lock.symlink_to(other / "file")
    with pytest.raises(DataError, match=rf"a link in place of a file: '{lock}'"):
        prepare_here(tmp_path, source)
    assert (other / "file").read_text() == "something else"
    lock.unlink()
    prepare_here(tmp_path, source)
    assert (other / "file").read_text() == "something else"
    assert sorted(lock.parent.iterdir()) == [folder, lock]
