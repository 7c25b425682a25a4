"""Launching a kernel again without asking Triton which one it is.

Triton finds the compiled kernel from every argument's type, alignment and value at each launch, asks the driver of
every pointer whether it is one, and has it encode every TMA descriptor anew; that takes longer than all else that an
operator does on the host. An operator whose shapes it has seen knows the kernel, passes addresses, and keeps the
descriptors: in a training step the same addresses come back.
"""

import inspect
from collections.abc import Hashable, Sequence
from copy import copy
from typing import Any, NamedTuple

from torch import Tensor
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.compiler import CompiledKernel
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

MOST_DESCRIPTORS = 4096
"""Kept for one kernel."""


class Blocks(NamedTuple):
    """A row-major matrix that TMA reads or writes block by block.

    Attributes:
        memory: begins where the matrix does.
        shape: of the matrix, in elements.
        stride: from row to row.
        box: shape of a block.
        layout: of a block in shared memory, for Gluon; None for Triton.
    """

    memory: Tensor
    shape: tuple[int, int]
    stride: int
    box: tuple[int, int]
    layout: Any = None

    def descriptor(self) -> TensorDescriptor | GluonDescriptor:
        """As Triton and Gluon take it."""
        strides = [self.stride, 1]
        if self.layout is None:
            return TensorDescriptor(self.memory, list(self.shape), strides, list(self.box))
        return GluonDescriptor(self.memory, list(self.shape), strides, list(self.box), self.layout)


class _Known:
    """A kernel that has been launched before."""

    def __init__(self, compiled: CompiledKernel) -> None:
        # Triton wraps the launcher of a kernel with descriptors in a function that encodes them at each launch.
        wrapped = compiled.run.launch
        inside = inspect.getclosurevars(wrapped).nonlocals if inspect.isfunction(wrapped) else {}
        self.run = copy(compiled.run)
        self.run.launch = inside.get("launcher", wrapped)
        self.metas = inside.get("tensordesc_meta")
        self.function, self.metadata = compiled.function, compiled.packed_metadata
        self.descriptors: dict[tuple[int, int], list[Any]] = {}

    def encoded(self, at: int, blocks: Blocks) -> list[Any]:
        """What the launcher wants for the kernel's descriptor number `at`."""
        address = blocks.memory.data_ptr()
        found = self.descriptors.get((at, address))
        if found is None:
            if len(self.descriptors) >= MOST_DESCRIPTORS:
                self.descriptors.clear()
            made = blocks.descriptor()
            found = [made] if self.metas is None else make_tensordesc_arg(made, self.metas[at])
            self.descriptors[at, address] = found
        return found


_compiled: dict[tuple[int, Hashable, Hashable], CompiledKernel | _Known] = {}


def launch(kernel: JITFunction, key: Hashable, blocks: int, arguments: Sequence[Any], **options: int) -> None:
    """Run a kernel on the current stream.

    Args:
        kernel: of Triton or Gluon.
        key: equal keys mean equal types, values of integers and strides; alignment is looked at here.
        blocks: thread blocks.
        arguments: all of the kernel's parameters, in order.
        options: `num_warps`, `num_stages`; equal for equal keys.
    """
    passed: list[Any] = []
    matrices: list[int] = []
    unaligned = 0
    for at, a in enumerate(arguments):
        if type(a) is Blocks:
            matrices.append(at)
        elif isinstance(a, Tensor):
            address = a.data_ptr()
            unaligned |= (address % 16 != 0) << at
            a = address
        passed.append(a)
    name = id(kernel), key, unaligned
    known = _compiled.get(name)
    if known is None:
        first = [a.descriptor() if type(a) is Blocks else a for a in arguments]
        _compiled[name] = kernel[(blocks,)](*first, **options)
        return
    if type(known) is not _Known:
        known = _compiled[name] = _Known(known)
    for i in reversed(range(len(matrices))):
        at = matrices[i]
        passed[at : at + 1] = known.encoded(i, passed[at])
    stream = driver.active.get_current_stream(driver.active.get_current_device())
    known.run(blocks, 1, 1, stream, known.function, known.metadata, None, None, None, *passed)
