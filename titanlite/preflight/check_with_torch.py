"""The checks of a run that need torch: of a model file of the user's own, and of single operations in a save-list.

`titanlite plan` and training make them before anything else that takes time; `titanlite validate` cannot.
"""

from titanlite.activation_checkpoint.operations import CLASSES, OPERATIONS
from titanlite.activation_checkpoint.rules import BLOCK
from titanlite.config.weight_decay import without_decay
from titanlite.float8.scope import require_matches
from titanlite.forecast.activation_bytes import layout_of
from titanlite.preflight.checked_run import CheckedRun


def check_with_torch(checked: CheckedRun) -> None:
    """Refuse what `checked_run` lets pass because torch would have to be imported: only where something is left.

    Raises:
        TitanliteError: of a model of the user's own, the blocks are others than the recipe's, or a pattern matches no
            parameter or no layer; or a save-list names an operation that torch has not, or keeps an elementwise one.
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
    if save_list and any(rule.op not in (BLOCK, *CLASSES, *OPERATIONS) for rule in save_list.rules):
        from titanlite.activation_checkpoint.apply import check_names, layers_of

        if model is None:
            check_names(save_list, layout_of(config, checked.dims, checked.float8).block.layers)
        else:
            check_names(save_list, layers_of(model.layers))
