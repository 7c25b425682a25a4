"""The device code of tokens that travel: what is stored with peers goes out in the widest stores, and windows of rows
go by one kernel, between two meetings of the ranks."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from tests.support.compile_only import accesses, compiling, fake_channel
from titanlite.kernels.device import launch
from titanlite.kernels.device.shard_exchange import Exchange

P, M, K, D, E = 4, 8, 2, 256, 8
BF16 = torch.bfloat16


@pytest.fixture
def compiled(monkeypatch):
    from titanlite.kernels.device import token_exchange

    monkeypatch.setattr(token_exchange, "channel", lambda *use, n_slots: fake_channel(1, P))
    monkeypatch.setattr(token_exchange, "agree", lambda *call: None)
    with compiling(P) as kernels:
        o, slots = torch.empty(P * M * K, D, dtype=BF16), torch.zeros(P * M * K, dtype=torch.int32)
        choices, weights = torch.zeros(M, K, dtype=torch.int32), torch.empty(M, K)
        token_exchange.launch_combine_at_owners(o, slots, choices, weights, E // P, "g")
        without = kernels.pop("_send_rows")
        dots = torch.empty(P * M, K)
        token_exchange.launch_gradients_at_owners(o, slots, choices, dots, E // P, "g")
        yield {**kernels, "without dots": without}


def test_windows_are_made_before_the_meetings_and_sent_by_one_kernel(monkeypatch):
    """Between the meetings a rank may neither allocate nor load: both could wait for what its peers have yet to run.
    The first window is ready before later ones are asked for, which the host waits for."""
    from titanlite.kernels.device import token_exchange

    monkeypatch.setattr(token_exchange, "channel", lambda *use, n_slots: fake_channel(1, P))
    monkeypatch.setattr(token_exchange, "agree", lambda *call: None)
    done, loaded = list[str](), list[int]()

    @contextmanager
    def between(self: Exchange) -> Iterator[None]:
        done.append("met")
        loaded.append(len(launch._known))
        yield
        loaded.append(len(launch._known))

    monkeypatch.setattr(Exchange, "between_meetings", between)

    def parts(n: int, dots: bool) -> Iterator[tuple[Tensor, ...]]:
        for _ in range(n):
            done.append("made")
            loaded.append(len(launch._known))
            part = torch.empty(M * K, D, dtype=BF16), torch.zeros(M * K, dtype=torch.int32)
            yield (*part, torch.empty(P * M, K)) if dots else part

    choices, weights = torch.zeros(M, K, dtype=torch.int32), torch.empty(M, K)
    with compiling(P):
        for dots, kernels in ((False, 1), (True, 3)):  # to combine without and with weights are two others
            (first,) = parts(1, dots)
            launched = token_exchange.launch_gradients_of_parts if dots else token_exchange.launch_combine_parts
            done.clear()
            loaded.clear()
            launched(*first, parts(2, dots), choices, *(() if dots else (weights,)), "g")
            assert done == ["made", "made", "met"]
            assert loaded == [kernels] * 4


def test_rows_are_sent_in_stores_of_16_bytes(compiled):
    """256 threads have 8,192 numbers of 32 rows: four stores each, to one of the ranks."""
    for name in ("_send_rows", "without dots"):
        assert accesses(compiled[name])["st", 4] == 4 * P
    assert accesses(compiled["without dots"])["st", 1] == 0
    assert accesses(compiled["_send_rows"])["st", 1] <= 1


def test_arrived_rows_are_read_from_memory(compiled):
    """Peers wrote them, beside a cache that is not kept coherent."""
    assert "ld.global.nc" not in compiled["_combine_rows"].asm["ptx"]
