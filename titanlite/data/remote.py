"""Read the files of a source at a URL, through fsspec: `s3://`, `gs://`, `https://` and all its other protocols.

A file is read in blocks; each block is a separate request for a range of bytes. A request that fails is repeated after
a pause, so a broken transfer costs one block. Errors that another try cannot mend are raised at once: a missing file,
wrong credentials, a package that is not installed. All blocks must be of the version of the file that was found when
the source was resolved. Over http the headers of each answer show the version; with other protocols it is looked up
again after each block. fsspec and its back ends are imported only if a URL is used.
"""

import hashlib
import io
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, BinaryIO, Literal, TypeVar, cast

from titanlite.errors import DataError, TitanliteError
from titanlite.file_system import COPY, filesystem, in_one_line, is_final, refused_request, url_error
from titanlite.redact import redact_urls

_BLOCK_BYTES = 1 << 23
_PAUSES_S = (0.5, 1, 2, 4, 8, 15, *(30,) * 7)  # between tries: four minutes in all
TRIES_AT_START = 3  # further ones, as a user waits
_STAMPS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "updated", "Last-Modified", "modified")
_STAMPS += ("modify", "created")
T = TypeVar("T")
_on_retry: ContextVar[Callable[[str], object]] = ContextVar("on_retry", default=lambda line: None)


@dataclass(frozen=True, order=True)
class RemoteFile:
    """A file at a URL, with the part of `pathlib.Path` and `os.stat_result` that the readers of documents use."""

    url: str
    key: str = field(compare=False)  # the config key of the source
    st_size: int = field(compare=False)
    st_mtime_ns: int = field(compare=False)  # the version of the file, as a hash of its ETag or time

    def __str__(self) -> str:
        return redact_urls(self.url)

    @property
    def name(self) -> str:
        """Return the last part of the URL's path."""
        return _path_of(self.url).rpartition("/")[2]

    def stat(self) -> "RemoteFile":
        """Return this file: it has the size and version that were found when the source was resolved."""
        return self

    def open(self, mode: Literal["rb"] = "rb") -> BinaryIO:
        """Open the file for reading; a read that fails is repeated."""
        return cast(BinaryIO, io.BufferedReader(_Blocks(self), _BLOCK_BYTES))


class _Blocks(io.RawIOBase):
    """A remote file as a raw stream, read by requests for at most `_BLOCK_BYTES`."""

    def __init__(self, file: RemoteFile) -> None:
        self._file, self._at = file, 0
        self._fs, self._path = filesystem(file.url, file.key)
        self._on_retry = _on_retry.get()  # callback of the opening thread: pyarrow reads in other threads

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.st_size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        start, end = self._at, min(self._file.st_size, self._at + min(len(buffer), _BLOCK_BYTES))
        if start >= end:
            return 0
        buffer[: end - start] = self._fetch(start, end)
        self._at = end
        return end - start

    def _fetch(self, start: int, end: int) -> bytes:
        file, fs = self._file, self._fs

        def fetch() -> bytes:
            if file.url.startswith("http"):
                block = _get(fs, file.url, start, end, partial(_check_answer, file, start, end))
            else:
                block = fs.cat_file(self._path, start=start, end=end)
                fs.invalidate_cache(self._path)
                if _version_of(fs.info(self._path)) != file.st_mtime_ns:
                    raise _changed_meanwhile(file, f"its ETag or time is another behind byte {start:,}")
            if len(block) != end - start:
                raise ConnectionError(f"{len(block)} bytes in place of {end - start}")
            return block

        with telling(self._on_retry):
            try:
                return retried(fetch, file.url, file.key, f"at byte {start:,}")
            except FileNotFoundError as e:
                raise _changed_meanwhile(file, "it is no longer there") from e


def _get(fs: Any, url: str, start: int, end: int, check: Callable[[int, Mapping[str, str]], object]) -> bytes:
    """Request the bytes `start` … `end - 1` over http; call `check` with status and headers before reading the body."""
    from fsspec.asyn import sync

    async def get() -> bytes:
        session = await fs.set_session()
        asked = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        options = {**fs.kwargs, "headers": {**fs.kwargs.get("headers", {}), **asked}}
        async with session.get(fs.encode_url(url), **options) as answer:
            if answer.status in (404, 410):
                raise FileNotFoundError(url)
            if answer.status != 416:  # the file ends before `start`: `check` raises
                answer.raise_for_status()
            check(answer.status, answer.headers)
            return await answer.read()

    return cast(bytes, sync(fs.loop, get))


