"""Predict what a rank's GPU holds at the peak of a step, by category, in bytes.

The prediction is of `memory_gib`, the peak that the caching allocator reserved. This excludes CUDA's context, NCCL's
buffers and symmetric memory, a few GiB in all.

Memory in which FSDP gathers weights that several ranks shard is never freed (`parallel/placed_units.py`): that of two
units that are freed after forward, and of all others. If copy engines gather, it is symmetric memory.

The allocator reserves memory by stream: no stream takes memory that another has freed. FSDP reduces gradients on one of
its own, so the peak is the sum of two peaks, whenever each occurs:

    compute     parameters, optimizer state, gathered weights and activations, at the worst moment of backward. This is
                the head, with the logits and the gradient of its weight; a block, with its recomputation; or the
                gradient of the head's or the embedding's weight, which exists in the compute dtype and in float32
    reducing    all gradients, if this stream widens them or more micro-steps follow: they then exist before the first
                activations are freed. Also the buffers of the reduction

All other gradients are allocated on the compute stream, while activations and gathered weights are freed: unit by unit,
or one by one on a single rank. None exist yet while the head is computed, and nearly all do in the last block.

Compared with measured runs in `tests/unit/forecast/test_memory.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate

from torch import nn

from titanlite.byte_size import GIB
from titanlite.config.check import uses_copy_engines
from titanlite.config.recipe_schema import FROZEN, Float8Recipe, ModelDims, OptimizerRecipe, SaveList
from titanlite.config.schema import Config
from titanlite.config.stages import sequences_per_step
from titanlite.forecast.activation_cost import BlockCost, block_costs, held_without_checkpointing
from titanlite.forecast.network import GPUS_OF_A_HOST, Ranks, placed
from titanlite.forecast.traced_run import traced_run
from titanlite.forecast.update_work import UpdateWork
from titanlite.parallel.fsdp import frees_after_forward
from titanlite.parallel.reduction import SUMS_OF_REPLICAS

HOLES = 0.2
"""Holes that stay unused when gradients are allocated in the memory of freed activations, as a share of the gradients.
Measured: 0.15 to 0.21 (runs of `2f2e563` in benchmarks/results/runs.jsonl)."""


HOLES_OF_SHARDS = 0.08
"""`HOLES` where gradients are shards of reduced sums: of one size, and smaller than most of the freed activations."""


HOLES_AT_THE_END = 0.95
"""Holes when an embedding's gradient is reduced, as a share of that gradient: it fits into none of the freed pieces.
Fitted, with `HOLES_OF_SHARDS`, to 16 runs of `full`, whose holes vary from 1.2 to 3.3 GiB (`memory_full` of
runs.jsonl)."""


SLACK = 2 * GIB // 5
"""Bytes that a run reserves beyond its tensors: workspaces of the matrix libraries, unused parts of segments.
Measured: 0.2 to 1.0 GiB."""


MARGIN = 0.015
"""Share of a budget that stays free: the prediction is 1.4 % too low for two runs of runs.jsonl, less for the rest."""


def usable(budget_gib: float) -> float:
    """Return the bytes that a predicted peak may have so that the measured peak stays within a budget in GiB."""
    return budget_gib * GIB * (1 - MARGIN)


def spans_hosts(config: Config, world: int, host: int) -> bool:
    """Return whether an expert-parallel group, which has consecutive ranks, is on several hosts of `host` GPUs."""
    return placed(config.parallelism.expert_parallel_degree, 1, world, host).hosts > 1


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the peak.

    Attributes:
        parameters: this rank's shard in float32.
        gradients: of this shard in float32; if `MemoryModel.gradients_follow`, only the ones that exist at the peak.
        optimizer: the optimizer's state, and the average of the weights.
        gathered_weights: memory in which FSDP gathers weights in the compute dtype, or unused memory of the freed head.
        communication: gradients that are being reduced, and sums that are no gradients yet.
        activations: kept by the save-list, in the blocks whose backward is not done.
        logits: in the compute dtype; 0 if the peak is not in the head.
        working_set: temporary tensors at the peak: casts and gradients of the head, or recomputed activations and
            gradients of a block.
        slack: memory that the allocator reserves but does not use, holes between gradients included.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered_weights: int
    communication: int
    activations: int
    logits: int
    working_set: int
    slack: int

    @property
    def total(self) -> int:
        """Return the sum of all categories."""
        return sum(self.categories().values())

    def categories(self) -> dict[str, int]:
        """Return the bytes of each category, by its name in words."""
        return {f.name.replace("_", " "): getattr(self, f.name) for f in fields(self)}


class MemoryModel:
    """Predicts the peak of a run's memory on one rank, under any save-list.

    Args:
        config, dims, float8, rules: the run's config, model dimensions, float8 recipe and optimizer recipe.
        world: number of processes.
        model: the trainer's; None: `traced_run` builds one.
        host: GPUs of one host; None: `GPUS_OF_A_HOST`.

    Attributes:
        run: the traced model of the rank.
        shards: number of ranks over which FSDP splits each parameter, in each of `replicas` groups; `expert_shards` for
            the experts of an expert-parallel rank.
        embedding: elements on a rank before FSDP splits them, with those of positions; `parameters`: all elements;
            `shard`: all elements after the split.
        trained: elements with a gradient before the split, by part of the model: for each block those of the "block"
            without experts that ranks share out, and of these "experts"; of the "embedding"; and of the "head" with the
            final norm.
        copy_engines: whether copy engines gather and reduce all but experts with ranks of their own, as far as the
            config determines.
        gathered_block: bytes of a block as FSDP gathers it; `gathered_experts` and `gathered_head` likewise.
        alone: whether this is the only data-parallel rank, so that gradients are not reduced.
        sums_are_gradients: whether a sum is neither cast nor added to a gradient.
        gradients_follow: whether gradients are allocated in the memory of activations that backward frees. False if
            they exist before, from an earlier micro-step, or if the reducing stream widens them.
        blocks_stay: whether gathered blocks, and an embedding with a unit of its own, are held until backward.
        ends_freed: whether the gathered head, or a tied embedding, is freed after forward.
        reduced: bytes of an element of a gradient in a collective's reduction; `sent`: as it is sent, by part as in
            `trained`; `copied`: of the copy from which an element of the ends' gradients is sent.
        optimizer: the work of the optimizer's update.
    """

    def __init__(
        self,
        config: Config,
        dims: ModelDims,
        float8: Float8Recipe | None,
        rules: OptimizerRecipe,
        world: int,
        model: nn.Module | None = None,
        host: int | None = None,
    ) -> None:
        self.config, self.dims, self.float8, self.rules, self.world = config, dims, float8, rules, world
        self.host = host or GPUS_OF_A_HOST
        self.run = traced_run(config, dims, float8, model, spans_hosts(config, world, self.host))
        mesh, training, t = config.parallelism, config.training, config.parallelism.tensor_parallel_degree
        data_ranks = world // t
        self.replicas = mesh.data_parallel_replicate_degree
        self.shards = data_ranks // self.replicas
        self.expert_shards = max(1, self.shards * t // mesh.expert_parallel_degree)
        at_once = training.local_batch_size * (data_ranks // mesh.context_parallel_degree)
        self.micro_steps = sequences_per_step(config, world) // at_once
        self.reduced = {"float32": 4, "bfloat16": 2}[training.mixed_precision_reduce]
        self.alone = data_ranks == 1
        self.sums_are_gradients = self.micro_steps == 1 and self.reduced == 4
        self.gradients_follow = self.micro_steps == 1 and (self.alone or self.reduced == 4)
        frees_blocks, self.ends_freed = frees_after_forward(config, self.shards)
        self.blocks_stay = not frees_blocks
        self.copy_engines = uses_copy_engines(config, self.shards)
        of_most = self.run.itemsize if self.copy_engines else self.reduced
        self.sent = dict.fromkeys(("block", "embedding", "head"), of_most) | {"experts": self.reduced}
        self.copied = 0 if self.copy_engines else self.reduced
        of_blocks, first, last = self.run.block_units, self.run.embedding, self.run.output
        self.gathered_block = max(unit.gathered for unit in of_blocks)
        self.gathered_experts = max(unit.gathered for unit in self.run.expert_units)
        self.embedding = first.elements
        # Tied weights are one unit, gathered from the first layer to the end of backward.
        self.gathered_head = last.gathered or first.gathered
        others, of_experts = (sum(u.elements for u in us) for us in ((*of_blocks, first, last), self.run.expert_units))
        self.parameters = others + of_experts
        self.shard = others // self.shards + of_experts // self.expert_shards
        self.optimizer = UpdateWork(config, rules, self.run, world, self.replicas, self.shards, self.expert_shards)
        self.trained = self._trained()

    def ranks(self, size: int, stride: int = 1) -> Ranks:
        """Return the group of every `stride`-th rank, `size` in all."""
        return placed(size, stride, self.world, self.host)

    def _trained(self) -> dict[str, list[int]]:
        of_blocks = [0] * len(self.run.block_units)
        found = {"block": [*of_blocks], "experts": of_blocks, "embedding": [0], "head": [0]}
        for name, each in self.run.parameters.items():
            in_block, in_head = name.startswith("layers."), name.startswith(("norm.", "output."))
            part = ("experts" if each.apart else "block") if in_block else "head" if in_head else "embedding"
            number = int(name.split(".")[1]) if in_block else 0
            found[part][number] += each.elements * (self.optimizer.settings[name].rule != FROZEN)
        if not self.run.output.elements:  # tied weights are one unit
            found["head"] = found["embedding"] = [found["embedding"][0] + found["head"][0]]
        return found

    @property
    def symmetric_memory(self) -> int:
        """Return the bytes of symmetric memory: of gathered weights, a unit's gradients, and exchanged tokens."""
        of_gradients = self.run.itemsize * max(max(self.trained[part]) for part in ("block", "embedding", "head"))
        of_units = self._places() + of_gradients if self.copy_engines else 0
        received, ranks = max((block.most_exchanged for block in self.run.blocks), default=0), self.run.expert_parallel
        in_place = ranks > 1 and not self.run.exchange_by_nccl
        return of_units + (received * ranks // (ranks - 1) if in_place else 0)

    @property
    def later_window(self) -> int:
        """Return the bytes beyond the peak if a rank's experts have rows for two windows (`expert_windows.py`)."""
        return max((block.later_windows[0] for block in self.run.blocks), default=0)

    @property
    def all_windows(self) -> int:
        """Return `later_window` for the worst routing."""
        return max((block.later_windows[1] for block in self.run.blocks), default=0)

    def needed_under(self, save_list: SaveList) -> int:
        """Return the bytes of the peak under a save-list, and of a second window of experts' rows."""
        return self.peak_under(save_list).total + self.later_window

    def peak_under(self, save_list: SaveList) -> Memory:
        """Predict the peak of memory under a save-list.

        Raises:
            RecipeError: as `block_costs`.
        """
        return self.peak(block_costs(self.run, save_list))

    def peak(self, blocks: Sequence[BlockCost]) -> Memory:
        """Predict the peak of memory from the cost of each block, in the order in which the blocks run."""
        shard, e, n = self.shard, self.run.itemsize, len(blocks)
        held, tied = sum(block.held for block in blocks), self.dims.tied_embeddings
        block, embedding, head, placed = self._gathered()
        stays = n * block if self.blocks_stay else 0
        embedding = embedding if self.blocks_stay and not tied else 0
        trained, of_shard = self.trained, 4 * self.optimizer.trained
        of_head = 0 if tied else 4 * trained["head"][0] // self.shards  # a tied gradient comes after the blocks

        def gradients(blocks_done: int) -> tuple[int, int]:
            """Return the bytes of gradients after backward of `blocks_done` blocks, and of the holes between them."""
            of_blocks = 4 * self._last_trained["block"][blocks_done] // self.shards
            of_blocks += 4 * self._last_trained["experts"][blocks_done] // self.expert_shards
            share = HOLES if self.alone else HOLES_OF_SHARDS
            return (of_head + of_blocks, int(share * of_blocks)) if self.gradients_follow else (of_shard, 0)

        # The moments of backward at which the peak may be, as (gathered weights, communication, gradients, holes,
        # activations, logits, working set).
        moments = [(stays + embedding + head, 0, 0 if self.gradients_follow else of_shard, 0, held, *self._loss())]
        left = held
        # A tied head stays gathered until the end, and so does its gradient.
        of_ends, gradient_of_ends = (head, e * trained["head"][0]) if tied else (0, 0)
        sent = {part: 0 if self._in_place(part) else n_bytes for part, n_bytes in self.sent.items()}
        copied = 0 if self._in_place("head") else self.copied
        of_block = sum(sent[part] * max(trained[part]) for part in ("block", "experts"))
        before = 0 if tied else sent["head"] * trained["head"][0]  # is kept until the next unit is reduced
        kept = self._kept
        for done, cost in enumerate(reversed(blocks)):
            traced = self.run.blocks[n - 1 - done]
            weights = (stays - done * block if self.blocks_stay else block) + embedding + of_ends
            again = max(0, kept[id(traced)] - cost.held)
            own = again + self._in_block(n - 1 - done)
            moments.append((weights, gradient_of_ends + before, *gradients(done), left, 0, own))
            left, before = left - cost.held, of_block
        if not tied:  # even if FSDP has freed the gathered head: the reduced gradient does not fit into its memory
            own = e * trained["head"][0] + e * self.run.tokens * self.dims.dim
            moments.append((stays + embedding + head, copied * trained["head"][0], *gradients(0), held, 0, own))
        last, as_it_came = copied * trained["embedding"][0], e * trained["embedding"][0]
        holes = gradients(n)[1] + (int(HOLES_AT_THE_END * last) if self.gradients_follow else 0)
        moments.append((as_it_came if self.alone else 0, last, of_shard, holes, 0, 0, as_it_came))
        if self.optimizer.buffers:  # the update's, in memory of freed activations
            moments.append((0, 0, of_shard, gradients(n)[1], 0, 0, self.optimizer.buffers))
        gathered, buffers, made, holes, activations, logits, working_set = max(moments, key=sum)
        return Memory(
            parameters=4 * shard,
            gradients=made,
            optimizer=self.optimizer.state,
            gathered_weights=gathered + placed,
            communication=buffers + self._reducing(),
            activations=activations,
            logits=logits,
            working_set=working_set,
            slack=SLACK + holes,
        )

    @cached_property
    def _last_trained(self) -> Mapping[str, list[int]]:
        """Return the trained elements of the last 0, 1, … blocks together, by part."""
        return {part: [0, *accumulate(reversed(self.trained[part]))] for part in ("block", "experts")}

    @cached_property
    def _kept(self) -> Mapping[int, int]:
        """Return the bytes that a block keeps without checkpointing, by its id. Blocks that are alike share a trace."""
        kinds = {id(block): block for block in self.run.blocks}
        return {key: held_without_checkpointing(block, self.run.compiled) for key, block in kinds.items()}

    def _gathered(self) -> tuple[int, int, int, int]:
        """Return the bytes of a block, the embedding and the head that are allocated to gather them, and freed; and of
        memory that is not freed, in which all weights are gathered that are not whole on each rank."""
        whole, experts_are_whole = self.shards == 1, self.expert_shards == 1
        placed = 0 if whole or self.copy_engines else self._places()
        placed += 0 if experts_are_whole else (len(self.run.blocks) if self.blocks_stay else 2) * self.gathered_experts
        block = whole * self.gathered_block + experts_are_whole * self.gathered_experts
        return block, whole * self.run.itemsize * self.embedding, whole * self.gathered_head, placed

    def _places(self) -> int:
        """Return the bytes of memory in which weights are gathered that `shards` ranks share, experts of these too."""
        embedding = 0 if self.dims.tied_embeddings else self.run.itemsize * self.embedding
        n, block, head = len(self.run.blocks), self.gathered_block, self.gathered_head
        if self.blocks_stay:
            return n * block + embedding + head
        in_turn, apart = [embedding, *[block] * n], head
        if self.ends_freed and embedding:
            in_turn, apart = [*in_turn, head], 0
        return max(in_turn[::2]) + max(in_turn[1::2]) + apart

    def _shards(self, part: str) -> int:
        return self.expert_shards if part == "experts" else self.shards

    def _in_place(self, part: str) -> bool:
        """Return whether gradients of a part are not copied to be reduced, or the copy becomes the gradient."""
        return self._shards(part) == 1 and (self.replicas == 1 or self.sums_are_gradients)

    def _reducing(self) -> int:
        """Return the bytes of reduced sums that are not yet gradients: to be cast to float32, or added to gradients."""
        if self.sums_are_gradients:
            return 0
        at_once = SUMS_OF_REPLICAS if self.replicas > 1 else 1
        widened = 4 if self.reduced != 4 and self.micro_steps > 1 else 0

        def of(part: str) -> int:
            sums = at_once - (self._shards(part) == 1)  # replicas add up what is sent, which is counted already
            return (sums * self.reduced + widened) * (max(self.trained[part]) // self._shards(part))

        return max((of(part) for part in self.trained if not self._in_place(part)), default=0)

    @property
    def logits(self) -> int:
        """Return the bytes of a rank's logits. Their gradient replaces them, and is freed before a block's backward."""
        return self.run.itemsize * self.run.tokens * self.dims.vocab_size // self.run.tensor_parallel

    def _loss(self) -> tuple[int, int]:
        """Return the bytes of logits, and of all other tensors at the peak of the head, which is not compiled.

        If this peak is a cast of the head's weight in forward, there are no logits yet: 0.
        """
        assert self.run.head is not None  # noqa: S101
        forward, backward = self.run.head.peaks
        if forward > backward:
            return 0, forward
        return self.logits, max(backward - self.logits, self.run.head.saved)

    def _in_block(self, n: int) -> int:
        """Return the most bytes that backward of block `n` makes and holds at once, the incoming gradient included."""
        block = self.run.blocks[n]
        return block.widest_compiled if self.run.compiled else block.widest
