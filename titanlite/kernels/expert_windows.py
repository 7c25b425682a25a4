"""Windows of a rank's rows: memory for 1.5 times the mean number of rows, whatever the router chooses.

With P expert-parallel ranks of M tokens, K experts each, a rank computes M·K rows in the mean and P·M·K at most. The
first window has W rows: the rank's first experts, as many as fit. It is computed by visible operators, and backward
keeps its gate and up projections. Later windows exist only if the rank has more rows. They are computed inside the
operators below, which send rows to the owners of their tokens, one window after the other, by the same kernels for the
same shapes. Of a later window only the results stay until they are sent, and backward computes it again.

    experts   0 0 0 1 1 2 2 2 2 2 3 3 4        W = 7:  windows  0 0 0 1 1 | 2 2 2 2 2 3 3 | 4

An expert's rows are in one window, since W is at least P·M, the most that an expert can have. So results and gradients
have the bits of a single window, except experts' weights in float8, whose gradients have scales of a window's rows.
No product's shape depends on the numbers of rows, but the host reads them to find the windows.
They are copied to it behind the routing, so that it waits for that alone, while products of the first window are queued
on the GPU; in backward they are there. What one window needs is made ready before the wait.

M tokens of this rank, D width, G experts of this rank, F width of an expert, R = P·M·K, T = P·M.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from titanlite.device import has_memory
from titanlite.kernels.operators import device_code, operator
from titanlite.kernels.routing import arrived, expert_rows, expert_rows_for_host
from titanlite.kernels.token_exchange import (
    Dispatch,
    Routing,
    by_collectives,
    combine_at_owners,
    gradients_at_owners,
    sent_to_owners,
)

_combine_parts = device_code("token_exchange.launch_combine_parts")
_gradients_of_parts = device_code("token_exchange.launch_gradients_of_parts")


def most_rows(tokens: int, top_k: int, n_experts: int) -> int:
    """Return the most rows that a rank's experts can have: `tokens` of all ranks, each at most once at an expert."""
    return tokens * min(top_k, n_experts)


