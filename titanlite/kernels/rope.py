"""Rotary position embedding in real arithmetic.

Complex multiplication says the same in fewer words, but no compiler fuses it: at Llama-3 8B it costs five times the
bytes. The two halves of a head are rotated against each other, the layout of Hugging Face checkpoints.

Source: Su et al. 2021 (RoFormer), eq. 34; frequency scaling as in Llama 3.1.
"""

import math

import torch
from torch import Tensor

from titanlite.config.recipe_schema import RopeScaling


def rope_table(seq_len: int, head_dim: int, theta: float, scaling: RopeScaling | None) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position's angles.

    Args:
        seq_len: S, positions 0 … S−1.
        head_dim: E, even.
        theta: base of the frequencies.
        scaling: Llama 3.1 frequency scaling, or None.

    Returns:
        cos, sin: [S, E/2] float32 each, on the CPU. Angles are formed in float64, so that late positions are exact.
    """
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    if scaling is not None:
        turns = scaling.original_seq_len * frequencies / (2 * math.pi)  # full turns within the original context
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)  # 1: kept as it is; 0: slowed by `factor`
        frequencies = frequencies * (kept + (1 - kept) / scaling.factor)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float64, device="cpu"), frequencies)
    return angles.cos().float(), angles.sin().float()


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of each head by its position's angle, in float32.

    Args:
        x: [M, H, E] queries or keys of whole sequences, one after the other; M a multiple of S.
        cos: [S, E/2] float32, from `rope_table`.
        sin: [S, E/2] float32.

    Returns:
        [M, H, E] in `x.dtype`.
    """
    low, high = x.unflatten(0, (-1, cos.shape[0])).float().chunk(2, dim=-1)  # [B, S, H, E/2] each
    cos, sin = cos[:, None], sin[:, None]  # [S, 1, E/2]: the same for every head
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype).flatten(0, 1)
