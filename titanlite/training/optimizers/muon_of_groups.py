"""Muon as the rule of groups of a recipe: one `Muon` for all that have one momentum and one sequence of polynomials."""

import torch
from torch import Tensor

from titanlite.config.parameter_groups import UpdateSettings
from titanlite.kernels.orthogonalise import ITERATIONS, Polynomials
from titanlite.training.optimizers.muon import Muon, MuonRule, Pace
from titanlite.training.optimizers.rule import ParametersOfRule, UpdateRule


class MuonOfGroups(UpdateRule):
    """See `UpdateRule`."""

    def __init__(self, own: ParametersOfRule) -> None:
        dtype = getattr(torch, own.config.state_dtype)
        together: dict[MuonRule, list[str]] = {}
        for name, of in own.settings.items():
            rule = MuonRule(polynomials_of(of), of.momentum, of.nesterov, state_dtype=dtype)
            together.setdefault(rule, []).append(name)
        self._each: list[Muon] = []
        for rule, names in together.items():
            paces = {n: Pace(own.settings[n].lr_factor, own.settings[n].weight_decay) for n in names}
            self._each.append(Muon({n: own.parameters[n] for n in names}, own.mesh, own.matrices, rule, paces))
        self.kept = {"momentum": {n: m for each in self._each for n, m in each.kept["momentum"].items()}}

    def step(self, grads: dict[str, Tensor], lr: float, divisor: Tensor, skip: Tensor) -> None:
        """See `UpdateRule.step`."""
        for each in self._each:
            each.step(grads, lr, divisor, skip)


def polynomials_of(settings: UpdateSettings) -> Polynomials:
    """Return the coefficients of each step."""
    given = settings.polynomials
    return ITERATIONS[given] if isinstance(given, str) else tuple((a, b, c) for a, b, c in given)
