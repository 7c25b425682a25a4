"""The exchange of tokens and of experts' results among ranks that hold different experts of a layer.

Each of P ranks owns M tokens and E/P experts. The experts of a token, such as 8 of 128, are on nearly all ranks if
these are few, so every token is sent to every rank: the traffic is near the minimum, and independent of the routing.
Slot m·K + k is token m at its k-th expert. The result of each slot is sent back by the rank of its expert. Only the
token's owner adds the results, in the order of slots as `combine` does, so sums have the same bits for any P.

    gather_from_ranks                        all-gather of tokens
    combine_at_owners, gradients_at_owners   send rows to the owners of their tokens, which add them up

On GPUs of one host with peer access, copy engines gather, and a kernel stores each row in its owner's memory. Elsewhere
NCCL's collectives do both, and a row is sent back for every slot of every rank.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from titanlite.device import Device
from titanlite.kernels.collectives import Group, all_gather, exchange, named_group
from titanlite.kernels.lowering import no_shared_memory
from titanlite.kernels.operators import Sent, operator
from titanlite.kernels.products import EXPERTS, too_many_ranks
from titanlite.kernels.routing import as_bytes, combine, gather_rows, rows_of_slots, spread_rows


def no_token_exchange(group: str, device: Device | None = None) -> str | None:
    """Return the reason why the GPUs of a group exchange tokens by NCCL, or None. Collective on the first call.

    For `device` see `no_shared_memory`.
    """
    return too_many_ranks(named_group(group).size) or no_shared_memory(group, EXPERTS, n_slots=1, device=device)


def by_collectives(*arguments: Any) -> str | None:
    """Return why NCCL runs an operator whose last argument is a group, or None: its own kernels do."""
    return no_token_exchange(arguments[-1])


@operator("gather_from_ranks", "token_exchange.launch_gather", unless=by_collectives)
def gather_from_ranks(own: list[Tensor], group: str) -> list[Tensor]:
    """Concatenate the tensors of all ranks along dim 0.

    Args:
        own: [M, …] each, of equal shapes on all ranks.
        group: name of the process group.

    Returns:
        [P·M, …] each.
    """
    return [all_gather(as_bytes(x), named_group(group)).view(x.dtype) for x in own]


def sent_to_owners(device: Device, o: Tensor, slots: Tensor, choices: Tensor, *others: Any) -> list[Sent] | None:
    """Return the bytes stored to peers: slots' rows and, in backward, gradients of weights. None if NCCL sends them.

    The arguments after the device are those of an operator that sends rows `o` to the owners of their tokens.
    """
    of = named_group(others[-1])
    if not device.is_gpu or no_token_exchange(of.name, device):
        return None
    weights = others[0] if len(others[0]) > len(choices) else None  # `dots`, for all ranks' tokens
    each = o.shape[1] * o.itemsize + (0 if weights is None else weights.itemsize)
    return [Sent("all_to_all", choices.numel() * (of.size - 1) // of.size * each)]


@operator("combine_at_owners", "token_exchange.launch_combine_at_owners", sends=sent_to_owners, unless=by_collectives)
def combine_at_owners(o: Tensor, slots: Tensor, choices: Tensor, weights: Tensor, n_experts: int, group: str) -> Tensor:
    """Send rows to the ranks that own their tokens, and add up the rows of each token as `combine` does.

    Args:
        o: [R, D], rows of this rank's experts.
        slots: [R] int32, slot of each row among the tokens of all ranks; -1: none.
        choices: [M, K] int32, the experts of this rank's tokens.
        weights: [M, K] float32, their weights.
        n_experts: experts per rank.
        group: name of the process group.

    Returns:
        [M, D] in `o.dtype`.
    """
    return combine(_to_owners(o, slots, choices, named_group(group)), _arrived(choices, n_experts), weights)


@operator(
    "gradients_at_owners", "token_exchange.launch_gradients_at_owners", sends=sent_to_owners, unless=by_collectives
)
def gradients_at_owners(
    o: Tensor, slots: Tensor, choices: Tensor, dots: Tensor, n_experts: int, group: str
) -> tuple[Tensor, Tensor]:
    """Send gradients of rows to the owners of their tokens, which add them up; also send the gradients of the weights.

    Args:
        o, slots, choices, n_experts, group: see `combine_at_owners`.
        dots: [P·M, K], gradients of the weights of all ranks' slots, valid for slots of this rank's experts.

    Returns:
        The gradients of this rank's tokens, [M, D] in `o.dtype`, and of their weights, [M, K] in `dots.dtype`.
    """
    of, at = named_group(group), _arrived(choices, n_experts)
    return combine(_to_owners(o, slots, choices, of), at, None), exchange(dots.flatten(), of)[at.long()]


def _to_owners(o: Tensor, slots: Tensor, choices: Tensor, group: Group) -> Tensor:
    """Send rows by all-to-all. Return [P·M·K, D]: from each rank M·K rows, valid for slots of that rank's experts."""
    return exchange(gather_rows(o, rows_of_slots(slots, group.size * choices.numel()), 1), group)


