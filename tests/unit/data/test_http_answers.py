"""Each answer about a file behind a URL is of the version and of the part that was asked for, or it is refused."""

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from titanlite.config.schema import Data
from titanlite.data import remote
from titanlite.data.corpus import Corpus
from titanlite.data.prepare import prepare
from titanlite.data.shards import Shard
from titanlite.data.sources import ending, resolve
from titanlite.errors import DataError

pytest.importorskip("aiohttp")
fsspec = pytest.importorskip("fsspec")
BLOCK = 1000


def records(word: str) -> bytes:
    """Return lines that have the same length whatever the word of three letters is; 6 blocks."""
    return b"".join(json.dumps({"text": f"{word} {i:03} " * 12}).encode() + b"\n" for i in range(50))[: 5 * BLOCK + 400]


OLD, NEW = records("old"), records("new")
OfFiles = dict[bytes, tuple[Shard, ...]]


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


class Server:
    """Serves one file, by ranges; `change` alters the n-th answer that has content, `of_head` those to HEAD."""

    def reset(self) -> None:
        self.content, self.version = OLD, {"ETag": '"a"', "Last-Modified": "Mon, 02 Nov 2026 10:00:00 GMT"}
        self.n = 0
        self.change: Callable[[int, Answer], object] = lambda n, answer: None
        self.of_head: Callable[[Answer], object] = lambda answer: None

    def __init__(self) -> None:
        self.reset()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                answer = Answer(200, {"Content-Length": str(len(outer.content)), **outer.version}, b"")
                outer.of_head(answer)
                self.send(answer)

            def do_GET(self) -> None:
                first, _, last = self.headers.get("Range", "bytes=0-999999").removeprefix("bytes=").partition("-")
                start, end = int(first), min(int(last) + 1, len(outer.content))
                part = {"Content-Range": f"bytes {start}-{end - 1}/{len(outer.content)}"}
                answer = Answer(206, {**part, **outer.version}, outer.content[start:end])
                outer.n += 1
                outer.change(outer.n, answer)
                self.send(answer)

            def send(self, answer: Answer) -> None:
                self.send_response(answer.status)
                for name, value in {"Content-Length": str(len(answer.body)), **answer.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(answer.body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/a.jsonl"
        Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture(scope="module")
def one_server() -> Iterator[Server]:
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


@pytest.fixture
def server(one_server: Server) -> Server:
    one_server.reset()
    return one_server


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(remote, "_PAUSES_S", (0.0,) * 2)


def prepared(source: str, folder: Path) -> Corpus:
    return prepare(source, Data(cache_dir=str(folder), max_bad_records=1), 256, progress=False)


@pytest.fixture(scope="module")
def of_files(tmp_path_factory: pytest.TempPathFactory) -> OfFiles:
    """Return the shards of both versions of the file on a disk."""
    folder = tmp_path_factory.mktemp("local")
    for content in (OLD, NEW):
        (folder / f"{content[10:13].decode()}.jsonl").write_bytes(content)
    sources = {content: f"{folder}/{content[10:13].decode()}.jsonl" for content in (OLD, NEW)}
    return {content: prepared(source, folder / "cache").meta.shards for content, source in sources.items()}


def answered(status: int = 206, body: Callable[[bytes], bytes] = bytes, **headers: str) -> Callable[[Answer], None]:
    """Return what alters an answer; a header without a value is left out."""

    def alter(answer: Answer) -> None:
        answer.status, answer.body = status, body(answer.body)
        changed = {name.replace("_", "-"): value for name, value in headers.items()}
        answer.headers = {name: value for name, value in (answer.headers | changed).items() if value}

    return alter


CHANGED = r"a\.jsonl', which changed during reading: "
AT = rf"{CHANGED}the answer for byte 2,000 has "
REFUSED: dict[str, tuple[Callable[[Answer], None], str]] = {
    "another version, and then the old one again": (
        answered(body=lambda _: NEW[2 * BLOCK : 3 * BLOCK], ETag='"b"'),
        rf'{AT}ETag: "b"',
    ),
    "no ETag, where there was one": (answered(ETag=""), rf"{AT}Last-Modified: "),
    "neither ETag nor time": (answered(ETag="", Last_Modified=""), rf"{AT}neither"),
    "a weak ETag, where it was a strong one": (answered(ETag='W/"a"'), rf'{AT}ETag: W/"a"'),
    "a shorter file": (answered(416, bytes), rf"{CHANGED}the answer for byte 2,000 is 416"),
    "no file": (answered(404, bytes), rf"{CHANGED}it is no longer there"),
    "a part 17 bytes off": (
        answered(body=lambda _: OLD[2017:3017], Content_Range="bytes 2017-3016/5400"),
        r"answer 206 with bytes 2017-3016/5400 in place of bytes 2000-2999/5400",
    ),
    "a part of a longer file": (answered(Content_Range="bytes 2000-2999/5401"), r"in place of bytes 2000-2999/5400"),
    "a part that it does not name": (answered(Content_Range=""), r"answer 206 with no Content-Range"),
    "the whole file": (answered(200, lambda _: OLD, Content_Range=""), r"all of its 0 MB in place of a part"),
    "a file of nothing": (answered(204, lambda _: b"", Content_Range=""), r"answer 204 with no Content-Range"),
    "a part, compressed": (answered(Content_Encoding="gzip"), r"Content-Encoding: gzip"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_answer_of_something_else_ends_the_preparation(
    case: str, server: Server, of_files: OfFiles, tmp_path: Path
) -> None:
    alter, said = REFUSED[case]
    server.change = lambda n, answer: alter(answer) if n == 3 else None
    with pytest.raises(DataError, match=said):
        prepared(server.url, tmp_path / "cache")
    assert server.n == 3  # it is not asked again
    server.change = lambda n, answer: None
    assert prepared(server.url, tmp_path / "cache").meta.shards == of_files[OLD]


@pytest.mark.parametrize(
    "alter",
    [
        answered(body=lambda body: body[:-1]),
        answered(body=lambda body: b""),
        answered(body=lambda body: body + b"\n"),
        answered(503),
        answered(Content_Range="bytes 2000-2999/*", Last_Modified=""),
        answered(302, bytes, Location="/other.jsonl"),
        answered(Content_Encoding="identity"),
    ],
    ids=["shorter", "empty", "longer", "busy", "of a file of unknown size", "redirected", "not compressed"],
)
def test_an_answer_that_another_try_mends_or_that_is_right_loses_nothing(
    alter: Callable[[Answer], None], server: Server, of_files: OfFiles, tmp_path: Path
) -> None:
    server.change = lambda n, answer: alter(answer) if n == 3 else None
    assert prepared(server.url, tmp_path / "cache").meta.shards == of_files[OLD]


@pytest.mark.parametrize("version", [{"ETag": 'W/"a"'}, {"Last-Modified": "Mon, 02 Nov 2026 10:00:00 GMT"}])
def test_a_file_that_is_replaced_is_read_anew(
    version: dict[str, str], server: Server, of_files: OfFiles, tmp_path: Path
) -> None:
    server.version = version

    def replaced(n: int, answer: Answer) -> None:
        if n == 3:
            server.content, server.version = NEW, {name: value.replace("a", "b") for name, value in version.items()}
            server.version["Last-Modified"] = "Mon, 02 Nov 2026 10:00:01 GMT"
            answer.headers |= server.version
            answer.body = NEW[2 * BLOCK : 3 * BLOCK]

    server.change = replaced
    with pytest.raises(DataError, match=CHANGED):
        prepared(server.url, tmp_path / "cache")
    assert prepared(server.url, tmp_path / "cache").meta.shards == of_files[NEW]


def test_a_file_or_a_server_that_is_not_there_is_said(server: Server) -> None:
    server.of_head, server.change = answered(404), lambda n, answer: answered(404)(answer)
    with pytest.raises(DataError, match="matches no file"):
        resolve(server.url)
    with pytest.raises(
        DataError, match=r"Cannot connect to host(.|\n)*see whether the network and the server are there"
    ):
        resolve("http://127.0.0.1:1/a.jsonl")


def test_what_a_bucket_has_for_a_moment_is_not_read(
    of_files: OfFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = fsspec.filesystem("memory")
    bucket.pipe("/answers/a.jsonl", OLD)
    was, cat_file, n = bucket.store["/answers/a.jsonl"], type(bucket).cat_file, 0

    def cat(self: Any, path: str, start: int, end: int) -> bytes:
        nonlocal n
        n += 1
        if n == 3:
            bucket.pipe("/answers/a.jsonl", NEW)
        bucket.store["/answers/a.jsonl"] = bucket.store["/answers/a.jsonl"] if n == 3 else was
        return cat_file(self, path, start=start, end=end)

    listed = functools.cache(type(bucket).info)
    monkeypatch.setattr(type(bucket), "info", lambda self, path: listed(self, path))  # as those of buckets are kept
    monkeypatch.setattr(type(bucket), "invalidate_cache", lambda self, path=None: listed.cache_clear())
    monkeypatch.setattr(type(bucket), "cat_file", cat)
    with pytest.raises(DataError, match=r"memory://answers/a\.jsonl', which changed during reading"):
        prepared("memory://answers/a.jsonl", tmp_path / "cache")
    bucket.store["/answers/a.jsonl"] = was
    assert prepared("memory://answers/a.jsonl", tmp_path / "cache").meta.shards == of_files[OLD]
    del bucket.store["/answers/a.jsonl"]


def test_a_listing_and_a_look_at_the_file_may_write_its_time_differently() -> None:
    """S3 lists milliseconds, and answers seconds; the ETag is the same."""
    listed = {"ETag": '"a"', "LastModified": "2026-11-02T10:00:00.123Z"}
    assert remote._version_of(listed) == remote._version_of({"ETag": '"a"', "LastModified": "2026-11-02T10:00:00Z"})
    assert remote._version_of(listed) != remote._version_of(listed | {"ETag": '"b"'})


def test_a_file_that_is_compressed_on_its_way_is_refused_for_that(server: Server) -> None:
    def compressed(answer: Answer) -> None:
        answer.headers["Content-Encoding"] = "gzip"

    server.of_head, server.change = compressed, lambda n, answer: compressed(answer)
    with pytest.raises(DataError, match=r"a\.jsonl', which is sent with Content-Encoding: gzip"):
        resolve(server.url)
    with pytest.raises(DataError, match="Content-Encoding: gzip"):  # as Google Cloud Storage says of an object
        remote._remote_file(None, "gs", "b/a.jsonl", {"size": 3, "etag": "a", "contentEncoding": "gzip"}, "data.source")


def test_a_query_is_no_part_of_the_name(server: Server, of_files: OfFiles, tmp_path: Path) -> None:
    url = f"{server.url}?name=x.txt&X-Amz-Signature=a/b%2Bc"
    assert [(file.name, ending(file)) for file in resolve(url).files] == [("a.jsonl", ".jsonl")]
    assert prepared(url, tmp_path / "cache").meta.shards == of_files[OLD]
    with pytest.raises(DataError, match=r"of another kind, first .*/download\?file=a\.jsonl"):
        resolve(f"{server.url.rpartition('/')[0]}/download?file=a.jsonl")
    with pytest.raises(DataError, match=r"has left a token out\n.*\n.*fix:  write them where \*\*\* stands"):
        resolve(f"{server.url}?X-Amz-Signature=***")
