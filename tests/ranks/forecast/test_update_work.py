"""What is predicted of an update, held against the update: rows that travel, FLOPs, state, and memory."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.support.held_for_backward import Peak
from tests.support.needs import slow
from tests.support.ranks import run_ranks
from tests.support.short_run import assemble, checked
from titanlite.config.schema import Parallelism
from titanlite.device import CPU
from titanlite.forecast.update_work import share
from titanlite.kernels import orthogonalise
from titanlite.models.matrices import Matrix
from titanlite.optimizers import muon
from titanlite.optimizers.dion2 import Dion2
from titanlite.optimizers.muon import Muon, MuonRule, Pace
from titanlite.optimizers.muon_of_groups import MuonOfGroups
from titanlite.optimizers.normuon import NorMuon
from titanlite.parallel.mesh import build_mesh

REPLICAS, TP = "--parallelism.data_parallel_replicate_degree=2", "--parallelism.tensor_parallel_degree=2"
MIXTURE = ("--model.name=qwen3_moe", "--parallelism.expert_parallel_degree=2")
NORMUON, DION2 = "--optimizer.recipe=normuon", "--optimizer.recipe=dion2"
ONE, ZERO = torch.ones(()), torch.zeros(())


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (2, ["--optimizer.ema_decay=0.9"]),
        *slow((2, [*MIXTURE, "--optimizer.state_dtype=bfloat16"])),
        (2, [DION2]),
        *slow((2, [NORMUON]), (2, [*MIXTURE, NORMUON]), (4, [*MIXTURE, TP, DION2])),
        *slow((1, []), (2, [TP]), (4, [REPLICAS]), (4, [REPLICAS, TP]), (4, [*MIXTURE]), (4, [*MIXTURE, TP])),
    ],
)
def test_an_update_does_what_is_predicted(world: int, flags: list[str], tmp_path: Path) -> None:
    asked = checked(tmp_path, world, ["--optimizer.recipe=muon", *flags])

    def body() -> None:
        run = assemble(asked)
        work = run.memory.optimizer
        ((rule, shared),) = work.shared
        ours = run.optimizer.rules[rule]
        assert isinstance(ours, MuonOfGroups)
        (each,) = ours._each
        sizes = [
            [sum(transfer.sizes) for transfer in (bucket.given, bucket.collected, bucket.returned, bucket.taken)]
            for bucket in each.buckets
        ]
        of_all, most = torch.tensor(sizes), torch.tensor(sizes)
        dist.all_reduce(of_all)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        assert of_all.tolist() == [[b.elements, b.elements, b.handed, b.handed] for b in shared.buckets]
        assert most[:, 1:3].tolist() == [[b.collected, b.returned] for b in shared.buckets]
        with FlopCounterMode(display=False) as counter:
            run.optimizer.step({n: torch.zeros_like(p) for n, p in run.optimizer.locals.items()}, 1.0, ONE, ZERO)
        flops = torch.tensor(counter.get_total_flops())
        dist.all_reduce(flops, dist.ReduceOp.MAX)
        assert flops.item() == shared.flops
        kept = sum(tensor.nbytes for tensor in run.optimizer.state_tensors())
        kept += sum(shard.nbytes for shard in run.average.shards.values()) if run.average else 0
        assert kept == work.state

    run_ranks(body, tmp_path, world)


MIXED = [(384, 128), (128, 384), (256, 256), (256, 256), (64, 256), (64, 256)]
LONG = [(64, 1024)] * 4


@pytest.mark.parametrize(
    ("kind", "shapes", "world"),
    [(Muon, MIXED, 1), (Muon, LONG, 1), (NorMuon, LONG, 1), (Dion2, LONG, 1), *slow((Muon, MIXED, 2))],
)
def test_the_memory_of_an_update_is_what_is_predicted(
    kind: type[Muon], shapes: list[tuple[int, int]], world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU rows move in one kernel each, and a conversion or a symmetric product is one: each makes its result, the
    latter two in float16."""
    # What is predicted is a GPU's memory: a CPU multiplies in float32, and is made to hold what a GPU would.
    monkeypatch.setitem(orthogonalise.INSIDE, "cpu", torch.float16)
    for name in ("momentum_rows", "put_rows", "take_rows", "update_rows"):
        monkeypatch.setattr(muon, name, lambda *given, **more: None)
    monkeypatch.setattr(orthogonalise, "scaled_copy", lambda x, out, *_: out)
    monkeypatch.setattr(
        orthogonalise, "symmetric_product", lambda x, *_, **__: x.new_zeros(len(x), x.shape[1], x.shape[1])
    )
    most = 2 * 384 * 128

    def body() -> None:
        mesh, part = build_mesh(Parallelism(), CPU), 0.75 if kind is Dion2 else None
        rule = MuonRule(bucket=most, share=part)
        sharded = (distribute_tensor(torch.zeros(shape), mesh.fsdp, [Shard(0)]) for shape in shapes)
        parameters = {str(i): nn.Parameter(weight) for i, weight in enumerate(sharded)}
        matrices = {n: [Matrix(n, n, torch.arange(len(p)), p.shape[1])] for n, p in parameters.items()}
        ours = kind(parameters, mesh, matrices, rule, dict.fromkeys(parameters, Pace()))
        grads = {n: torch.ones_like(shard) for n, shard in ours.locals.items()}
        with Peak([]) as peak:
            ours.step(grads, 1.0, ONE, ZERO)
        each = tuple((shape,) for shape in shapes)
        shared = share(each, (1,) * len(shapes), world, len(rule.polynomials), most, part)
        assert len(shared.buckets) == len(ours.buckets) >= 4 - world
        found = torch.tensor(peak.bytes)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        predicted = shared.buffers(world, kind is NorMuon)
        assert found.item() == pytest.approx(predicted, rel=0.003)  # numbers of each matrix, and of each row

    run_ranks(body, tmp_path, world)
