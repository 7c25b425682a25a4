"""Sources: what a string resolves to, which documents are in it, and what is said about bad ones."""

import errno
import gzip
import json
import os
import re
import sysconfig
import textwrap
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from titanlite.config.schema import Data
from titanlite.data.documents import check_text_key, documents
from titanlite.data.sources import resolve
from titanlite.data.tally import Tally
from titanlite.errors import DataError


def read(source: str, limit: int = 0, text_key: str = "text") -> tuple[list[str], Tally]:
    if source.startswith("hf:"):
        pytest.importorskip("datasets")
    tally = Tally(source, "data.source", limit)
    texts = ["".join(d.blocks) for d in documents(resolve(source), text_key, tally)]
    tally.check()
    return texts, tally


def test_the_standard_library_is_split_without_overlap() -> None:
    kept, held_out = resolve("python_stdlib").files, resolve("python_stdlib_held_out").files
    assert not set(kept) & set(held_out)
    assert 0.02 < len(held_out) / (len(kept) + len(held_out)) < 0.08
    for files in (kept, held_out):
        assert all(f.suffix == ".py" and "site-packages" not in f.parts for f in files)
    assert Path(os.__file__) in kept + held_out


def test_which_files_are_held_out_never_changes() -> None:
    """A run that goes on would else validate on what it was trained on."""
    root = Path(sysconfig.get_path("stdlib"))
    kept, held_out = (
        {f.relative_to(root).as_posix() for f in resolve(f"python_stdlib{s}").files} for s in ("", "_held_out")
    )
    assert {"decimal.py", "doctest.py", "inspect.py", "ipaddress.py", "runpy.py", "symtable.py"} <= held_out
    assert {"ast.py", "bisect.py", "heapq.py", "os.py", "random.py", "shutil.py"} <= kept


def test_files_of_the_standard_library_that_are_not_utf8_are_skipped_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    for name in ("c/d.py", "a.py", "b/latin.py", "b.py", "site-packages/x.py", "dist-packages/x.py", "note.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"# caf\xe9" if "latin" in name else name.encode())
    texts, tally = read("python_stdlib")
    assert texts == ["a.py", "b.py", "c/d.py"]
    assert tally.n_bad == 0
    assert tally.skipped == [f"{tmp_path}/b/latin.py: not UTF-8"]
    assert tally.n_bytes == resolve("python_stdlib").n_bytes() == 4 + 4 + 6 + 6


def test_paths_folders_and_globs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.txt", "note.md", "odd[1].txt"):
        (tmp_path / name).write_text(name)
    assert read(f"{tmp_path}/a.txt")[0] == ["a.txt"]
    assert read(f"{tmp_path}/odd[1].txt")[0] == ["odd[1].txt"]
    assert read(f"{tmp_path}/*.txt")[0] == ["a.txt", "b.txt", "odd[1].txt"]
    assert read(f"{tmp_path}/**/*.txt")[0] == ["a.txt", "b.txt", "odd[1].txt", "sub/c.txt"]
    assert read(str(tmp_path))[0] == ["a.txt", "b.txt", "odd[1].txt", "sub/c.txt"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read("~/sub/*.txt")[0] == ["sub/c.txt"]
    monkeypatch.chdir(tmp_path)
    assert read("sub")[0] == ["sub/c.txt"]


def test_a_link_is_what_its_own_name_says(tmp_path: Path) -> None:
    for folder in ("blobs", "snapshot"):
        (tmp_path / folder).mkdir()
    (tmp_path / "blobs" / "0a1b").write_text('{"text": "of a hub"}')
    (tmp_path / "snapshot" / "train.jsonl").symlink_to("../blobs/0a1b")
    for source in ("snapshot", "snapshot/*.jsonl", "snapshot/train.jsonl"):
        assert read(str(tmp_path / source))[0] == ["of a hub"]
    (tmp_path / "snapshot" / "more.jsonl").symlink_to("../blobs/never_fetched")
    for source in ("snapshot", "snapshot/*.jsonl", "snapshot/more.jsonl"):
        with pytest.raises(DataError, match=r"snapshot/more\.jsonl: No such file or directory\n.*want: files"):
            resolve(str(tmp_path / source)).stamps()
    with pytest.raises(DataError, match=r"never_fetched: No such file or directory"):  # what `datasets` would read
        resolve(f"hf:{tmp_path / 'snapshot'}").stamps()


def lines(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"text": text or path.name}) + "\n")
    return path


