"""Tensor-parallel layers: parameters are DTensors, activations plain local tensors, collectives explicit.

Gathered weights are plain tensors, too (`fsdp.finalize`).

Tokens are split over the ranks between the matmuls (sequence parallelism) and heads or features within them:

    residual stream, norms        [M/tp, D]
    wqkv, w13, output   gather →  [M, D] @ [N/tp, D].T            column-parallel
    wo, w2                        [M, K/tp] @ [D, K/tp].T → scatter   row-parallel
    router, experts               [M/tp, D]; `expert.py` shares out the experts' weights

Every rank holds the full weight of a norm, but applies it only to its own tokens, so the gradient is a partial sum
(`replicated_gradients.py`). The same is true of a router, and of a bias that is added to scattered tokens.

Nothing is computed on a DTensor inside a block: its implicit redistributions would slow down steps unnoticed.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from titanlite.device import Device
from titanlite.errors import Problem, ShardingError, describe
from titanlite.kernels.collectives import Group, scatter_tokens
from titanlite.kernels.layer_norm import layer_norm
from titanlite.kernels.linear import FUSED_LINEAR, FusedMatmul, linear
from titanlite.kernels.lowering import lowered
from titanlite.kernels.routing import router_logits
from titanlite.models.experts import MixtureOfExperts, Router
from titanlite.models.layers import Embedding, LayerNorm, Linear, RMSNorm, add_bias, runs_forward_of
from titanlite.receipt import Entry, Skipped


@dataclass(frozen=True)
class LayerPlan:
    """Describes how one module with parameters is split over tensor-parallel ranks."""

    placements: Mapping[str, Placement]  # of its parameters, by their names in the module
    gathers: bool = False  # gathers tokens before it computes; backward reduces and scatters their gradient
    scatters: bool = False  # reduces and scatters tokens after it has computed; backward gathers their gradient
    takes_rows: bool = False  # takes this rank's tokens out of an input that has all tokens


def _rank_part(weight: Any) -> Any:
    """Return this rank's part of a tensor-parallel parameter; None for a bias that is None."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


class ParallelLinear(Linear):
    """A `Linear` that is split over the ranks of a group."""

    group: Group
    split_operands: ClassVar[tuple[str, ...]]  # operands of the unfused matmul that are split over the ranks
    asynchronous: bool  # whether to fuse the layer's collectives into its matmuls

    @property
    def unfused(self) -> str | None:
        """Return the reason why collectives cannot be fused with this layer's arithmetic, or None."""
        return None if self.matmul is F.linear else getattr(self.matmul, "unfused", "has an arithmetic of its own")

    @property
    def fused(self) -> FusedMatmul | None:
        """Return the operators in which this layer's collectives and matmuls are fused; None if it uses none."""
        if not self.asynchronous or self.unfused is not None:
            return None
        return FUSED_LINEAR if self.matmul is F.linear else self.matmul.fused  # type: ignore[attr-defined]


class ColumnParallelLinear(ParallelLinear):
    """Holds some of the output features: gathers tokens, then multiplies."""

    split_operands = ("weight", "grad_output")

    def forward(self, x: Tensor) -> Tensor:
        """Gather tokens and multiply: [M/tp, K] → [M, N/tp]."""
        y = linear(x, _rank_part(self.weight), gather=self.group, matmul=self.matmul, fused=self.fused)
        return add_bias(y, _rank_part(self.bias))


class RowParallelLinear(ParallelLinear):
    """Holds some of the input features: multiplies, then sums over ranks and scatters tokens."""

    split_operands = ("input", "weight")

    def forward(self, x: Tensor) -> Tensor:
        """Multiply, sum over ranks and scatter tokens: [M, K/tp] → [M/tp, N]."""
        y = linear(x, _rank_part(self.weight), scatter=self.group, matmul=self.matmul, fused=self.fused)
        return add_bias(y, _rank_part(self.bias))