def _arrived(choices: Tensor, n_experts: int) -> Tensor:
    """Find each slot's row in the result of `_to_owners`: [M, K] int32."""
    return choices // n_experts * choices.numel() + slots_of(choices)


def slots_of(choices: Tensor) -> Tensor:
    """Return the slots m·K + k of choices, [M, K] int32."""
    return torch.arange(choices.numel(), dtype=torch.int32, device=choices.device).view_as(choices)


class Routing(NamedTuple):
    """The results of `expert_rows`: the rows of choices, the slots of rows, and the first row of each expert; the last
    also in host memory, as of `expert_rows_for_host`, if the host needs it."""

    rows: Tensor
    slots: Tensor
    offsets: Tensor
    on_host: Tensor | None = None


class Dispatch:
    """Moves tokens to the rows of their experts and back. `group`: fields of the `Group` that shares the experts."""

    def __init__(self, *group: str | int) -> None:
        self.group = Group(*group) if group else None  # type: ignore[arg-type]

    @property
    def name(self) -> str:
        """Return the name of the group; "" without one."""
        return "" if self.group is None else self.group.name

    def gathered(self, *own: Tensor) -> tuple[Tensor, ...]:
        """Gather tensors [M, …], which have an entry per token, from all ranks to [P·M, …]."""
        return own if self.group is None else tuple(gather_from_ranks(list(own), self.group.name))

    def rows(self, x: Tensor, routing: Routing, after: Tensor | None = None) -> Tensor:
        """Copy tokens [P·M, D] to their rows [R, D], zeros in rows without a token. For `after` see `spread_rows`."""
        if self.group is None:
            return spread_rows(x, routing.rows, None, len(routing.slots), after)
        return gather_rows(x, routing.slots, routing.rows.shape[1], after)

    def sums(self, o: Tensor, routing: Routing, choices: Tensor, weights: Tensor, count: int) -> Tensor:
        """Return the sums of experts' results, times their weights, for each token of this rank, [M, D].

        `o`, [R, D], has the results of this rank's `count` experts. `choices` and `weights`, [M, K], are the experts of
        this rank's tokens, and their weights.
        """
        if self.group is None:
            return combine(o, routing.rows, weights)
        return combine_at_owners(o, routing.slots, choices, weights, count, self.group.name)

    def gradients(
        self, o: Tensor, routing: Routing, choices: Tensor, dots: Tensor, count: int
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of this rank's tokens, [M, D], and of their weights, [M, K].

        `o` has the gradients of rows, `dots`, [P·M, K], of the weights of this rank's experts. See `sums`.
        """
        if self.group is None:
            return combine(o, routing.rows, None), dots
        return gradients_at_owners(o, routing.slots, choices, dots, count, self.group.name)
