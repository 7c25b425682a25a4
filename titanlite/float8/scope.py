"""Decide without torch which recipes titanlite's own float8 kernels can run, and which layers are converted."""

import re
from collections.abc import Mapping, Sequence

from titanlite.config.build import show
from titanlite.config.problems import Origin, Problems, nearest_layer
from titanlite.config.recipe_schema import Float8Recipe
from titanlite.config.schema import Float8
from titanlite.errors import Problem, RecipeError, describe


def obstacle(recipe: Float8Recipe) -> str | None:
    """Return the reason why titanlite's own float8 kernels cannot run a recipe, or None."""
    if recipe.has_blocks:
        return "has scales by block, which no fused kernel takes"
    if "none" in recipe.granularities:
        return "has a matmul in high precision, which would need its tokens gathered again"
    if "row" in recipe.granularities and recipe.scale_rounding != "pow2_floor":
        return "has row scales that are not powers of two: its bytes cannot be cast again without loss"
    x, grad = recipe.input, recipe.grad_output
    if x.output == grad.grad_input == "tensor" and "row" in (x.grad_weight, grad.grad_weight):
        return "has finer scales for its weights' gradients than for the operands these are made of"
    return None


def obstacle_of_experts(recipe: Float8Recipe) -> str | None:
    """Return the reason why experts cannot be computed by a recipe, or None."""
    if obstacle(recipe) is not None or set(recipe.granularities) != {"row"}:
        return "experts have scales by row alone, which are powers of two, in all products"
    return None


def is_by_blocks(recipe: Float8Recipe) -> bool:
    """Return whether all scales of a recipe are by block. Forward then keeps float8 bytes of its input for backward."""
    return set(recipe.granularities) <= {"1x128", "128x128", "none"}


def is_cast_from_bytes(recipe: Float8Recipe, parallel: bool) -> bool:
    """Return whether a weight's gradient can be computed from float8 bytes alone.

    It cannot if the parts of a gathered tensor have different scales by rank that are not powers of two.

    Args:
        recipe: a recipe without an `obstacle`.
        parallel: whether a collective is part of the matmul.
    """
    return not parallel or recipe.scale_rounding == "pow2_floor" or recipe.reduce_amax


def joins_feed_forward(recipe: Float8Recipe, parallel: bool) -> bool:
    """Return whether a layer can become a `Float8FeedForward` by its recipe. Arguments as in `is_cast_from_bytes`."""
    if recipe.reduce_amax:  # the kernel that gates and casts in one pass does not reduce the maximum over ranks
        return False
    return is_cast_from_bytes(recipe, parallel) and recipe.input.output == recipe.grad_output.grad_input


def require_equal_shards(rows: Mapping[str, int], shards: Mapping[str, int]) -> None:
    """Raise RecipeError if the rows of a weight cannot be split equally: FSDP does not pad weights in float8.

    `rows`: rows of each weight on one tensor-parallel rank. `shards`: number of ranks over which FSDP splits it.
    """
    alike = {re.sub(r"^layers\.\d+\.", "", name): (n, shards[name]) for name, n in rows.items()}
    if uneven := [(name, n, over) for name, (n, over) in alike.items() if n % over]:
        name, n, over = uneven[0]
        want = (
            f"weights whose rows divide by the {over} shards of FSDP; {name} has {n}, and so for {len(uneven)} layers"
        )
        fix = 'another data_parallel_shard_degree, or a recipe with fsdp_all_gather = "high_precision"'
        raise RecipeError(describe("float8", [Problem("fsdp_all_gather", '"float8"', want, fix)]))


def require_matches(filter_fqns: Sequence[str], layers: Sequence[str], origin: Origin) -> None:
    """Raise RecipeError if a filter matches no layer's name: the layer that the user meant would be converted."""
    problems, last_names = Problems(origin), list(dict.fromkeys(n.split(".")[-1] for n in layers))
    for unused in (f for f in filter_fqns if not any(f in name for name in layers)):
        near = nearest_layer(unused, layers)
        want = f"part of the name of a linear layer: {', '.join(last_names)}, …"
        fix = f"did you mean {show(near)}?" if near else "name one of these, or remove it"
        problems.add("float8.filter_fqns", show(unused), want, fix)
    problems.raise_all(RecipeError)


def odd_sizes(skipped: Mapping[str, str], filter_fqns: Sequence[str]) -> dict[str, str]:
    """Return name → reason of the skipped layers that no filter of the user names; none with the default filters."""
    if tuple(filter_fqns) == Float8().filter_fqns:
        return {}
    return {name: why for name, why in skipped.items() if not any(f in name for f in filter_fqns)}


def left_alone(
    name: str, shape: Sequence[int], tokens: int, recipe: Float8Recipe, filter_fqns: Sequence[str]
) -> str | None:
    """Return the reason why a linear layer is not converted, or None.

    Args:
        name, shape: name of the layer, and shape of its weight [N, K] on one tensor-parallel rank.
        tokens, recipe, filter_fqns: as in `apply_float8`.
    """
    if matches := [f for f in filter_fqns if f in name]:
        return f"float8.filter_fqns has {matches[0]!r}"
    if any(n % recipe.dim_multiple for n in (*shape, tokens)):
        return f"sizes {tuple(shape)}, {tokens} tokens: not all multiples of {recipe.dim_multiple}"
    return None