class SequenceParallelRMSNorm(RMSNorm):
    """An `RMSNorm` over this rank's tokens or heads."""

    def scale(self) -> Tensor:
        """Return the scale [D]."""
        return _rank_part(self.weight)


class SequenceParallelLayerNorm(LayerNorm):
    """A `LayerNorm` over this rank's tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise this rank's tokens: [M/tp, D] → [M/tp, D]."""
        return layer_norm(x, _rank_part(self.weight), _rank_part(self.bias), self.eps)


class SequenceParallelEmbedding(Embedding):
    """An `Embedding`, such as for positions, that every rank holds in full and in which it looks up its own tokens."""

    group: Group

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up this rank's tokens: [M] int64 → [M/tp, D]."""
        return F.embedding(tokens.chunk(self.group.size)[self.group.rank], _rank_part(self.weight))


class VocabParallelEmbedding(Embedding):
    """An `Embedding` whose rows, the vocabulary, are split over ranks; each rank receives its own tokens."""

    group: Group

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up all tokens in this rank's rows, sum over ranks and scatter: [M] int64 → [M/tp, D]."""
        weight = _rank_part(self.weight)  # [V/tp, D]
        local = tokens - self.group.rank * weight.shape[0]
        owned = (local >= 0) & (local < weight.shape[0])
        rows = F.embedding(torch.where(owned, local, 0), weight) * owned[:, None]
        return scatter_tokens(rows, self.group)


class ReplicatedLinear(Linear):
    """A `Linear` that every rank holds in full, and applies to its own tokens or heads."""

    group: Group
    split_operands: ClassVar[tuple[str, ...]] = ("input", "grad_output")

    def forward(self, x: Tensor) -> Tensor:
        """Multiply this rank's tokens, [M/tp, K] → [M/tp, N], or its heads, [M, K/tp] → [M, N/tp]."""
        return add_bias(linear(x, _rank_part(self.weight), matmul=self.matmul), _rank_part(self.bias))


class SequenceParallelRouter(Router):
    """A `Router` over this rank's tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of this rank's tokens: [M/tp, D] → [M/tp, E] float32."""
        return router_logits(x, _rank_part(self.weight))


_LAYERS: dict[tuple[type[nn.Module], bool, bool, bool], type[nn.Module]] = {  # gathers, scatters, takes_rows
    (RMSNorm, False, False, False): SequenceParallelRMSNorm,
    (LayerNorm, False, False, False): SequenceParallelLayerNorm,
    (Router, False, False, False): SequenceParallelRouter,
    (Embedding, False, True, False): VocabParallelEmbedding,
    (Embedding, False, False, True): SequenceParallelEmbedding,
    (Linear, True, False, False): ColumnParallelLinear,
    (Linear, False, True, False): RowParallelLinear,
    (Linear, False, False, False): ReplicatedLinear,
}


def _layer_class(module: nn.Module, plan: LayerPlan) -> type[nn.Module] | None:
    """Return the tensor-parallel class of a module with a plan; None if there is none, or a user changes `forward`."""
    if not runs_forward_of(module, type(module)):
        return None
    return _LAYERS.get((type(module), plan.gathers, plan.scatters, plan.takes_rows))


