"""How a collective matmul is cut up, by shape."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """Sizes of a kernel's tiles and of its copies.

    Attributes:
        m: rows of a tile.
        n: columns.
        k: of the contracted dim, in one step.
        warps: per thread block.
        stages: steps of k on their way at once.
        group: blocks of rows that share a pass over all columns, for the cache's sake.
        copiers: thread blocks that copy first (all-gather only).
        copy_rows: rows of 128 bytes that the specialised kernel copies at once.
        specialised: take the kernel whose warps are specialised (`specialised`), where the shape allows it.
    """

    m: int = 128
    n: int = 256
    k: int = 64
    warps: int = 8
    stages: int = 3
    group: int = 8
    copiers: int = 48
    copy_rows: int = 32
    specialised: bool = True


def tiles(op: str, itemsize: int, ranks: int, M: int, N: int, K: int) -> Tiles:
    """The tiles for a product of `[M, K] @ [K, N]`.

    Args:
        op: "all_gather_matmul" or "matmul_reduce_scatter".
        itemsize: of the operands, in bytes.
        ranks: of the group.
        M: rows of the whole product.
        N: its columns.
        K: contracted.
    """
    return Tiles(n=256 if N > 128 else 128, k=128 // itemsize)
