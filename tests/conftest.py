"""One thread per process: ranks are forked after `import torch`, and a thread pool does not survive a fork."""

import codecs
import ctypes
import functools
import gc
import os
import shutil
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from _pytest.mark.expression import Expression

if TYPE_CHECKING:
    from tests.support.launched import Desk

# Each process would ask the C++ compiler what the machine's vectors are: 27 of 99 s of CPU for two compiled runs.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Its threads do not survive a fork either, and a rank would wait for them for ever.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# pytest-xdist sets it for its workers, and what a command prints would be folded.
os.environ.pop("COLUMNS", None)

import torch
import torch._dynamo
import torch.fx.config

torch.set_num_threads(1)
# Where graphs are traced, a third of the time would go to who called, and to what of torch's may be collected.
torch.fx.config.do_not_emit_stack_traces = True
torch._dynamo.config.run_gc_after_compile = False
gc.set_threshold(200_000, 20, 100)
if sys.platform == "linux":
    # Steps of these models allocate the same few megabytes again and again; glibc would give each back to the kernel,
    # and a quarter of the time would go to pages that fault. M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h.
    for parameter in (-1, -3):
        ctypes.CDLL(None).mallopt(parameter, 1 << 30)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what splits the slow tests into parts, by a hash of their names."""
    parser.addoption("--slow-part", metavar="I/N", help="of the slow tests only part I of N, counted from 0")


def pytest_configure(config: pytest.Config) -> None:
    """Start autograd where it sees no device: with one it has threads, and forked ranks cannot take gradients then.

    Not where `-m gpu` asks for tests on devices alone. torch's builds for CUDA count one without a driver, too, once a
    FakeTensorMode was entered: hence the gradient here.
    """
    chosen = Expression.compile(config.option.markexpr or "not gpu")
    if any(chosen.evaluate(lambda name, slow=slow, **_: slow and name == "slow") for slow in (False, True)):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.ones((), requires_grad=True).backward()


@pytest.fixture(scope="module")
def shared_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for the tests of a file, which goes with the last of them: runs and their checkpoints are large."""
    folder = tmp_path_factory.mktemp("shared")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def desk(shared_path: Path) -> "Desk":
    """A folder with a corpus, where runs are started and looked at, for the tests of a file."""
    from tests.support.launched import Desk  # slow to import

    return Desk(shared_path)


@pytest.fixture
def without_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's graphs are traced, split and differentiated, and run as they are."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


@pytest.fixture
def bound_by_permissions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Not as root, who may do anything. In `tmp_path`, by relative paths: the folders above it are root's."""
    monkeypatch.chdir(tmp_path)
    codecs.lookup("utf-8-sig")  # whose module is root's, too
    before, nobody = os.geteuid(), 65534
    if before == 0:
        os.chown(tmp_path, nobody, -1)
        os.seteuid(nobody)
    yield
    os.seteuid(before)


def pytest_collection_finish() -> None:
    """What has been imported by now stays, and is looked through no more."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out other parts of the slow tests, and skip what needs a GPU where there is none."""
    if part := config.option.slow_part:
        this, parts = map(int, part.split("/"))
        items[:] = [
            item
            for item in items
            if not item.get_closest_marker("slow") or zlib.crc32(item.nodeid.encode()) % parts == this
        ]
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and pytest -m gpu"))
