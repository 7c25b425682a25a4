"""All-gather → matmul in two launches: a barrier of the ranks, then a matmul that pulls the peers' shards.

Common shapes run `specialised_gather`. Others run `general_gather`, whose first launch also publishes the shard.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from titanlite.kernels.device.channel import Channel, channel, multiprocessors
from titanlite.kernels.device.gather_plan import UNIT, GatherPlan
from titanlite.kernels.device.general_gather import _gather_matmul, _publish
from titanlite.kernels.device.launch import Blocks, ready
from titanlite.kernels.device.operands import aligned
from titanlite.kernels.device.protocol import meet
from titanlite.kernels.device.specialised_gather import gather_matmul
from titanlite.kernels.device.specialised_matmul import PART
from titanlite.kernels.device.specialised_operands import (
    blocks,
    consumers,
    operand_blocks,
    peer_blocks,
    rest_blocks,
    stages,
)
from titanlite.kernels.products import GatherCall, contracts_last, gather_scale, products

COPY_BYTES = 128
"""Bytes of each row that the specialised kernel copies at once: the width that TMA swizzles."""


class _GatherMemory(NamedTuple):
    """The tensors of one call, all allocated before the first launch. Biases and scales are contiguous."""

    shard: Tensor
    gathered: Tensor
    other: Tensor
    out: Tensor
    bias: Tensor | None
    scale: Tensor | None
    whole_scale: Tensor | None  # scales of G: the gathered ones, or `scale` itself
    other_scale: Tensor | None
    slot_rows: int  # rows from the start of one slot to the next, as one TMA descriptor spans both


def launch_all_gather_matmul(plan: GatherPlan, call: GatherCall) -> list[Tensor]:
    """Gather and multiply; the first product is fused with the gather. Return G, products, and gathered scales."""
    to, at = channel(call.group), plan.at
    shard, scale, left = aligned(call.shard.contiguous()), call.scale, call.form.startswith("left")
    scale = None if scale is None else scale.contiguous()
    memory = _GatherMemory(
        shard,
        gathered := shard.new_empty(plan.gathered),
        plan.other.placed(call.others[0] if left else call.others[0].flatten(0, -2), transposed=left),
        out := shard.new_empty(plan.out, dtype=plan.out_dtype),
        call.biases[0].contiguous() if call.biases else None,
        scale,
        whole_scale := shard.new_empty(plan.matrix[0], dtype=torch.float32) if plan.moves_scale else scale,
        call.other_scales[0].contiguous() if call.other_scales else None,
        -(-to.begin(plan.slot_bytes) // (at.columns * shard.dtype.itemsize)),
    )
    first, second = (_specialised_launches if plan.specialised else _general_launches)(plan, call, to, memory)
    first()
    second()
    if not at.whole.even:
        gathered = gathered[:, : call.size].contiguous().view(call.whole)
    scales: list[Tensor] = []
    if plan.moves_scale and whole_scale is not None:
        rows = whole_scale.view(at.whole.outer, -1)[:, : plan.size].contiguous()
        scales = [rows.view(*gathered.shape[:-1], 1)]
    if len(call.others) == 1:
        return [gathered, out, *scales]
    return [gathered, out, *products(call, gathered, scales[0] if scales else gather_scale(call), 1), *scales]


Launches = tuple[Callable[[], None], Callable[[], None]]


def _specialised_launches(plan: GatherPlan, call: GatherCall, to: Channel, memory: _GatherMemory) -> Launches:
    """Load the kernels of `specialised_gather`, and return their launches in order."""
    shard, gathered, o, out, bias, scale, whole_scale, o_scale, slot_rows = memory
    at, pick, o_rows, moves_scale = plan.at, plan.pick, plan.other, plan.moves_scale
    launched = (plan, to.number, to.capacity)  # slots with more capacity have other addresses
    slot_bytes = slot_rows * at.columns * shard.dtype.itemsize
    copied = (pick.copy_rows, COPY_BYTES // shard.dtype.itemsize)
    N, BM, BN, BK, by = plan.out[-1], pick.m, pick.n, pick.k, consumers(shard.dtype)
    M, box = at.rows * to.ranks, (pick.m, pick.k)
    of_rows = 0 if scale is None else 2 if moves_scale else 1
    of_columns = 0 if o_scale is None else 2 if o_scale.numel() > 1 else 1
    first = ready(
        meet, launched, 1, (scale, whole_scale),
        lambda: (
            *((scale, whole_scale) if moves_scale else (None, None)), to.slots, to.peer_slots, slot_bytes,
            plan.scale_bytes, at.rows, at.segment,
            to.flags, to.peer_flags, to.epoch, to.deadline, to.failure,
            to.rank, to.ranks, triton.next_power_of_2(to.ranks),
            0 if not moves_scale else 2 if call.scale_of == "row" else 1,
        ),
        num_warps=4 if moves_scale else 1,
    )  # fmt: skip
    second = ready(
        gather_matmul, launched, multiprocessors(to.device), (shard, gathered, o, out, bias, whole_scale, o_scale),
        lambda: (
            blocks(shard, (at.rows, at.K), at.K, box), blocks(gathered, (M, at.K), at.K, box),
            operand_blocks(o, o_rows, BN, BK), blocks(out, (M, N), N, (BM // by, PART.value)),
            bias, whole_scale, o_scale,
            blocks(shard, (at.rows, at.K), at.K, copied), blocks(gathered, (M, at.K), at.K, copied),
            *peer_blocks(to, shard.dtype, at.columns, copied), rest_blocks(o, o_rows, BN, BK),
            to.counters, to.flags, to.peer_flags, to.epoch, to.deadline, to.failure,
            slot_rows, at.rows, at.segment, N, at.K, to.rank,
            to.ranks, min(pick.group, at.rows // BM), bias is not None,
            of_rows, of_columns, call.fast_accum or scale is None, o_rows.k_major,
            BM, BN, BK, stages(pick, shard.dtype.itemsize, 4 * COPY_BYTES * pick.copy_rows), *copied, by,
        ),
        num_warps=8 // by,
    )  # fmt: skip
    return first, second


def _general_launches(plan: GatherPlan, call: GatherCall, to: Channel, memory: _GatherMemory) -> Launches:
    """Load the kernels of `general_gather`, and return their launches in order."""
    shard, gathered, o, out, bias, scale, whole_scale, o_scale, slot_rows = memory
    at, pick, o_rows, moves_scale = plan.at, plan.pick, plan.other, plan.moves_scale
    launched, row_bytes = (plan, to.number, to.capacity), at.columns * shard.dtype.itemsize
    left, last, slot_bytes = call.form.startswith("left"), contracts_last(call.form), slot_rows * row_bytes
    g = gathered.view(plan.matrix)
    g_words = g.view(torch.int64)
    words_of_shard = shard.view(-1).view(torch.int64) if plan.length else to.epoch
    state = (to.counters, to.epoch, to.deadline, to.failure)
    BX, BY = (pick.m, pick.n) if left else (pick.n, pick.m)
    Y = o_rows.shape[0 if o_rows.k_major else 1]
    flat_out, words = out.view(-1, out.shape[-1]), row_bytes // 8
    copy_words = min(1024, triton.next_power_of_2(words))
    by_row = moves_scale or call.scale_of == "row"
    first = ready(
        _publish, launched, plan.publishers, (words_of_shard, g_words, scale, whole_scale),
        lambda: (
            words_of_shard, to.slots, g_words, scale, whole_scale, slot_bytes,
            at.whole.outer, plan.length, plan.slot_stride, plan.slot_stride * to.ranks, plan.scale_bytes,
            shard.numel() // at.columns if moves_scale else 0, 0 if call.scale_of == "shard" else 1,
            plan.own_segment, at.segment, at.segment * to.ranks,
            to.flags, to.peer_flags, *state,
            to.rank, to.ranks, triton.next_power_of_2(to.ranks), moves_scale, plan.block,
        ),
        num_warps=min(8, max(1, plan.block // 64)),
    )  # fmt: skip
    second = ready(
        _gather_matmul, launched, multiprocessors(to.device),
        (g, o, flat_out, out, g_words, whole_scale, scale, o_scale, bias),
        lambda: (
            Blocks(g, g.shape, g.stride(0), (BX, pick.k) if last else (pick.k, BX)),
            Blocks(o, o_rows.shape, o_rows.stride, (BY, pick.k) if o_rows.k_major else (pick.k, BY)),
            Blocks(flat_out, flat_out.shape, flat_out.stride(0), (BX, BY) if left else (BY, BX))
            if plan.tma_store else None,
            out, g_words, whole_scale if by_row else None, scale, o_scale, bias,
            to.peer_slots, slot_bytes, plan.scale_bytes, *state,
            at.rows, words, g.shape[1] * shard.dtype.itemsize // 8, at.segment, at.segment * to.ranks, plan.size,
            at.X, Y, at.K, at.whole.chunk,
            to.rank, to.ranks, at.wait, left, last, o_rows.k_major,
            0 if scale is None else 2 if by_row else 1, 0 if o_scale is None else 2 if o_scale.numel() > 1 else 1,
            moves_scale, bias is not None, plan.tma_store,
            BX, BY, pick.k, pick.group, pick.copiers, UNIT, min(UNIT, 8192 // copy_words), copy_words, call.fast_accum,
        ),
        num_warps=pick.warps, num_stages=pick.stages,
    )  # fmt: skip
    return first, second
