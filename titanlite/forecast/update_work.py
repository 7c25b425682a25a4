"""Count what the update of a step keeps, moves, sends and computes on a rank, by the rules of the optimizer's recipe.

What is elementwise follows from the elements that each rule has of this rank's shard. Matrices are shared out as the
update itself does it (`parallel/share_matrices.py`). The rows that travel are counted in the mean of the ranks, as each
has about the same of every matrix, and what an owner has of a bucket is that of the one with most.
"""

import functools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from titanlite.config.parameter_groups import UpdateSettings, update_settings
from titanlite.config.recipe_schema import MATRIX_RULES, ModelDims, OptimizerRecipe
from titanlite.config.schema import Config, Model
from titanlite.forecast.traced_run import TracedRun
from titanlite.kernels.orthogonalise import ITERATIONS, orthogonalise_flops
from titanlite.models.find import build_model
from titanlite.models.matrices import matrices_of
from titanlite.optimizers import weight_average
from titanlite.optimizers.rule import UpdateCost
from titanlite.optimizers.sharded import update_cost
from titanlite.parallel.share_matrices import BUCKET, share_matrices

AVERAGE = "average of weights"
"""Stands beside rules and groups for what `optimizer.ema_decay` asks for."""

ITEMSIZE = 2
"""Bytes of what travels, in bfloat16, and of what a GPU orthogonalises it in, float16."""

ITEMSIZE_OF_ROW = 4
"""Bytes of the new number of a row, in float32, which ranks add up."""


class WholeParameter(NamedTuple):
    """A parameter before it is split, and R and C of each of its matrices: none of an embedding or a vector."""

    shape: tuple[int, ...]
    matrices: tuple[tuple[int, int], ...]

    @property
    def elements(self) -> int:
        """Return the number of its elements."""
        return math.prod(self.shape)


@functools.lru_cache(maxsize=4)
def whole_parameters(model: Model, dims: ModelDims, seq_len: int) -> Mapping[str, WholeParameter]:
    """Return the weights of a model by name."""
    built = build_model(model, dims, seq_len)
    with torch.device("meta"):  # rows are numbered there, too: shapes alone are wanted
        shapes = {name: tuple(m.shape for m in found) for name, found in matrices_of(built).items()}
    return {name: WholeParameter(tuple(p.shape), shapes.get(name, ())) for name, p in built.named_parameters()}


@dataclass(frozen=True)
class BucketWork:
    """The matrices that travel together, in elements.

    Attributes:
        elements: of all, each once, which owners collect.
        handed: of their results, once for each rank that has a row.
        collected: of the owner with most; `returned` of its results.
        largest: of its largest stack, the matrices of one shape and parameter, and of their squares.
    """

    elements: int
    handed: int
    collected: int
    returned: int
    largest: tuple[int, int]


