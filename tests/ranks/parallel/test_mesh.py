"""The mesh: which rank holds which slice, and which ranks share what."""

import dataclasses
import json

import pytest
import torch.distributed as dist

from tests.support.ranks import run_ranks
from titanlite.config.schema import Parallelism
from titanlite.device import CPU
from titanlite.parallel.mesh import build_mesh, mesh_entry
from titanlite.preflight.run_again import processes_of

# Tensor-parallel ranks are neighbours; data-parallel ranks count replica by replica.
EXPECTED = {  # (replicas, tp): dp_rank and tp rank of ranks 0 … 3
    (1, 1): ([0, 1, 2, 3], [0, 0, 0, 0]),
    (1, 2): ([0, 0, 1, 1], [0, 1, 0, 1]),
    (2, 1): ([0, 1, 2, 3], [0, 0, 0, 0]),
    (2, 2): ([0, 0, 1, 1], [0, 1, 0, 1]),
    (1, 4): ([0, 0, 0, 0], [0, 1, 2, 3]),
    (4, 1): ([0, 1, 2, 3], [0, 0, 0, 0]),
}


@pytest.mark.parametrize(("replicas", "tp"), EXPECTED)
def test_coordinates(replicas, tp, tmp_path):
    degrees = Parallelism(data_parallel_replicate_degree=replicas, tensor_parallel_degree=tp)

    def body() -> None:
        mesh = build_mesh(degrees, CPU)
        group = mesh.tp_group
        assert (mesh.replicas, mesh.tp_size, mesh.dp_size) == (replicas, tp, 4 // tp)
        assert mesh.all.shape == (replicas, 4 // (replicas * tp), tp)
        assert mesh.fsdp.shape == ((replicas, 4 // (replicas * tp)) if replicas > 1 else (4 // tp,))
        assert (group is None) == (tp == 1)
        shared = [dist.get_rank()]
        if group:
            assert (group.size, group.rank) == (tp, mesh.tp.get_local_rank())
            shared = dist.get_process_group_ranks(mesh.tp.get_group())
        print(json.dumps([mesh.dp_rank, group.rank if group else 0, shared]))

    dp_ranks, tp_ranks, shared = zip(*map(json.loads, run_ranks(body, tmp_path, 4)), strict=True)
    assert (list(dp_ranks), list(tp_ranks)) == EXPECTED[replicas, tp]
    assert [ranks[0] for ranks in shared] == [rank - rank % tp for rank in range(4)]


@pytest.mark.parametrize(
    "degrees",
    [
        {},
        {"tensor_parallel_degree": 2},
        {"data_parallel_replicate_degree": 2, "expert_parallel_degree": 2},
        {"tensor_parallel_degree": 2, "expert_parallel_degree": 4},
        {"context_parallel_degree": 2, "expert_parallel_degree": 2},
    ],
    ids=str,
)
def test_the_receipt_says_how_many_processes_there_were(degrees: dict[str, int], tmp_path) -> None:
    """Expert-parallel ranks are those of the other axes. `compare --floor` starts so many."""
    config = Parallelism(**degrees)

    def body() -> None:
        entry = mesh_entry(config, build_mesh(config, CPU, has_experts=True))
        assert processes_of([dataclasses.asdict(entry)]) == 4

    run_ranks(body, tmp_path, 4)
