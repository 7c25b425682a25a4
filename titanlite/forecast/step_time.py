"""Predict the time of a step, by class of work, from the traced blocks and measured rates (`device_specs.py`).

    matmul           the three products of each linear layer: one in forward, two in backward
    attention        forward: the causal half of two products, or the part of it within documents; backward: two and a
                     half times as much
    elementwise      bytes of norms, RoPE, gates, the loss and casts to float8, each read and written once a pass
    recomputation    operations whose results the save-list does not keep, computed again
    tokens           collectives of tensor parallelism; of one fused with its matmul, only the time beyond that matmul.
                     Collectives of expert parallelism, with the passes over received rows. The exchange of keys and
                     values by NCCL among context-parallel ranks, with the passes around it
    weights          casts of shards before FSDP's all-gather, casts or sums of gradients around its reduce-scatter
    fsdp             collectives that compute does not hide: the first gathers, the last reduction, and in each block
                     the excess over its compute. Also what compute loses beside collectives that take longer between
                     hosts; what it loses within a host is part of the rate of matmuls
    optimizer        the update with clipping, once a step (`update_time.py`)

Collectives of a group on several hosts are timed by `network.py`. What compute hides is decided as within one host.
Nothing is simulated: kernels are assumed to be as fast in a small shape as in a large one, and never to wait for the
host. Compared with measured runs in `tests/unit/forecast/test_step_time.py`. Axes as in `models/llama3.py`.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain

import numpy as np
import torch

from titanlite.activation_checkpoint import operations as ops
from titanlite.activation_checkpoint.operations import CLASSES, FUSED
from titanlite.data.context_split import documents_of_samples, load_of_split
from titanlite.forecast.activation_cost import Activation, BlockCost
from titanlite.forecast.attended import AttendedShare
from titanlite.forecast.choose_save_list import RecomputeTimes, expensive
from titanlite.forecast.device_specs import Rates
from titanlite.forecast.memory import MemoryModel
from titanlite.forecast.network import Ranks
from titanlite.forecast.traced_block import Operation, Shape, TracedBlock
from titanlite.forecast.traced_run import TracedRun, UnitSize
from titanlite.forecast.update_time import UpdateTime, update_time
from titanlite.sharding.sent_bytes import sent_bytes

_T, _G = 1e12, 1e9
_GROUPED = (*CLASSES["experts"], *ops.GRADIENTS_OF_EXPERTS)
_MICRO_BATCHES = 4  # most micro-batches whose documents are read
_PRODUCTS = (*CLASSES["matmul"], *_GROUPED)


@dataclass(frozen=True)
class Unit:
    """The weights that FSDP gathers at once.

    Attributes:
        elements: their number on a tensor-parallel rank, before FSDP splits them.
        gathered_bytes: bytes of all shards as they are sent, with the scales of float8.
        gathers: number of all-gathers in a micro-step.
        reduced: bytes of an element of a gradient in the reduce-scatter among shards.
        pushed: whether copy engines reduce.
        ranks: the ranks that split the unit.
    """

    elements: int
    gathered_bytes: int
    gathers: int
    reduced: int
    pushed: bool
    ranks: Ranks

    @property
    def shards(self) -> int:
        """Return the number of ranks that split the unit."""
        return self.ranks.size


def units(memory: MemoryModel) -> list[list[Unit]]:
    """Return FSDP's units in the order of forward: the embedding, those of each block, the head.

    With tied weights the first unit is all weights outside of blocks, and there is none for the head. Experts that
    ranks share out are the second unit of their block.
    """
    run, ends_stay = memory.run, not memory.ends_freed
    shards = memory.ranks(memory.shards, run.tensor_parallel)
    of_experts = memory.ranks(memory.expert_shards, run.expert_parallel)

    def unit(part: str, size: UnitSize, stays: bool) -> Unit:
        ranks, pushed = (of_experts, False) if part == "experts" else (shards, memory.copy_engines)
        return Unit(size.elements, size.gathered + size.scales, 1 if stays else 2, memory.sent[part], pushed, ranks)

    blocks = [
        [
            unit(part, size, memory.blocks_stay)
            for part, size in (("block", block), ("experts", experts))
            if size.elements
        ]
        for block, experts in zip(run.block_units, run.expert_units, strict=True)
    ]
    if not run.output.elements:
        return [[unit("embedding", run.embedding, ends_stay)], *blocks]
    # An untied embedding is not read again in backward.
    return [[unit("embedding", run.embedding, True)], *blocks, [unit("head", run.output, ends_stay)]]


@dataclass(frozen=True)
class StepTime:
    """Milliseconds of one step on one rank, by class of work. This module's docstring describes the classes."""

    matmul: float
    attention: float
    elementwise: float
    recomputation: float
    tokens: float
    weights: float
    fsdp: float
    optimizer: float

    @property
    def total(self) -> float:
        """Return the sum of all classes."""
        return sum(self.categories().values())

    def categories(self) -> dict[str, float]:
        """Return the milliseconds by class."""
        return asdict(self)