@dataclass(frozen=True)
class SharedMatrices:
    """The matrices that are orthogonalised by the same polynomials, `steps` of them.

    Attributes:
        owned: of each rank that owns some, how many of each R and C.
        buckets: in the order in which they travel.
    """

    steps: int
    owned: tuple[Mapping[tuple[int, int], int], ...]
    buckets: tuple[BucketWork, ...]

    @property
    def flops(self) -> int:
        """Return the FLOPs of the rank with most, symmetric products in full."""
        return max(sum(n * orthogonalise_flops(*rc, self.steps) for rc, n in own.items()) for own in self.owned)

    def buffers(self, world: int, sizes_rows: bool) -> int:
        """Return the bytes that the rank with most holds at once on a GPU, as `Muon.step` goes through the buckets.

        Of the bucket under computation: what was collected, and whole matrices, which results replace. What is under
        way of the next and the last. Beside them what orthogonalisation makes of one stack in float16: a product with
        its factors, or squares; or two copies in float32 while rows are normalised (`sizes_rows`, NorMuon); or what is
        handed back. A CPU, which multiplies in float32 and has no such kernels, needs more: `cpu_candidates` leaves it
        half of the memory.
        """
        none, most = BucketWork(0, 0, 0, 0, (0, 0)), 0
        behind = (*self.buckets[1:], none)
        for last, now, following in zip((none, *self.buckets), self.buckets, behind, strict=False):
            under_way = following.collected + following.elements // world + last.returned + last.handed // world
            n, squares = now.largest
            beside = max(2 * n + squares, n + 4 * squares, 4 * n * sizes_rows, now.returned + now.handed // world)
            most = max(most, ITEMSIZE * (2 * now.collected + under_way + beside))
        return most


@dataclass(frozen=True)
class GroupWork:
    """A group of the recipe, or with rule "" the average of weights: its elements, and bytes of a rank's state."""

    rule: str
    elements: int
    state: int


class UpdateWork:
    """The update of a run.

    Attributes:
        settings: how each parameter is updated.
        elements: of this rank's shard that each rule has; `rows` of whole parameters of which it keeps a number.
        shared: the matrices of rules that orthogonalise, each with its rule; one momentum and polynomials at a time.
        state: bytes that the optimizer keeps, `average` of them for the average of the weights.
        buffers: bytes of the update itself.
    """

    def __init__(
        self,
        config: Config,
        rules: OptimizerRecipe,
        run: TracedRun,
        world: int,
        replicas: int,
        shards: int,
        expert_shards: int,
    ) -> None:
        self.config, self.run, self.world, self.replicas = config, run, world, replicas
        self._shards, self._expert_shards = shards, expert_shards
        shapes = {name: part.shape for name, part in run.parameters.items()}
        self.settings = update_settings(rules, config.optimizer, shapes)
        names: dict[str, list[str]] = {}
        for name, own in self.settings.items():
            names.setdefault(own.rule, []).append(name)
        self.elements = {rule: self._elements(own) for rule, own in names.items()}
        self._costs = {rule: update_cost(rule, rules, config.optimizer) for rule in names}
        self._of_average = weight_average.COST if config.optimizer.ema_decay else UpdateCost(state=0, moved=0)
        self.average = self._of_average.state * sum(self.elements.values())
        self.rows = {rule: self._rows(rule, own) for rule, own in names.items()}
        self.state = self.average + sum(self._state(rule, own) for rule, own in names.items())
        self.shared = [
            (self.settings[own[0]].rule, self._shared(steps, tuple(own)))
            for (_, steps), own in _orthogonalised_alike(self.settings).items()
        ]
        buffers = (shared.buffers(world, self.rows[rule] > 0) for rule, shared in self.shared)
        self.buffers = max(buffers, default=0)
        self.buffers += ITEMSIZE_OF_ROW * sum(self.rows.values())

    def moved(self) -> dict[str, int]:
        """Return the bytes of this rank's shard that a step reads and writes, by rule, and of the average."""
        found = {rule: self._costs[rule].moved * n for rule, n in self.elements.items()}
        return found | ({AVERAGE: self._of_average.moved * sum(self.elements.values())} if self.average else {})

    @property
    def saved(self) -> int:
        """Return the bytes of a checkpoint: the weights in float32, what is kept of them, and their average."""
        total, whole = 0, self._whole()
        for name, own in self.settings.items():
            cost, each = self._costs[own.rule], whole[name]
            total += (4 + cost.state + self._of_average.state) * each.elements + cost.row * each.shape[0]
        return total

    def groups(self) -> dict[str, GroupWork]:
        """Return what each group of the recipe has, and the average of the weights."""
        whole, names = self._whole(), dict[str, list[str]]()
        for name, own in self.settings.items():
            names.setdefault(own.group, []).append(name)
        found: dict[str, GroupWork] = {}
        for group, members in names.items():
            rule = self.settings[members[0]].rule
            found[group] = GroupWork(rule, sum(whole[name].elements for name in members), self._state(rule, members))
        if self.average:
            found[AVERAGE] = GroupWork("", sum(group.elements for group in found.values()), self.average)
        return found

    def _whole(self) -> Mapping[str, WholeParameter]:
        return whole_parameters(self.config.model, self.run.dims, self.run.seq_len)

    def _elements(self, names: list[str]) -> int:
        """Return the elements of some parameters in this rank's shard."""
        parts = [self.run.parameters[name] for name in names]
        others, experts = (sum(p.elements for p in parts if p.apart == apart) for apart in (False, True))
        return others // self._shards + experts // self._expert_shards

    def _state(self, rule: str, names: list[str]) -> int:
        """Return the bytes that a rule keeps of some parameters."""
        cost = self._costs[rule]
        return cost.state * self._elements(names) + cost.row * self._rows(rule, names)

    def _rows(self, rule: str, names: list[str]) -> int:
        """Return the rows of which a rule keeps a number, on every rank."""
        has_some = self._costs[rule].row > 0
        return sum(self._whole()[name].shape[0] for name in names) if has_some else 0

    def _shared(self, steps: int, names: tuple[str, ...]) -> SharedMatrices:
        whole, of_replica = self._whole(), self.world // self.replicas
        parts = [self.run.parameters[name] for name in names]
        shards = [self._expert_shards if part.apart else self._shards for part in parts]
        # Ranks that have each element: one of a replica, or those of tensor parallelism that have it whole.
        copies = [
            self.replicas * max(1, part.elements * of_replica // n // whole[name].elements)
            for name, part, n in zip(names, parts, shards, strict=True)
        ]
        matrices = tuple(whole[name].matrices for name in names)
        return share(matrices, tuple(copies), self.world, steps)


@functools.lru_cache(maxsize=64)
def share(
    matrices: tuple[tuple[tuple[int, int], ...], ...],
    copies: tuple[int, ...],
    world: int,
    steps: int,
    most: int = BUCKET,
) -> SharedMatrices:
    """Share out the matrices of some parameters, R and C of each, over `world` ranks.

    `copies` are the ranks that have each element, by parameter; a rank collects at `most` so many elements at a time.
    """
    flat = [(parameter, rc) for parameter, found in enumerate(matrices) for rc in found]
    owned: dict[int, Counter[tuple[int, int]]] = {}
    stacks: list[dict[int, Counter[tuple[int, tuple[int, int]]]]] = []
    for i, bucket, owner in share_matrices([rc for _, rc in flat], world, steps, most):
        if bucket == len(stacks):
            stacks.append({})
        owned.setdefault(owner, Counter())[flat[i][1]] += 1
        stacks[bucket].setdefault(owner, Counter())[flat[i]] += 1
    return SharedMatrices(steps, tuple(owned.values()), tuple(_bucket(own, copies) for own in stacks))


def _bucket(stacks: Mapping[int, Mapping[tuple[int, tuple[int, int]], int]], copies: tuple[int, ...]) -> BucketWork:
    collected, returned, largest = list[int](), list[int](), (0, 0)
    for own in stacks.values():
        each = {(p, rc): n * rc[0] * rc[1] for (p, rc), n in own.items()}
        collected.append(sum(each.values()))
        returned.append(sum(copies[p] * n for (p, _), n in each.items()))
        largest = max(largest, *((each[p, rc], n * min(rc) ** 2) for (p, rc), n in own.items()))
    return BucketWork(sum(collected), sum(returned), max(collected), max(returned), largest)


def _orthogonalised_alike(settings: Mapping[str, UpdateSettings]) -> dict[tuple[object, int], list[str]]:
    """Return the parameters of matrix rules that are updated together, by what is alike and the polynomials' number."""
    found: dict[tuple[object, int], list[str]] = {}
    for name, own in settings.items():
        if own.rule in MATRIX_RULES:
            given = dict(own.own)["polynomials"]
            steps = len(ITERATIONS[given] if isinstance(given, str) else given)
            found.setdefault(((own.rule, own.own), steps), []).append(name)
    return found
