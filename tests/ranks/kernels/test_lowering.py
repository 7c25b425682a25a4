"""What ranks agree on before they share memory, and what is known of it without a GPU."""

from itertools import count

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.ranks import run_ranks
from titanlite.kernels import all_gather_matmul, lowering, matmul_reduce_scatter  # noqa: F401  # they register operators
from titanlite.kernels.lowering import Lowered, agree, lowered
from titanlite.kernels.products import NOTHING
from titanlite.kernels.token_exchange import no_token_exchange

GATHER = torch.ops.titanlite.all_gather_matmul.default.on_gpus
SCATTER = torch.ops.titanlite.matmul_reduce_scatter.default.on_gpus


def test_ranks_in_two_calls_are_told_before_they_wait_for_each_other(tmp_path):
    def body() -> None:
        group, rank = dist.group.WORLD.group_name, dist.get_rank()  # type: ignore[union-attr]
        for _ in range(2):
            assert agree("all_gather_matmul", group, "8×6", "6×3", None) is None
        for op, what in (("all_gather_matmul", f"{9 + rank}×6"), (f"operator {rank}", "8×6")):
            with pytest.raises(ValueError, match=r"(?s)rank 0  .*: [89]×6\n  rank 1  .*want: equal shapes.*fix: "):
                agree(op, group, what, "6×3", None)

    run_ranks(body, tmp_path)


def test_what_one_rank_cannot_none_does(tmp_path):
    def body() -> None:
        group, rank = dist.group.WORLD.group_name, dist.get_rank()  # type: ignore[union-attr]
        for _ in range(2):  # the second time without asking
            assert agree("op", group, "8×6", f"6×{3 - rank}", None) == "6×3 on rank 0 and 6×2 on rank 1"
            assert agree("op", group, "8×7", "7×3", "no kernel" if rank else None) == "no kernel"
            assert agree("op", group, "8×8", f"8×{rank}", None if rank else NOTHING) == NOTHING
            assert agree("op", group, "8×9", f"9×{rank}", "strides" if rank else NOTHING) == "strides"  # is a miss

    run_ranks(body, tmp_path)


def test_a_graph_captures_no_call_that_is_new(tmp_path, monkeypatch):
    # Each rank would go by what it alone knows, and wait for others that have decided otherwise.
    capturing = iter([True, False, True])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: next(capturing))

    def body() -> None:
        group, own = dist.group.WORLD.group_name, "no kernel" if dist.get_rank() else None  # type: ignore[union-attr]
        with pytest.raises(RuntimeError, match="run it once before the capture"):
            agree("op", group, "8×6", "6×3", own)
        assert agree("op", group, "8×6", "6×3", own) == "no kernel"
        assert agree("op", group, "8×6", "6×3", own) == "no kernel"  # of a graph: nobody is asked again

    run_ranks(body, tmp_path)


def test_a_call_is_compared_once_whatever_is_local_to_a_rank(tmp_path, monkeypatch):
    # Strides, biases and the last shard's length differ between ranks, and one that compares alone would wait forever.
    calls, said = count(), []
    monkeypatch.setattr(lowering._logger, "warning", lambda text, *args: said.append(text % args))
    real = dist.all_gather_object
    monkeypatch.setattr(dist, "all_gather_object", lambda *args, **given: (next(calls), real(*args, **given)))
    monkeypatch.setattr(lowering, "no_peer_access", lambda group: "no GPU")

    def body() -> None:
        group, rank = dist.group.WORLD.group_name, dist.get_rank()  # type: ignore[union-attr]
        shard, w = torch.zeros(4 - rank, 6), torch.zeros(6, 3)
        for other in (w, w, w.t().contiguous().t() if rank else w, torch.zeros(6, 4)):
            for dim in (0, -2) if rank else (0, 0):
                none: list[Tensor] = []
                biases = [torch.zeros(other.shape[1])] * rank
                GATHER(shard, [other], dim, 7, group, "left", biases, None, "tensor", none, None, False)
                bias = torch.zeros(other.shape[1]) if rank else None
                SCATTER([torch.zeros(8, 6)], [other], dim, group, bias, none, none, None, False)
        assert next(calls) == 4  # two operators with w, and two with another shape
        for _ in range(2):  # a weight that does not divide: what stays on a rank need not be equal
            (out,) = GATHER(
                shard, [torch.ones(6, 7 - rank)], 0, 7, group, "left", [], None, "tensor", none, None, False
            )[1:]
            assert out.shape == (7, 7 - rank)
            left, right = torch.ones(8, 7 - rank), torch.ones(7 - rank, 2)
            out = SCATTER([left], [right], 0, group, None, none, none, None, False)
            assert torch.equal(out, torch.full((4, 2), 13.0))
        assert next(calls) == 4 + 1 + 2
        # One rank says of each new call that it is not fused; all of the 4 × 2 + 2 are counted.
        for op in ("all_gather_matmul", "matmul_reduce_scatter"):
            assert sum(n for row, n in lowered.items() if row.op == op) == 10
        assert said == ([] if rank else [f"{row.op} of {row.shapes} is not fused: no GPU" for row in lowered])
        unequal = torch.zeros(6, 7 - 2 * rank)
        with pytest.raises(ValueError, match=r"rank 1  matmul_reduce_scatter: 8×5 scattered"):
            SCATTER([torch.zeros(8, 6)], [unequal], 0, group, None, none, none, None, False)

    run_ranks(body, tmp_path)