def test_each_file_of_a_folder_is_taken_once_whatever_links_lead_to_it(tmp_path: Path) -> None:
    """A link upwards, two folders that are linked to each other, a link to a folder, to a file, and a hard link."""
    root = tmp_path / "in"
    for name in ("a.jsonl", "sub/b.jsonl", "one/c.jsonl", "two/d.jsonl"):
        lines(root / name)
    for link, target in {
        "self": ".",
        "sub/up": "..",
        "one/other": "../two",
        "two/other": "../one",
        "a_link": "sub",
        "0.jsonl": "a.jsonl",
    }.items():
        (root / link).symlink_to(target)
    (root / "sub" / "hard.jsonl").hardlink_to(root / "sub" / "b.jsonl")
    for source in (root, root / "**", root / "**" / "*.jsonl", f"{root}/**/**/*.jsonl", f"{root}/*/../**/*.jsonl"):
        found = resolve(str(source))
        names = ["a.jsonl", "one/c.jsonl", "sub/b.jsonl", "two/d.jsonl"]
        assert sorted(f.relative_to(root).as_posix() for f in found.files) == names
    told = "4 files taken; met twice and taken once: 7, as "
    assert resolve(str(root)).count == f"{told}{root}/0.jsonl"
    assert sorted(read(str(root))[0]) == ["a.jsonl", "b.jsonl", "c.jsonl", "d.jsonl"]
    assert read(f"{root}/0.jsonl")[0] == ["a.jsonl"]  # if it is asked for


@pytest.mark.parametrize("pattern", ["star/**/en/**/*.jsonl", "**/**/*.jsonl", "star/**", "**/en/*/../*/*.jsonl"])
def test_a_pattern_with_several_ways_to_a_file_takes_it_once(pattern: str, tmp_path: Path) -> None:
    files = [lines(tmp_path / "star" / "en" / name) for name in ("en/a.jsonl", "x/b.jsonl")]
    found = resolve(str(tmp_path / pattern))
    assert list(found.files) == files
    assert found.count == "2 files taken"


def test_a_folder_that_a_pattern_matches_is_read(tmp_path: Path) -> None:
    """As Spark and Dask write them: a folder of parts that is named like a file."""
    spark = tmp_path / "spark"
    (spark / "b.parquet").mkdir(parents=True)
    write_parquet(spark / "a.parquet", text=["one"])
    write_parquet(spark / "b.parquet" / "part-0.snappy.parquet", text=["two"])
    for name in ("_SUCCESS", ".part-0.snappy.parquet.crc"):
        (spark / "b.parquet" / name).touch()
    for pattern in ("*.parquet", "*", "**/*.parquet", ""):
        assert read(str(spark / pattern))[0] == ["one", "two"]
        assert resolve(str(spark / pattern)).count == "2 files taken; passed over: 1 _SUCCESS"
    lines(spark / "deep" / "er" / "c.jsonl", "three")
    assert read(f"{spark}/*")[0] == ["one", "two", "three"]
    assert read(f"{spark}/*/")[0] == ["two", "three"]


