"""Which experts of a rank are in which window of rows."""

import random
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.compile_only import compiling, fake_channel
from tests.support.ranks import world_group
from titanlite import recipes
from titanlite.float8.experts import _Float8Experts
from titanlite.kernels import expert_windows, routing
from titanlite.kernels.expert_windows import Window, first_window, in_windows, window_rows, windows
from titanlite.kernels.experts import PLAIN, _Experts
from titanlite.kernels.token_exchange import Dispatch
from titanlite.parallel.fake_world import fake_world


@pytest.mark.parametrize(
    ("counts", "n", "wanted"),
    [
        ([3, 2, 5, 2, 1], 7, [(0, 2), (2, 4), (4, 5)]),
        ([7, 7, 7], 7, [(0, 1), (1, 2), (2, 3)]),
        ([0, 0, 7, 0, 7, 0], 7, [(0, 4), (4, 6)]),
        ([1, 1, 1], 7, [(0, 3)]),
        ([0, 0], 7, [(0, 2)]),
    ],
)
def test_experts_fill_windows_in_order(counts: list[int], n: int, wanted: list[tuple[int, int]]) -> None:
    ends = [0, *accumulate(counts)]
    assert [*windows(torch.tensor(ends, dtype=torch.int32), n)] == [
        Window(first, last, ends[first], ends[last]) for first, last in wanted
    ]


@pytest.mark.parametrize(
    ("ranks", "tokens", "top_k", "n_experts", "rows"),
    [
        (8, 8 * 1024, 8, 16, 12 * 1024),  # 1.5 times the mean of 8,192
        (2, 2 * 1024, 8, 64, 12 * 1024),
        (8, 8 * 1024, 2, 1, 8 * 1024),  # an expert may have all tokens, and no rank more than that
        (4, 4 * 1024, 2, 2, 4 * 1024),
        (1, 1024, 8, 128, 8 * 1024),  # all
    ],
)
def test_a_window_has_room_for_half_more_than_the_mean_and_for_any_expert(
    ranks: int, tokens: int, top_k: int, n_experts: int, rows: int
) -> None:
    assert window_rows(ranks, tokens, top_k, n_experts) == rows


def test_windows_have_each_row_once_and_the_first_is_found_without_waiting() -> None:
    draw = random.Random(0)
    for _ in range(200):
        ranks, K = draw.choice([2, 4, 8]), draw.randint(1, 4)
        E, tokens = ranks * draw.randint(K, 5), ranks * draw.randint(1, 12)
        scores = torch.rand(tokens, E, generator=torch.Generator().manual_seed(draw.randrange(10**6)))
        scores[:, : draw.randint(0, E)] += draw.choice([0, 1])
        rank, count = draw.randrange(ranks), E // ranks
        to = Dispatch("g", ranks, rank)
        routing = in_windows(scores.topk(K, dim=1).indices.int(), to, count)
        first, slots = first_window(routing, to, count), list[int]()
        found = [*windows(routing.offsets, len(first.slots))]
        assert len(found) == 1 or routing.on_host is not None
        assert routing.on_host is None or torch.equal(routing.on_host, routing.offsets)
        for window in found:
            own, ends = window.of(routing.slots, routing.offsets, len(first.slots))
            before, of_window, after = ends.diff().tensor_split((window.first, window.last))
            assert torch.equal(of_window, routing.offsets.diff()[window.first : window.last])
            assert before.sum() == after.sum() == 0
            slots += own[: ends[-1]].tolist()
            assert (own[ends[-1] :] == -1).all()
            if window.begin == 0:
                assert torch.equal(own, first.slots)
                assert torch.equal(ends, first.offsets)
        assert slots == routing.slots[: routing.offsets[-1]].tolist()


BF16 = torch.bfloat16


