"""The collective matmuls alone: torchrun --nproc-per-node 8 scripts/bench/collective_matmul.py [--model 8b] [--tune]

For each operator that a tensor-parallel block of the model runs, at 16,384 tokens: the matmul alone, the collective
alone, both one after the other (NCCL and cuBLAS), torch's own fused operator and titanlite's, launched eagerly and
replayed from a CUDA graph. The floor is the longer of the matmul and the bytes at 340 GB/s. Times are milliseconds, the
median over repeats, the slowest rank; `cpu` is microseconds of host time per call. All operands are random.

Float8 operands have scales by row; "rowwise" leaves sums to the tensor cores, "rowwise_in_steps" adds them in float32
every 128 products.

With --tune, titanlite's operators are timed with every candidate for their tiles, in bursts long enough for a GPU to
reach its power limit, as it is in training; the best is printed as an entry for `titanlite/kernels/device/tiles.toml`.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.kernels.all_gather_matmul import all_gather_matmul
from titanlite.kernels.collectives import Group
from titanlite.kernels.device import all_gather_matmul as gather_device
from titanlite.kernels.device import matmul_reduce_scatter as scatter_device
from titanlite.kernels.device.gather_plan import plan_gather
from titanlite.kernels.device.tiles import WIDE, Tiles
from titanlite.kernels.matmul_reduce_scatter import matmul_reduce_scatter
from titanlite.kernels.products import GatherCall, ScatterCall

LINK = 340e9  # bytes per second and direction that stores to all peers reach
SUSTAINED_MS = 150  # of matmuls without a pause, after which an H200's clock has come down to what its power allows
MODELS = {"8b": (4096, 6144, 14336), "70b": (8192, 10240, 28672)}  # model width, wq + wk + wv, ffn width


@dataclass(frozen=True)
class Case:
    """One operator: [M, K] @ [K, N], gathering A's rows or scattering the product's."""

    name: str
    gathers: bool
    K: int
    N: int
    weight_is_transposed: bool  # [N, K], as in forward, or [K, N], as in the gradient


def cases(model: str, ranks: int) -> list[Case]:
    D, QKV, F = MODELS[model]
    return [
        Case("qkv", True, D, QKV // ranks, True),
        Case("w13", True, D, 2 * F // ranks, True),
        Case("wo", False, D // ranks, D, True),
        Case("w2", False, F // ranks, D, True),
        Case("qkv grad", False, QKV // ranks, D, False),
        Case("w13 grad", False, 2 * F // ranks, D, False),
        Case("wo grad", True, D, D // ranks, False),
        Case("w2 grad", True, D, F // ranks, False),
    ]


def milliseconds(run: Callable[[], object], repeats: int = 5, calls: int = 10) -> float:
    """Return the median time of a call on the slowest rank."""
    for _ in range(2):
        run()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / calls)
    slowest = torch.tensor(statistics.median(times), device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def replayed(run: Callable[[], object]) -> float:
    """Return the same from a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's own thread asks for events
        run()
    return milliseconds(graph.replay)


def host_microseconds(run: Callable[[], object], calls: int = 30) -> float:
    """Return the host time of a call while the GPU is behind."""
    run()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda._sleep(400_000_000)  # about 0.2 s: the queue never runs dry, and never fills
    start = time.perf_counter()
    for _ in range(calls):
        run()
    taken = time.perf_counter() - start
    torch.cuda.synchronize()
    return taken / calls * 1e6


def attempt(measure: Callable[[], float]) -> float:
    try:
        return measure()
    except (RuntimeError, ValueError) as error:
        if dist.get_rank() == 0:
            print(f"    {type(error).__name__}: {str(error)[:200]}", flush=True)
        return float("nan")


