"""The checks of a run that need torch: they look at the model as one of its ranks has it, on the meta device.

`titanlite plan` and training make them before anything else that takes time; `titanlite validate` cannot.
"""

import re
from typing import TYPE_CHECKING

from titanlite.activation_checkpoint.operations import CLASSES, OPERATIONS
from titanlite.activation_checkpoint.rules import BLOCK
from titanlite.checkpoint.optimizer_state import leaves_state
from titanlite.config.build import show
from titanlite.config.parameter_groups import update_settings
from titanlite.config.problems import Problems
from titanlite.config.stages import largest_stage, longest_seq_len
from titanlite.errors import ConfigError, ErrorReport, RecipeError, TitanliteError
from titanlite.float8.scope import obstacle, odd_sizes, require_matches
from titanlite.forecast.check_save_list import check_matches, check_names_of_list
from titanlite.preflight.checked_run import CheckedRun
from titanlite.preflight.start import newest_state

if TYPE_CHECKING:
    from torch import nn

    from titanlite.float8.convert import Conversion
    from titanlite.forecast.rank_model import RankModel


def check_with_torch(checked: CheckedRun, world: int | None = None) -> "RankModel":
    """Refuse what `checked_run` lets pass because torch would have to be imported.

    Args:
        checked: the run.
        world: number of processes, if it is known.

    Returns:
        The model as one of its ranks has it.

    Raises:
        TitanliteError: an update rule of the user's own fails where it is tried; the model cannot be built or split; a
            pattern matches no parameter or no layer; a group of the optimizer's takes no parameter, none a parameter,
            or one a parameter that its rule is not for; float8 converts no layer, not all that it is to, what is to be
            fused, or what FSDP cannot gather; a save-list names an operation that torch has not, keeps an elementwise
            one, or has a rule that matches nothing; or no save-list keeps to the budget.
    """
    from titanlite.forecast.rank_model import rank_model
    from titanlite.forecast.traced_run import traced_run
    from titanlite.models.find import build_model

    config, dims, save_list, mesh = checked.config, checked.dims, checked.save_list, checked.config.parallelism
    _try_own_rules(checked)
    model = build_model(config.model, dims, longest_seq_len(config))
    _check_patterns(checked, model)
    shards = world // mesh.tensor_parallel_degree // mesh.data_parallel_replicate_degree if world else 1
    config = largest_stage(config)  # of which a rank holds most
    rank = rank_model(config, dims, checked.float8, model, shards)
    if rank.float8 is not None and config.job.strict:
        _check_converted(checked, rank.float8)
    if save_list is None and world is not None:
        from titanlite.forecast.suggest_flags import check_budget

        traced_run(config, dims, checked.float8, rank.model)
        check_budget(config, dims, checked.float8, checked.optimizer, world, checked.origin)
    if save_list is not None and save_list.rules:
        from titanlite.activation_checkpoint.apply import check_names

        run = traced_run(config, dims, checked.float8, rank.model)
        if any(rule.op not in (BLOCK, *CLASSES, *OPERATIONS) for rule in save_list.rules):
            check_names(save_list, run.layers)
        check_matches(save_list, run, config.job.strict)
    return rank


def check_same_optimizer(checked: CheckedRun, model: "nn.Module") -> None:
    """Refuse early to go on from a checkpoint of another optimizer: the run's own, or that which it branches off.

    Raises:
        CheckpointError: as `leaves_state` says.
    """
    if (found := newest_state(checked.config)) is not None:
        folder, state = found
        config, shapes = checked.config.optimizer, {name: p.shape for name, p in model.named_parameters()}
        rules = {name: own.rule for name, own in update_settings(checked.optimizer, config, shapes).items()}
        leaves_state(folder, state, config, rules, checked.optimizer.own_rules)


def _try_own_rules(checked: CheckedRun) -> None:
    """Import the rules of the user's own file that the recipe's groups have, and try them."""
    own = checked.optimizer.own_rules
    if not own:
        return
    from titanlite.update_rules.find import try_rules

    groups = [group for group in checked.optimizer.groups.values() if group.rule in own]
    try_rules((own[group.rule], {key: getattr(group, key) for key in group.own_keys}) for group in groups)


def _check_patterns(checked: CheckedRun, model: "nn.Module") -> None:
    """Refuse patterns, filters and rules that name no parameter, layer or block of the model."""
    from titanlite.models.experts import GroupedProjection, product_names
    from titanlite.models.layers import Linear, Projection

    config, origin, save_list = checked.config, checked.origin, checked.save_list
    layers = [name for name, module in model.named_modules() if isinstance(module, Linear)]
    of_experts = [name for name, module in model.named_modules() if isinstance(module, GroupedProjection)]
    in_blocks = [re.sub(r"^layers\.\d+\.", "", name) for name in product_names(model) if name.startswith("layers.")]
    of_matrices = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Projection)}
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    reports: list[ErrorReport] = []
    for check in (
        lambda: update_settings(checked.optimizer, config.optimizer, shapes, origin, of_matrices),
        lambda: checked.float8 and require_matches(config.float8.filter_fqns, [*layers, *of_experts], origin),
        lambda: (
            save_list
            and check_names_of_list(save_list, [*dict.fromkeys(in_blocks)], checked.dims.n_layers, config.job.strict)
        ),
    ):
        try:
            check()
        except TitanliteError as error:
            reports += error.args
    if reports:
        raise ConfigError(*reports)


def _check_converted(checked: CheckedRun, done: "Conversion") -> None:
    """Refuse a recipe that converts no layer, not all that the filters leave to it, or all that is to be fused."""
    config, problems, why = checked.config, Problems(checked.origin), checked.float8 and obstacle(checked.float8)
    filters, recipe = config.float8.filter_fqns, show(config.float8.recipe)
    odd = odd_sizes(done.skipped, filters)
    if not done.converted:
        first, why = next(iter(done.skipped.items()))
        want = f"at least one linear layer to convert; all are skipped, e.g. {first} ({why})"
        fix = "change float8.recipe or what the reason names; job.strict = false trains without float8"
        problems.add("float8.recipe", recipe, want, fix)
    elif odd:
        names = list(dict.fromkeys(re.sub(r"^layers\.\d+\.", "", name) for name in odd))
        first, why = next(iter(odd.items()))
        want = f"filters that name what float8.recipe = {recipe} leaves alone: {first} ({why})"
        fix = f"filter_fqns = {show([*filters, *names])}; job.strict = false trains with what is converted"
        problems.add("float8.filter_fqns", show(filters), want, fix, against="float8.recipe")
    elif config.parallelism.async_tensor_parallel and why and not done.skipped:
        want = f"false where all linear layers are in float8 and float8.recipe = {recipe} {why}"
        fix = "async_tensor_parallel = false; job.strict = false trains with nothing fused"
        problems.add("parallelism.async_tensor_parallel", "true", want, fix, against="float8.recipe")
    problems.raise_all(RecipeError)
