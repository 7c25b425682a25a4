"""The tiles of a collective matmul, by shape: a table of measured shapes, and a rule for all others.

`tiles.toml` holds what `scripts/bench/collective_matmul.py --tune` found best. It is part of the package, so that
nobody tunes at run time and all ranks choose alike.
"""

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class Tiles:
    """Sizes of a kernel's tiles and of its copies.

    Attributes:
        m: rows of a tile.
        n: columns.
        k: of the contracted dim, in one step.
        warps: per thread block.
        stages: steps of k on their way at once (not specialised; a specialised kernel has as many as fit).
        group: blocks of rows that share a pass over all columns: the tiles on their way at once read few operands from
            memory, so that a GPU at its power limit runs faster (not: matmul → reduce-scatter, not specialised).
        copiers: thread blocks that copy first (all-gather, not specialised).
        copy_rows: rows of 128 bytes that one copy takes (all-gather, specialised).
        plain: take none of them: NCCL and cuBLAS one after the other are faster.
        specialised: take the kernel whose warps are specialised, where the shape allows it.
    """

    m: int = 128
    n: int = 256
    k: int = 64
    warps: int = 8
    stages: int = 3
    group: int = 16
    copiers: int = 48
    copy_rows: int = 32
    plain: bool = False
    specialised: bool = True

    def narrow(self) -> "Tiles":
        """Return the same for the kernels that are not specialised, whose tiles have powers of two."""
        return replace(self, n=128) if self.n == WIDE else self


@cache
def tiles(
    op: str, itemsize: int, ranks: int, M: int, N: int, K: int, fast_accum: bool = False, out_itemsize: int = 2
) -> Tiles:
    """Choose the tiles for a product of `[M, K] @ [K, N]`.

    Args:
        op: "all_gather_matmul" or "matmul_reduce_scatter".
        itemsize: of the operands, in bytes.
        ranks: of the group.
        M: rows of the whole product.
        N: its columns.
        K: contracted.
        fast_accum: whether float8 products are added by the tensor cores alone.
        out_itemsize: of the product, in bytes.
    """
    if in_steps(itemsize, fast_accum) or out_itemsize > 2:
        # Each step's sum is added to the whole, and both take registers; or a tile on its way out takes twice the room.
        wide = out_itemsize == 2 and -N % WIDE <= N / 20
        return replace(tiles(op, itemsize, ranks, M, N, K, True), n=WIDE if wide else 128, stages=4)
    known = measured_tiles().get((op, itemsize, ranks, M, N, K))
    if known is not None:
        return known
    k = 128 // itemsize
    if op == "matmul_reduce_scatter":
        return Tiles(n=128, k=k, stages=4) if N <= 128 or K <= 1024 else Tiles(k=k)
    # The longer the gather beside the matmul, the larger its copies, the fewer the operands on their way, and the fewer
    # the rows that are awaited together.
    matmul_s, gather_s = M * N * K * itemsize / MATMUL, (ranks - 1) / ranks * M * K * itemsize / LINK
    rows, group = (64, 4) if gather_s > matmul_s / 2 else (32, 16)
    if N <= 128:
        return Tiles(n=128, k=k, stages=4, group=group, copy_rows=rows)
    return Tiles(k=k, group=group, copy_rows=rows)


def in_steps(itemsize: int, fast_accum: bool) -> bool:
    """Check that sums are made in float32 every 128 products, as float8's are unless the tensor cores may add all."""
    return itemsize == 1 and not fast_accum


WIDE = 192
"""Columns of a tile that is added up in steps, where that leaves few of them unused and the kernel is specialised:
wider than 128, since an H100 reads operands from its L2 cache no faster than such tiles are multiplied."""
LINK = 340e9
"""Bytes per second to and from all peers of an H200 together (collective_matmuls.jsonl of benchmarks/results)."""
MATMUL = 700e12
"""FLOP per second of a large bf16 matmul on an H200."""


@cache
def measured_tiles() -> dict[tuple[str, int, int, int, int, int], Tiles]:
    """Return the tiles of `tiles.toml`, by operator, bytes of an element, ranks and M, N, K."""
    rows = tomllib.loads(files(__package__).joinpath("tiles.toml").read_text())["tiles"]
    shape = ("op", "itemsize", "ranks", "M", "N", "K")
    return {
        tuple(row[key] for key in shape): Tiles(**{key: row[key] for key in row if key not in shape}) for row in rows
    }
