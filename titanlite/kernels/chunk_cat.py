"""Gradients, cut into the parts of the ranks and converted on the way: what FSDP's reduce-scatter takes.

On a GPU torch's `_chunk_cat` builds at every call a table with an entry for each 2 KiB of a rank's parts, which takes
the host 0.8 ms for a block of Llama-3 8B on two ranks and 1.6 ms on one; its kernel reaches half of the memory's speed
(`scripts/bench/chunk_cat.py`). Ours needs no table: each tensor is a launch of its own.
"""

import torch
from torch import Tensor


def chunk_cat(tensors: list[Tensor], n_chunks: int, out: Tensor) -> None:
    """Concatenate the i-th of `n_chunks` equal parts of each tensor into the i-th row.

    Args:
        tensors: floating, none of them empty; cut along dim 0, padded with zeros where it does not divide.
        n_chunks: rows of `out`.
        out: [n_chunks, sum of the parts' sizes], contiguous, of any dtype.
    """
    if out.is_cuda:
        from titanlite.kernels.device.chunk_cat import launch_chunk_cat

        launch_chunk_cat(tensors, n_chunks, out)
    else:
        torch._chunk_cat(tensors, 0, n_chunks, out=out)
