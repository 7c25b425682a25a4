"""A layer of experts computes what a loop over tokens and experts does, forward and backward; its losses and counts."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.unit.kernels.test_experts import one_by_one
from tests.unit.kernels.test_routing import loop_route
from titanlite.activation_checkpoint.apply import apply_activation_checkpoint
from titanlite.config.recipe_schema import Experts, ModelDims
from titanlite.kernels.router_losses import count_choices, count_routing, router_losses, routing_numbers, with_loss
from titanlite.models.experts import MixtureOfExperts
from titanlite.models.moe import Mixtral
from titanlite.parallel.initialise import initialise
from titanlite.recipes import load

M, D, WIDTH = 23, 32, 128
CASES = {
    "softmax": Experts(8, 3, WIDTH),
    "softmax, not normalised": Experts(8, 3, WIDTH, normalised=False, scale=2.0),
    "of chosen": Experts(5, 2, WIDTH, score="softmax_of_chosen"),
    "sigmoid": Experts(8, 4, WIDTH, score="sigmoid", scale=2.5),
    "sigmoid, not normalised": Experts(8, 1, WIDTH, score="sigmoid", normalised=False),
    "shared": Experts(6, 6, WIDTH, shared=2),
    "biased": Experts(8, 2, WIDTH, score="sigmoid", balance_bias=0.001),
}


def layer_of(experts: Experts, dtype: torch.dtype = torch.float64) -> MixtureOfExperts:
    dims = ModelDims("", 2, D, 4, 4, vocab_size=32, norm_eps=1e-5, experts=experts)
    layer = MixtureOfExperts(dims, 0.3, 0.3)
    initialise(layer, 1)
    layer.fill_buffers()
    if layer.bias is not None:
        layer.bias.copy_(torch.linspace(-0.3, 0.3, len(layer.bias)))
    return layer.to(dtype)


def tokens(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(M, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype).requires_grad_()


def by_loop(layer: MixtureOfExperts, x: Tensor) -> Tensor:
    """One token after the other, through plain matrices of each expert."""
    of, E = layer.of, layer.of.n_experts
    logits = x @ layer.router.weight.T
    weights, choices = loop_route(logits, layer.bias, of.top_k, of.score, of.normalised, of.scale)
    w13, w2 = (w.weight.unflatten(0, (E, -1)) for w in (layer.w13, layer.w2))
    y = one_by_one(x, weights, torch.tensor(choices), w13, w2)
    if layer.shared is None:
        return y
    wide = layer.shared.w13.split(layer.shared.w13.weight)
    return y + (F.silu(x @ wide["w1"].T) * (x @ wide["w3"].T)) @ layer.shared.w2.weight.T


@pytest.mark.parametrize("case", CASES)
def test_a_layer_is_a_loop_over_experts(case: str) -> None:
    layer, x = layer_of(CASES[case]), tokens()
    grad = torch.randn(M, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    of_all = [x, *layer.parameters()]
    truth, got = by_loop(layer, x), layer(x)
    assert (got - truth).abs().max() <= 1e-12 * truth.abs().max()
    for wanted, found in zip(
        torch.autograd.grad(truth, of_all, grad), torch.autograd.grad(got, of_all, grad), strict=True
    ):
        assert wanted.abs().max() > 1e-6
        assert (found - wanted).abs().max() <= 1e-12 * wanted.abs().max()


def test_losses_are_those_of_their_definitions() -> None:
    """Switch Transformers, eq. 4, on shares and probabilities that are counted by hand, once for each choice of a
    token, as transformers counts: K where use is equal."""
    logits, choices = torch.zeros(4, 4), torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]], dtype=torch.int32)
    balance, z = router_losses(logits, choices, torch.ones(4, dtype=torch.bool))
    assert balance == 2
    assert z.item() == pytest.approx(torch.tensor(4.0).log().square().item())
    probabilities = torch.tensor([[0.5, 0.25, 0.125, 0.125]] * 4)
    to_one = torch.zeros(4, 1, dtype=torch.int32)
    is_counted = torch.ones(4, dtype=torch.bool)
    assert router_losses(probabilities.log(), to_one, is_counted)[0].item() == pytest.approx(4 * 0.5)
    # Two tokens pad: of the other two one chose expert 0, which has the mean probability of both.
    is_counted[2:], to_one[1] = False, 3
    probabilities[2:] = torch.tensor([0.01, 0.01, 0.01, 0.97])
    balance, z = router_losses(2 * probabilities.log(), to_one, is_counted)
    shares = probabilities[0].square() / probabilities[0].square().sum()
    assert balance.item() == pytest.approx(4 * (0.5 * shares[0] + 0.5 * shares[3]).item())
    assert z.item() == pytest.approx(probabilities[0].square().sum().log().square().item())
    assert router_losses(logits, choices, torch.zeros(4, dtype=torch.bool)).tolist() == [0, 0]


def test_a_loss_adds_its_share_to_the_gradient_and_nothing_to_the_result() -> None:
    x = torch.randn(5, requires_grad=True)
    share, y = torch.tensor(0.25), x.square()
    same = with_loss(y, (3 * x).sum(), share)
    assert same.equal(y)
    share.fill_(9.0)  # as the next micro-batch does
    (grad,) = torch.autograd.grad(same.sum(), x)
    torch.testing.assert_close(grad, 2 * x + 0.25 * 3)


def test_the_layers_gradient_has_its_losses_by_their_share() -> None:
    of = dataclasses.replace(CASES["softmax"], balance_loss=0.5, z_loss=0.25)
    plain, layer, x = layer_of(CASES["softmax"]), layer_of(of), tokens()
    layer.share.fill_(0.125)
    logits = layer.router(x)
    choices = logits.topk(of.top_k).indices.int()
    balance, z = router_losses(logits, choices, torch.ones(M, dtype=torch.bool))
    own = (0.5 * balance + 0.25 * z) / 2  # the model has two layers
    (of_losses,) = torch.autograd.grad(own, layer.router.weight)
    (without,) = torch.autograd.grad(plain(x).sum(), plain.router.weight)
    (found,) = torch.autograd.grad(layer(x).sum(), layer.router.weight)
    torch.testing.assert_close(found, without + 0.125 * of_losses, rtol=1e-12, atol=1e-12)
    assert of_losses.abs().max() > 1e-4
    assert layer.counts.sum() == M * of.top_k
    assert layer.counts.equal(torch.bincount(choices.flatten(), minlength=8))
    torch.testing.assert_close(layer.sums[1], (0.125 * balance).detach())


def test_nothing_is_counted_without_training() -> None:
    layer, x = layer_of(CASES["softmax"]), tokens()
    with torch.no_grad():
        layer(x)
    layer.eval()(x)
    assert not layer.counts.any()
    assert not layer.sums.any()


def test_recomputation_counts_nothing_again_and_changes_no_bit() -> None:
    def trained(save_list: str) -> tuple[list[Tensor], list[Tensor]]:
        dims = ModelDims(
            "", 2, D, 4, 4, vocab_size=32, norm_eps=1e-5, rope_theta=1e4, experts=Experts(8, 3, WIDTH, balance_loss=0.1)
        )
        model = Mixtral(dims, 8)
        initialise(model, 1)
        model.fill_buffers()
        for block in model.layers:
            block.experts.share.fill_(0.5)
        apply_activation_checkpoint(model, load("activation_checkpoint", save_list))
        model(torch.arange(16)).logsumexp(1).sum().backward()
        counted = [block.experts.counts for block in model.layers] + [block.experts.sums for block in model.layers]
        return [p.grad for p in model.parameters() if p.grad is not None], counted

    wanted, counted = trained("none")
    assert [int(counts.sum()) for counts in counted[:2]] == [16 * 3, 16 * 3]
    for save_list in ("full", "attention"):
        found, again = trained(save_list)
        assert all(a.equal(b) for a, b in zip(found, wanted, strict=True))
        assert all(a.equal(b) for a, b in zip(again, counted, strict=True))


def test_a_token_that_could_go_anywhere_has_the_entropy_of_all() -> None:
    """And one that pads has none."""
    counts, sums = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.float64)
    choices, is_counted = torch.tensor([[0], [3], [2]], dtype=torch.int32), torch.tensor([True, True, False])
    losses, share = torch.tensor([1.0, 2.0]), torch.tensor(0.5)
    numbers = routing_numbers(torch.zeros(3, 4), is_counted, losses, share)
    for _ in range(2):
        count_routing(count_choices(choices, is_counted, 4), numbers, counts, sums)
    assert counts.tolist() == [2, 0, 0, 2]
    assert sums.tolist() == pytest.approx([4 * torch.tensor(4.0).log().item(), 1.0, 2.0, 1.0])
