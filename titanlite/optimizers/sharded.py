"""The optimizer: each rank updates its shards by the rules of a recipe. The device decides whether to skip a step.

A shipped rule is a class in a file of this folder, and a class of groups in `config/recipe_schema.py` that names the
rule and has its keys.
"""

import importlib
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.checkpoint.optimizer_state import PREFIX
from titanlite.config.parameter_groups import UpdateSettings, rows_of_groups
from titanlite.config.recipe_schema import FROZEN, GROUP_OF_RULE, OptimizerRecipe
from titanlite.config.schema import Optimizer
from titanlite.errors import Problem, StepError, describe
from titanlite.float8.weight import as_laid_out, local_data
from titanlite.models.matrices import Matrix
from titanlite.optimizers.group_norms import GroupNorms
from titanlite.optimizers.rule import ParametersOfRule, ShippedRule, UpdateCost, UpdateRule
from titanlite.optimizers.rule_of_file import RuleOfFile
from titanlite.parallel.mesh import Mesh
from titanlite.parallel.replicated_gradients import is_replicated
from titanlite.receipt import Entry


def shipped_rule(rule: str) -> type[ShippedRule]:
    """Import the class of the rule that titanlite ships under this name."""
    module, _, name = GROUP_OF_RULE[rule].update.partition(".")
    return getattr(importlib.import_module(f"titanlite.optimizers.{module}"), name)


def update_cost(rule: str, recipe: OptimizerRecipe, config: Optimizer) -> UpdateCost:
    """Return the bytes per element of a parameter that the rule named `rule` of a recipe keeps and moves."""
    if rule == FROZEN:
        return UpdateCost(state=0, moved=0)
    own = recipe.own_rules.get(rule)
    return RuleOfFile.cost_of(own, config) if own else shipped_rule(rule).cost(config)


