"""The device code, compiled for sm_90 without a GPU: the orderings that the protocol rests on are in its PTX.

Compilers move and drop instructions; a missing fence is a wrong number once a month. Each rule below holds on every
path through a kernel (`ptx.py` says what the rules mean). The last tests take instructions out of the compiled kernels
and see the rules fail.
"""

import platform
import re
import sys
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch

if sys.platform != "linux" or platform.machine() != "x86_64":
    pytest.skip("Triton's assembler is there on Linux x86-64 only", allow_module_level=True)
# There, the extra `dev` brings Triton: without it this file is an error and not skipped.

import triton

from tests.support.compile_only import IS_3_8, check_resources, compiling, fake_channel, require_products_in_flight
from tests.support.needs import slow
from tests.support.ptx import (
    JOIN,
    After,
    Around,
    Before,
    Has,
    Never,
    Rule,
    moved,
    problems,
    replaced,
    without,
    without_before,
    without_behind,
)
from titanlite.kernels.collectives import Group
from titanlite.kernels.device import all_gather_matmul as gather_stem
from titanlite.kernels.device import gather_plan, shard_exchange
from titanlite.kernels.device import matmul_reduce_scatter as scatter_stem
from titanlite.kernels.device.tiles import Tiles, measured_tiles
from titanlite.kernels.products import GatherCall, ScatterCall

RANKS = 4
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
PLAIN = Tiles(specialised=False)

# --- rules -------------------------------------------------------------------------------------------------------

BARRIER = r"bar\.sync\b|barrier\.sync\b"
WARP_SYNC = r"bar\.warp\.sync\b"
STORE = r"st\.global\b"
STORE_WORD = r"st\.global\.b32\b"  # counters and epoch; what a kernel says that gives up are words of 64 bits
FENCE_SYS = r"fence\.acq_rel\.sys\b"
SIGNAL = r"st\.relaxed\.sys\b"
SEE_SYS = r"ld\.acquire\.sys\b"
SEE_GPU = r"ld\.acquire\.gpu\b"
TICKET = r"atom\.global\.gpu\.relaxed\b"
CLAIM = r"atom\.relaxed\.gpu\.global\b"  # of copies; by one lane, without a wait for the result
ADD_ACQ_REL = r"(atom|red)\.global\.gpu\.acq_rel\b"
ADD_RELEASE = r"(atom|red)\.global\.gpu\.release\b"
CLOCK = r"mov\.u64 .*%globaltimer"
NON_COHERENT = r"ld\.global(\.\w+)*\.nc\b"
STAGED = r"ld\.global\.L1::evict_first\b"  # parts that ranks have pushed

PROXY = r"fence\.proxy\.async\.global\b"
PROXY_SHARED = r"fence\.proxy\.async\.shared::cta\b"
TMA_LOAD = r"cp\.async\.bulk\.tensor\.\dd\.shared::\w+\.global\b"
LOAD_GATHERED = TMA_LOAD + r".* of 5$"  # the second of the specialised gather's matrices, five parameters each
TMA_STORE = r"cp\.async\.bulk\.tensor\.\dd\.global\.shared::cta\b"
STORE_SLOT = TMA_STORE + r".* of [3-9]\d$"  # the gather's own slot, one of the last matrices
COMMIT = r"cp\.async\.bulk\.commit_group\b"
# Not under a predicate: the thread that has issued the stores is to be among those that wait. And not ".read", which
# is for buffers that are filled again: it says nothing about where the bytes go.
WRITTEN = r"(?<!\d )cp\.async\.bulk\.wait_group\s+"
ALL_WRITTEN = WRITTEN + r"0\b"
READ = r"(?<!\d )cp\.async\.bulk\.wait_group\.read\s+"

