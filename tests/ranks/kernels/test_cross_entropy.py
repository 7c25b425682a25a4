"""Cross-entropy against float64, whole and with the vocabulary split over ranks."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.support.compile_only import accesses, check_resources, compiling
from tests.support.needs import DEVICES
from tests.support.numbers import F32, within
from tests.support.ranks import run_ranks, world_group
from titanlite.kernels import cross_entropy
from titanlite.kernels.cross_entropy import IGNORE_INDEX, CrossEntropy, local_statistics, overwrite_with_gradient
from titanlite.kernels.device.cross_entropy import launch_cross_entropy_gradient, launch_cross_entropy_statistics

M, V = 24, 64


def inputs(dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(M, V, generator=rng)).to(device, dtype)
    targets = torch.randint(V, (M,), generator=rng).to(device)
    targets[::5] = IGNORE_INDEX
    return logits, targets


def truth(logits: Tensor, targets: Tensor, softcap: float = 0.0, z_loss: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, gradient and sum of squares of lse in float64."""
    logits = logits.double().requires_grad_()
    capped = softcap * (logits / softcap).tanh() if softcap else logits
    loss = F.cross_entropy(capped, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    squares = capped.logsumexp(1)[targets != IGNORE_INDEX].square().sum()
    ((loss + z_loss * squares) * 0.25).backward()
    return loss.detach(), logits.grad, squares.detach()  # type: ignore[return-value]


class Ran(NamedTuple):
    loss: Tensor
    grad: Tensor
    squares: Tensor


def loss_and_gradient(entropy: CrossEntropy, logits: Tensor, targets: Tensor, scale: float = 0.25) -> Ran:
    leaf, squares = logits.clone().requires_grad_(), torch.zeros((), device=logits.device)
    loss = entropy(leaf * 1, targets, squares=squares)  # the loss may overwrite what it is given
    (loss * scale).backward()
    return Ran(loss.detach(), leaf.grad, squares)  # type: ignore[arg-type]


def check(got: Ran, wanted: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype) -> None:
    """Against loss, gradient and sum of squares in float64.

    A sum of M float32 terms of at most 40; the gradient is one rounding to dtype of float32 numbers of at most 1.
    """
    assert (got.loss.dtype, got.grad.dtype) == (torch.float32, dtype)
    assert (got.loss - wanted[0]).abs() <= M * 40 * F32
    assert within(got.grad, wanted[1], 32 * F32 * 0.25)
    assert not got.grad[::5].any()
    assert (got.squares - wanted[2]).abs() <= M * 4 * F32 * wanted[2]


BOTH = {"softcap": 5.0, "z_loss": 0.1}  # of logits up to 16, so that tanh saturates; far above the usual 1e-4
KEYS: list[dict[str, float]] = [{}, {"softcap": 5.0}, {"z_loss": 0.1}, BOTH]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys", KEYS, ids=str)
def test_matches_float64(keys, dtype, device):
    """The loss is the cross-entropy of capped logits, without the z-loss; the gradient is that of both."""
    logits, targets = inputs(dtype, device)
    got = loss_and_gradient(CrossEntropy(**keys), logits, targets)
    check(got, truth(logits, targets, **keys), dtype)
    if "z_loss" in keys:  # the bound tells them apart
        _, without, _ = truth(logits, targets, keys.get("softcap", 0.0))
        assert ((got.grad - without).abs() > 0.01).any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("V", [1, 7, 40, 100_001])
@pytest.mark.parametrize("transposed", [False, True])
def test_columns_of_a_part(V: int, transposed: bool, device: str) -> None:
    """Of rows that lie apart, whose targets are in them or before or behind; nothing beside them is written."""
    drawn = torch.randn(5, V + 3, generator=torch.Generator().manual_seed(0)).to(device)
    memory = drawn.T.contiguous().T if transposed else drawn.clone()
    logits, first, softcap, z_loss, scale = memory[:, :V], 10, 3.0, 0.01, torch.tensor(0.5, device=device)
    targets = torch.tensor([first - 1, first, first + V - 1, first + V, IGNORE_INDEX], device=device)
    capped = softcap * (logits.double() / softcap).tanh()
    lse = capped.logsumexp(1)
    got, picked = local_statistics(logits, targets, first, softcap)
    assert within(got, lse, 16 * F32)  # a relative error of the sum, of numbers in [-3, 3]
    assert picked[0] == picked[3] == picked[4] == 0
    assert within(picked[1:3], capped[[1, 2], [0, V - 1]], 2 * F32 * softcap)

    overwrite_with_gradient(logits, targets, first, lse.float(), scale, softcap, z_loss)
    wanted = (capped - lse[:, None]).exp() * (1 + 2 * z_loss * lse[:, None])
    wanted[1, 0] -= 1
    wanted[2, V - 1] -= 1
    wanted *= (1 - (capped / softcap).square()) * 0.5
    wanted[4] = 0
    assert within(logits, wanted, 16 * F32)
    assert torch.equal(memory[:, V:], drawn[:, V:])


@pytest.mark.parametrize("device", DEVICES)
def test_a_head_whose_gradient_reads_its_logits_is_refused(device: str) -> None:
    """The loss has written over them."""
    logits, targets = inputs(torch.float32, device)
    loss = CrossEntropy()(logits.requires_grad_().tanh(), targets)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.gpu
def test_more_logits_than_int32_counts() -> None:
    logits = torch.randn(20_000, 120_000, device="cuda", dtype=torch.bfloat16)
    last, targets = logits[-300:].clone(), torch.arange(20_000, device="cuda")
    (CrossEntropy()(logits.requires_grad_() * 1, targets) * 0.25).backward()
    _, wanted, _ = truth(last, targets[-300:])
    assert within(logits.grad[-300:], wanted, 32 * F32 * 0.25)  # type: ignore[index]


@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_code_for_sm_90_moves_16_bytes_at_once(softcap: float, tmp_path: Path) -> None:
    logits, targets = torch.zeros(4, 128_256, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int64)
    with compiling() as compiled:
        lse, _ = launch_cross_entropy_statistics(logits, targets, 0, softcap)
        launch_cross_entropy_gradient(logits, targets, 0, lse, torch.ones(()), softcap, 0.0)
    check_resources(compiled, tmp_path)
    assert accesses(compiled["_cross_entropy_statistics"])["ld", 4] == 8
    assert accesses(compiled["_cross_entropy_gradient"]) == {("ld", 4): 2, ("st", 4): 2, ("ld", 1): 2}


@pytest.mark.parametrize(("tp", "keys"), [(2, {}), (4, {}), (2, BOTH)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_split_vocabulary_is_the_whole_one(tp, keys, dtype, tmp_path):
    logits, targets = inputs(dtype)
    true_loss, true_grad, squares = truth(logits, targets, **keys)

    def body() -> None:
        rank = dist.get_rank()
        entropy = CrossEntropy(world_group(), **keys)
        got = loss_and_gradient(entropy, logits.chunk(tp, 1)[rank], targets)
        check(got, (true_loss, true_grad.chunk(tp, 1)[rank], squares), dtype)
        everyone = [torch.empty_like(got.loss) for _ in range(tp)]
        dist.all_gather(everyone, got.loss)
        assert all(torch.equal(got.loss, other) for other in everyone)

    run_ranks(body, tmp_path, tp)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_at_a_time_are_all_at_once(dtype, monkeypatch):
    logits, targets = inputs(dtype)
    whole = loss_and_gradient(CrossEntropy(**BOTH), logits, targets)
    monkeypatch.setattr(cross_entropy, "ROWS", 7)
    parts = loss_and_gradient(CrossEntropy(**BOTH), logits, targets)
    assert torch.equal(parts.loss, whole.loss)
    assert torch.equal(parts.grad, whole.grad)


@pytest.mark.parametrize("tokens", [M, 0])
def test_nothing_to_predict(tokens):
    logits, targets = (t[:tokens] for t in inputs(torch.float32))
    loss, grad, _ = loss_and_gradient(CrossEntropy(), logits, torch.full_like(targets, IGNORE_INDEX))
    assert loss == 0
    assert not grad.any()


def test_large_logits_do_not_overflow():
    loss, grad, _ = loss_and_gradient(CrossEntropy(), torch.tensor([[3e38, 0.0]]), torch.tensor([0]))
    assert loss == 0
    assert not grad.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_logits_are_not_hidden(bad):
    assert not CrossEntropy()(torch.tensor([[bad, 0.0]]), torch.tensor([1])).isfinite()


def test_second_backward_is_an_error():
    logits, targets = inputs(torch.float32)
    loss = CrossEntropy()(logits.requires_grad_() * 1, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="overwrote the logits"):
        loss.backward()
