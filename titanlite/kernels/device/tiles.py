"""The tiles of a collective matmul, by shape: a table of measured shapes, and a rule for all others.

`tiles.toml` has what `scripts/bench/collective_matmul.py --tune` found best. It is part of the package, so that nothing
is tuned at run time and all ranks choose the same tiles.
"""

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class Tiles:
    """Sizes of a kernel's tiles and of its copies.

    In groups of rows, concurrent tiles read few operands from memory, so that a GPU at its power limit runs faster.
    """

    m: int = 128  # rows of a tile
    n: int = 256  # columns
    k: int = 64  # of the contracted dim, in one step
    warps: int = 8  # per thread block
    stages: int = 3  # steps loaded at once (general kernels; a specialised one has as many as fit)
    group: int = 16  # blocks of rows that share a pass over all columns (not the general matmul → reduce-scatter)
    copiers: int = 48  # thread blocks that copy first (general all-gather)
    copy_rows: int = 32  # rows of 128 bytes in one copy (specialised all-gather)
    plain: bool = False  # use no kernel: NCCL and cuBLAS one after the other are faster
    specialised: bool = True  # use the kernel with specialised warps, if the shape allows it

    def narrow(self) -> "Tiles":
        """Return tiles for the general kernels, whose sizes are powers of two."""
        return replace(self, n=128) if self.n == WIDE else self


@cache
def tiles(
    op: str, itemsize: int, ranks: int, M: int, N: int, K: int, fast_accum: bool = False, out_itemsize: int = 2
) -> Tiles:
    """Choose the tiles for the whole product of `[M, K] @ [K, N]`.

    Args:
        op: "all_gather_matmul" or "matmul_reduce_scatter".
        itemsize: bytes of an operand's element.
        ranks: of the group.
        M, N, K: sizes of the product.
        fast_accum: whether tensor cores alone add float8 products.
        out_itemsize: bytes of a result's element.
    """
    if in_steps(itemsize, fast_accum) or out_itemsize > 2:
        # A step's sum and the whole sum both take registers; or a tile to be stored takes twice the shared memory.
        wide = out_itemsize == 2 and -N % WIDE <= N / 20
        return replace(tiles(op, itemsize, ranks, M, N, K, True), n=WIDE if wide else 128, stages=4)
    known = measured_tiles().get((op, itemsize, ranks, M, N, K))
    if known is not None:
        return known
    k = 128 // itemsize
    if op == "matmul_reduce_scatter":
        return Tiles(n=128, k=k, stages=4) if N <= 128 or K <= 1024 else Tiles(k=k)
    # The longer the gather takes beside the matmul, the larger are its copies, and the fewer rows are awaited together.
    matmul_s, gather_s = M * N * K * itemsize / MATMUL, (ranks - 1) / ranks * M * K * itemsize / LINK
    rows, group = (64, 4) if gather_s > matmul_s / 2 else (32, 16)
    if N <= 128:
        return Tiles(n=128, k=k, stages=4, group=group, copy_rows=rows)
    return Tiles(k=k, group=group, copy_rows=rows)


def in_steps(itemsize: int, fast_accum: bool) -> bool:
    """Check that each 128 products are added in float32, as in float8 unless tensor cores may add all."""
    return itemsize == 1 and not fast_accum


WIDE = 192
"""Columns of a tile that is added up in steps, if that leaves few columns unused and the kernel is specialised: wider
than 128, since an H100 reads operands of narrower tiles from its L2 cache no faster than it multiplies them."""
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
