"""Trace a block: record the operations of one forward and backward run on the meta device.

A dispatch mode sees every operation below autograd, with the storages that it reads and makes. This gives, for any
block, the results of forward that backward needs, and the cost of recomputing each. Nothing is compiled or allocated: a
block takes a tenth of a second. `activation_cost.py` derives the bytes and recomputation under a save-list.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.activation_checkpoint import operations as ops
from titanlite.activation_checkpoint.operations import CLASSES
from titanlite.data.document_starts import twice_attended
from titanlite.forecast.traced_block import ExpertRanks, Operation, Shape, TracedBlock
from titanlite.kernels.expert_windows import compute_window, most_windows
from titanlite.kernels.products import FLOAT8
from titanlite.models.experts import product_names
from titanlite.models.layers import CausalAttention

_FUSIBLE = {"_to_copy", "copy", "clone", "cat", "stack", "slice_backward", "select_backward", "split", "_softmax"}
"""Operations that compilers fuse with their neighbours though torch does not tag them as elementwise."""

_IN_A_ROW = {"mean", "sum", "var_mean"}
"""Reductions of a row whose result a kernel uses in the same pass over the row."""

_REDUCTIONS = {*_IN_A_ROW, "amax", "max"}

_ALL_HERE = ExpertRanks()


def trace(
    block: nn.Module, args: Sequence[object], kwargs: Mapping[str, object], experts: ExpertRanks = _ALL_HERE
) -> TracedBlock:
    """Run a block forward and backward on the meta device, and return its trace.

    Args:
        block: its parameters are plain tensors of the dtype that a step computes in.
        args: the block's arguments, like `kwargs`. Tensors that get a gradient have `requires_grad`; they are detached.
        experts: the P expert-parallel ranks. Rows have more room than the mean routing needs (`expert_windows.py`).
    """

    def apart(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad)

    args, kwargs = pytree.tree_map_only(Tensor, apart, (tuple(args), dict(kwargs)))
    given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    stream = [t for t in given if t.requires_grad]
    itemsize = stream[0].itemsize if stream else 2
    windows = tuple(m.window for m in block.modules() if isinstance(m, CausalAttention))
    recorder = _Recorder(itemsize, experts)
    weights = {*recorder.known(*block.parameters(), *block.buffers())}
    others = {*recorder.known(*given)}
    recorder.tokens |= {*recorder.known(*stream)}
    recorder.begin_forward(weights | (others - recorder.tokens))
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
        alive = recorder.alive() - weights - of_outs - (others - (kept & recorder.tokens))
        end, peak_forward = _End.apply(*outs), recorder.peak
        del outs, returned
        n_backward = len(recorder.operations)
        recorder.begin_backward()
        end.backward()
    made = recorder.operations
    return TracedBlock(
        layers=product_names(block),
        forward=tuple(made[:n_forward]),
        backward=tuple(made[n_backward:]),
        sizes=recorder.sizes,
        in_use=recorder.in_use,
        later_windows=recorder.later_windows,
        given=frozenset(weights | others),
        given_to=pytree.tree_map_only(Tensor, Shape.of, (args, kwargs)),
        stream=frozenset(recorder.known(*stream)),
        returned=of_outs,
        saved=sum(recorder.sizes[value] for value in alive),
        n_repeated=packed,
        windows=windows,
        peaks=(peak_forward, recorder.peak),
        widest=recorder.widest,
    )


def _plain(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors that are not in host memory; for a wrapper subclass, the tensors inside it."""
    for tensor in tensors:
        if tensor.is_cpu:
            continue
        inner = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()  # type: ignore[attr-defined]
        yield from (getattr(tensor, name) for name in inner) if inner else (tensor,)


class _End(torch.autograd.Function):
    """Ends forward without a loss: results can be freed, and backward begins with new tensors as their gradients."""

    @staticmethod
    def forward(ctx: Any, *outs: Tensor) -> Tensor:
        ctx.shapes = [(t.shape, t.dtype) for t in outs]
        return torch.empty((), device="meta")

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in ctx.shapes)


