"""Compare a user's model that is split over tensor-parallel ranks with the same model unsplit, before the first step.

The sharding plan covers layers. A user's code between layers may compute something else on a rank's part of a tensor:
by a size read off a tensor, a mean over split features, or its own backward. The run would silently train another
model. So the model is computed here in both ways, forward and backward, on the real ranks, with random weights and
tokens: one block of each kind, and the code around the blocks.

Each block is compared by itself: at the boundaries of blocks the split model continues with the unsplit model's tensors
and gradients, so that a difference belongs to the block in which it arose.

Every rank also computes the unsplit model, which takes memory for a block's parameters, gradients and activations. If
they do not fit, nothing is compared, and the receipt reports this. All ranks of a group draw the same random numbers,
so dropout of unsplit tensors passes, and dropout of split ones does not.
"""

import copy
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.compiler import set_stance
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.config.schema import Config
from titanlite.errors import Problem, ShardingError, describe
from titanlite.models.block_kinds import kind_of, with_blocks
from titanlite.models.mistakes import refused
from titanlite.observe.memory import restart_peak
from titanlite.parallel.block_boundaries import AROUND, BoundaryComparison, BoundaryRecord, OtherCallsError, watch
from titanlite.parallel.initialise import fill_buffers
from titanlite.parallel.mesh import Mesh
from titanlite.parallel.tensor import LayerPlan, apply_tensor_parallel
from titanlite.receipt import Entry, Skipped

_FIX = (
    "take sizes from the model's dimensions, as self.width = dims.ffn_dim in __init__, not from a tensor's shape or "
    "len(); compute over dims that are not split; no dropout of what is split; or tensor_parallel_degree = 1"
)


def require_parity(model: nn.Module, layers: Mapping[str, LayerPlan], mesh: Mesh, config: Config) -> Entry:
    """Refuse a user's model whose results change when it is split.

    Args:
        model: on the meta device, unsplit; it is not changed.
        layers: from `plan_layers`.
        mesh: with more than one tensor-parallel rank.
        config: of the run.

    Returns:
        The receipt's entry; without `job.strict` it lists the differences.

    Raises:
        ShardingError: a tensor differs by more than rounding, and `job.strict` is set; or the model's code raises an
            exception on a rank's part. The message names each block, tensor and rank, and is equal on all ranks.
    """
    tokens = config.training.local_batch_size * config.training.seq_len
    compared = _compare(model, layers, mesh, tokens, getattr(torch, config.training.mixed_precision_param))
    restart_peak(mesh.device)
    if compared is None:
        skipped = [Skipped("model.file", "no memory for a whole block on one device")]
        return Entry("parity", False, {"tensors": 0}, count=0, skipped=skipped)
    count, problems = compared
    if problems and config.job.strict:
        raise ShardingError(describe(inspect.getfile(type(model)), problems))
    missed = [Skipped(problem.where, problem.saw) for problem in problems]
    return Entry("parity", True, {"tensors": count}, count=count, missed=missed, key="model.file")


def _compare(
    model: nn.Module, layers: Mapping[str, LayerPlan], mesh: Mesh, tokens: int, dtype: torch.dtype
) -> tuple[int, list[Problem]] | None:
    """Return the number of tensors compared and the differences, equal on all ranks; None if memory is too small."""
    assert mesh.tp_group is not None  # noqa: S101
    model, blocks = _of_representatives(model, layers)
    devices = [mesh.device] if mesh.device.type == "cuda" else []
    with torch.random.fork_rng(devices), set_stance("force_eager"):
        whole = _whole_on_all_ranks(model, blocks, mesh, tokens, dtype)
        if whole is None:
            return None
        parts = copy.deepcopy(model)
        apply_tensor_parallel(parts, layers, mesh.tp, mesh.tp_group)
        comparison = BoundaryComparison(whole.record, mesh)
        values = {}
        for name, parameter in parts.named_parameters():
            shape = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).shape
            values[parameter] = comparison.part(whole.parameters[name].detach(), shape)
        split = _materialise(parts, values, mesh.device)
        _compute_split(split, blocks, whole, comparison, inspect.getfile(type(model)))
    for name, parameter in split.named_parameters():
        part = next((b for b in blocks if name.startswith(f"{b}.")), AROUND)
        own, exact = (
            p.grad if p.grad is not None else torch.zeros_like(p) for p in (parameter, whole.parameters[name])
        )
        comparison.hold_gradient(part, name.removeprefix(f"{part}."), own, exact)
    dims = [n for parameter in whole.parameters.values() for n in parameter.shape]
    of_ranks = _of_all_ranks(comparison.errors, mesh)
    return len({key for errors in of_ranks for key in errors}), _problems(
        of_ranks, _bound(whole.eps, max(tokens, *dims))
    )


