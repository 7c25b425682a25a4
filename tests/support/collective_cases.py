"""The cases of the two collective matmuls as data, and the one body that checks them, on gloo as on NCCL.

Every rank makes the operands of all ranks of its group from seeds, works out in float64 what it has to get, and
compares. A case is checked twice:

    exact   operands of -1, 0 and 1, so few that no sum leaves the integers that bfloat16 holds: whatever is accumulated
            and rounded where, each number and each gradient has one right value, and nothing else passes
    normal  normal numbers, which must be right up to the roundings that the operator promises; see `Roundings`

Sizes are axis letters, small on "cpu" and of a few tiles on "cuda"; capitals divide by 2, 3, 4 and 8 ranks.
"""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch._dynamo  # the first call of an operator imports it: once here, not in every forked rank
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from titanlite.kernels import all_gather_matmul as gather_stem
from titanlite.kernels import matmul_reduce_scatter as scatter_stem
from titanlite.kernels.lowering import lowered
from titanlite.kernels.products import FLOAT8, GatherCall, ScatterCall, out_dtype_of, out_shapes, scales_travel
from titanlite.kernels.shapes import split

E4M3, E5M2 = FLOAT8
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

# Lower case: ragged. On "cuda", rows of k, n and m numbers are whole multiples of 16 bytes and of no tile; those of x,
# y and z are neither; T and K are in whole tiles on every rank. Float8 that is added up in steps has wide tiles for N,
# P and w, of which w fills the last but in part, and narrow ones for n.
SIZES = {
    device: dict(zip(["T", "M", "S", "K", "N", "P", "m", "s", "k", "n", "w", "x", "y", "z"], numbers, strict=True))
    for device, numbers in {
        "cpu": (24, 24, 24, 24, 24, 48, 22, 9, 18, 14, 10, 7, 5, 11),
        "cuda": (3072, 768, 384, 3072, 384, 192, 600, 200, 336, 208, 568, 333, 77, 131),
    }.items()
}
EXACT = 256  # integers up to this one are bfloat16, float16, float32 and float64


def sizes(text: str, device: str) -> list[int]:
    """A shape, such as "2 S K", in numbers."""
    return [int(axis) if axis.isdigit() else SIZES[device][axis] for axis in text.split()]


@dataclass(frozen=True, kw_only=True)
class _Case:
    dtype: torch.dtype = F64
    other_dtype: torch.dtype | None = None
    out_dtype: torch.dtype | None = None
    bias: bool = False
    bias_dtype: torch.dtype | None = None  # the result's, if None
    memory: str = "contiguous"
    scale_of: str = "tensor"
    other_scale_of: str = "tensor"
    devices: tuple[str, ...] = ("cpu", "cuda")


@dataclass(frozen=True)
class Gather(_Case):
    """A case of `all_gather_matmul`."""

    id: str
    whole: str  # shape of G
    dim: int
    others: tuple[str, ...]
    form: str = "left"


@dataclass(frozen=True)
class Scatter(_Case):
    """A case of `matmul_reduce_scatter`, whose others are on the right."""

    id: str
    rows: str  # the dims before N
    inner: tuple[str, ...]  # K of each product
    dim: int
    columns: str = "N"


Case = Gather | Scatter