def _uneven_split(run: TracedRun, attended: AttendedShare | None) -> tuple[float, dict[int, float]]:
    """Return the attention work of the busiest context-parallel rank relative to the mean, and by window the largest
    share of all keys that a rank receives or sends."""
    ranks, windows = run.context_parallel, sorted({0, *(window for block in run.blocks for window in block.windows)})
    if ranks == 1:
        return 1.0, {}
    N = run.tokens * ranks
    known = attended.starts(N, _MICRO_BATCHES) if attended else [documents_of_samples(N, run.seq_len)]
    loads = [load_of_split(starts, run.seq_len, ranks, windows) for starts in known]
    most = np.mean([load.most for load in loads], 0).tolist()
    return float(np.mean([load.attention for load in loads])), dict(zip(windows, most, strict=True))


class StepTimeModel:
    """Predicts the time of a step under any save-list, for a run that `no_rates_reason` accepts.

    `attended` is the share of causal attention within documents; None: documents are not masked.
    """

    def __init__(self, memory: MemoryModel, rates: Rates, attended: AttendedShare | None = None) -> None:
        self.memory, self.rates, self.run, self.attended = memory, rates, memory.run, attended
        self._busiest, self._keys_of_others = _uneven_split(memory.run, attended)
        t = memory.run.tensor_parallel
        self._tensor, self._context = memory.ranks(t), memory.ranks(memory.run.context_parallel, t)
        self._experts = memory.ranks(memory.run.expert_parallel)
        self._replicas = memory.ranks(memory.replicas, memory.shards * t)

    def times(self) -> RecomputeTimes:
        """Predict the seconds to recompute each expensive activation, and a block's elementwise work."""
        found = {a: self._seconds(a, forward=True) for listed in expensive(self.run).values() for a in listed}
        first = self.run.blocks[0]
        of_dispatch = sum(each.moved for each in first.forward if each.op in (ops.GATHER_ROWS, ops.SPREAD_ROWS))
        return RecomputeTimes(found, (first.elementwise[0] - of_dispatch) / self.rates.memory / _G)

    def step(self, blocks: Sequence[BlockCost]) -> StepTime:
        """Predict the time of a step from the cost of each block under a save-list."""
        n, run, memory, rates = len(blocks), self.run, self.memory, self.rates
        assert run.head is not None  # noqa: S101
        times = self.times()
        by_kind = {id(block): self._work(block) for block in (*run.blocks, run.head)}
        work = [by_kind[id(block)] for block in (*run.blocks, run.head)]
        of_embedding = run.itemsize * run.tokens * memory.dims.dim
        ends = ("reduce_scatter", "all_gather")
        of_ends = sum(self._collective(kind, of_embedding, self._tensor, rates.tensor_parallel) for kind in ends)
        elementwise = sum(sum(block.elementwise) for block in run.blocks) + 3 * memory.logits
        seconds = {
            "matmul": sum(matmul for matmul, _, _ in work),
            "attention": sum(attention for _, attention, _ in work),
            "elementwise": elementwise / rates.memory / _G,
            "recomputation": sum(times.seconds(block) for block in blocks),
            "tokens": of_ends + sum(wire for _, _, wire in work),
            "weights": self._copied() / rates.memory / _G,
        }
        seconds["fsdp"] = self._fsdp(n, sum(seconds.values()) / max(n, 1))
        of_step = {name: 1e3 * memory.micro_steps * value for name, value in seconds.items()}
        return StepTime(**of_step, optimizer=self.update().total)

    def key_exchange(self, blocks: Sequence[BlockCost]) -> float:
        """Predict the milliseconds of a step for context-parallel ranks to exchange keys, recomputation included."""
        forward = [each for block in self.run.blocks for each in block.forward]
        seconds = sum(self._key_exchange(each, way) for each in forward for way in (True, False))
        seconds += sum(self._key_exchange(each, forward=True) for block in blocks for each in block.recomputed)
        return 1e3 * self.memory.micro_steps * seconds

    def between_hosts(self, step: StepTime) -> Mapping[str, float]:
        """Predict the milliseconds of a step that collectives between hosts take, hidden or not, by name."""
        found = defaultdict[str, float](float)
        for unit in chain.from_iterable(units(self.memory)):
            gather, scatter, summed = self._of_unit(unit)
            if unit.ranks.hosts > 1:
                found[f"gathers of weights over {unit.shards} ranks"] += unit.gathers * gather
                found[f"reductions of gradients over {unit.shards} ranks"] += scatter
            if self._replicas.hosts > 1:
                found[f"sums of gradients over {self._replicas.size} replicas"] += summed
        of_step = {name: 1e3 * self.memory.micro_steps * seconds for name, seconds in found.items()}
        spans = max(group.hosts for group in (self._tensor, self._context, self._experts)) > 1
        return of_step | ({"collectives of tokens, none of them hidden": step.tokens} if spans else {})

    def update(self) -> UpdateTime:
        """Predict the time of the update of a step."""
        return update_time(self.memory.optimizer, self.rates)

    def tokens_per_second(self, time: StepTime) -> float:
        """Return the tokens per second and GPU if a step takes this time."""
        tokens = self.run.tokens * self.memory.micro_steps / self.run.tensor_parallel
        return tokens / time.total * 1e3

    def _work(self, block: TracedBlock) -> tuple[float, float, float]:
        """Return a block's seconds of matmuls, of attention, and of exchanges of tokens that no fused matmul hides."""
        matmul = attention = tokens = 0.0
        for operations, forward in ((block.forward, True), (block.backward, False)):
            for each in operations:
                if each.op in CLASSES["attention"]:
                    rates = self._attention_rates(each)
                    attention += self._attended_flops(each) / _T * (1 / rates[0] + 2.5 / rates[1])
                    tokens += self._key_exchange(each, forward=True) + self._key_exchange(each, forward=False)
                elif each.op in CLASSES["communication"] or each.op in ops.EXCHANGES:
                    tokens += self._seconds(each, forward)
                elif each.op in FUSED or each.op in _PRODUCTS:
                    alone = self._product(each, forward)
                    matmul += alone
                    tokens += self._seconds(each, forward) - alone if each.op in FUSED else 0.0
        return matmul, attention, tokens

    def _seconds(self, each: Operation | Activation, forward: bool) -> float:
        if each.op in CLASSES["attention"]:
            computing = self._attended_flops(each) / self._attention_rates(each)[0] / _T
            return computing + self._key_exchange(each, forward=True)
        wire, in_place = self._wire(each), each.op in ops.EXCHANGES and not self.run.exchange_by_nccl
        if in_place and each.op not in ops.TO_OWNERS:  # received rows are copied out, own ones beside that
            return wire + 2 * each.received / self.rates.memory / _G
        if each.op in CLASSES["dispatch"] or each.op in ops.EXCHANGES:
            return wire + (each.moved - each.received) / self.rates.memory / _G
        if each.op in FUSED:
            product = self._product(each, forward)
            return product + wire if self._tensor.hosts > 1 else self.rates.fused * max(product, wire)
        return wire if each.op in CLASSES["communication"] else self._product(each, forward)

    def _wire(self, each: Operation | Activation) -> float:
        """Return the seconds in which a rank receives other ranks' tokens, or results of experts."""
        rates, is_exchange = self.rates, each.op in ops.EXCHANGES
        if not each.received:
            return 0.0
        if is_exchange and not self.run.exchange_by_nccl:
            return each.received / rates.exchange[each.op in ops.TO_OWNERS] / _G
        kind = "all_to_all" if each.op in ops.TO_OWNERS else "all_gather"
        ranks = self._experts if is_exchange else self._tensor
        return rates.network.seconds(kind, each.received, ranks, rates.tensor_parallel)

    def _key_exchange(self, each: Operation | Activation, forward: bool) -> float:
        """Return the seconds in which the busiest rank exchanges keys and values around attention.

        A buffer for all keys is filled with zeros, and the rank's own and the received keys are copied into it.
        Backward repeats this, joins the gradients of keys and values, sends those of received keys to their owners,
        and adds up the received gradients in float32.
        """
        if each.op != ops.CONTEXT_ATTENTION:
            return 0.0
        keys, P = each.call[1][1], self.run.context_parallel
        own = 2 * math.prod(keys.size) * keys.dtype.itemsize
        got = self._keys_of_others[self._window(each)] * P * own
        moved = 4 * own + own * P + 4 * got
        if not forward:
            moved += 2 * own * P + 6 * own + 7 * got
        sent, rates = (1 if forward else 2) * got, self.rates
        wire = rates.network.seconds("all_to_all", sent, self._context, rates.tensor_parallel)
        return wire + moved / rates.memory / _G

    def _attended_flops(self, each: Operation | Activation) -> float:
        """Return the busiest rank's FLOPs of attention within documents."""
        window = self._window(each)
        share = 1.0 if self.attended is None else self.attended.of(window)
        return each.flops * share * (1.0 if window else self._busiest)  # with a window all ranks do the same work

    def _attention_rates(self, each: Operation | Activation) -> tuple[float, float]:
        """Return the TFLOP/s of attention, forward and backward."""
        rates, width, is_whole = self.rates, self.memory.dims.head_width, self.attended is None
        tokens = self.memory.config.training.seq_len if is_whole else 0
        forward, backward = rates.attention_window if self._window(each) else rates.attention_of(width, tokens)
        shares = (1.0, 1.0) if is_whole else rates.documents_of(width)
        return forward * shares[0], backward * shares[1]

    def _window(self, each: Operation | Activation) -> int:
        return each.call[1][-1] if each.op in ops.OWN_ATTENTION else 0

    def _product(self, each: Operation | Activation, forward: bool) -> float:
        """Return the seconds of a matmul or a product of experts, without a collective that is fused with it."""
        rates = self.rates
        if each.op in _GROUPED:
            return each.flops / self._grouped_rate(each) / _T
        alone = self.memory.shards == 1 and (forward or self.memory.alone)  # replicas reduce gradients beside backward
        rate = rates.matmul_alone if alone else rates.matmul_beside_collectives
        if each.in_float8 and self.run.float8:
            of = self.run.float8.accumulation
            rate = rates.float8_fast if (of.output if forward else of.grad_input) == "fast" else rates.float8_split
        return each.flops / rate / _T

    def _grouped_rate(self, each: Operation | Activation) -> float:
        """Return the TFLOP/s of a product of experts, by the mean number of rows of an expert."""
        args = each.call[1]
        (offsets,) = (shape for shape in args if isinstance(shape, Shape) and shape.dtype == torch.int32)
        rows = each.flops / 2 / self._weight_of_expert(each) / (offsets.size[0] - 1)
        fast = bool(args[-1]) if each.in_float8 else None
        return self.rates.grouped_of(rows, each.op in ops.GRADIENTS_OF_EXPERTS, fast)

    def _weight_of_expert(self, each: Operation | Activation) -> int:
        """Return the elements of an expert's weight in a product of experts."""
        left, right = each.call[1][:2]
        if each.op not in ops.GRADIENTS_OF_EXPERTS:
            return math.prod(right.size[1:])
        by_column = each.op == ops.GRADIENTS_OF_EXPERTS[1]  # operands are transposed
        return left.size[1 - by_column] * right.size[1 - by_column]

    def _copied(self) -> float:
        """Return the bytes moved in a micro-step by casts of shards, and by casts or sums of gradients."""
        moved = 0.0
        for unit in chain.from_iterable(units(self.memory)):
            moved += unit.gathers * (4 * unit.elements + unit.gathered_bytes) / unit.shards
            made = 4 / unit.shards if unit.pushed else self.memory.reduced
            moved += (self.run.itemsize + made) * unit.elements
        return moved

    def _fsdp(self, n: int, compute: float) -> float:
        """Return the seconds that FSDP's collectives add to `compute` seconds in each of `n` blocks."""
        (embedding,), block, *_ = units(self.memory)
        taken, within_a_host = (
            sum(unit.gathers * gather + scatter + summed for unit in block for gather, scatter, summed in [of(unit)])
            for of in (self._of_unit, partial(self._of_unit, on_a_host=True))
        )
        slowed = self.rates.slowed_by_collectives * max(0.0, min(taken, compute) - within_a_host)
        first, scattered, summed = self._of_unit(embedding)
        first += sum(self._of_unit(unit)[0] for unit in block)
        return first + scattered + summed + n * max(0.0, taken - compute, slowed)

    def _of_unit(self, unit: Unit, on_a_host: bool = False) -> tuple[float, float, float]:
        """Return the seconds of a unit's gather, of its gradients' reduction, and of their sum over replicas.

        `on_a_host`: as if all ranks were on one host.
        """
        sums = self.memory.reduced * unit.elements // unit.shards
        gather, scatter, summed = (
            self._collective(kind, whole, Ranks(ranks.size, ranks.size) if on_a_host else ranks, self.rates.fsdp)
            for kind, whole, ranks in (
                ("all_gather", unit.gathered_bytes, unit.ranks),
                ("reduce_scatter", unit.reduced * unit.elements, unit.ranks),
                ("all_reduce", sums, self._replicas),
            )
        )
        return gather, scatter, summed

    def _collective(self, kind: str, whole_bytes: int, ranks: Ranks, rate: float) -> float:
        """Return the seconds of a collective on a tensor of `whole_bytes` before it is split."""
        return self.rates.network.seconds(kind, sent_bytes(kind, whole_bytes, ranks.size), ranks, rate)
