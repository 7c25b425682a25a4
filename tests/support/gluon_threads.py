"""Run Gluon kernels for Hopper on CPUs: their roles as threads, on tensors in the place of registers and buffers.

Nothing is compiled: a kernel's Python is run with other functions under the names of Gluon's. A thread block has one
thread for each of its roles; barriers count arrivals and bytes as mbarriers do, and a role that waits in vain fails.
Products and copies are done where they are issued, so what comes too early is not seen, unless a barrier is missing.
"""

import math
import threading
from collections.abc import Callable, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.language import constexpr
from triton.runtime.jit import ConstexprFunction, JITFunction

from titanlite.kernels.device.launch import Blocks

PATIENCE_S = 60


class Registers(Tensor):
    type: Any = SimpleNamespace(layout=None)  # a layout says where a tensor lies, which is all the same here


class Pointer:
    """An address of a number of a tensor, or those of several."""

    def __init__(self, memory: Tensor, at: Any = 0) -> None:
        self.memory, self.at = memory, at

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.memory, self.at + more)

    def checked(self) -> Any:
        inside = torch.as_tensor((self.at >= 0) & (self.at < len(self.memory)))
        assert inside.all(), "outside of the tensor"
        return self.at


class Buffer:
    """Shared memory, or a view of it."""

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.dtype = memory, memory.dtype

    def index(self, i: int) -> "Buffer":
        return Buffer(self.memory[int(i)])

    def reshape(self, shape: list[int]) -> "Buffer":
        return Buffer(self.memory.view(shape))

    def permute(self, order: tuple[int, ...]) -> "Buffer":
        return Buffer(self.memory.permute(order))

    def slice(self, start: int, length: int, dim: int) -> "Buffer":
        return Buffer(self.memory.narrow(dim, start, length))

    def load(self, layout: Any) -> Tensor:
        return self.memory.clone()

    def store(self, value: Tensor) -> None:
        self.memory.copy_(value)


