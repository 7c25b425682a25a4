"""AdamW on each rank's shards, with clipping folded into the update.

The update is elementwise and runs on local shards, in one kernel for all parameters with the same learning rate, betas
and eps. Clipping costs only one read of the gradients, for their norm: the kernel of the update scales them. The device
also decides whether the step is applied, so the host never waits.

Source: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2.
"""

from itertools import groupby

import torch
from torch import Tensor

from titanlite.config.schema import Optimizer
from titanlite.kernels.adamw import AdamWState, adamw
from titanlite.optimizers.group_norms import GroupNorms
from titanlite.optimizers.rule import ParametersOfRule, ShippedRule, UpdateCost, bytes_of_state
from titanlite.parallel.replicated_gradients import is_replicated

_MOMENTS = "exp_avg", "exp_avg_sq"


class AdamW(ShippedRule):
    """AdamW as an update rule; see `UpdateRule`."""

    @classmethod
    def cost(cls, config: Optimizer) -> UpdateCost:
        """See `ShippedRule.cost`. The gradient is read twice (norm, update); all else is read and written once."""
        moments = len(_MOMENTS) * bytes_of_state(config)
        return UpdateCost(state=moments, moved=4 + 3 * 4 + 2 * moments)

    def __init__(self, own: ParametersOfRule) -> None:
        dtype = getattr(torch, own.config.state_dtype)
        self.kept = {
            kind: {name: torch.zeros_like(p, dtype=dtype) for name, p in own.locals.items()} for kind in _MOMENTS
        }
        together: dict[tuple[float, float, float, float], list[str]] = {}
        self._decay_factor = own.decay_factor
        self._place = {n: (own.settings[n].group, is_replicated(own.parameters[n])) for n in own.names}
        for name in sorted(own.names, key=self._place.__getitem__):  # so that `_runs` finds equal places together
            of = own.settings[name]
            keys = dict(of.own)
            together.setdefault((of.lr_factor, keys["beta1"], keys["beta2"], keys["eps"]), []).append(name)
        self._updates = [
            (names, lr_factor, adamw(self._state(own, names, beta1, beta2, eps)), [run[0] for run in self._runs(names)])
            for (lr_factor, beta1, beta2, eps), names in together.items()
        ]

    def _state(self, own: ParametersOfRule, names: list[str], beta1: float, beta2: float, eps: float) -> AdamWState:
        return AdamWState(
            *([tensors[n] for n in names] for tensors in (own.locals, *self.kept.values())),
            weight_decays=[own.settings[n].weight_decay for n in names],
            runs=[len(run) for run in self._runs(names)],
            updates=own.updates,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
        )

    def _runs(self, names: list[str]) -> list[list[str]]:
        """Split sorted names into runs with the same place: (group of the recipe, whether it is replicated)."""
        return [list(run) for _, run in groupby(names, self._place.__getitem__)]

    def step(
        self, grads: dict[str, Tensor], lr: float, divisor: Tensor, skip: Tensor, norms: GroupNorms | None = None
    ) -> None:
        """See `UpdateRule.step`."""
        given = divisor, skip, norms is not None, self._decay_factor(lr)
        for names, lr_factor, update, first_of_runs in self._updates:
            sums = update([grads[name] for name in names], lr_factor * lr, *given)
            if norms is not None:
                for name, squares in zip(first_of_runs, sums, strict=True):
                    norms.add_update(name, squares)