ARRIVED = r"mbarrier\.try_wait\b"
ARRIVE = r"mbarrier\.arrive\b"
PRODUCT = r"wgmma\.mma_async\b"
PRODUCED = r"wgmma\.wait_group\.sync\.aligned\s+"
# By all lanes, into one of several words: what one lane claims for the others is stored under a predicate, and what
# the roles are started with goes to fixed addresses.
WRITE_TILE = r"(?<!\d )st\.shared(::cta)?\.b32\s+\[\s*%r"
READ_TILE = r"ld\.shared(::cta)?\.b32\b"
FILL = r"stmatrix\b"

# One block tells the peers that what has been stored is there, and waits for theirs. Who waits before it signals may be
# waited for; and with no wait behind the signal, the next kernel would begin before the peers are there.
_TOLD = (
    Before(SIGNAL, FENCE_SYS, f"{STORE}|{TMA_STORE}"),
    Before(SEE_SYS, SIGNAL),
    After(SIGNAL, SEE_SYS, STORE),
)


def _awaited(see: str, end: str) -> tuple[Rule, ...]:
    """A wait that ends in `end`, and has a deadline."""
    return (
        After(see, f"{CLOCK}|{end}", STORE),
        Around(see, f"{CLOCK}|{end}"),
        Has("trap"),
        After(CLOCK, see, end),  # in the loop too it is an acquiring load by which the wait ends
    )


