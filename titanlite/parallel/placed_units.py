"""FSDP's units with their weights gathered in place: FSDP2's hooks and order of calls, without its copies.

FSDP2 casts a unit's shards into a flat buffer, gathers the buffers of all ranks, and copies each weight out of the
result. Here each weight [N, …] has a place, [ranks · padded shard], which never changes. A rank casts its shard into
its part of the place, and the collective fills the other parts. Compute reads the weight there.

The places of units that are freed after forward lie in two ranges of memory, used in turn: while compute is in one
unit, the next is gathered. A gather into a range waits for the event after the range's last reader. Since FSDP gathers
one unit ahead, that is the reader of the unit before. A unit that would be gathered into a range in use, as when a
model calls its blocks in another order, is gathered later, when compute is there. All other units have a range of their
own.

Small shards are gathered together, and copied to their places by one kernel; except float8, whose kernel needs aligned
memory.
"""

from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, alloc_storage, free_storage
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.profiler import record_function

from titanlite.float8.weight import GatheredWeight, WeightShard
from titanlite.parallel.reduction import TOGETHER, Reduction, in_pieces

if TYPE_CHECKING:
    from titanlite.kernels.device import shard_exchange

_ALIGNMENT = 256
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # by its name before torch 2.13
_WORDS = torch.int64, torch.int32, torch.int16, torch.uint8


class PlacedParam(FSDPParam):
    """A parameter that is gathered in memory that never changes.

    Attributes:
        wholes: tensors that are gathered, 1-D: the weight, padded; with float8 its bytes, then scales by row, if any.
        own: for each of them, memory into which this rank casts its shard.
    """

    wholes: list[Tensor]
    own: list[Tensor]
    scale_inv: Tensor | None = None  # of the whole weight in float8

    def parts(self) -> list[tuple[int, torch.dtype]]:
        """Return number and dtype of the elements that a rank adds to each of `wholes`."""
        shard = self._sharded_local_tensor
        if not isinstance(shard, WeightShard):
            return [(self.padded_sharded_param_size.numel(), self.mp_policy.param_dtype or self.sharded_param.dtype)]
        of_bytes = shard.numel(), shard.how.dtype
        return [of_bytes, (len(shard), torch.float32)] if shard.how.by_row else [of_bytes]

    def init_unsharded_param(self) -> None:
        """Make the gathered weight, or set its scale. It is a plain tensor: unwrapping would take time of the host."""
        shard, scale_inv = self._sharded_local_tensor, self.scale_inv
        if hasattr(self, "_unsharded_param"):
            if isinstance(shard, WeightShard) and not shard.how.by_row:
                self._unsharded_param.scale_inv = scale_inv  # type: ignore[attr-defined]
            return
        # `data` has a version of its own, so that autograd does not take the next gather for a change of the weight.
        weight = self.wholes[0][: self._orig_size.numel()].view(self._orig_size).data
        if isinstance(shard, WeightShard):
            if shard.how.by_row:
                scale_inv = self.wholes[1].view(-1, 1).data
            weight = GatheredWeight(weight, cast("Tensor", scale_inv), self.mp_policy.param_dtype or shard.dtype)
        self._unsharded_param = nn.Parameter(weight, requires_grad=self.sharded_param.requires_grad)
        self.is_dtensor = False  # nor are its gradients

    def free_unsharded_param(self) -> None:
        """Free the weight if it is whole on each rank. Others' memory is for the next unit."""
        if self.mesh_info.shard_mesh_size == 1:  # type: ignore[union-attr]
            for whole in self.wholes:
                free_storage(whole)


class Range:
    """Memory that units use in turn, one at a time."""

    def __init__(self) -> None:
        self.units: list[PlacedGroup] = []
        self.holder: PlacedGroup | None = None  # the unit that was gathered last
        self.released: Any = None  # event after all that has read or written it


