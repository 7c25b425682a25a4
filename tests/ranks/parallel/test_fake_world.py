"""A fake world leaves nothing behind that a real one of the same mesh would take for its own."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support.ranks import run_ranks
from titanlite.kernels.context_attention import exchanged
from titanlite.kernels.lowering import Lowered, lowered
from titanlite.parallel.fake_world import fake_world


def gathered() -> torch.Tensor:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    laid_out = distribute_tensor(torch.arange(32.0).reshape(8, 4), mesh, [Shard(0), Shard(1)])
    return (laid_out * 1).redistribute(mesh, [Replicate(), Replicate()]).to_local()


def test_a_real_world_after_a_fake_one_of_its_mesh(tmp_path: Path) -> None:
    def body() -> None:
        groups = dist.distributed_c10d._world
        before = dict(groups.pg_names), groups.group_count
        with fake_world(dist.get_rank(), 4):
            gathered()
            with fake_world(1, 4):
                gathered()
            gathered()
        assert (dict(groups.pg_names), groups.group_count) == before
        for _ in range(9):
            dist.new_group(
                [0, 1, 2, 3]
            )  # so that the groups of a mesh have other names than they had in the fake world
        assert torch.equal(gathered(), torch.arange(32.0).reshape(8, 4))

    run_ranks(body, tmp_path, 4)


def test_what_a_fake_world_counts_is_no_run_s() -> None:
    """A receipt says what the process's own run has lowered and exchanged."""
    row, window = Lowered("all_gather_matmul", "4×6", None), 1 << 40
    before = dict(lowered), dict(exchanged)
    with fake_world(0, 2):
        assert not lowered
        assert not exchanged
        lowered[row], exchanged[window] = 3, 4
    assert (dict(lowered), dict(exchanged)) == before