def window_rows(ranks: int, tokens: int, top_k: int, n_experts: int) -> int:
    """Return W, the rows of a window: 1.5 times the mean, at least T, and not more than a rank can have.

    Args:
        ranks: P.
        tokens: T, of all ranks.
        top_k: K.
        n_experts: G, of this rank.
    """
    return min(most_rows(tokens, top_k, n_experts), max(-(-3 * tokens * top_k // (2 * ranks)), tokens))


class Window(NamedTuple):
    """The experts of a window, from `first` to before `last`, and their rows, from `begin` to before `end`."""

    first: int
    last: int
    begin: int
    end: int

    def of(self, slots: Tensor, offsets: Tensor, n_rows: int) -> tuple[Tensor, Tensor]:
        """Return the slots, [n_rows], and the offsets, [G + 1], of this window's rows."""
        own = slots.new_full((n_rows,), -1)
        own[: self.end - self.begin] = slots[self.begin : self.end]
        return own, (offsets - self.begin).clamp(0, self.end - self.begin)


def most_windows(rows: int, n_rows: int, n_experts: int) -> int:
    """Return the most windows of W = `n_rows` rows that R = `rows` of G experts take: two neighbours have over W."""
    return min(n_experts, 2 * ((rows - 1) // n_rows) + 1)


def windows(on_host: Tensor, n_rows: int) -> Iterator[Window]:
    """Divide a rank's experts into windows. The first `next` waits until `on_host` has arrived.

    Args:
        on_host: [G + 1] int32 in host memory, the first row of each expert and the end of the last.
        n_rows: W, at least the rows of each expert.
    """
    ends, last = arrived(on_host).tolist(), 0
    while not last or ends[last] < ends[-1]:
        first, last = last, bisect_right(ends, ends[last] + n_rows) - 1
        yield Window(first, last, ends[first], ends[last])


def in_windows(choices: Tensor, to: Dispatch, n_experts: int) -> Routing:
    """Find all rows, and let the host know their offsets if they may take several windows.

    Args:
        choices: [T, K] int32, of all ranks' tokens.
        to: the ranks. A rank with all experts has one window.
        n_experts: G.
    """
    (tokens, top_k), group = choices.shape, to.group
    if group is None:
        return Routing(*expert_rows(choices, 0, n_experts))
    is_one = window_rows(group.size, tokens, top_k, n_experts) == most_rows(tokens, top_k, n_experts)
    return Routing(*(expert_rows if is_one else expert_rows_for_host)(choices, group.rank * n_experts, n_experts))


def first_window(routing: Routing, to: Dispatch, n_experts: int) -> Routing:
    """Return the slots and offsets of the first window, without waiting for the GPU.

    Args:
        routing: the result of `in_windows`, whose other arguments are these.
        to: the ranks.
        n_experts: G.
    """
    if to.group is None:
        return routing
    (rows, slots, offsets, on_host), (tokens, top_k) = routing, routing.rows.shape
    n = window_rows(to.group.size, tokens, top_k, n_experts)
    if on_host is None:
        return Routing(rows, slots[:n], offsets)
    end = offsets.gather(0, (offsets <= n).sum(0, keepdim=True) - 1)
    at = torch.arange(n, device=slots.device, dtype=slots.dtype)
    return Routing(rows, torch.where(at < end, slots[:n], -1), torch.minimum(offsets, end))


class RowGradients(NamedTuple):
    """Gradients of a window: of its tokens' rows, [W, D], of all weights, [T, K], and of the experts' weights."""

    rows: Tensor
    dots: Tensor
    w13: Tensor | None
    w2: Tensor | None


class Arithmetic(Protocol):
    """Computes the rows of a window from tensors `given` of all ranks' tokens, and of the experts' weights."""

    def results(self, given: list[Tensor], top_k: int, slots: Tensor, offsets: Tensor) -> Tensor:
        """Return the experts' results for the rows, [W, D]."""
        ...

    def gradients(
        self, given: list[Tensor], weights: Tensor, slots: Tensor, offsets: Tensor, for_w13: bool, for_w2: bool
    ) -> RowGradients:
        """Return the gradients of the results times the router's weights, [T, K]; for w13 and w2 if asked."""
        ...


ARITHMETICS: dict[str, Callable[..., Arithmetic]] = {}
"""By name what makes an arithmetic. Operators take the name and its arguments, separated by spaces."""


def _window_arithmetic(how: str) -> Arithmetic:
    name, *arguments = how.split()
    return ARITHMETICS[name](*arguments)


def compute_window(
    o: Tensor,
    own: Tensor,
    choices: Tensor,
    beside: Tensor,
    n_experts: int,
    slots: Tensor,
    offsets: Tensor,
    on_host: Tensor,
    *others: Any,
) -> Tensor | RowGradients:
    """Compute a window, on the meta device, to find its memory. The arguments are those of an operator below."""
    if len(others) == 3:
        given, how, _ = others
        return _window_arithmetic(how).results(given, choices.shape[1], own, offsets)
    weights, given, d_w13, d_w2, how, _ = others
    return _window_arithmetic(how).gradients(given, weights, own, offsets, d_w13 is not None, d_w2 is not None)


def _later_windows(o: Tensor, on_host: Tensor) -> Iterator[Window]:
    """Find the windows after the first, of as many rows as `o` has; tensors without values have none."""
    return iter(()) if o.is_meta or not has_memory(o) else islice(windows(on_host, len(o)), 1, None)


def _later_results(
    later: Iterable[Window], n: int, slots: Tensor, offsets: Tensor, given: list[Tensor], how: str, top_k: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Compute the results and find the slots of windows of n rows."""
    by = _window_arithmetic(how)
    for own, ends in [window.of(slots, offsets, n) for window in later]:
        yield by.results(given, top_k, own, ends), own


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


def _combine_on_gpus(
    o: Tensor, own: Tensor, choices: Tensor, weights: Tensor, n_experts: int, slots: Tensor, offsets: Tensor,
    on_host: Tensor, given: list[Tensor], how: str, group: str,
) -> Tensor:  # fmt: skip
    parts = _later_results(_later_windows(o, on_host), len(o), slots, offsets, given, how, choices.shape[1])
    return _combine_parts(o, own, parts, choices, weights, group)


@operator(
    "combine_windows_at_owners",
    _combine_on_gpus,
    sends=sent_to_owners,
    unless=by_collectives,
    on_two_devices=True,
)
def combine_windows_at_owners(
    o: Tensor, own: Tensor, choices: Tensor, weights: Tensor, n_experts: int, slots: Tensor, offsets: Tensor,
    on_host: Tensor, given: list[Tensor], how: str, group: str,
) -> Tensor:  # fmt: skip
    """Compute the windows after the first, and combine the rows of all as `combine_at_owners` does.

    Args:
        o, own: [W, D] and [W] int32, results and slots of the first window.
        choices, weights, n_experts, group: see `combine_at_owners`.
        slots, offsets: [R] and [G + 1] int32, of the rows of all windows.
        on_host: the offsets in host memory, of `expert_rows_for_host`.
        given, how: the operands and the name of the arithmetic (`ARITHMETICS`).

    Returns:
        [M, D] in `o.dtype`.
    """
    later = _later_results(_later_windows(o, on_host), len(o), slots, offsets, given, how, choices.shape[1])
    rows, of_rows = zip((o, own), *later, strict=True)
    return combine_at_owners.definition(_joined(rows), _joined(of_rows), choices, weights, n_experts, group)


def _later_gradients(
    later: Iterable[Window], n: int, slots: Tensor, offsets: Tensor, weights: Tensor, given: list[Tensor],
    d_w13: Tensor | None, d_w2: Tensor | None, how: str,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """Compute the rows' gradients, the slots and the gradients of the router's weights of windows of n rows, and store
    the gradients of their experts' weights."""
    by = _window_arithmetic(how)
    for window, own, ends in [(window, *window.of(slots, offsets, n)) for window in later]:
        rows, dots, *of_weights = by.gradients(given, weights, own, ends, d_w13 is not None, d_w2 is not None)
        for whole, part in zip((d_w13, d_w2), of_weights, strict=True):
            if whole is not None and part is not None:
                whole[window.first : window.last] = part[window.first : window.last]
        part = of_weights = None  # freed before those of the next window are allocated
        yield rows, own, dots


def _gradients_on_gpus(
    o: Tensor, own: Tensor, choices: Tensor, dots: Tensor, n_experts: int, slots: Tensor, offsets: Tensor,
    on_host: Tensor, weights: Tensor, given: list[Tensor], d_w13: Tensor | None, d_w2: Tensor | None,
    how: str, group: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    later = _later_windows(o, on_host)
    parts = _later_gradients(later, len(o), slots, offsets, weights, given, d_w13, d_w2, how)
    return _gradients_of_parts(o, own, dots, parts, choices, group)


@operator(
    "window_gradients_at_owners",
    _gradients_on_gpus,
    "(Tensor o, Tensor own, Tensor choices, Tensor dots, SymInt n_experts, Tensor slots, Tensor offsets, "
    "Tensor on_host, Tensor weights, Tensor[] given, Tensor(a!)? d_w13, Tensor(b!)? d_w2, str how, str group) "
    "-> (Tensor, Tensor)",
    sends=sent_to_owners,
    unless=by_collectives,
    on_two_devices=True,
)
def window_gradients_at_owners(
    o: Tensor, own: Tensor, choices: Tensor, dots: Tensor, n_experts: int, slots: Tensor, offsets: Tensor,
    on_host: Tensor, weights: Tensor, given: list[Tensor], d_w13: Tensor | None, d_w2: Tensor | None,
    how: str, group: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of the windows after the first, and combine all as `gradients_at_owners` does.

    Args:
        o, own: [W, D] and [W] int32, gradients of the rows of the first window, and their slots.
        choices, n_experts, group: see `gradients_at_owners`.
        dots: [T, K], gradients of the weights of the first window's slots, zeros for all others.
        slots, offsets, on_host: see `combine_windows_at_owners`.
        weights: [T, K] float32.
        given, how: the operands of backward, and the name of the arithmetic.
        d_w13, d_w2: gradients of the weights of all experts, [G, 2F, D] and [G, D, F]. Those of later windows' experts
            are stored here.

    Returns:
        See `gradients_at_owners`.
    """
    later = _later_windows(o, on_host)
    parts = _later_gradients(later, len(o), slots, offsets, weights, given, d_w13, d_w2, how)
    rows, of_rows, (dots, *others) = zip((o, own, dots), *parts, strict=True)
    dots = sum(others, dots)
    return gradients_at_owners.definition(_joined(rows), _joined(of_rows), choices, dots, n_experts, group)