@pytest.mark.parametrize(
    ("numbers", "hosts", "capabilities", "shared", "why"),
    [
        ((0, 1), "aa", ((9, 0), (9, 0)), None, None),
        ((0, 1), "ab", ((9, 0), (9, 0)), None, "ranks on several hosts"),
        ((0, 0), "ab", ((9, 0), (9, 0)), None, "ranks on several hosts"),
        ((0, 1), "aa", ((9, 0), (8, 0)), None, "compute capability 8.0, not 9.0, on rank 1"),
        ((0, 0), "aa", ((9, 0), (9, 0)), None, "ranks with one number for their GPUs, 0, 0: let each see all"),
        ((0, 0), "aa", ((9, 0), (9, 0)), "1", None),
    ],
)
def test_who_has_the_memory_of_its_peers(numbers, hosts, capabilities, shared, why, tmp_path, monkeypatch):
    """Torch refuses to share memory among ranks whose GPUs have one number, as where each sees only its own."""
    pytest.importorskip("triton")
    for name in ("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "SLURM_NODEID"):
        monkeypatch.delenv(name, raising=False)
    if shared:
        monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", shared)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: own != other)

    def body() -> None:
        rank = dist.get_rank()
        monkeypatch.setattr(torch.cuda, "current_device", lambda: numbers[rank])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capabilities[rank])
        monkeypatch.setattr(lowering.socket, "gethostname", lambda: hosts[rank])
        said = lowering.no_peer_access(dist.group.WORLD.group_name)  # type: ignore[union-attr]
        assert (said is None) if why is None else said.startswith(why), said

    run_ranks(body, tmp_path)


def test_a_deadline_holds_for_groups_that_come_later(monkeypatch):
    from titanlite.kernels.device import channel

    monkeypatch.setattr(channel, "_DEADLINE_S", 600.0)
    channel.set_deadline(1800)
    assert channel._DEADLINE_S == 1800


def test_a_call_that_only_gathers_is_not_a_miss(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(lowering, "no_peer_access", lambda group: None)
    monkeypatch.delattr(lowering, "_logger")  # and nothing is said

    def body() -> None:
        group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        shard = torch.zeros(4, 6, dtype=torch.bfloat16)
        GATHER(shard, [], 0, 8, group, "left", [], None, "tensor", [], None, False)
        assert list(lowered) == [Lowered("all_gather_matmul", "4×6", "nothing to multiply", expected=True)]

    run_ranks(body, tmp_path)


def test_memory_that_one_rank_may_not_share_is_shared_by_none(tmp_path, monkeypatch):
    def refused(*use: object) -> None:
        if dist.get_rank() == 1:
            raise RuntimeError("CUDA driver error: operation not permitted\nException raised from …")

    def body() -> None:
        monkeypatch.setattr(lowering, "no_peer_access", lambda group: None)
        monkeypatch.setattr("titanlite.kernels.device.channel.channel", refused)
        group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        for _ in range(2):  # the second time without asking
            assert no_token_exchange(group) == "symmetric memory: CUDA driver error: operation not permitted"

    run_ranks(body, tmp_path, 2)


def test_ranks_that_exchange_tokens_of_other_shapes_are_told(tmp_path, monkeypatch):
    from titanlite.kernels.device import token_exchange

    def body() -> None:
        group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        with pytest.raises(ValueError, match=r"rank 1  exchange with experts: torch.float32 \(5, 2\)"):
            token_exchange.launch_gather([torch.zeros(4 + dist.get_rank(), 2)], group)

    run_ranks(body, tmp_path, 2)
