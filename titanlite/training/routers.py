"""Train the routers of a mixture of experts: tell losses their share, move the bias that balances, say what is seen.

Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.1.2, for the bias.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.models.experts import MixtureOfExperts

SEEN = ("fullest", "emptiest", "entropy", "balance_loss", "z_loss")
"""Numbers of each layer: the tokens of its fullest and of its emptiest expert over the mean, the mean entropy in
nats of a token's distribution over experts, and the router's losses, before their coefficients."""


class Routers:
    """The mixtures of a model.

    Args:
        layers: by name; their buffers are filled.

    Attributes:
        keys: of the numbers that `seen` returns, "experts_<what>.<layer of the model>".
    """

    def __init__(self, layers: Mapping[str, MixtureOfExperts]) -> None:
        self._layers = dict(layers)
        self._biased = {name: layer for name, layer in layers.items() if layer.bias is not None}
        self._counted = self._counts()
        self.keys = [f"experts_{what}.{name.removesuffix('.experts')}" for what in SEEN for name in layers]
        self._seen, self._steps = self._totals(), 0

    def begin(self, share: Tensor) -> None:
        """Let the losses of routers count by the share [] that the next micro-batch has in the step's targets."""
        shares = [layer.share for layer in self._layers.values()]
        torch._foreach_copy_(shares, [share] * len(shares))

    def balance(self, skip: Tensor) -> None:
        """Move the bias of each expert by the recipe's rate: up if it had fewer tokens than the mean of its layer.

        The tokens are those of the step that ends, of all ranks, each of which calls this: all biases stay equal.

        Args:
            skip: [] float32; 1 if the step was left out.
        """
        self._steps += 1
        if not self._biased:
            return
        counts = self._counts()
        of_step, self._counted = counts - self._counted, counts
        dist.all_reduce(of_step)
        for layer, own in zip(self._biased.values(), of_step, strict=True):
            lack = (own.sum() - own * len(own)).sign()  # whole numbers: exact
            assert layer.bias is not None  # noqa: S101
            layer.bias += layer.of.balance_bias * (1 - skip) * lack

    def seen(self) -> Tensor:
        """Return what routing was in the steps since the last call, over all ranks, each of which calls this.

        Returns:
            [numbers] float32 on the device, as `keys` has them.
        """
        totals, steps = self._totals(), max(self._steps, 1)
        since, self._seen, self._steps = totals - self._seen, totals, 0
        # A step without numbers, which is left out, is in one line alone.
        torch._foreach_zero_([layer.sums for layer in self._layers.values()])
        self._seen[:, -3:] = 0
        dist.all_reduce(since)
        counts, (entropy, balance, z) = since[:, :-3], since[:, -3:].unbind(1)
        mean, K = counts.mean(1), next(iter(self._layers.values())).of.top_k
        tokens = counts.sum(1) / K
        of_layers = counts.amax(1) / mean, counts.amin(1) / mean, entropy / tokens, balance / steps, z / steps
        return torch.cat(of_layers).float()

    def state(self) -> dict[str, Tensor]:
        """Name what a checkpoint must hold beside the weights; loading into these restores it."""
        return {f"{name}.bias": layer.bias for name, layer in self._biased.items() if layer.bias is not None}

    def _totals(self) -> Tensor:
        """Return of each layer the tokens of each expert and its sums so far, [layers, E + 3] float64: exact counts."""
        return torch.stack([torch.cat((layer.counts.double(), layer.sums)) for layer in self._layers.values()])

    def _counts(self) -> Tensor:
        """Return tokens of each expert so far, [layers with a bias, E]."""
        return torch.stack([layer.counts for layer in self._biased.values()]) if self._biased else torch.empty(0)


def routers_of(model: nn.Module) -> Routers | None:
    """Return the routers of a model whose buffers are filled; None of a dense one."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MixtureOfExperts)}
    return Routers(layers) if layers else None
