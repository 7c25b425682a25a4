"""Muon's operations on rows of many tensors at once: momentum, copies to and from exchanged memory, and the update.

All rows that ranks exchange lie one after the other in one flat tensor. A table holds for each row its offset in the
flat tensor, its own tensor, and its offset in that tensor. On a GPU each call is one kernel for all rows, which reads
and writes each number once (`titanlite/kernels/device/rows.py`).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from titanlite.device import has_memory
from titanlite.kernels.operators import device_code
from titanlite.kernels.row_table import NOWHERE, RowTable, TensorTable

_launch_move = device_code("rows.launch_move")
_launch_momentum = device_code("rows.launch_momentum")
_launch_update = device_code("rows.launch_update")


def _rows_alike(rows: RowTable) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Group rows by tensor and width. Yield the tensor's index, the m rows' indices, and their elements' indices.

    The latter are [m, columns] each, in the tensor and in the flat tensor.
    """
    kinds, of = torch.stack((rows.tensor, rows.columns)).unique(dim=1, return_inverse=True)
    for i, (number, columns) in enumerate(kinds.T.tolist()):
        chosen = (of == i).nonzero().squeeze(1)
        along = torch.arange(columns, device=rows.at.device)
        yield number, chosen, rows.at[chosen, None] + along, rows.flat[chosen, None] + along


def take_rows(rows: RowTable, tensor: Tensor, flat: Tensor) -> None:
    """Gather rows of `tensor` into `flat`, each at the offset that `rows` gives. Both are contiguous, of one dtype."""
    _move(rows, tensor, flat, out=True)


def put_rows(rows: RowTable, tensor: Tensor, flat: Tensor) -> None:
    """Copy rows from `flat` back into `tensor`: the inverse of `take_rows`."""
    _move(rows, tensor, flat, out=False)


def _move(rows: RowTable, tensor: Tensor, flat: Tensor, out: bool) -> None:
    if tensor.is_cuda:
        return _launch_move(rows, tensor, flat, out)
    if not has_memory(flat):
        return None
    for _, _, at, place in _rows_alike(rows):
        if out:
            flat[place] = tensor.view(-1)[at]
        else:
            tensor.view(-1)[at] = flat[place]
    return None


def momentum_rows(
    rows: RowTable,
    gradients: TensorTable,
    momenta: TensorTable,
    flat: Tensor,
    divisor: Tensor,
    skip: Tensor,
    momentum: float,
    nesterov: bool,
    decays: bool = True,
) -> None:
    """Update the momentum of rows, and write u, which will be orthogonalised, for rows that ranks exchange.

        m ← μ m + (1 - μ) g;   u = μ m + (1 - μ) g with Nesterov's momentum, else m
        m ← m + (1 - μ) g      without `decays`

    Args:
        rows: table of the rows.
        gradients: g, tensors of float32 or wider.
        momenta: m, tensors of the gradients' sizes; float32, wider or bfloat16.
        flat: receives u in its own dtype, for rows that have an offset.
        divisor: [] float32; gradients are divided by it.
        skip: [] float32; 1 leaves momenta unchanged.
        momentum: μ.
        nesterov: whether u has Nesterov's momentum.
        decays: whether m decays here; else `update_rows` lets it decay.
    """
    if flat.is_cuda:
        return _launch_momentum(rows, gradients, momenta, flat, divisor, skip, momentum, nesterov, decays)
    if not has_memory(flat):
        return None
    for number, chosen, at, place in _rows_alike(rows):
        g, kept = gradients.tensors[number].view(-1)[at] / divisor, momenta.tensors[number].view(-1)
        old = kept[at].to(g.dtype)
        new = torch.lerp(old, g, 1 - momentum) if decays else old + (1 - momentum) * g
        travels = rows.flat[chosen] != NOWHERE
        flat[place[travels]] = (g.lerp(new, momentum) if nesterov else new)[travels].to(flat.dtype)
        kept[at] = torch.where(skip > 0, kept[at], new.to(kept.dtype))
    return None


def update_rows(
    rows: RowTable,
    parameters: TensorTable,
    flat: Tensor,
    scales: Tensor,
    decays: Tensor,
    lr: float,
    skip: Tensor,
    *,
    measure: bool = False,
    decay_factor: float = 1.0,
    momenta: TensorTable | None = None,
    momentum: float = 0.0,
) -> Tensor | None:
    """Update rows of parameters p with orthogonalised rows u.

        p ← (1 - lr·decay_factor·decay) p - lr·scale·u
        m ← μ m where u is not 0, if there are `momenta`

    Args:
        rows: table of the n rows, each with an offset in `flat`.
        parameters: p, tensors of float32 or wider.
        flat: u.
        scales, decays: [n] float64, one per row.
        lr: learning rate.
        skip: [] float32; 1 leaves parameters unchanged.
        measure: whether to return sums of squares.
        decay_factor: factor of all decays.
        momenta: m, tensors of the parameters' sizes, if they decay here.
        momentum: μ.

    Returns:
        With `measure`: [2, n] float32 or wider, the sum of squares of each row before the update, and of its change.
    """
    if flat.is_cuda:
        return _launch_update(
            rows, parameters, flat, scales, decays, lr, skip, measure, decay_factor, momenta, momentum
        )
    squares = parameters.tensors[0].new_empty(2, len(rows)) if measure else None
    if not has_memory(flat):
        return squares
    for number, chosen, at, place in _rows_alike(rows):
        whole = parameters.tensors[number].view(-1)
        old, scale, decay = whole[at], scales[chosen, None].to(whole.dtype), decays[chosen, None].to(whole.dtype)
        new = torch.where(skip > 0, old, old * (1 - lr * decay_factor * decay) - lr * scale * flat[place].to(old.dtype))
        whole[at] = new
        if momenta is not None:
            kept = momenta.tensors[number].view(-1)
            kept[at] = torch.where((flat[place] != 0) & (skip == 0), momentum * kept[at], kept[at])
        if squares is not None:
            squares[:, chosen] = torch.stack((old, new - old)).square().sum(2)
    return squares