class ShardedOptimizer:
    """The optimizer of one run. Make it after FSDP's lazy initialisation, because that may move the shards.

    Attributes:
        locals: this rank's shard of each parameter.
        updates: [] float32, steps applied so far.
        trained: parameters that are not frozen.
        names: trained parameters of which this rank holds a part: with more ranks than rows, some shards are empty.
        rules: the rules by name; each updates the parameters that have it.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        config: Optimizer,
        recipe: OptimizerRecipe,
        settings: Mapping[str, UpdateSettings],
        mesh: Mesh,
        matrices: Mapping[str, Sequence[Matrix]],
    ) -> None:
        self.config, self.recipe, self.settings, self.mesh, self.parameters = config, recipe, settings, mesh, parameters
        self.locals = {name: local_data(p) for name, p in parameters.items()}
        self.updates = torch.zeros((), device=mesh.device)
        self.trained = {name: p for name, p in parameters.items() if settings[name].rule != FROZEN}
        self.names = [name for name in self.trained if self.locals[name].numel()]
        # Parameters that every tensor-parallel rank holds completely are counted once in the norm.
        self._shared = [n for n in self.names if mesh.tp_size > 1 and is_replicated(parameters[n])]
        self._owned = [n for n in self.names if n not in set(self._shared)]
        rules = dict.fromkeys(settings[name].rule for name in self.trained)
        self.rules = {rule: self._rule(rule, matrices) for rule in rules}

    def _rule(self, rule: str, matrices: Mapping[str, Sequence[Matrix]]) -> UpdateRule:
        settings = {name: own for name, own in self.settings.items() if own.rule == rule}
        parameters = {name: self.parameters[name] for name in settings}
        shards = {name: self.locals[name] for name in settings}
        own = ParametersOfRule(parameters, shards, settings, self.config, self.mesh, self.updates, matrices)
        of_file = self.recipe.own_rules.get(rule)
        return RuleOfFile(own, of_file) if of_file else shipped_rule(rule)(own)

    def step(
        self, grads: dict[str, Tensor], lr: float, divisor: Tensor, skip: Tensor, norms: GroupNorms | None = None
    ) -> None:
        """Apply one update, or none. Arguments as in `UpdateRule.step`; `grads` are from the method `gradients`."""
        self.updates += 1 - skip
        for rule in self.rules.values():
            rule.step(grads, lr, divisor, skip, norms)

    def gradients(self) -> dict[str, Tensor]:
        """Return this rank's shard of each gradient, float32, in the memory that backward filled.

        Raises:
            StepError: some trained parameter has no gradient.
        """
        if without := [name for name, p in self.trained.items() if p.grad is None]:
            want = "a gradient for every parameter that is not frozen"
            fix = "take out of the model what forward does not use; return zeros, not None, in a backward of your own"
            problems = [Problem(name, "no gradient after backward", want, fix) for name in without]
            raise StepError(describe("model", problems))
        return {name: local_data(p.grad) for name, p in self.trained.items() if p.grad is not None}

    @cached_property
    def groups(self) -> list[str]:
        """Names of the recipe's groups that have trained parameters."""
        return list(dict.fromkeys(self.settings[name].group for name in self.trained))

    def group_norms(self) -> GroupNorms:
        """Return an empty `GroupNorms`, to which the norms of a step are added."""
        return GroupNorms(self.groups, self._places, self.mesh)

    @cached_property
    def _places(self) -> dict[str, tuple[int, bool]]:
        """Return the argument `places` of `GroupNorms`."""
        number, shared = {group: n for n, group in enumerate(self.groups)}, set(self._shared)
        return {name: (number[self.settings[name].group], name in shared) for name in self.names}

    def norm(self, grads: dict[str, Tensor], norms: GroupNorms | None = None) -> Tensor:
        """Return the L2 norm of all gradients together. If `norms` is given, add the norm of each gradient to it.

        Returns:
            [] float32, equal on every rank.
        """
        of_owned, of_shared = (_norms_of([grads[n] for n in names]) for names in (self._owned, self._shared))
        if norms is not None:
            norms.add_gradients([*self._owned, *self._shared], [*of_owned, *of_shared])
        square = _sum_of_squares(of_owned, self.mesh.device)
        square += _sum_of_squares(of_shared, self.mesh.device) / self.mesh.tp_size
        dist.all_reduce(square)
        return (square / self.mesh.replicas).sqrt()

    @property
    def kept(self) -> dict[str, dict[str, Tensor]]:
        """Optimizer state: kind, such as "exp_avg" → parameter → tensor of the shape of this rank's shard."""
        found: dict[str, dict[str, Tensor]] = {}
        for rule in self.rules.values():
            for kind, tensors in rule.kept.items():
                found.setdefault(kind, {}).update(tensors)
        return found

    def state(self) -> dict[str, Tensor]:
        """Return the tensors for a checkpoint, laid out as the parameters. Loading into them restores the optimizer."""
        out: dict[str, Tensor] = {f"{PREFIX}updates": self.updates}
        for kind, tensors in self.kept.items():
            for name, local in tensors.items():
                out[f"{PREFIX}{kind}/{name}"] = as_laid_out(local, self.parameters[name])
        for rule in self.rules.values():
            for kind, tensors in rule.whole.items():
                out |= {f"{PREFIX}{kind}/{name}": tensor for name, tensor in tensors.items()}
        return out

    @property
    def rules_by_name(self) -> dict[str, str]:
        """The name of the rule of each parameter."""
        return {name: own.rule for name, own in self.settings.items()}

    def state_tensors(self) -> list[Tensor]:
        """Return all tensors of optimizer state that this rank keeps."""
        whole = [of for rule in self.rules.values() for of in rule.whole.values()]
        return [tensor for tensors in (*self.kept.values(), *whole) for tensor in tensors.values()]

    @property
    def sha256_of_file(self) -> str | None:
        """Return the hash of the user's file of rules; None without one."""
        return next((rule.sha256 for rule in self.recipe.own_rules.values()), None)

    def entry(self) -> Entry:
        """Return the receipt's entry: for each group its settings, and the names and sizes of its parameters.

        Collective over all ranks.
        """
        rows, groups = rows_of_groups(self.settings), dict[str, dict[str, object]]()
        for own, names in rows.items():
            is_excluded = own.weight_decay == 0 and sum(other.group == own.group for other in rows) > 1
            groups[f"{own.group} without weight decay" if is_excluded else own.group] = {
                "pattern": list(self.recipe.groups[own.group].pattern),
                **{key: value for key, value in own.of_rule().items() if key != "group"},
                "parameters": len(names),
                "elements": sum(self.parameters[name].numel() for name in names),  # on all ranks together
                "names": names,
            }
        counts = {name: f"{row['rule']}, {row['elements']:,} elements" for name, row in groups.items()}
        applied = {"recipe": self.config.recipe, **counts, "groups": groups}
        applied |= {f"of {name}": facts for name, rule in self.rules.items() if (facts := rule.facts())}
        count = len(self.settings)
        return Entry("optimizer", self.config.recipe, applied, count=count, key="optimizer.recipe")


def _norms_of(tensors: list[Tensor]) -> Sequence[Tensor]:
    return torch._foreach_norm(tensors) if tensors else ()


def _sum_of_squares(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.stack(tuple(norms)).square().sum() if norms else torch.zeros((), device=device)