class Arena:
    """The memory of all units that a group of ranks shards, and the group's collectives.

    Args:
        group: the ranks.
        reduction: of all units of the model.
        by_copy_engines: whether copy engines gather and reduce, see `no_copy_engines`.
        exchanges: those of copy engines; None without, and on a device that is only named: then the group's collectives
            send as many bytes.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        reduction: Reduction,
        by_copy_engines: bool = False,
        exchanges: "tuple[shard_exchange.AllGather, shard_exchange.ReduceScatter] | tuple[None, None]" = (None, None),
    ) -> None:
        self.group, self.reduction, self.by_copy_engines = group, reduction, by_copy_engines
        self.exchange, self.reduce = exchanges
        self.ranges: list[Range] = []
        self.memory: Tensor | None = None  # of several ranks

    def add(self, group: FSDPParamGroup, at: Range) -> None:
        """Let a unit be gathered in a range."""
        group.__class__ = PlacedGroup
        placed = cast("PlacedGroup", group)
        placed.arena, placed.at = self, at
        for param in placed.fsdp_params:
            param.__class__ = PlacedParam
        if at not in self.ranges:
            self.ranges.append(at)
        at.units.append(placed)

    def allocate(self) -> None:
        """Allocate the memory and give each weight its place; on a single rank each has memory that can be freed."""
        units = [unit for at in self.ranges for unit in at.units]
        if self.group.size() == 1:
            for param in (param for unit in units for param in unit.fsdp_params):
                param.wholes = [torch.empty(n, dtype=dtype, device=param.device) for n, dtype in param.parts()]
                param.own = param.wholes
            return
        sizes = [max(unit.lay_out(None) for unit in at.units) for at in self.ranges]
        begins = [0, *accumulate(sizes)]
        if self.exchange is None:
            self.memory = torch.empty(begins[-1], dtype=torch.uint8, device=units[0].device)
        else:
            self.memory = self.exchange.memory(begins[-1])
        for at, begin, size in zip(self.ranges, begins, sizes, strict=False):
            for unit in at.units:
                unit.lay_out(self.memory[begin : begin + size])

    def gather(self, pieces: "list[Piece]") -> None:
        """Fill all ranks' parts of the pieces."""
        if self.exchange is not None:
            self.exchange([(piece.own, piece.peers) for piece in pieces])
            return
        with dist.distributed_c10d._coalescing_manager(self.group):
            for piece in pieces:
                _all_gather(piece.whole, piece.own, self.group)


@dataclass
class Piece:
    """Memory that one call gathers: every rank's part, one after the other."""

    whole: Tensor  # [ranks · part] bytes
    own: Tensor  # this rank's part
    peers: list[Tensor] = field(default_factory=list)  # with copy engines, this rank's part in the peers' memory


