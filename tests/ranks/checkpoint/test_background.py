"""Beside training: what a thread that writes must not share with it."""

import threading
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.ranks import run_ranks
from titanlite.checkpoint import store
from titanlite.checkpoint.background import Background
from titanlite.checkpoint.saved_state import SavedState
from titanlite.checkpoint.state import Checkpoints
from titanlite.errors import ConfigError


def test_filters_of_warnings_are_left_alone(tmp_path: Path) -> None:
    def body() -> None:
        filters, save = warnings.filters, store.dcp.save

        def looks(*args: object, **kwargs: object) -> object:
            assert warnings.filters is filters
            return save(*args, **kwargs)  # type: ignore[arg-type]

        store.dcp.save = looks  # type: ignore[assignment]
        checkpoints = Checkpoints(tmp_path / "checkpoints", keep=0)
        tensors = {"a": torch.ones(3)}
        background = Background(checkpoints, tensors)
        background.save(1, tensors, SavedState())
        assert background.wait() == tmp_path / "checkpoints/step-00000001"

    run_ranks(body, tmp_path)


def test_too_little_memory_is_an_error_of_the_start_on_all_ranks(tmp_path: Path) -> None:
    def body() -> None:
        take = torch.empty_like

        def lacks(tensor: Tensor, **options: object) -> Tensor:
            if dist.get_rank() == 1 and tensor.numel() == 1 << 20:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nand more")
            return take(tensor, **options)  # type: ignore[call-overload]

        torch.empty_like = lacks  # type: ignore[assignment]
        with pytest.raises(ConfigError) as error:
            Background(Checkpoints(tmp_path, keep=0), {"a": torch.ones(3), "b": torch.ones(1 << 20)})
        said = str(error.value)
        assert said.startswith("rank 1: 1 problem\n  checkpoint.async_mode = ")
        assert "can't allocate memory)" in said
        assert "MiB of the host" in said

    run_ranks(body, tmp_path)


def test_writing_does_not_wait_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def waits() -> None:
        raise AssertionError("for all that was asked of the GPU")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", waits)
    store.write(tmp_path, {"a": torch.ones(3)})


def test_what_is_written_is_what_there_was_when_it_was_asked_for(tmp_path: Path) -> None:
    def body() -> None:
        write, held = store.write, threading.Event()
        store.write = lambda *args: (held.wait(60), write(*args))[1]  # type: ignore[assignment]
        checkpoints, tensors = Checkpoints(tmp_path / "checkpoints", keep=0), {"a": torch.ones(3)}
        background = Background(checkpoints, tensors)
        background.save(1, tensors, SavedState())
        tensors["a"].zero_()  # as the next step does
        held.set()
        background.wait()
        checkpoints.load(1, tensors)
        assert torch.equal(tensors["a"], torch.ones(3))

    run_ranks(body, tmp_path)
