"""Cross-entropy against float64, whole and with the vocabulary split over ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.support.needs import DEVICES
from tests.support.ranks import run_ranks
from titanlite.kernels import cross_entropy
from titanlite.kernels.collectives import Group
from titanlite.kernels.cross_entropy import IGNORE_INDEX, CrossEntropy

F32 = torch.finfo(torch.float32).eps
M, V = 24, 64


def inputs(dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(M, V, generator=rng)).to(device, dtype)
    targets = torch.randint(V, (M,), generator=rng).to(device)
    targets[::5] = IGNORE_INDEX
    return logits, targets


def truth(
    logits: Tensor, targets: Tensor, scale: float, softcap: float = 0.0, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Loss and gradient in float64."""
    logits = logits.double().requires_grad_()
    capped = softcap * (logits / softcap).tanh() if softcap else logits
    loss = F.cross_entropy(capped, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    squares = capped.logsumexp(1)[targets != IGNORE_INDEX].square().sum()
    ((loss + z_loss * squares) * scale).backward()
    return loss.detach(), logits.grad


def loss_and_gradient(entropy: CrossEntropy, logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    loss = entropy(leaf * 1, targets)  # the loss may overwrite what it is given
    (loss * scale).backward()
    return loss.detach(), leaf.grad


def assert_close(loss: Tensor, grad: Tensor, true_loss: Tensor, true_grad: Tensor, dtype: torch.dtype, scale: float):
    # A sum of M float32 terms of at most 40; the gradient is one rounding to dtype of float32 numbers of at most 1.
    assert (loss.double() - true_loss).abs() <= M * 40 * F32
    bound = torch.finfo(dtype).eps / 2 * true_grad.abs() + 32 * F32 * scale
    assert ((grad.double() - true_grad).abs() <= bound).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matches_float64(dtype, device):
    logits, targets = inputs(dtype, device)
    loss, grad = loss_and_gradient(CrossEntropy(), logits, targets, 0.25)
    assert loss.dtype == torch.float32
    assert grad.dtype == dtype
    assert_close(loss, grad, *truth(logits, targets, 0.25), dtype, 0.25)
    assert not grad[::5].any()


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_split_vocabulary_is_the_whole_one(tp, dtype, tmp_path):
    logits, targets = inputs(dtype)
    true_loss, true_grad = truth(logits, targets, 0.25)

    def body() -> None:
        rank = dist.get_rank()
        group = Group(dist.group.WORLD.group_name, tp, rank)
        loss, grad = loss_and_gradient(CrossEntropy(group), logits.chunk(tp, 1)[rank], targets, 0.25)
        assert_close(loss, grad, true_loss, true_grad.chunk(tp, 1)[rank], dtype, 0.25)
        everyone = [torch.empty_like(loss) for _ in range(tp)]
        dist.all_gather(everyone, loss)
        assert all(torch.equal(loss, other) for other in everyone)

    run_ranks(body, tmp_path, tp)


BOTH = {"softcap": 5.0, "z_loss": 0.1}  # of logits up to 16, so that tanh saturates; far above the usual 1e-4


def squares_of_lse(logits: Tensor, targets: Tensor, softcap: float) -> float:
    capped = softcap * (logits.double() / softcap).tanh() if softcap else logits.double()
    return capped.logsumexp(1)[targets != IGNORE_INDEX].square().sum().item()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys", [{"softcap": 5.0}, {"z_loss": 0.1}, BOTH])
def test_cap_and_z_loss_match_float64(keys, dtype, device, compiled):
    """The loss is the cross-entropy of capped logits, without the z-loss; the gradient is that of both."""
    logits, targets = inputs(dtype, device)
    squares = torch.zeros((), device=device)
    entropy = CrossEntropy(compile=compiled, **keys)
    leaf = logits.clone().requires_grad_()
    loss = entropy(leaf * 1, targets, squares=squares)
    (loss * 0.25).backward()
    assert_close(loss.detach(), leaf.grad, *truth(logits, targets, 0.25, **keys), dtype, 0.25)
    assert not leaf.grad[::5].any()
    expected = squares_of_lse(logits, targets, keys.get("softcap", 0.0))
    assert abs(squares.item() - expected) <= M * 4 * F32 * expected
    if "z_loss" in keys:  # the bound tells them apart
        _, without = truth(logits, targets, 0.25, keys.get("softcap", 0.0))
        assert ((leaf.grad - without).abs() > 0.01).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cap_and_z_loss_of_a_split_vocabulary(dtype, tmp_path):
    logits, targets = inputs(dtype)
    true_loss, true_grad = truth(logits, targets, 0.25, **BOTH)
    expected = squares_of_lse(logits, targets, BOTH["softcap"])

    def body() -> None:
        rank, squares = dist.get_rank(), torch.zeros(())
        entropy = CrossEntropy(Group(dist.group.WORLD.group_name, 2, rank), **BOTH)
        leaf = logits.chunk(2, 1)[rank].clone().requires_grad_()
        loss = entropy(leaf * 1, targets, squares=squares)
        (loss * 0.25).backward()
        assert_close(loss.detach(), leaf.grad, true_loss, true_grad.chunk(2, 1)[rank], dtype, 0.25)
        assert abs(squares.item() - expected) <= M * 4 * F32 * expected

    run_ranks(body, tmp_path, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_at_a_time_are_all_at_once(dtype, monkeypatch):
    logits, targets = inputs(dtype)
    whole = loss_and_gradient(CrossEntropy(**BOTH), logits, targets, 0.25)
    monkeypatch.setattr(cross_entropy, "ROWS", 7)
    for part, all_at_once in zip(loss_and_gradient(CrossEntropy(**BOTH), logits, targets, 0.25), whole, strict=True):
        assert torch.equal(part, all_at_once)


@pytest.mark.parametrize("tokens", [M, 0])
def test_nothing_to_predict(tokens):
    logits, targets = (t[:tokens] for t in inputs(torch.float32))
    loss, grad = loss_and_gradient(CrossEntropy(), logits, torch.full_like(targets, IGNORE_INDEX), 1.0)
    assert loss == 0
    assert not grad.any()


def test_large_logits_do_not_overflow():
    loss, grad = loss_and_gradient(CrossEntropy(), torch.tensor([[3e38, 0.0]]), torch.tensor([0]), 1.0)
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