class Operands:
    """Return random operands of a case, and every way to run it."""

    def __init__(self, case: Case, M: int, ranks: int, dtype: str) -> None:
        self.case, self.M, self.ranks = case, M, ranks
        self.group = dist.group.WORLD.group_name
        bf16 = torch.bfloat16
        rows = M // ranks if case.gathers else M
        a = torch.randn(rows, case.K, device="cuda", dtype=bf16)
        b = torch.randn((case.N, case.K) if case.weight_is_transposed else (case.K, case.N), device="cuda", dtype=bf16)
        b = b.t() if case.weight_is_transposed else b
        self.scales: tuple[Tensor, Tensor] | None = None
        self.fast = dtype == "rowwise"
        if dtype != "bf16":
            self.scales = (torch.rand(rows, 1, device="cuda") + 0.5, torch.rand(1, case.N, device="cuda") + 0.5)
            a, b = a.to(torch.float8_e4m3fn), b.t().contiguous().to(torch.float8_e4m3fn).t()
        self.a, self.b = a, b
        self.whole = torch.randn(M, case.K, device="cuda", dtype=bf16).to(a.dtype) if case.gathers else a
        self.row_scale = torch.rand(M, 1, device="cuda") + 0.5
        self.out = torch.empty(M, case.N, device="cuda", dtype=bf16)
        self.part = torch.empty(M // ranks, case.N, device="cuda", dtype=bf16)

    def matmul(self) -> None:
        if self.scales is None:
            torch.mm(self.whole, self.b, out=self.out)
        else:
            torch._scaled_mm(
                self.whole, self.b, self.row_scale, self.scales[1],
                out_dtype=torch.bfloat16, use_fast_accum=self.fast, out=self.out,
            )  # fmt: skip

    def collective(self) -> None:
        if self.case.gathers:
            dist.all_gather_into_tensor(self.whole.view(torch.uint8), self.a.view(torch.uint8))
        else:
            dist.reduce_scatter_tensor(self.part, self.out)

    def sequential(self) -> None:
        if self.case.gathers:
            self.collective()
            self.matmul()
        else:
            self.matmul()
            self.collective()

    def torch_fused(self) -> None:
        ops = torch.ops.symm_mem
        if self.scales is None:
            if self.case.gathers:
                ops.fused_all_gather_matmul(self.a, [self.b], 0, self.group)
            else:
                ops.fused_matmul_reduce_scatter(self.a, self.b, "sum", 0, self.group)
        elif self.case.gathers:
            ops.fused_all_gather_scaled_matmul(
                self.a,
                [self.b],
                self.scales[0],
                [self.scales[1]],
                0,
                self.group,
                [None],
                [None],
                [torch.bfloat16],
                [True],
            )
        else:
            ops.fused_scaled_matmul_reduce_scatter(
                self.a, self.b, *self.scales, "sum", 0, 0, self.group, [self.M, self.case.N], None, None,
                torch.bfloat16, True,
            )  # fmt: skip

    def titanlite(self) -> Any:
        if self.case.gathers:
            extra = {}
            if self.scales:
                extra = {
                    "scale": self.scales[0],
                    "scale_of": "row",
                    "other_scales": [self.scales[1]],
                    "fast_accum": self.fast,
                }
            return all_gather_matmul(self.a, [self.b], 0, self.M, self.group, **extra)[1]
        extra = (
            {"left_scales": [self.scales[0]], "right_scales": [self.scales[1]], "fast_accum": self.fast}
            if self.scales
            else {}
        )
        return matmul_reduce_scatter([self.a], [self.b], 0, self.group, **extra)

    def with_tiles(self, tiles: Tiles) -> Callable[[], Any]:
        left, right = ([self.scales[0]], [self.scales[1]]) if self.scales else ([], [])
        group = Group(self.group, self.ranks, dist.get_rank())
        if self.case.gathers:
            scale = left[0] if left else None
            operands = self.a, [self.b], 0, self.M
            call = GatherCall(*operands, self.group, "left", [], scale, "row", right, None, self.fast)
            plan = plan_gather(call, group, tiles)
            return lambda: gather_device.launch_all_gather_matmul(plan, call)[1]
        call = ScatterCall([self.a], [self.b], 0, self.group, None, left, right, None, self.fast)
        plan = scatter_device.plan_scatter(call, group, tiles)
        return lambda: scatter_device.launch_matmul_reduce_scatter(plan, call)

    def error(self) -> float:
        """Return the relative error of the result against float32, over the first and last 128 rows of a part."""
        got = self.titanlite()
        a, b = self.a.float(), self.b.float()
        if self.scales:
            a, b = a * self.scales[0], b * self.scales[1]
        if self.case.gathers:
            parts = [torch.empty_like(a) for _ in range(self.ranks)]
            dist.all_gather(parts, a)
            truth = torch.cat([part[rows] for part in parts for rows in (slice(0, 128), slice(-128, None))]) @ b
            got = torch.cat(
                [part[rows] for part in got.chunk(self.ranks) for rows in (slice(0, 128), slice(-128, None))]
            )
        else:
            own, truth = self.M // self.ranks, self.part
            for owner in range(self.ranks):
                mine = torch.cat((a[owner * own :][:128], a[owner * own + own - 128 :][:128])) @ b
                dist.all_reduce(mine)
                truth = mine if owner == dist.get_rank() else truth
            got = torch.cat((got[:128], got[-128:]))
        return ((got.float() - truth).norm() / truth.norm()).item()


def candidates(case: Case, itemsize: int, in_steps: bool) -> list[Tiles]:
    k = 128 // itemsize
    found = []
    for n in (WIDE, 128) if in_steps else (256, 128):  # sums in steps take the registers twice
        for group in (4, 8, 16):
            for copy_rows in (32, 64) if case.gathers else (32,):
                found.append(Tiles(n=n, k=k, stages=3 if n == 256 else 4, group=group, copy_rows=copy_rows))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, nargs="+", default=["8b"])
    parser.add_argument("--dtype", choices=("bf16", "rowwise", "rowwise_in_steps"), nargs="+", default=["bf16"])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--only", nargs="+", default=[], help="names of operators")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--no-upstream", action="store_true")
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    ranks, M, rank = dist.get_world_size(), args.tokens, dist.get_rank()

    def say(*words: object) -> None:
        if rank == 0:
            print(*words, flush=True)

    for model in args.model:
        for dtype in args.dtype:
            say(f"{model} {dtype}, M = {M}, {ranks} ranks")
            columns = ("matmul", "coll", "seq", "up", "up graph", "eager", "graph", "floor", "ratio", "cpu us")
            say(f"{'op':9s} {'K':>5s} {'N':>5s} " + " ".join(f"{c:>8s}" for c in (*columns, "error")))
            for case in cases(model, ranks):
                if args.only and case.name not in args.only:
                    continue
                x = Operands(case, M, ranks, dtype)
                error = attempt(x.error)
                figures = " ".join(f"{v:8.3f}" for v in measure(x, upstream=not args.no_upstream))
                say(f"{case.name:9s} {case.K:5d} {case.N:5d} {figures} {error:8.1e}")
                if args.tune:
                    tune(x, say)
    dist.destroy_process_group()


