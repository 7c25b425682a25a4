"""Compare a tensor-parallel model with the same model on one process, at the boundaries of its blocks.

`BoundaryRecord` records the tensors of the unsplit model, and `BoundaryComparison` compares a rank's parts with them.
After each boundary the rank continues with the recorded tensor, and in backward with the recorded gradient.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from titanlite.parallel.mesh import Mesh

AROUND = "around the blocks"
"""Name of the part of a model that is outside of its blocks."""


class OtherCallsError(Exception):
    """A rank calls blocks in another order than the unsplit model does."""


@dataclass
class _BoundaryTensor:
    """A recorded tensor of the unsplit model at the boundary of a block."""

    name: str
    value: Tensor
    gradient: Tensor | None = None


class BoundaryRecord:
    """The tensors at the boundaries of the unsplit model's blocks, in order, the logits last."""

    def __init__(self) -> None:
        self.tensors: list[_BoundaryTensor] = []

    def meet(self, part: str, part_of_gradient: str, name: str, x: Tensor) -> Tensor:
        """Record tensor `x`, and in backward its gradient; return `x`. For the arguments see `BoundaryComparison`."""
        known = _BoundaryTensor(name, x.detach())
        self.tensors.append(known)

        def keep(gradient: Tensor) -> Tensor:
            known.gradient = gradient
            return gradient

        return _Boundary.apply(x, x, keep) if x.requires_grad else x


class BoundaryComparison:
    """Compares a tensor-parallel rank's tensors with its parts of the recorded tensors of the unsplit model.

    `errors` has the relative difference by (part of the model, name of the tensor); infinite if shapes differ.
    """

    def __init__(self, record: BoundaryRecord, mesh: Mesh) -> None:
        self.errors: dict[tuple[str, str], float] = {}
        self._left, self._mesh = iter(record.tensors), mesh

    def meet(self, part: str, part_of_gradient: str, name: str, x: Tensor) -> Tensor:
        """Compare this rank's part of a tensor, and in backward its gradient; return the recorded part in its place.

        Args:
            part, part_of_gradient: names of the parts of the model that compute the tensor and its gradient.
            name: of the tensor, in words.
            x: this rank's part of the tensor.

        Raises:
            OtherCallsError: the unsplit model had another tensor at this boundary.
        """
        known = next(self._left, None)
        if known is None or known.name != name:
            raise OtherCallsError
        exact = self._hold(part, name, x, known.value)
        if not x.requires_grad or exact is None:
            return x

        def compared(gradient: Tensor) -> Tensor:
            whole = torch.zeros_like(known.value) if known.gradient is None else known.gradient
            return self.hold_gradient(part_of_gradient, name, gradient, whole)

        return _Boundary.apply(x, exact, compared)

    def hold_gradient(self, part: str, name: str, own: Tensor, whole: Tensor) -> Tensor:
        """Compare this rank's gradient, `own`, with its part of the recorded one, `whole`, and return this part.

        If the tensor is not split, compare the sum of all ranks' gradients, and return `own`.
        """
        name = f"the gradient of {name}"
        if own.shape != whole.shape:
            exact = self._hold(part, name, own, whole)
            return own if exact is None else exact
        total = own.float()
        dist.all_reduce(total, group=self._mesh.tp.get_group())
        self._hold(part, name, total, whole)
        return own

    def part(self, whole: Tensor, shape: Sequence[int]) -> Tensor | None:
        """Return this rank's part, of a given shape, of an unsplit tensor; None if no split gives this shape."""
        split = [d for d, n in enumerate(whole.shape) if len(shape) == whole.ndim and shape[d] != n]
        parts = whole.tensor_split(self._mesh.tp_size, split[0]) if split else [whole] * self._mesh.tp_size
        own = parts[self._mesh.tp.get_local_rank()]
        return own if own.shape == shape else None

    def _hold(self, part: str, name: str, own: Tensor, whole: Tensor) -> Tensor | None:
        exact, own = self.part(whole, own.shape), own.detach()
        error = math.inf if exact is None else _relative_error(own, exact, whole)
        if error > self.errors.setdefault((part, name), 0.0) or math.isnan(error):
            self.errors[part, name] = error
        return exact


def watch(block: nn.Module, name: str, boundaries: BoundaryRecord | BoundaryComparison) -> None:
    """Replace a block's `forward` by one that passes tensors among its arguments and results to `boundaries.meet`.

    Once a call has returned a result of the shape of its tokens, later calls with the same shapes return their tokens
    without computing the block, which has been compared.
    """
    forward: Callable[..., Any] = block.forward
    passing: set[object] = set()

    def watched(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = pytree.tree_flatten((args, kwargs))
        given = f"what {name} is given"
        leaves = [boundaries.meet(AROUND, name, given, x) if isinstance(x, Tensor) else x for x in leaves]
        tokens = next((x for x in leaves if isinstance(x, Tensor) and x.requires_grad), None)
        key = repr([(x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves]), torch.is_grad_enabled()
        if tokens is not None and key in passing:
            return tokens
        args, kwargs = pytree.tree_unflatten(leaves, tree)
        result = forward(*args, **kwargs)
        if isinstance(result, Tensor) and tokens is not None and result.shape == tokens.shape:
            passing.add(key)
        returned = f"what {name} returns"
        return pytree.tree_map_only(Tensor, lambda x: boundaries.meet(name, AROUND, returned, x), result)

    vars(block)["forward"] = watched


class _Boundary(torch.autograd.Function):
    """Replaces a tensor in forward, and its gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, instead: Tensor, of_gradient: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.of_gradient = of_gradient
        return instead.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.of_gradient(gradient), None, None


def _relative_error(own: Tensor, exact: Tensor, whole: Tensor) -> float:
    """Return the root mean square of `own - exact`, divided by that of the tensor `whole`; NaN if this is infinite."""
    equal = (own == exact) | (own.isnan() & exact.isnan())  # also infinite elements, as in a mask
    if bool(equal.all()):
        return 0.0
    difference = torch.where(equal, 0.0, own.double() - exact.double())
    size = torch.where(whole.isfinite(), whole, 0).double()
    error = float(difference.square().mean().sqrt() / size.square().mean().sqrt())
    return error if math.isfinite(error) else math.nan
