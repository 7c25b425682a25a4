"""What a block computes, forward and backward, read off one run of it on the meta device.

A dispatch mode sees every operation below autograd, with the storages that it reads and makes. So it is known of any
block, whatever its layers, its arithmetic and its collectives, what backward needs of forward, and what each result
takes to be computed again. Nothing is compiled and nothing is allocated: a block takes a tenth of a second.

What is kept and what is computed again under a save-list is in `activation_cost.py`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.activation_checkpoint import operations as ops
from titanlite.activation_checkpoint.operations import CLASSES
from titanlite.kernels.products import FLOAT8
from titanlite.models.layers import CausalAttention, Linear

_FUSIBLE = {"_to_copy", "copy", "clone", "cat", "stack", "slice_backward", "select_backward", "split", "_softmax"}
"""What compilers fuse with its neighbours though torch does not tag it as elementwise."""

_REDUCTIONS = {"mean", "sum", "amax", "max", "var_mean"}


class Shape(NamedTuple):
    """All of a tensor but its numbers."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Shape":
        """Describe a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)


@dataclass(frozen=True)
class Operation:
    """One operation that makes something new.

    Attributes:
        op: as torch spells it, "aten.mm.default".
        reads: numbers of the values that it reads.
        makes: numbers of the values that it makes, or changes.
        is_fusible: a compiler joins it to its neighbours.
        is_reduction: it gives fewer numbers than it reads.
        of_tokens: it depends on what the block is given, and not on weights alone.
        to_float8: its result is float8.
        flops: that it takes.
        moved: bytes that it reads, writes, and receives from other ranks.
        call: the operation and its arguments, of which tensors are shapes.
    """

    op: str
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    is_fusible: bool
    is_reduction: bool
    of_tokens: bool
    to_float8: bool
    flops: int
    moved: int
    call: tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class TracedBlock:
    """One block, forward and backward.

    Attributes:
        layers: names of its linear layers, as save-lists know them.
        forward: operations in the order in which they run.
        backward: likewise.
        sizes: bytes of each value, by its number.
        given: numbers of the values that are there before: weights, and what the block is given.
        stream: numbers of what the block is given and has a gradient, which every checkpointed block keeps.
        returned: numbers of the values that the block returns.
        saved: bytes that autograd keeps if nothing is computed again, the input included.
        n_repeated: operations of forward until all is made that autograd keeps: eager mode repeats no others.
        windows: of its attentions, in tokens; 0: all.
        widest: most bytes that backward has made and not yet freed at once, but for gradients of weights made before.
    """

    layers: tuple[str, ...]
    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    sizes: Mapping[int, int]
    given: frozenset[int]
    stream: frozenset[int]
    returned: frozenset[int]
    saved: int
    n_repeated: int
    windows: tuple[int, ...]
    widest: int

    @cached_property
    def makers(self) -> dict[int, int]:
        """The number of the operation of forward that makes each value."""
        return {value: n for n, operation in enumerate(self.forward) for value in operation.makes}

    @cached_property
    def wanted(self) -> list[int]:
        """Values that operations of backward read."""
        return list(dict.fromkeys(value for operation in self.backward for value in operation.reads))

    @cached_property
    def input_bytes(self) -> int:
        """Bytes of what every checkpointed block keeps."""
        return self.bytes_of(self.stream)

    def bytes_of(self, values: Iterable[int]) -> int:
        """The bytes of some values."""
        return sum(self.sizes[value] for value in values)


def trace(block: nn.Module, args: Sequence[object], kwargs: Mapping[str, object], seq_len: int) -> TracedBlock:
    """Run a block forward and backward on the meta device.

    Args:
        block: its parameters are plain tensors of the dtype that a step computes in.
        args: what it is given; tensors that have a gradient require one.
        kwargs: likewise.
        seq_len: S.
    """
    given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    stream = [t for t in given if t.requires_grad]
    itemsize = stream[0].itemsize if stream else 2
    windows = tuple(m.window for m in block.modules() if isinstance(m, CausalAttention))
    recorder = _Recorder(seq_len, itemsize, windows)
    weights = {*recorder.known(*block.parameters(), *block.buffers())}
    others = {*recorder.known(*given)}
    recorder.tokens |= {*recorder.known(*stream)}
    with recorder, OneKernel():
        packed, kept = 0, set[int]()

        def pack(tensor: Tensor) -> Tensor:
            nonlocal packed
            packed = len(recorder.operations)
            kept.update(recorder.known(tensor))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            returned = block(*args, **kwargs)
        n_forward = len(recorder.operations)
        outs = [t for t in pytree.tree_leaves(returned) if isinstance(t, Tensor) and t.requires_grad]
        of_outs = frozenset(recorder.known(*outs))
        alive = recorder.alive() - weights - of_outs - (others - (kept & {*recorder.known(*stream)}))
        recorder.begin_backward()
        gradients = [torch.empty_like(t) for t in outs]
        n_backward = len(recorder.operations)
        torch.autograd.backward(outs, gradients)  # type: ignore[arg-type]
    made = recorder.operations
    return TracedBlock(
        layers=tuple(name for name, module in block.named_modules() if isinstance(module, Linear)),
        forward=tuple(made[:n_forward]),
        backward=tuple(made[n_backward:]),
        sizes=recorder.sizes,
        given=frozenset(weights | others),
        stream=frozenset(recorder.known(*stream)),
        returned=of_outs,
        saved=sum(recorder.sizes[value] for value in alive),
        n_repeated=packed,
        windows=windows,
        widest=recorder.widest,
    )


def _plain(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Give the tensors, or what those are made of that are wrappers."""
    for tensor in tensors:
        inner = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()  # type: ignore[attr-defined]
        yield from (getattr(tensor, name) for name in inner) if inner else (tensor,)


