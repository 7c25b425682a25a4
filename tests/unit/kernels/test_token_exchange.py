"""The device code of tokens that travel: what is stored with peers goes out in the widest stores."""

import pytest
import torch

from tests.support.compile_only import accesses, compiling, fake_channel

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


def test_rows_are_sent_in_stores_of_16_bytes(compiled):
    """256 threads have 8,192 numbers of 32 rows: four stores each, to one of the ranks."""
    for name in ("_send_rows", "without dots"):
        assert accesses(compiled[name])["st", 4] == 4 * P
    assert accesses(compiled["without dots"])["st", 1] == 0
    assert accesses(compiled["_send_rows"])["st", 1] <= 1


def test_arrived_rows_are_read_from_memory(compiled):
    """Peers wrote them, beside a cache that is not kept coherent."""
    assert "ld.global.nc" not in compiled["_combine_rows"].asm["ptx"]
