"""Know on what each loss of validation is measured, and since when: losses on other samples are not comparable."""

from collections.abc import Callable, Mapping
from typing import Any

from titanlite.config.held_out import validation_losses
from titanlite.config.schema import Config
from titanlite.training.data import HeldOut
from titanlite.training.state import Start


def measures_of(
    config: Config, validation: Mapping[str, HeldOut], start: Start, warn: Callable[[str], object]
) -> dict[str, Any]:
    """Return the fields `measured_on` and `measured_since` of the checkpoints of a start.

    `warn` is called with a message if a loss was measured on other samples before the start.
    """
    of = {key: validation[key.partition(".")[2]].batches.fingerprint for key in validation_losses(config)}
    before, last = start.state.measured_on, start.step - start.state.validation_due  # the last step measured before
    others = [key for key in of if before.get(key, of[key]) != of[key]]  # an earlier titanlite did not record it
    if others and not start.is_branch:
        why = f"{', '.join(others)}: measured on other samples than up to step {last}"
        then = f"; the next checkpoint with {config.checkpoint.keep_best} is the best so far"
        warn(f"{why}. The lowest is looked for anew{then * (config.checkpoint.keep_best in others)}")
    since = {**start.state.measured_since, **dict.fromkeys(others, last)}
    return {"measured_on": {**before, **of}, "measured_since": since}
