"""Sources behind a URL: the documents are those of the files, a broken transfer goes on, what cannot work is said."""

import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.support.prepared import prepare_here
from tests.unit.data.test_sources import write_parquet
from titanlite import file_system
from titanlite.config.schema import Comm, Config, Data
from titanlite.data import remote
from titanlite.data.inputs import check_inputs
from titanlite.data.prepare import prepare
from titanlite.data.sources import resolve
from titanlite.errors import DataError

fsspec = pytest.importorskip("fsspec")
PAUSES_S = remote._PAUSES_S


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks, so that a file is many, and no pauses."""
    monkeypatch.setattr(remote, "_BLOCK_BYTES", 1000)
    monkeypatch.setattr(remote, "_PAUSES_S", (0.0,) * 5)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    fs = fsspec.filesystem("memory")
    yield fs
    fs.rm("/bucket", recursive=True)


def write_all(folder: Path) -> None:
    """Write text of each kind, of several blocks."""
    folder.mkdir()
    records = [json.dumps({"text": f"record {i} " * 30}) for i in range(40)]
    (folder / "a.jsonl").write_text("\n".join(records))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(records[::-1]).encode()))
    (folder / "c.txt").write_text("größer " * 1000)
    write_parquet(folder / "d.parquet", text=[f"row {i} " * 20 for i in range(100)], other=list(range(100)))


def upload(folder: Path, fs: Any) -> None:
    for file in folder.iterdir():
        fs.pipe(f"/bucket/data/{file.name}", file.read_bytes())


@pytest.mark.parametrize("name", ["", "/*", "/**/*.jsonl", "/c.txt", "/?.parquet", "/*.jsonl.gz"])
def test_the_documents_are_those_of_the_files(name: str, tmp_path: Path, bucket: Any) -> None:
    write_all(tmp_path / "data")
    upload(tmp_path / "data", bucket)
    bucket.pipe("/bucket/data/.hidden/x.txt", b"not this")
    one, other = (prepare_here(tmp_path, f"{place}/data{name}") for place in (tmp_path, "memory://bucket"))
    assert other.fingerprint == one.fingerprint
    assert other.meta.documents == one.meta.documents
    assert other.files == one.files


def test_places_have_the_url(tmp_path: Path, bucket: Any) -> None:
    bucket.pipe("/bucket/a.jsonl", b'{"text": "good"}\nno JSON\n')
    with pytest.raises(DataError, match=r"memory://bucket/a\.jsonl:2: not JSON"):
        prepare_here(tmp_path, "memory://bucket/a.jsonl")


def test_what_changes_behind_the_url_is_another_source(tmp_path: Path, bucket: Any) -> None:
    folders = set[Path]()
    for content in (b"one", b"two", b"two more"):
        bucket.pipe("/bucket/a.txt", content)
        for _ in range(2):
            folders.add(prepare_here(tmp_path, "memory://bucket/*.txt").folder)
    assert len(folders) == 3


def failing(fs: Any, monkeypatch: pytest.MonkeyPatch, every: int, error: Exception) -> list[int]:
    """Let every n-th read fail."""
    n, cat_file = [0], type(fs).cat_file

    def cat(self: Any, path: str, start: int, end: int) -> bytes:
        n[0] += 1
        if n[0] % every == 0:
            raise error
        return cat_file(self, path, start=start, end=end)

    monkeypatch.setattr(type(fs), "cat_file", cat)
    return n


@pytest.mark.parametrize("error", [ConnectionResetError("reset"), TimeoutError(), RuntimeError("of a back end")])
def test_a_transfer_that_breaks_goes_on(
    error: Exception, tmp_path: Path, bucket: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_all(tmp_path / "data")
    upload(tmp_path / "data", bucket)
    whole = prepare_here(tmp_path / "whole", "memory://bucket/data")
    n = failing(bucket, monkeypatch, 3, error)
    broken = prepare("memory://bucket/data", Data(cache_dir=str(tmp_path / "broken")), 256, progress=True)
    assert n[0] > 30
    assert broken.meta == whole.meta
    said = capfd.readouterr().err
    assert f"memory://bucket/data/a.jsonl, at byte 2,000: {type(error).__name__}: " in said
    assert "trying again in 0 s" in said


def test_a_network_that_stays_away_is_an_error_and_the_next_start_goes_on(
    tmp_path: Path, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titanlite.data.prepare.PUBLISH_SECONDS", -1.0)
    monkeypatch.setattr("titanlite.data.encode._BATCH_CHARACTERS", 1000)
    monkeypatch.setattr("os.fsync", lambda file: None)
    write_all(tmp_path / "data")
    upload(tmp_path / "data", bucket)
    whole = prepare_here(tmp_path / "whole", "memory://bucket/data")
    with monkeypatch.context() as patch:
        patch.setattr(remote.time, "sleep", lambda seconds: tried.append(seconds))
        tried, n = list[float](), 0

        def gone_after(self: Any, path: str, start: int, end: int) -> bytes:
            nonlocal n
            n += 1
            if n > 8:
                raise ConnectionError("away")
            return bucket.open(path).read()[start:end]

        patch.setattr(type(bucket), "cat_file", gone_after)
        with pytest.raises(DataError, match=r"ConnectionError: away\n.*\n.*see whether the network"):
            prepare_here(tmp_path, "memory://bucket/data")
        assert len(tried) == 5
    assert prepare_here(tmp_path, "memory://bucket/data").meta == whole.meta


REFUSALS = [
    PermissionError("Access Denied"),
    type("NoCredentialsError", (Exception,), {})("Unable to locate"),
    type("ClientResponseError", (Exception,), {"status": 403})("Forbidden"),
]


@pytest.mark.parametrize("error", REFUSALS)
def test_credentials_are_not_tried_again(
    error: Exception, tmp_path: Path, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.pipe("/bucket/a.txt", b"one")
    n = failing(bucket, monkeypatch, 1, error)
    with pytest.raises(DataError, match=rf"{type(error).__name__}: {error}\n.*want: files that may be read, with"):
        prepare_here(tmp_path, "memory://bucket/a.txt")
    assert n[0] == 1


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("memory://bucket/none.txt", r"'memory://bucket/none\.txt', which matches no file"),
        ("memory://bucket/*.jsonl", r"which matches no file"),
        ("memory://bucket/*", r"1 of another kind, first memory://bucket/a\.md"),
        ("memory://bucket/tokens/*.bin", r"want: text: token files are read at random places"),
        ("nonsense://bucket/a.txt", r"Protocol not known: nonsense(.|\n)*want: a protocol that fsspec knows"),
        ("https://user:secret@host:port/a.txt", r"https://\*\*\*@host"),
        ("https://***@host/a.txt", r"user and password out\n.*\n.*fix:  write them where \*\*\* stands"),
        *(
            (url, rf"{what}(.|\n)*to a disk or a bucket")
            for what, urls in {
                "several in one": (
                    "zip://*.txt::https://host/a.zip",
                    "filecache::s3://bucket/a.txt",
                    "zip://a.txt::/a.zip",
                ),
                "no part of the path": ("github://org:repo@main/a.txt", "ftp://host/a.txt"),
            }.items()
            for url in urls
        ),
    ],
)
def test_what_cannot_be_read_is_said_once(source: str, said: str, tmp_path: Path, bucket: Any) -> None:
    bucket.pipe("/bucket/a.md", b"one")
    bucket.pipe("/bucket/tokens/a.bin", b"\1\0")
    with pytest.raises(DataError, match=said) as caught:
        check_inputs(Config(data=Data(source, cache_dir=str(tmp_path))), 256)
    assert "secret" not in str(caught.value)


def test_a_file_without_a_stamp_is_refused() -> None:
    with pytest.raises(DataError, match="of which nothing but the size is known"):
        remote._remote_file(None, "https", "https://host/a.txt", {"size": 3}, "data.source")


def test_a_try_and_the_pause_before_it_are_shorter_than_the_watchdog_waits() -> None:
    assert max(PAUSES_S) + file_system._REQUEST_S < Comm.train_timeout_seconds - 30


def test_without_a_url_fsspec_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    script = f"""
import sys
from titanlite.data.prepare import prepare
from titanlite.config.schema import Data
prepare({str(tmp_path / "a.txt")!r}, Data(cache_dir={str(tmp_path / "cache")!r}), 256, progress=False)
print({{"fsspec", "aiohttp", "torch"}} & {{*sys.modules}})
"""
    root = Path(__file__).parents[3]
    out = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True).stdout
    assert out.strip() == "set()"


def test_a_folder_of_an_http_server_that_lists_is_one(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    write_all(tmp_path / "data")
    (tmp_path / "data" / "LICENSE").write_text("no")
    quiet = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *given: None})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(quiet, directory=str(tmp_path)))
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        for source in (f"{url}/data", f"{url}/data/", f"{url}/", f"{url}/data/*.*"):
            found = resolve(source)
            assert [file.name for file in found.files] == ["a.jsonl", "b.jsonl.gz", "c.txt", "d.parquet"]
        with pytest.raises(DataError, match=r"all of its 0 MB in place of a part\n.*range|sends parts"):
            prepare_here(tmp_path, f"{url}/data/c.txt")
    finally:
        server.shutdown()
        server.server_close()


def test_a_retry_in_a_thread_of_the_reader_is_told(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is a sign of life, too, and pyarrow reads in threads of its own."""
    bucket.pipe("/bucket/a.txt", b"x" * 1500)  # two blocks
    n, lines = failing(bucket, monkeypatch, 2, ConnectionError("away")), list[str]()
    with remote.telling(lines.append):
        file = resolve("memory://bucket/a.txt").files[0].open("rb")
    reader = Thread(target=file.read, args=(1500,))
    reader.start()
    reader.join()
    assert n == [3]
    assert ["away; trying again" in line for line in lines] == [True]