_COUNTS_AWAITED = (
    *_awaited(SEE_GPU, PROXY),
    Before(PROXY, SEE_GPU, TMA_LOAD),  # what has been seen is loaded through another proxy
    Never(NON_COHERENT),  # what other blocks of the launch store is read from where they store it
)
# By a block that has done with the counters; and the last one's threads have all seen that it is the last.
_COUNTERS_CLEARED = (
    Before(ADD_ACQ_REL, BARRIER, f"{SEE_GPU}|{ADD_RELEASE}"),
    After(ADD_ACQ_REL, BARRIER, STORE),
)
# All tiles of all blocks: written, with each block's threads, and counted; then all have been seen by one thread of the
# last block, by its others, and go before the signal.
_PUSHED = (
    After(TMA_STORE, ALL_WRITTEN, rf"{ADD_ACQ_REL}|ret\b", may_lack=True),  # ragged tiles go without TMA
    Before(SIGNAL, (FENCE_SYS, BARRIER, ADD_ACQ_REL, BARRIER, ALL_WRITTEN), f"{STORE}|{TMA_STORE}|{COMMIT}"),
    After(ADD_ACQ_REL, BARRIER, STORE),
)
# The consumer warpgroups of both specialised kernels.
_CONSUMING = (
    Before(READ_TILE, ARRIVED, ARRIVE),
    # One thread says for all warps that a buffer may be filled again, and with it the word beside it.
    After(READ_TILE, BARRIER, ARRIVE),
    Before(ARRIVE, BARRIER, PRODUCED),
    # Each buffer has its own wait for its product: all but the one just begun are done, or all.
    Before(ARRIVE, PRODUCED + "[01]", f"{PRODUCT}|{ARRIVE}"),
    Before(PRODUCED + "1", PRODUCT, f"{PRODUCED}|{ARRIVE}", may_lack=True),  # one product a step leaves none behind
    # One thread stores what all have put into the buffer, through another proxy,
    Before(TMA_STORE, (BARRIER, PROXY_SHARED), FILL),
    # and nobody fills it again before that has been read.
    Before(FILL, (BARRIER, READ + "0"), TMA_STORE),
    After(TMA_STORE, ALL_WRITTEN, JOIN),
)
RULES: dict[str, dict[str, tuple[Rule, ...]]] = {
    "_publish": {
        "": (
            # All blocks' stores are counted, seen by one thread of the last block, and by all of them.
            Before(SIGNAL, (FENCE_SYS, BARRIER, ADD_ACQ_REL, BARRIER), STORE),
            After(ADD_ACQ_REL, BARRIER, STORE),
            *_TOLD,
            *_awaited(SEE_SYS, BARRIER),
        )
    },
    "meet": {"": (*_TOLD, *_awaited(SEE_SYS, BARRIER), Never(NON_COHERENT))},  # scales are read where peers put them
    "_gather_matmul": {
        "": (
            Before(ADD_RELEASE, (BARRIER, STORE), STORE),  # one thread counts what all have stored
            *_COUNTS_AWAITED,
            After(PROXY, BARRIER, TMA_LOAD),  # one thread loads for all that have waited
            *_COUNTERS_CLEARED,
        )
    },
    "gather_matmul": {
        # The producer warp.
        SEE_GPU: (
            *_COUNTS_AWAITED,
            Before(LOAD_GATHERED, (PROXY, SEE_GPU)),  # the own rows are loaded from the shard
            Before(WRITE_TILE, ARRIVED, ARRIVE),  # not while the consumers have still to read the last one
            After(WRITE_TILE, WARP_SYNC, ARRIVE),  # one lane arrives for all that have written
        ),
        # The copying warp: first the own shard, counted with acq_rel because who completes a chunk signals; then the
        # peers', counted with release.
        CLAIM: (
            Before(TMA_STORE, ARRIVED, TMA_LOAD),  # what is stored has been loaded
            After(TMA_STORE, COMMIT, TMA_STORE),  # one group for each store, as the numbers below count them
            # All copies of a chunk are seen by one lane and by all, and go before the signal.
            Before(SIGNAL, (FENCE_SYS, WARP_SYNC, ADD_ACQ_REL), f"{TMA_STORE}|{STORE}"),
            Before(SIGNAL, TICKET, SEE_SYS),  # what a block publishes does not wait for a peer
            # Counted are copies that are written, by the lane that stored them. Each round of the loop claims, so that
            # a wait before it is a round too old.
            Before(ADD_ACQ_REL, (WARP_SYNC, WRITTEN + "[04]"), f"{COMMIT}|{CLAIM}"),
            Before(ADD_RELEASE, (WARP_SYNC, WRITTEN + "[02]"), f"{COMMIT}|{CLAIM}"),
            # That is the copy before last: those since are the groups of two. A round stores two groups, G's and the
            # slot's, while it publishes, and one behind that.
            Before(STORE_SLOT, (COMMIT, TMA_STORE, ARRIVED), TMA_LOAD),
            Never(WRITTEN + "(?![024])"),
            Before(WRITTEN + "4", TICKET, SEE_SYS),
            Before(WRITTEN + "2", COMMIT, ARRIVED),
            # A buffer is filled again when the copy before this one has been read: this one's groups may be left.
            Never(READ + "(?![12])"),
            Before(READ + "2", TICKET, SEE_SYS),
            Before(READ + "1", COMMIT, ARRIVED),
            After(TMA_STORE, (READ + "[12]", WARP_SYNC), TMA_LOAD),
            After(TMA_STORE, ALL_WRITTEN, JOIN),
            # Each lane looks at some chunks, and one lane loads for all.
            *_awaited(SEE_SYS, PROXY),
            After(SEE_SYS, f"{CLOCK}|{PROXY}", TMA_LOAD),
            Before(PROXY, SEE_SYS, TMA_LOAD),
            After(PROXY, WARP_SYNC, TMA_LOAD),
        ),
        PRODUCT: _CONSUMING,
        # At the end, when the other warps have come.
        STORE_WORD: (Before(ADD_ACQ_REL, (BARRIER, JOIN), ALL_WRITTEN), After(ADD_ACQ_REL, BARRIER, STORE)),
    },
    "matmul_push": {"": (*_PUSHED, *_TOLD, *_awaited(SEE_SYS, BARRIER)), PRODUCT: _CONSUMING},
    "_matmul_push": {"": (*_PUSHED, *_TOLD, *_awaited(SEE_SYS, BARRIER))},
    "_reduce": {"": (Has(STAGED), Never(SEE_SYS))},  # what has come is there when it begins
}


# --- calls -------------------------------------------------------------------------------------------------------


