"""Predict what a rank's GPU holds at the peak of a step, by category, in bytes.

The figure is that of `memory_gib`, the peak that the caching allocator reserved. Not in it: CUDA's own context, NCCL's
buffers and symmetric memory, a few GiB in all.

Memory is reserved by stream: what one stream has freed no other takes. FSDP gathers weights on one stream and reduces
gradients on another, so the peak is the sum of three peaks, whenever they are:

    compute     parameters, moments, gathered weights and activations, at the worst moment of backward: the head, with
                the logits and the gradient of its weight; a block, with what it computes again; or the gradient of the
                head's or the embedding's weight, which is there as it came and in float32
    gathering   two units of weights, one on its way and one that is being copied out, and a shard
    reducing    all gradients, where they are widened on this stream or more micro-steps follow: they are there when the
                first activations are not yet free; and what is made on the way to them

Other gradients are in compute, too, unit by unit or of a rank alone one by one, as activations and gathered weights are
freed: the head's moment has none yet, and the last block's has nearly all of them.

Held against measured runs in `tests/unit/forecast/test_memory.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from torch import nn

from titanlite.byte_size import GIB
from titanlite.config.check import uses_copy_engines
from titanlite.config.recipe_schema import Float8Recipe, ModelDims, OptimizerRecipe, SaveList
from titanlite.config.schema import Config
from titanlite.forecast.activation_cost import BlockCost, block_costs, held_without_checkpointing
from titanlite.forecast.traced_run import traced_run
from titanlite.forecast.update_work import UpdateWork
from titanlite.kernels.cross_entropy import ROWS
from titanlite.parallel.fsdp import frees_after_forward

HOLES = 0.2
"""Share of the gradients of blocks that they leave unused where they follow activations: holes too small for the next.
Measured: 0.15 to 0.21 (runs of `2f2e563` in benchmarks/results/runs.jsonl)."""


HOLES_OF_SHARDS = 0.08
"""Likewise, where they are shards of sums: of one size, and smaller than most of what activations leave."""


HOLES_AT_THE_END = 0.95
"""Share of what is reduced of an embedding, which needs one place of its size: what has been freed in smaller ones.
Both fitted to 16 runs of `full`, where holes were 1.2 to 3.3 GiB: luck (rows `memory_full` of runs.jsonl)."""


SLACK = 2 * GIB // 5
"""Bytes that a run reserves beyond its tensors: workspaces of the matrix libraries, segments that are not full.
Measured: 0.2 to 1.0 GiB."""


MARGIN = 0.015
"""Share of a budget that stays free: of the runs in runs.jsonl two are 1.4 % short, the next 1.2 %."""


GPUS_OF_A_HOST = 8
"""GPUs of a host of which nothing is known: as many as the rates are of."""


def usable(budget_gib: float) -> float:
    """Return the bytes that a predicted peak may have, so that the measured one keeps to a budget."""
    return budget_gib * GIB * (1 - MARGIN)


def spans_hosts(config: Config, world: int, host: int) -> bool:
    """Return whether expert-parallel ranks, which are neighbours, are on several hosts."""
    return world > host and host % config.parallelism.expert_parallel_degree != 0


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the peak.

    Attributes:
        parameters: this rank's shard in float32.
        gradients: of the same shard in float32; where they follow activations, those there are at the worst moment.
        optimizer: its state, and the average of the weights.
        gathered_weights: in the compute dtype at the worst moment, or the place that a head has left.
        communication: FSDP's buffers.
        activations: what the save-list keeps, in all blocks.
        logits: in the compute dtype; 0 if the worst moment is not in the head.
        working_set: of the worst moment alone: casts and gradients of the head, or recomputation and gradients of a
            block.
        slack: of the allocator; with holes, where gradients follow activations.
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
        """Return their sum."""
        return sum(self.categories().values())

    def categories(self) -> dict[str, int]:
        """Return the bytes by category, with its name in words."""
        return {f.name.replace("_", " "): getattr(self, f.name) for f in fields(self)}


class MemoryModel:
    """Predicts the peak of one run under any save-list.

    Args:
        config, dims, float8, rules: of the run.
        world: number of processes.
        model: the trainer's; None: `traced_run` makes one.
        host: GPUs of one host; None: `GPUS_OF_A_HOST`.

    Attributes:
        run: the rank's model, traced.
        shards: ranks that FSDP splits each parameter over, in `replicas` groups; `expert_shards` those of the experts
            of an expert-parallel rank.
        block: elements of the largest block on a rank before FSDP splits them, without its shared-out `experts`;
            `embedding` with positions, `head` with the final norm; `parameters` of all, of which FSDP leaves `shard`.
        experts_are_reduced: whether other ranks have gradients of the same experts, where these are shared out.
        copy_engines: whether they gather and reduce blocks, as far as the config says.
        gathered_block: bytes as FSDP gathers them; `gathered_experts` and `gathered_head` likewise.
        alone: whether there is nobody to reduce gradients with.
        gradients_follow: whether gradients are made among activations, which are freed meanwhile: not where they are
            there already in the next micro-step, nor where their sum is widened on the stream that makes it.
        blocks_stay: whether gathered blocks, and an embedding with a unit of its own, are held until backward.
        ends_freed: whether the head, or a tied embedding, is freed after forward.
        reduced: bytes of an element of a gradient on its way, in `reduced_block` of a block's.
        optimizer: what the update keeps, sends and computes.
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
        self.experts_are_reduced = self.expert_shards * self.replicas > 1
        at_once = training.local_batch_size * (data_ranks // mesh.context_parallel_degree)
        self.micro_steps = (training.global_batch_size or at_once) // at_once
        self.reduced = {"float32": 4, "bfloat16": 2}[training.mixed_precision_reduce]
        self.alone = data_ranks == 1
        self.gradients_follow = self.micro_steps == 1 and (self.alone or self.reduced == 4)
        frees_blocks, self.ends_freed = frees_after_forward(config, self.shards)
        self.blocks_stay = not frees_blocks
        self.copy_engines = uses_copy_engines(config, self.shards)
        self.reduced_block = self.run.itemsize if self.copy_engines else self.reduced
        of_blocks, first, last = self.run.block_units, self.run.embedding, self.run.output
        self.block, self.experts = (max(u.elements for u in units) for units in (of_blocks, self.run.expert_units))
        self.gathered_block = max(unit.gathered for unit in of_blocks)
        self.gathered_experts = max(unit.gathered for unit in self.run.expert_units)
        self.embedding = first.elements
        # Tied weights are one unit, gathered from the first layer to the end of backward.
        self.head, self.gathered_head = last.elements or first.elements, last.gathered or first.gathered
        others, of_experts = (sum(u.elements for u in us) for us in ((*of_blocks, first, last), self.run.expert_units))
        self.parameters = others + of_experts
        self.shard = others // self.shards + of_experts // self.expert_shards
        self.optimizer = UpdateWork(config, rules, self.run, world, self.replicas, self.shards, self.expert_shards)

    @property
    def symmetric_memory(self) -> int:
        """Return the bytes that other ranks write into: two gathered blocks and the gradients of one, and tokens."""
        of_blocks = 2 * self.gathered_block + self.run.itemsize * self.block if self.copy_engines else 0
        received, ranks = max((block.most_exchanged for block in self.run.blocks), default=0), self.run.expert_parallel
        in_place = ranks > 1 and not self.run.exchange_by_nccl
        return of_blocks + (received * ranks // (ranks - 1) if in_place else 0)

    def peak_under(self, save_list: SaveList) -> Memory:
        """Predict the peak of a save-list.

        Raises:
            RecipeError: as of `block_costs`.
        """
        return self.peak(block_costs(self.run, save_list))

    def peak(self, blocks: Sequence[BlockCost]) -> Memory:
        """Predict the peak, by what each block keeps and computes again, in the order in which they run."""
        shard, e, n = self.shard, self.run.itemsize, len(blocks)
        held, tied = sum(block.held for block in blocks), self.dims.tied_embeddings
        head, block = self.gathered_head, self.gathered_block + self.gathered_experts
        stays = n * block if self.blocks_stay else 0
        embedding = e * self.embedding if self.blocks_stay and not tied else 0
        of_head = 0 if tied else 4 * self.head // self.shards  # a tied gradient is whole once the embedding's is added

        def gradients(blocks_done: int) -> tuple[int, int]:
            """Return the bytes of gradients after so many blocks of backward, and of the holes between them."""
            of_blocks = 4 * blocks_done * self.block // self.shards
            of_blocks += 4 * blocks_done * self.experts // self.expert_shards
            share = HOLES if self.alone else HOLES_OF_SHARDS
            return (of_head + of_blocks, int(share * of_blocks)) if self.gradients_follow else (4 * shard, 0)

        # The moments of backward that may be the worst, as (gathered weights, communication, gradients, holes,
        # activations, logits, the rest).
        moments = [(stays + embedding + head, 0, 0 if self.gradients_follow else 4 * shard, 0, held, *self._loss())]
        left = held
        of_ends = head if tied else 0  # a gathered head that is also the embedding stays, and so does its gradient
        reduced, of_block = (0, 0) if self.alone else (self.reduced, self.reduced_block * self.block)
        of_block += self.reduced * self.experts if self.experts_are_reduced else 0
        before = 0 if tied else reduced * self.head  # of the unit before, it is there until that of the next is
        kinds = {id(block): block for block in self.run.blocks}  # those that are alike share one
        kept = {key: held_without_checkpointing(block, self.run.compiled) for key, block in kinds.items()}
        for done, cost in enumerate(reversed(blocks)):
            traced = self.run.blocks[n - 1 - done]
            weights = (stays - done * block if self.blocks_stay else block) + embedding + of_ends
            again = max(0, kept[id(traced)] - cost.held)
            moments.append((weights, of_ends + before, *gradients(done), left, 0, again + self._in_block(n - 1 - done)))
            left, before = left - cost.held, of_block
        if not tied:  # of many ranks FSDP has freed the gathered head: its place is too small for what is reduced
            own = e * self.head + e * self.run.tokens * self.dims.dim
            moments.append((stays + embedding + head, reduced * self.head, *gradients(0), held, 0, own))
        last, as_it_came = reduced * self.embedding, e * self.embedding
        holes = gradients(n)[1] + (int(HOLES_AT_THE_END * last) if self.gradients_follow else 0)
        moments.append((as_it_came if self.alone else 0, last, 4 * shard, holes, 0, 0, as_it_came))
        if self.optimizer.buffers:  # of the update, where activations were
            moments.append((0, 0, 4 * shard, gradients(n)[1], 0, 0, self.optimizer.buffers))
        gathered, buffers, made, holes, activations, logits, working_set = max(moments, key=sum)
        return Memory(
            parameters=4 * shard,
            gradients=made,
            optimizer=self.optimizer.state,
            gathered_weights=gathered,
            communication=buffers + self._gathering() + self._reducing(),
            activations=activations,
            logits=logits,
            working_set=working_set,
            slack=SLACK + holes,
        )

    def _gathering(self) -> int:
        """Return the bytes of FSDP's flat buffers: a unit under way, this rank's shard of it, and the unit before."""
        if self.shards == 1:
            return 0
        e, block = self.run.itemsize, 0 if self.copy_engines else self.gathered_block  # or in symmetric memory
        embedding, head = e * self.embedding, self.gathered_head
        order = [(0, embedding), (embedding, block), (block, block)]
        order += [] if self.dims.tied_embeddings else [(block, head)]
        of_experts = self.gathered_experts if self.expert_shards > 1 else 0  # one on its way, and one before
        experts = 2 * of_experts + of_experts // self.expert_shards
        return max(before + unit + unit // self.shards for before, unit in order) + experts

    def _reducing(self) -> int:
        """Return the bytes of reduced sums that are not yet gradients, where these add up or have another dtype.

        Replicas that are not sharded have a copy as well: FSDP divides, by 1, what it has not reduced among shards.
        """
        if self.alone:
            return 0
        of_experts = self.experts // self.expert_shards if self.experts_are_reduced else 0
        largest = max(max(self.embedding, self.head, self.block) // self.shards, of_experts)
        widened = largest * self.reduced if self.reduced != 4 else 0
        divided = largest * self.reduced if self.shards == 1 else 0
        return widened + divided + (4 * largest if self.micro_steps > 1 else 0)

    @property
    def logits(self) -> int:
        """Return the bytes of a rank's logits, which their gradient replaces; they are gone when blocks run."""
        return self.run.itemsize * self.run.tokens * self.dims.vocab_size // self.run.tensor_parallel

    def _loss(self) -> tuple[int, int]:
        """Return the bytes of logits, and of what else the head's forward and backward have, which are not compiled.

        Where a cast of its weight is the most of all, there are no logits yet.
        """
        assert self.run.head is not None  # noqa: S101
        forward, backward = self.run.head.peaks
        if forward > backward:
            return 0, forward
        rows = min(self.run.tokens, ROWS)
        in_loss = 0 if self.run.compiled else 12 * rows * self.logits // self.run.itemsize // self.run.tokens
        return self.logits, max(backward - self.logits, self.run.head.saved + in_loss)

    def _in_block(self, n: int) -> int:
        """Return the bytes that backward of a block has made at its widest, with the gradient that it is given."""
        block = self.run.blocks[n]
        return block.widest_compiled if self.run.compiled else block.widest