def _bound(eps: float, longest: int) -> float:
    """Return the difference between two computations that rounding may cause, relative to the size of the result.

    An operator's result errs by at most eps/2 of itself. A block is a chain of some 64 operators, forward and backward,
    whose independent errors add in squares: sqrt(64) · eps/2 = 4 eps. Sums of n terms (`longest`) are formed in another
    order, in float32 or wider: sqrt(n) · eps/2 of float32. The sum of both is doubled: both computations err, and later
    operators may amplify errors.
    """
    return 2 * (4 * eps + longest**0.5 * torch.finfo(torch.float32).eps / 2)


class _Eps(TorchDispatchMode):
    """Records the greatest machine epsilon among results: code may cast, and GPUs may round float32 factors to TF32."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.eps = 2.0**-10 if device.type == "cuda" else 0.0  # of TF32

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(result):
            if isinstance(x, Tensor) and x.is_floating_point():
                self.eps = max(self.eps, torch.finfo(x.dtype).eps)
        return result


def _of_representatives(model: nn.Module, layers: Mapping[str, LayerPlan]) -> tuple[nn.Module, list[str]]:
    """Return a copy of the model in which the first block of each kind replaces the others, and these blocks' names."""
    first: dict[object, tuple[int, nn.Module]] = {}
    chosen: list[nn.Module] = []
    for n, block in enumerate(model.layers):  # type: ignore[arg-type]
        prefix = f"layers.{n}."
        below = {name.removeprefix(prefix): layer for name, layer in layers.items() if name.startswith(prefix)}
        chosen.append(first.setdefault((kind_of(block), repr(below)), (n, block))[1])
    return copy.deepcopy(with_blocks(model, chosen)), [f"layers.{n}" for n, _ in first.values()]


@dataclass
class _Whole:
    """The results of the unsplit model."""

    parameters: dict[str, nn.Parameter]  # with gradients
    logits_gradient: Tensor
    tokens: Tensor
    record: BoundaryRecord
    eps: float  # greatest machine epsilon of its computation


def _whole_on_all_ranks(
    model: nn.Module, blocks: list[str], mesh: Mesh, tokens: int, dtype: torch.dtype
) -> _Whole | None:
    """Compute the unsplit model in float32 or, if a rank fails, in the step's dtype; None if memory is too small."""
    error: Exception | None = None
    for each in dict.fromkeys((torch.float32, dtype)):
        for parameter in model.parameters():
            parameter.data = parameter.data.to(each)
        whole = error = None
        try:
            whole = _compute_whole(model, blocks, tokens, mesh.device)
        except Exception as caught:  # a user's kernel for bfloat16 alone, or no memory
            error = caught
        if all(_of_all_ranks(whole is not None, mesh)):
            return whole
    if error is not None and not isinstance(error, torch.OutOfMemoryError):
        raise error
    return None


