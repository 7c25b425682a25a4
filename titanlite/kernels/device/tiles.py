"""The tiles of a collective matmul, by shape: a table of measured shapes, and a rule for all other shapes.

`tiles.toml` has the best tiles that `scripts/bench/collective_matmul.py --tune` found. It is part of the package, so
that nothing is tuned at run time and all ranks choose the same tiles.
"""

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class Tiles:
    """Sizes of a kernel's tiles and of its copies.

    `group` limits the rows that concurrent tiles read from memory, so that a GPU at its power limit runs faster.
    """

    m: int = 128  # rows of a tile
    n: int = 256  # columns of a tile
    k: int = 64  # elements of the contracted dim in one step
    warps: int = 8  # of a thread block
    stages: int = 3  # steps loaded at once (general kernels; specialised kernels load as many as fit)
    group: int = 16  # blocks of rows that share a pass over all columns (unused by the general matmul → reduce-scatter)
    copiers: int = 48  # thread blocks that copy before they compute (general all-gather)
    copy_rows: int = 32  # rows of 128 bytes in one copy (specialised all-gather)
    plain: bool = False  # use NCCL and cuBLAS one after the other, because they are faster than a fused kernel
    specialised: bool = True  # use the kernel with specialised warps if the shape allows it

    def narrow(self) -> "Tiles":
        """Return tiles for the general kernels, whose sizes must be powers of two: 128 columns instead of 192."""
        return replace(self, n=128) if self.n == WIDE else self


@cache
def tiles(
    op: str, itemsize: int, ranks: int, M: int, N: int, K: int, fast_accum: bool = False, out_itemsize: int = 2
) -> Tiles:
    """Choose the tiles for `[M, K] @ [K, N]`, the product that each rank of a collective matmul computes.

    Args:
        op: "all_gather_matmul" or "matmul_reduce_scatter".
        itemsize: bytes of an operand's element.
        ranks: number of ranks of the group.
        M, N, K: M counts the rows of all ranks.
        fast_accum: whether float8 products are added in tensor cores alone, with less precision than float32.
        out_itemsize: bytes of a result's element.
    """
    if in_steps(itemsize, fast_accum) or out_itemsize > 2:
        # A tile takes registers for a second sum, of one step, or in float32 more shared memory to be stored.
        wide = out_itemsize == 2 and -N % WIDE <= N / 20
        return replace(tiles(op, itemsize, ranks, M, N, K, True), n=WIDE if wide else 128, stages=4)
    known = measured_tiles().get((op, itemsize, ranks, M, N, K))
    if known is not None:
        return known
    k = 128 // itemsize
    if op == "matmul_reduce_scatter":
        return Tiles(n=128, k=k, stages=4) if N <= 128 or K <= 1024 else Tiles(k=k)
    # If the gather takes long compared with the matmul, copies are larger, and fewer rows are awaited together.
    matmul_s, gather_s = M * N * K * itemsize / MATMUL, (ranks - 1) / ranks * M * K * itemsize / LINK
    rows, group = (64, 4) if gather_s > matmul_s / 2 else (32, 16)
    if N <= 128:
        return Tiles(n=128, k=k, stages=4, group=group, copy_rows=rows)
    return Tiles(k=k, group=group, copy_rows=rows)


def in_steps(itemsize: int, fast_accum: bool) -> bool:
    """Return whether each sum of 128 products is added in float32: it is for float8, except with `fast_accum`."""
    return itemsize == 1 and not fast_accum


WIDE = 192
"""Columns of a tile that is added up in steps (`in_steps`), if few columns stay unused and the kernel is specialised.
With 128 columns, an H100 would read the operands from its L2 cache no faster than it multiplies them."""
LINK = 340e9
"""Bytes per second between an H200 and all its peers together (collective_matmuls.jsonl of benchmarks/results)."""
MATMUL = 700e12
"""FLOP per second of a large bf16 matmul on an H200."""


@cache
def measured_tiles() -> dict[tuple[str, int, int, int, int, int], Tiles]:
    """Return the tiles of `tiles.toml`, by (operator, bytes of an operand's element, ranks, M, N, K)."""
    rows = tomllib.loads(files(__package__).joinpath("tiles.toml").read_text())["tiles"]
    shape = ("op", "itemsize", "ranks", "M", "N", "K")
    return {
        tuple(row[key] for key in shape): Tiles(**{key: row[key] for key in row if key not in shape}) for row in rows
    }
