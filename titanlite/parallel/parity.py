"""Compare a model that is split over tensor-parallel ranks with the whole one, before the first step.

The sharding plan says what each layer does; what a user's own code between layers does on a rank's part is for that
code to say. A size read off a tensor, a mean over features that are split, a backward of one's own: on a part each may
compute something else, and the run would train another model in silence. So the model is computed here in both ways, on
the real ranks, with random weights and tokens and forward and backward: one block of each kind, and what the model does
around its blocks.

Each part is compared by itself. Where a block begins and ends, the split model goes on with the exact tensor of the
whole one, and in backward with its exact gradient, so that a difference belongs to the part in which it arose.

Every rank computes the whole by itself, for it needs all of it to compare. That is one block's parameters, their
gradients and its activations; where they do not fit, nothing is compared, and the receipt says so.

What random numbers a model draws is compared with the rest: all ranks of a group draw the same ones, so dropout of what
is whole passes, and dropout of what is split does not.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.compiler import set_stance
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.config.schema import Config
from titanlite.errors import Problem, ShardingError, TitanliteError, describe
from titanlite.models.block_kinds import kind_of
from titanlite.models.mistakes import OF_THE_MACHINE, mistake
from titanlite.observe.memory import restart_peak
from titanlite.parallel.initialise import fill_buffers
from titanlite.parallel.mesh import Mesh
from titanlite.parallel.tensor import LayerPlan, apply_tensor_parallel
from titanlite.receipt import Entry, Skipped

_FIX = (
    "take sizes from the model's dimensions, as self.width = dims.ffn_dim in __init__, not from a tensor's shape or "
    "len(); compute over dims that are not split; no dropout of what is split; or tensor_parallel_degree = 1"
)
_AROUND = "around the blocks"


def require_parity(model: nn.Module, layers: Mapping[str, LayerPlan], mesh: Mesh, config: Config) -> Entry:
    """Refuse a model of the user's own that computes something else when it is split.

    Args:
        model: on the meta device, whole; it stays as it is.
        layers: what its layers do on a rank, from `plan_layers`.
        mesh: with more than one tensor-parallel rank.
        config: of the run.

    Returns:
        What was compared, for the receipt; without `job.strict`, what differs, too.

    Raises:
        ShardingError: a tensor differs by more than rounding may do, and `job.strict` is set; or the model's code
            raises an exception on a rank's part. Each block, tensor and rank is in the message, the same on all ranks.
    """
    tokens = config.training.local_batch_size * config.training.seq_len
    compared = compare(model, layers, mesh, tokens, getattr(torch, config.training.mixed_precision_param))
    restart_peak(mesh.device)
    if compared is None:
        skipped = [Skipped("model.file", "no memory for a whole block on one device")]
        return Entry("parity", False, {"tensors": 0}, count=0, skipped=skipped)
    if compared.problems and config.job.strict:
        raise ShardingError(describe(inspect.getfile(type(model)), compared.problems))
    missed = [Skipped(problem.where, problem.saw) for problem in compared.problems]
    return Entry("parity", True, {"tensors": compared.count}, count=compared.count, missed=missed, key="model.file")


@dataclass
class Compared:
    """The tensors that were compared, and those that differ.

    Attributes:
        count: tensors and gradients that were compared.
        errors: of those, by part and tensor, the relative difference on each rank.
        problems: what differs by more than rounding may do.
    """

    count: int
    errors: Mapping[tuple[str, str], list[float]]
    problems: list[Problem]


def compare(
    model: nn.Module, layers: Mapping[str, LayerPlan], mesh: Mesh, tokens: int, dtype: torch.dtype
) -> Compared | None:
    """Compute one block of each kind, and what is around them, whole and split, and compare.

    Args:
        model: on the meta device, whole; it stays as it is.
        layers: what its layers do on a rank.
        mesh: with more than one tensor-parallel rank.
        tokens: M of a micro-step.
        dtype: that the step computes in.

    Returns:
        What was found, the same on all ranks of the group; None if one of them has no memory for the whole.

    Raises:
        ShardingError: the model's code raises an exception on a rank's part.
    """
    assert mesh.tp_group is not None  # noqa: S101  # there is something to compare
    model, blocks = _of_representatives(model, layers)
    devices = [mesh.device] if mesh.device.type == "cuda" else []
    with torch.random.fork_rng(devices), set_stance("force_eager"):
        whole = _whole_on_all_ranks(model, blocks, mesh, tokens, dtype)
        if whole is None:
            return None
        parts = copy.deepcopy(model)
        apply_tensor_parallel(parts, layers, mesh.tp, mesh.tp_group)
        placed: dict[str, DTensor] = dict(parts.named_parameters())  # type: ignore[arg-type]
        here = _Comparison(whole.trace, mesh)
        values = {p: here.shard(whole.parameters[n].detach(), p.placements[0]) for n, p in placed.items()}
        split = _materialised(parts, values, mesh.device)
        _compute_split(split, blocks, whole, here, inspect.getfile(type(model)))
    for name, parameter in split.named_parameters():
        part = next((b for b in blocks if name.startswith(f"{b}.")), _AROUND)
        exact, own = (_gradient(p) for p in (whole.parameters[name], parameter))
        if not isinstance(placed[name].placements[0], Shard):
            own = own.float()
            dist.all_reduce(own, group=mesh.tp.get_group())
        here.hold(part, f"the gradient of {name.removeprefix(f'{part}.')}", own, exact)
    dims = [n for parameter in whole.parameters.values() for n in parameter.shape]
    return _judged(here, mesh, _bound(whole.eps, max(tokens, *dims)))


def _bound(eps: float, longest: int) -> float:
    """Return how far apart two computations of the same may be, relative to the size of the result.

    Each operator rounds its result, which errs by at most eps/2 of it. A block is a chain of some 64 of them, forward
    and backward, and errors that are independent add in squares: sqrt(64) · eps/2 = 4 eps. Partial sums are rounded
    once more, which is less. Sums are formed in float32 at least, in another order: of n terms that errs by
    sqrt(n) · eps/2 of float32. Both computations err, and what follows a rounding may amplify it: by 2.
    """
    return 2 * (4 * eps + longest**0.5 * torch.finfo(torch.float32).eps / 2)


class _Eps(TorchDispatchMode):
    """The coarsest rounding of what is computed: a model's code may cast to a dtype of its own.

    On GPUs tensor cores may round the factors of float32 products to TF32, whose eps is 2^-10.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.eps = 2.0**-10 if device.type == "cuda" else 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(result):
            if isinstance(x, Tensor) and x.is_floating_point():
                self.eps = max(self.eps, torch.finfo(x.dtype).eps)
        return result


