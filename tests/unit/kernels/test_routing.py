"""Routing against a loop over tokens and experts in float64."""

from itertools import product

import pytest
import torch
from torch import Tensor

from tests.support.needs import DEVICES, slow
from tests.support.numbers import F32, leaf, normal, some_choices, within
from titanlite.kernels.router_losses import count_choices
from titanlite.kernels.routing import SCORES, combine, expert_rows, gather_rows, route, router_logits

# --- router_logits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("M", [0, 1, 37])
def test_logits(M, dtypes, device):
    x, weight = (normal(n, 96, seed=n).to(device, dtype) for n, dtype in zip((M, 12), dtypes, strict=True))
    given = [leaf(t, device) for t in (x, weight)]
    exact = [t.double().requires_grad_() for t in (x, weight)]
    logits, truth = router_logits(*given), exact[0] @ exact[1].t()
    assert logits.dtype == torch.float32
    sizes = exact[0].abs() @ exact[1].abs().t()  # a sum of D products errs by D roundings of its terms at worst
    assert ((logits - truth).abs() <= 96 * F32 * sizes).all()
    upstream = normal(M, 12, seed=1).to(device)
    wide = torch.promote_types(*dtypes)
    logits.backward(upstream)
    truth.backward(upstream.to(wide).double())
    for own, other, of, wanted in ((upstream, weight, given[0], exact[0]), (upstream.t(), x, given[1], exact[1])):
        assert of.grad.dtype == of.dtype
        sizes = own.abs().double() @ other.abs().double()
        assert within(of.grad, wanted.grad, (torch.finfo(wide).eps / 2 + 96 * F32) * sizes)


# --- route -------------------------------------------------------------------------------------------------------


def loop_route(
    logits: Tensor, bias: Tensor | None, top_k: int, score: str, normalised: bool, scale: float
) -> tuple[Tensor, list[list[int]]]:
    """Token by token; the weights with their gradient."""
    weights, choices = [], []
    for row in logits:
        highest = row.max()
        of_all = [torch.exp(x - highest) for x in row]
        score_of = {
            "softmax": [x / sum(of_all) for x in of_all],
            "softmax_of_chosen": list(row),
            "sigmoid": [1 / (1 + torch.exp(-x)) for x in row],
        }[score]
        by = list(row) if bias is None else [s + b for s, b in zip(score_of, bias, strict=True)]
        chosen = sorted(range(len(row)), key=lambda e: (-float(by[e].detach()), e))[:top_k]
        own = [score_of[e] for e in chosen]
        if score == "softmax_of_chosen":
            exps = [torch.exp(x - highest) for x in own]
            own = [x / sum(exps) for x in exps]
        if normalised:
            own = [x / sum(own) for x in own]
        weights.append(torch.stack(own) * scale)
        choices.append(chosen)
    return torch.stack(weights), choices


WAYS = list(product(SCORES, (False, True)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("score", "normalised"), WAYS)
@pytest.mark.parametrize(
    ("M", "E", "top_k"),
    [(1, 1, 1), (7, 8, 2), (3, 9, 8), *slow((13, 20, 3), (5, 9, 4), (5, 9, 5), (5, 9, 6), (5, 9, 7), (9, 130, 8))],
)
def test_weights_choices_and_gradient(M, E, top_k, score, normalised, with_bias, device):
    logits = 3 * normal(M, E, seed=E)
    bias = 0.3 * normal(E, seed=1) if with_bias else None
    exact = logits.double().requires_grad_()
    truth, wanted = loop_route(exact, bias, top_k, score, normalised, 2.5)
    given = leaf(logits, device)
    on_device = bias if bias is None else bias.to(device)
    weights, choices = route(given, on_device, top_k, score, normalised, 2.5)
    assert weights.dtype == torch.float32
    assert choices.dtype == torch.int32
    assert not choices.requires_grad
    assert choices.tolist() == wanted
    # Exponentials err by (2 + |x|) roundings; sums of E terms of one sign, quotients and products by E + 8.
    slack = (2 + 2 * float(logits.abs().max()) + E + 8) * F32
    assert ((weights.cpu() - truth).abs() <= slack * truth.abs()).all()
    upstream = normal(M, top_k, seed=2)
    weights.backward(upstream.to(device))
    truth.backward(upstream.double())
    # The same of each term; terms are at most a weight by the largest gradient, once for itself and once for the sum.
    sizes = 2.5 * float(upstream.abs().max()) * top_k
    assert ((given.grad.cpu() - exact.grad).abs() <= 2 * slack * sizes).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_ties_go_to_the_lower_expert(with_bias, device):
    logits = torch.tensor([[1.0, 2, 2, 0, 2, -1], [0.0, -0.0, 0, 0, -0.0, 0], [-1.0, -1, 5, 5, 5, 5]], device=device)
    bias = torch.zeros(6, device=device) if with_bias else None
    _, choices = route(logits, bias, 4, "sigmoid", True, 1.0)
    assert choices.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3], [2, 3, 4, 5]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("score", SCORES)
