"""Train with as many tokens for each expert: torchrun --nproc-per-node 2 scripts/bench/balanced_routing.py --config …

Tokens go to experts in turn, whatever the router says, so that a speed can be held against that of real routing, and
against figures that were published under forced balance. Weights are a softmax of the logits of those experts. The
arguments are those of train.py; the losses mean nothing.
"""

import torch
from torch import Tensor

from titanlite.exit_code import exit_code, leave
from titanlite.models import experts
from titanlite.train import main


def in_turn(
    logits: Tensor, bias: Tensor | None, top_k: int, score: str, normalised: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return what `titanlite.kernels.routing.route` does, of experts in turn."""
    M, E = logits.shape
    slots = torch.arange(M * top_k, dtype=torch.int32, device=logits.device)
    choices = (slots % E).view(M, top_k)
    return logits.gather(1, choices.long()).softmax(1) * scale, choices


if __name__ == "__main__":
    experts.route = in_turn  # type: ignore[assignment]
    leave(exit_code(main))