def _of_representatives(model: nn.Module, layers: Mapping[str, LayerPlan]) -> tuple[nn.Module, list[str]]:
    """Return a copy of the model in which the first block of a kind stands in the place of all of them.

    Args:
        model: stays as it is.
        layers: blocks are of a kind only if theirs are alike, too.

    Returns:
        The copy, and the names of the representatives.
    """
    first: dict[object, tuple[int, nn.Module]] = {}
    chosen: list[nn.Module] = []
    for n, block in enumerate(model.layers):  # type: ignore[arg-type]
        prefix = f"layers.{n}."
        below = {name.removeprefix(prefix): layer for name, layer in layers.items() if name.startswith(prefix)}
        chosen.append(first.setdefault((kind_of(block), repr(below)), (n, block))[1])
    other = copy.copy(model)
    other._modules = {**model._modules, "layers": nn.ModuleList(chosen)}
    return copy.deepcopy(other), [f"layers.{n}" for n, _ in first.values()]


def _whole_on_all_ranks(
    model: nn.Module, blocks: list[str], mesh: Mesh, tokens: int, dtype: torch.dtype
) -> "_Whole | None":
    """Compute the whole in float32, in which less is rounding, or else in the step's dtype; None for lack of memory."""
    error: Exception | None = None
    for each in dict.fromkeys((torch.float32, dtype)):
        for parameter in model.parameters():
            parameter.data = parameter.data.to(each)
        whole = error = None
        try:
            whole = _compute_whole(model, blocks, tokens, mesh.device)
        except Exception as caught:  # a kernel of the user's for bfloat16, say, or no memory
            error = caught
        if all(_gathered(whole is not None, mesh)):
            return whole
    if error is not None and not isinstance(error, torch.OutOfMemoryError):
        raise error
    return None


