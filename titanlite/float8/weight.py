"""Weights that FSDP gathers in float8: each rank casts its shard, and the all-gather sends bytes and scales.

A shard consists of whole rows, so a rank computes row scales by itself. A single scale for the whole weight is computed
after each update (`titanlite.float8.convert.precompute_scales`).
"""

from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from titanlite.kernels.collectives import Group, all_reduce
from titanlite.kernels.float8_cast import cast_into
from titanlite.kernels.float8_scales import scale_of

_aten = torch.ops.aten

_STILL_A_SHARD = {
    _aten._to_copy.default,
    _aten._pin_memory.default,
    _aten.as_strided.default,
    _aten.clone.default,
    _aten.copy_.default,
    _aten.detach.default,
    _aten.empty_like.default,
    _aten.new_zeros.default,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.view.default,
}
"""Operators by which FSDP shards and pads a parameter; of a `WeightShard` they make a `WeightShard`."""

_THE_SAME_WEIGHT = {_aten.alias.default, _aten.as_strided.default, _aten.detach.default, _aten.view.default}


class GatheredWeight(Tensor):
    """A weight [N, K] that FSDP has gathered in float8; its dtype is that of the dequantised weight."""

    qdata: Tensor  # [N, K] float8
    scale_inv: Tensor  # [N, 1] or [] float32

    @staticmethod
    def __new__(cls, qdata: Tensor, scale_inv: Tensor, dtype: torch.dtype):  # noqa: D102
        self = torch.Tensor._make_wrapper_subclass(cls, qdata.shape, qdata.stride(), dtype=dtype, device=qdata.device)
        self.qdata, self.scale_inv = qdata, scale_inv
        return self

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["qdata", "scale_inv"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], dtype: torch.dtype, size: object, stride: object):
        return GatheredWeight(inner["qdata"], inner["scale_inv"], dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GatheredWeight({tuple(self.shape)}, {self.qdata.dtype}, scale_inv {tuple(self.scale_inv.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        weight = args[0]
        if func not in _THE_SAME_WEIGHT or (
            func != _aten.detach.default and func != _aten.alias.default and list(args[1]) != list(weight.shape)
        ):
            raise NotImplementedError(f"{func} of a weight that was gathered in float8; only a float8 layer can use it")
        return cls(weight.qdata, weight.scale_inv, weight.dtype)


class Casting(NamedTuple):
    """How a weight is cast to float8."""

    dtype: torch.dtype  # a float8 dtype
    by_row: bool  # whether each row has a scale; else the whole weight has one
    pow2: bool  # whether scales are powers of two; scales of rows always are
    over: Group | None = None  # the tensor-parallel ranks, if their parts of the weight share one scale


class WeightShard(Tensor):
    """A rank's rows of a weight in high precision, which are cast to float8 before FSDP gathers them."""

    master: Tensor  # [n, K], the values in high precision, which the optimizer updates
    how: Casting
    scale: Tensor | None  # [] float32, of the whole weight, set after each update; None with scales of rows
    scale_inv: Tensor | None

    @staticmethod
    def __new__(cls, values: Tensor, how: Casting):  # noqa: D102
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            values.stride(),
            values.storage_offset(),
            dtype=values.dtype,
            device=values.device,
            requires_grad=values.requires_grad,
        )
        self.master, self.how, self.scale, self.scale_inv = values, how, None, None
        return self

    def __tensor_flatten__(self) -> tuple[list[str], Casting]:
        return ["master"], self.how

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], how: Casting, size: object, stride: object):
        return WeightShard(inner["master"], how)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"WeightShard({self.master}, {self.how})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        first = next(a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, cls))
        args, kwargs = pytree.tree_map_only(cls, lambda shard: shard.master, (args, kwargs or {}))
        out = func(*args, **kwargs)
        if func not in _STILL_A_SHARD:
            return out
        return pytree.tree_map_only(Tensor, lambda master: cls(master, first.how), out)

    def cast_into(self, out: Tensor, mesh: DeviceMesh) -> Tensor:
        """Cast the shard to bytes `out` of as many elements; return the inverse scale, of each row or of the weight."""
        if self.how.by_row:
            return cast_into(self.master, None, out)
        cast_into(self.master, self._known_scale(mesh), out)
        return cast("Tensor", self.scale_inv)

    def _known_scale(self, mesh: DeviceMesh) -> Tensor:
        if self.scale is None:
            agree_on_scales([self], mesh)
        return cast("Tensor", self.scale)


def local_data(parameter: Tensor) -> Tensor:
    """Return the plain tensor that holds this rank's part of a parameter or gradient, sharing its memory."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return (local.master if isinstance(local, WeightShard) else local).detach()


def as_laid_out(local: Tensor, parameter: nn.Parameter) -> Tensor:
    """View a local shard as a DTensor laid out as `parameter`; return it unchanged if `parameter` is no DTensor."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


@torch.no_grad()
def agree_on_scales(shards: list[WeightShard], mesh: DeviceMesh) -> None:
    """Compute a single scale for each weight, with one all-reduce for all weights, or two with `Casting.over`.

    Args:
        shards: this rank's shards of different weights, with the same `Casting`.
        mesh: the mesh of FSDP; its last axis shards weights.
    """
    amax = torch.stack(torch._foreach_norm([shard.master for shard in shards], ord=float("inf")))
    dist.all_reduce(amax, dist.ReduceOp.MAX, group=mesh.get_group(mesh.ndim - 1))
    how = shards[0].how
    if how.over is not None:
        amax = all_reduce(amax, "max", how.over)
    scales, scale_invs = scale_of(amax, how.dtype, how.pow2)
    scale_invs = scale_invs[:, None].repeat(1, 4)[:, 0]  # cuBLAS needs scales aligned to 16 bytes
    for shard, scale, scale_inv in zip(shards, scales.unbind(), scale_invs.unbind(), strict=True):
        shard.scale, shard.scale_inv = scale, scale_inv