class OneKernel(TorchFunctionMode):
    """Computes attention as one operation: on the meta device torch would decompose it, which no GPU does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        names = "query", "key", "value", "attn_mask", "dropout_p", "is_causal"
        given = dict(zip(names, args, strict=False)) | (kwargs or {})
        given.pop("enable_gqa", None)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(**given)[0]


class _Recorder(TorchDispatchMode):
    """Records each operation, with the numbers of the storages that it reads and makes."""

    def __init__(self, itemsize: int, experts: ExpertRanks) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.sizes: dict[int, int] = {}
        self.in_use: dict[int, Fraction] = {}  # of rows of experts: the share that holds a token, in the mean
        self.later_windows = 0, 0
        self.tokens: set[int] = set()  # values that depend on the block's input
        self.peak = self.widest = 0
        self._numbers: dict[int, tuple[StorageWeakRef, int]] = {}  # the reference keeps its key from reuse
        self._live: dict[int, StorageWeakRef] = {}  # storages that were made and not freed
        self._apart: set[int] = set()
        self._before: set[int] = set()
        self._levels: dict[int, int] = {}
        self._itemsize, self._experts = itemsize, experts
        self._mean_rows, self._share = 0, Fraction(1)

    def known(self, *tensors: Tensor) -> list[int]:
        """Return the numbers of tensors' storages; a new storage gets the next number."""
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
        """Return the numbers of the storages that are still referenced."""
        return {number for ref, number in self._numbers.values() if not ref.expired()}

    def begin_forward(self, apart: set[int]) -> None:
        """Start to count live bytes, without the storages `apart`, which exist before forward."""
        self._apart = apart
        self._live = {number: ref for ref, number in self._numbers.values() if number not in apart}

    def begin_backward(self) -> None:
        """Reset the peaks; from now on `widest` counts only storages that backward makes."""
        self.peak = self.widest = 0
        self._before = {*self.sizes}
        self._levels.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        reads = self.known(*given)
        out = func(*args, **kwargs)
        results = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
        op, name = str(func), func.overloadpacket.__name__
        if name == "wait_tensor":  # on a device it returns its argument
            self._numbers[results[0].untyped_storage()._cdata] = StorageWeakRef(results[0].untyped_storage()), reads[0]
            return out
        makes = self.known(*results)
        inside = _memory_of_nccl(op, args, self._experts) + _memory_of_keys(op, args, results)
        if op in ops.EXPERT_ROWS:
            self._mean_rows = len(results[1]) // self._experts.count
        elif op == ops.GATHER_ROWS and self._experts.count > 1:
            self._share = Fraction(self._mean_rows, len(results[0]))
        elif op in ops.WINDOWS:
            self.later_windows = max(self.later_windows, _memory_of_later_windows(args, self._experts))
        self._count_live(results, inside)
        if not func._schema.is_mutable:
            makes = [value for value in makes if value not in reads]
        if not makes:
            return out
        if self._experts.count > 1 and op in ops.MAKE_ROWS:
            rows = len(next(t for t in results if t.dim() > 1))
            self.in_use |= dict.fromkeys(self.known(*(t for t in results if len(t) == rows)), self._share)
        of_tokens = not reads or not self.tokens.isdisjoint(reads)
        if of_tokens:
            self.tokens.update(makes)
        fusible = torch.Tag.pointwise in func.tags or name in _FUSIBLE
        awaited = _awaited(func, args)
        read = [t for t in given if t is not awaited]
        flops, moved, received = _cost(op, args, read, results, self._itemsize, self._experts, self._share)
        is_reduction = func.namespace == "aten" and name in _REDUCTIONS
        level = max((self._levels.get(value, 0) for value in reads), default=0)
        after = level if fusible or name in _IN_A_ROW else level + 1  # scaling by a maximum is one more pass
        self._levels.update((value, after) for value in makes)
        self.operations.append(
            Operation(
                op=op,
                reads=tuple(reads),
                awaits=tuple(self.known(awaited)) if awaited is not None else (),
                makes=tuple(makes),
                is_fusible=fusible,
                is_reduction=is_reduction,
                of_tokens=of_tokens,
                to_float8=results[0].dtype in FLOAT8,
                in_float8=any(t.dtype in FLOAT8 for t in _plain(given)),
                flops=flops,
                moved=moved,
                received=received,
                inside=inside,
                level=level,
                call=(func, *pytree.tree_map_only(Tensor, Shape.of, (args, kwargs))),
            )
        )
        return out

    def _count_live(self, results: Sequence[Tensor], inside: int) -> None:
        self._live.update(
            (number, ref) for ref, number in (self._numbers[t.untyped_storage()._cdata] for t in _plain(results))
        )
        self._live = {n: ref for n, ref in self._live.items() if n not in self._apart and not ref.expired()}
        self.peak = max(self.peak, sum(self.sizes[number] for number in self._live) + inside)
        made = sum(self.sizes[number] for number in self._live.keys() - self._before)
        self.widest = max(self.widest, made + inside)


