"""Initial weights that depend on the seed alone, never on the layout; and buffers, which the model computes.

Each part of each parameter has a generator of its own, seeded with the run's seed and the part's name. Every rank draws
the whole part on its device and keeps its slice. That draws more numbers than needed, at memory speed: the largest
model, 405B, takes about a second on one GPU, and no seed checkpoint has to be written, moved and loaded.
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
    """Let a model compute its buffers, and see that it does: what it leaves out would be whatever memory held before.

    Args:
        model: just materialised.

    Raises:
        ConfigError: a buffer is not filled; of one-byte numbers, which have none to spare, it cannot be seen.
    """
    for buffer in model.buffers():
        if (mark := _mark(buffer.dtype)) is not None:
            buffer.fill_(mark)
    model.fill_buffers()  # type: ignore[operator]
    left = [name for name, x in model.named_buffers() if _holds(x, _mark(x.dtype))]
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        want = "values for every buffer: a tensor that two modules register is two, once it is off the meta device"
        problem = Problem(f"{left[0]}{more}", "not filled", want, "fill it in fill_buffers; or leave it out")
        raise ConfigError(describe("buffers", [problem]))


def _mark(dtype: torch.dtype) -> float | None:
    """A number that no buffer means to hold."""
    if dtype.itemsize == 1:
        return None
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min


def _holds(x: Tensor, mark: float | None) -> bool:
    if mark is None:
        return False
    return bool((x.isnan() if x.is_floating_point() or x.is_complex() else x == mark).any())


def initialise(model: nn.Module, seed: int) -> None:
    """Fill every parameter of a materialised, sharded model.

    Args:
        model: its parameters may be DTensors.
        seed: `training.seed`.
    """
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
    """Move each weight up or down by a share of itself, the same under every layout.

    Args:
        parameters: by name; may be DTensors.
        seed: `training.nudge`.
        rounding: the share.
    """
    for name, parameter in parameters.items():
        with torch.no_grad():
            local = local_data(parameter)  # type: ignore[arg-type]
            signs = local_slice(_normal(name, parameter.shape, 1.0, local.device, seed).sign(), parameter)
            local.add_(local * signs * rounding)


def _draw(name: str, own: str, module: nn.Module, shape: torch.Size, device: torch.device, seed: int) -> Tensor:
    """The whole parameter `own` of the module `name`, float32."""
    if own == "bias" and isinstance(module, LayerNorm | Projection):
        return torch.zeros(shape, device=device)
    if isinstance(module, RMSNorm | LayerNorm):
        return torch.ones(shape, device=device)
    if isinstance(module, Embedding):
        return _normal(name, shape, module.std, device, seed)
    assert isinstance(module, Projection)  # noqa: S101  # `models/own_model.py` has refused all others
    parent, _, _ = name.rpartition(".")
    rows = {part: (module.groups * n, shape[1]) for part, n in module.parts.items()}
    return module.fuse({p: _normal(f"{parent}.{p}", size, module.std, device, seed) for p, size in rows.items()})


def _normal(name: str, shape: tuple[int, ...], std: float, device: torch.device, seed: int) -> Tensor:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape, device=device).normal_(0, std, generator=generator)


def local_slice(full: Tensor, parameter: Tensor, place: Sequence[int] | None = None) -> Tensor:
    """A rank's part of a whole tensor that is laid out like `parameter`.

    Args:
        full: the shape of `parameter`.
        parameter: a plain tensor or a DTensor.
        place: of the rank in the mesh of the parameter; None: this one's.

    Returns:
        A view of `full`.
    """
    if not isinstance(parameter, DTensor):
        return full
    mesh = parameter.device_mesh
    coordinate = place or mesh.get_coordinate() or []
    # FSDP splits what tensor parallelism left: the innermost axis comes first.
    for axis in reversed(range(mesh.ndim)):
        dim = getattr(parameter.placements[axis], "dim", None)
        if dim is not None:
            chunks = full.chunk(mesh.size(axis), dim)
            at = coordinate[axis]
            full = chunks[at] if at < len(chunks) else full.narrow(dim, 0, 0)
    return full