class Peak(TorchDispatchMode):
    """The most bytes that are alive at once of what operations make, without the storages of the tensors `given`."""

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()
        self.bytes, self._made = 0, list[tuple[StorageWeakRef, int]]()
        self._apart = {t.untyped_storage()._cdata for t in given}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = self._apart | {ref.cdata for ref, _ in self._made}
        storages = [t.untyped_storage() for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
        self._made += [(StorageWeakRef(s), s.nbytes()) for s in storages if s._cdata not in known]
        self._made = [(ref, size) for ref, size in self._made if not ref.expired()]
        self.bytes = max(self.bytes, sum(size for _, size in self._made))
        return out


def test_of_a_later_window_backward_holds_the_results_alone_while_it_computes_the_next() -> None:
    """The forecast of the worst routing counts the gradients of experts' weights once, beside those of all windows."""
    T, K, G, D, F, W = 8, 4, 4, 64, 128, 8
    _, slots, offsets = routing.expert_rows(torch.arange(K, dtype=torch.int32).repeat(T, 1), 0, G)
    drawn = torch.ones(T, D), torch.ones(T, D), torch.ones(G, 2 * F, D), torch.ones(G, D, F)
    weights, (_, *later) = torch.ones(T, K), windows(offsets, W)
    stored, peaks = [torch.zeros_like(w) for w in drawn[2:]], list[int]()
    for n in (1, 3):
        with Peak([slots, offsets, weights, *drawn, *stored]) as peak:
            of = slots, offsets, weights, [*drawn], *stored, PLAIN
            parts = [*expert_windows._later_gradients(later[:n], W, *of)]
        peaks.append(peak.bytes)
    kept = sum(t.nbytes for t in (*parts[0], offsets))
    assert peaks[1] <= peaks[0] + 2 * kept


class _Noted:
    """Computes no window, but says that it should."""

    def __init__(self) -> None:
        self.done = list[str]()

    def results(self, given: list[Tensor], top_k: int, slots: Tensor, offsets: Tensor) -> Tensor:
        self.done.append("a window")
        return given[0].new_empty(len(slots), given[0].shape[1])

    def gradients(self, given: list[Tensor], weights: Tensor, slots: Tensor, offsets: Tensor, *asked: bool) -> Any:
        return expert_windows.RowGradients(self.results(given, 1, slots, offsets), weights, None, None)


def test_the_host_waits_once_for_a_copy_queued_behind_the_routing_and_reads_nothing_else(monkeypatch) -> None:
    """The copy is made when its event is waited for. All tokens choose both experts of this rank: two windows."""
    from titanlite.kernels.device import token_exchange

    P, M, K, D, of_rank = 4, 8, 2, 256, 2
    noted, copies, empty = _Noted(), list[tuple[Tensor, Tensor]](), torch.empty
    done = noted.done

    def rows(*given: Any) -> tuple[Tensor, ...]:
        done.append("routing")
        return routing.expert_rows.definition(*given)

    def copy(to: Tensor, source: Tensor, non_blocking: bool = False) -> None:
        assert non_blocking
        copies.append((to, source))
        done.append("copy")

    def pinned(*shape: Any, pin_memory: bool = False, **how: Any) -> Tensor:
        return empty(*shape, **how).fill_(-1) if pin_memory else empty(*shape, **how)

    class Event:
        def record(self) -> None:
            done.append("event")

        def synchronize(self) -> None:
            done.append("wait")
            for to, source in copies:
                to.copy_(source)

    monkeypatch.setattr(routing.expert_rows, "on_gpus", rows)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "empty", pinned)
    choices = torch.arange(K, dtype=torch.int32).repeat(P * M, 1)
    with monkeypatch.context() as of_copies:
        of_copies.setattr(Tensor, "copy_", copy)
        _, slots, offsets, on_host = routing.expert_rows_for_host.on_gpus(choices, 0, of_rank)
    assert done == ["routing", "copy", "event"]
    assert (on_host == -1).all()

    def noted_of(name: str, read: Any) -> Any:
        def reads(x: Tensor, *given: Any) -> Any:
            if x.data_ptr() != on_host.data_ptr():
                done.append(f"{name} of what a GPU has")
            return read(x, *given)

        return reads

    monkeypatch.setattr(token_exchange, "channel", lambda *use, n_slots: fake_channel(0, P))
    monkeypatch.setattr(token_exchange, "agree", lambda *call: None)
    monkeypatch.setitem(expert_windows.ARITHMETICS, "noted", lambda: noted)
    for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__index__"):
        monkeypatch.setattr(Tensor, name, noted_of(name, getattr(Tensor, name)))
    x, weights, own = torch.empty(P * M, D, dtype=BF16), torch.empty(P * M, K), slots[: P * M].clone()
    where = of_rank, slots, offsets, on_host
    with compiling(P):
        for wanted in (["wait", "a window"], ["a window"]):
            done.clear()
            expert_windows._combine_on_gpus(x, own, choices[:M], weights[:M], *where, [x], "noted", "g")
            assert done == wanted
        done.clear()
        expert_windows._gradients_on_gpus(x, own, choices[:M], weights, *where, weights, [x], None, None, "noted", "g")
        assert done == ["a window"]


class _OnHost(TorchDispatchMode):
    """Collects the operations that take or return tensors in host memory."""

    def __init__(self) -> None:
        super().__init__()
        self.found = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(isinstance(t, Tensor) and t.device.type == "cpu" for t in tree_leaves((args, kwargs, out))):
            self.found.append(func._opname)
        return out


@pytest.mark.parametrize("float8", [False, True])
def test_a_compiler_sees_the_copy_in_host_memory_and_moves_it_nowhere(float8: bool) -> None:
    """Of all tensors the copy alone is on a CPU; the device "meta" stands for a GPU."""
    M, D, F, E, K = 16, 128, 128, 8, 4
    with fake_world(0, 2), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), torch.device("meta"):
        x, weights, choices = torch.empty(M, D, dtype=BF16), torch.empty(M, K), torch.empty(M, K, dtype=torch.int32)
        w13, w2 = torch.empty(E * 2 * F, D, dtype=BF16), torch.empty(E * D, F, dtype=BF16)
        ctx: Any = SimpleNamespace(needs_input_grad=[True] * 5)
        ctx.save_for_backward = lambda *saved: setattr(ctx, "saved_tensors", saved)
        group = world_group()
        of: Any = _Float8Experts if float8 else _Experts
        how = (E, recipes.load("float8", "rowwise")) if float8 else ()
        shares = (w13, w2) if float8 else (w.unflatten(0, (E, -1)) for w in (w13, w2))
        with _OnHost() as on_host:
            y = of.forward(ctx, x, weights, choices, *shares, *how, *group)
            gradients = of.backward(ctx, torch.empty_like(y))
    assert on_host.found == ["expert_rows_for_host", "combine_windows_at_owners", "window_gradients_at_owners"]
    assert [t.device.type for t in (y, *gradients) if t is not None] == ["meta"] * 5
