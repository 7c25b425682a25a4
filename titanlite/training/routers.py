"""The routers of a mixture of experts in training: by what share their losses count, and the bias that balances use.

Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.1.2, for the bias.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.models.experts import MixtureOfExperts


class Routers:
    """The mixtures of a model.

    Args:
        layers: by name; their buffers are filled.
    """

    def __init__(self, layers: Mapping[str, MixtureOfExperts]) -> None:
        self._layers = dict(layers)
        self._biased = {name: layer for name, layer in layers.items() if layer.bias is not None}
        self._counted = self._counts()

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
        if not self._biased:
            return
        counts = self._counts()
        of_step, self._counted = counts - self._counted, counts
        dist.all_reduce(of_step)
        for layer, own in zip(self._biased.values(), of_step, strict=True):
            lack = (own.sum() - own * len(own)).sign()  # whole numbers: exact
            assert layer.bias is not None  # noqa: S101
            layer.bias += layer.of.balance_bias * (1 - skip) * lack

    def state(self) -> dict[str, Tensor]:
        """Name what a checkpoint must hold beside the weights; loading into these restores it."""
        return {f"{name}.bias": layer.bias for name, layer in self._biased.items() if layer.bias is not None}

    def _counts(self) -> Tensor:
        """Return tokens of each expert so far, [layers with a bias, E]."""
        return torch.stack([layer.counts for layer in self._biased.values()]) if self._biased else torch.empty(0)


def routers_of(model: nn.Module) -> Routers | None:
    """Return the routers of a model whose buffers are filled; None of a dense one."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MixtureOfExperts)}
    return Routers(layers) if layers else None