_GATHERS = [
    Gather("rows", "M K", 0, ("K N",)),
    Gather("rows-negative-dim", "M K", -2, ("K N",)),
    Gather("contracted", "M K", 1, ("K N",)),
    Gather("contracted-negative-dim", "2 S K", -1, ("K N",)),
    Gather("whole-tiles", "T K", 0, ("K N",)),
    Gather("whole-tiles-batch", "2 T K", 1, ("K N", "K P"), bias=True),
    Gather("whole-tiles-transposed", "T K", 0, ("K N",), memory="transposed"),
    Gather("no-product", "M K", 0, ()),
    Gather("three-products", "M K", 0, ("K N", "K P", "K 8")),
    Gather("one-column", "M K", 0, ("K 1",)),
    Gather("no-column", "M K", 0, ("K 0",)),
    Gather("no-row", "0 K", 0, ("K N",), bias=True),
    Gather("bias", "M K", 0, ("K N",), bias=True),
    Gather("contracted-bias", "M K", 1, ("K N", "K P"), bias=True),
    Gather("three-products-bias", "1 S K", 1, ("K N", "K P", "K N"), bias=True),
    Gather("batch-1", "1 S K", 1, ("K N",)),
    Gather("batch-2", "2 S K", 1, ("K N", "K P")),
    Gather("batch-3", "3 S K", -2, ("K N",)),
    Gather("batch-gathered", "S 3 K", 0, ("K N",)),
    Gather("batch-1-contracted", "1 S K", 2, ("K N", "K P")),
    Gather("four-dims-0", "S 2 3 K", 0, ("K N",)),
    Gather("four-dims-1", "2 S 3 K", 1, ("K N",)),
    Gather("four-dims-2", "2 3 S K", 2, ("K N",), bias=True),
    Gather("four-dims-1-of-one", "1 S 1 K", 1, ("K N",)),
    Gather("four-dims-contracted", "2 1 S K", -1, ("K N", "K P")),
    Gather("ragged-rows", "m K", 0, ("K N", "K n")),
    Gather("ragged-batch", "2 s k", 1, ("k n",), bias=True),
    Gather("ragged-contracted", "M k", 1, ("k n",)),
    Gather("ragged-batch-contracted", "2 s k", 2, ("k N", "k n")),
    Gather("odd", "x y", 0, ("y z", "y x")),
    Gather("odd-contracted", "3 x z", 2, ("z y",), bias=True),
    Gather("five-rows", "5 K", 0, ("K N",)),
    Gather("one-row", "1 K", 0, ("K N", "K P")),
    Gather("one-row-of-each-sequence", "3 1 K", 1, ("K N",), bias=True),
    Gather("one-column-contracted", "M 1", 1, ("1 N",)),
    Gather("transposed", "M K", 0, ("K N", "K P"), memory="transposed"),
    Gather("transposed-batch", "2 S K", 1, ("K N",), memory="transposed"),
    Gather("swapped-batch", "3 S K", 1, ("K N",), memory="swapped"),
    Gather("padded", "2 S K", 1, ("K N", "K P"), memory="padded"),
    Gather("sliced-contracted", "M K", 1, ("K N",), memory="sliced", bias=True),
    Gather("sliced-four-dims", "2 3 S K", 2, ("K N",), memory="sliced"),
    Gather("right", "K N", 0, ("M K",), "right"),
    Gather("right-columns", "K N", 1, ("M K",), "right"),
    Gather("right-bias", "K N", -2, ("M K", "S K"), "right", bias=True),
    Gather("right-of-batches", "K N", 0, ("2 S K", "3 S K"), "right"),
    Gather("right-of-four-dims", "K N", -1, ("2 1 S K", "M K"), "right", bias=True),
    Gather("right-ragged", "k n", 0, ("m k", "s k"), "right"),
    Gather("right-ragged-columns", "k n", 1, ("m k",), "right", bias=True),
    Gather("right-odd", "y z", 1, ("x y",), "right"),
    Gather("right-one-row", "1 N", 0, ("M 1",), "right"),
    Gather("right-transposed", "K N", 0, ("M K", "2 S K"), "right", memory="transposed"),
    Gather("right-sliced", "K N", 1, ("M K",), "right", memory="sliced"),
    Gather("left_t", "K M", 0, ("K N",), "left_t"),
    Gather("left_t-columns", "K M", 1, ("K N", "K P"), "left_t", bias=True),
    Gather("left_t-ragged", "k m", 0, ("k n",), "left_t", bias=True),
    Gather("left_t-ragged-columns", "k m", -1, ("k n", "k N"), "left_t"),
    Gather("left_t-odd", "y x", 0, ("y z",), "left_t"),
    Gather("left_t-transposed", "K M", 0, ("K N",), "left_t", memory="transposed"),
    Gather("left_t-padded", "K M", 1, ("K N",), "left_t", memory="padded"),
    Gather("right_t", "N K", 0, ("M K",), "right_t"),
    Gather("right_t-contracted", "N K", 1, ("M K", "S K"), "right_t", bias=True),
    Gather("right_t-of-batches", "N K", 0, ("2 S K", "1 3 S K"), "right_t", bias=True),
    Gather("right_t-ragged", "n k", 0, ("m k",), "right_t"),
    Gather("right_t-ragged-contracted", "n k", -1, ("2 s k",), "right_t"),
    Gather("right_t-odd", "z y", 1, ("x y",), "right_t"),
    Gather("right_t-transposed", "N K", 0, ("M K",), "right_t", memory="transposed"),
    Gather("right_t-sliced", "N K", 1, ("2 S K",), "right_t", memory="sliced"),
]

