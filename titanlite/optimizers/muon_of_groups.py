"""Muon, NorMuon and Dion2 as update rules of a recipe: one `Muon` object for all groups with an equal `MuonRule`."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.config.parameter_groups import UpdateSettings
from titanlite.config.schema import Optimizer
from titanlite.kernels.orthogonalise import ITERATIONS, Polynomials, orthogonalise_flops
from titanlite.optimizers.dion2 import Dion2
from titanlite.optimizers.group_norms import GroupNorms
from titanlite.optimizers.muon import Muon, MuonRule, Pace
from titanlite.optimizers.normuon import NorMuon
from titanlite.optimizers.rule import ParametersOfRule, ShippedRule, UpdateCost, bytes_of_state
from titanlite.parallel.share_matrices import part_of


class MuonOfGroups(ShippedRule):
    """Muon as an update rule; see `UpdateRule`."""

    _kind: type[Muon] = Muon

    @classmethod
    def cost(cls, config: Optimizer) -> UpdateCost:
        """See `ShippedRule.cost`.

        Read: the gradient twice (norm, update), the momentum, results in 16 bits, the parameter. Written: the momentum,
        rows for the owner in 16 bits, the parameter.
        """
        momentum = bytes_of_state(config)
        return UpdateCost(state=momentum, moved=4 + 4 + 2 * momentum + 2 + 2 + 2 * 4)

    def __init__(self, own: ParametersOfRule) -> None:
        dtype = getattr(torch, own.config.state_dtype)
        together: dict[MuonRule, list[str]] = {}
        for name, of in own.settings.items():
            rule = MuonRule(state_dtype=dtype, **{**dict(of.own), "polynomials": polynomials_of(of)})
            together.setdefault(rule, []).append(name)
        self._each: list[Muon] = []
        self._decay_factor = own.decay_factor
        for rule, names in together.items():
            paces = {n: Pace(own.settings[n].lr_factor, own.settings[n].weight_decay) for n in names}
            parameters = {n: own.parameters[n] for n in names}
            self._each.append(self._kind(parameters, own.mesh, own.matrices, rule, paces))
        self.kept = {"momentum": {n: m for each in self._each for n, m in each.kept["momentum"].items()}}

    def facts(self) -> dict[str, object]:
        """Return the numbers of matrices, owners and buckets, and the flops and the sent bytes of a rank per step."""
        ranks, rank, device = dist.get_world_size(), dist.get_rank(), self._each[0].mesh.device
        flops, matrices, sent = [0] * ranks, 0, 0
        for each in self._each:
            for bucket in each.buckets:
                for stack in bucket.stacks:
                    n, rows = stack.rows.shape
                    matrices += n
                    part = part_of((rows, stack.columns), each.rule.share)
                    flops[stack.owner] += n * orthogonalise_flops(*part, len(each.rule.polynomials))
                mine = [transfer.sizes for transfer in (bucket.given, bucket.returned)]
                sent += each.rule.dtype.itemsize * sum(sum(sizes) - sizes[rank] for sizes in mine)
        most = torch.tensor(sent, device=device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return {
            "matrices": matrices,
            "owners": sum(of_rank > 0 for of_rank in flops),
            "buckets": sum(len(each.buckets) for each in self._each),
            "gflop_of_a_rank_a_step": {"least": round(min(flops) / 1e9, 3), "most": round(max(flops) / 1e9, 3)},
            "bytes_sent_by_a_rank_a_step": {"most": int(most)},
            "dtype_sent": str(self._each[0].rule.dtype).removeprefix("torch."),
        }

    def step(
        self, grads: dict[str, Tensor], lr: float, divisor: Tensor, skip: Tensor, norms: GroupNorms | None = None
    ) -> None:
        """See `UpdateRule.step`."""
        for each in self._each:
            each.step(grads, lr, divisor, skip, norms, self._decay_factor(lr))


class NorMuonOfGroups(MuonOfGroups):
    """NorMuon as an update rule; see `UpdateRule`."""

    _kind = NorMuon

    @classmethod
    def cost(cls, config: Optimizer) -> UpdateCost:
        """See `ShippedRule.cost`. Each rank also keeps the second moment of all rows."""
        return replace(super().cost(config), row=bytes_of_state(config))

    @property
    def whole(self) -> dict[str, dict[str, Tensor]]:
        """See `UpdateRule.whole`."""
        each = [one.second_moment for one in self._each if isinstance(one, NorMuon)]
        return {"second_moment": {name: moment for of in each for name, moment in of.items()}}


class Dion2OfGroups(MuonOfGroups):
    """Dion2 as an update rule; see `UpdateRule`."""

    _kind = Dion2

    @classmethod
    def cost(cls, config: Optimizer) -> UpdateCost:
        """See `ShippedRule.cost`. The momentum is read and written once more, where it decays."""
        of_muon = super().cost(config)
        return replace(of_muon, moved=of_muon.moved + 2 * of_muon.state)


def polynomials_of(settings: UpdateSettings) -> Polynomials:
    """Return the coefficients (a, b, c) of each polynomial that the settings list, or name as an iteration."""
    given = dict(settings.own)["polynomials"]
    return ITERATIONS[given] if isinstance(given, str) else tuple((a, b, c) for a, b, c in given)