def test_what_is_passed_over_is_counted_by_its_ending(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl")
    for name in ("b.md", "sub/c.md", "Makefile", "a.jsonl~", ".hidden.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "endless").symlink_to("endless")
    passed = "2 .md, 1 Makefile, 1 .jsonl~, 1 endless"
    said = resolve(str(tmp_path)).count
    assert said.startswith("1 file taken; passed over: 2 .md, ")
    assert sorted(said.partition("over: ")[2].split(", ")) == sorted(passed.split(", "))


def test_two_snapshots_of_one_blob_are_one_file(tmp_path: Path) -> None:
    blob = lines(tmp_path / "blobs" / "0a1b", "of a hub")
    for name in ("snapshots/1/train.jsonl", "snapshots/2/train.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).symlink_to(blob)
    assert read(str(tmp_path))[0] == ["of a hub"]
    said = resolve(str(tmp_path)).count
    assert (
        said == f"1 file taken; passed over: 1 0a1b; met twice and taken once: 1, as {tmp_path}/snapshots/2/train.jsonl"
    )


def test_endings_are_known_in_any_case(tmp_path: Path) -> None:
    texts = ["one", "two", "three"]
    lines(tmp_path / "A.JSONL", texts[0])
    (tmp_path / "B.Jsonl.GZ").write_bytes(gzip.compress(b'{"text": "two"}\n'))
    write_parquet(tmp_path / "C.PARQUET", text=texts[2:])
    (tmp_path / "D.TXT").write_text("four")
    assert read(str(tmp_path))[0] == [*texts, "four"]
    with pytest.raises(DataError, match=r"data\.text_key = 'body'"):
        check_text_key(resolve(str(tmp_path)), Data(text_key="body"))
    (tmp_path / "E.BIN").touch()
    assert resolve(f"{tmp_path}/E.BIN").kind == "tokens"


@pytest.mark.parametrize("source", ["disk", "disk/**/*.jsonl", "hf:./disk"])
def test_what_a_file_system_keeps_for_itself_is_no_part_of_a_source(source: str, bound_by_permissions: None) -> None:
    Path("disk/lost+found").mkdir(parents=True)
    Path("disk/a.jsonl").write_text('{"text": "a"}')
    Path("disk/lost+found").chmod(0o000)
    assert [f.name for f in resolve(source).files] == ["a.jsonl"]


CLOSED = ["data", "data/**/*.txt", "data/*/*.txt", "data/*/sub/*.txt", "hf:./data", "data/closed", "data/closed/*.txt"]


@pytest.mark.parametrize("mode", [0o000, 0o300, 0o600], ids=oct)
@pytest.mark.parametrize("source", CLOSED)
def test_a_folder_that_cannot_be_searched_is_named(source: str, mode: int, bound_by_permissions: None) -> None:
    for name in ("data/closed/a.txt", "data/closed/sub/b.txt", "data/open/sub/c.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name)
    before = resolve(source).files
    Path("data/closed").chmod(mode)
    if mode == 0o300 and source == "data/*/sub/*.txt":  # it is only passed through
        assert resolve(source).files == before
        return
    said = rf"data/closed/?: {os.strerror(errno.EACCES)}\n.*want: files and folders that can be read"
    with pytest.raises(DataError, match=said):
        resolve(source)


NO_FILE = r"', which matches no file \(working directory: .*want: python_stdlib.*fix:  correct the path; .* any folders"
A_DATASET = r"want: hf:<dataset>\[:<config>\[:<split>\]\]"
A_COPY = "as if one were made from the other\n.*want: the records of each file once"
REFUSED = [  # files that there are, the source, what is said
    ("", "nope/*.txt", rf"data\.source = 'nope/\*\.txt{NO_FILE}"),
    *(("there/", source, rf"{NO_FILE}\Z") for source in ("there/c4", "allenai/c4.txt", "./c4")),
    *(("", name, rf"{NO_FILE}; .*that name is hf:{name}\Z") for name in ("c4", "allenai/c4")),
    ("", "python_stdlb", r"fix:  did you mean python_stdlib\?\Z"),
    ("", "hf://datasets/allenai/c4/en/a.json.gz", "hf:allenai/c4, and the config or split behind it"),
    *(("", source, A_DATASET) for source in ("hf:", "hf:a:b:c:d", "hf:/no/such/folder")),
    *(
        (f"{d}/a.jsonl", f"hf:{d}:en", rf"want: one of them.*fix:  hf:\./{d}:en for the folder")
        for d in ("books", "a/c4")
    ),
    ("notes.md", ".", "a folder with no file of a known type in it or below"),
    ("a.txt b.bin", ".", "want: token files or text, not both"),
    *(("a.jsonl |b.jsonl", source, r"matches .*b\.jsonl, a pipe or a device") for source in (".", "b.jsonl")),
    *(
        (f"a.jsonl b.jsonl.gz {copy}", source, rf"(?=.*{copy})(?=.*a\.jsonl).*{A_COPY}")
        for copy in ("a.jsonl.gz", "a.jsonl.zst", "a.json.gz", "a.JSONL")
        for source in (".", "*")
    ),
    *(
        (f"a.jsonl {name} notes.md", source, rf"1 of another kind, first .*/?{name}\n.*fix:  {fix}")
        for fix, names in {
            "end the download, or": [
                f"b.{end}" for end in ("txt.part", "bin.incomplete", "parquet.tmp", "txt.aria2", "parquet.crdownload")
            ],
            "decompress them, or narrow": ["b.jsonl.xz", "b.json.bz2", "b.txt.gz", "b.txt.zst"],
        }.items()
        for name in names
        for source in (".", "[ab]*", name)
    ),
    *(("a.jsonl b.csv", source, r"first .*b\.csv\n.*fix:  narrow the pattern, as in") for source in ("*", "b.csv")),
]


@pytest.mark.parametrize(("files", "source", "said"), REFUSED, ids=lambda given: given[:30])
def test_what_is_no_source_is_refused_before_it_is_read(
    files: str, source: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in map(Path, files.split()):
        (file if "." not in file.name else file.parent).mkdir(parents=True, exist_ok=True)
        if file.name.startswith("|"):
            os.mkfifo(file.with_name(file.name[1:]))
        elif "." in file.name:
            file.touch()
    with pytest.raises(DataError, match=f"(?s){said}"):
        resolve(source)


def compress(content: bytes, suffix: str) -> bytes:
    """In two pieces, as tools that work in parallel leave them."""
    if suffix == ".gz":
        return gzip.compress(content[:1000]) + gzip.compress(content[1000:])
    codec = pyarrow.Codec("zstd")
    return b"".join(codec.compress(piece, asbytes=True) for piece in (content[:1000], content[1000:]))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.jsonl.zst", "a.json.zst"])
def test_compressed_records(tmp_path: Path, name: str) -> None:
    texts = [f"text {i}, caf\u00e9" for i in range(300)]
    lines = "\ufeff" + "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts)
    whole = compress(lines.encode(), Path(name).suffix)
    (tmp_path / name).write_bytes(whole)
    (tmp_path / "b.jsonl").write_text('{"text": "plain"}\n')
    found, tally = read(str(tmp_path))
    assert found == [*texts, "plain"]
    assert tally.n_bytes == len(whole) + 18  # as they are on the disk, which is what progress is of
    with pytest.raises(DataError, match=r"data\.text_key = 'body'"):
        check_text_key(resolve(f"{tmp_path}/{name}"), Data(text_key="body"))
    for damaged in (whole[:-20], b"no such format"):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(DataError, match=rf"{name}: .*(Truncated|failed).*\n.*a whole file of the kind"):
            read(f"{tmp_path}/{name}")


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (gzip.compress(b"text"), "gzip"),
        (pyarrow.Codec("zstd").compress(b"text", asbytes=True), "zstd"),
        (b"PAR1\xff\xff", "Parquet"),
        ("text".encode("utf-16"), "UTF-16"),
        (b"<!DOCTYPE html>\xff", "a page of HTML"),
        (b"version https://git-lfs.github.com/spec/v1\xff", "a pointer of Git LFS"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_what_is_another_kind_than_its_name_says_is_named(name: str, content: bytes, kind: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name}:1: not .*; it begins as {kind}"):
        read(f"{tmp_path}/{name}")


def test_text_that_is_not_utf8_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("first\nsecond\ncaf\xe9".encode("latin-1"))
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfwith a mark")
    (tmp_path / "c.txt").write_bytes(b"")
    with pytest.raises(DataError, match=r"a\.txt:3: not UTF-8: byte 0xe9 at byte 16"):
        read(str(tmp_path))
    texts, tally = read(str(tmp_path), limit=1)
    assert texts == ["with a mark"]
    assert tally.n_bad == 1


BAD_LINES = {
    b'{"text": "half': "not JSON",
    b'["text"]': "a list, not an object",
    b'{"body": "x"}': "no field 'text' among body",
    b'{"text": 5}': "field 'text' is of type int, not a string",
    b'{"text": null}': "field 'text' is null, not a string",
    b'{"text": "\xff"}': "not UTF-8",
    b'{"text": "\\ud800"}': "field 'text' holds half a surrogate pair",
}


def test_every_kind_of_bad_record_is_named_with_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(
        b'\xef\xbb\xbf{"text": "good"}\n\n' + b"\n".join(BAD_LINES) + b'\n{"text": ""}\n{"text": "last \\u00e9"}'
    )
    with pytest.raises(DataError, match=f"{len(BAD_LINES)} bad records so far") as e:
        read(str(file), limit=len(BAD_LINES) - 1)
    for number, reason in enumerate(BAD_LINES.values(), 3):
        assert f"{file}:{number}: {reason}" in str(e.value)
    assert f"want: at most data.max_bad_records = {len(BAD_LINES) - 1}" in str(e.value)
    texts, tally = read(str(file), limit=len(BAD_LINES))
    assert texts == ["good", "last é"]
    assert tally.n_bytes == file.stat().st_size


def test_a_file_of_nothing_but_bad_records_is_not_read_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"oops\n" * 5000)
    tally = Tally("a", "data.source", 10)
    with pytest.raises(DataError, match=r"1011 bad records so far(.|\n)*and 1001 more"):
        list(documents(resolve(str(tmp_path)), "text", tally))


def write_parquet(path: Path, **columns: object) -> None:
    parquet.write_table(pyarrow.table(columns), path)


def test_parquet(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    write_parquet(file, text=[f"row {i}" for i in range(600)] + [None, ""], other=list(range(602)))
    with pytest.raises(DataError, match=r"a\.parquet:601: field 'text' is null, not a string"):
        read(str(file))
    texts, tally = read(str(file), limit=1)
    assert texts == [f"row {i}" for i in range(600)]
    assert tally.n_bytes == file.stat().st_size
    with pytest.raises(DataError, match=r"data.text_key = 'body'\n.*want: one of the fields of .*: text, other"):
        read(str(file), text_key="body")
    file.write_text("no parquet")
    with pytest.raises(DataError, match="want: a Parquet file"):
        read(str(file))


def test_columns_of_strings(tmp_path: Path) -> None:
    texts, file = ["a", "bc"], tmp_path / "a.parquet"
    plain = pyarrow.array(texts)
    kinds = pyarrow.large_string(), pyarrow.string_view()
    for column in (plain, *map(plain.cast, kinds), plain.dictionary_encode()):
        write_parquet(file, text=column)
        assert read(str(file))[0] == texts
    write_parquet(file, text=pyarrow.nulls(2))
    assert read(str(file), limit=2)[1].bad == [f"{file}:{row}: field 'text' is null, not a string" for row in (1, 2)]
    others = {"int64": [1, 2], "binary": [b"a", b"bc"], "list<": [["a"], ["bc"]], "struct<text": [{"text": "a"}]}
    for kind, values in others.items():
        write_parquet(file, text=values)
        said = rf"data.text_key = 'text'\n.*want: a column of strings; in {file} it is one of {kind}"
        with pytest.raises(DataError, match=said):  # however many records may be bad
            read(str(file), limit=2)


def test_damage_inside_a_parquet_file_names_it(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["a", "b", "c"] * 100}), file, compression="none")
    whole = file.read_bytes()
    numbers = b"\x24\x49\x92"  # of texts, two bits each: 0, 1, 2 and again
    n_rows = b"text\x15\x00\x16\xd8\x04"  # of the column, 300 as a signed varint: with others the library reads none
    damaged = whole.replace(numbers, b"\x24\xff\x92", 1), whole.replace(b"text", b"te\xfft")
    damaged = *damaged, whole.replace(n_rows, n_rows[:-2] + b"\xff\x04")
    for content in damaged:
        assert content != whole
        file.write_bytes(content)
        with pytest.raises(DataError, match=r"a\.parquet: (.|\n)*want: a Parquet file"):
            read(str(file))


def test_dataset_of_a_local_folder(tmp_path: Path) -> None:
    folder = tmp_path / "books"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (folder / "test.jsonl").write_text('{"text": "three"}\n')
    texts, tally = read(f"hf:{folder}")
    assert texts == ["one", "two"]
    assert tally.n_bytes == (folder / "train.jsonl").stat().st_size
    assert read(f"hf:{folder}::test")[0] == ["three"]
    (folder / "body.jsonl").write_text('{"text": "no", "body": "yes"}')
    assert read(f"{folder}/body.jsonl", text_key="body")[0] == ["yes"]
    (folder / "body.jsonl").unlink()
    with pytest.raises(DataError, match=r"2 bad records(.|\n)*:1: no field 'body' among text"):
        read(f"hf:{folder}", text_key="body")
    for split in ("nope", "test+nope"):
        with pytest.raises(DataError, match=rf"Bad split: {re.escape(split)}(.|\n)*; or name the files without hf:"):
            read(f"hf:{folder}::{split}")
    before = resolve(f"hf:{folder}").stamps()
    (folder / "train.jsonl").write_text('{"text": "one"}\n')
    assert resolve(f"hf:{folder}").stamps() != before


LINES = "one\n\ntwo, a longer line\r\nthree"


@pytest.mark.parametrize("prefix", ["", "hf:"])
def test_text_is_the_same_document_with_and_without_hf(prefix: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name, mark in (("a.txt", b""), ("b.txt", b"\xef\xbb\xbf")):
        (tmp_path / "in" / name).write_bytes(mark + LINES.encode())
    texts, tally = read(f"{prefix}{tmp_path}/in")
    assert texts == [LINES, LINES]
    assert tally.n_bytes == 2 * len(LINES) + 3
    (tmp_path / "in" / "c.txt").write_bytes(b"caf\xe9")
    assert read(f"{prefix}{tmp_path}/in", limit=1)[1].bad == [f"{tmp_path}/in/c.txt:1: not UTF-8: byte 0xe9 at byte 3"]


RECORDS = {  # of which `datasets` may make dates, JSON, rows without text, or traces of agents
    "dates": [{"text": "2024-01-01"}, {"text": "2024-02-01 10:00:00"}],
    "mixed": [{"text": "hello"}, {"text": "x", "n": 1}, {"text": "y", "n": "1"}],
    "late": [{"id": 1, "text": "a"}, {"text": "b", "other": {"deep": [1]}}],
    "traces": [{"type": "user", "text": "a", "message": {"role": "user", "content": "b"}}],
    "ends": [{"text": " a\r\nb\u2028c\n"}, {"text": "NA"}, {"text": "\u0000null"}],
}


@pytest.mark.parametrize("kind", RECORDS)
@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "parquet"])
def test_records_are_the_same_documents_with_and_without_hf(kind: str, form: str, tmp_path: Path) -> None:
    file, records = tmp_path / "in" / f"a.{form}", RECORDS[kind]
    file.parent.mkdir()
    if form == "parquet":
        write_parquet(file, text=[record["text"] for record in records])
    else:
        content = "".join(json.dumps(record) + "\n" for record in records).encode()
        file.write_bytes(gzip.compress(content) if form.endswith(".gz") else content)
    texts = [record["text"] for record in records]
    assert read(str(file.parent))[0] == texts
    assert read(f"hf:{file.parent}")[0] == texts


README = '---\nconfigs:\n- config_name: default\n  data_files: "*.txt"\n'
READ: dict[str, tuple[dict[str, str], str, str, list[str]]] = {  # files, before and behind their folder's name, texts
    "a mark of the byte order alone": ({"a.jsonl": "\ufeff", "b.jsonl": '\ufeff\r\n{"text": "x"}'}, "", "", ["x"]),
    "text that looks like nothing": (
        {"a.csv": '\ufefftext,n\n"NA",1\nnull,2\n"two\nlines",3\n"",4\n'},
        "hf:",
        "",
        ["NA", "null", "two\nlines"],
    ),
    "what a README names": ({"a.txt": "one\ntwo", "README.md": README + "---\n"}, "hf:", "", ["one\ntwo"]),
    "what a README asks for": (
        {"a.txt": "one\n\ntwo", "README.md": README + "  sample_by: paragraph\n---\n"},
        "hf:",
        "",
        ["one", "two"],
    ),
    "splits in the order that names them": ({"train.txt": "a", "test.txt": "b"}, "hf:", "::test+train", ["b", "a"]),
    "all splits": ({"train.txt": "a", "test.txt": "b"}, "hf:", "::all", ["a", "b"]),
}


@pytest.mark.parametrize("case", READ)
def test_what_is_read(case: str, tmp_path: Path) -> None:
    files, before, behind, texts = READ[case]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content.encode())
    found = read(f"{before}{tmp_path}{behind}")[0]
    assert (sorted(found) if case == "all splits" else found) == texts


def test_a_folder_of_a_dataset_is_gone_through_once(tmp_path: Path) -> None:
    lines(tmp_path / "in" / "a.jsonl", "one")
    for name in ("self", "again"):
        (tmp_path / "in" / name).symlink_to(".")
    assert read(f"hf:{tmp_path}/in")[0] == ["one"]


def test_what_the_library_has_kept_does_not_stand_for_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network it would be taken, of whatever time it is, and as its defaults have cut it."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    kept = tmp_path / "some___books" / "default" / "0.0.0" / "0a1b"
    datasets.Dataset.from_dict({"text": ["old"]}).save_to_disk(str(tmp_path / "made"))
    kept.mkdir(parents=True)
    (tmp_path / "made" / "data-00000-of-00001.arrow").rename(kept / "books-train.arrow")
    info = datasets.DatasetInfo(features=datasets.Features({"text": datasets.Value("string")}), splits=None)
    info.splits = datasets.SplitDict({"train": datasets.SplitInfo("train", num_examples=1)})
    info.config_name, info.dataset_name, info.version = "default", "books", "0.0.0"
    info.write_to_directory(str(kept))
    with pytest.raises(
        DataError, match=r"the hub does not give; `datasets` has kept(.|\n)*hf download (.|\n)*some/books"
    ):
        read("hf:some/books")


def test_rows_that_are_missing_are_told(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\none\ntwo\n")
    stated = "  features:\n  - name: text\n    dtype: string\n  splits:\n  - name: train\n    num_examples: 5\n"
    (tmp_path / "README.md").write_text(f"---\ndataset_info:\n{stated}---\n")
    texts, tally = read(f"hf:{tmp_path}")
    assert texts == ["one", "two"]
    assert tally.skipped == ["3 of the 5 rows that the dataset is said to have"]


def write_records(folder: Path, *names: str) -> str:
    """Files of a dataset, by their suffixes; a folder's name, as a source has it."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            write_parquet(path, text=["one"])
        elif path.suffix.lower() == ".jsonl":
            path.write_text('{"text": "one"}\n')
        else:
            path.write_text("{}" if path.suffix == ".json" else "text\none\n")
    return f"hf:{folder}"


@pytest.mark.parametrize(
    ("names", "n_read", "left_out"),
    [
        ("data/train-0.parquet LICENSE.txt README.md", 1, "1 .txt file in no split of the folder, as {}/LICENSE.txt"),
        ("train.parquet stats.json croissant.json", 1, "2 .json files in no split of the folder, as {}/croissant.json"),
        ("train.jsonl notes.txt", 1, "1 .txt file in no split of the folder, as {}/notes.txt"),
        ("train.txt LICENSE.txt", 1, "1 .txt file in no split of the folder, as {}/LICENSE.txt"),
        ("a.jsonl more/b.jsonl more/pipeline.py", 2, "1 .py file in no split of the folder, as {}/more/pipeline.py"),
        ("a.csv b.tsv __x/x.json .hidden.jsonl .cache/c.jsonl README.md", 2, ""),
        ("a.csv README.md", 1, ""),
    ],
)
def test_what_a_dataset_leaves_out_beside_its_records_is_told(
    names: str, n_read: int, left_out: str, tmp_path: Path
) -> None:
    texts, tally = read(write_records(tmp_path / "in", *names.split()))
    assert len(texts) == n_read
    assert tally.skipped == ([left_out.format(tmp_path / "in")] if left_out else [])


@pytest.mark.parametrize(
    ("names", "left_out"),
    [
        ("train-0.jsonl books.jsonl more/poems.jsonl", "2 .jsonl files, as {}/books.jsonl"),
        ("train.txt books.txt LICENSE.txt", "1 .txt file, as {}/books.txt"),
        ("a.JSONL b.parquet", "1 .JSONL file, as {}/a.JSONL"),
        ("a.jsonl b.parquet c.parquet d.csv stats.json", "1 .jsonl file, 1 .csv file, as {}/a.jsonl"),
        ("train/a.parquet raw/a.jsonl.bz2", "1 .jsonl.bz2 file, as {}/raw/a.jsonl.bz2"),
    ],
)
def test_a_dataset_that_leaves_records_out_is_refused(names: str, left_out: str, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    source = write_records(folder, *names.split())
    resolve(source)  # by names alone it is all right
    (folder / "README.md").write_text("---\nlicense: mit\n---\nconfigs:\n- of a machine\n")
    with pytest.raises(DataError, match=r"`datasets` leaves out") as e:
        read(source)
    said = f"data.source = '{source}', a folder of which `datasets` leaves out {left_out.format(folder)}\n"
    assert said in str(e.value)
    assert (f"or write, without hf: and splits, '{folder}/**/*.jsonl' for" in str(e.value)) == ("train-0" in names)
    readme = re.search(r"or begin .*/in/README\.md with the pattern of what is to be read:\n([\S\s]*)", str(e.value))
    assert readme is not None
    chosen = next(name for name in ("train-0.jsonl", "train.txt", "train/a.parquet", "b.parquet") if name in names)
    (folder / "README.md").write_text(textwrap.dedent(readme[1]).replace("PATTERN", chosen))
    texts, tally = read(source)
    assert len(texts) == 1
    assert tally.skipped == []  # they were named


def test_parts_of_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(resolve(f"hf:./{lines(Path('books/a.jsonl')).parent}").files) == 1
    assert resolve("hf:allenai/c4:en").files == ()
    name, parts = "allenai/c4", ("", ":en", "::test", ":en:test")
    configs = [resolve(f"hf:{name}{part}").dataset for part in parts]
    assert configs == [(name, None, "train"), (name, "en", "train"), (name, None, "test"), (name, "en", "test")]