_GATHERS_OF_A_DTYPE = [
    Gather("float16", "2 S K", 1, ("K N", "K P"), dtype=F16, bias=True),
    Gather("float16-contracted", "M k", 1, ("k n",), dtype=F16),
    Gather("float16-right", "K N", 0, ("M K",), "right", dtype=F16),
    Gather("float32", "2 S K", 1, ("K N",), dtype=F32, bias=True),
    Gather("bfloat16-to-float32", "M K", 0, ("K N",), dtype=BF16, out_dtype=F32, bias=True),
    Gather("bfloat16-to-float32-contracted", "2 s k", 2, ("k n",), dtype=BF16, out_dtype=F32),
    Gather("bfloat16-to-float32-right", "K N", 0, ("2 S K",), "right", dtype=BF16, out_dtype=F32),
    Gather("bfloat16-float32-bias", "2 S K", 1, ("K N", "K P"), dtype=BF16, bias=True, bias_dtype=F32),
    Gather("float64-float32-bias", "M K", 1, ("K N",), dtype=F64, bias=True, bias_dtype=F32),
    Gather("float16-to-bfloat16", "M K", 0, ("K N",), dtype=F16, out_dtype=BF16),
    Gather("e4m3", "M K", 0, ("K N",), dtype=E4M3),
    Gather("e4m3-e5m2", "2 S K", 1, ("K N", "K P"), dtype=E4M3, other_dtype=E5M2),
    Gather("e5m2-e4m3", "2 S K", 1, ("K N", "K P"), dtype=E5M2, other_dtype=E4M3, bias=True),
    Gather("e5m2", "M K", 0, ("K N",), dtype=E5M2, devices=("cpu",)),  # cuBLAS has no product of two E5M2
    Gather("e4m3-float32-bias", "M K", 0, ("K N", "K P"), dtype=E4M3, bias=True, bias_dtype=F32, scale_of="row"),
    Gather("e4m3-to-float32", "M K", 0, ("K N",), dtype=E4M3, out_dtype=F32),
    Gather("e4m3-to-float16", "M K", 1, ("K N",), dtype=E4M3, out_dtype=F16, bias=True),
    Gather("e4m3-contracted", "2 S K", 2, ("K N", "K P"), dtype=E4M3, bias=True),
    Gather("e4m3-ragged", "m K", 0, ("K N",), dtype=E4M3),
    Gather("e4m3-ragged-batch", "2 s K", 1, ("K n",), dtype=E4M3, scale_of="row", other_scale_of="row"),
    Gather("e4m3-odd", "x y", 0, ("y z",), dtype=E4M3, scale_of="row", other_scale_of="row", devices=("cpu",)),
    Gather("e4m3-one-row", "1 K", 0, ("K N",), dtype=E4M3, scale_of="row", other_scale_of="row"),
    Gather("e4m3-one-row-by-shard", "1 K", 0, ("K N",), dtype=E4M3, scale_of="shard"),
    Gather("e4m3-whole-tiles", "T K", 0, ("K w",), dtype=E4M3, bias=True, scale_of="row", other_scale_of="row"),
    Gather("e4m3-narrow-tiles", "T K", 0, ("K n",), dtype=E4M3, bias=True, scale_of="row", other_scale_of="row"),
    Gather("e4m3-transposed", "M K", 0, ("K N",), dtype=E4M3, memory="transposed"),
    Gather("e4m3-padded-by-row", "2 S K", 1, ("K N",), dtype=E4M3, memory="padded", scale_of="row"),
    Gather("e4m3-by-shard", "M K", 0, ("K N", "K P"), dtype=E4M3, scale_of="shard"),
    Gather("e4m3-by-shard-and-row", "M K", 0, ("K N",), dtype=E4M3, scale_of="shard", other_scale_of="row"),
    Gather("e4m3-by-shard-batch", "3 S K", 1, ("K N",), dtype=E4M3, scale_of="shard", bias=True),
    Gather("e4m3-by-shard-four-dims", "2 S 3 K", 1, ("K N",), dtype=E4M3, scale_of="shard"),
    Gather("e4m3-by-shard-ragged", "2 s K", 1, ("K N",), dtype=E4M3, other_dtype=E5M2, scale_of="shard"),
    Gather("e4m3-by-row", "M K", 0, ("K N", "K P"), dtype=E4M3, scale_of="row", other_scale_of="row"),
    Gather("e4m3-by-row-and-tensor", "M K", 0, ("K N",), dtype=E4M3, scale_of="row"),
    Gather("e4m3-by-tensor-and-row", "2 S K", 1, ("K N",), dtype=E4M3, other_scale_of="row"),
    Gather("e4m3-by-row-batch", "2 S K", -2, ("K N", "K P"), dtype=E4M3, scale_of="row", other_scale_of="row"),
    Gather("e5m2-by-row-four-dims", "2 3 S K", 2, ("K N",), dtype=E5M2, other_dtype=E4M3, scale_of="row"),
    Gather("e4m3-by-row-contracted", "M K", 1, ("K N",), dtype=E4M3, scale_of="row", other_scale_of="row"),
    Gather("e4m3-by-row-batch-contracted", "2 S K", -1, ("K N",), dtype=E4M3, scale_of="row"),
    Gather("e4m3-by-row-to-float32", "M K", 0, ("K N",), dtype=E4M3, scale_of="row", out_dtype=F32),
    Gather("e4m3-right", "K N", 0, ("M K", "2 S K"), "right", dtype=E4M3),
    Gather("e4m3-e5m2-right", "K N", 0, ("M K",), "right", dtype=E4M3, other_dtype=E5M2, other_scale_of="row"),
    Gather("e4m3-right-columns", "K N", 1, ("2 S K",), "right", dtype=E4M3, other_scale_of="row", bias=True),
    Gather("e4m3-left_t", "K M", 0, ("K N",), "left_t", dtype=E4M3),
    Gather("e5m2-left_t-columns", "K M", 1, ("K N",), "left_t", dtype=E5M2, other_dtype=E4M3, other_scale_of="row"),
    Gather("e4m3-right_t", "N K", 0, ("M K", "2 S K"), "right_t", dtype=E4M3),
    Gather("e4m3-right_t-by-shard", "N K", 0, ("M K", "S K"), "right_t", dtype=E4M3, scale_of="shard"),
    Gather("e4m3-right_t-by-row", "N K", 0, ("2 S K",), "right_t", dtype=E4M3, scale_of="row", other_scale_of="row"),
    Gather("e4m3-right_t-by-row-contracted", "N K", 1, ("M K",), "right_t", dtype=E4M3, scale_of="row", bias=True),
]

_SCATTERS = [
    Scatter("rows", "M", ("K",), 0),
    Scatter("rows-negative-dim", "M", ("K",), -2),
    Scatter("columns", "M", ("K",), 1),
    Scatter("columns-negative-dim", "2 S", ("K",), -1),
    Scatter("whole-tiles", "T", ("K",), 0),
    Scatter("whole-tiles-batch", "2 T", ("K",), 1, bias=True),
    Scatter("whole-tiles-transposed", "T", ("K",), 0, memory="transposed"),
    Scatter("two-products", "M", ("K", "P"), 0),
    Scatter("three-products-columns", "2 S", ("K", "P", "8"), 2),
    Scatter("bias", "M", ("K",), 0, bias=True),
    Scatter("columns-bias", "2 S", ("K",), 2, bias=True),
    Scatter("three-products-bias", "1 S", ("K", "P", "K"), 1, bias=True),
    Scatter("batch-1", "1 S", ("K",), 1),
    Scatter("batch-2", "2 S", ("K", "P"), 1),
    Scatter("batch-3", "3 S", ("K",), -2),
    Scatter("batch-scattered", "S 3", ("K",), 0),
    Scatter("batch-1-columns", "1 S", ("K", "P"), 2),
    Scatter("four-dims-0", "S 2 3", ("K",), 0),
    Scatter("four-dims-1", "2 S 3", ("K",), 1),
    Scatter("four-dims-2", "2 3 S", ("K", "P"), 2, bias=True),
    Scatter("four-dims-1-of-one", "1 S 1", ("K",), 1),
    Scatter("four-dims-columns", "2 1 S", ("K",), -1),
    Scatter("ragged-rows", "m", ("K",), 0),
    Scatter("ragged-batch", "2 s", ("k", "K"), 1, "n", bias=True),
    Scatter("ragged-columns", "M", ("k",), 1, "n"),
    Scatter("ragged-batch-columns", "2 s", ("k",), 2, "n", bias=True),
    Scatter("odd", "x", ("y", "x"), 0, "z"),
    Scatter("odd-columns", "3 x", ("z",), 2, "y", bias=True),
    Scatter("five-rows", "5", ("K",), 0),
    Scatter("one-row", "1", ("K",), 0, bias=True),
    Scatter("one-row-of-each-sequence", "3 1", ("K",), 1),
    Scatter("one-column", "M", ("K",), 1, "1", bias=True),
    Scatter("no-column", "M", ("K",), 0, "0"),
    Scatter("no-row", "0", ("K",), 0),
    Scatter("inner-0", "M", ("0",), 0, bias=True),
    Scatter("inner-1", "M", ("1",), 0),
    Scatter("transposed", "M", ("K", "P"), 0, memory="transposed"),
    Scatter("transposed-batch", "2 S", ("K",), 1, memory="transposed"),
    Scatter("swapped-batch", "3 S", ("K",), 1, memory="swapped"),
    Scatter("padded", "2 S", ("K",), 1, memory="padded", bias=True),
    Scatter("sliced-columns", "2 S", ("K", "P"), 2, memory="sliced"),
]

