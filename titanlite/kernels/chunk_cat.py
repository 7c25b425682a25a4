"""Cut gradients into one chunk per rank, and convert them: the input of FSDP's reduce-scatter.

On a GPU torch's `_chunk_cat` builds a table at every call, with an entry for each 2 KiB of a rank's chunks. This takes
the host 0.8 ms for a block of Llama-3 8B on two ranks and 1.6 ms on one, and the kernel reaches half of the memory's
bandwidth (`scripts/bench/chunk_cat.py`). The kernel here needs no table: it is launched once per tensor.
"""

import torch
from torch import Tensor


def chunk_cat(tensors: list[Tensor], n_chunks: int, out: Tensor) -> None:
    """Cut each tensor into `n_chunks` equal chunks, and concatenate the i-th chunks of all tensors in row i of `out`.

    Args:
        tensors: floating, none of them empty; cut along dim 0, which is padded with zeros to a multiple of `n_chunks`.
        n_chunks: rows of `out`.
        out: [n_chunks, sum of the chunks' sizes], contiguous, of any dtype.
    """
    if out.is_cuda:
        from titanlite.kernels.device.chunk_cat import launch_chunk_cat

        launch_chunk_cat(tensors, n_chunks, out)
    else:
        torch._chunk_cat(tensors, 0, n_chunks, out=out)