class Matrix:
    """A tensor in global memory, as a descriptor of TMA has it."""

    def __init__(self, blocks: Blocks) -> None:
        assert isinstance(blocks.stride, tuple)
        self.memory = blocks.memory.as_strided(blocks.shape, (*blocks.stride, 1))
        self.dtype, self.layout, box = blocks.memory.dtype, None, list(blocks.box)
        self.block_type = SimpleNamespace(shape=box, nbytes=math.prod(box) * self.dtype.itemsize)

    def parts(self, at: list[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Return what of the tensor and what of a block lie on each other."""
        sizes = zip(map(int, at), self.block_type.shape, self.memory.shape, strict=True)
        ends = [(i, max(i, 0), min(i + box, size)) for i, box, size in sizes]
        assert all(first < end for _, first, end in ends), f"a block at {at} has nothing of {list(self.memory.shape)}"
        return tuple(slice(f, e) for _, f, e in ends), tuple(slice(f - i, e - i) for i, f, e in ends)


class Barrier:
    def __init__(self, changed: threading.Condition) -> None:
        self.changed, self.phase, self.count, self.pending, self.bytes = changed, 0, 0, 0, 0

    def add(self, arrivals: int, n_bytes: int) -> None:
        with self.changed:
            self.pending, self.bytes = self.pending - arrivals, self.bytes + n_bytes
            assert self.pending >= 0, "more arrivals than a barrier waits for"
            if self.pending == self.bytes == 0:
                self.phase, self.pending = self.phase + 1, self.count
                self.changed.notify_all()

    def wait(self, parity: Any) -> None:
        with self.changed:
            came = self.changed.wait_for(lambda: self.phase % 2 != int(parity), timeout=PATIENCE_S)
        assert came, "a role waits in vain"


class Barriers(list[Barrier]):
    def index(self, i: Any) -> Barrier:  # type: ignore[override]
        return self[int(i)]


def _tensor(x: Any) -> Tensor:
    return x if isinstance(x, Tensor) else torch.tensor(x)


def _plain(x: Tensor) -> Any:
    """Make a number of what is no tensor in Gluon, as it makes scalars of what is reduced to one."""
    return x.as_subclass(Registers) if x.ndim else x.item()


def _pairwise(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Any]:
    return lambda a, b: _plain(function(_tensor(a), _tensor(b)))


class _Language:
    """Stands for `triton.experimental.gluon.language` and what kernels import from `….nvidia.hopper`."""

    int32, int64, float32 = torch.int32, "barriers", torch.float32
    maximum, minimum = staticmethod(_pairwise(torch.maximum)), staticmethod(_pairwise(torch.minimum))
    exp2, log2 = torch.exp2, torch.log2
    NVMMADistributedLayout = SliceLayout = DotOperandLayout = BlockedLayout = SwizzledSharedLayout = MBarrierLayout = (
        lambda *_, **__: None
    )
    static_range = range

    def __init__(self) -> None:
        self.changed, self.one_by_one = threading.Condition(), threading.Lock()

    def arange(self, start: int, end: int, layout: Any) -> Tensor:
        return _plain(torch.arange(start, end))

    def zeros(self, shape: Any, dtype: Any, layout: Any) -> Tensor:
        return self.full(shape, 0, dtype, layout)

    def full(self, shape: Any, value: Any, dtype: Any, layout: Any) -> Tensor:
        return _plain(torch.full(tuple(shape), value, dtype=dtype))

    def where(self, condition: Tensor, a: Any, b: Any) -> Tensor:
        return torch.where(condition, a, b)

    def max(self, x: Tensor, axis: int) -> Any:
        return _plain(x.amax(axis))

    def sum(self, x: Tensor, axis: int) -> Any:
        return _plain(x.sum(axis))

    def convert_layout(self, x: Tensor, layout: Any) -> Tensor:
        return x

    def load(self, pointer: Pointer) -> Any:
        return _plain(pointer.memory[pointer.checked()])

    def store(self, pointer: Pointer, value: Tensor) -> None:
        pointer.memory[pointer.checked()] = value.to(pointer.memory.dtype).as_subclass(Tensor)

    def atomic_add(self, pointer: Pointer, value: int, sem: str, scope: str) -> int:
        with self.one_by_one:
            before = int(pointer.memory[pointer.at])
            pointer.memory[pointer.at] += value
        return before

    def allocate_shared_memory(self, dtype: Any, shape: Sequence[int], layout: Any) -> Any:
        if dtype == "barriers":
            return Barriers(Barrier(self.changed) for _ in range(shape[0]))
        return Buffer(torch.full(list(shape), torch.nan if dtype.is_floating_point else -7, dtype=dtype))

    def warp_specialize(self, roles: list[Any], warps: list[int], registers: list[int]) -> None:
        failed: list[BaseException] = []

        def run(function: Callable[..., None], given: tuple[Any, ...]) -> None:
            try:
                function(*given)
            except BaseException as error:
                failed.append(error)
                raise

        threads = [threading.Thread(target=run, args=role, daemon=True) for role in roles]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive() and not failed:
                thread.join(0.1)
        if failed:
            raise failed[0]

    # --- of Hopper ---

    def init(self, barrier: Barrier, count: int) -> None:
        barrier.count = barrier.pending = count

    def expect(self, barrier: Barrier, n_bytes: int) -> None:
        barrier.add(1, n_bytes)

    def arrive(self, barrier: Barrier, count: int) -> None:
        barrier.add(count, 0)

    def wait(self, barrier: Barrier, parity: Any) -> None:
        barrier.wait(parity)

    def async_copy_global_to_shared(self, matrix: Matrix, at: list[Any], barrier: Barrier, buffer: Buffer) -> None:
        of_memory, of_block = matrix.parts(at)
        buffer.memory.zero_()  # what lies outside
        buffer.memory[of_block] = matrix.memory[of_memory]
        barrier.add(0, -matrix.block_type.nbytes)

    def async_copy_shared_to_global(self, matrix: Matrix, at: list[Any], buffer: Buffer) -> None:
        of_memory, of_block = matrix.parts(at)
        matrix.memory[of_memory] = buffer.memory[of_block]

    def store_wait(self, pendings: int) -> None: ...

    def warpgroup_mma(self, a: Any, b: Buffer, acc: Tensor, use_acc: bool, is_async: bool) -> Tensor:
        product = (a.memory if isinstance(a, Buffer) else a) @ b.memory
        return _plain(acc + product if use_acc else product)

    def warpgroup_mma_wait(self, num_outstanding: int, deps: tuple[Any, ...]) -> Any:
        return deps[0] if len(deps) == 1 else deps


def run_gluon(kernel: JITFunction[Any], arguments: Sequence[Any]) -> None:
    """Run a kernel as one thread block, which claims all of the work.

    Args:
        kernel: of Gluon.
        arguments: as `launch.launch` has them.
    """
    language, rebuilt = _Language(), dict[Any, Any]()

    def of_threads(name: str, value: Any) -> Any:
        if isinstance(value, JITFunction):
            if value not in rebuilt:
                names = dict[str, Any]()
                rebuilt[value] = FunctionType(value.fn.__code__, names)
                names.update({k: of_threads(k, v) for k, v in value.fn.__globals__.items()})
            return rebuilt[value]
        if isinstance(value, ConstexprFunction):
            return value.fn
        if isinstance(value, constexpr):
            return value.value
        if name in ("gl", "mbarrier", "tma"):
            return language
        return getattr(language, name, (lambda: None) if name in ("barrier", "fence_async_shared") else value)

    ours = [
        Matrix(a) if isinstance(a, Blocks) else Pointer(a.flatten()) if isinstance(a, Tensor) else a for a in arguments
    ]
    of_threads("", kernel)(*ours)
