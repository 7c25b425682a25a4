"""A mixture of experts: a router sends each token to a few of many small feed-forwards, and weighs what they return.

What differs between published mixtures is data (`config/recipe_schema.py`, `Experts`): the router's score, how many
experts a token has, whether their weights sum to 1, experts that all tokens share.

The weights of all experts are one matrix each, by rows: FSDP cuts it evenly over any number of ranks, and its parts
keep their identity, as those of every projection do.

    w13  [E·2F, D]   of each expert in turn, w1 and w3 in blocks of 128 rows
    w2   [E·D, F]    of each expert in turn

Axes: M tokens, D model width, E experts, K experts of a token, F inner width of one expert.
"""

from dataclasses import replace

from torch import Tensor, nn

from titanlite.config.recipe_schema import ModelDims
from titanlite.kernels.experts import experts
from titanlite.kernels.routing import route, router_logits
from titanlite.kernels.swiglu import BLOCK
from titanlite.models.layers import Projection
from titanlite.models.llama3 import FeedForward


class Router(Projection):
    """The logits of each token's experts, always in float32: float8 recipes and the compute dtype leave their sums.

    Args:
        dim: D.
        n_experts: E.
        std: standard deviation of the initial weights.
    """

    def __init__(self, dim: int, n_experts: int, std: float) -> None:
        super().__init__(dim, {"router": n_experts}, std=std)

    def forward(self, x: Tensor) -> Tensor:
        """[M, D] → [M, E] float32."""
        return router_logits(x, self.weight)


class GroupedProjection(Projection):
    """The weights of all experts of a layer; the operator that multiplies by them takes the rows of all at once.

    Args:
        in_features: K.
        parts: as of `Projection`.
        groups: of all experts together.
        n_experts: E.
        top_k: experts of a token.
        std: standard deviation of the initial weights.
    """

    def __init__(
        self, in_features: int, parts: dict[str, int], *, groups: int, n_experts: int, top_k: int, std: float
    ) -> None:
        super().__init__(in_features, parts, groups=groups, std=std)
        self.n_experts, self.top_k = n_experts, top_k

    @property
    def used_by_a_token(self) -> int:
        """Weights that each token is multiplied by: those of its experts."""
        return self.weight.numel() // self.n_experts * self.top_k

    def by_expert(self) -> Tensor:
        """The weight as [E, N/E, K]."""
        return self.weight.unflatten(0, (self.n_experts, -1))


class MixtureOfExperts(nn.Module):
    """A router and its experts, in the place of a feed-forward.

    Args:
        dims: the model's dimensions, with `experts`.
        std: standard deviation of the initial weights.
        residual_std: that of the projections back to the residual stream.
    """

    def __init__(self, dims: ModelDims, std: float, residual_std: float) -> None:
        super().__init__()
        of = dims.experts
        if of is None:
            raise ValueError("MixtureOfExperts: dims.experts is None; want a recipe with a table [experts]")
        self.of, (E, F) = of, (of.n_experts, of.ffn_dim)
        self.router = Router(dims.dim, E, std)
        each = {"n_experts": E, "top_k": of.top_k}
        self.w13 = GroupedProjection(dims.dim, {"w1": BLOCK, "w3": BLOCK}, groups=E * F // BLOCK, std=std, **each)
        self.w2 = GroupedProjection(F, {"w2": dims.dim}, groups=E, std=residual_std, **each)
        self.shared = FeedForward(replace(dims, ffn_dim=of.shared * F), residual_std) if of.shared else None

    def forward(self, x: Tensor) -> Tensor:
        """[M, D] → [M, D]."""
        logits = self.router(x)
        weights, choices = route(logits, None, self.of.top_k, self.of.score, self.of.normalised, self.of.scale)
        y = experts(x, weights, choices, self.w13.by_expert(), self.w2.by_expert())
        return y if self.shared is None else y + self.shared(x)