def _materialised(model: nn.Module, values: Mapping[Any, Tensor], device: torch.device) -> nn.Module:
    """Return a copy of a model on the meta device with values of its parameters, and its buffers filled."""
    made: dict[int, Tensor] = {id(p): nn.Parameter(v.clone()) for p, v in values.items()}
    made |= {id(buffer): torch.empty_like(buffer, device=device) for buffer in model.buffers()}
    copied = copy.deepcopy(model, made)
    fill_buffers(copied)
    return copied


@dataclass
class _Seen:
    """A tensor where a block begins or ends.

    Attributes:
        part: which computed it.
        part_of_gradient: which computes its gradient.
        name: of the tensor, in words.
    """

    part: str
    part_of_gradient: str
    name: str
    value: Tensor
    gradient: Tensor | None = None


@dataclass
class _Trace:
    """The tensors that the whole model computed.

    Attributes:
        seen: tensors at the boundaries of blocks, in order, the logits last.
        is_run: for each call of a block whether it was computed, or passed its tokens on because one like it was.
    """

    seen: list[_Seen] = field(default_factory=list)
    is_run: list[bool] = field(default_factory=list)
    known: set[object] = field(default_factory=set)

    def meet(self, part: str, part_of_gradient: str, name: str, x: Tensor) -> Tensor:
        """Take down a tensor, and later its gradient."""
        seen = _Seen(part, part_of_gradient, name, x.detach())
        self.seen.append(seen)

        def keep(gradient: Tensor) -> Tensor:
            seen.gradient = gradient
            return gradient

        return _Boundary.apply(x, x, keep) if x.requires_grad else x

    def runs(self, key: object, passes_on: bool) -> bool:
        """Say whether a block is to be computed: the first that is called like this is."""
        self.is_run.append(key not in self.known or not passes_on)
        self.known.add(key)
        return self.is_run[-1]


@dataclass
class _Whole:
    """The whole model once it is computed: its parameters have gradients, and `eps` is its coarsest rounding."""

    parameters: dict[str, nn.Parameter]
    of_logits: Tensor
    tokens: Tensor
    trace: _Trace
    eps: float


