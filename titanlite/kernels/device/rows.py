"""Device code of `titanlite.kernels.rows`. A thread block takes one part of a row, which it finds in a table."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titanlite.kernels.device.launch import cdiv
from titanlite.kernels.row_table import RowTable, TensorTable

BLOCK = 2048
"""Most elements of a row that one thread block takes."""
WARPS = 4


@triton.jit
def _numbers(table, ALIGNED: tl.constexpr):
    """Load `table`'s entry of this block's row. If ALIGNED, arithmetic shows the compiler a multiple of 8."""
    number = tl.load(table + tl.program_id(0))
    if ALIGNED:
        number = number // 8 * 8
    return number


@triton.jit
def _tensor_start(addresses, owners, like, ALIGNED: tl.constexpr):
    """Return a pointer to the tensor that has this block's row. like: any tensor of the same dtype."""
    start = tl.load(addresses + tl.load(owners + tl.program_id(0))).to(tl.pointer_type(like.dtype.element_ty))
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    return start


@triton.jit
def _move_rows(tensor, flat, ats, widths, places, OUT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Copy one part of a row from `tensor` to `flat` if OUT, otherwise back. ats, places: first element of each row in
    `tensor` and in `flat`; widths: elements of each row."""
    along = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = along < _numbers(widths, ALIGNED)
    at, place = _numbers(ats, ALIGNED) + along, _numbers(places, ALIGNED) + along
    if OUT:
        tl.store(flat + place, tl.load(tensor + at, mask=inside), mask=inside)
    else:
        tl.store(tensor + at, tl.load(flat + place, mask=inside), mask=inside)


@triton.jit
def _momentum_rows(
    gradients, momenta, g_like, m_like, flat, owners, ats, widths, places, divisor, skip, momentum,
    NESTEROV: tl.constexpr, DECAYS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update the momentum of one part of a row, and store the row's update in `flat` if it has a place there.
    gradients, momenta: [tensors] int64, addresses."""
    along = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = along < _numbers(widths, ALIGNED)
    at = _numbers(ats, ALIGNED) + along
    of_g, of_m = (
        _tensor_start(gradients, owners, g_like, ALIGNED) + at,
        _tensor_start(momenta, owners, m_like, ALIGNED) + at,
    )
    g = tl.load(of_g, mask=inside, other=0.0) / tl.load(divisor)
    m = tl.load(of_m, mask=inside, other=0.0).to(tl.float32)
    m += (1 - momentum) * (g - m if DECAYS else g)
    u = m
    if NESTEROV:
        u = g + momentum * (m - g)
    if tl.load(places + tl.program_id(0)) >= 0:
        place = _numbers(places, ALIGNED) + along
        tl.store(flat + place, u.to(flat.dtype.element_ty), mask=inside)
    if tl.load(skip) == 0:
        tl.store(of_m, m.to(m_like.dtype.element_ty), mask=inside)


@triton.jit
def _update_rows(
    parameters, momenta, p_like, m_like, flat, owners, ats, widths, places, scales, decays, lr, decay_factor, momentum,
    skip, squares, DECAYS: tl.constexpr, MEASURE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update the parameters in one part of a row and, if DECAYS, momenta where `flat` is not 0. parameters, momenta:
    [tensors] int64, addresses; squares, if MEASURE: [2, rows, parts], sums of squares of the parameters before the
    update and of their changes."""
    is_applied = tl.load(skip) == 0
    if is_applied | MEASURE:  # parameters are measured in a skipped step, too
        along = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = along < _numbers(widths, ALIGNED)
        at = _numbers(ats, ALIGNED) + along
        of_p = _tensor_start(parameters, owners, p_like, ALIGNED) + at
        u = tl.load(flat + _numbers(places, ALIGNED) + along, mask=inside, other=0.0).to(tl.float32)
        scale, decay = tl.load(scales + tl.program_id(0)), tl.load(decays + tl.program_id(0))
        before = tl.load(of_p, mask=inside, other=0.0)
        p = before * (1 - lr * decay_factor * decay.to(tl.float32)) - lr * scale.to(tl.float32) * u
        if MEASURE:
            change = tl.where(is_applied, p - before, 0.0)
            place = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
            tl.store(squares + place, tl.sum(before * before))
            tl.store(squares + tl.num_programs(0) * tl.num_programs(1) + place, tl.sum(change * change))
        if is_applied:
            tl.store(of_p, p, mask=inside)
            if DECAYS:
                of_m = _tensor_start(momenta, owners, m_like, ALIGNED) + at
                m = tl.load(of_m, mask=inside, other=0.0).to(tl.float32)
                tl.store(of_m, tl.where(u != 0, momentum * m, m).to(m_like.dtype.element_ty), mask=inside)


def _grid(rows: RowTable) -> tuple[tuple[int, int], int]:
    block = min(BLOCK, triton.next_power_of_2(rows.widest))
    return (len(rows), cdiv(rows.widest, block)), block


def launch_move(rows: RowTable, tensor: Tensor, flat: Tensor, out: bool) -> None:
    if len(rows):
        grid, block = _grid(rows)
        tables = rows.at, rows.columns, rows.flat
        _move_rows[grid](tensor, flat, *tables, out, rows.aligned, block, num_warps=WARPS)  # type: ignore[call-arg]


def launch_momentum(
    rows: RowTable,
    gradients: TensorTable,
    momenta: TensorTable,
    flat: Tensor,
    divisor: Tensor,
    skip: Tensor,
    momentum: float,
    nesterov: bool,
    decays: bool,
) -> None:
    if len(rows):
        grid, block = _grid(rows)
        aligned = rows.aligned and gradients.aligned and momenta.aligned
        like = gradients.tensors[0], momenta.tensors[0]
        tables = rows.tensor, rows.at, rows.columns, rows.flat
        _momentum_rows[grid](
            gradients.addresses, momenta.addresses, *like, flat, *tables, divisor, skip, momentum, nesterov,
            decays, aligned, block, num_warps=WARPS,  # type: ignore[call-arg]
        )  # fmt: skip


def launch_update(
    rows: RowTable,
    parameters: TensorTable,
    flat: Tensor,
    scales: Tensor,
    decays: Tensor,
    lr: float,
    skip: Tensor,
    measure: bool,
    decay_factor: float,
    momenta: TensorTable | None = None,
    momentum: float = 0.0,
) -> Tensor | None:
    if not len(rows):
        return flat.new_empty(2, 0, dtype=torch.float32) if measure else None
    grid, block = _grid(rows)
    kept = momenta or parameters
    addresses, like = (parameters.addresses, kept.addresses), (parameters.tensors[0], kept.tensors[0])
    aligned = rows.aligned and parameters.aligned and kept.aligned
    tables = rows.tensor, rows.at, rows.columns, rows.flat, scales, decays
    squares = torch.empty(2, *grid, device=flat.device) if measure else skip
    _update_rows[grid](
        *addresses, *like, flat, *tables, lr, decay_factor, momentum, skip, squares, momenta is not None, measure,
        aligned, block, num_warps=WARPS,  # type: ignore[call-arg]
    )  # fmt: skip
    return squares.sum(2) if measure else None
