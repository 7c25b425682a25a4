"""The checks of a run that need torch: of a model file of the user's own, and of what follows from its traced blocks.

`titanlite plan` and training make them before anything else that takes time; `titanlite validate` cannot.
"""

from titanlite.activation_checkpoint.operations import CLASSES, OPERATIONS
from titanlite.activation_checkpoint.rules import BLOCK
from titanlite.config.weight_decay import without_decay
from titanlite.float8.scope import require_matches
from titanlite.forecast.check_save_list import check_matches, check_names_of_list
from titanlite.preflight.checked_run import CheckedRun


def check_with_torch(checked: CheckedRun, world: int | None = None) -> None:
    """Refuse what `checked_run` lets pass because torch would have to be imported: only where something is left.

    Args:
        checked: the run.
        world: number of processes, if it is known.

    Raises:
        TitanliteError: of a model of the user's own, a pattern matches no parameter or no layer; a save-list names an
            operation that torch has not, keeps an elementwise one, or has a rule that matches nothing; or no save-list
            keeps to the budget.
    """
    config, save_list, model = checked.config, checked.save_list, None
    if config.model.file:
        from titanlite.models.find import build_model
        from titanlite.models.layers import Linear

        model = build_model(config.model, checked.dims, config.training.seq_len)
        without_decay(config.optimizer.weight_decay_exclude, dict(model.named_parameters()), checked.origin)
        if checked.float8 is not None:
            layers = [name for name, module in model.named_modules() if isinstance(module, Linear)]
            require_matches(config.float8.filter_fqns, layers, checked.origin)
    if save_list is None and world is not None:
        from titanlite.forecast.suggest_flags import check_budget

        check_budget(config, checked.dims, checked.float8, world, checked.origin)
    if save_list is None or not save_list.rules:
        return
    from titanlite.activation_checkpoint.apply import check_names
    from titanlite.forecast.traced_run import traced_run

    run = traced_run(config, checked.dims, checked.float8)
    if any(rule.op not in (BLOCK, *CLASSES, *OPERATIONS) for rule in save_list.rules):
        check_names(save_list, run.layers)
    if model is not None and run.no_trace_reason is None:
        check_names_of_list(save_list, run.layers, len(run.blocks), config.job.strict)
    check_matches(save_list, run, config.job.strict)