class OneKernel(TorchFunctionMode):
    """Attends by one kernel: on the meta device torch would take attention apart, which no GPU does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return _attend(*args, **(kwargs or {}))


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(q, k, v, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


class _Recorder(TorchDispatchMode):
    """Lists operations by the storages that they read and make."""

    def __init__(self, seq_len: int, itemsize: int, windows: Sequence[int]) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.sizes: dict[int, int] = {}
        self.tokens: set[int] = set()  # values that depend on what the block is given
        self.widest = 0
        self._numbers: dict[int, tuple[StorageWeakRef, int]] = {}  # a weak reference keeps its key
        self._before: set[int] | None = None
        self._seq_len, self._itemsize, self._windows = seq_len, itemsize, windows

    def known(self, *tensors: Tensor) -> list[int]:
        """Give the numbers of tensors' storages, new ones to those that have none."""
        found: list[int] = []
        for tensor in _plain(tensors):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._numbers:
                number = len(self.sizes)
                self._numbers[storage._cdata] = StorageWeakRef(storage), number
                self.sizes[number] = storage.nbytes()
            found.append(self._numbers[storage._cdata][1])
        return list(dict.fromkeys(found))

    def alive(self) -> set[int]:
        """Give the numbers of those storages that somebody holds."""
        return {number for ref, number in self._numbers.values() if not ref.expired()}

    def begin_backward(self) -> None:
        self._before = {*self.sizes}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        reads = self.known(*given)
        out = func(*args, **kwargs)
        results = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
        op, name = str(func), func.overloadpacket.__name__
        if name == "wait_tensor":  # on a device it returns what it is given
            self._numbers[results[0].untyped_storage()._cdata] = StorageWeakRef(results[0].untyped_storage()), reads[0]
            return out
        makes = self.known(*results)
        if not func._schema.is_mutable:
            makes = [value for value in makes if value not in reads]
        if not makes:
            return out
        of_tokens = not self.tokens.isdisjoint(reads)
        if of_tokens:
            self.tokens.update(makes)
        fusible = torch.Tag.pointwise in func.tags or name in _FUSIBLE
        flops, moved = _cost(op, args, given, results, self._seq_len, self._itemsize, self._windows)
        self.operations.append(
            Operation(
                op=op,
                reads=tuple(reads),
                makes=tuple(makes),
                is_fusible=fusible,
                is_reduction=func.namespace == "aten" and name in _REDUCTIONS,
                of_tokens=of_tokens,
                to_float8=results[0].dtype in FLOAT8,
                flops=flops,
                moved=moved,
                call=(func, *pytree.tree_map_only(Tensor, Shape.of, (args, kwargs))),
            )
        )
        return out


def _cost(
    op: str, args: Any, given: list[Tensor], results: list[Tensor], seq_len: int, itemsize: int, windows: Sequence[int]
) -> tuple[int, int]:
    """FLOPs of an operation, and the bytes that it reads, writes and receives.

    What is elementwise around statistics and casts is joined to them: they read their input as the block has it.
    """
    moved = sum(t.nbytes for t in given) + sum(t.nbytes for t in results)
    numbers = given[0].numel() if given else 0
    if op in CLASSES["attention"]:
        B, H, S, E = given[0].shape
        window = windows[0] if op == ops.WINDOW_ATTENTION and windows else 0
        W = window if 0 < window < S else S
        return 2 * B * H * S * E * (W * (2 * S - W) // S), moved
    if op == ops.GATHER_MATMUL:
        gathered, *products = results
        K = gathered.shape[-1]
        n_products = len(args[1])
        flops = sum(2 * y.numel() * K for y in products[:n_products])
        return flops, moved
    if op == ops.MATMUL_SCATTER:
        lefts, rights = args[0], args[1]
        flops = sum(2 * left.numel() * right.shape[-1] for left, right in zip(lefts, rights, strict=True))
        whole = lefts[0].shape[0] * rights[0].shape[-1] * results[0].itemsize
        return flops, moved + whole - results[0].nbytes
    if op in CLASSES["matmul"]:
        K = (args[1] if op == "aten.addmm.default" else args[0]).shape[-1]
        return 2 * results[0].numel() * K, moved
    if op == ops.GATHER:
        return 0, results[0].nbytes - given[0].nbytes
    if op == ops.SCATTER:
        return 0, given[0].nbytes - results[0].nbytes
    if op == ops.MAX_OF_RANKS:
        return 0, results[0].nbytes
    read = numbers * min(itemsize, given[0].itemsize) if given else 0
    if op in CLASSES["statistics"]:
        return numbers * (2 if op == ops.MEAN else 1), read
    if op in CLASSES["cast"]:
        return results[0].numel(), read + sum(t.nbytes for t in results)
    return 0, moved
