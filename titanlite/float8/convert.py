"""Apply a float8 recipe (`recipes/float8/*.toml`) to a model: replace matmuls of linear layers by those of `matmul.py`.

Layers compute on local tensors. Under tensor parallelism each rank computes its own scales, which needs no reduction. A
recipe with `reduce_amax` reduces the maximum of every split operand over the ranks, and so gives the bits of one
device. A fused projection is one operand: under tensorwise scaling `wq`, `wk` and `wv` share a scale.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titanlite.config.build import show
from titanlite.config.recipe_schema import MATMULS, Float8Recipe
from titanlite.device import Device
from titanlite.errors import Problem, RecipeError, describe
from titanlite.float8.cast import ALL_HERE, DTYPES, AmaxGroups
from titanlite.float8.experts import Float8Experts
from titanlite.float8.fused import feed_forward
from titanlite.float8.matmul import Float8Matmul, Lowering
from titanlite.float8.scope import joins_feed_forward, left_alone, obstacle_of_experts, require_equal_shards
from titanlite.float8.weight import Casting, WeightShard, agree_on_scales, as_laid_out, local_data
from titanlite.kernels.collectives import Group
from titanlite.kernels.experts import PlainExperts
from titanlite.models.experts import MixtureOfExperts
from titanlite.models.layers import Linear, Projection
from titanlite.models.llama3 import FeedForward


@dataclass(frozen=True)
class Conversion:
    """The outcome of a conversion to float8, by names of layers."""

    lowering: Lowering
    converted: tuple[str, ...]
    skipped: dict[str, str]  # name → reason
    joined: tuple[str, ...] = ()  # feed-forwards that became a `Float8FeedForward`
    tied: tuple[str, ...] = ()  # converted layers that are tied to the embedding, so gathered in high precision
    maxima: tuple[str, ...] = ()  # operand of each reduction of a maximum over tensor-parallel ranks, per micro-step
    gathered: Mapping[str, int] = field(default_factory=dict[str, int])  # name → number of ranks FSDP gathers from


class Float8FeedForward(FeedForward):
    """A `FeedForward` whose gated activations, the input of the second matmul, exist only in float8."""

    group: Group | None  # the tensor-parallel ranks, or None
    recipe: Float8Recipe

    def forward(self, x: Tensor) -> Tensor:
        """Apply the feed-forward to x [M/tp, D] (M tokens, tp tensor-parallel ranks, D model width): [M/tp, D]."""
        w13, w2 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w13.weight, self.w2.weight))
        return feed_forward(x, w13, w2, self.group, self.recipe)


def apply_float8(
    model: nn.Module,
    recipe: Float8Recipe,
    filter_fqns: tuple[str, ...],
    device: Device,
    tokens: int,
    shards: int,
    expert_shards: int | None = None,
) -> Conversion:
    """Convert each eligible linear layer to a float8 recipe, in place.

    Args:
        model: the model after tensor parallelism is applied, before FSDP.
        recipe: the float8 recipe.
        filter_fqns: layers whose name contains one of these are skipped.
        device: the device to train on, which determines the lowering.
        tokens: number of tokens of a micro-step.
        shards: number of ranks over which FSDP splits each weight.
        expert_shards: number of ranks over which FSDP splits weights of experts; None: `shards`.

    Raises:
        RecipeError: a layer has a user's own forward or matmul, or the recipe gathers weights in float8 and the rows of
            a weight cannot be split equally.
    """
    matmul = Float8Matmul(recipe, device)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    mixtures = {name: module for name, module in model.named_modules() if isinstance(module, MixtureOfExperts)}
    of_experts = {name: {f"{name}.{part}": getattr(m, part) for part in ("w13", "w2")} for name, m in mixtures.items()}
    uses = Counter(p for module in model.modules() for p in module._parameters.values())
    converted, skipped, rows, tied, of_their_own = [], {}, dict[str, int](), [], []
    own = {ALL_HERE: matmul}  # a matmul for each set of ranks over which operands are split
    for name, module in linears.items():
        weight = local_data(module.weight)
        if why := left_alone(name, weight.shape, tokens, recipe, filter_fqns):
            skipped[name] = why
        elif _has_own_forward(module):
            of_their_own.append(name)
        else:
            group = getattr(module, "group", None) if recipe.reduce_amax else None
            operands = getattr(module, "split_operands", ()) if group is not None else ()
            over = AmaxGroups(**dict.fromkeys(operands, group))
            module.matmul = own[over] = own.get(over) or Float8Matmul(recipe, device, over)
            converted.append(name)
            if recipe.fsdp_all_gather != "float8" or matmul.unfused is not None:
                continue
            if uses[module.weight] > 1:  # tied to the embedding: a new parameter would untie the two
                tied.append(name)
                continue
            rows[name] = len(weight)
            module.weight = _gathered_in_float8(module.weight, recipe, group)
    gathers = recipe.fsdp_all_gather == "float8" and matmul.unfused is None
    for name, projections in of_experts.items():
        alone, compute = _experts_left_alone(projections, tokens, recipe, filter_fqns), mixtures[name].compute
        if not isinstance(compute, PlainExperts):  # a user has replaced it
            why = "experts that have an arithmetic of their own multiply in training.mixed_precision_param"
            alone = dict.fromkeys(projections, why)
        if alone or not isinstance(compute, PlainExperts):
            skipped |= alone
            continue
        mixtures[name].compute = Float8Experts(recipe, compute.group)
        converted += projections
        for part, projection in projections.items() if gathers else ():
            rows[part] = len(local_data(projection.weight))
            projection.weight = _gathered_in_float8(projection.weight, recipe, None)
    if of_their_own:
        left = [*filter_fqns, *dict.fromkeys(re.sub(r"^layers\.\d+\.", "", name) for name in of_their_own)]
        has = "has" if len(of_their_own) == 1 else "have"
        seen = f"{', '.join(of_their_own)} {has} a forward of a class of its own, or a matmul"
        want = "titanlite's, which multiplies by the recipe: another need not"
        problem = Problem("float8.recipe", seen, want, f"float8.filter_fqns = {show(left)}")
        raise RecipeError(describe("config", [problem]))
    in_experts = {part for parts in of_experts.values() for part in parts}
    gathered = {name: (name in in_experts and expert_shards) or shards for name in rows}
    require_equal_shards(rows, gathered)
    joined = tuple(name for name, module in model.named_modules() if _joins(module, recipe, matmul))
    maxima = tuple(m for name in converted if name in linears for m in _maxima(linears[name], name in rows))
    return Conversion(matmul.lowering, tuple(converted), skipped, joined, tuple(tied), maxima, gathered)


def _experts_left_alone(
    projections: Mapping[str, Projection], tokens: int, recipe: Float8Recipe, filter_fqns: tuple[str, ...]
) -> dict[str, str]:
    """Return for each projection of a layer's experts why it is not converted; {} if all are."""
    if why := obstacle_of_experts(recipe):
        return dict.fromkeys(projections, why)
    found = {name: left_alone(name, p.weight.shape, tokens, recipe, filter_fqns) for name, p in projections.items()}
    first = next(((name.rpartition(".")[2], why) for name, why in found.items() if why), None)
    if first is None:
        return {}
    return {name: why or f"all are converted or none, and of {first[0]} {first[1]}" for name, why in found.items()}


