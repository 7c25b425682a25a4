"""Launching a kernel for the second time without asking Triton again which one it is.

Triton finds the compiled kernel from every argument's type, alignment and value at each launch, and asks the driver of
every pointer whether it is one; that takes longer than all else that an operator does on the host. An operator whose
shapes it has seen knows the kernel, and passes addresses.
"""

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

_compiled: dict[tuple[int, Hashable, Hashable], CompiledKernel] = {}


def launch(kernel: JITFunction, key: Hashable, blocks: int, arguments: Sequence[Any], **options: int) -> None:
    """Run a kernel on the current stream.

    Args:
        kernel: of Triton or Gluon.
        key: equal keys mean equal types, values of integers and strides; alignment is looked at here.
        blocks: thread blocks.
        arguments: all of the kernel's parameters, in order.
        options: `num_warps`, `num_stages`; equal for equal keys.
    """
    passed = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
    unaligned = tuple(i for i, a in enumerate(arguments) if isinstance(a, Tensor) and passed[i] % 16)
    known = _compiled.get((id(kernel), key, unaligned))
    if known is None:
        _compiled[id(kernel), key, unaligned] = kernel[(blocks,)](*arguments, **options)
    else:
        known[blocks, 1, 1](*passed)
