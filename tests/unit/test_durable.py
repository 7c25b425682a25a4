"""What stands in a file's place is no file: it is neither followed, nor written to, nor waited for."""

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from titanlite.durable import append_plain, is_at, open_plain, read_plain, write_durably


def link(path: Path) -> None:
    path.symlink_to("outside")


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def device(path: Path) -> None:
    path.symlink_to("/dev/full")


def listener(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(path.name)


IMPOSTORS = {
    "a link": link,
    "a link ": dangling,
    "a link  ": device,
    "a pipe": os.mkfifo,
    "a socket": listener,
    "Is a directory": os.mkdir,
}


@pytest.fixture(autouse=True)
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("outside").write_text("untouched")
    return Path("outside")


@pytest.mark.parametrize("impostor", IMPOSTORS)
@pytest.mark.parametrize(
    "act",
    [
        read_plain,
        append_plain,
        lambda path: open_plain(path, os.O_RDWR | os.O_CREAT),
        lambda path: write_durably(path.with_suffix(""), "text"),
    ],
)
def test_it_is_refused(outside: Path, impostor: str, act: Callable[[Path], object]) -> None:
    path = Path("file.tmp")
    IMPOSTORS[impostor](path)
    with pytest.raises(OSError, match=impostor.strip()) as refused:
        act(path)
    assert refused.value.filename == "file.tmp"
    assert outside.read_text() == "untouched"
    assert not Path("nowhere").exists()


def test_a_file_with_another_name_is_a_file(outside: Path) -> None:
    """As a backup of hard links gives it one."""
    path = Path("file.tmp")
    path.hardlink_to(outside)
    with append_plain(path) as file:
        file.write(", but for this")
    assert read_plain(path) == b"untouched, but for this"
    write_durably(Path("file"), "text")
    assert (outside.read_text(), Path("file").read_text()) == ("untouched, but for this", "text")


def test_a_text_takes_the_old_ones_place_whole_and_once_it_is_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("file")
    path.write_text("old")
    synced: list[tuple[int, str]] = []  # the file that is waited for, and what stands in its place meanwhile
    monkeypatch.setattr(os, "fsync", lambda file: synced.append((os.fstat(file).st_ino, path.read_text())))
    with path.open() as before:
        write_durably(path, "new")
        assert (before.read(), path.read_text()) == ("old", "new")  # the old one was not written to
    assert synced == [(path.stat().st_ino, "old")]


def test_a_path_is_known_to_be_another_file_or_none() -> None:
    path = Path("file")
    with append_plain(path) as file:
        assert is_at(path, file.fileno())
        path.rename("moved")
        assert not is_at(path, file.fileno())
        path.write_text("another")
        assert not is_at(path, file.fileno())
        path.unlink()
        path.symlink_to("moved")
        assert not is_at(path, file.fileno())


@pytest.mark.parametrize(("number", "is_at_once"), [(errno.ESTALE, False), (errno.EIO, True)])
def test_a_path_that_cannot_be_looked_at_is_that_of_the_file(
    monkeypatch: pytest.MonkeyPatch, number: int, is_at_once: bool
) -> None:
    def fails(*_: object) -> os.stat_result:
        raise OSError(number, os.strerror(number))

    path = Path("file")
    with append_plain(path) as file:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "lstat", fails)
            assert is_at(path, file.fileno())
        with monkeypatch.context() as patch:
            patch.setattr(os, "fstat", fails)
            found = is_at(path, file.fileno())
        assert found == is_at_once
