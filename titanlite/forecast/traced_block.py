"""A traced block: its operations, the values that they read and make, and the bytes that follow from these.

`trace.py` lists the operations of forward and of backward in the order in which they ran. A value is the number of a
storage, so a view is the same value as its base.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titanlite.activation_checkpoint.operations import CLASS_OF, EXCHANGES, FUSED, GRADIENTS_OF_EXPERTS


class Shape(NamedTuple):
    """The shape, strides and dtype of a tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Shape":
        """Return the shape, strides and dtype of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)


class ExpertRanks(NamedTuple):
    """The P = `count` expert-parallel ranks of a layer.

    Attributes:
        by_nccl: whether a collective of NCCL sends rows to the owners of tokens, with room for each slot from each
            rank. False: kernels write them into the owners' memory.
    """

    count: int = 1
    by_nccl: bool = False


@dataclass(frozen=True)
class Operation:
    """One operation that makes or changes a value.

    Attributes:
        op: name as torch spells it, "aten.mm.default".
        reads: numbers of the values that it is given.
        awaits: those of them that must be computed first, but are not read.
        makes: numbers of the values that it makes, or changes.
        is_fusible: whether a compiler fuses it with its neighbours.
        is_reduction: whether it returns fewer numbers than it reads.
        of_tokens: whether it depends on the block's input, and not on weights alone.
        in_float8: whether it reads float8.
        moved: bytes that it reads, writes, and receives from other ranks; `received` counts the last alone.
        inside: bytes of temporary memory while it runs, beside the values that it reads and makes.
        level: number of non-fusible operations on the longest path to it. Fusible operations of a level are fused.
        call: the operation and its arguments, with a `Shape` for each tensor.
    """

    op: str
    reads: tuple[int, ...]
    awaits: tuple[int, ...]
    makes: tuple[int, ...]
    is_fusible: bool
    is_reduction: bool
    of_tokens: bool
    to_float8: bool
    in_float8: bool
    flops: int
    moved: int
    received: int
    inside: int
    level: int
    call: tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class TracedBlock:
    """The trace of one block, forward and backward.

    Attributes:
        layers: names of its linear layers, as save-lists spell them.
        sizes: bytes of each value, by its number.
        in_use: for values that are rows of experts, the share of rows in use in the mean, with expert-parallel ranks.
            Kernels skip unused rows.
        later_windows: most bytes that windows of experts' rows after the first take: one of them, and for any routing.
        given: values that exist before forward: weights, and the block's arguments.
        given_to: shapes of the block's arguments, positional and by name.
        stream: arguments that have a gradient, which every checkpointed block keeps.
        returned: values that the block returns.
        saved: bytes that autograd keeps without recomputation, the input included.
        n_repeated: number of forward operations until the last value that autograd keeps. Eager mode repeats only them.
        windows: attention windows in tokens, 0 for none, one per attention layer.
        peaks: most bytes at once in eager mode, without weights, in forward and in backward.
        widest: most bytes at once in eager mode that backward has made, the incoming gradient included.
    """

    layers: tuple[str, ...]
    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    sizes: Mapping[int, int]
    in_use: Mapping[int, Fraction]
    later_windows: tuple[int, int]
    given: frozenset[int]
    given_to: tuple[Any, Any]
    stream: frozenset[int]
    returned: frozenset[int]
    saved: int
    n_repeated: int
    windows: tuple[int, ...]
    peaks: tuple[int, int]
    widest: int

    @cached_property
    def makers(self) -> dict[int, int]:
        """Return, by value, the index of the forward operation that makes it."""
        return {value: n for n, operation in enumerate(self.forward) for value in operation.makes}

    @cached_property
    def used_in_forward(self) -> set[int]:
        """Return the values that operations of forward read, or that the block returns."""
        return {value for operation in self.forward for value in operation.reads}.union(self.returned)

    @cached_property
    def wanted(self) -> list[int]:
        """Return the values that operations of backward read."""
        return list(dict.fromkeys(value for operation in self.backward for value in operation.reads))

    @cached_property
    def widest_compiled(self) -> int:
        """Return the most bytes that compiled backward has made and holds at once.

        A fusible operation is fused with the readers of its result. A value is held until the two operations after its
        last reader are done: so it was measured for the two products of a linear layer's backward.
        """
        readers: dict[int, list[int]] = {}
        for n, operation in enumerate(self.backward):
            for value in operation.reads:
                readers.setdefault(value, []).append(n)
        last: dict[int, int] = {}
        changes = [0] * (len(self.backward) + 1)
        for n, operation in reversed([*enumerate(self.backward)]):
            for value in operation.makes:
                by = readers.get(value, [])
                joined = [r for r in by if self.backward[r].is_fusible]
                ends = [r for r in by if r not in joined] + [
                    max(last[v] for v in self.backward[r].makes) for r in joined
                ]
                last[value] = max(ends, default=len(self.backward))
                if not operation.is_fusible or len(joined) < len(by) or not by:
                    changes[n] += self.sizes[value]
                    if last[value] + 3 < len(self.backward):
                        changes[last[value] + 3] -= self.sizes[value]
            changes[n] += operation.inside
            changes[n + 1] -= operation.inside
        return max(accumulate(changes))

    @cached_property
    def elementwise(self) -> tuple[int, int]:
        """Return the bytes moved by operations other than matmuls, attention and collectives: (forward, backward)."""
        return self._elementwise(self.forward), self._elementwise(self.backward)

    def _elementwise(self, operations: Sequence[Operation]) -> int:
        """Return the bytes that elementwise operations move. The fusible operations of a level count as one pass: only
        its inputs, and results that are read outside of it, are counted."""
        total, levels = 0, dict[int, list[Operation]]()
        for each in operations:
            is_timed = (
                "attention" in each.op
                or each.op in FUSED
                or CLASS_OF.get(each.op) in ("matmul", "communication", "experts")
                or each.op in (*GRADIENTS_OF_EXPERTS, *EXCHANGES)
            )
            if not each.of_tokens or not each.reads or is_timed:
                continue
            if each.is_fusible or each.is_reduction:
                levels.setdefault(each.level, []).append(each)
            else:
                total += self._bytes_in_use({*each.reads, *each.makes} - {*each.awaits})
        is_backward = operations is self.backward
        kept = set[int]() if is_backward else {v for v in self.returned.union(self.wanted) if not self._is_remade(v)}
        for level in levels.values():
            made, inside = {v for each in level for v in each.makes}, {id(each) for each in level}
            read = {
                source for each in level for v in each.reads for source in (self._sources(v) if is_backward else {v})
            } - made
            outside = {v for each in operations if id(each) not in inside for v in each.reads}
            written = made & (outside | kept)
            total += self._bytes_in_use(read | written)
        return total

    def _bytes_in_use(self, values: Iterable[int]) -> int:
        """Return the bytes of some values, without unused rows of experts."""
        return sum(int(self.sizes[value] * self.in_use.get(value, 1)) for value in values)

    def _sources(self, value: int) -> set[int]:
        """Return the values that compiled backward reads for a value of forward: itself, or the inputs to remake it."""
        if not self._is_remade(value):
            return {value}
        if value not in self._made_of:
            reads = self.forward[self.makers[value]].reads
            self._made_of[value] = {source for each in reads for source in self._sources(each)}
        return self._made_of[value]

    @cached_property
    def _made_of(self) -> dict[int, set[int]]:
        return {}

    def _is_remade(self, value: int) -> bool:
        """Return whether a compiler recomputes a value of forward in backward."""
        return value in self.makers and self.forward[self.makers[value]].is_fusible

    @cached_property
    def most_exchanged(self) -> int:
        """Return the most bytes that a rank receives in one collective of expert parallelism."""
        operations = *self.forward, *self.backward
        return max((each.received for each in operations if each.op in EXCHANGES), default=0)

    @cached_property
    def input_bytes(self) -> int:
        """Return the bytes of the block's input, which every checkpointed block keeps."""
        return self.bytes_of(self.stream)

    def bytes_of(self, values: Iterable[int]) -> int:
        """Return the bytes of some values."""
        return sum(self.sizes[value] for value in values)
