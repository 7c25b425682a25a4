"""Batches: the same samples under every layout, exact resume, and a thread that never gets in the way."""

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support.batches import batches_of_source
from tests.unit.data.test_shards import make_shards
from titanlite.data.batches import Batch, TrainBatches, ValidationBatches
from titanlite.data.corpus import Corpus
from titanlite.data.order import samples_at
from titanlite.errors import DataError
from titanlite.kernels.cross_entropy import IGNORE_INDEX

S, G = 8, 8
CPU = torch.device("cpu")


@pytest.fixture
def shards(tmp_path: Path) -> Corpus:
    """25 samples of 8 tokens and a rest of 4; token i is i, so a sample shows where it is from."""
    return make_shards(tmp_path / "s", np.arange(25 * S + 4), shard_tokens=30)


def train(
    shards: Corpus, local: int = 2, rank: int = 0, size: int = 1, device: torch.device = CPU, **more: int
) -> TrainBatches:
    return batches_of_source(
        shards,
        seq_len=S,
        seed=1,
        global_batch_size=G,
        local_batch_size=local,
        dp_rank=rank,
        dp_size=size,
        device=device,
        **more,
    )


def samples_of(batch: Batch) -> list[int]:
    """The samples in a batch; checks that it is packed and that targets are one ahead."""
    tokens = batch.tokens.reshape(-1, S)
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    assert torch.equal(batch.targets, batch.tokens + 1)
    assert torch.equal(tokens, tokens[:, :1] + torch.arange(S))
    assert not (tokens[:, 0] % S).any()
    return (tokens[:, 0] // S).tolist()


def steps_of(batches: TrainBatches, n: int) -> list[list[list[int]]]:
    steps = [[samples_of(b) for b in batches.next()] for _ in range(n)]
    batches.close()
    return steps


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("local", [1, 2])
def test_a_step_has_the_same_samples_under_every_layout(shards: Corpus, size: int, local: int) -> None:
    ranks = [steps_of(train(shards, local, rank, size), 7) for rank in range(size)]
    for step in range(7):
        micro = G // (local * size)
        seen = [s for m in range(micro) for rank in range(size) for s in ranks[rank][step][m]]
        assert seen == samples_at(np.arange(step * G, (step + 1) * G), 25, seed=1).tolist()


def test_an_error_of_the_thread_is_raised_by_next(shards: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Corpus.read

    def fail(self: Corpus, start: int, count: int) -> np.ndarray:
        raise DataError("gone")

    monkeypatch.setattr(Corpus, "read", fail)
    batches = train(shards)
    with pytest.raises(DataError, match="gone"):
        batches.next()
    monkeypatch.setattr(Corpus, "read", read)
    with pytest.raises(DataError, match="gone"):  # a step is never left out
        batches.next()
    batches.close()


def test_waiting_is_measured(shards: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits, read = [0.0], threading.Event(), Corpus.read

    def clock() -> float:
        waits.set()
        return now[0]

    def wait_and_read(self: Corpus, start: int, count: int) -> np.ndarray:
        waits.wait()
        now[0] = 7.0
        return read(self, start, count)

    monkeypatch.setattr(Corpus, "read", wait_and_read)
    monkeypatch.setattr("titanlite.data.batches.time", SimpleNamespace(monotonic=clock))
    batches = train(shards)
    batches.next()
    assert batches.wait_seconds == 7
    batches.next()
    assert batches.wait_seconds == 0
    batches.close()


def test_no_thread_survives_close(shards: Corpus) -> None:
    before = threading.active_count()
    batches = train(shards)
    assert threading.active_count() == before + 1
    batches.close()
    batches.close()
    assert threading.active_count() == before


def test_the_interpreter_ends_with_batches_open(shards: Corpus) -> None:
    script = f"""
import torch
from pathlib import Path
from tests.support.batches import batches_of_source
from titanlite.data.corpus import Corpus
batches = batches_of_source(Corpus(Path({str(shards.folder)!r})), seq_len=8, seed=1, global_batch_size=8,
                       local_batch_size=2, dp_rank=0, dp_size=1, device=torch.device("cpu"))
batches.next()
raise SystemExit(7)
"""
    root = Path(__file__).parents[3]
    ended = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stderr) == (7, "")


def validate(shards: Corpus, local: int, rank: int, size: int, steps: int = -1) -> ValidationBatches:
    return ValidationBatches(
        shards,
        seq_len=S,
        global_batch_size=G,
        local_batch_size=local,
        steps=steps,
        dp_rank=rank,
        dp_size=size,
        device=CPU,
    )


@pytest.mark.parametrize("steps", [-1, 2, 100])
@pytest.mark.parametrize(("local", "size"), [(1, 1), (4, 1), (1, 2), (4, 2), (3, 3), (7, 4), (2, 26), (64, 2)])
def test_validation_has_every_sample_once(shards: Corpus, local: int, size: int, steps: int) -> None:
    seen: list[int] = []
    ranks = [validate(shards, local, rank, size, steps) for rank in range(size)]
    assert len({len(r) for r in ranks}) == 1
    for rank in ranks:
        batches = list(rank)
        assert len(batches) == len(rank)
        for batch in batches:
            assert batch.tokens.shape == batch.targets.shape == (local * S,)
            counted = batch.targets != IGNORE_INDEX
            seen += samples_of(Batch(batch.tokens[counted], batch.targets[counted], batch.sequences))
            assert not batch.tokens[~counted].any()
    expected = 16 if steps == 2 else 25
    assert sorted(seen) == list(range(expected))


def test_validation_may_be_repeated_and_needs_one_sample(shards: Corpus, tmp_path: Path) -> None:
    batches = validate(shards, 3, 1, 2)
    first, second = list(batches), list(batches)
    assert all(torch.equal(a.targets, b.targets) for a, b in zip(first, second, strict=True))
    with pytest.raises(DataError, match=r"validation.source = .*8 tokens\n.*want: at least 9 tokens"):
        validate(make_shards(tmp_path / "t", np.arange(8)), 1, 0, 1)


@pytest.mark.gpu
def test_batches_reach_the_gpu(shards: Corpus) -> None:
    on_gpu = train(shards, device=torch.device("cuda"))
    on_cpu = train(shards)
    for _ in range(20):
        for a, b in zip(on_gpu.next(), on_cpu.next(), strict=True):
            assert a.tokens.device.type == "cuda"
            assert torch.equal(a.tokens.cpu(), b.tokens)
            assert torch.equal(a.targets.cpu(), b.targets)
    on_gpu.close()
    on_cpu.close()
