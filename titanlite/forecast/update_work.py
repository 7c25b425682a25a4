"""Count the bytes that a step's update keeps, moves and sends on a rank, and its FLOPs, by the optimizer's rules.

Elementwise work follows from the number of elements of this rank's shard under each rule. Matrices are assigned to
owners as in the update itself (`parallel/share_matrices.py`). The rows that are sent are counted as a mean over ranks,
as each rank holds about as many of every matrix. An owner's part of a bucket is that of the owner with most.
"""

import functools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from titanlite.config.parameter_groups import UpdateSettings, update_settings
from titanlite.config.recipe_schema import FROZEN, MATRIX_RULES, ModelDims, OptimizerRecipe
from titanlite.config.schema import Config, Model
from titanlite.forecast.traced_run import TracedRun
from titanlite.kernels.orthogonalise import ITERATIONS, orthogonalise_flops
from titanlite.models.find import build_model
from titanlite.models.matrices import matrices_of
from titanlite.optimizers import weight_average
from titanlite.optimizers.rule import UpdateCost
from titanlite.optimizers.sharded import update_cost
from titanlite.parallel.share_matrices import BUCKET, part_of, share_matrices

AVERAGE = "average of weights"
"""Key of the average of weights (`optimizer.ema_decay`), beside the names of rules and groups."""

ITEMSIZE = 2
"""Bytes of an element that is sent, in bfloat16, or orthogonalised on a GPU, in float16."""

ITEMSIZE_OF_ROW = 4
"""Bytes of a row's new statistic (NorMuon) in float32, which is summed over ranks."""


class WholeParameter(NamedTuple):
    """A parameter before it is split, and the shape (R, C) of each matrix in it. Embeddings and vectors have none."""

    shape: tuple[int, ...]
    matrices: tuple[tuple[int, int], ...]

    @property
    def elements(self) -> int:
        """Return the number of elements of the parameter."""
        return math.prod(self.shape)


@functools.lru_cache(maxsize=4)
def whole_parameters(model: Model, dims: ModelDims, seq_len: int) -> Mapping[str, WholeParameter]:
    """Return the unsplit parameters of a model, by name."""
    built = build_model(model, dims, seq_len)
    with torch.device("meta"):  # also for row numbers: only shapes are needed
        shapes = {name: tuple(m.shape for m in found) for name, found in matrices_of(built).items()}
    return {name: WholeParameter(tuple(p.shape), shapes.get(name, ())) for name, p in built.named_parameters()}


@dataclass(frozen=True)
class BucketWork:
    """Numbers of elements in the matrices that are sent together.

    Attributes:
        elements: of all matrices, each once, as owners collect them.
        handed: of all results that owners send, each once for every rank that holds it.
        collected: most that one owner collects; `returned`: most that one owner sends.
        largest: of the largest stack (matrices of one shape and parameter on one owner), of the part of it that is
            orthogonalised, and of the squares of this.
    """

    elements: int
    handed: int
    collected: int
    returned: int
    largest: tuple[int, int, int]


