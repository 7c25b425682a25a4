"""What the receipt says of Muon's work is what travels and what is multiplied."""

from pathlib import Path

import torch
from torch.distributed.fsdp import fully_shard

from tests.support.ranks import run_ranks
from titanlite.config.parameter_groups import update_settings
from titanlite.config.recipe_schema import MuonGroup, OptimizerRecipe
from titanlite.config.schema import Optimizer, Parallelism
from titanlite.device import CPU
from titanlite.kernels.orthogonalise import orthogonalise_flops
from titanlite.models.layers import Linear
from titanlite.models.matrices import matrices_of
from titanlite.optimizers.sharded import ShardedOptimizer
from titanlite.parallel.mesh import build_mesh


def test_the_receipt_says_who_orthogonalises_how_much_and_what_travels(tmp_path: Path) -> None:
    def body() -> None:
        mesh = build_mesh(Parallelism(), CPU)
        model = torch.nn.ModuleDict(
            {
                "large": Linear(1024, {"a": 512}, std=1),
                "small": Linear(256, {"a": 128, "b": 128}, std=1),
            }
        )
        for layer in model.values():
            fully_shard(layer, mesh=mesh.fsdp)
        fast, slow = MuonGroup("muon", ("large.*",)), MuonGroup("muon", polynomials=((1.5, -0.5, 0.0),))
        recipe = OptimizerRecipe("two", {"fast": fast, "slow": slow})
        config = Optimizer(weight_decay_exclude=())
        named, matrices = dict(model.named_parameters()), matrices_of(model)
        settings = update_settings(recipe, config, {name: p.shape for name, p in named.items()}, of_matrices=matrices)
        ours = ShardedOptimizer(named, config, recipe, settings, mesh, matrices)
        applied = ours.entry().applied
        assert isinstance(applied, dict)
        large, small = orthogonalise_flops(512, 1024, 5), orthogonalise_flops(128, 256, 1)
        assert applied["of muon"] == {
            "matrices": 3,
            "owners": 2,
            "buckets": 2,  # of one rule each
            "gflop_of_a_rank_a_step": {"least": round(small / 1e9, 3), "most": round((large + small) / 1e9, 3)},
            # Half of the large one goes to its owner, and half of its result from there. Each rank holds what it owns
            # of the small ones.
            "bytes_sent_by_a_rank_a_step": {"most": 256 * 1024 * 2},
            "dtype_sent": "bfloat16",
        }

    run_ranks(body, tmp_path, 2)
