"""FlashAttention-4 attends where it computes rightly on all ranks; what stands in the way is in the receipt."""

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.ranks import run_ranks
from titanlite.errors import StrictError
from titanlite.kernels import flash_attention_4
from titanlite.kernels.attention import _attention, _attention_grad
from titanlite.receipt import Entry, Receipt
from titanlite.training import attention as file

CPU, BF16 = torch.device("cpu"), torch.bfloat16


def package(factor: float = 1.0) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A package that computes the definition on CPUs; gradients times a factor."""

    def pieces(given: dict[str, Any]) -> tuple:
        at = torch.stack((given["cu_seqlens_q"], given["cu_seqlens_k"]))
        return (
            None,
            at,
            torch.tensor(at.shape[1]),
            None,
            None,
            given["max_seqlen_k"],
            given.get("window_size_left", -1) + 1,
        )

    def forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, return_lse: bool, **given: Any) -> tuple:
        assert (causal, return_lse) == (True, True)
        out, sums = _attention.definition(q, k, v, *pieces(given))
        return out, sums.t(), None

    def backward(q, k, v, out, grad, sums, *, causal: bool, deterministic: bool, **given: Any) -> tuple:
        assert (causal, deterministic) == (True, False)
        d_q, d_k, d_v = _attention_grad.definition(grad, q, k, v, out, sums.t(), *pieces(given))
        return d_q, d_k * factor, d_v

    return forward, backward


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A host with the package, and nothing known of it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1")
    monkeypatch.setattr(flash_attention_4, "package", package)
    monkeypatch.setattr(file, "_PASSED", tmp_path / "cache" / "attention.json")
    return monkeypatch


def broken() -> None:
    raise OSError("libcudart.so.13: cannot open shared object file")


def chosen(tmp_path: Path, width: int = 16, dtype: torch.dtype = BF16, world: int = 1, before: Any = None) -> Entry:
    """Choose, in processes of their own; return the entry of one, which all have."""

    def body() -> None:
        if before is not None:
            before()
        entry = file.choose_attention(CPU, dtype, width, 2)
        assert bool(flash_attention_4._served) == bool(entry.count)
        torch.save(entry, tmp_path / f"{dist.get_rank()}.pt")

    run_ranks(body, tmp_path, world)
    first, *others = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(world))
    assert all(other == first for other in others)
    return first


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention_4, "WIDTHS", {9: (16,)})


def test_what_computes_rightly_attends_and_is_not_computed_again(on_hopper: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entry = chosen(tmp_path)
    assert entry.applied == "flash-attn-4 1, nvidia-cutlass-dsl 1, quack-kernels 1"
    on_hopper.setattr(file, "_wrong", None)
    assert chosen(tmp_path).count == 1
    on_hopper.setattr(importlib.metadata, "version", lambda name: "2")
    assert "NoneType" in chosen(tmp_path).missed[0].why


@pytest.mark.parametrize(
    ("of_package", "why"),
    [
        (lambda: package(1.02), "its gradients of keys are wrong by 2.6 eps, heads of 16 and window 0"),
        (lambda: package(float("nan")), "its gradients of keys are wrong by nan eps"),
        (broken, "OSError: libcudart.so.13: cannot open shared object file"),
    ],
    ids=["wrong", "not finite", "not to be loaded"],
)
def test_what_is_installed_and_does_not_work_is_missed_on_all_ranks(
    of_package: Callable[[], Any], why: str, on_hopper: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def before() -> None:
        if dist.get_rank() == 1:
            flash_attention_4.package = of_package

    entry = chosen(tmp_path, world=2, before=before)
    assert entry.missed[0].why.startswith(why)
    receipt, said = Receipt(), list[str]()
    receipt.add(entry)
    with pytest.raises(StrictError, match="without flash-attn-4 torch's kernels attend"):
        receipt.enforce(True, said.append)
    receipt.enforce(False, said.append)
    assert why in said[0]


def absent(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize(
    ("change", "given", "why"),
    [
        (
            (importlib.metadata, "version", absent),
            {},
            "flash-attn-4 is not installed, and documents attend at half",
        ),
        ((torch.cuda, "get_device_capability", lambda device: (8, 0)), {}, "it serves Hopper and Blackwell in 16 bits"),
        ((torch.cuda, "get_device_name", lambda device: "H200"), {"dtype": torch.float32}, "not H200 in torch.float32"),
        ((torch.cuda, "get_device_name", lambda device: "H200"), {"width": 40}, "it serves heads of 16, not of 40"),
    ],
    ids=["not installed", "another GPU", "32 bits", "another width"],
)
def test_what_it_does_not_serve_is_a_reason(
    change: tuple, given: dict[str, Any], why: str, on_hopper: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on_hopper.setattr(*change)
    entry = chosen(tmp_path, **given)
    assert why in entry.summary()
    receipt = Receipt()
    receipt.add(entry)
    receipt.enforce(True, pytest.fail)


def test_the_table_holds_no_width_that_the_package_refuses() -> None:
    interface = pytest.importorskip("flash_attn.cute.interface")
    for major, widths in flash_attention_4.WIDTHS.items():
        for width in widths:
            interface._validate_head_dims(width, width, major, 8)