_SCATTERS_OF_A_DTYPE = [
    Scatter("float16", "2 S", ("K", "P"), 1, dtype=F16, bias=True),
    Scatter("float16-columns", "M", ("k",), 1, "n", dtype=F16),
    Scatter("float32", "2 S", ("K",), 1, dtype=F32, bias=True),
    Scatter("bfloat16-to-float32", "M", ("K",), 0, dtype=BF16, out_dtype=F32, bias=True),
    Scatter("bfloat16-to-float32-columns", "2 s", ("k", "K"), 2, "n", dtype=BF16, out_dtype=F32),
    Scatter("bfloat16-float32-bias", "2 S", ("K", "P"), 1, dtype=BF16, bias=True, bias_dtype=F32),
    Scatter("float16-to-bfloat16", "M", ("K", "P"), 0, dtype=F16, out_dtype=BF16),
    Scatter("e4m3", "M", ("K",), 0, dtype=E4M3),
    Scatter("e4m3-e5m2", "2 S", ("K", "P"), 1, dtype=E4M3, other_dtype=E5M2),
    Scatter("e5m2-e4m3-columns", "2 S", ("K", "P"), 2, dtype=E5M2, other_dtype=E4M3, bias=True),
    Scatter("e5m2", "M", ("K",), 0, dtype=E5M2, devices=("cpu",)),
    Scatter("e4m3-to-float32", "M", ("K", "P"), 0, dtype=E4M3, out_dtype=F32),
    Scatter("e4m3-ragged", "m", ("K",), 0, dtype=E4M3, scale_of="row", other_scale_of="row"),
    Scatter("e4m3-ragged-columns", "2 S", ("K",), 2, "n", dtype=E4M3, other_scale_of="row"),
    Scatter("e4m3-odd", "x", ("y", "x"), 0, "z", dtype=E4M3, scale_of="row", devices=("cpu",)),
    Scatter("e4m3-whole-tiles", "T", ("K",), 0, "w", dtype=E4M3, scale_of="row", other_scale_of="row"),
    Scatter("e4m3-narrow-tiles", "T", ("K",), 0, "n", dtype=E4M3, scale_of="row", other_scale_of="row"),
    Scatter("e4m3-transposed", "M", ("K",), 0, dtype=E4M3, memory="transposed"),
    Scatter("e4m3-by-row", "M", ("K",), 0, dtype=E4M3, scale_of="row", other_scale_of="row", bias=True),
    Scatter("e4m3-by-row-batch", "2 S", ("K", "P"), 1, dtype=E4M3, scale_of="row", other_scale_of="row"),
    Scatter("e4m3-by-row-columns", "2 S", ("K",), -1, dtype=E4M3, scale_of="row", other_scale_of="row"),
    Scatter("e4m3-by-row-and-tensor", "M", ("K", "P"), 0, dtype=E4M3, scale_of="row"),
    Scatter("e4m3-by-tensor-and-row", "2 3 S", ("K",), 2, dtype=E4M3, other_scale_of="row"),
]


def _of_each_dtype(cases: list, device: str) -> list:
    """The same cases in the dtypes that show most: device code computes no float64."""
    named = {"cpu": [("float64", F64), ("bfloat16", BF16)], "cuda": [("bfloat16", BF16)]}[device]
    return [replace(case, id=f"{case.id}-{name}", dtype=dtype) for case in cases for name, dtype in named]


def gathers(device: str) -> list[Gather]:
    """Every case of `all_gather_matmul` on a device."""
    return [case for case in _of_each_dtype(_GATHERS, device) + _GATHERS_OF_A_DTYPE if device in case.devices]


def scatters(device: str) -> list[Scatter]:
    """Every case of `matmul_reduce_scatter` on a device."""
    return [case for case in _of_each_dtype(_SCATTERS, device) + _SCATTERS_OF_A_DTYPE if device in case.devices]


def families(cases: list) -> dict[str, list]:
    """Cases by what they compute in and, for a gather, by form: to fork ranks takes longer than a case."""
    found: dict[str, list] = {}
    for case in cases:
        dtype = "float8" if case.dtype in FLOAT8 else str(case.dtype).removeprefix("torch.")
        found.setdefault(f"{case.form}-{dtype}" if isinstance(case, Gather) else dtype, []).append(case)
    return found


class Ranks(NamedTuple):
    """A process group: its name, the global ranks in it, and the index of this process among them."""

    name: str
    ranks: tuple[int, ...]
    me: int


