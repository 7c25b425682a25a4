"""Check a float8 recipe against the layers of a model, its mesh and the keys of the config that belong to float8."""

import re

from titanlite.config.architectures import linear_layers
from titanlite.config.build import show
from titanlite.config.problems import Origin, Problems
from titanlite.config.recipe_schema import Block, Float8Recipe, ModelDims
from titanlite.config.schema import Config
from titanlite.errors import RecipeError
from titanlite.float8.scope import left_alone, obstacle, odd_sizes, require_equal_shards, require_matches


def check_filters(config: Config, dims: ModelDims, block: Block, origin: Origin) -> None:
    """Refuse filters that match no layer."""
    require_matches(config.float8.filter_fqns, list(linear_layers(block, dims)), origin)


def _left_alone(config: Config, dims: ModelDims, float8: Float8Recipe, block: Block) -> dict[str, str | None]:
    """Say of each linear layer why a recipe does not convert it, or None."""
    filters = config.float8.filter_fqns
    layers = linear_layers(block, dims, config.parallelism.tensor_parallel_degree)
    tokens = config.training.local_batch_size * config.training.seq_len
    return {name: left_alone(name, shape, tokens, float8, filters) for name, shape in layers.items()}


def check_layers(config: Config, dims: ModelDims, float8: Float8Recipe, block: Block, origin: Origin) -> None:
    """Refuse a recipe that converts no layer, or not all that the user's own filters leave to it."""
    whys = _left_alone(config, dims, float8, block)
    filters = config.float8.filter_fqns
    odd = odd_sizes({name: why for name, why in whys.items() if why}, filters)
    if config.job.strict and odd and None in whys.values():
        names = list(dict.fromkeys(re.sub(r"^layers\.\d+\.", "", name) for name in odd))
        first, why = next(iter(odd.items()))
        want = f"filters that name what float8.recipe = {show(config.float8.recipe)} leaves alone: {first} ({why})"
        problems = Problems(origin)
        fix = f"filter_fqns = {show([*filters, *names])}; job.strict = false trains with what is converted"
        problems.add("float8.filter_fqns", show(filters), want, fix, against="float8.recipe")
        problems.raise_all(RecipeError)
    if config.job.strict and None not in whys.values():
        first, why = next(iter(whys.items()))
        want = f"at least one linear layer to convert; all are skipped, e.g. {first} ({why})"
        fix = "change float8.recipe or what the reason names; job.strict = false trains without float8"
        problems = Problems(origin)
        problems.add("float8.recipe", show(config.float8.recipe), want, fix)
        problems.raise_all(RecipeError)


def check_collectives(config: Config, dims: ModelDims, float8: Float8Recipe, block: Block, origin: Origin) -> None:
    """Refuse to fuse collectives with products that take none, where a recipe leaves no others."""
    is_asked, why = config.job.strict and config.parallelism.async_tensor_parallel, obstacle(float8)
    if is_asked and why and not any(_left_alone(config, dims, float8, block).values()):
        recipe = show(config.float8.recipe)
        want = f"false where all linear layers are in float8 and float8.recipe = {recipe} {why}"
        fix = "async_tensor_parallel = false; job.strict = false trains with nothing fused"
        problems = Problems(origin)
        problems.add("parallelism.async_tensor_parallel", "true", want, fix, against="float8.recipe")
        problems.raise_all()


def check_numerics(config: Config, float8: Float8Recipe, origin: Origin) -> None:
    """Refuse to measure outputs in float8 where there are none."""
    if config.job.strict and config.metrics.float8_numerics_freq and float8.input.output == "none":
        given, recipe = str(config.metrics.float8_numerics_freq), show(config.float8.recipe)
        want = f'0 with float8.recipe = {recipe}, whose input.output is "none": no output is in float8'
        problems = Problems(origin)
        problems.add("metrics.float8_numerics_freq", given, want, "float8_numerics_freq = 0", against="float8.recipe")
        problems.raise_all()


def check_gathers(config: Config, dims: ModelDims, float8: Float8Recipe, block: Block, world: int) -> None:
    """Refuse shards that FSDP cannot gather in float8."""
    if float8.fsdp_all_gather != "float8" or obstacle(float8):
        return
    t, whys = config.parallelism.tensor_parallel_degree, _left_alone(config, dims, float8, block)
    shapes = linear_layers(block, dims, t)
    converted = {name: n for name, (n, _) in shapes.items() if not whys[name]}
    rows = {re.sub(r"^layers\.\d+\.", "", name): n for name, n in converted.items()}  # blocks are alike
    if dims.tied_embeddings:
        rows.pop("output", None)
    require_equal_shards(rows, world // t // config.parallelism.data_parallel_replicate_degree)
