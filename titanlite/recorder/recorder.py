"""Record every collective that a step calls.

titanlite's operators with a process group declare what they send (`kernels/operators.py`), or are recorded while their
definition runs. All collectives of one kind and size of group inside an operator are recorded as one.
"""

import importlib.util
import re
from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._tools.mod_tracker import ModTracker
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from titanlite.device import Device
from titanlite.kernels.collectives import process_group_of
from titanlite.kernels.lowering import MatmulOperator, lowered
from titanlite.sharding.sent_bytes import sent_bytes

_KINDS = {
    "all_gather": re.compile("_?all_?gather"),
    "reduce_scatter": re.compile("_?reduce_scatter"),
    "all_reduce": re.compile("all_?reduce"),
    "all_to_all": re.compile("all_?to_?all"),
}


UNKNOWN = "not known: this machine has no Triton (pip install triton)"
"""The reason why it is not known whether a collective and its matmul are fused into one kernel."""


class Recorded(NamedTuple):
    """A collective that a step calls."""

    kind: str  # "all_gather", "reduce_scatter", "all_reduce" or "all_to_all"
    direction: str  # "forward", "backward", "recomputation" or "update"
    module: str  # name of the caller, with blocks as "layers.*"; "" outside of all modules
    ranks: int  # number of ranks in the group
    n_bytes: int  # bytes of the whole tensor; for an all-to-all, or inside an operator: bytes that this rank sends
    operator: str = ""  # name of titanlite's operator that contains the collective; "": none

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that this rank sends."""
        is_whole = self.kind != "all_to_all" and not self.operator
        return sent_bytes(self.kind, self.n_bytes, self.ranks) if is_whole else self.n_bytes


class CollectiveMatmul(NamedTuple):
    """A collective combined with a matmul that a step calls."""

    kind: str  # "all_gather" or "reduce_scatter"
    direction: str  # as in `Recorded`
    module: str  # as in `Recorded`
    obstacle: str | None  # reason why the two are not fused into one kernel, or None


class MicroStep(NamedTuple):
    """The work from the beginning of a micro-step's forward pass to the beginning of the next, or the step's end."""

    collectives: list[Recorded]  # in order of calls
    pairs: Counter[CollectiveMatmul]  # number of calls of each


class Recorder(TorchDispatchMode):
    """Records every collective of a step. It must be the innermost dispatch mode.

    Args:
        device: the device that the model was built for.
        model: the model to record. Do not use it afterwards: the recorder's hook is not removed.

    Attributes:
        modules: a context manager that tracks the running module; enter it together with this mode.
        work: the collectives before the first micro-step, then those of each micro-step. The last one includes the
            update.
    """

    def __init__(self, device: Device, model: nn.Module) -> None:
        super().__init__()
        self.work, self.modules = [MicroStep([], Counter())], _RunningModule(model)
        self._device, self._inside, self._sent = device, "", Counter[tuple[str, int]]()
        self._phase = "update"
        model.register_forward_pre_hook(self._begin, prepend=True)  # before FSDP gathers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and record what it sends."""
        kwargs = kwargs or {}
        if self._phase == "forward" and _is_backward():
            self._phase = "backward"
        if func.namespace == "titanlite" and (group := _named_in(func, args)):
            return self._of_operator(func, group, args, kwargs)
        out = func(*args, **kwargs)
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note(func, args, out)
        return out

    def _of_operator(self, func: Any, group: str, args: Any, kwargs: Any) -> Any:
        of = process_group_of(group)
        if self._device.is_gpu and isinstance(choice := getattr(func.on_gpus, "__self__", None), MatmulOperator):
            call = choice.call(*args)
            why = self._device.obstacle_between(dist.get_process_group_ranks(of)) or (
                choice.unsupported(call, of.size()) if importlib.util.find_spec("triton") else UNKNOWN
            )
            lowered[choice.lowered_as(call, why)] += 1
            kind = "all_gather" if func._opname == "all_gather_matmul" else "reduce_scatter"
            self.work[-1].pairs[CollectiveMatmul(kind, self._direction(), self._module(), why)] += 1
        if func.sends is not None and (sends := func.sends(self._device, *args)) is not None:
            for kind, n_bytes in sends:
                self._add(kind, of.size(), n_bytes, func._opname)
            return func(*args, **kwargs)
        self._inside = func._opname
        with self:
            out = func.definition(*args, **kwargs)
        self._inside = ""
        for (kind, ranks), n_bytes in self._sent.items():
            self._add(kind, ranks, n_bytes, func._opname)
        self._sent.clear()
        return out

    def _note(self, func: Any, args: Any, out: Any) -> None:
        kind = next((kind for kind, name in _KINDS.items() if name.match(func._opname)), None)
        if kind is None:
            return
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
        if "group_name" in given:
            group = process_group_of(given["group_name"])
        else:
            group = dist.ProcessGroup.unbox(given["process_group"])
        size, given_and_made = group.size(), (*args, out)  # tensors, or lists of several that one call takes
        whole = max(sum(x.nbytes for x in tree_leaves(each) if isinstance(x, Tensor)) for each in given_and_made)
        n_bytes = sent_bytes(kind, whole, size) if self._inside else whole
        if kind == "all_to_all":
            to = given["input_split_sizes"] or [1] * size
            n_bytes = given["input"].nbytes * (sum(to) - to[group.rank()]) // max(1, sum(to))
        if self._inside:
            self._sent[kind, size] += n_bytes
        else:
            self._add(kind, size, n_bytes, "")

    def _add(self, kind: str, ranks: int, n_bytes: int, operator: str) -> None:
        if n_bytes == 0:
            return
        found = Recorded(kind, self._direction(), self._module(), ranks, n_bytes, operator)
        self.work[-1].collectives.append(found)

    def _module(self) -> str:
        return self.modules.name(self._direction() == "backward")

    def _direction(self) -> str:
        if not _is_backward():
            return "update" if self._phase == "backward" else self._phase
        # torch's checkpointing recomputes a forward under hooks for saved tensors.
        is_again = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None  # type: ignore[attr-defined]
        return "recomputation" if is_again else "backward"

    def _begin(self, *_: Any) -> None:
        if not _is_backward():
            self._phase = "forward"
            self.work.append(MicroStep([], Counter()))


