"""Whether a user's own code computes with a weight outside of the layer that holds it, as `x * self.norm.weight`.

On a tensor-parallel rank activations are plain tensors, and a gathered weight is the rank's part (`parallel/fsdp.py`),
which would be taken for the whole: only the methods of layers that `parallel/tensor.py` has of its own know that it is
a part. A graph does not show who reads, for some of these methods are no module calls. So it is seen where the model is
run on the meta device anyway. What a weight is, as its dtype, may be read anywhere.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from inspect import getfile
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.errors import Problem, ShardingError, describe
from titanlite.models.layers import RMSNorm
from titanlite.sharding.backward_calls import own_frames, place_of
from titanlite.sharding.graph import tensors_of
from titanlite.sharding.local_sizes import put

_METHODS = ("forward", "add")
"""Of the layers, those that compute with their weights."""


@contextlib.contextmanager
def no_outside_reads(model: nn.Module) -> Iterator[None]:
    """Refuse a model, once it has run, whose forward computed with a weight outside of its layer.

    Args:
        model: on the meta device; it is changed for a while.

    Raises:
        ShardingError: each line that does is in the message.
    """
    reads = _Reads(model)
    with contextlib.ExitStack() as changed:
        for module in model.modules():
            for name in _METHODS if module._parameters else ():
                if hasattr(module, name):
                    changed.enter_context(put(vars(module), name, reads.of_layer(module, getattr(module, name))))
            if isinstance(module, RMSNorm):  # what it hands out is a rank's own
                handed_out = reads.of_layer(module, lambda scale=module.scale: scale().view(-1))
                changed.enter_context(put(vars(module), "scale", handed_out))
        changed.enter_context(put(vars(model), "forward", reads.of_model(model.forward)))
        yield
    if reads.problems:
        raise ShardingError(describe(getfile(type(model)), list(reads.problems.values())))


class _Reads(TorchDispatchMode):
    """Sees the operators of a forward, and in which layers they are called."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.problems: dict[object, Problem] = {}
        self._file = getfile(type(model))
        self._inside: list[nn.Module] = []
        self._holders: dict[Tensor, dict[str, nn.Module]] = {}
        for place, module in model.named_modules():
            for own, parameter in module.named_parameters(recurse=False):
                self._holders.setdefault(parameter, {})[f"{place}.{own}".lstrip(".")] = module

    def of_layer(self, layer: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
        """Let a method compute with the layer's weights."""

        def called(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(layer)
            try:
                return method(*args, **kwargs)
            finally:
                self._inside.pop()

        return called

    def of_model(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Watch a forward, not what comes behind it: backward is called in no layer."""

        def called(*args: Any, **kwargs: Any) -> Any:
            with self:
                return forward(*args, **kwargs)

        return called

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tensors_of((args, kwargs)):
            holders = self._holders.get(x, {})
            if holders and not any(layer in self._inside for layer in holders.values()):
                self._refuse(*next(iter(holders.items())))
        return func(*args, **(kwargs or {}))

    def _refuse(self, weight: str, holder: nn.Module) -> None:
        weight = re.sub(r"\b\d+\b", "*", weight)
        frames = own_frames()
        where, line = place_of(frames, self._file) if frames else ("model.file", None)
        saw = f"computes with {weight} outside of its layer"
        want = "weights that their own layers compute with: on a rank of several these take its part"
        layer = weight.rpartition(".")[0]
        instead = f"take {layer}.scale()" if isinstance(holder, RMSNorm) else f"call {layer}, or another layer"
        fix = f"{instead}; or tensor_parallel_degree = 1"
        self.problems.setdefault((line, where, weight), Problem(where, saw, want, fix, line))
