"""Measure float8 in each layer of a model in training: values that saturate or become zero, and noise of matmuls.

An additional forward pass runs without gradients and compiler. Each converted layer multiplies in float8, and again in
high precision. Its collectives are not fused, so that the operands can be read, and a `Float8FeedForward` runs as two
layers. Afterwards the model is as before.

Only matmuls of forward are measured. A cast that uses the maximum of its own tensor never saturates; values exceed the
range only if the scale comes from another tensor.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite.config.recipe_schema import Granularity
from titanlite.float8.cast import Cast, cast
from titanlite.float8.convert import Float8FeedForward
from titanlite.float8.matmul import Float8Matmul
from titanlite.float8.weight import GatheredWeight, local_data
from titanlite.kernels.block_scaled_matmul import dequantise
from titanlite.kernels.collectives import Group, all_gather
from titanlite.models.layers import Linear, Sequences
from titanlite.models.llama3 import FeedForward

_ALL = slice(None)  # all rows


class _Look:
    """A replacement for a layer's matmul that also measures the operands and the result.

    Args:
        matmul, parameter: the matmul to replace, and the layer's weight, sharded over `mesh`, the mesh of FSDP.
        is_counted: [M] bool, the tokens to measure; None: all. Layers with another number of rows measure all.

    Attributes:
        sums: [8] float64, sums over all calls: elements of the input that saturate, elements that become zero, and all
            elements; the same three counts of the weight; power of the exact result, and of the noise.
    """

    def __init__(
        self, matmul: Float8Matmul, parameter: nn.Parameter, mesh: DeviceMesh, is_counted: Tensor | None = None
    ) -> None:
        self.matmul, self.parameter, self.mesh, self.is_counted = matmul, parameter, mesh, is_counted
        self.sums = torch.zeros(8, dtype=torch.float64, device=parameter.device)

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return `x [M, K] @ weight [N, K].T` [M, N] in float8, and add what is measured to `sums`."""
        y, recipe = self.matmul(x, weight), self.matmul.recipe
        exact = _gather_weight(self.parameter, self.mesh) if isinstance(weight, GatheredWeight) else weight
        truth = F.linear(x, exact.to(x.dtype)).float()
        over = self.matmul.over
        rows = _ALL if self.is_counted is None or len(x) != len(self.is_counted) else self.is_counted
        operands = ((x, x, recipe.input, over.input, rows), (exact, weight, recipe.weight, over.weight, _ALL))
        counts = [
            n
            for given, used, how, ranks, of in operands
            for n in _count(given, _operand(used, how.output, how.dtype, recipe.scale_rounding, ranks), of)
        ]
        power = [torch.linalg.vector_norm(part[rows]).double().square() for part in (truth, truth - y)]
        self.sums += torch.stack([n.double() for n in (*counts, *power)])
        return y


def _operand(x: Tensor, of: Granularity, dtype: str, rounding: str, over: Group | None) -> Cast:
    """Cast an operand as `cast` does, unless FSDP has already gathered it in float8."""
    return Cast(x.qdata, x.scale_inv) if isinstance(x, GatheredWeight) else cast(x, of, dtype, rounding, over)


def _count(x: Tensor, cast: Cast, rows: Tensor | slice = _ALL) -> tuple[Tensor, Tensor, Tensor]:
    """Count the elements in some rows that exceed the range after rounding, that become zero, and all elements."""
    info = torch.finfo(cast.qdata.dtype)
    step = info.eps * 2 ** math.floor(math.log2(info.max))  # distance of the two largest numbers
    scaled = x.abs() / dequantise(torch.ones_like(x), cast.scale_inv)
    beyond = scaled >= info.max + step / 2
    flushed = (cast.qdata.float() == 0) & (x != 0)
    return beyond[rows].sum(), flushed[rows].sum(), torch.tensor(x[rows].numel(), device=x.device)


def _gather_weight(parameter: nn.Parameter, mesh: DeviceMesh) -> Tensor:
    """Gather a weight, sharded by FSDP, in high precision; return this tensor-parallel rank's part [N, K]."""
    group = mesh.get_group(mesh.ndim - 1)
    return all_gather(local_data(parameter), Group(group.group_name, group.size(), group.rank()))


def measurable(model: nn.Module) -> dict[str, Linear]:
    """Return the layers whose output is computed in float8, by name."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    return {
        name: layer
        for name, layer in layers.items()
        if isinstance(layer.matmul, Float8Matmul) and layer.matmul.recipe.input.output != "none"
    }


@contextmanager
def _looking(model: nn.Module, mesh: DeviceMesh, is_counted: Tensor | None) -> Iterator[dict[str, _Look]]:
    """Within the context, replace each layer's matmul by a `_Look` and run modules uncompiled. Yields name → look."""
    layers = measurable(model)
    matmuls = {name: layer.matmul for name, layer in layers.items()}
    compiled = {module: module._compiled_call_impl for module in model.modules() if module._compiled_call_impl}
    joined = [module for module in model.modules() if type(module) is Float8FeedForward]
    given = mesh, is_counted
    looks = {name: _Look(layer.matmul, layer.weight, *given) for name, layer in layers.items()}  # type: ignore[arg-type]
    try:
        for name, layer in layers.items():
            layer.matmul = looks[name]
        for module in compiled:
            module._compiled_call_impl = None
        for module in joined:
            module.__class__ = FeedForward  # type: ignore[assignment]
        yield looks
    finally:
        for module in joined:
            module.__class__ = Float8FeedForward
        for name, layer in layers.items():
            layer.matmul = matmuls[name]
        for module, call in compiled.items():
            module._compiled_call_impl = call


@torch.no_grad()
def float8_numerics(
    model: nn.Module, tokens: Tensor, mesh: DeviceMesh, sequences: Sequences, is_counted: Tensor | None = None
) -> dict[str, float]:
    """Run a model forward, and measure each layer whose output is computed in float8. Collective.

    Args:
        model: the model in training.
        tokens: [M] int64, this rank's tokens.
        mesh: the mesh of FSDP; its last axis shards weights.
        sequences: the sequences that the tokens form.
        is_counted: [M] bool, the tokens to measure (`data/document_starts.py`); None: all.

    Returns:
        For each layer, over all ranks: `float8_{input,weight}_saturated.<layer>`, the share of elements that exceed the
        range of float8; `float8_{input,weight}_flushed.<layer>`, the share that became zero;
        `float8_output_sqnr_db.<layer>`, the signal-to-noise ratio of the matmul in decibels. Its reference is the
        matmul of the uncast operands in the compute dtype.
    """
    with _looking(model, mesh, is_counted) as looks:
        if not looks:
            return {}
        with torch.random.fork_rng([tokens.device] if tokens.is_cuda else []):  # keeps the dropout of training
            model(tokens, sequences=sequences)
    totals = torch.stack([look.sums for look in looks.values()])  # [layers, 8]
    dist.all_reduce(totals)
    found: dict[str, float] = {}
    for name, sums in zip(looks, totals.tolist(), strict=True):
        if not sums[2]:
            continue  # forward does not call the layer, or no token is counted
        for what, (saturated, flushed, n) in (("input", sums[:3]), ("weight", sums[3:6])):
            found[f"float8_{what}_saturated.{name}"] = saturated / n
            found[f"float8_{what}_flushed.{name}"] = flushed / n
        signal, noise = sums[6:]
        found[f"float8_output_sqnr_db.{name}"] = 10 * math.log10(signal / noise) if signal and noise else math.inf
    return found