def _materialise(model: nn.Module, values: Mapping[Any, Tensor], device: torch.device) -> nn.Module:
    """Return a copy of a meta model on a device, with `values` of its parameters and filled buffers."""
    made: dict[int, Tensor] = {id(p): nn.Parameter(v.clone()) for p, v in values.items()}
    made |= {id(buffer): torch.empty_like(buffer, device=device) for buffer in model.buffers()}
    copied = copy.deepcopy(model, made)
    fill_buffers(copied)
    return copied


def _compute_whole(model: nn.Module, blocks: list[str], tokens: int, device: torch.device) -> _Whole:
    """Compute the unsplit model, forward and backward, with random weights that preserve the size of activations."""
    seed, values = torch.Generator(device).manual_seed(0), {}
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, device=device, generator=seed)
        drawn = drawn / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 1 + drawn / 4
        values[parameter] = drawn.to(parameter.dtype)
    whole = _materialise(model, values, device)
    vocabulary = len(whole.tok_embeddings.weight)  # type: ignore[arg-type]
    ids = torch.randint(vocabulary, (tokens,), device=device, generator=seed)
    record = BoundaryRecord()
    with _Eps(device) as rounding:
        logits = _logits(whole, blocks, ids, record)
    gradient = torch.randn(logits.shape, device=device, generator=seed).to(logits.dtype) / tokens
    logits.backward(gradient)
    return _Whole(dict(whole.named_parameters()), gradient, ids, record, rounding.eps)


def _compute_split(
    model: nn.Module, blocks: list[str], whole: _Whole, comparison: BoundaryComparison, file: str
) -> None:
    """Compute this rank's part, forward and backward, and compare it; refuse a model whose code raises."""
    want = "code that runs on the part of each tensor that a rank has, as it does on the whole"
    with refused(file, want, _FIX, kind=ShardingError):
        try:
            logits = _logits(model, blocks, whole.tokens, comparison)
            gradient = comparison.part(whole.logits_gradient, logits.shape)
            if gradient is not None:
                logits.backward(gradient)
        except OtherCallsError:
            comparison.errors[AROUND, "the calls of the blocks"] = math.inf


def _logits(
    model: nn.Module, blocks: list[str], tokens: Tensor, boundaries: BoundaryRecord | BoundaryComparison
) -> Tensor:
    torch.manual_seed(0)  # the same random numbers on every rank, and in both computations
    for name in blocks:
        watch(model.get_submodule(name), name, boundaries)
    logits: Tensor = model(tokens)
    boundaries.meet(AROUND, AROUND, "the logits", logits.detach())
    return logits


def _of_all_ranks(value: Any, mesh: Mesh) -> list[Any]:
    found: list[Any] = [None] * mesh.tp_size
    dist.all_gather_object(found, value, group=mesh.tp.get_group())
    return found


def _problems(of_ranks: list[dict[tuple[str, str], float]], bound: float) -> list[Problem]:
    """Return a problem for each part of the model with an error beyond `bound`; it names the part's first such tensor.

    `of_ranks`: each rank's errors, by part of the model and tensor.
    """
    wrong: dict[str, list[tuple[str, dict[int, float]]]] = {}
    for part, name in dict.fromkeys(key for errors in of_ranks for key in errors):
        errors = {rank: own.get((part, name), 0.0) for rank, own in enumerate(of_ranks)}
        if beyond := {rank: error for rank, error in errors.items() if not error <= bound}:
            wrong.setdefault(part, []).append((name, beyond))
    problems = []
    for part, ((name, beyond), *others) in wrong.items():
        worst, several = max(beyond.values()), "s" if len(beyond) > 1 else ""
        saw = "of another shape" if worst == math.inf else f"differs by {worst:.2g} of its size"
        saw += f" on tensor-parallel rank{several} {', '.join(map(str, beyond))} of {len(of_ranks)}"
        saw += f"; and {len(others)} more of its tensors" if others else ""
        want = f"what one process computes, but for rounding, {bound:.1g} of its size"
        problems.append(Problem(f"{part}: {name}", saw, want, _FIX))
    return problems
