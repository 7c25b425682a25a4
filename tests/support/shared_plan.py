"""The sharding plan of a run, derived before its ranks are forked: each would take a second of the processor for it."""

from contextlib import suppress

from titanlite.errors import TitanliteError
from titanlite.forecast.rank_model import sharding_plan
from titanlite.preflight.checked_run import CheckedRun


def plan_for_all_ranks(asked: CheckedRun) -> None:
    """Derive the plan that `training/build.py` asks for, if the run splits a model of titanlite's.

    Args:
        asked: the run; where it has no plan, its ranks say so.
    """
    if asked.config.parallelism.tensor_parallel_degree > 1 and not asked.config.model.file:
        with suppress(TitanliteError):
            sharding_plan(asked.config, asked.dims)
