"""Launching a kernel again without asking Triton which one it is.

Triton finds the compiled kernel from every argument's type, alignment and value at each launch, asks the driver of
every pointer whether it is one, and has it encode every TMA descriptor anew; that takes longer than all else that an
operator does on the host. An operator whose shapes it has seen knows the kernel, passes addresses, and keeps the
descriptors: in a training step the same addresses come back.
"""

import inspect
from collections.abc import Callable, Hashable, Sequence
from copy import copy
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.compiler import CompiledKernel
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

MOST_DESCRIPTORS = 4096
"""Most descriptors that are kept for one kernel."""

UNREAD = (None,) * (len(inspect.signature(make_tensordesc_arg).parameters) - 2)
"""Further arguments of `make_tensordesc_arg`: Triton 3.8 has one, the rest of the launch, which it does not read."""


def cdiv(n: int, size: int) -> int:
    """Return how many blocks of `size` cover n. `triton.cdiv` serves kernels too, and is slow for it."""
    return -(-n // size)


class Blocks(NamedTuple):
    """A row-major matrix, or a tensor of rows, that TMA reads or writes block by block."""

    memory: Tensor  # begins where the matrix does
    shape: tuple[int, ...]  # of the matrix, in elements
    stride: int | tuple[int, ...]  # from row to row; of a tensor, of all dims but the last
    box: tuple[int, ...]  # shape of a block
    layout: Any = None  # of a block in shared memory, for Gluon; None for Triton

    def descriptor(self) -> TensorDescriptor | GluonDescriptor:
        """Make the descriptor that Triton, or with a layout Gluon, takes."""
        strides = [self.stride, 1] if isinstance(self.stride, int) else [*self.stride, 1]
        if self.layout is None:
            return TensorDescriptor(self.memory, list(self.shape), strides, list(self.box))
        return GluonDescriptor(self.memory, list(self.shape), strides, list(self.box), self.layout)


class _Launcher:
    """A kernel that is loaded, and how to launch it with other tensors."""

    def __init__(self, compiled: CompiledKernel, arguments: Sequence[Any], tensors: Sequence[Tensor | None]) -> None:
        # Triton wraps the launcher of a kernel with descriptors in a function that encodes them at each launch.
        wrapped = compiled.run.launch
        inside = inspect.getclosurevars(wrapped).nonlocals if inspect.isfunction(wrapped) else {}
        self.run = copy(compiled.run)
        self.run.launch = inside.get("launcher", wrapped)
        self.metas = inside.get("tensordesc_meta")
        self.function, self.metadata = compiled.function, compiled.packed_metadata
        self.device, self.current_stream = driver.active.get_current_device(), driver.active.get_current_stream
        place = {id(tensor): j for j, tensor in enumerate(tensors) if tensor is not None}
        self.passed: list[Any] = []  # what the launcher wants
        self.addresses: list[tuple[int, int]] = []  # where in it which tensor's address goes,
        self.matrices: list[tuple[int, int, int, Blocks]] = []  # and where which one's descriptor, by its number
        self.encoded: dict[tuple[int, int], Any] = {}  # descriptors, by number and address
        n = 0
        for a in arguments:
            at = len(self.passed)
            if type(a) is Blocks:
                self.passed += self._encode(n, a)
                if id(a.memory) in place:
                    self.passed[at] = None
                    self.matrices.append((at, place[id(a.memory)], n, a._replace(memory=a.memory.new_empty(0))))
                n += 1
            elif isinstance(a, Tensor):
                if id(a) in place:
                    self.addresses.append((at, place[id(a)]))
                self.passed.append(a.data_ptr())
            else:
                self.passed.append(a)

    def _encode(self, n: int, blocks: Blocks) -> list[Any]:
        made = blocks.descriptor()
        return [made] if self.metas is None else make_tensordesc_arg(made, self.metas[n], *UNREAD)

    def launch(self, blocks: tuple[int, int], tensors: Sequence[Tensor | None], addresses: Sequence[int]) -> None:
        passed = self.passed.copy()
        for at, j in self.addresses:
            passed[at] = addresses[j]
        for at, j, n, matrix in self.matrices:
            found = self.encoded.get((n, addresses[j]))
            if found is None:
                found = self._encode(n, matrix._replace(memory=tensors[j]))[0]
                if self.metas is not None:  # else it is Triton's own, which keeps the tensor alive
                    if len(self.encoded) >= MOST_DESCRIPTORS:
                        self.encoded.clear()
                    self.encoded[n, addresses[j]] = found
            passed[at] = found
        self.run(*blocks, 1, self.current_stream(self.device), self.function, self.metadata, None, None, None, *passed)


_known: dict[tuple[int, Hashable, Hashable, Hashable], _Launcher] = {}


def ready(
    kernel: JITFunction,
    key: Hashable,
    blocks: int | tuple[int, int],
    tensors: Sequence[Tensor | None],
    arguments: Callable[[], Sequence[Any]],
    **options: int,
) -> Callable[[], None]:
    """Compile and load a kernel, unless it was before, and return what runs it on the current stream.

    An operator of several kernels has all of them ready before it runs the first. To load one takes until all that the
    GPU runs has ended (an H200, CUDA 13: 1.7 s beside a kernel of 1.7 s on another stream). If peers waited for a
    kernel meanwhile that is yet to be loaded, and this GPU ran a collective for which their GPUs, full of such waiting,
    have no room, nobody would go on. A process has one device.

    Args:
        kernel: of Triton or Gluon.
        key: equal keys mean equal arguments but for the addresses of `tensors`; their alignment is looked at here.
        blocks: thread blocks, along one dim or two.
        tensors: those among the arguments that lie elsewhere at each call.
        arguments: gives all of the kernel's parameters, in order; called once for each key.
        options: `num_warps`, `num_stages`; equal for equal keys.
    """
    grid = blocks if isinstance(blocks, tuple) else (blocks, 1)
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    ids = [id(tensor) for tensor in tensors]
    same = tuple([ids.index(i) for i in ids])  # one tensor in two places is another launch than two tensors
    name = id(kernel), key, same, tuple([address % 16 for address in addresses])
    known = _known.get(name)
    if known is None:
        passed = arguments()
        first = [a.descriptor() if type(a) is Blocks else a for a in passed]
        known = _known[name] = _Launcher(kernel.warmup(*first, grid=grid, **options), passed, tensors)
    return partial(known.launch, grid, tensors, addresses)


def launch(
    kernel: JITFunction,
    key: Hashable,
    blocks: int | tuple[int, int],
    tensors: Sequence[Tensor | None],
    arguments: Callable[[], Sequence[Any]],
    **options: int,
) -> None:
    """Run a kernel on the current stream. Arguments as of `ready`."""
    ready(kernel, key, blocks, tensors, arguments, **options)()