def test_a_bias_shifts_the_choice_and_not_the_weight(score, device):
    logits = normal(5, 8).to(device)
    bias = torch.zeros(8, device=device)
    bias[6] = 100
    weights, choices = route(logits, bias, 1, score, False, 1.0)
    assert (choices == 6).all()
    own = {"softmax": logits.softmax(1), "sigmoid": logits.sigmoid(), "softmax_of_chosen": torch.ones(5, 8)}[score]
    torch.testing.assert_close(weights[:, 0], own[:, 6].to(device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("score", "normalised"), WAYS)
def test_extreme_and_missing_numbers(score, normalised, device):
    """Choices are experts, each once, whatever the logits are, and what is no number stays in sight."""
    logits = torch.tensor([[3e38, -3e38, 0, 1], [-200.0, -200, -300, -300], [0, torch.nan, 1, torch.nan]])
    weights, choices = route(logits.to(device), None, 2, score, normalised, 1.0)
    assert choices.tolist() == [[0, 3], [0, 1], [1, 3]]
    assert weights[:2].isfinite().all()
    assert weights[2].isnan().all()


@pytest.mark.parametrize(
    ("top_k", "score", "message"),
    [(9, "softmax", "top_k = 9; want 1 to .* 8"), (1, "tanh", 'score = "tanh"; want one')],
)
def test_what_does_not_fit_is_refused(top_k, score, message):
    with pytest.raises(ValueError, match=message):
        route(torch.ones(3, 8), None, top_k, score, True, 1.0)


# --- expert_rows -------------------------------------------------------------------------------------------------


def loop_rows(choices: Tensor, first: int, count: int) -> tuple[list[list[int]], list[int], list[int]]:
    M, K = choices.shape
    rows, slots, offsets = [[-1] * K for _ in range(M)], [], [0]
    for expert in range(first, first + count):
        for m in range(M):
            for k in range(K):
                if choices[m, k] == expert:
                    rows[m][k] = len(slots)
                    slots.append(m * K + k)
        offsets.append(len(slots))
    return rows, slots + [-1] * (M * K - len(slots)), offsets


CHOICES = {
    "ragged": (some_choices(37, 8, 2), 8),
    "few tokens, empty experts": (some_choices(3, 20, 4), 20),
    "one token": (some_choices(1, 1, 1), 1),
    "no tokens": (torch.zeros(0, 2, dtype=torch.int32), 4),
    "all on one expert": (torch.full((50, 1), 3, dtype=torch.int32), 8),
    "all on the last": (torch.full((50, 1), 7, dtype=torch.int32), 8),
    "more than one block": (some_choices(333, 5, 5), 5),
    "many experts": (some_choices(20, 300, 8), 300),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("part", [None, (0, 1), (1, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("case", CHOICES)
def test_rows_lie_by_expert_token_and_slot(case, part, device):
    choices, E = CHOICES[case]
    first, count = part or (0, E)
    wanted = loop_rows(choices, first, count)
    for got, want in zip(expert_rows(choices.to(device), first, count), wanted, strict=True):
        assert got.dtype == torch.int32
        assert got.tolist() == want


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CHOICES)
def test_choices_of_counted_tokens_are_counted(case, device):
    choices, E = CHOICES[case]
    is_counted = torch.arange(len(choices)) % 3 > 0
    wanted = torch.bincount(choices[is_counted].flatten(), minlength=E)
    assert count_choices(choices.to(device), is_counted.to(device), E).cpu().equal(wanted)


def test_parts_of_the_experts_are_the_whole_in_parts():
    choices, E = CHOICES["ragged"]
    whole, parts = expert_rows(choices, 0, E), [expert_rows(choices, first, 2) for first in range(0, E, 2)]
    own = [slots[: offsets[-1]] for _, slots, offsets in parts]
    assert torch.equal(torch.cat(own), whole[1])


# --- as operators ------------------------------------------------------------------------------------------------


def layer(x: Tensor, router: Tensor, bias: Tensor, score: str) -> Tensor:
    """A mixture whose experts only scale."""
    weights, choices = route(router_logits(x, router), bias, 2, score, True, 1.0)
    rows, slots, offsets = expert_rows(choices, 0, len(router))
    expert = torch.bucketize(torch.arange(len(slots), device=x.device), offsets[1:], right=True)
    return combine(gather_rows(x, slots, 2) * (1 + expert[:, None]), rows, weights)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("score", ["softmax", *slow("softmax_of_chosen", "sigmoid")])
def test_a_compiled_layer_is_the_plain_one(score, device):
    x, router, bias = normal(24, 32).to(device), normal(6, 32, seed=1).to(device), normal(6, seed=2).to(device)
    compiled = torch.compile(layer, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    found = []
    for run in (layer, compiled):
        given = [leaf(t, device) for t in (x, router)]
        y = run(*given, bias, score)
        y.backward(x)
        found.append((y.detach(), *(t.grad for t in given)))
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(other, plain)
    experts = 1 + route(x @ router.t(), bias, 2, score, True, 1.0)[1]
    wanted = x * (route(x @ router.t(), bias, 2, score, True, 1.0)[0] * experts).sum(1, keepdim=True)
    torch.testing.assert_close(found[0][0], wanted)
