"""Launching a kernel for the second time without asking Triton again which one it is.

Triton finds the compiled kernel from every argument's type, alignment and value at each launch, which takes longer than
all else that an operator does on the host. An operator whose shapes it has seen knows the kernel.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

_compiled: dict[tuple[JITFunction, Hashable], CompiledKernel] = {}


def launch(kernel: JITFunction, key: Hashable, blocks: int, arguments: Sequence[Any], **options: int) -> None:
    """Run a kernel on the current stream.

    Args:
        kernel: of Triton or Gluon.
        key: equal keys mean equal types, values of integers and strides; alignment is looked at here.
        blocks: thread blocks.
        arguments: all of the kernel's parameters, in order.
        options: `num_warps`, `num_stages`; equal for equal keys.
    """
    aligned = tuple(a.data_ptr() % 16 == 0 for a in arguments if isinstance(a, torch.Tensor))
    known = _compiled.get((kernel, (key, aligned)))
    if known is None:
        _compiled[kernel, (key, aligned)] = kernel[(blocks,)](*arguments, **options)
    else:
        known[blocks, 1, 1](*arguments)