class PlacedGroup(FSDPParamGroup):
    """A unit whose weights have places in an arena. `Arena.add` makes it of FSDP's own."""

    fsdp_params: list[PlacedParam]  # type: ignore[assignment]
    device_handle: Any
    arena: Arena
    at: Range
    _pieces: list[Piece]
    _small: tuple[Tensor, list[int], list[Tensor]] | None = None  # small shards [ranks, words], their sizes, places
    _is_late: bool = False  # whether the last `unshard` found the range in use

    def lay_out(self, memory: Tensor | None) -> int:
        """Return how many bytes the unit takes; given that memory, give each weight its place in it."""
        ranks, rank, exchange = self.arena.group.size(), self.arena.group.rank(), self.arena.exchange
        parts = [(param, *part) for param in self.fsdp_params for part in param.parts()]
        n_bytes = [n * dtype.itemsize for _, n, dtype in parts]
        is_small = [n < TOGETHER and dtype.itemsize > 1 for n, (*_, dtype) in zip(n_bytes, parts, strict=True)]
        small = sorted((i for i in range(len(parts)) if is_small[i]), key=lambda i: -parts[i][2].itemsize)
        sizes = [n_bytes[i] for i in small]  # in this order each begins at a multiple of its element's bytes
        widest = parts[small[0]][2].itemsize if small else 1
        part = -(-sum(sizes) // widest) * widest  # and so it does in the parts of all ranks
        padded = [-(-ranks * n // _ALIGNMENT) * _ALIGNMENT for n in (*n_bytes, part)]
        begins = [0, *accumulate(padded)]
        if memory is None:
            return begins[-1]

        def piece(i: int, n: int) -> Piece:
            whole = memory[begins[i] : begins[i] + ranks * n]
            own = whole[rank * n : (rank + 1) * n]
            return Piece(whole, own, [] if exchange is None else exchange.at_peers(own))

        for param in self.fsdp_params:
            param.wholes, param.own = [], []
        places = [memory[begin : begin + ranks * n] for begin, n in zip(begins, n_bytes, strict=False)]
        self._pieces = [piece(i, n) for i, n in enumerate(n_bytes) if not is_small[i]]
        own = {}
        if small:
            together = piece(len(parts), part)
            self._pieces.append(together)
            own = dict(zip(small, together.own[: sum(sizes)].split(sizes), strict=True))
            word = next(word for word in _WORDS if not any(n % word.itemsize for n in sizes))
            words = [n // word.itemsize for n in sizes]
            to = [places[i].view(word).view(ranks, -1) for i in small]
            self._small = together.whole.view(word).view(ranks, -1)[:, : sum(words)], words, to
        for i, (param, _, dtype) in enumerate(parts):
            param.wholes.append(places[i].view(dtype))
            param.own.append(own[i].view(dtype) if i in own else param.wholes[-1].chunk(ranks)[rank])
        return begins[-1]

    def unshard(self, async_op: bool = False) -> None:
        """Gather the unit, unless it is gathered, or its range is in use; then `wait_for_unshard` gathers it."""
        if self._all_gather_result is not None or self.is_unsharded:
            return
        if self._training_state == TrainingState.PRE_BACKWARD and not self.unshard_in_backward:
            return
        holder = self.at.holder
        self._is_late = holder is not None and (holder.is_unsharded or holder._all_gather_result is not None)
        if not self._is_late:
            self._gather()

    def _gather(self) -> None:
        if not hasattr(self.fsdp_params[0], "own"):
            self.arena.allocate()
        event = None
        if self.arena.group.size() > 1:
            casting, gathering = self.comm_ctx.get_all_gather_streams(False, self._training_state)
            with record_function(self._with_fqn("FSDP::all_gather")), torch.no_grad():
                with self.device_handle.stream(casting):
                    if self.at.released is not None:
                        casting.wait_event(self.at.released)
                    self._cast()
                gathering.wait_stream(casting)
                with self.device_handle.stream(gathering):
                    self.arena.gather(self._pieces)
                    if self._small is not None:
                        together, sizes, places = self._small
                        torch.split_with_sizes_copy(together, sizes, dim=1, out=places)
                    event = gathering.record_event()
        self.at.holder = self
        self._all_gather_result = AllGatherResult(self.fsdp_params[0].own[0], event, None, [], [], [])

    def _cast(self) -> None:
        """Cast this rank's shards to their places."""
        pairs: tuple[list[tuple[Tensor, Tensor]], ...] = [], []  # of masters, of scales
        for param in self.fsdp_params:
            shard = param._sharded_local_tensor
            if not isinstance(shard, WeightShard):
                pairs[0].append((param.own[0], param._sharded_param_data))
                continue
            param.scale_inv = shard.cast_into(param.own[0], param.shard_mesh_from_root)
            if shard.how.by_row:
                pairs[1].append((param.own[1], param.scale_inv.view(-1)))
        for each in filter(None, pairs):
            places, shards = zip(*each, strict=True)
            torch._foreach_copy_(places, shards)

    def wait_for_unshard(self) -> None:
        """Let compute wait for the gather, and give the modules their weights."""
        if self._is_late and (holder := self.at.holder) is not None:
            self._is_late = False
            if holder.is_unsharded and holder._training_state == TrainingState.PRE_BACKWARD:
                holder.post_backward()  # whose inputs need no gradient: autograd would not call it before the end
            assert not holder.is_unsharded, f"{holder} and {self} share memory, and are gathered at once"  # noqa: S101
            if (unused := holder._all_gather_result) is not None:  # gathered ahead, and not called
                self.at.released, holder._all_gather_result = unused.all_gather_event, None
            self._gather()
        if self._all_gather_result is None:
            return
        if (event := self._all_gather_result.all_gather_event) is not None:
            self.device_handle.current_stream().wait_event(event)
        if self.arena.group.size() == 1:
            for param in self.fsdp_params:
                for whole in param.wholes:
                    alloc_storage(whole)
            with torch.no_grad():
                self._cast()
        for param in self.fsdp_params:
            param.init_unsharded_param()
        self._to_unsharded()
        self._all_gather_result = None

    def _to_sharded(self) -> None:
        if not self.is_sharded:
            super()._to_sharded()
            self.at.released = self.device_handle.current_stream().record_event()

    @property
    def dtype_of_sums(self) -> torch.dtype:
        """Return the dtype in which gradients are added up."""
        return torch.float32 if self.arena.by_copy_engines else cast("torch.dtype", self.mp_policy.reduce_dtype)

    def post_backward(self, *unused: Any) -> None:
        """Free the weights, and reduce the gradients that autograd has made."""
        self._training_state = TrainingState.POST_BACKWARD
        with record_function(self._with_fqn("FSDP::post_backward")):
            gradients: dict[FSDPParam, Any] = {}
            for param in self.fsdp_params:
                if hasattr(param, "_unsharded_param") and param.unsharded_param.grad is not None:
                    gradients[param] = param.unsharded_param.grad  # and in no variable: the reduction frees it
                    param.unsharded_param.grad = None
            self.reshard()
            if gradients:
                self.arena.reduction(self, gradients)

    def finalize_backward(self) -> None:
        """Let compute wait for all gradients."""
        super().finalize_backward()
        self.arena.reduction.finish(self.device_handle.current_stream())

    def prepare_reduction(self) -> None:
        """Allocate the memory of copy engines, and load their kernels, before activations fill the GPU."""
        trained = [param for param in self.fsdp_params if param.sharded_param.requires_grad]
        if self.arena.reduce is not None and trained:
            ranks, gathered = self.arena.group.size(), [param.unsharded_param for param in trained]
            zeros = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in gathered]
            _, pieces = in_pieces(dict(zip(trained, zeros, strict=True)), ranks)
            self.arena.reduce(pieces, torch.empty(sum(x.shape[1] for x in pieces), device=self.device))