def _check_answer(file: RemoteFile, start: int, end: int, status: int, headers: Mapping[str, str]) -> None:
    """Refuse an http answer that is not the bytes `start` … `end - 1` of the version of the file that was resolved."""
    _refuse_encoded(file.url, file.key, headers.get("Content-Encoding"))
    size, at = file.st_size, f"the answer for byte {start:,}"
    version = {name: headers[name] for name in ("ETag", "Last-Modified") if name in headers}
    if status == 416:
        raise _changed_meanwhile(file, f"{at} is 416, as of a shorter file")
    if _version_of(version) != file.st_mtime_ns:
        said = ", ".join(f"{name}: {value}" for name, value in version.items()) or "neither ETag nor Last-Modified"
        raise _changed_meanwhile(file, f"{at} has {said}")
    part = headers.get("Content-Range", "no Content-Range")
    if status == 200 and end - start < size:
        saw = f"{file}: all of its {size / 1e6:,.0f} MB in place of a part"
        want = f"a server that sends parts of files of more than {_BLOCK_BYTES / 1e6:.0f} MB"
    elif status == 200 or (status == 206 and re.fullmatch(rf"bytes[ =]{start}-{end - 1}/({size}|\*)", part)):
        return
    else:
        saw = f"{file}: an answer {status} with {part} in place of bytes {start}-{end - 1}/{size}"
        want = "the part of the file that was asked for"
    fix = "serve it by a server with range requests, or copy it to a disk or a bucket"
    raise DataError.of("data", file.key, saw, want, fix)


def _changed_meanwhile(file: RemoteFile, now: str) -> DataError:
    want, fix = "one version of the file, from its first byte to its last", f"run again; if it ends so again, {COPY}"
    return url_error(file.url, file.key, f", which changed during reading: {now}", want, fix)


def _refuse_encoded(url: str, key: str, encoding: str | None) -> None:
    """Refuse a file that the server compresses for the transfer: its size and its byte ranges would be wrong."""
    if encoding and encoding != "identity":
        want = "the bytes of the file, of which parts can be asked for"
        fix = "have it sent as it is (.jsonl.gz and .jsonl.zst are read), or copy it to a disk or a bucket"
        raise url_error(url, key, f", which is sent with Content-Encoding: {encoding}", want, fix)


def _version_of(info: Mapping[str, Any]) -> int:
    """Return a hash of a file's strong ETag, or else of all its tags and times (`_STAMPS`); 0 if it has none."""
    etag = info.get("ETag") or info.get("etag") or "W/"
    stamps = [etag] if not etag.startswith("W/") else [info[name] for name in _STAMPS if info.get(name)]
    # The same time may be a number in a listing, and a datetime in the info of one file.
    known = " ".join(f"{s.timestamp() if isinstance(s, datetime) else s}" for s in stamps)
    return int.from_bytes(hashlib.blake2b(known.encode(), digest_size=7).digest(), "big") if known else 0


def _path_of(url: str) -> str:
    """Return a URL without its query and fragment, which only http URLs have."""
    return re.split(r"[?#]", url)[0] if url.startswith("http") else url


@contextmanager
def telling(on_retry: Callable[[str], object]) -> Iterator[None]:
    """In the block, call `on_retry` with a message each time that this thread repeats a failed request."""
    token = _on_retry.set(on_retry)
    try:
        yield
    finally:
        _on_retry.reset(token)


