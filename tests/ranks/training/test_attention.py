"""FlashAttention-4 attends where it computes rightly on all ranks; what stands in the way is in the receipt."""

import importlib.metadata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.documents import bounds_of, starts_of
from tests.support.ranks import run_ranks
from titanlite import recipes
from titanlite.config.schema import Config, Training
from titanlite.data.context_split import _rank_runs
from titanlite.device import CPU, Device
from titanlite.errors import StrictError
from titanlite.kernels import attention as kernels
from titanlite.kernels import flash_attention_4
from titanlite.kernels.attention import _attention, _attention_grad
from titanlite.receipt import Entry, Receipt
from titanlite.training import attention as file

BF16 = torch.bfloat16


def package(factor: float = 1.0, of_samples: float = 1.0) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A package that computes the definition on CPUs; gradients of keys times a factor, those of whole samples too."""

    def of(q: Tensor, k: Tensor, given: dict[str, Any]) -> tuple:
        window = given.get("window_size_left", -1) + 1
        if "cu_seqlens_q" not in given:
            return None, None, None, None, q.shape[1], window
        at = torch.stack((given["cu_seqlens_q"], given["cu_seqlens_k"]))
        assert (at[:, 0] == 0).all()
        assert at[:, -1].tolist() == [len(q), len(k)]
        return None, at, torch.tensor([[0, 0, len(k), 0, at.shape[1]]]), None, given["max_seqlen_k"], window

    def packed(*tensors: Tensor) -> list[Tensor]:
        return [x.flatten(0, 1) if x.dim() == 4 else x for x in tensors]

    def forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, return_lse: bool, **given: Any) -> tuple:
        assert (causal, return_lse) == (True, True)
        out, sums = _attention.definition(*packed(q, k, v), *of(q, k, given))
        return out.view_as(q), sums if q.dim() == 4 else sums.t(), None

    def backward(q, k, v, out, grad, sums, *, causal: bool, deterministic: bool, **given: Any) -> tuple:
        assert (causal, deterministic) == (True, False)
        sums = sums if q.dim() == 4 else sums.t()
        grads = _attention_grad.definition(*packed(grad, q, k, v, out), sums, *of(q, k, given))
        d_q, d_k, d_v = (x.view_as(y) for x, y in zip(grads, (q, k, v), strict=True))
        return d_q, d_k * factor * (of_samples if q.dim() == 4 else 1.0), d_v

    return forward, backward


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A host with the package, and nothing known of it."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1")
    monkeypatch.setattr(flash_attention_4, "package", package)
    monkeypatch.setattr(file, "_PASSED", tmp_path / "cache" / "attention.json")
    return monkeypatch


def broken() -> None:
    raise OSError("libcudart.so.13: cannot open shared object file")


def chosen(
    tmp_path: Path,
    width: int = 16,
    dtype: str = "bfloat16",
    major: int = 9,
    world: int = 1,
    before: Any = None,
) -> Entry:
    """Choose, in processes of their own; return the entry of one, which all have."""

    def body() -> None:
        if before is not None:
            before()
        device = Device(CPU.of_tensors, "H200", (major, 0))
        config = Config(training=Training(mixed_precision_param=dtype))
        entry = file.choose_attention(
            device, config, replace(recipes.load("model", "llama3-debug"), head_dim=width, n_heads=4, n_kv_heads=2)
        )
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
        (lambda: package(of_samples=1.02), "its gradients of keys are wrong by 2.6 eps, heads of 16 and window 0"),
        (lambda: package(float("nan")), "its gradients of keys are wrong by nan eps"),
        (broken, "OSError: libcudart.so.13: cannot open shared object file"),
    ],
    ids=["wrong", "wrong of samples", "not finite", "not to be loaded"],
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
        ({"version": absent}, {}, "flash-attn-4 is not installed, and documents and windows"),
        ({}, {"major": 8}, "it serves Hopper and Blackwell in 16 bits"),
        ({}, {"dtype": "float32"}, "not H200 in torch.float32"),
        ({}, {"width": 40}, "it serves heads of 16, not of 40"),
    ],
    ids=["not installed", "another GPU", "32 bits", "another width"],
)
def test_what_it_does_not_serve_is_a_reason(
    change: dict[str, Any], given: dict[str, Any], why: str, on_hopper: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in change.items():
        on_hopper.setattr(importlib.metadata, name, value)
    entry = chosen(tmp_path, **given)
    assert why in entry.summary()
    receipt = Receipt()
    receipt.add(entry)
    receipt.enforce(True, pytest.fail)


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("form", ["samples", "documents", "a rank's runs"])
def test_what_is_given_to_it_is_what_the_definition_has(
    form: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run by run, with keys of documents that several runs are of. In float64, sums of up to 896 terms."""
    monkeypatch.setattr(flash_attention_4, "package", package)
    N, S, starts = 896, 448 if form == "samples" else 896, starts_of([300, 20, 1, 575], 896)
    given, places = (None, None, None, None), torch.arange(N)
    if form == "documents":
        given = starts, *bounds_of(starts), None
    elif form == "a rank's runs":
        places = torch.cat([torch.arange(n * 128, n * 128 + 128) for n in (1, 4, 6)])
        at, runs = map(torch.from_numpy, _rank_runs(starts.numpy(), places.numpy(), window, 3))
        given = starts[places], at, runs, places.int()
        assert (runs[:, 4] > 0).sum() == 3
    random = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(N, n, 8, generator=random, dtype=torch.float64) for n in (4, 2, 2, 4))
    inputs = q[places], k, v
    truth = kernels._attention.definition(*inputs, *given, S, window)
    truths = *truth, *kernels._attention_grad.definition(grad[places], *inputs, *truth, *given, S, window)
    monkeypatch.setattr(kernels, "attention_kernel", lambda q: "flash_attention_4")
    out, sums = kernels._fast(*inputs, *given, S, window)
    found = out, sums, *kernels._fast_grad(grad[places], *inputs, out, sums, *given, S, window)
    for got, wanted in zip(found, truths, strict=True):
        assert got.stride() == wanted.stride()
        assert (got - wanted).abs().max() <= 1e-12


def test_the_table_holds_no_width_that_the_package_refuses() -> None:
    interface = pytest.importorskip("flash_attn.cute.interface")
    for major, widths in flash_attention_4.WIDTHS.items():
        for width in widths:
            interface._validate_head_dims(width, width, major, 8)