def measure(x: Operands, upstream: bool) -> list[float]:
    """Return the numbers of one line of the table."""
    nan, case = float("nan"), x.case
    matmul = attempt(lambda: milliseconds(x.matmul))
    row = [matmul, attempt(lambda: milliseconds(x.collective)), attempt(lambda: milliseconds(x.sequential))]
    if upstream:
        row += [attempt(lambda: milliseconds(x.torch_fused)), attempt(lambda: replayed(x.torch_fused))]
    else:
        row += [nan, nan]
    eager, graph = attempt(lambda: milliseconds(x.titanlite)), attempt(lambda: replayed(x.titanlite))
    moved = (x.ranks - 1) / x.ranks * x.M * (case.K * x.a.dtype.itemsize if case.gathers else case.N * 2)
    floor = max(matmul, moved / LINK * 1e3)
    return [*row, eager, graph, floor, eager / floor, attempt(lambda: host_microseconds(x.titanlite))]


def tune(x: Operands, say: Callable[..., None]) -> None:
    """Print the fastest four candidates, and an entry of the table for the first, or for the plain path."""
    times, calls = {}, max(8, int(SUSTAINED_MS / milliseconds(x.matmul, 1)))
    for tiles in candidates(x.case, x.a.dtype.itemsize, x.scales is not None and not x.fast):
        times[tiles] = attempt(lambda tiles=tiles: milliseconds(x.with_tiles(tiles), 3, calls))
    fastest = sorted((item for item in times.items() if item[1] == item[1]), key=lambda item: item[1])  # no NaN
    for t, ms in fastest[:4]:
        say(f"      {ms:.3f}  m {t.m} n {t.n} k {t.k} stages {t.stages} group {t.group} copy_rows {t.copy_rows}")
    for tiles, ms in fastest[:1]:
        op = "all_gather_matmul" if x.case.gathers else "matmul_reduce_scatter"
        shape = {"itemsize": x.a.dtype.itemsize, "ranks": x.ranks, "M": x.M, "N": x.case.N, "K": x.case.K}
        say(entry(op, shape, tiles, ms, attempt(lambda: milliseconds(x.sequential, 3, calls))))


def entry(op: str, shape: dict[str, int], tiles: Tiles, ms: float, plain_ms: float) -> str:
    """Return the entry as it stands in `tiles.toml`: keys of the default are left out."""
    keys = {"op": f'"{op}"', **shape}
    if plain_ms < ms:
        keys["plain"] = "true"
    else:
        keys |= {f.name: getattr(tiles, f.name) for f in fields(Tiles) if getattr(tiles, f.name) != f.default}
    comment = f"# {ms:.3f} ms, one after the other {plain_ms:.3f}"
    return "\n".join((f"[[tiles]] {comment}", *(f"{key} = {value}" for key, value in keys.items()), ""))


if __name__ == "__main__":
    main()
