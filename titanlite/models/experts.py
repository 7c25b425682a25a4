"""A mixture of experts: a router sends each token to a few of many small feed-forwards and weights their results.

Published mixtures differ only in data of the recipe (`config/recipe_schema.py`, `Experts`): the score of the router,
the number of experts per token, whether their weights sum to 1, and experts that all tokens share.

The weights of all experts are stacked by rows, so that FSDP splits the matrix evenly over any number of ranks. As in
every projection, each part keeps its name and initialisation.

    w13  [E·2F, D]   for each expert in turn, w1 and w3 in alternating blocks of 128 rows
    w2   [E·D, F]    for each expert in turn, its w2

Axes: M tokens, D model width, E experts, K experts per token, F inner width of one expert.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from titanlite.config.recipe_schema import ModelDims
from titanlite.kernels.collectives import Group
from titanlite.kernels.experts import experts
from titanlite.kernels.router_losses import count_choices, count_routing, router_losses, routing_numbers, with_loss
from titanlite.kernels.routing import route, router_logits
from titanlite.kernels.swiglu import BLOCK
from titanlite.models.layers import Linear, Projection
from titanlite.models.llama3 import FeedForward


class Router(Projection):
    """The projection of tokens to one logit per expert, in float32 under every float8 recipe and compute dtype."""

    def __init__(self, dim: int, n_experts: int, std: float) -> None:
        super().__init__(dim, {"router": n_experts}, std=std)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of all experts, [M, E] float32, for tokens [M, D]."""
        return router_logits(x, self.weight)


class GroupedProjection(Projection):
    """The stacked weights of all experts of a layer. `groups`: number of groups of rows, of all experts together."""

    def __init__(
        self, in_features: int, parts: dict[str, int], *, groups: int, n_experts: int, top_k: int, std: float
    ) -> None:
        super().__init__(in_features, parts, groups=groups, std=std)
        self.n_experts, self.top_k = n_experts, top_k
        self.shape_of_expert = (groups * sum(parts.values()) // n_experts, in_features)

    @property
    def used_by_a_token(self) -> int:
        """Return the number of weights that a token is multiplied by: those of its `top_k` experts."""
        return self.weight.numel() // self.n_experts * self.top_k


class MixtureOfExperts(nn.Module):
    """A router and its experts, as a replacement for a feed-forward.

    Args:
        dims: dimensions of the model, with a table `experts`.
        std, residual_std: standard deviation of the initial weights; of those that write to the residual stream.

    """

    bias: Tensor | None  # [E], saved; added to scores only to choose experts; each step moves it towards equal use
    share: Tensor  # [], this micro-batch's share of the step's targets; the trainer writes it before each micro-batch
    counts: Tensor  # [E] int64, number of counted tokens that chose each expert on this rank since training started
    sums: Tensor  # [4] float64, the sum of `routing_numbers`

    def __init__(self, dims: ModelDims, std: float, residual_std: float) -> None:
        super().__init__()
        self.compute: Callable[..., Tensor] = experts  # a float8 recipe replaces it
        self.group: Group | None = None  # the ranks that share a micro-batch's tokens; None: this rank has all
        self.is_counted: Tensor | None = None  # [M] bool, set by the trainer: tokens in statistics; None: all
        of = dims.experts
        if of is None:
            raise ValueError("MixtureOfExperts: dims.experts is None; want a recipe with a table [experts]")
        self.of, (E, F) = of, (of.n_experts, of.ffn_dim)
        self.router = Router(dims.dim, E, std)
        each = {"n_experts": E, "top_k": of.top_k}
        self.w13 = GroupedProjection(dims.dim, {"w1": BLOCK, "w3": BLOCK}, groups=E * F // BLOCK, std=std, **each)
        self.w2 = GroupedProjection(F, {"w2": dims.dim}, groups=E, std=residual_std, **each)
        self.shared = FeedForward(replace(dims, ffn_dim=of.shared * F), residual_std) if of.shared else None
        self.n_layers = dims.n_layers  # router losses are averaged over so many layers; `build_model` sets it
        self.register_buffer("bias", torch.empty(E) if of.balance_bias else None)
        self.register_buffer("share", torch.empty(()), persistent=False)
        self.register_buffer("counts", torch.empty(E, dtype=torch.int64), persistent=False)
        self.register_buffer("sums", torch.empty(4, dtype=torch.float64), persistent=False)

    def fill_buffers(self) -> None:
        """Set all buffers to zero. The `fill_buffers` of the model must call this."""
        for buffer in self.buffers(recurse=False):
            buffer.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Return the weighted results of each token's experts, summed with the shared experts' result: [M, D]."""
        of, logits = self.of, self.router(x)
        weights, choices = route(logits, self.bias, of.top_k, of.score, of.normalised, of.scale)
        if self.training and torch.is_grad_enabled():
            weights = self._trained(weights, choices, logits)
        y = self.compute(x, weights, choices, self.w13.weight, self.w2.weight, of.n_experts)
        return y if self.shared is None else y + self.shared(x)

    def _trained(self, weights: Tensor, choices: Tensor, logits: Tensor) -> Tensor:
        """Count the choices of experts. Return the weights; their backward adds gradients of the router's losses."""
        is_counted = logits.new_ones(len(logits), dtype=torch.bool) if self.is_counted is None else self.is_counted
        losses = router_losses(logits, choices, is_counted, self.group)
        numbers = routing_numbers(logits.detach(), is_counted, losses.detach(), self.share)
        count_routing(count_choices(choices, is_counted, self.of.n_experts), numbers, self.counts, self.sums)
        if self.of.balance_loss == self.of.z_loss == 0:
            return weights
        loss = (self.of.balance_loss * losses[0] + self.of.z_loss * losses[1]) / self.n_layers
        return with_loss(weights, loss, self.share)


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return (number of elements of a model's parameters, tied ones once; number of those that one token uses)."""
    n_elements = sum(parameter.numel() for parameter in model.parameters())
    of_experts = [module for module in model.modules() if isinstance(module, GroupedProjection)]
    return n_elements, n_elements - sum(layer.weight.numel() - layer.used_by_a_token for layer in of_experts)


def has_experts(model: nn.Module) -> bool:
    """Return whether a model has mixtures of experts."""
    return any(isinstance(module, MixtureOfExperts) for module in model.modules())


def product_names(module: nn.Module) -> tuple[str, ...]:
    """Return, for save-lists, the names of layers with a matmul, except routers, in order of definition."""
    return tuple(name for name, part in module.named_modules() if isinstance(part, (Linear, GroupedProjection)))
