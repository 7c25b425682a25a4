"""Count what ranks send each other in a step: the bytes of every collective, by shapes.

`titanlite plan` lists it, and `step_time.py` divides it by rates. Collectives of tokens between tensor-parallel layers
are known to the sharding plan, from the model's graph; this file has the others, and what all bytes are counted by.

    forward          FSDP gathers each unit of weights; tokens of experts and their results; keys and values that
                     context-parallel ranks see of each other; vocabulary-parallel loss: two numbers a token and rank
    backward         FSDP gathers again what it has freed, but for an untied embedding, and sums and scatters gradients;
                     replicas add theirs; tokens of experts again, and their gradients both ways; keys and values
                     again, and their gradients back
    recomputation    tokens, keys and values, where the save-list does not keep what was communicated
    update           gradients of weights that tensor-parallel ranks hold whole; the gradient's norm, and other numbers;
                     rows of matrices that are orthogonalised, to their owners and back

Not counted: what FSDP pads, where the rows of a weight are no multiple of its shards; and the second gather of an
embedding that is of the user's class, or hooked.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from titanlite.activation_checkpoint import operations as ops
from titanlite.activation_checkpoint.operations import CLASSES, COUNT_CHOICES, EXCHANGES, FUSED, GATHER_FROM_RANKS
from titanlite.forecast.activation_cost import Activation, BlockCost
from titanlite.forecast.attended import AttendedShare
from titanlite.forecast.exchanged_keys import ExchangedKeys
from titanlite.forecast.memory import MemoryModel
from titanlite.forecast.traced_block import Operation
from titanlite.forecast.traced_run import HEAD, UnitSize
from titanlite.forecast.update_work import ITEMSIZE, ITEMSIZE_OF_ROW
from titanlite.sharding.sent_bytes import sent_bytes

Pass = Literal["forward", "backward", "recomputation", "update"]


@dataclass(frozen=True)
class Traffic:
    """A collective.

    Attributes:
        kind: "all_gather", "reduce_scatter", "all_reduce" or "all_to_all".
        direction: the pass that it is part of.
        module: whose tensors it moves.
        shape: of the whole of what it moves; of keys and values, of what a rank gets in the mean.
        moves: what that is, or how it lies before and after.
        ranks: that take part.
        whole_bytes: of what it moves, as one rank has it before it is scattered or after it is gathered.
        times: a step.
    """

    kind: str
    direction: Pass
    module: str
    shape: tuple[int, ...]
    moves: str
    ranks: int
    whole_bytes: int
    times: int

    @property
    def sent_bytes(self) -> int:
        """Bytes that each rank sends, each time."""
        return sent_bytes(self.kind, self.whole_bytes, self.ranks)


@dataclass(frozen=True)
class Unit:
    """Weights that FSDP gathers at once.

    Attributes:
        name: the module's.
        elements: on a tensor-parallel rank.
        gathered_bytes: as they travel, with their scales in float8.
        gathers: in a micro-step; the second is in backward.
        reduced: bytes of an element of a gradient on its way to the rank that sums it; replicas add those sums.
        shards: ranks that split it.
        block: number of the block that it belongs to, or None.
    """

    name: str
    elements: int
    gathered_bytes: int
    gathers: int
    reduced: int
    shards: int
    block: int | None = None


def units(memory: MemoryModel) -> list[Unit]:
    """FSDP's units, in the order in which forward needs them: the embedding or all but the blocks, blocks, the head.

    Experts that ranks share out are units of their own, behind their blocks.

    Args:
        memory: of the run.
    """
    run, ends_stay = memory.run, not memory.ends_freed

    def unit(name: str, size: UnitSize, stays: bool, shards: int = memory.shards) -> Unit:
        return Unit(name, size.elements, size.gathered + size.scales, 1 if stays else 2, memory.reduced, shards)

    blocks: list[Unit] = []
    for n, (size, experts) in enumerate(zip(run.block_units, run.expert_units, strict=True)):
        name, stays = f"layers.{n}", memory.blocks_stay
        blocks.append(replace(unit(name, size, stays), reduced=memory.reduced_block, block=n))
        if experts.elements:
            blocks.append(replace(unit(f"{name}.experts", experts, stays, memory.expert_shards), block=n))
    if not run.output.elements:
        return [unit("tok_embeddings", run.embedding, ends_stay), *blocks]
    # An untied embedding is not read again in backward.
    return [unit("tok_embeddings", run.embedding, True), *blocks, unit(HEAD, run.output, ends_stay)]


def of_weights(memory: MemoryModel) -> list[Traffic]:
    """FSDP's collectives.

    Args:
        memory: of the run.
    """
    replicas, n = memory.replicas, memory.micro_steps
    fsdp_units = units(memory)
    found: list[Traffic] = []
    passes: tuple[Pass, Pass] = ("forward", "backward")
    for gathers, direction in enumerate(passes, 1):
        found += [
            Traffic("all_gather", direction, u.name, (u.elements,), "weights", u.shards, u.gathered_bytes, n)
            for u in fsdp_units
            if u.gathers >= gathers and u.shards > 1
        ]
    for kind in ("reduce_scatter", "all_reduce"):
        for u in reversed(fsdp_units):
            scatters = kind == "reduce_scatter"
            ranks, parts, reduced = (u.shards, 1, u.reduced) if scatters else (replicas, u.shards, memory.reduced)
            if ranks > 1 and (size := -(-u.elements // parts)):
                what = "sum of gradients"
                found.append(Traffic(kind, "backward", u.name, (size,), what, ranks, reduced * size, n))
    run = memory.run
    if run.float8 is not None and (scaled := sum(u.scaled_whole for u in (*run.block_units, run.output))):
        over = [memory.shards, run.tensor_parallel if run.float8.reduce_amax else 1]
        moves = "maxima of weights"
        found += [Traffic("all_reduce", "update", "", (scaled,), moves, r, 4 * scaled, 1) for r in over if r > 1]
    return found


def of_loss(tokens: int, ranks: int, micro_steps: int) -> Traffic:
    """The collective of a loss whose vocabulary is split.

    Args:
        tokens: M of a micro-step.
        ranks: tensor-parallel ones, two or more.
        micro_steps: of a step.
    """
    shape, moves = (ranks, 2, tokens), "statistics"
    return Traffic("all_gather", "forward", "loss", shape, moves, ranks, 8 * ranks * tokens, micro_steps)


def of_experts(memory: MemoryModel, blocks: Sequence[BlockCost]) -> list[Traffic]:
    """The collectives of expert parallelism, and the counts of tokens of ranks that share a micro-batch.

    Args:
        memory: of the run.
        blocks: the price of each; of none, what backward repeats is left out.
    """
    run, ranks = memory.run, memory.run.expert_parallel
    tokens, t = run.tokens // run.tensor_parallel, run.tensor_parallel
    top_k, n_experts = (of.top_k, of.n_experts) if (of := memory.dims.experts) else (1, 0)
    found, repeated = list[Traffic](), {n: block.recomputed for n, block in enumerate(blocks)}
    if n_experts and run.context_parallel > 1:  # for the losses of routers
        what, n = "targets of micro-batches", memory.micro_steps
        found.append(Traffic("all_reduce", "update", "", (n,), what, run.context_parallel, 8 * n, 1))
    for n, block in enumerate(run.blocks):
        passes: dict[Pass, Sequence[Operation | Activation]] = {
            "forward": block.forward,
            "recomputation": repeated.get(n, ()),
            "backward": block.backward,
        }
        for direction, operations in passes.items():
            where = f"layers.{n}.experts"
            for each in operations:
                if each.op == COUNT_CHOICES and each.received:
                    what = "tokens of each expert"
                    shape, size, sharers = (n_experts,), 8 * n_experts, t * memory.run.context_parallel
                    found.append(
                        Traffic("all_reduce", direction, where, shape, what, sharers, size, memory.micro_steps)
                    )
                if each.op not in EXCHANGES:
                    continue
                whole = each.received * ranks // (ranks - 1)
                is_gather, is_gradient = each.op == GATHER_FROM_RANKS, direction == "backward"
                whole *= 1 if is_gather else ranks  # from each rank to each other one the rows of its slots
                if is_gather:
                    kind, rows, moves = "all_gather", 1, "tokens, gradients, weights" if is_gradient else "tokens"
                else:
                    each_slot = (
                        ranks if run.exchange_by_nccl else 1
                    )  # from each rank, or from the one that has its expert
                    kind, rows, moves = "all_to_all", top_k * each_slot, "gradients" if is_gradient else "results"
                shape = (ranks * tokens * rows, memory.dims.dim)
                found.append(Traffic(kind, direction, where, shape, moves, ranks, whole, memory.micro_steps))
    return found


def of_keys(memory: MemoryModel, blocks: Sequence[BlockCost], attended: AttendedShare | None = None) -> list[Traffic]:
    """The exchanges of context-parallel ranks for attention, in the mean of ranks.

    Args:
        memory: of the run.
        blocks: the price of each; of none, what backward repeats is left out.
        attended: the documents of the run; None: each sample is one.
    """
    exchanged, P = ExchangedKeys(memory.run, attended), memory.run.context_parallel
    found, repeated = list[Traffic](), {n: block.recomputed for n, block in enumerate(blocks)}
    keys, gradients = "keys and values", "gradients of keys and values"
    for n, block in enumerate(memory.run.blocks):
        passes: list[tuple[Pass, Sequence[Operation | Activation], str]] = [
            ("forward", block.forward, keys),
            ("recomputation", repeated.get(n, ()), keys),
            ("backward", block.forward, keys),
            ("backward", block.forward, gradients),
        ]
        for direction, operations, moves in passes:
            for each in operations:
                if each.op == ops.CONTEXT_ATTENTION and (size := exchanged.received(each)):
                    whole = size * P * P // (P - 1)  # a P-th of it is of each rank, of which P - 1 parts are for others
                    at, shape = f"layers.{n}.attention", exchanged.shape(each)
                    found.append(Traffic("all_to_all", direction, at, shape, moves, P, whole, memory.micro_steps))
    return found


def of_update(
    replicated: int, tensor_parallel: int, world: int, sources: int = 0, biased: int = 0, z_loss: bool = False
) -> list[Traffic]:
    """The reductions between backward and the update, and the one before forward, of a count.

    Args:
        replicated: elements that a rank holds of gradients of weights that tensor-parallel ranks hold whole.
        tensor_parallel: ranks.
        world: all ranks.
        sources: of data that losses are told apart by.
        biased: experts that a bias balances: the most of a layer, times such layers.
        z_loss: whether there is one, beside the loss.
    """
    found: list[Traffic] = []
    losses = "loss and z-loss" if z_loss else "loss"
    if tensor_parallel > 1 and replicated:
        moves = "sum of gradients of whole weights"
        found.append(Traffic("all_reduce", "update", "", (replicated,), moves, tensor_parallel, 4 * replicated, 1))
    scalars = {  # shape, bytes
        "number of targets": (1, 8),
        "norm of gradients": (1, 4),
        f"{losses}, tokens attended to, whether to stop, and who lacks data": (4 + z_loss, 4 * (4 + z_loss)),
        "loss and targets of each source": (2 * sources, 16 * sources),
        "tokens of each expert that a bias balances": (biased, 8 * biased),
    }
    return [
        *found,
        *(
            Traffic("all_reduce", "update", "", (n,), what, world, size, 1)
            for what, (n, size) in scalars.items()
            if world > 1 and n
        ),
    ]


def of_matrices(memory: MemoryModel) -> list[Traffic]:
    """The exchanges with owners of matrices that are orthogonalised, in the mean of the buckets that they travel in.

    Args:
        memory: of the run.
    """
    found, world = list[Traffic](), memory.world
    for _, shared in memory.optimizer.shared if world > 1 else ():
        n = len(shared.buckets)
        there_and_back = {
            "rows of momenta to owners of matrices": sum(bucket.elements for bucket in shared.buckets),
            "rows of updates from owners of matrices": sum(bucket.handed for bucket in shared.buckets),
        }
        for moves, elements in there_and_back.items():
            each = elements // n
            found.append(Traffic("all_to_all", "update", "", (each,), moves, world, ITEMSIZE * each, n))
    rows = sum(memory.optimizer.rows.values()) if world > 1 else 0
    moves, size = "second moments of rows", ITEMSIZE_OF_ROW * rows
    return [*found, *([Traffic("all_reduce", "update", "", (rows,), moves, world, size, 1)] if rows else [])]


def again(block: BlockCost) -> set[tuple[str, str]]:
    """The collectives of tokens that backward of a block repeats: their kind and layer.

    Args:
        block: its price.
    """
    ops = (*CLASSES["communication"], *FUSED)
    kinds = {op: "all_gather" if "all_gather" in op else "reduce_scatter" for op in ops}
    return {(kinds[a.op], a.layer) for a in block.recomputed if a.op in kinds}