@dataclass(frozen=True)
class SharedMatrices:
    """The matrices that are orthogonalised by the same polynomials.

    Attributes:
        steps: number of polynomials.
        owned: for each rank that owns matrices, their number by shape (R, C) of what is orthogonalised.
        buckets: in the order in which they are sent.
        share: of each matrix that is orthogonalised, as in `part_of`.
    """

    steps: int
    owned: tuple[Mapping[tuple[int, int], int], ...]
    buckets: tuple[BucketWork, ...]
    share: float | None = None

    @property
    def flops(self) -> int:
        """Return the FLOPs of orthogonalisation on the rank with most, symmetric products counted in full."""
        return max(sum(n * orthogonalise_flops(*rc, self.steps) for rc, n in own.items()) for own in self.owned)

    def buffers(self, world: int, sizes_rows: bool) -> int:
        """Return the most bytes that a rank holds at once on a GPU while `Muon.step` goes through the buckets.

        From the current bucket: the collected rows and the assembled matrices, which results replace. From the next and
        the previous bucket: rows being sent and received. Beside them the largest of three: a stack's temporaries in
        float16 (a product with its factors, or squares) and what Dion2 chose of it; two copies in float32 while rows
        are scaled (`sizes_rows`, NorMuon); the results to send. A CPU multiplies in float32 without such kernels, and
        needs more: `cpu_candidates` leaves half of its memory free.
        """
        none, most = BucketWork(0, 0, 0, 0, (0, 0, 0)), 0
        behind = (*self.buckets[1:], none)
        for last, now, following in zip((none, *self.buckets), self.buckets, behind, strict=False):
            under_way = following.collected + following.elements // world + last.returned + last.handed // world
            whole, n, squares = now.largest
            chosen = 0 if self.share is None else n
            beside = chosen + max(2 * n + squares, n + 4 * squares)
            beside = max(beside, 4 * whole * sizes_rows, now.returned + now.handed // world)
            most = max(most, ITEMSIZE * (2 * now.collected + under_way + beside))
        return most


@dataclass(frozen=True)
class GroupWork:
    """A parameter group of the recipe, or the average of weights (rule ""): elements of the model, bytes of a rank's
    state."""

    rule: str
    elements: int
    state: int


class UpdateWork:
    """The work of a run's optimizer update on one rank.

    Attributes:
        settings: the update settings of each parameter, by name.
        elements: elements of this rank's shard, by rule or `FROZEN`; `trained`: of these, those with a gradient.
        rows: rows of unsplit parameters with a statistic, by rule.
        shared: (rule, matrices) for each group of matrices that are orthogonalised with the same settings.
        state: bytes that the optimizer keeps; `average`: those for the average of the weights.
        buffers: temporary bytes during the update.
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
        self.trained = self._elements([name for name, own in self.settings.items() if own.rule != FROZEN])
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
        """Return the bytes that a step reads and writes for this rank's shard, by rule, and for `AVERAGE`."""
        found = {rule: self._costs[rule].moved * n for rule, n in self.elements.items() if rule != FROZEN}
        return found | ({AVERAGE: self._of_average.moved * sum(self.elements.values())} if self.average else {})

    @property
    def saved(self) -> int:
        """Return the bytes of a checkpoint: the weights in float32, their optimizer state, and their average."""
        total, whole = 0, self._whole()
        for name, own in self.settings.items():
            cost, each = self._costs[own.rule], whole[name]
            total += (4 + cost.state + self._of_average.state) * each.elements + cost.row * each.shape[0]
        return total

    def groups(self) -> dict[str, GroupWork]:
        """Return the size and state of each parameter group of the recipe, by name, and those of `AVERAGE`."""
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
        """Return the number of elements of some parameters in this rank's shard."""
        parts = [self.run.parameters[name] for name in names]
        others, experts = (sum(p.elements for p in parts if p.apart == apart) for apart in (False, True))
        return others // self._shards + experts // self._expert_shards

    def _state(self, rule: str, names: list[str]) -> int:
        """Return the bytes of state that a rule keeps for some parameters on this rank."""
        cost = self._costs[rule]
        return cost.state * self._elements(names) + cost.row * self._rows(rule, names)

    def _rows(self, rule: str, names: list[str]) -> int:
        """Return the number of rows for which a rule keeps a statistic; every rank holds it for all rows."""
        has_some = self._costs[rule].row > 0
        return sum(self._whole()[name].shape[0] for name in names) if has_some else 0

    def _shared(self, steps: int, names: tuple[str, ...]) -> SharedMatrices:
        whole, of_replica = self._whole(), self.world // self.replicas
        parts = [self.run.parameters[name] for name in names]
        shards = [self._expert_shards if part.apart else self._shards for part in parts]
        # The number of ranks that hold each element: one per replica, more if tensor parallelism leaves it unsplit.
        copies = [
            self.replicas * max(1, part.elements * of_replica // n // whole[name].elements)
            for name, part, n in zip(names, parts, shards, strict=True)
        ]
        matrices = tuple(whole[name].matrices for name in names)
        part = dict(self.settings[names[0]].own).get("share")
        return share(matrices, tuple(copies), self.world, steps, part=part)


@functools.lru_cache(maxsize=64)
def share(
    matrices: tuple[tuple[tuple[int, int], ...], ...],
    copies: tuple[int, ...],
    world: int,
    steps: int,
    most: int = BUCKET,
    part: float | None = None,
) -> SharedMatrices:
    """Assign matrices, given as (R, C) by parameter, to owners among `world` ranks, and count their elements.

    `copies`: number of ranks that hold each element, by parameter. `most`: most elements that a rank collects at once.
    `part`: the share of each matrix that is orthogonalised.
    """
    flat = [(parameter, rc) for parameter, found in enumerate(matrices) for rc in found]
    owned: dict[int, Counter[tuple[int, int]]] = {}
    stacks: list[dict[int, Counter[tuple[int, tuple[int, int]]]]] = []
    for i, bucket, owner in share_matrices([rc for _, rc in flat], world, steps, most, part):
        if bucket == len(stacks):
            stacks.append({})
        owned.setdefault(owner, Counter())[part_of(flat[i][1], part)] += 1
        stacks[bucket].setdefault(owner, Counter())[flat[i]] += 1
    return SharedMatrices(steps, tuple(owned.values()), tuple(_bucket(own, copies, part) for own in stacks), part)


def _bucket(
    stacks: Mapping[int, Mapping[tuple[int, tuple[int, int]], int]], copies: tuple[int, ...], part: float | None
) -> BucketWork:
    collected, returned, largest = list[int](), list[int](), (0, 0, 0)
    for own in stacks.values():
        each = {(p, rc): n * rc[0] * rc[1] for (p, rc), n in own.items()}
        collected.append(sum(each.values()))
        returned.append(sum(copies[p] * n for (p, _), n in each.items()))
        used = {rc: part_of(rc, part) for _, rc in own}
        stacks_of = ((each[p, rc], n * math.prod(used[rc]), n * min(used[rc]) ** 2) for (p, rc), n in own.items())
        largest = max(largest, *stacks_of)
    return BucketWork(sum(collected), sum(returned), max(collected), max(returned), largest)


def _orthogonalised_alike(settings: Mapping[str, UpdateSettings]) -> dict[tuple[object, int], list[str]]:
    """Group the parameters of matrix rules by equal settings: return names by (settings, number of polynomials)."""
    found: dict[tuple[object, int], list[str]] = {}
    for name, own in settings.items():
        if own.rule in MATRIX_RULES:
            given = dict(own.own)["polynomials"]
            steps = len(ITERATIONS[given] if isinstance(given, str) else given)
            found.setdefault(((own.rule, own.own), steps), []).append(name)
    return found