def partitions(world: int) -> dict[str, list[tuple[int, ...]]]:
    """The groups that a case runs in: the whole world, two groups at once, and three ranks of four."""
    several: dict[str, list[tuple[int, ...]]] = {}
    if world >= 8:
        several = {"4-and-4": [(0, 1, 2, 3), (4, 5, 6, 7)], "3-of-4": [(0, 1, 3)]}
    elif world >= 4:
        several = {"2-and-2": [(0, 2), (1, 3)], "3-of-4": [(0, 1, 3)]}
    return {f"all-{world}": [tuple(range(world))], **several}


def groups(world: int) -> dict[str, Ranks]:
    """Those groups that this rank is in; all ranks must call this together."""
    return {name: own for name, parts in partitions(world).items() for own in own_groups(parts)}


def own_groups(parts: list[tuple[int, ...]]) -> list[Ranks]:
    """New groups of those ranks, which every rank makes in this order, without those that this rank is not in."""
    found: list[Ranks] = []
    for ranks in parts:
        group = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            assert isinstance(group, dist.ProcessGroup)
            found.append(Ranks(group.group_name, ranks, ranks.index(dist.get_rank())))
    return found


class Numbers:
    """Seeded operands. The same seed makes the same numbers on every rank."""

    def __init__(self, seed: str, device: str, terms: int | None, memory: str = "contiguous"):
        self._rng = torch.Generator(device).manual_seed(zlib.crc32(seed.encode()))
        self._device, self._memory, self._exact = device, memory, terms is not None
        # Of `terms` products of two numbers that are not 0 with probability p, the sum has variance terms·p² = 36.
        self._probability = min(0.5, 6 / math.sqrt(terms)) if terms else 0.0

    def operand(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        """Normal numbers, or the signs and zeros of an exact case."""
        numbers = torch.randn(shape, generator=self._rng, dtype=F64, device=self._device)
        if self._exact:
            numbers = numbers.sign() * (torch.rand(shape, generator=self._rng, device=self._device) < self._probability)
        return placed(numbers.to(dtype), self._memory)

    def scale(self, shape: list[int]) -> Tensor:
        """Scales in [0.5, 2), or 1 and 2."""
        numbers = 2 ** (2 * torch.rand(shape, generator=self._rng, device=self._device) - 1)
        return numbers.floor() + 1 if self._exact else numbers


class Zeros(Numbers):
    """Zeros, and scales of one, on a CPU whatever the sizes are for."""

    def __init__(self, seed: str, device: str, terms: int | None, memory: str = "contiguous"):
        self._memory = memory

    def operand(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        return placed(torch.zeros(shape, dtype=dtype), self._memory)

    def scale(self, shape: list[int]) -> Tensor:
        return torch.ones(shape)


def placed(x: Tensor, memory: str) -> Tensor:
    """The same numbers, lying in memory otherwise."""
    if x.dtype in FLOAT8:
        return placed(x.view(torch.uint8), memory).view(x.dtype)
    *rows, n = x.shape
    if memory == "transposed" and x.ndim > 1:
        return x.mT.contiguous().mT
    if memory == "swapped" and x.ndim > 2:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if memory == "sliced":
        return x.new_full((*rows, 2 * n), 77)[..., ::2].copy_(x)
    if memory == "padded":
        return x.new_full((*rows, n + 16), 77)[..., :n].copy_(x)
    return x


@dataclass
class Given:
    """What one rank passes to an operator, and what flows back into it."""

    operands: list[Tensor]  # those with a gradient, in the order of the operator's arguments
    scales: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)


class Roundings:
    """How far a result may be from float64's.

    Each bound follows from two facts, with u = eps/2 of the dtype in question:
        a number x rounded to it is off by u·|x| at most;
        K products summed in any order, with each of the sum's K - 1 additions rounded, are off by K·u·Σ|a·b| at most,
        up to the second order in u; a scale on either side, the product of both, and a bias are four roundings more.
    And from two about GPUs:
        tensor cores align float8 products to the largest, of which they keep 13 bits behind the point;
        cuBLAS may round before it adds a bias, where a product is not fused.
    """

    def __init__(self, case: Case, device: str):
        self.core = 2.0**-13 if case.dtype in FLOAT8 and device == "cuda" else 0.0
        self.on_gpu = device == "cuda"
        self.out_dtype = out_dtype_of(case.dtype, case.out_dtype)
        wide = F64 if case.dtype == self.out_dtype == F64 else F32
        self.u, self.wide = torch.finfo(self.out_dtype).eps / 2, torch.finfo(wide).eps / 2

    def product(self, truth: Tensor, size: Tensor, terms: int, bias: Tensor | None = None) -> Tensor:
        """One product, accumulated wide and rounded once. `size` is Σ|a·b|, with |bias|; `bias`: of a plain product."""
        accumulated = ((terms + 4) * 1.01 * self.wide + self.core) * size
        error = accumulated + self.u * (truth.abs() + accumulated)
        return error if bias is None or not self.on_gpu else error + self.u * (truth - bias).abs()

    def reduced(self, parts: list[Tensor], allowed: list[Tensor], bias: Tensor | None, *, once: bool) -> Tensor:
        """The sum over ranks of parts that are off by `allowed`, and a bias.

        `once`: summed wide and rounded once, which device code promises. Otherwise by R - 1 additions that each round,
        which is what a collective does: it multiplies no part's error by more than (1 + u)^(R - 1).
        """
        total, error = torch.stack(parts).sum(0), torch.stack(allowed).sum(0)
        size = torch.stack(parts).abs().sum(0) + error
        if once:
            error = error + len(parts) * 1.01 * self.wide * size
            error = error + self.u * (total.abs() + error)
        else:
            error = error + ((1 + self.u) ** (len(parts) - 1) - 1) * size
        if bias is not None:
            error = error + self.u * ((total + bias).abs() + error)
        return error


def rolled(x: Tensor, dim: int) -> Tensor:
    """Each of two ranks' rows where the other's belong."""
    return x.roll(x.shape[dim] // 2, dim)


def check_cases(cases: Sequence[Case], world: int, everywhere: bool = True) -> None:
    """Check cases on CPUs, in every group of a world of so many, or in the world and one other kind of group in turn.

    All ranks must call this together.
    """
    own, (whole, *parts) = groups(world), partitions(world)
    in_turn = [[whole, part] for part in parts] or [[whole]]
    kinds = [[whole, *parts] if everywhere else in_turn[n % len(in_turn)] for n in range(len(cases))]
    runs = [(case, name, own[name]) for case, names in zip(cases, kinds, strict=True) for name in names if name in own]
    problems = [f"{c.id}, {name}: {text}" for c, name, group in runs for text in check_case(c, "cpu", group)]
    assert not problems, "\n".join(problems)


def check_case(case: Case, device: str, group: Ranks, *, before: Callable[[], object] = lambda: None) -> list[str]:
    """Run a case on this rank of a group and return what is wrong with it.

    All ranks of the group must call this together. They stay in step whatever they find.

    Args:
        case: what to run.
        device: "cpu" or "cuda".
        group: where.
        before: called ahead of each run of an operator, and of its backward.
    """
    return [f"{kind}: {text}" for kind in ("exact", "normal") for text in _check(case, device, group, kind, before)]


def _check(case: Case, device: str, group: Ranks, kind: str, before: Callable[[], object]) -> list[str]:
    every = [given_of(case, device, group, r, kind) for r in range(len(group.ranks))]

    def run(given: Given) -> list[Tensor]:
        return run_case(case, device, given, group.name)

    truths = truths_of(case, every)
    wanted = truths(*(operand.double() for given in every for operand in given.operands))[group.me]
    fused = fused_calls()
    problems, outs = (_run_twice if kind == "normal" else _run_beside_fake)(run, every[group.me], before)
    fused = bool(fused_calls() - fused)
    if isinstance(case, Gather):
        problems += _compare_gathered(case, device, group, kind, every, outs, wanted, fused)
    else:
        problems += _compare_scattered(case, device, group, kind, every, outs, wanted, fused)
    return problems + _check_gradients(case, every, group.me, kind, run, truths, before)


def _compare_gathered(case: Gather, device, group, kind, every, outs, wanted, fused) -> list[str]:
    mine, n, problems = every[group.me], 1 + len(case.others), list[str]()
    shards = [given.operands[0].double() for given in every]
    problems += _compare("gathered", outs[0], torch.cat(shards, case.dim), 0, case.dtype)
    if kind == "normal":
        positive = [Given([t.double().abs() for t in g.operands], g.scales) for g in every]
        magnitudes = gather_truths(case, positive, [group.me])(*(t for g in positive for t in g.operands))[0]
    roundings, K = Roundings(case, device), contracted(case, device)
    if len(outs) != len(wanted):
        problems.append(f"{len(outs)} results, want {len(wanted)}")
    for out, truth in zip(outs[n:], wanted[n:], strict=False):
        problems += _compare("scales", out, truth, torch.zeros_like(truth), F32)  # moved, not computed
    for i, (out, truth) in enumerate(zip(outs[1:n], wanted[1:n], strict=True)):
        # Of several products only the first is fused.
        bias = mine.operands[n + i].double() if case.bias and (i or not fused) else None
        allowed = roundings.product(truth, magnitudes[i + 1], K, bias) if kind == "normal" else 0
        problems += _compare(f"product {i}", out, truth, allowed, roundings.out_dtype)
    return problems


def _compare_scattered(case: Scatter, device, group, kind, every, outs, wanted, fused) -> list[str]:
    roundings, allowed = Roundings(case, device), 0
    if kind == "normal":
        terms = sum(sizes(K, device)[0] for K in case.inner) + len(case.inner)
        parts = [partial_sum(case, given, given.operands) for given in every]
        magnitudes = [partial_sum(case, g, [t.double().abs() for t in g.operands]) for g in every]
        errors = [roundings.product(p, m, terms) for p, m in zip(parts, magnitudes, strict=True)]
        parts, errors = ([own_chunk(t, case.dim, group) for t in ts] for ts in (parts, errors))
        bias = every[group.me].operands[-1].double() if case.bias else None
        allowed = roundings.reduced(parts, errors, bias, once=fused)
    return _compare("sum", outs[0], wanted[0], allowed, roundings.out_dtype)


def fused_calls() -> int:
    """How many operators this process has run in device code."""
    return sum(n for how, n in lowered.items() if how.reason is None)


Run = Callable[[Given], list[Tensor]]


def _run_twice(run: Run, given: Given, before: Callable[[], object]) -> tuple[list[str], list[Tensor]]:
    """The results, which must be those of a second run to the bit."""
    before()
    outs = run(given)
    before()
    again = run(given)
    pairs = enumerate(zip(outs, again, strict=True))
    return [f"result {i}: two runs differ" for i, (a, b) in pairs if not torch.equal(_bytes(a), _bytes(b))], outs


def _run_beside_fake(run: Run, given: Given, before: Callable[[], object]) -> tuple[list[str], list[Tensor]]:
    """The results, which must be what the fake says, and lie as new tensors do."""
    before()
    outs, problems = run(given), []
    with FakeTensorMode() as mode:
        fakes = run(Given(*([mode.from_tensor(t) for t in ts] for ts in (given.operands, given.scales))))
    for i, (out, fake) in enumerate(zip(outs, fakes, strict=True)):
        seen, want = ((t.shape, t.stride(), t.dtype, t.device) for t in (out, fake))
        if seen != want:
            problems.append(f"result {i}: {seen} is real, {want} is fake")
        if out.stride() != torch.empty(out.shape, device="meta").stride():
            problems.append(f"result {i}: strides {out.stride()} of a result of shape {list(out.shape)}")
    return problems, outs


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8)


def _compare(name: str, got: Tensor, truth: Tensor, allowed: Tensor | float, dtype: torch.dtype) -> list[str]:
    """What is wrong with a result that may be off by `allowed`, element by element."""
    truth = truth.detach()
    if got.shape != truth.shape or got.dtype != dtype:
        return [f"{name}: {got.dtype}{list(got.shape)}, want {dtype}{list(truth.shape)}"]
    if not isinstance(allowed, Tensor) and truth.numel():
        assert truth.abs().max() <= EXACT or allowed, f"{name}: the case is not exact"
    off = (got.detach().double() - truth).abs()
    wrong = (~(off <= allowed)).nonzero()
    if not len(wrong):
        return []
    at = tuple(wrong[0].tolist())
    return [
        f"{name}: {len(wrong)} of {off.numel()} numbers are wrong; the first, at {list(at)}, is {got[at].item():.9g}, "
        f"want {truth[at].item():.9g}"
    ]


Truths = Callable[..., list[list[Tensor]]]


def _check_gradients(
    case: Case, every: list[Given], me: int, kind: str, run: Run, truths: Truths, before: Callable[[], object]
) -> list[str]:
    """Every operand's gradient, against that of all ranks' results at once in float64."""
    if case.dtype in FLOAT8 or not (kind == "exact" or case.dtype == F64):
        return []
    leaves = [t.detach().requires_grad_() for t in every[me].operands]
    before()
    outs = run(Given(leaves))
    before()
    got = torch.autograd.grad(outs, leaves, every[me].grads, allow_unused=True, materialize_grads=True)
    true_leaves = [[t.double().requires_grad_() for t in given.operands] for given in every]
    true_outs = truths(*(t for ts in true_leaves for t in ts))
    true_grads = [g.double() for given in every for g in given.grads]
    wanted = torch.autograd.grad([o for os in true_outs for o in os], true_leaves[me], true_grads)
    problems: list[str] = []
    for i, (grad, want) in enumerate(zip(got, wanted, strict=True)):
        # Sums of hundreds of terms of size one, in float64, are far within 1e-12; and rounded to the operand's dtype.
        rounded = torch.finfo(leaves[i].dtype).eps / 2 * want.abs()
        allowed = 0 if kind == "exact" else 1e-12 * (1 + want.abs()) + rounded
        problems += _compare(f"gradient of operand {i}", grad, want, allowed, leaves[i].dtype)
    return problems


def contracted(case: Gather, device: str) -> int:
    """K of a gather's products."""
    return sizes(case.whole, device)[-1 if case.form in ("left", "right_t") else 0]


def _numbers(case: Case, rank: int, kind: str, set_of: str, device: str, terms: int | None) -> Numbers:
    made = Zeros if kind == "zeros" else Numbers
    return made(f"{type(case).__name__} {case.id} {kind} {rank} {set_of}", device, terms, case.memory)


def gather_given(case: Gather, device: str, group: Ranks, r: int, kind: str, round: int = 0) -> Given:
    """What the group's rank r passes. Another round is another set of numbers."""
    whole = sizes(case.whole, device)
    others = [sizes(other, device) for other in case.others]
    left_side, n = case.form.startswith("left"), len(group.ranks)
    # The longest sum of all: along K forwards; along M, or along N over all products and ranks, backwards.
    lengths = [contracted(case, device), math.prod(whole) // contracted(case, device)]
    lengths += [n * sum(math.prod(other) // contracted(case, device) for other in others)]
    terms = max(lengths) if kind == "exact" else None
    rng = _numbers(case, group.ranks[r], kind, f"{round}", device, terms)
    shape = list(whole)
    shape[case.dim] = split(whole, case.dim, whole[case.dim], n).length(r)
    other_dtype = case.other_dtype or case.dtype
    shard = rng.operand(shape, case.dtype)
    operands = [shard, *(rng.operand(other, other_dtype) for other in others)]
    out_dtype = out_dtype_of(case.dtype, case.out_dtype)
    products = out_shapes(whole, operands[1:], case.form)
    if case.bias:
        operands += [rng.operand(product[-1:], case.bias_dtype or out_dtype) for product in products]
    given = Given(operands)
    if case.dtype in FLOAT8:
        last = case.dim % len(whole) == len(whole) - 1
        shared = case.scale_of == "tensor" or (case.scale_of == "row" and last)
        of = _numbers(case, group.ranks[0], kind, f"{round} of all", device, terms) if shared else rng
        given.scales = [of.scale([*shape[:-1], 1] if case.scale_of == "row" else [])]
        for other in others:
            rows = [1, other[-1]] if left_side else [*other[:-1], 1]
            given.scales.append(rng.scale(rows if case.other_scale_of == "row" else []))
    elif kind != "zeros":
        given.grads = [rng.operand(whole, case.dtype), *(rng.operand(product, out_dtype) for product in products)]
    return given


def gather_truths(case: Gather, every: list[Given], ranks) -> Truths:
    """The results of those ranks in float64, as a function of all ranks' operands in float64."""
    per_rank, n = len(every[0].operands), len(case.others)

    def truths(*leaves: Tensor) -> list[list[Tensor]]:
        of = [leaves[r * per_rank : (r + 1) * per_rank] for r in range(len(every))]
        gathered = torch.cat([operands[0] for operands in of], case.dim)
        valued = gathered
        scales: list[Tensor] = []
        if every[0].scales:
            scales = [given.scales[0].double() for given in every]
            if case.scale_of == "tensor" or scales[0].shape == (*gathered.shape[:-1], 1):
                valued = gathered * scales[0]
            else:
                valued = torch.cat([o[0] * scale for o, scale in zip(of, scales, strict=True)], case.dim)
        if case.form.endswith("_t"):
            valued = valued.mT
        results: list[list[Tensor]] = []
        for r in ranks:
            _, *rest = of[r]
            results.append([gathered])
            for i in range(n):
                other = rest[i] * every[r].scales[1 + i].double() if every[r].scales else rest[i]
                product = valued @ other if case.form.startswith("left") else other @ valued
                results[-1].append(product + rest[n + i] if case.bias else product)
            if every[0].scales and scales_travel(case.scale_of, case.dim, gathered.ndim):
                rows = [s.expand(*o[0].shape[:-1], 1) for o, s in zip(of, scales, strict=True)]
                results[-1].append(torch.cat(rows, case.dim))
        return results

    return truths


def scatter_given(case: Scatter, device: str, group: Ranks, r: int, kind: str, round: int = 0) -> Given:
    """What the group's rank r passes. Another round is another set of numbers."""
    rows, (N,) = sizes(case.rows, device), sizes(case.columns, device)
    inner, n = [sizes(K, device)[0] for K in case.inner], len(group.ranks)
    # The longest sum of all: along every K over all ranks forwards; along M or N backwards.
    terms = max(n * sum(inner), math.prod(rows), N) if kind == "exact" else None
    rng = _numbers(case, group.ranks[r], kind, f"{round}", device, terms)
    out_dtype = out_dtype_of(case.dtype, case.out_dtype)
    own = [*rows, N]
    own[case.dim] = split(own, case.dim, own[case.dim], n).length(r)
    operands = [rng.operand([*rows, K], case.dtype) for K in inner]
    operands += [rng.operand([K, N], case.other_dtype or case.dtype) for K in inner]
    if case.bias:
        operands.append(rng.operand(own[-1:], case.bias_dtype or out_dtype))
    if case.dtype not in FLOAT8:
        return Given(operands, grads=[] if kind == "zeros" else [rng.operand(own, out_dtype)])
    scales = [rng.scale([*rows, 1] if case.scale_of == "row" else []) for _ in inner]
    return Given(operands, scales + [rng.scale([1, N] if case.other_scale_of == "row" else []) for _ in inner])


def partial_sum(case: Scatter, given: Given, operands: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """One rank's sum of products in float64, before it is reduced."""
    n = len(case.inner)
    values = [t.double() for t in operands[: 2 * n]]
    if given.scales:
        values = [t * scale.double() for t, scale in zip(values, given.scales, strict=True)]
    return torch.stack([left @ right for left, right in zip(values[:n], values[n:], strict=True)]).sum(0)


def own_chunk(x: Tensor, dim: int, group: Ranks, r: int | None = None) -> Tensor:
    """What the group's rank r keeps of a whole tensor; this rank if None."""
    r, size = group.me if r is None else r, x.shape[dim]
    part = split(x.shape, dim, size, len(group.ranks))
    return x.narrow(dim, min(r * part.chunk, size), part.length(r))


def scatter_truths(case: Scatter, every: list[Given]) -> Truths:
    """Every rank's result in float64, as a function of all ranks' operands in float64."""
    per_rank = len(every[0].operands)

    def truths(*leaves: Tensor) -> list[list[Tensor]]:
        of = [leaves[r * per_rank : (r + 1) * per_rank] for r in range(len(every))]
        total = torch.stack([partial_sum(case, g, o) for g, o in zip(every, of, strict=True)]).sum(0)
        group = Ranks("", tuple(range(len(every))), 0)
        chunks = [own_chunk(total, case.dim, group, r) for r in range(len(every))]
        return [[chunk + o[-1] if case.bias else chunk] for chunk, o in zip(chunks, of, strict=True)]

    return truths


class Prepared(NamedTuple):
    """A call with exact operands, and what it must return."""

    given: Given
    call: Callable[[Given], list[Tensor]]
    wanted: list[Tensor]


def given_of(case: Case, device: str, group: Ranks, r: int, kind: str, round: int = 0) -> Given:
    """What the group's rank r passes to a case's operator."""
    if isinstance(case, Gather):
        return gather_given(case, device, group, r, kind, round)
    return scatter_given(case, device, group, r, kind, round)


def call_of(case: Case, device: str, given: Given, group: str) -> GatherCall | ScatterCall:
    """All arguments of a case's operator."""
    operands, scales = given.operands, given.scales
    if isinstance(case, Gather):
        n, size = 1 + len(case.others), sizes(case.whole, device)[case.dim]
        how = case.form, operands[n:], scales[0] if scales else None, case.scale_of, scales[1:], case.out_dtype, False
        return GatherCall(operands[0], operands[1:n], case.dim, size, group, *how)
    n, bias = len(case.inner), operands[-1] if case.bias else None
    rest = bias, scales[:n], scales[n:], case.out_dtype, False
    return ScatterCall(operands[:n], operands[n : 2 * n], case.dim, group, *rest)


def run_case(case: Case, device: str, given: Given, group: str) -> list[Tensor]:
    """Call a case's operator."""
    call = call_of(case, device, given, group)._asdict()
    if isinstance(case, Gather):
        return gather_stem.all_gather_matmul(**call)
    return [scatter_stem.matmul_reduce_scatter(**call)]


def truths_of(case: Case, every: list[Given]) -> Truths:
    """Every rank's results in float64, as a function of all ranks' operands in float64."""
    return gather_truths(case, every, range(len(every))) if isinstance(case, Gather) else scatter_truths(case, every)


def prepared(case: Case, device: str, group: Ranks, round: int) -> Prepared:
    """A round of a case; each has other numbers."""
    every = [given_of(case, device, group, r, "exact", round) for r in range(len(group.ranks))]
    wanted = truths_of(case, every)(*(operand.double() for given in every for operand in given.operands))[group.me]
    return Prepared(every[group.me], lambda given: run_case(case, device, given, group.name), wanted)