class _Boundary(torch.autograd.Function):
    """Go on with another tensor in forward, and with another gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, instead: Tensor, of_gradient: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.of_gradient = of_gradient
        return instead.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.of_gradient(gradient), None, None


class _OtherCallsError(Exception):
    """On a rank blocks are called otherwise than in one process."""


class _Comparison:
    """This rank's part of what the whole model computed, and how far off what it computes itself is."""

    def __init__(self, trace: _Trace, mesh: Mesh) -> None:
        self.errors: dict[tuple[str, str], float] = {}
        self._trace, self._mesh = trace, mesh
        self._left, self._calls = iter(trace.seen), iter(trace.is_run)

    def meet(self, part: str, part_of_gradient: str, name: str, x: Tensor) -> Tensor:
        """Compare a tensor, and later its gradient, and go on with the exact ones."""
        seen = next(self._left, None)
        if seen is None or seen.name != name:
            raise _OtherCallsError
        exact = self.hold(part, name, x, seen.value)
        if not x.requires_grad or exact is None:
            return x
        if exact.shape == seen.value.shape:  # whole: each rank has a part of its gradient
            return _Boundary.apply(x, exact, lambda g: self._of_whole(seen, g))
        return _Boundary.apply(x, exact, lambda g: self._of_part(seen, g))

    def runs(self, key: object, passes_on: bool) -> bool:
        """Say whether the whole model computed this block here."""
        is_run = next(self._calls, None)
        if is_run is None or not (is_run or passes_on):
            raise _OtherCallsError
        return is_run

    def end(self) -> None:
        """Raise if blocks were called less often than in one process."""
        if next(self._calls, None) is not None:
            raise _OtherCallsError

    def shard(self, whole: Tensor, placement: object) -> Tensor:
        """Return this rank's part of a tensor."""
        dim = placement.dim if isinstance(placement, Shard) else None
        return whole if dim is None else whole.chunk(self._mesh.tp_size, dim)[self._mesh.tp.get_local_rank()]

    def hold(self, part: str, name: str, own: Tensor, whole: Tensor) -> Tensor | None:
        """Compare a tensor with this rank's part of the whole one, which is found by its shape, and return that."""
        dims = [d for d, n in enumerate(whole.shape) if own.ndim == whole.ndim and own.shape[d] != n]
        exact, own = self.shard(whole, Shard(dims[0]) if dims else None), own.detach()
        key = part, name
        if own.shape != exact.shape:
            self.errors[key] = float("inf")
            return None
        self.errors[key] = max(self.errors.get(key, 0.0), _relative(own, exact, whole))
        return exact

    def _of_part(self, seen: _Seen, gradient: Tensor) -> Tensor:
        exact = self.hold(seen.part_of_gradient, f"the gradient of {seen.name}", gradient, _known(seen, gradient))
        return gradient if exact is None else exact

    def _of_whole(self, seen: _Seen, gradient: Tensor) -> Tensor:
        total = gradient.float()
        dist.all_reduce(total, group=self._mesh.tp.get_group())
        self.hold(seen.part_of_gradient, f"the gradient of {seen.name}", total, _known(seen, gradient))
        return gradient


def _known(seen: _Seen, like: Tensor) -> Tensor:
    return torch.zeros_like(seen.value) if seen.gradient is None else seen.gradient


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _relative(own: Tensor, exact: Tensor, whole: Tensor) -> float:
    """Return the root mean square of a difference, relative to that of the whole tensor."""
    equal = (own == exact) | (own.isnan() & exact.isnan())  # infinite ones, too, as in a mask
    if bool(equal.all()):
        return 0.0
    difference = torch.where(equal, 0.0, own.double() - exact.double())
    size = torch.where(whole.isfinite(), whole, 0).double()
    return float(difference.square().mean().sqrt() / size.square().mean().sqrt())


def _compute_whole(model: nn.Module, blocks: list[str], tokens: int, device: torch.device) -> _Whole:
    """Compute forward and backward with random weights, whose size keeps that of what they multiply."""
    seed, values = torch.Generator(device).manual_seed(0), {}
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, device=device, generator=seed)
        drawn = drawn / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 1 + drawn / 4
        values[parameter] = drawn.to(parameter.dtype)
    whole = _materialised(model, values, device)
    vocabulary = len(whole.tok_embeddings.weight)  # type: ignore[arg-type]
    ids = torch.randint(vocabulary, (tokens,), device=device, generator=seed)
    trace = _Trace()
    with _Eps(device) as rounding:
        logits = _forward(whole, blocks, ids, trace)
    trace.seen.append(_Seen(_AROUND, _AROUND, "the logits", logits.detach()))
    of_logits = torch.randn(logits.shape, device=device, generator=seed).to(logits.dtype) / tokens
    logits.backward(of_logits)
    return _Whole(dict(whole.named_parameters()), of_logits, ids, trace, rounding.eps)


