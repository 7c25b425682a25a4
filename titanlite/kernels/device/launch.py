"""Repeated launches of a kernel without Triton's lookup.

At each launch Triton finds the compiled kernel by every argument's type, alignment and value, asks the driver about
every pointer, and encodes every TMA descriptor again. That takes longer than the rest of an operator's work on the
host. Here the compiled kernel is kept for each set of shapes and launched with plain addresses. TMA descriptors are
kept, too, since training steps reuse addresses.
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
"""Most TMA descriptors that are kept for one kernel. Before one more is made, all are dropped."""

UNREAD = (None,) * (len(inspect.signature(make_tensordesc_arg).parameters) - 2)
"""Values for parameters of `make_tensordesc_arg` after the first two. Triton 3.8 has one, which is not read."""


def cdiv(n: int, size: int) -> int:
    """Return how many blocks of `size` cover n elements. `triton.cdiv`, made for kernels, is slower on the host."""
    return -(-n // size)


class Blocks(NamedTuple):
    """A matrix or tensor with contiguous rows that TMA reads or writes block by block."""

    memory: Tensor  # a tensor whose memory begins with the matrix
    shape: tuple[int, ...]  # of the matrix, in elements
    stride: int | tuple[int, ...]  # elements from row to row; beyond two dims: strides of all dims except the last
    box: tuple[int, ...]  # shape of a block
    layout: Any = None  # Gluon's layout of a block in shared memory; None for a Triton kernel

    def descriptor(self) -> TensorDescriptor | GluonDescriptor:
        """Make the TMA descriptor: Gluon's if there is a layout, otherwise Triton's."""
        strides = [self.stride, 1] if isinstance(self.stride, int) else [*self.stride, 1]
        if self.layout is None:
            return TensorDescriptor(self.memory, list(self.shape), strides, list(self.box))
        return GluonDescriptor(self.memory, list(self.shape), strides, list(self.box), self.layout)


class _Launcher:
    """A loaded kernel that can be launched again with other tensors."""

    def __init__(self, compiled: CompiledKernel, arguments: Sequence[Any], tensors: Sequence[Tensor | None]) -> None:
        # For a kernel with descriptors Triton wraps the launcher in a function that encodes them at each launch.
        wrapped = compiled.run.launch
        inside = inspect.getclosurevars(wrapped).nonlocals if inspect.isfunction(wrapped) else {}
        self.run = copy(compiled.run)
        self.run.launch = inside.get("launcher", wrapped)
        self.metas = inside.get("tensordesc_meta")
        self.function, self.metadata = compiled.function, compiled.packed_metadata
        self.device, self.current_stream = driver.active.get_current_device(), driver.active.get_current_stream
        place = {id(tensor): j for j, tensor in enumerate(tensors) if tensor is not None}
        self.passed: list[Any] = []  # arguments of the launcher
        self.addresses: list[tuple[int, int]] = []  # (index in `passed`, index of the tensor) of each address
        # Of each descriptor: (index in `passed`, index of the tensor, index among the descriptors, blocks).
        self.matrices: list[tuple[int, int, int, Blocks]] = []
        self.encoded: dict[tuple[int, int], Any] = {}  # encoded descriptors, by (index among them, address)
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
                if self.metas is not None:  # Triton's own descriptors are not kept: they keep tensors alive
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
    """Compile and load a kernel on its first use, and return a function that launches it on the current stream.

    An operator of several kernels calls this for all of them before it launches the first. Loading waits until
    everything that the GPU runs has ended (an H200, CUDA 13: 1.7 s beside a kernel of 1.7 s on another stream). To
    load between launches could deadlock: peers wait for the kernel that is yet to be loaded, while this GPU runs a
    collective for which the peers' GPUs, full of waiting thread blocks, have no room. A process has one device.

    Args:
        kernel: of Triton or Gluon.
        key: calls with equal keys differ only in the addresses of `tensors`, whose alignment is checked here.
        blocks: number of thread blocks, along one dim or two.
        tensors: the tensors among the arguments whose addresses differ between calls.
        arguments: returns all parameters of the kernel, in order; called once for each key.
        options: `num_warps`, `num_stages`; equal for equal keys.
    """
    grid = blocks if isinstance(blocks, tuple) else (blocks, 1)
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    ids = [id(tensor) for tensor in tensors]
    same = tuple([ids.index(i) for i in ids])  # a tensor passed twice takes another launcher than two tensors
    name = id(kernel), key, same, tuple([address % 16 for address in addresses])
    known = _known.get(name)
    if known is None:
        passed = arguments()
        first = [a.descriptor() if type(a) is Blocks else a for a in passed]
        known = _known[name] = _Launcher(kernel.warmup(*first, grid=grid, **options), passed, tensors)
    return partial(known.launch, grid, tensors, addresses)


def launch(*arguments: Any, **options: int) -> None:
    """Launch a kernel on the current stream. The arguments are those of `ready`."""
    ready(*arguments, **options)()
