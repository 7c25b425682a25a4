"""Tell which collectives of a run would be fused with their matmuls on one NVLink host, and why others are not.

Nothing is decided here. The layers are those that the trainer builds. Each says itself whether its arithmetic can be
fused, and runs forward and backward; the kernels are asked about every operator that it calls.
"""

import copy
import importlib.util
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.float8.weight import local_data
from titanlite.forecast.traced_run import gathered_for_compute
from titanlite.parallel.tensor import ColumnParallelLinear, ParallelLinear
from titanlite.sharding.plan import Kind

NOT_ASKED = "is not known to be: the kernels cannot be asked without Triton"
"""An obstacle where there may be none."""


class CollectiveMatmul(NamedTuple):
    """A collective and the matmul of its layer.

    Attributes:
        kind: "all_gather" or "reduce_scatter".
        direction: of the pass.
        module: the layer.
        obstacle: why the two are not fused, as the predicate of a sentence about the layer; or None.
    """

    kind: Kind
    direction: Literal["forward", "backward"]
    module: str
    obstacle: str | None


def fused_pairs(model: nn.Module, tokens: int, dtype: torch.dtype) -> list[CollectiveMatmul]:
    """Ask every tensor-parallel linear layer of a run about its collectives.

    Args:
        model: as `titanlite.training.assemble.assemble` makes it, of a run with async tensor parallelism.
        tokens: M of a micro-step.
        dtype: that it computes in.

    Returns:
        Two of each layer: of forward, and of backward.
    """
    known: dict[object, list[str | None]] = {}
    pairs: list[CollectiveMatmul] = []
    for name, layer in model.named_modules():
        if not isinstance(layer, ParallelLinear):
            continue
        kind = (type(layer), local_data(layer.weight).shape, id(layer.matmul))
        if kind not in known:
            known[kind] = [layer.unfused] * 2 if layer.unfused else _answers(layer, tokens, dtype)
        forward, backward = known[kind]
        gathers = isinstance(layer, ColumnParallelLinear)
        pairs.append(CollectiveMatmul("all_gather" if gathers else "reduce_scatter", "forward", name, forward))
        pairs.append(CollectiveMatmul("reduce_scatter" if gathers else "all_gather", "backward", name, backward))
    return pairs


def _answers(layer: ParallelLinear, tokens: int, dtype: torch.dtype) -> list[str | None]:
    """Return what the kernels say of the collectives of one layer, forward and backward."""
    rows = tokens // layer.group.size if isinstance(layer, ColumnParallelLinear) else tokens
    x = torch.empty(rows, local_data(layer.weight).shape[1], dtype=dtype, device="meta", requires_grad=True)
    asked = copy.copy(layer)
    own = [(name, p) for name, p in layer._parameters.items() if p is not None]
    weights = {"bias": None} | {name: nn.Parameter(gathered_for_compute(p, dtype)) for name, p in own}
    asked._parameters = weights  # type: ignore[assignment]
    with _Asking(layer.group.size) as asking:
        asked(x).sum().backward()
    return asking.answers


class _Asking(TorchDispatchMode):
    """Asks the kernels about every collective matmul that runs inside it."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.answers = ranks, list[str | None]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "titanlite" and func._schema.name.endswith(("all_gather_matmul", "matmul_reduce_scatter")):
            self.answers.append(self._obstacle(func._schema.name, args))
        return func(*args, **(kwargs or {}))

    def _obstacle(self, op: str, args: Any) -> str | None:
        if importlib.util.find_spec("triton") is None:
            return NOT_ASKED
        if op.endswith("all_gather_matmul"):
            from titanlite.kernels.device.gather_plan import gather_unsupported_reason

            shard, others, dim, size, _, form = args[:6]
            found = gather_unsupported_reason(shard, others, dim, size, self.ranks, form, args[8])
        else:
            from titanlite.kernels.device.matmul_reduce_scatter import scatter_unsupported_reason

            lefts, rights = args[:2]
            found = scatter_unsupported_reason(lefts, rights, self.ranks)
        return f"has {found}" if found else None
