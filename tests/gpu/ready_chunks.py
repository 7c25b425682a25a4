"""The chunks that the copying warps of the specialised gather take for ready, read on a GPU."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from titanlite.kernels.device.specialised_protocol import ready_chunks


@gluon.jit
def _read(flags, number, out, RANKS: gl.constexpr):
    gl.store(out, ready_chunks(flags, gl.load(number), RANKS))


def ready(words: list[int], number: int, ranks: int) -> set[int]:
    """Numbers of the chunks that are ready for operator `number`, of the flags that peers have stored.

    Args:
        words: one for each chunk of each rank.
        number: of the operator, as 32 bits hold it.
        ranks: of the group.
    """
    flags = torch.tensor([0] * ranks + words, dtype=torch.int32, device="cuda")
    out = torch.zeros(1, dtype=torch.int64, device="cuda")
    _read[(1,)](flags, torch.tensor(number, dtype=torch.int32, device="cuda"), out, ranks, num_warps=1)
    bits = int(out) % 2**64
    return {chunk for chunk in range(len(words)) if bits >> chunk & 1}