def list_files(
    source: str, key: str, endings: tuple[str, ...], is_start: bool = False
) -> tuple[list[RemoteFile], list[str]]:
    """Find the file at a URL, the files that a pattern matches, or the files below a folder.

    From a folder only files with one of `endings` (lower case) are taken. `is_start`: few tries, as a user waits.

    Returns:
        The files, sorted; and the names of the files below folders that were not taken.

    Raises:
        DataError: no file is found, or the URL cannot be listed.
    """
    fs, path = filesystem(source, key)
    named_by = _path_of(path)

    def find() -> tuple[dict[str, Any], dict[str, Any]]:
        fs.invalidate_cache()
        is_pattern = any(mark in named_by for mark in "*?[")
        named, below = fs.glob(path, detail=True) if is_pattern else {path: fs.info(path)}, dict[str, Any]()
        for name, info in [*named.items()]:
            # Over http a folder is a page of links.
            is_page = info.get("mimetype") == "text/html" and name == named_by and not name.lower().endswith(endings)
            if info.get("type") == "directory" or is_page:
                below |= fs.find(f"{name.rstrip('/')}/" if is_page else name, detail=True)
                del named[name]
        return named, below

    try:
        named, below = retried(find, source, key, "while it was listed", TRIES_AT_START if is_start else None)
    except FileNotFoundError:
        named, below = {}, {}
    fixed = len(re.split(r"[*?\[]", path)[0].rpartition("/")[0])
    if "/." not in path[fixed:]:  # hidden files are taken only if the pattern names them
        named, below = ({name: of[name] for name in of if "/." not in name[fixed:]} for of in (named, below))
    of_folders = below.keys() - named.keys()
    taken = named | {name: below[name] for name in of_folders if _path_of(name).lower().endswith(endings)}
    passed = sorted(of_folders - taken.keys())
    if not taken:
        there = f"a folder of {len(passed):,} others" if passed else "which matches no file"
        want = f"a URL, a folder or a glob of {', '.join(endings)}"
        fix = "correct the URL; ** stands for any folders"
        if source.startswith("http"):
            fix += "; of a server that does not list its folders, name each file as a source of data.mixture"
        raise url_error(source, key, f", {there}", want, fix)
    scheme = source.partition("://")[0]
    return sorted(_remote_file(fs, scheme, name, info, key) for name, info in taken.items()), passed


def _remote_file(fs: Any, scheme: str, name: str, info: dict[str, Any], key: str) -> RemoteFile:
    url = name if "://" in name else f"{scheme}://{name.lstrip('/') if scheme != 'file' else name}"
    if info.get("size") is None:
        info = retried(lambda: fs.info(name), url, key, "while it was looked at")
    _refuse_encoded(url, key, info.get("contentEncoding"))
    size = info.get("size")
    if size is None:
        unknown = url_error(url, key, ", whose size is not known", "a server that says how large the file is")

        def refuse(_: int, headers: Mapping[str, str]) -> None:
            _refuse_encoded(url, key, headers.get("Content-Encoding"))
            raise unknown

        if url.startswith("http"):  # a file that is compressed for the transfer has no size
            retried(lambda: _get(fs, url, 0, 1, refuse), url, key, "while it was looked at")
        raise unknown
    number = _version_of(info)
    if not number:
        want = "a server that gives an ETag or Last-Modified, so that a changed file is not taken for the same"
        raise url_error(url, key, ", of which nothing but the size is known", want)
    return RemoteFile(url, key, int(size), number)


def retried(action: Callable[[], T], url: str, key: str, where: str, tries: int | None = None) -> T:
    """Call `action` until it succeeds, with pauses; after `tries` repetitions (None: all of `_PAUSES_S`) give up.

    `where`: the place of the request in messages, such as `at byte 0`.

    Raises:
        FileNotFoundError: the file does not exist.
        DataError: another try cannot mend the failure, or the last try has failed.
    """
    for pause in (*_PAUSES_S[:tries], None):
        try:
            return action()
        except TitanliteError:
            raise
        except Exception as e:  # exceptions of back ends have no common class
            failure = _cause_over_http(e) if url.startswith("http") else e
            if isinstance(failure, FileNotFoundError):
                raise
            if is_final(failure) or pause is None:
                raise refused_request(failure, url, key) from e
            _on_retry.get()(f"{redact_urls(url)}, {where}: {in_one_line(failure)}; trying again in {pause:g} s")
            time.sleep(pause)
    raise AssertionError  # the last try has returned or raised


def _cause_over_http(e: Exception) -> Exception:
    """Return `e` or its cause, as fsspec raises a FileNotFoundError also if an http server cannot be reached."""
    cause = e.__cause__ if isinstance(e, FileNotFoundError) else None
    return cause if isinstance(cause, Exception) and getattr(cause, "status", 0) not in (404, 410) else e
