"""Train the routers of a mixture of experts: weigh their losses, move their bias, report their routing.

Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.1.2, for the bias.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.models.experts import MixtureOfExperts

SEEN = ("fullest", "emptiest", "entropy", "balance_loss", "z_loss")
"""Statistics of each layer, over tokens that count (`data/document_starts.py`): tokens of the fullest and the emptiest
expert, both relative to the mean; mean entropy, in nats, of a token's distribution over experts; losses of the router,
without coefficients."""


@dataclass(frozen=True)
class SeenRouting:
    """Statistics of the routing in some steps, over all ranks.

    Attributes:
        numbers: by key: "experts_<name>.<layer>" for each name in `SEEN`, if a token was counted; and
            "experts_bias_range.<layer>", the largest bias minus the smallest.
        tokens: tokens of each expert, by layer.
    """

    numbers: Mapping[str, float] = field(default_factory=dict[str, float])
    tokens: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])


class Routers:
    """Trains the routers of mixtures of experts, given by name. Buffers of the mixtures must be filled."""

    def __init__(self, layers: Mapping[str, MixtureOfExperts]) -> None:
        self._layers = dict(layers)
        self._biased = {name: layer for name, layer in layers.items() if layer.bias is not None}
        self._all = _Table([*layers.values()])
        self._balanced = _Table([*self._biased.values()]) if self._biased else None
        self._counted = self._balanced and self._balanced.counts()
        self._names = {name: name.removesuffix(".experts") for name in layers}
        self._keys = [f"experts_{what}.{name}" for what in SEEN for name in self._names.values()]
        self._keys += [f"experts_bias_range.{self._names[name]}" for name in self._biased]
        self._seen = self._all.counts()
        group = next(iter(layers.values())).group
        self._sharers = 1 if group is None else group.size

    def begin(self, share: Tensor, is_counted: Tensor | None) -> None:
        """Prepare the mixtures for a micro-batch.

        Args:
            share: [], the micro-batch's share of the step's targets, by which its router losses are weighted.
            is_counted: [M] bool, which of this rank's M tokens count; None: all.
        """
        shares = [layer.share for layer in self._layers.values()]
        torch._foreach_copy_(shares, [share] * len(shares))
        for layer in self._layers.values():
            layer.is_counted = is_counted

    def balance(self, skip: Tensor) -> None:
        """Move each bias by the recipe's rate: up if its expert had fewer tokens in this step than the mean, down if
        more.

        Collective; biases remain equal on all ranks.

        Args:
            skip: [] float32; 1 if the update of the step is skipped: then biases do not move.
        """
        table = self._balanced
        if table is None or self._counted is None:
            return
        counts = table.counts()
        of_step, self._counted = counts - self._counted, counts
        dist.all_reduce(of_step)
        lack = (of_step.sum(1, keepdim=True) - of_step * table.n_experts).sign()  # whole numbers: exact
        moves = (table.rates * (1 - skip) * lack).unbind()
        biases = [layer.bias for layer in self._biased.values() if layer.bias is not None]
        torch._foreach_add_(biases, [move[: len(bias)] for move, bias in zip(moves, biases, strict=True)])

    def seen(self) -> Tensor:
        """Return statistics of the routing since the last call, to be decoded by `read`. Collective.

        Returns:
            [numbers] float64 on the device: statistics of layers, then the tokens of each expert.
        """
        table = self._all
        counts, sums = table.counts(), torch.stack(each := [layer.sums for layer in self._layers.values()])
        since = torch.cat(((counts - self._seen).double(), sums), 1)  # counts are exact in float64
        self._seen = counts
        torch._foreach_zero_(each)  # NaN of a skipped step must not remain
        dist.all_reduce(since)
        counts, (entropy, balance, z, steps) = since[:, :-4], since[:, -4:].unbind(1)
        steps, chosen = steps / self._sharers, counts.sum(1)  # a step's shares add up to 1
        mean, tokens = chosen / table.n_experts[:, 0], chosen / table.top_k
        of_layers = counts.amax(1) / mean, table.least(counts) / mean, entropy / tokens, balance / steps, z / steps
        biases = [layer.bias for layer in self._biased.values() if layer.bias is not None]
        ends = [*torch._foreach_max(biases), *torch._foreach_max(torch._foreach_neg(biases))] if biases else []
        ranges = torch.stack(ends).view(2, -1).sum(0) if ends else entropy.new_empty(0)
        return torch.cat((*of_layers, ranges, counts.flatten()))

    def read(self, seen: Sequence[float]) -> SeenRouting:
        """Return, by name, the statistics that `seen` returned, once they are copied to the host."""
        n, tokens = len(self._keys), dict[str, Sequence[int]]()
        numbers = dict(zip(self._keys, seen, strict=False))
        widest = (len(seen) - n) // len(self._layers)  # most experts of a layer
        for i, (name, layer) in enumerate(self._layers.items()):
            tokens[self._names[name]] = list(map(int, seen[n + i * widest :][: layer.of.n_experts]))
        if not any(map(any, tokens.values())):  # without counted tokens means are undefined
            numbers = {key: number for key, number in numbers.items() if key.startswith("experts_bias_range")}
        return SeenRouting(numbers, tokens)

    def state(self) -> dict[str, Tensor]:
        """Return the biases by name, for checkpoints. Loading values into these tensors restores them."""
        return {f"{name}.bias": layer.bias for name, layer in self._biased.items() if layer.bias is not None}


class _Table:
    """Combines the counts of several mixtures in one tensor. The mixtures may differ in their number of experts.

    Attributes:
        n_experts: [layers, 1] int64.
        top_k: [layers] int64.
        rates: [layers, 1] float32, by which a step moves a bias.
    """

    def __init__(self, layers: Sequence[MixtureOfExperts]) -> None:
        self._layers = layers
        new, sizes = layers[0].counts.new_tensor, [layer.of.n_experts for layer in layers]
        self.n_experts, self.top_k = new(sizes)[:, None], new([layer.of.top_k for layer in layers])
        self.rates = new([layer.of.balance_bias for layer in layers], dtype=torch.float32)[:, None]
        self._nothing = new([0])
        column = torch.arange(max(sizes), device=self.n_experts.device)
        self._is_expert = column < self.n_experts
        first = self.n_experts.cumsum(0) - self.n_experts
        self._places = torch.where(self._is_expert, first + column, sum(sizes))  # beyond its experts: index of a 0

    def counts(self) -> Tensor:
        """Return the tokens of each expert so far, [layers, most experts of any layer] int64, filled up with 0."""
        return torch.cat([*(layer.counts for layer in self._layers), self._nothing])[self._places]

    def least(self, counts: Tensor) -> Tensor:
        """Return the smallest count among each layer's experts, [layers]. `counts`: as from `self.counts()`."""
        return counts.masked_fill(~self._is_expert, torch.inf).amin(1)


def routers_of(model: nn.Module) -> Routers | None:
    """Return the routers of a model with filled buffers; None for a model without experts."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MixtureOfExperts)}
    return Routers(layers) if layers else None