def _awaited(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> Tensor | None:
    """Return the argument `after` of titanlite's operators: it must be computed first, and is not read."""
    names = [argument.name for argument in func._schema.arguments]
    return args[at] if "after" in names and (at := names.index("after")) < len(args) else None


def _cost(
    op: str,
    args: Any,
    given: list[Tensor],
    results: list[Tensor],
    itemsize: int,
    experts: ExpertRanks,
    in_use: Fraction,
) -> tuple[int, int, int]:
    """Return (FLOPs, bytes read, written and received, bytes received from other ranks) of an operation.

    Statistics and casts are fused with the elementwise work around them, so they read their input in the block's dtype.
    `in_use` is the share of experts' rows that hold a token.
    """
    moved, expert_ranks = sum(t.nbytes for t in given) + sum(t.nbytes for t in results), experts.count
    if op in CLASSES["attention"]:
        # An upper bound: as if each sample were one document.
        S, window = args[-2:] if op in ops.OWN_ATTENTION else (given[0].shape[2], 0)
        return 2 * given[0].numel() * (twice_attended(np.array([S]), window) // S), moved, 0
    if op == ops.GATHER_MATMUL:
        gathered, products = results[0], results[1 : 1 + len(args[1])]
        received = gathered.nbytes - given[0].nbytes
        return sum(2 * y.numel() * gathered.shape[-1] for y in products), moved, received
    if op == ops.MATMUL_SCATTER:
        pairs = list(zip(args[0], args[1], strict=True))
        flops = sum(2 * left.numel() * right.shape[-1] for left, right in pairs)
        received = args[0][0].shape[0] * args[1][0].shape[-1] * results[0].itemsize - results[0].nbytes
        return flops, moved + received, received
    if op in CLASSES["matmul"]:
        K = (args[1] if op == "aten.addmm.default" else args[0]).shape[-1]
        return 2 * results[0].numel() * K, moved, 0
    if op in CLASSES["experts"]:
        rows = args[0].nbytes + results[0].nbytes
        return int(2 * results[0].numel() * args[0].shape[1] * in_use), moved - rows + int(rows * in_use), 0
    if op in ops.GRADIENTS_OF_EXPERTS:
        R = args[0].shape[0 if op == ops.GRADIENTS_OF_EXPERTS[0] else 1]
        return int(2 * R * results[0].shape[1] * results[0].shape[2] * in_use), moved, 0
    if op in ops.EXCHANGES:
        gathers, made = op == ops.GATHER_FROM_RANKS, sum(t.nbytes for t in results)
        arrived = made if gathers else _rows_of_owner(*args)
        received = arrived * (expert_ranks - 1) // expert_ranks
        if not gathers and experts.by_nccl:
            received *= expert_ranks  # each rank sends a row for each slot
        return 0, arrived * (1 if gathers else 2) + made + received, received  # rows are copied out, or added up
    if op in CLASSES["communication"]:
        received = abs(results[0].nbytes - given[0].nbytes)
        return 0, received, received
    if op == ops.COUNT_CHOICES:
        return 0, moved, results[0].nbytes if args[3:] and args[3] is not None else 0
    if op == ops.MAX_OF_RANKS:
        return 0, results[0].nbytes, results[0].nbytes
    if op in (ops.GATHER_ROWS, ops.SPREAD_ROWS):
        return 0, sum(t.nbytes for t in given) + int(sum(t.nbytes for t in results) * in_use), 0
    read = given[0].numel() * min(itemsize, given[0].itemsize) if given else 0
    if op in CLASSES["statistics"]:
        return given[0].numel() * (2 if op == ops.MEAN else 1), read, 0
    if op in CLASSES["cast"]:
        return results[0].numel(), read + sum(t.nbytes for t in results), 0
    return 0, moved, 0


def _memory_of_nccl(op: str, args: Any, experts: ExpertRanks) -> int:
    """Return the bytes of NCCL's buffers for rows to the owners of tokens: [P·M·K, D] to send, and as many received.

    P ranks have M tokens each, for K experts each; D is the width. 0 for other operations and without NCCL.
    """
    by_nccl = op in ops.TO_OWNERS and experts.by_nccl
    return 2 * experts.count * _rows_of_owner(*args) if by_nccl else 0


def _memory_of_later_windows(args: Any, experts: ExpertRanks) -> tuple[int, int]:
    """Return the most bytes that one of `ops.WINDOWS` makes at once, for two windows in all and for the most.

    Of each window the results stay; for NCCL those of all windows are joined at the end.
    """
    recorder = _Recorder(0, experts)
    recorder.begin_forward({*recorder.known(*(t for t in pytree.tree_leaves(args) if isinstance(t, Tensor)))})
    with recorder:
        compute_window(*args)
    o, n_experts, slots = args[0], args[4], args[5]
    counts = 2, most_windows(len(slots), len(o), n_experts)
    second, most = (max(recorder.peak + (n - 2) * o.nbytes, (2 * n - 1) * o.nbytes * experts.by_nccl) for n in counts)
    return second, most


def _memory_of_keys(op: str, args: Any, results: Sequence[Tensor]) -> int:
    """Return the bytes that attention with other ranks' keys holds beside its results, on the rank that sees all keys.

    Forward holds the keys and values of all tokens (W bytes), a joined copy of the rank's own, and the received ones.
    Backward holds the gradients of all keys and values and a joined copy (2 W), the part to send, and the received
    gradients or their sums in float32.
    """
    if op not in (ops.CONTEXT_ATTENTION, ops.CONTEXT_ATTENTION_GRAD):
        return 0
    first = 1 if op == ops.CONTEXT_ATTENTION else 2
    own, ranks = args[first].nbytes + args[first + 1].nbytes, args[-4].shape[1]
    whole, others = own * ranks, own * (ranks - 1)
    if op == ops.CONTEXT_ATTENTION:  # results are made after the copy and the received keys are freed
        return whole + max(0, own + others - sum(t.nbytes for t in results))
    sums = own * max(1, torch.float32.itemsize // args[first].itemsize)
    d_k_and_v = sum(t.nbytes for t in results[1:])  # allocated last, after others are freed
    return 2 * whole + others + max(others, sums) - d_k_and_v


def _rows_of_owner(o: Tensor, slots: Tensor, choices: Tensor, beside: Tensor, *_: object) -> int:
    """Return the bytes of rows [M·K, D] for a rank's M tokens by K experts, in backward with weights' gradients."""
    is_gradient = len(beside) > len(choices)
    return choices.numel() * (o.shape[1] * o.itemsize + (beside.itemsize if is_gradient else 0))