class _RunningModule:
    """Tracks the module whose forward is running, also in recomputation, and the module whose backward is running."""

    def __init__(self, model: nn.Module) -> None:
        self._backward = ModTracker()
        self._names = {module: re.sub(r"\.\d+(?=\.|$)", ".*", name) for name, module in model.named_modules()}
        self._forward, self._hooks = list[str](), list[RemovableHandle]()

    def __enter__(self) -> None:
        self._backward.__enter__()
        begin = register_module_forward_pre_hook(self._begin)
        # `always_call`, because recomputation may end a forward early, by an exception.
        self._hooks = [begin, register_module_forward_hook(self._end, always_call=True)]

    def __exit__(self, *raised: Any) -> None:
        self._backward.__exit__(*raised)
        for hook in self._hooks:
            hook.remove()

    def _begin(self, module: nn.Module, _: Any) -> None:
        outer = self._forward[-1] if self._forward else ""
        self._forward.append(self._names.get(module, outer))  # one made in forward takes the outer name

    def _end(self, *_: Any) -> None:
        self._forward.pop()

    def name(self, of_backward: bool) -> str:
        """Return the name of the module whose forward, or backward, runs, blocks as "layers.*"; "" outside of all."""
        if not of_backward:
            return self._forward[-1] if self._forward else ""
        names = [name.partition(".")[2] for name in self._backward.parents]  # without the model's class
        return re.sub(r"\.\d+(?=\.|$)", ".*", max(names, key=len))


def _is_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _named_in(func: Any, args: Any) -> str | None:
    """Return the name of the process group among an operator's arguments, or None."""
    names = [argument.name for argument in func._schema.arguments]
    return args[names.index("group")] if "group" in names and names.index("group") < len(args) else None
