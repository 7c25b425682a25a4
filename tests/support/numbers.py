"""Seeded numbers that tests of kernels share, and the bound of what is rounded once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from titanlite.kernels.routing import expert_rows

F32 = torch.finfo(torch.float32).eps


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Draw normal numbers on the CPU, the same for every device; those of float64 with all of its bits."""
    drawn = torch.promote_types(dtype, torch.float32) if dtype.itemsize > 1 else torch.float32
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=drawn).to(device, dtype)


def leaf(t: Tensor, device: str = "cpu") -> Tensor:
    return t.detach().to(device, copy=True).requires_grad_()


def within(got: Tensor, truth: Tensor, error: Tensor | float = 0.0) -> bool:
    """Whether numbers are a truth in float64 that has an error, and is then rounded once to their dtype."""
    bound = torch.finfo(got.dtype).eps / 2 * truth.abs() + error
    return bool(((got.double() - truth).abs() <= bound).all())


def differ(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> Tensor:
    """Whether any bit differs, left on the device."""
    pairs = zip(got, wanted, strict=True)
    return torch.stack([(a.view(torch.uint8) != b.contiguous().view(torch.uint8)).any() for a, b in pairs]).any()


def some_choices(M: int, E: int, K: int) -> Tensor:
    """Draw different experts for each token, [M, K] int32."""
    return torch.rand(M, E, generator=torch.Generator().manual_seed(M)).topk(K).indices.int()


def rows_of(M: int, E: int, K: int, first: int, count: int) -> tuple[Tensor, Tensor, int]:
    """Return the rows of each token and slot, the slots of each row, and how many rows have one."""
    rows, slots, offsets = expert_rows(some_choices(M, E, K), first, count)
    return rows, slots, int(offsets[-1])