def _has_own_forward(module: Linear) -> bool:
    """Return whether a layer's forward or matmul is a user's, not titanlite's."""
    owner = next(c for c in type(module).__mro__ if "forward" in vars(c))
    own_matmul = module.matmul is not F.linear and not isinstance(module.matmul, Float8Matmul)
    return own_matmul or "forward" in vars(module) or not owner.__module__.startswith("titanlite.")


def _maxima(layer: Linear, is_gathered: bool) -> Iterator[str]:
    """Yield the operands whose maximum a converted layer reduces over ranks: all, if its collectives are fused.

    `is_gathered`: FSDP gathers the layer's weight in float8.
    """
    matmul: Float8Matmul = layer.matmul  # type: ignore[assignment]
    if not matmul.recipe.reduce_amax or getattr(layer, "group", None) is None:
        return
    is_fused, is_emulated = getattr(layer, "fused", None) is not None, matmul.lowering.name == "emulated"
    again = MATMULS["grad_weight"] if is_emulated else ()  # other lowerings take no maximum for it
    for operand in (*MATMULS["output"], *MATMULS["grad_input"], *again):
        if operand == "weight" and is_gathered:
            continue  # `precompute_scales` reduces this maximum
        if is_fused or getattr(matmul.over, operand) is not None:
            yield operand


def _joins(module: nn.Module, recipe: Float8Recipe, matmul: Float8Matmul) -> bool:
    """Turn a feed-forward into a `Float8FeedForward` if recipe and layers allow it; return whether this was done."""
    if type(module) is not FeedForward or matmul.unfused is not None:
        return False
    layers = module.w13, module.w2
    if any(layer.matmul is not matmul or getattr(layer, "fused", True) is None for layer in layers):
        return False  # left in high precision, or with a collective that is not fused
    group = getattr(module.w13, "group", None)
    if any(layer.bias is not None or layer._forward_hooks or layer._forward_pre_hooks for layer in layers):
        return False  # added by a user
    if not joins_feed_forward(recipe, group is not None):
        return False
    module.__class__ = Float8FeedForward  # as for tensor-parallel layers: the object keeps its name and parameters
    module.group, module.recipe = group, recipe  # type: ignore[assignment]
    return True


def _gathered_in_float8(weight: nn.Parameter, recipe: Float8Recipe, over: Group | None) -> nn.Parameter:
    """Wrap a weight's local tensor so that FSDP casts it to float8 before the all-gather. `over`: as in `Casting`."""
    by_row, pow2 = recipe.weight.output == "row", recipe.scale_rounding == "pow2_floor"
    how = Casting(DTYPES[recipe.weight.dtype], by_row, pow2, over)
    return nn.Parameter(as_laid_out(WeightShard(local_data(weight), how), weight))


def precompute_scales(parameters: list[nn.Parameter], mesh: DeviceMesh) -> None:
    """Compute the scale of every weight that FSDP gathers in float8 with a single scale. Call it after each update.

    Without this call each all-gather would first reduce the maximum of its weight.

    Args:
        parameters: all parameters of the model.
        mesh: the mesh of FSDP; its last axis shards weights.
    """
    # `_local_tensor` is the tensor that FSDP gathers. From torch 2.13 on `to_local` returns a view of it.
    locals_ = [p._local_tensor for p in parameters if isinstance(p, DTensor)]
    shards = [shard for shard in locals_ if isinstance(shard, WeightShard) and not shard.how.by_row]
    if shards:
        agree_on_scales(shards, mesh)
