"""Stores for mirrors of checkpoints: S3 on loopback, and a folder as a store that fails on demand, for any process.

`faulty://user:SECRET@store/FOLDER` is the local folder /FOLDER, found by fsspec as a package's entry point. What it
does is in the file that FAULTY names: `ok`, `slow`, `hangs`, `full`, `keeps` (deletes nothing), `tears` (small files),
`cuts` (all others), `closed` or `gone`.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

ROOT = Path(__file__).parents[2]
SECRET = "hunter2-hunter2-hunter2"
_SERVER = "from moto.server import main; import sys; main(['-H', '127.0.0.1', '-p', sys.argv[1]])"


class FaultyFileSystem(LocalFileSystem):
    """A folder, behind every request of which stands what the file that FAULTY names asks for."""

    protocol = "faulty"
    root_marker = "/"

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return super()._strip_protocol("/" + str(path).partition("@store/")[2] if "://" in str(path) else path)

    def _fault(self, writes: bool = False) -> None:
        fault = Path(os.environ["FAULTY"]).read_text()
        where = f"at faulty://user:{SECRET}@store/"
        if fault == "gone":
            raise ConnectionError(f"no route {where}")
        if fault == "closed":
            raise PermissionError(f"no right {where}")
        if fault == "slow":
            time.sleep(0.3)
        if writes and fault == "hangs":
            time.sleep(1000)
        if writes and fault == "full":
            raise OSError(28, f"no space {where}")

    def put_file(self, *args: Any, **more: Any) -> Any:
        self._fault(writes=True)
        super().put_file(*args, **more)
        if Path(os.environ["FAULTY"]).read_text() == "cuts":
            os.truncate(args[1], 1000)

    def get_file(self, *args: Any, **more: Any) -> Any:
        super().get_file(*args, **more)
        self._fault()

    def pipe_file(self, path: str, value: bytes, *args: Any, **more: Any) -> Any:
        is_torn = Path(os.environ["FAULTY"]).read_text() == "tears"
        super().pipe_file(path, value[: len(value) // 2] if is_torn else value, *args, **more)
        if is_torn:
            raise OSError("torn")

    def rm_file(self, *args: Any, **more: Any) -> Any:
        if Path(os.environ["FAULTY"]).read_text() == "keeps":
            raise PermissionError(f"no right at faulty://user:{SECRET}@store/")
        super().rm_file(*args, **more)

    def mv(self, path1: str, path2: str, **more: Any) -> None:
        """As object stores do, which have no rename."""
        self.cp_file(path1, path2)
        self.rm_file(path1)

    def find(self, *args: Any, **more: Any) -> Any:
        self._fault()
        return super().find(*args, **more)

    def cat_file(self, *args: Any, **more: Any) -> Any:
        self._fault()
        return super().cat_file(*args, **more)


class FaultyStore:
    """A new folder as a store."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        import fsspec

        self.folder, self._mode = folder / "store", folder / "mode"
        self.url = f"faulty://user:{SECRET}@store{self.folder}"
        package = folder / "package" / "faulty-1.dist-info"
        package.mkdir(parents=True)
        (package / "METADATA").write_text("Name: faulty\nVersion: 1\n")
        (package / "entry_points.txt").write_text(f"[fsspec.specs]\nfaulty = {__name__}:FaultyFileSystem\n")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(package.parent), str(ROOT), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("FAULTY", str(self._mode))
        fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
        self.becomes("ok")

    def becomes(self, mode: str) -> None:
        self._mode.write_text(mode)

    def complete(self) -> list[int]:
        return sorted(int(at.parent.name.removeprefix("step-")) for at in self.folder.glob("step-*/MANIFEST.json"))


@contextmanager
def s3(patch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve S3 on loopback, with a bucket, whose URL it gives."""
    pytest.importorskip("moto")
    s3fs = pytest.importorskip("s3fs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-c", _SERVER, str(port)], stdout=-3, stderr=-3)
    given = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**given, "FSSPEC_S3_ENDPOINT_URL": f"http://127.0.0.1:{port}"}.items():
        patch.setenv(name, value)
    try:
        import fsspec.config

        fsspec.config.set_conf_env(fsspec.config.conf)
        for _ in range(300):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        s3fs.S3FileSystem(skip_instance_cache=True).mkdir("bucket")
        yield "s3://bucket"
    finally:
        fsspec.config.conf.pop("s3", None)
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