def gather(
    form="left", dim=0, whole=(2048, 512), other=(512, 1024), dtype=BF16, choice: Tiles | None = PLAIN, scale_of="",
    bias=False, fast=False, out=None, ranks=RANKS,
):  # fmt: skip
    length = -(-whole[dim] // ranks)
    shape = list(whole)
    shape[dim] = max(0, min(length, whole[dim] - length))  # rank 1's
    shard = torch.empty(shape, dtype=dtype)
    right = torch.empty(other[::-1], dtype=dtype).t() if form.startswith("left") else torch.empty(other, dtype=dtype)
    N = other[1] if form.startswith("left") else whole[1]
    scale = {"": None, "tensor": torch.empty(()), "row": torch.empty(*shape[:-1], 1)}[scale_of]
    other_scales = [] if scale is None else [torch.empty(1, N) if scale_of == "row" else torch.empty(())]
    scale_of = scale_of or "tensor"
    biases = [torch.empty(N, dtype=BF16)] if bias else []
    call = GatherCall(shard, [right], dim, whole[dim], "g", form, biases, scale, scale_of, other_scales, out, fast)
    gather_stem.launch_all_gather_matmul(gather_plan.plan_gather(call, Group("g", ranks, 1), choice), call)


def scatter(
    dim=0, rows=(2048,), K=512, N=1024, pairs=1, dtype=BF16, choice: Tiles | None = PLAIN, by_row=False, bias=False,
    fast=False, out=None, ranks=RANKS,
):  # fmt: skip
    lefts = [torch.empty(*rows, K, dtype=dtype) for _ in range(pairs)]
    rights = [torch.empty(N, K, dtype=dtype).t() for _ in range(pairs)]
    left_scales = right_scales = []
    if dtype == E4M3:
        left_scales = [torch.empty(*rows, 1) if by_row else torch.empty(()) for _ in lefts]
        right_scales = [torch.empty(1, N) if by_row else torch.empty(()) for _ in rights]
    added = torch.empty(N, dtype=BF16) if bias else None
    call = ScatterCall(lefts, rights, dim, "g", added, left_scales, right_scales, out, fast)
    scatter_stem.launch_matmul_reduce_scatter(scatter_stem.plan_scatter(call, Group("g", ranks, 1), choice), call)


NARROW = Tiles(n=128, stages=4, copy_rows=64)
F8 = Tiles(n=128, k=128, stages=4, specialised=False)
F8_WIDE = Tiles(k=128)
CALLS = {
    "left": gather,
    "right": partial(gather, "right", other=(256, 2048)),
    "left_t": partial(gather, "left_t", other=(2048, 256)),
    "right_t": partial(gather, "right_t", other=(256, 512)),
    "left, contracted": partial(gather, dim=1),
    "right, columns": partial(gather, "right", dim=1, other=(256, 2048)),
    "left, batch of 2": partial(gather, dim=1, whole=(2, 1024, 512)),
    "left, bias": partial(gather, bias=True),
    "left, ragged rows": partial(gather, whole=(2001, 512)),
    "left, ragged rows and columns": partial(gather, whole=(2001, 512), other=(512, 1000)),
    "left, float8": partial(gather, dtype=E4M3, choice=F8, scale_of="tensor"),
    "left, float8 by row": partial(gather, dtype=E4M3, choice=F8, scale_of="row"),
    "specialised gather": partial(gather, choice=Tiles()),
    "specialised gather, narrow, bias": partial(gather, choice=NARROW, bias=True),
    "specialised gather, float8": partial(gather, dtype=E4M3, choice=F8_WIDE, scale_of="tensor", fast=True),
    "specialised gather, float8 by row": partial(gather, dtype=E4M3, choice=F8_WIDE, scale_of="row", fast=True),
    "specialised gather, float8 in steps": partial(
        gather, dtype=E4M3, choice=replace(F8_WIDE, n=128), scale_of="row", bias=True
    ),
    "specialised gather, float8 in wide steps": partial(
        gather, dtype=E4M3, choice=replace(F8_WIDE, n=192), scale_of="row", bias=True
    ),
    "left, float32 results": partial(gather, other=(512, 4096), out=torch.float32, choice=None),
    "rows, float32 results": partial(scatter, K=2048, N=4096, out=torch.float32, choice=None),
    "rows, float32 results of float8": partial(
        scatter, K=2048, N=4096, dtype=E4M3, by_row=True, fast=True, out=torch.float32, choice=None
    ),
    "rows": scatter,
    "columns": partial(scatter, dim=1),
    "sum of 2": partial(scatter, pairs=2),
    "ragged rows, bias": partial(scatter, rows=(2001,), bias=True),
    "float8 by row": partial(scatter, dtype=E4M3, choice=F8, by_row=True),
    "specialised scatter": partial(scatter, choice=Tiles()),
    "specialised scatter, narrow": partial(scatter, choice=NARROW),
    "specialised scatter, float8 by row": partial(scatter, dtype=E4M3, choice=F8_WIDE, by_row=True, fast=True),
    "specialised scatter, float8 in steps": partial(scatter, dtype=E4M3, choice=replace(F8_WIDE, n=128), by_row=True),
    "specialised scatter, float8 in wide steps": partial(
        scatter, dtype=E4M3, choice=replace(F8_WIDE, n=192), by_row=True
    ),
}
# Where neither rows nor columns are in whole tiles, nor columns a multiple of 16, each element is a store of its own,
# and their addresses do not fit into registers. That is slow and right.
MAY_SPILL = ("left, ragged rows and columns",)


@cache
def kernels(call: str, ranks: int = RANKS) -> dict[str, triton.compiler.CompiledKernel]:
    """A call's kernels by name."""
    with compiling(ranks=ranks) as compiled:
        CALLS[call](ranks=ranks)
    return compiled


@pytest.mark.parametrize(
    ("call", "ranks"),
    [
        *((call, RANKS) for call in CALLS),
        *((f"specialised {op}", 8) for op in ("gather", "scatter")),
        *slow(*((f"specialised {op}", 2) for op in ("gather", "scatter"))),
    ],
)
def test_orderings(call: str, ranks: int, tmp_path: Path) -> None:
    compiled = kernels(call, ranks)
    if "specialised" in call:
        assert set(compiled) == ({"meet", "gather_matmul"} if "gather" in call else {"matmul_push", "_reduce"})
    elif "_matmul_push" in compiled:
        assert bool(re.search(TMA_STORE, compiled["_matmul_push"].asm["ptx"])) == ("ragged" not in call)
    found = {name: problems(kernel.asm["ptx"], RULES[name]) for name, kernel in compiled.items()}
    assert not any(found.values()), found
    for name in {"gather_matmul", "matmul_push"} & set(compiled):  # one product is made while the next is begun
        assert bool(re.search(PRODUCED + "1", compiled[name].asm["ptx"])) == ("float8 in steps" not in call)
    check_resources(compiled, tmp_path, call in MAY_SPILL)


@pytest.mark.parametrize(
    ("call", "consumers"), [(call, 1 + ("float8" in call)) for call in CALLS if call.startswith("specialised")]
)
def test_a_buffer_is_filled_again_when_all_consumers_have_done_with_it(call: str, consumers: int) -> None:
    ((name, ptx),) = ((n, k.asm["ptx"]) for n, k in kernels(call).items() if n in ("gather_matmul", "matmul_push"))
    arrivals = [int(n) for n in re.findall(r"mbarrier\.init\.shared::cta\.b64 \[.*\], (\d+);", ptx)]
    copies = 4 if name == "gather_matmul" else 0
    stages = (len(arrivals) - copies) // 2
    assert stages >= 3
    assert sorted(arrivals) == sorted([1] * (stages + copies) + [consumers] * stages)


@pytest.mark.parametrize("call", [call for call in CALLS if "steps" in call])
def test_products_are_in_flight_together(call: str, tmp_path: Path) -> None:
    ((name, ptx),) = ((n, k.asm["ptx"]) for n, k in kernels(call).items() if n in ("gather_matmul", "matmul_push"))
    parts = re.split(PRODUCED, ptx)  # each but the first begins with how many may be in flight
    before = [part for part, after in pairwise(parts) if after.startswith("1")]
    two = [2, 2] if "wide" in call else []  # of each consumer: of the first columns and of the rest
    assert [part.count("wgmma.commit_group") for part in before] == two
    require_products_in_flight(name, ptx, tmp_path)


@pytest.mark.parametrize("row", measured_tiles(), ids=lambda row: "-".join(map(str, row)))
def test_tiles_of_the_table_compile(row: tuple, tmp_path: Path) -> None:
    op, itemsize, ranks, M, N, K = row
    dtype, choice = (BF16, E4M3)[itemsize == 1], measured_tiles()[row]
    with compiling(ranks=ranks) as compiled:
        if op == "all_gather_matmul":
            scale_of = "tensor" if itemsize == 1 else ""
            gather(whole=(M, K), other=(K, N), dtype=dtype, choice=choice, scale_of=scale_of, ranks=ranks)
        else:
            scatter(rows=(M,), K=K, N=N, dtype=dtype, choice=choice)
    assert {"gather_matmul", "matmul_push", "_gather_matmul", "_matmul_push"} & set(compiled)
    check_resources(compiled, tmp_path)


# --- and the rules can fail --------------------------------------------------------------------------------------


# Of kernels in which ranks meet, and of those that push tiles.
MET_WRONGLY = {
    "relaxed in the loop": (replaced, r"ld\.acquire\.sys", "ld.relaxed.sys", -1),
    "without a deadline": (without, CLOCK, -1),
    "without a fence": (without, FENCE_SYS),
    "without a wait": (replaced, r"ld\.acquire\.sys", "ld.relaxed.sys"),
}
PUSHED_WRONGLY = {
    "a wait for the own GPU": (replaced, r"ld\.acquire\.sys", "ld.acquire.gpu"),
    "tiles read, not written": (replaced, ALL_WRITTEN, "cp.async.bulk.wait_group.read 0"),
    "wait before the signal": (moved, SEE_SYS, ADD_ACQ_REL),
    "without the barrier behind": (without_behind, BARRIER, ADD_ACQ_REL),
}
DOCTORED = {
    "_publish": ("left", {
        **MET_WRONGLY,
        "without its barrier": (without_before, BARRIER, ADD_ACQ_REL),
        "without the barrier behind": (without_behind, BARRIER, ADD_ACQ_REL),
        "relaxed addition": (replaced, r"gpu\.acq_rel", "gpu.relaxed"),
        "fence behind the signal": (moved, FENCE_SYS, SIGNAL),
        "without a signal": (without, SIGNAL),
        "signal behind the wait": (moved, SIGNAL, SEE_SYS),
    }),
    "meet": ("specialised gather", {
        **MET_WRONGLY,
        "fence behind the signal": (moved, FENCE_SYS, SIGNAL),
        "signal behind the wait": (moved, SIGNAL, SEE_SYS),
        "without an end": (without, "trap"),
        "over multicast": (replaced, SIGNAL, "multimem.st.relaxed.sys"),
    }),
    "_gather_matmul": ("left", {
        "copies without a barrier": (without_before, BARRIER, ADD_RELEASE),
        "copies counted relaxed": (replaced, r"gpu\.release", "gpu.relaxed"),
        "without a proxy fence": (without, PROXY),
        "proxy fence behind the loads": (moved, PROXY, TMA_LOAD),
        "relaxed wait": (replaced, r"ld\.acquire\.gpu", "ld.relaxed.gpu"),
        "relaxed in the loop": (replaced, r"ld\.acquire\.gpu", "ld.relaxed.gpu", -1),
        "a load of its own cache": (replaced, r"ld\.global\.v2", "ld.global.nc.v2"),
        "done before the wait": (moved, ADD_ACQ_REL, SEE_GPU),
        "counters cleared unseen": (without_behind, BARRIER, ADD_ACQ_REL),
        "without a deadline": (without, CLOCK, -1),
    }),
    "gather_matmul": ("specialised gather", {
        # The producer warp.
        "rows without a proxy fence": (without, PROXY),
        "rows, proxy fence behind the loads": (moved, PROXY, TMA_LOAD, 0),
        "rows, relaxed wait": (replaced, r"ld\.acquire\.gpu", "ld.relaxed.gpu", 0),
        "rows, relaxed in the loop": (replaced, r"ld\.acquire\.gpu", "ld.relaxed.gpu", -1),
        "rows without a deadline": (without_behind, CLOCK, SEE_GPU, 1),
        "tile's number without a sync": (without_behind, WARP_SYNC, WRITE_TILE, -1),
        "tile's number, buffer not free": (without_before, ARRIVED, WRITE_TILE),
        # The copying warp.
        "own copies read, not written": (replaced, WRITTEN + "4", "cp.async.bulk.wait_group.read 4"),
        "own copies, two groups too few": (replaced, WRITTEN + "4", "cp.async.bulk.wait_group 6"),
        "own copies, the last not written": (without, ALL_WRITTEN, 0),
        "own copies without a sync": (without_before, WARP_SYNC, ADD_ACQ_REL),
        "own copies counted relaxed": (replaced, r"gpu\.acq_rel", "gpu.relaxed", 0),
        "own copies counted, seen by one lane": (without_behind, WARP_SYNC, ADD_ACQ_REL),
        "own copies in one group": (without_before, COMMIT, READ + "2"),
        "own buffer filled too soon": (replaced, READ + "2", "cp.async.bulk.wait_group.read 3"),
        "chunk signalled without a fence": (without_before, FENCE_SYS, SIGNAL),
        "chunk signalled before the fence": (moved, SIGNAL, ADD_ACQ_REL, 0),
        "chunk, wait before the signal": (moved, SEE_SYS, TICKET),
        "pulled copies read, not written": (replaced, WRITTEN + "2", "cp.async.bulk.wait_group.read 2"),
        "pulled copies, a group too few": (replaced, WRITTEN + "2", "cp.async.bulk.wait_group 4"),
        "pulled copies, one wait for two": (without_before, WRITTEN, ADD_RELEASE),
        "pulled copies, the last not written": (without_before, ALL_WRITTEN, ADD_RELEASE, -1),
        "pulled copies without a sync": (without_before, WARP_SYNC, ADD_RELEASE),
        "pulled copies counted relaxed": (replaced, r"gpu\.release", "gpu.relaxed"),
        "pulled copies not awaited": (without_before, ARRIVED, READ + "1"),
        "pulled buffer filled too soon": (replaced, READ + "1", "cp.async.bulk.wait_group.read 2"),
        "pull without a proxy fence": (without_behind, PROXY, SEE_SYS),
        "pull without a sync": (without_behind, WARP_SYNC, PROXY, 1),
        "pull, relaxed wait": (replaced, r"ld\.acquire\.sys", "ld.relaxed.sys", 0),
        "pull, relaxed in the loop": (replaced, r"ld\.acquire\.sys", "ld.relaxed.sys", 1),
        "pull, wait for the own GPU only": (replaced, r"ld\.acquire\.sys", "ld.acquire.gpu", 0),
        "pull without a deadline": (without_behind, CLOCK, SEE_SYS, 1),
        # The consumer warpgroups.
        "tile's number read too soon": (without_before, ARRIVED, READ_TILE),
        "buffer given back too soon": (without_before, BARRIER, ARRIVE),
        "product not awaited": (without_before, PRODUCED, ARRIVE),
        "tile stored without a proxy fence": (without_before, PROXY_SHARED, TMA_STORE),
        "tile stored without a barrier": (without_before, BARRIER, TMA_STORE),
        "tile's buffer filled too soon": (without_before, READ, FILL),
        "tiles not written": (without, ALL_WRITTEN, -1),
        # At the end.
        "counters cleared before the copies": (without_before, JOIN, ADD_ACQ_REL, -1),
        "counters cleared unseen": (without_behind, BARRIER, ADD_ACQ_REL, -1),
    }),
    "matmul_push": ("specialised scatter", {
        **MET_WRONGLY,
        **PUSHED_WRONGLY,
        "tiles written by one thread": (replaced, ALL_WRITTEN, "@%p1 cp.async.bulk.wait_group 0"),
        "without a barrier": (without_before, BARRIER, ADD_ACQ_REL),
        "relaxed addition": (replaced, r"gpu\.acq_rel", "gpu.relaxed"),
        "fence behind the signal": (moved, FENCE_SYS, SIGNAL, 0),
        "signal before the count": (moved, SIGNAL, ALL_WRITTEN),
        "tile stored without a proxy fence": (without_before, PROXY_SHARED, TMA_STORE),
    }),
    "_matmul_push": ("rows", {
        **MET_WRONGLY,
        **PUSHED_WRONGLY,
        "without a barrier": (without_before, BARRIER, ADD_ACQ_REL),
        "fence behind the signal": (moved, FENCE_SYS, SIGNAL),
    }),
    "_reduce": ("rows", {
        "with a wait": (replaced, r"ld\.global\.L1::evict_first", "ld.acquire.sys.global", 0),
    }),
}  # fmt: skip


TWO_BARRIERS = "matmul_push", "without a barrier"  # of which one is enough; Triton 3.8 has two there, too:
DOUBLED = {("gather_matmul", "tile's number without a sync"), ("gather_matmul", "pull without a sync")}
DOUBLED |= {("_matmul_push", "without a barrier")}


@cache
def sound(call: str, name: str) -> str:
    """A kernel's PTX, which breaks nothing."""
    ptx = kernels(call)[name].asm["ptx"]
    assert not problems(ptx, RULES[name])
    return ptx


@pytest.mark.parametrize(
    ("name", "change"), [(name, change) for name, (_, changes) in DOCTORED.items() for change in changes]
)
def test_a_missing_or_moved_instruction_is_found(name: str, change: str) -> None:
    call, changes = DOCTORED[name]
    spoil, *how = changes[change]
    ptx = spoil(sound(call, name), *how)
    if (name, change) == TWO_BARRIERS or (IS_3_8 and (name, change) in DOUBLED):
        ptx = spoil(ptx, *how)
    assert problems(ptx, RULES[name])


def test_each_of_two_waits_has_its_fence() -> None:
    ptx = sound("left, contracted", "_gather_matmul")
    assert problems(without(ptx, PROXY), RULES["_gather_matmul"])


def test_scales_are_with_the_peers_before_the_ranks_meet() -> None:
    ptx = kernels("specialised gather, float8 by row")["meet"].asm["ptx"]
    rules = {"": (Has(STORE), Before(SIGNAL, (FENCE_SYS, BARRIER), STORE))}
    assert not problems(ptx, rules)
    assert problems(without_before(ptx, BARRIER, SIGNAL), rules)
    assert problems(without(ptx, FENCE_SYS), rules)
    assert problems(replaced(ptx, r"ld\.global\.v4", "ld.global.nc.v4", -1), RULES["meet"])


def test_shards_that_were_pushed_are_there_when_the_ranks_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_exchange, "channel", lambda *use, n_slots: fake_channel(1, RANKS))
    with compiling(RANKS) as compiled:
        shard_exchange.ReduceScatter("g")([torch.empty(RANKS, 4096, dtype=BF16)], torch.empty(4096))
    assert set(compiled) == {"_meet", "_add_shards"}
    rules = {"": (*_TOLD, *_awaited(SEE_SYS, BARRIER), Never(NON_COHERENT))}
    ptx = compiled["_meet"].asm["ptx"]
    assert not problems(ptx, rules)
    for instruction in (FENCE_SYS, SIGNAL, SEE_SYS, BARRIER):
        assert problems(without(ptx, instruction), rules), instruction
    assert not problems(compiled["_add_shards"].asm["ptx"], {"": (Never(NON_COHERENT),)})  # peers wrote what it reads
    assert len(re.findall(r"ld\.global\.v4\.b32", compiled["_add_shards"].asm["ptx"])) == RANKS