def apply_tensor_parallel(
    model: nn.Module, plan: Mapping[str, LayerPlan], mesh: DeviceMesh, group: Group, asynchronous: bool = False
) -> Entry:
    """Make each layer of a model a tensor-parallel one, in place; return the receipt's entry.

    Args:
        model: on the meta device; its layers are those of `titanlite.models.layers`.
        plan: from `plan_layers`; the same on all ranks.
        mesh, group: the ranks, 1-D.
        asynchronous: fuse the collectives of linear layers into their matmuls.

    Raises:
        ShardingError: a layer has parameters that the plan does not place, or there is no layer for its plan; or ranks
            have made different plans.
    """
    _require_one_plan(plan, mesh)
    placed: dict[nn.Parameter, nn.Parameter] = {}  # tied weights remain one parameter
    mixtures = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    of_experts = {part for mixture in mixtures for part in (mixture.w13, mixture.w2)}  # see `expert.py`
    for mixture in mixtures:
        mixture.group = group
    for name, module in model.named_modules():
        parameters = {own: p for own, p in module._parameters.items() if p is not None}
        if not parameters or module in of_experts:
            continue
        layer = plan.get(name)
        parallel = layer and _layer_class(module, layer)
        if layer is None or parallel is None or layer.placements.keys() != parameters.keys():
            want = f"a layer of titanlite.models.layers that does what is planned: {layer or 'nothing'}"
            problem = Problem(name, type(module).__name__, want, "that layer, or tensor_parallel_degree = 1")
            raise ShardingError(describe("tensor parallelism", [problem]))
        for own, parameter in parameters.items():
            if parameter not in placed:
                placed[parameter] = nn.Parameter(distribute_tensor(parameter.data, mesh, [layer.placements[own]]))
            setattr(module, own, placed[parameter])
        module.__class__ = parallel  # as FSDP2 does: the module object keeps its name and attributes
        module.group = group  # type: ignore[assignment]
        if isinstance(module, ParallelLinear):
            module.asynchronous = asynchronous
    layers = [name for name, module in model.named_modules() if isinstance(module, Linear | Embedding)]
    why = "annotated to be replicated on every rank"
    whole = tuple(Skipped(name, why) for name in layers if plan[name].placements["weight"].is_replicate())
    split, key = len(layers) - len(whole), "parallelism.tensor_parallel_degree"
    return Entry("tensor_parallel", mesh.size(), {"layers": split}, count=split, skipped=whole, key=key)


def fused_layers_entry(model: nn.Module, device: Device) -> Entry:
    """Return the receipt's entry of layers with fused collectives, after a step; on GPUs it counts calls by shape."""
    skipped = [
        Skipped(name, "no matmul: an embedding looks tokens up")
        for name, module in model.named_modules()
        if isinstance(module, VocabParallelEmbedding)
    ]
    layers = {name: module for name, module in model.named_modules() if isinstance(module, ParallelLinear)}
    plain = [name for name, layer in layers.items() if not layer.asynchronous]
    missed = [Skipped(name, "its collectives were not fused with its matmuls") for name in plain]
    skipped += [Skipped(name, m.unfused) for name, m in layers.items() if m.unfused and m.asynchronous]
    count = sum(layer.fused is not None for layer in layers.values())
    applied: dict[str, object] = {"layers": count, "lowering": "definition"}
    if device.is_gpu:
        each = {f"{call.op} {call.shapes}": n for call, n in lowered.items() if call.reason is None}
        fused = sum(each.values())
        applied = {"layers": count, "fused": fused, "plain": lowered.total() - fused, "lowering": "fused kernels"}
        applied["each"] = each
        count = len(each)  # of shapes: `missed` lists shapes, too
    for op, shapes, why, expected in lowered:
        if why:
            (skipped if expected else missed).append(Skipped(f"{op} {shapes}", why))
    key, cases = "parallelism.async_tensor_parallel", {"skipped": tuple(skipped), "missed": tuple(missed)}
    return Entry("async_tensor_parallel", True, applied, count=count, key=key, **cases)


def _require_one_plan(plan: Mapping[str, LayerPlan], mesh: DeviceMesh) -> None:
    """Raise ShardingError on all ranks if their plans differ: they would wait for each other in vain."""
    mine = hashlib.sha256(repr(sorted(plan.items())).encode()).hexdigest()
    plans: list[str] = [""] * mesh.size()
    dist.all_gather_object(plans, mine, group=mesh.get_group())
    different = [rank for rank, other in enumerate(plans) if other != plans[0]]
    if different:
        where, want = f"tensor-parallel rank {different[0]}", "the sharding plan of rank 0; this rank has another"
        problem = Problem(where, "", want, "run the same version, config and model file on every host")
        raise ShardingError(describe("tensor parallelism", [problem]))
