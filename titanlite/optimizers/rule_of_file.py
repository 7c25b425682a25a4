"""Apply the update rule of a user's file to each rank's shards.

A shard is updated in pieces, so that temporaries need only the memory of a piece. The rule gets its state in float32;
the state is rounded when it is stored. A skipped step changes no bit; the device decides whether to skip.
"""

import torch
from torch import Tensor

from titanlite.config.recipe_schema import OwnRule
from titanlite.config.schema import Optimizer
from titanlite.optimizers.group_norms import GroupNorms, around
from titanlite.optimizers.rule import ParametersOfRule, UpdateCost, UpdateRule, bytes_of_state
from titanlite.update_rules.find import bytes_of_update, own_rule

_PIECE = 1 << 24  # elements


class RuleOfFile(UpdateRule):
    """A rule of a user's file; see `UpdateRule`."""

    def __init__(self, own: ParametersOfRule, rule: OwnRule) -> None:
        dtype, settings = getattr(torch, own.config.state_dtype), own.settings
        self.kept = {
            kind: {name: torch.zeros_like(p, dtype=dtype) for name, p in own.locals.items()} for kind in rule.state
        }
        made = {keys: own_rule(rule, dict(keys)) for keys in dict.fromkeys(each.own for each in settings.values())}
        self._each = [(name, settings[name], made[settings[name].own]) for name in own.names]
        self._own, self._rule = own, rule

    @classmethod
    def cost_of(cls, rule: OwnRule, config: Optimizer) -> UpdateCost:
        """Return the cost per element, counted operation by operation: the norm, the division, state to float32 and
        back, decay, move, the choice by `skip`, and the operations of the rule itself."""
        each, n = bytes_of_state(config), len(rule.state)
        of_state = (each + 4) + (each + 4 + 4) + (4 + each)
        moved = 4 + 2 * 4 + 5 * 4 + 5 * 4 + n * of_state + bytes_of_update(rule)
        return UpdateCost(state=n * each, moved=moved)

    def facts(self) -> dict[str, object]:
        """Return the path of the user's file and its hash."""
        return {"file": self._rule.file, "sha256": self._rule.sha256}

    @torch.no_grad()
    def step(
        self, grads: dict[str, Tensor], lr: float, divisor: Tensor, skip: Tensor, norms: GroupNorms | None = None
    ) -> None:
        """See `UpdateRule.step`."""
        for name, settings, rule in self._each:
            own_lr = lr * settings.lr_factor
            decay = own_lr * settings.weight_decay * self._own.decay_factor(lr)
            of_shard = self._own.locals[name], grads[name], *(tensors[name] for tensors in self.kept.values())
            with around(norms, name, self._own.locals[name]):
                for parameter, gradient, *state in zip(*(t.view(-1).split(_PIECE) for t in of_shard), strict=True):
                    new = {k: t.to(torch.float32, copy=True) for k, t in zip(self.kept, state, strict=True)}
                    direction = rule.update(gradient.div_(divisor), parameter, new, self._own.updates)
                    moved = (parameter * (1 - decay)).sub_(direction, alpha=own_lr)
                    pairs = (parameter, moved), *((t, new[k]) for k, t in zip(self.kept, state, strict=True))
                    for tensor, updated in pairs:
                        tensor.copy_(torch.where(skip > 0, tensor, updated))
