"""Compile the device code for sm_90 without a GPU, through the same host code that launches it.

Launches are turned into compilations, and a channel of ordinary CPU memory stands for the symmetric one. Nothing runs.
"""

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from packaging.version import Version
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from titanlite.kernels.device import all_gather_matmul, matmul_reduce_scatter, norm_rope, rms_norm
from titanlite.kernels.device import launch as launch_module
from titanlite.kernels.device.channel import COUNTERS

SHARED_MEMORY = 232448  # bytes that a thread block may have on sm_90
IS_3_8 = Version(triton.__version__) >= Version("3.8")
TARGET = GPUTarget("cuda", 90, 32)


class _Driver:
    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def fake_channel(rank: int, ranks: int, capacity: int = 64 << 20) -> SimpleNamespace:
    slots = torch.empty(2 * capacity, dtype=torch.uint8)
    return SimpleNamespace(
        number=0,
        rank=rank,
        ranks=ranks,
        device=torch.device("cpu"),
        flags=torch.zeros(9 * ranks, dtype=torch.int32),
        peer_flags=torch.zeros(ranks, dtype=torch.int64),
        counters=torch.zeros(COUNTERS, dtype=torch.int32),
        epoch=torch.zeros(1, dtype=torch.int32),
        deadline=torch.zeros(1, dtype=torch.int64),
        failure=torch.zeros(4, dtype=torch.int64),
        slots=slots,
        peer_slots=torch.zeros(ranks, dtype=torch.int64),
        peers=[slots] * ranks,
        capacity=capacity,
        operator=0,
        n_slots=2,
        begin=lambda n_bytes: capacity,
        order=lambda: None,
        make_room=lambda n_bytes: None,
        blocks={},
    )


@contextmanager
def compiling(ranks: int = 4) -> Iterator[dict[str, triton.compiler.CompiledKernel]]:
    """Inside, calls of the device functions compile, as on rank 1; the dict fills with the kernels by name."""
    compiled: dict[str, triton.compiler.CompiledKernel] = {}
    warmup, launcher, driver = JITFunction.warmup, launch_module._Launcher, triton.runtime.driver
    run = JITFunction.__getitem__
    stems = (all_gather_matmul, matmul_reduce_scatter)
    before = [(stem, name, getattr(stem, name)) for stem in stems for name in ("channel", "multiprocessors")]
    before += [(module, "multiprocessors", module.multiprocessors) for module in (norm_rope, rms_norm)]

    def remembered(self, *args, grid, **kwargs):
        compiled[self.fn.__name__] = kernel = warmup(self, *args, grid=grid, **kwargs)
        return kernel

    JITFunction.warmup = remembered
    JITFunction.__getitem__ = lambda self, grid: partial(self.warmup, grid=grid)
    launch_module._Launcher = lambda *_: SimpleNamespace(launch=lambda *_: None)  # nothing is loaded
    driver.set_active(_Driver())
    launch_module._known.clear()
    channel = fake_channel(1, ranks)
    for module, name, _ in before:
        setattr(module, name, (lambda group: channel) if name == "channel" else lambda device: 132)
    try:
        yield compiled
    finally:
        launch_module._known.clear()
        JITFunction.warmup, launch_module._Launcher = warmup, launcher
        JITFunction.__getitem__ = run
        driver._active = None  # found anew at the next use
        for module, name, function in before:
            setattr(module, name, function)


def accesses(kernel: triton.compiler.CompiledKernel) -> Counter[tuple[str, int]]:
    """How often a kernel's code loads ("ld") and stores ("st") so many words of 32 bits of global memory at once."""
    found = re.findall(r"\b(ld|st)\.global(?:\.v([24]))?\.b32 ", kernel.asm["ptx"])
    return Counter((way, int(words or 1)) for way, words in found)


def _spills_beside_products(sass: str) -> bool:
    """Whether the stack is used before, between or after the two consumers' products: by who copies, not by them."""
    found = re.findall(r"\b(?:([HQ]GMMA)|STL|LDL)\b", sass)
    products = sum(map(bool, found))
    return {sum(map(bool, found[:i])) for i, name in enumerate(found) if not name} <= {0, products // 2, products}


def check_resources(compiled: dict[str, triton.compiler.CompiledKernel], folder: Path, may_spill: bool = False) -> None:
    """Nothing on the stack but addresses of a warp that copies, no more shared memory than there is."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

    def dumped(what: str) -> str:
        return subprocess.run([tool, what, cubin], capture_output=True, text=True, check=True).stdout

    for name, kernel in compiled.items():
        cubin = folder / f"{name}.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        said = dumped("--dump-resource-usage")
        used = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", said))
        spills = may_spill or (IS_3_8 and name == "matmul_push")  # up to 500 bytes a thread; not timed
        if not spills and name == "gather_matmul":
            most = 128 if IS_3_8 else 56  # bytes; those of 3.8 are not timed
            spills = int(used["STACK"]) <= most and _spills_beside_products(dumped("-sass"))
        assert spills or used["STACK"] == used["LOCAL"] == "0", f"{name}: {said}"
        assert kernel.metadata.shared <= SHARED_MEMORY, name


def require_products_in_flight(name: str, ptx: str, folder: Path) -> None:
    """PTX's assembler waits for each product where it cannot tell whose registers are read, and says so."""
    tool, file = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas", folder / f"{name}.ptx"
    file.write_text(ptx)
    command = [tool, "-v", "-arch=sm_90a", file, "-o", folder / "cubin"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "serialized" not in said, said