def _compute_split(model: nn.Module, blocks: list[str], whole: _Whole, here: _Comparison, file: str) -> None:
    """Compute forward and backward on this rank's part, and compare on the way.

    Raises:
        ShardingError: it raised an exception.
    """
    try:
        logits = _forward(model, blocks, whole.tokens, here)
        here.end()
        if here.hold(_AROUND, "the logits", logits, whole.trace.seen[-1].value) is not None:
            logits.backward(here.shard(whole.of_logits, Shard(1)))
    except _OtherCallsError:
        here.errors[_AROUND, "the calls of the blocks"] = float("inf")
    except (TitanliteError, *OF_THE_MACHINE):
        raise
    except Exception as error:
        want = "code that runs on the part of each tensor that a rank has, as it does on the whole"
        raise ShardingError(describe(file, [mistake(error, file, want, _FIX)])) from error


def _forward(model: nn.Module, blocks: list[str], tokens: Tensor, met: _Trace | _Comparison) -> Tensor:
    """Run a model with its blocks watched."""
    torch.manual_seed(0)  # on every rank, and for both, what a model draws is the same
    for name in blocks:
        block = model.get_submodule(name)
        vars(block)["forward"] = _watched(name, block.forward, met)
    return model(tokens)  # type: ignore[no-any-return]


def _watched(name: str, forward: Callable[..., Any], met: _Trace | _Comparison) -> Callable[..., Any]:
    """Return a block's forward that compares what it is given and what it returns."""

    def called(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = pytree.tree_flatten((args, kwargs))
        given = f"what {name} is given"
        leaves = [met.meet(_AROUND, name, given, x) if isinstance(x, Tensor) else x for x in leaves]
        tokens = next((x for x in leaves if isinstance(x, Tensor) and x.requires_grad), None)
        key = name, repr([(x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves]), torch.is_grad_enabled()
        if not met.runs(key, tokens is not None and key in passing):
            return tokens
        args, kwargs = pytree.tree_unflatten(leaves, tree)
        result = forward(*args, **kwargs)
        if isinstance(result, Tensor) and tokens is not None and result.shape == tokens.shape:
            passing.add(key)
        returned = f"what {name} returns"
        return pytree.tree_map_only(Tensor, lambda x: met.meet(name, _AROUND, returned, x), result)

    passing: set[object] = set()  # calls whose result is like their tokens, so that these may stand for it
    return called


def _gathered(value: Any, mesh: Mesh) -> list[Any]:
    """Return what each tensor-parallel rank has."""
    found: list[Any] = [None] * mesh.tp_size
    dist.all_gather_object(found, value, group=mesh.tp.get_group())
    return found


def _judged(here: _Comparison, mesh: Mesh, bound: float) -> Compared:
    """Gather the differences of all ranks, and say of each part which of its tensors differ."""
    of_ranks = _gathered(here.errors, mesh)
    names = list(dict.fromkeys(key for errors in of_ranks for key in errors))
    errors = {key: [own.get(key, 0.0) for own in of_ranks] for key in names}
    problems: dict[str, list[Problem]] = {}
    for (part, name), of_rank in errors.items():
        wrong = [rank for rank, error in enumerate(of_rank) if not error <= bound]
        if wrong:
            problems.setdefault(part, []).append(_problem(part, name, of_rank, wrong, bound))
    return Compared(len(errors), errors, list(_first_of_each(problems)))


def _first_of_each(problems: Mapping[str, list[Problem]]) -> Iterator[Problem]:
    """Yield one problem of each part: what is computed later differs for the same reason."""
    for first, *others in problems.values():
        more = f"; and {len(others)} more of its tensors" if others else ""
        yield Problem(first.where, first.saw + more, first.want, first.fix)


def _problem(part: str, name: str, of_rank: list[float], wrong: list[int], bound: float) -> Problem:
    several = "s" if len(wrong) > 1 else ""
    ranks = f"tensor-parallel rank{several} {', '.join(map(str, wrong))} of {len(of_rank)}"
    worst = max(of_rank[rank] for rank in wrong)
    by = "of another shape" if worst == float("inf") else f"differs by {worst:.2g} of its size"
    saw = f"{by} on {ranks}"
    want = f"what one process computes, but for rounding, {bound:.1g} of its size"
    return Problem(f"{part}: {name}", saw, want, _FIX)
