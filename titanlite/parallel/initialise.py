"""Initial weights, which depend on the seed but never on the layout; and buffers, which the model computes.

Each part of a fused parameter has its own generator, seeded with the run's seed and the part's name. Every rank draws
unsplit parts on its device and keeps its slices. For 405B this takes about a second on one GPU, without a seed
checkpoint.
"""

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite.errors import ConfigError, Problem, describe
from titanlite.float8.weight import local_data
from titanlite.models.layers import Embedding, LayerNorm, Projection, RMSNorm


def fill_buffers(model: nn.Module) -> None:
    """Call `fill_buffers` of a newly materialised model, and check that it fills every buffer.

    Raises:
        ConfigError: a buffer was not filled. Buffers of one-byte dtypes are not checked: they may hold any number.
    """
    for buffer in model.buffers():
        if (mark := _mark(buffer.dtype)) is not None:
            buffer.fill_(mark)
    model.fill_buffers()  # type: ignore[operator]
    left = [name for name, x in model.named_buffers() if _has_mark(x)]
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        want = "values for every buffer: a tensor that two modules register is two, once it is off the meta device"
        problem = Problem(f"{left[0]}{more}", "not filled", want, "fill it in fill_buffers; or leave it out")
        raise ConfigError(describe("buffers", [problem]))


def _mark(dtype: torch.dtype) -> float | None:
    """Return a number that no buffer of a dtype holds on purpose; None for one-byte dtypes."""
    if dtype.itemsize == 1:
        return None
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min


def _has_mark(x: Tensor) -> bool:
    mark = _mark(x.dtype)
    return mark is not None and bool((x.isnan() if mark != mark else x == mark).any())


def initialise(model: nn.Module, seed: int) -> None:
    """Fill every parameter of a materialised, sharded model from `training.seed`."""
    done: set[int] = set()  # tied weights are drawn once
    for name, module in model.named_modules():
        for own, parameter in module._parameters.items():
            if parameter is None or id(parameter) in done:
                continue
            done.add(id(parameter))
            with torch.no_grad():
                local = local_data(parameter)
                local.copy_(local_slice(_draw(name, own, module, parameter.shape, local.device, seed), parameter))


def nudge(parameters: Mapping[str, Tensor], seed: int, rounding: float) -> None:
    """Multiply each weight by 1 ± rounding. The random signs are equal in every layout; `seed` is `training.nudge`."""
    for name, parameter in parameters.items():
        with torch.no_grad():
            local = local_data(parameter)  # type: ignore[arg-type]
            signs = local_slice(_normal(name, parameter.shape, 1.0, local.device, seed).sign(), parameter)
            local.add_(local * signs * rounding)


def _draw(name: str, own: str, module: nn.Module, shape: torch.Size, device: torch.device, seed: int) -> Tensor:
    """Draw the unsplit parameter `own` of the module called `name`, in float32."""
    if own == "bias" and isinstance(module, LayerNorm | Projection):
        return torch.zeros(shape, device=device)
    if isinstance(module, RMSNorm | LayerNorm):
        return torch.ones(shape, device=device)
    if isinstance(module, Embedding):
        return _normal(name, shape, module.std, device, seed)
    assert isinstance(module, Projection)  # noqa: S101  # `models/own_model.py` refuses other classes
    parent, _, _ = name.rpartition(".")
    rows = {part: (module.groups * n, shape[1]) for part, n in module.parts.items()}
    return module.fuse({p: _normal(f"{parent}.{p}", size, module.std, device, seed) for p, size in rows.items()})


def _normal(name: str, shape: tuple[int, ...], std: float, device: torch.device, seed: int) -> Tensor:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape, device=device).normal_(0, std, generator=generator)


def local_slice(full: Tensor, parameter: Tensor, place: Sequence[int] | None = None) -> Tensor:
    """Return a view of a rank's part of an unsplit tensor that is laid out like `parameter`, plain or a DTensor.

    `place`: coordinates of the rank in the parameter's mesh; None: this rank's.
    """
    if not isinstance(parameter, DTensor):
        return full
    mesh = parameter.device_mesh
    coordinate = place or mesh.get_coordinate() or []
    # FSDP splits the parts that tensor parallelism makes, so the innermost axis comes first.
    for axis in reversed(range(mesh.ndim)):
        dim = getattr(parameter.placements[axis], "dim", None)
        if dim is not None:
            chunks = full.chunk(mesh.size(axis), dim)
            at = coordinate[axis]
            full = chunks[at] if at < len(chunks) else full.narrow(dim, 0, 0)
    return full
