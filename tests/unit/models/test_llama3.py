"""Llama 3 against a plain implementation with separate projections, and its published sizes."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from titanlite import recipes
from titanlite.config.read import read_config
from titanlite.config.recipe_schema import ModelDims, RopeScaling
from titanlite.models.find import build_model
from titanlite.models.layers import Linear
from titanlite.models.llama3 import Llama3
from titanlite.parallel.initialise import initialise

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.toml"))
GQA = ModelDims(
    "", n_layers=2, dim=64, n_heads=4, n_kv_heads=2, ffn_dim=256, vocab_size=48, rope_theta=1e4, norm_eps=1e-5
)
VARIANTS = {
    "grouped-query": GQA,
    "multi-head": dataclasses.replace(GQA, n_kv_heads=4),
    "multi-query": dataclasses.replace(GQA, n_kv_heads=1),
    "tied embeddings": dataclasses.replace(GQA, tied_embeddings=True),
    "scaled frequencies": dataclasses.replace(GQA, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 16)),
}


def separate_weights(model: Llama3) -> dict[str, Tensor]:
    """Every weight under the name it would have without fusing, float64."""
    weights = {}
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0]
        if isinstance(module, Linear):
            weights |= {f"{parent}.{part}".lstrip("."): w for part, w in module.split(module.weight).items()}
        elif "weight" in module._parameters:
            weights[name] = module.weight
    return {name: w.detach().double().requires_grad_() for name, w in weights.items()}


def plain_forward(w: dict[str, Tensor], dims: ModelDims, tokens: Tensor, frequencies: Tensor) -> Tensor:
    """Llama 3 on one sequence, as the paper says it: a projection for each part, a softmax for each head."""
    S, E = len(tokens), dims.dim // dims.n_heads
    turns = torch.polar(torch.ones((), dtype=torch.float64), torch.outer(torch.arange(S).double(), frequencies))

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + dims.norm_eps) ** -0.5 * weight

    def rotate(head: Tensor) -> Tensor:
        turned = torch.complex(head[:, : E // 2], head[:, E // 2 :]) * turns
        return torch.cat((turned.real, turned.imag), dim=-1)

    x = w["tok_embeddings"][tokens]
    for layer in range(dims.n_layers):
        p = f"layers.{layer}."
        h = norm(x, w[p + "attention_norm"])
        q, k, v = (h @ w[f"{p}attention.w{part}"].T for part in "qkv")
        heads = []
        for head in range(dims.n_heads):
            shared = head * dims.n_kv_heads // dims.n_heads
            mine, theirs = slice(head * E, (head + 1) * E), slice(shared * E, (shared + 1) * E)
            scores = rotate(q[:, mine]) @ rotate(k[:, theirs]).T / math.sqrt(E)
            future = torch.ones(S, S).triu(1).bool()
            heads.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v[:, theirs])
        x = x + torch.cat(heads, dim=-1) @ w[p + "attention.wo"].T
        h = norm(x, w[p + "ffn_norm"])
        gate, up = h @ w[p + "feed_forward.w1"].T, h @ w[p + "feed_forward.w3"].T
        x = x + (gate * gate.sigmoid() * up) @ w[p + "feed_forward.w2"].T
    return norm(x, w["norm"]) @ w["output"].T


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_a_plain_implementation(variant):
    dims, S = VARIANTS[variant], 24
    model = Llama3(dims, S)
    model.fill_buffers()
    initialise(model, seed=0)
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():  # far from initial values, where softmax is flat and norms are one
            parameter.add_(torch.randn(parameter.shape, generator=rng), alpha=0.1)
    weights = separate_weights(model)
    # Not from the model: its own test holds the table against the definition, this one the use of it.
    frequencies = dims.rope_theta ** -(torch.arange(0, 16, 2).double() / 16)
    if dims.rope_scaling is not None:
        frequencies = torch.atan2(model.sin[1], model.cos[1]).double()  # below one turn: the angle is the frequency
        assert frequencies[-1] < 0.2 * dims.rope_theta ** -(14 / 16)

    tokens = torch.randint(dims.vocab_size, (2 * S,), generator=rng)  # two sequences, packed
    truth = torch.cat([plain_forward(weights, dims, sequence, frequencies) for sequence in tokens.split(S)])
    upstream = torch.randn(truth.shape, generator=rng)
    got = model(tokens)
    got.backward(upstream)
    truth.backward(upstream.double())

    # Float32 through some twenty operations of sums of at most 256 terms: sqrt(20 · 256) · 6e-8 = 4e-6 of the largest.
    assert (got - truth).abs().max() <= 1e-5 * truth.abs().max()
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0]
        if isinstance(module, Linear):
            parts = module.split(module.weight.grad)
            wanted = {part: weights[f"{parent}.{part}".lstrip(".")].grad for part in parts}
        elif "weight" in module._parameters:
            parts, wanted = {name: module.weight.grad}, {name: weights[name].grad}
        else:
            continue
        if dims.tied_embeddings and name in ("tok_embeddings", "output"):
            wanted = dict.fromkeys(parts, weights["tok_embeddings"].grad + weights["output"].grad)
        for part, gradient in parts.items():
            assert (gradient - wanted[part]).abs().max() <= 2e-5 * wanted[part].abs().max(), f"{name} {part}"


@pytest.mark.parametrize(("n", "groups", "parts"), [(48, 2, {"wq": 16, "wk": 4, "wv": 4}), (32, 4, {"w1": 4, "w3": 4})])
def test_fuse_and_split_are_inverse(n, groups, parts):
    layer = Linear(3, parts, groups=groups, std=0.02)
    assert layer.weight.shape == (n, 3)
    fused = torch.arange(n * 3.0).reshape(n, 3)
    separate = layer.split(fused)
    assert {name: len(part) for name, part in separate.items()} == {p: groups * rows for p, rows in parts.items()}
    assert torch.equal(layer.fuse(separate), fused)
    # A rank's share of the fused rows is that rank's share of each part.
    half = Linear(3, parts, groups=groups // 2, std=0.02)
    for name, part in half.split(fused[: n // 2]).items():
        assert torch.equal(part, separate[name][: len(part)])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_shipped_config_builds(path):
    config, origin = read_config(path)
    dims = recipes.model_dims(config, origin)
    model = build_model(config.model, dims, config.training.seq_len)
    logits = model(torch.zeros(config.training.seq_len, dtype=torch.int64, device="meta"))
    assert logits.shape == (config.training.seq_len, dims.vocab_size)


@pytest.mark.parametrize("n_layers", [2, 8])
def test_initial_values_are_normal_and_no_two_parts_are_alike(n_layers):
    model = Llama3(dataclasses.replace(GQA, n_layers=n_layers), 8)
    initialise(model, seed=0)
    drawn = separate_weights(model)
    assert sum(name.endswith("norm") for name in drawn) == 2 * n_layers + 1
    for name in [name for name in drawn if name.endswith("norm")]:
        assert (drawn.pop(name) == 1).all()
    for name, weight in drawn.items():
        # What adds to the residual stream is smaller, so that its variance does not grow with depth.
        std = 0.02 / math.sqrt(2 * n_layers) if name.endswith(("wo", "w2")) else 0.02
        n = weight.numel()
        assert abs(weight.mean()) <= 5 * std / math.sqrt(n), name
        assert abs(weight.std() / std - 1) <= 5 / math.sqrt(2 * n), name
    assert len({weight.flatten()[:8].sum().item() for weight in drawn.values()}) == len(drawn)


def test_initial_loss_is_that_of_a_guess():
    dims = recipes.load("model", "llama3-debug")
    model = Llama3(dims, 32)
    model.fill_buffers()
    initialise(model, seed=0)
    tokens = torch.randint(256, (65,), generator=torch.Generator().manual_seed(0))
    loss = torch.nn.functional.cross_entropy(model(tokens[:64]), tokens[1:])
    # Logits have variance dim · std² = 0.1, which adds half of that to ln V.
    assert loss.item() == pytest.approx(math.log(256) + 0.05, abs=0.15)
