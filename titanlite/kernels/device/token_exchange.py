"""Device code of `titanlite.kernels.token_exchange`: copy engines gather tokens, a kernel sends rows to their owners.

All calls of a group use the same memory, one after the other, each between two barriers of the ranks.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from titanlite.kernels.device.channel import OPERATORS, channel
from titanlite.kernels.device.expert_rows import NUMBERS, launch_combine, tile_of
from titanlite.kernels.device.launch import cdiv, ready
from titanlite.kernels.device.shard_exchange import Exchange
from titanlite.kernels.lowering import agree
from titanlite.kernels.products import EXPERTS
from titanlite.kernels.token_exchange import slots_of

_ALIGNMENT = 16


def _exchange(group: str, tensors: Sequence[Tensor]) -> Exchange:
    """Check that all ranks call this with tensors of equal shapes and dtypes, and return the group's memory."""
    what = ", ".join(f"{x.dtype} {tuple(x.shape)}" for x in tensors)
    agree(OPERATORS[EXPERTS], group, what, "", None)
    return Exchange(channel(group, EXPERTS, n_slots=1))


@triton.jit
def _send_rows(
    o, slots, dots, peer_slots, R, of_rank, dots_at,
    HAS_DOTS: tl.constexpr, RANKS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store each of the rows `o`, [R, D], with the rank that has its token, at the place of its slot; with HAS_DOTS
    also a number of `dots` for each row. of_rank: slots of each rank."""
    r, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)[None, :]
    slot = tl.load(slots + r, mask=r < R, other=-1)
    owner = tl.maximum(slot, 0) // of_rank
    place = slot - owner * of_rank
    there = slot >= 0
    found = tl.load(o + r.to(tl.int64)[:, None] * D + d, mask=there[:, None] & (d < D), other=0.0)
    to = place.to(tl.int64)[:, None] * D + d
    for peer in tl.static_range(RANKS):  # the compiler would not know the alignment of an address for each row
        rows = tl.multiple_of(tl.load(peer_slots + peer).to(tl.pointer_type(o.dtype.element_ty)), 16)
        tl.store(rows + to, found, mask=(there & (owner == peer))[:, None] & (d < D))
    if HAS_DOTS:  # noqa: SIM102  # HAS_DOTS is a constant
        if tl.program_id(1) == 0:
            dot = tl.load(dots + slot, mask=there, other=0.0)
            address = tl.load(peer_slots + owner) + dots_at
            tl.store(address.to(tl.pointer_type(tl.float32)) + place, dot, mask=there)


def launch_gather(own: list[Tensor], group: str) -> list[Tensor]:
    by, own = _exchange(group, own), [x.contiguous() for x in own]
    to = by.channel
    begins = _begins([to.ranks * x.nbytes for x in own])
    memory = by.buffer(begins[-1], torch.uint8)
    out = [x.new_empty(to.ranks * len(x), *x.shape[1:]) for x in own]
    sent = [x.view(-1).view(torch.uint8) for x in own]
    places = [x.view(-1).view(torch.uint8).view(to.ranks, len(of)) for x, of in zip(out, sent, strict=True)]
    side, stream = _beside(), torch.cuda.current_stream()
    with by.between_meetings():
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            for peer in by.peers():
                for x, begin in zip(sent, begins, strict=False):
                    first = begin + to.rank * len(x)
                    to.peers[peer][first : first + len(x)].copy_(x)
        _copy(sent, [ranks[to.rank] for ranks in places])
        stream.wait_stream(side)
    arrived = [memory[begin : begin + x.numel()].view_as(x) for x, begin in zip(places, begins, strict=False)]
    others = [part for part in (slice(to.rank), slice(to.rank + 1, to.ranks)) if part.start != to.ranks and part.stop]
    _copy(*([x[part] for part in others for x in of] for of in (arrived, places)))
    return out


@cache
def _beside() -> torch.cuda.Stream:
    """Return the stream for copies to peers. They run at the same time as a kernel that copies within the GPU."""
    return torch.cuda.Stream()


def _copy(sources: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    """Copy bytes within the GPU by a kernel, because copy engines reach only a quarter of the GPU's rate."""
    torch._foreach_copy_([_in_words(x) for x in places], [_in_words(x) for x in sources])


def _in_words(x: Tensor) -> Tensor:
    """View bytes as 8-byte numbers, unless their number or address is no multiple of 8."""
    return x if x.shape[-1] % 8 or x.data_ptr() % 8 else x.view(torch.int64)


def _begins(sizes: Sequence[int]) -> list[int]:
    """Return where parts of `sizes` bytes begin, aligned and one after the other, and where the last part ends."""
    begins = [0]
    for n_bytes in sizes:
        begins.append(cdiv(begins[-1] + n_bytes, _ALIGNMENT) * _ALIGNMENT)
    return begins


def launch_combine_at_owners(
    o: Tensor, slots: Tensor, choices: Tensor, weights: Tensor, n_experts: int, group: str
) -> Tensor:
    return launch_combine_parts(o, slots, (), choices, weights, group)


def launch_combine_parts(
    o: Tensor, slots: Tensor, later: Iterable[tuple[Tensor, Tensor]], choices: Tensor, weights: Tensor, group: str
) -> Tensor:
    """Combine the rows `o` and those that `later` makes: pairs of rows and slots with the shapes of `o` and `slots`."""
    arrived, _ = _at_owners(o, slots, None, ((*part, None) for part in later), choices, group)
    return launch_combine(arrived, slots_of(choices), weights)


def launch_gradients_at_owners(
    o: Tensor, slots: Tensor, choices: Tensor, dots: Tensor, n_experts: int, group: str
) -> tuple[Tensor, Tensor]:
    return launch_gradients_of_parts(o, slots, dots, (), choices, group)


def launch_gradients_of_parts(
    o: Tensor,
    slots: Tensor,
    dots: Tensor,
    later: Iterable[tuple[Tensor, Tensor, Tensor]],
    choices: Tensor,
    group: str,
) -> tuple[Tensor, Tensor]:
    """Combine gradients of rows, as `launch_combine_parts`; each part also has the gradients of its slots' weights."""
    arrived, of_weights = _at_owners(o, slots, dots.contiguous(), later, choices, group)
    return launch_combine(arrived, slots_of(choices), None), of_weights.view_as(choices).clone()


def _at_owners(
    o: Tensor,
    slots: Tensor,
    dots: Tensor | None,
    later: Iterable[tuple[Tensor, Tensor, Tensor | None]],
    choices: Tensor,
    group: str,
) -> tuple[Tensor, Tensor]:
    """Send each row, and with `dots` a number for it, to the rank that owns the row's token.

    `later` makes further parts, of equal shapes.

    Return the rows that arrive for this rank's slots, [M·K, D], and their numbers, [M·K] float32, undefined without
    `dots`. Both lie in the group's memory, valid until its next call.
    """
    by, n = _exchange(group, (o, choices)), choices.numel()
    (R, D), to = o.shape, by.channel
    sizes = n * D * o.element_size(), n * 4
    begins = _begins(sizes)
    memory = by.buffer(begins[-1], torch.uint8)
    width, rows = tile_of(D, NUMBERS)

    def prepared(o: Tensor, slots: Tensor, dots: Tensor | None) -> Callable[[], None]:
        tensors = o.contiguous(), slots.contiguous(), slots if dots is None else dots, to.peer_slots
        return ready(
            _send_rows, (R, D, n, o.dtype, dots is None, to.number), (cdiv(R, rows), cdiv(D, width)), tensors,
            lambda: (*tensors, R, n, begins[1], dots is not None, to.ranks, D, width, rows), num_warps=8,
        )  # fmt: skip

    sends = [prepared(o, slots, dots)]
    sends += [prepared(*part) for part in later]  # nothing is allocated between the meetings
    with by.between_meetings():
        for send in sends:
            send()
    of_rows, of_dots = (memory[begin : begin + size] for begin, size in zip(begins, sizes, strict=False))
    return of_rows.view(o.dtype).view(n, D), of_dots.view(torch.float32)
