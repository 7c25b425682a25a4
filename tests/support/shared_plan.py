"""What `training/build.py` derives of a run, made before its ranks are forked.

Each would take a second of the processor for a sharding plan, and a fifth of one to trace blocks.
"""

from contextlib import suppress

from titanlite.config.stages import largest_stage
from titanlite.errors import TitanliteError
from titanlite.forecast.traced_run import traced_run
from titanlite.preflight.checked_run import CheckedRun
from titanlite.sharding.split import sharding_plan


def plan_for_all_ranks(asked: CheckedRun) -> None:
    """Derive the plan that `training/build.py` asks for, if the run splits a model of titanlite's; or trace blocks.

    Args:
        asked: the run; where it has no plan, its ranks say so.
    """
    mesh = asked.config.parallelism
    if asked.config.model.file:
        return
    with suppress(TitanliteError):
        if mesh.tensor_parallel_degree > 1:
            sharding_plan(asked.config, asked.dims)
        elif mesh.expert_parallel_degree == 1 and asked.float8 is None:
            traced_run(largest_stage(asked.config), asked.dims, None)
