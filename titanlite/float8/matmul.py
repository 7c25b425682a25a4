"""The matmul `x @ weight.T` in float8, forward and backward, by the implementation (lowering) of a recipe on a device.

`emulated.py` defines the recipes. titanlite's own kernels (`fused.py`) run every recipe that they support. Recipes with
scales by block run on cuBLASLt (`titanlite.kernels.block_scaled_matmul`), the others, as with one matmul in high
precision, on torchao. If a device supports none of these, the same casts are multiplied in float32: slow, but the same
numbers.
"""

from typing import NamedTuple

from torch import Tensor

from titanlite.config.recipe_schema import Float8Recipe, Granularity
from titanlite.device import Device
from titanlite.float8.blocks import BlockScaledFloat8
from titanlite.float8.cast import ALL_HERE, DTYPES, AmaxGroups
from titanlite.float8.emulated import EmulatedFloat8
from titanlite.float8.fused import FusedFloat8
from titanlite.float8.scope import is_by_blocks, obstacle
from titanlite.kernels import block_scaled_matmul
from titanlite.kernels.linear import Matmul


class Lowering(NamedTuple):
    """The implementation of a recipe's matmuls on a device."""

    name: str  # "fused", titanlite's own; "definition", the same on a CPU; "block scaled", "torchao" or "emulated"
    why: str | None  # reason why it is not titanlite's own, or why it is emulated


def lowering_of(recipe: Float8Recipe, device: Device) -> Lowering:
    """Choose the implementation of a recipe on a device: the first that can run it."""
    unfused = obstacle(recipe)
    if unfused is None and not device.is_gpu:
        return Lowering("definition", None)
    if why := _why_emulated(recipe, device):
        return Lowering("emulated", why)
    if unfused is None:
        return Lowering("fused", None)
    return Lowering("block scaled" if recipe.has_blocks else "torchao", unfused)


def _why_emulated(recipe: Float8Recipe, device: Device) -> str | None:
    """Return the reason why a device cannot run a recipe on tensor cores, or None."""
    capability = device.capability or (0, 0)
    if capability[0] + capability[1] / 10 < recipe.min_compute_capability:
        has = f"this GPU has {capability[0]}.{capability[1]}" if device.is_gpu else "this device is no GPU"
        return f"it needs compute capability {recipe.min_compute_capability}, {has}"
    if not recipe.has_blocks:
        return None
    if not is_by_blocks(recipe):
        return f"titanlite has no lowering for {', '.join(sorted({*recipe.granularities} - {'none'}))} in one layer"
    return block_scaled_matmul.block_scaling_unsupported_reason(device)


class Float8Matmul:
    """The matmul `x @ weight.T` in float8, forward and backward, built for a device.

    `over` are the ranks that hold the other parts of operands, for a recipe with `reduce_amax`. The attribute `fused`
    has the matmuls with a collective. `unfused` is the reason why these cannot run, or None.
    """

    def __init__(self, recipe: Float8Recipe, device: Device, over: AmaxGroups = ALL_HERE) -> None:
        self.recipe, self.over, self.lowering = recipe, over, lowering_of(recipe, device)
        self.unfused, self.fused = obstacle(recipe), FusedFloat8(recipe, over)
        if self.lowering.why is None:
            self.function: Matmul = self.fused
        elif self.lowering.name == "torchao":
            self.function = torchao_matmul(recipe)
        else:
            multiplies = self.lowering.name == "block scaled" or not device.is_gpu  # a CPU runs the definition
            by_blocks = multiplies and is_by_blocks(recipe)
            self.function = BlockScaledFloat8(recipe) if by_blocks else EmulatedFloat8(recipe, over)
            self.unfused = self.unfused or "is emulated on this GPU"

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return `x [M, K] @ weight [N, K].T` [M, N]."""
        return self.function(x, weight)


def torchao_matmul(recipe: Float8Recipe) -> Matmul:
    """Return torchao's matmul of a recipe without scales by block, on tensor cores."""
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args  # slow to import, so only here
    from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

    config = torchao_config(recipe)
    gemms = (config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight)
    products = LinearMMConfig(*(ScaledMMConfig(False, g.use_fast_accum, False, False) for g in gemms))
    return lambda x, weight: matmul_with_hp_or_float8_args.apply(x, weight.t(), products, config)


def torchao_config(recipe: Float8Recipe):
    """Translate a recipe without scales by block to a `torchao.float8.Float8LinearConfig`."""
    from torchao.float8.config import CastConfig, Float8GemmConfig, Float8LinearConfig, ScalingGranularity, ScalingType

    granularities = {"tensor": ScalingGranularity.TENSORWISE, "row": ScalingGranularity.AXISWISE}

    def cast(granularity: Granularity, dtype: str) -> CastConfig:
        if granularity == "none":
            return CastConfig(scaling_type=ScalingType.DISABLED, target_dtype=DTYPES[dtype])
        return CastConfig(scaling_granularity=granularities[granularity], target_dtype=DTYPES[dtype])

    x, w, g, add = recipe.input, recipe.weight, recipe.grad_output, recipe.accumulation
    return Float8LinearConfig(
        cast_config_input=cast(x.output, x.dtype),
        cast_config_input_for_grad_weight=cast(x.grad_weight, x.dtype),
        cast_config_weight=cast(w.output, w.dtype),
        cast_config_weight_for_grad_input=cast(w.grad_input, w.dtype),
        cast_config_grad_output=cast(g.grad_input, g.dtype),
        cast_config_grad_output_for_grad_weight=cast(g.grad_weight, g.dtype),
        gemm_config_output=Float8GemmConfig(use_fast_accum=add.output == "fast"),
        gemm_config_grad_input=Float8GemmConfig(use_fast_accum=add.grad_input == "fast"),
        gemm_config_grad_weight=Float8GemmConfig(use_fast_accum=add.grad_weight == "fast"),
        round_scales_to_power_of_2=recipe.scale_rounding == "pow2_floor",
    )
