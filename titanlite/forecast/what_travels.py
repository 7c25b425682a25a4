"""Say from how many tokens on FSDP should gather experts, rather than tokens travel to them.

With expert parallelism a rank receives fewer weights and gradients, whatever its tokens, and more for each token. So
there is a number of tokens where both take as long: below it tokens should travel, above it weights. Both are predicted
by the same bytes and rates as a step is (`step_time.py`); what is of tokens grows with them.
"""

from collections.abc import Callable
from dataclasses import replace

from titanlite.config.recipe_schema import SaveList
from titanlite.errors import ConfigError
from titanlite.forecast.activation_cost import block_costs
from titanlite.forecast.attended import AttendedShare
from titanlite.forecast.device_specs import Rates
from titanlite.forecast.memory import MemoryModel
from titanlite.forecast.step_time import StepTime, StepTimeModel

MOST_TOKENS = 1 << 24
"""Tokens of a micro-step beyond which nothing is looked for."""


def what_travels(memory: MemoryModel, save_list: SaveList, rates: Rates, attended: AttendedShare | None = None) -> str:
    """Compare the run with its other choice, in a sentence; "" of a dense model, or of ranks that can share nothing.

    Args:
        memory: of a run that `no_rates_reason` has nothing against.
        save_list: of the run.
        rates: of the device.
        attended: as of `StepTimeModel`.
    """
    own, experts = memory.config.parallelism.expert_parallel_degree, memory.dims.experts
    if experts is None or memory.run.tensor_parallel > 1:
        return ""
    degrees = {1, own} if own > 1 else {n for n in (1, 2, 4, 8) if n <= rates.host}
    how = save_list, rates, attended
    found = {degree: steps for degree in sorted(degrees) if (steps := _step_by_tokens(memory, degree, *how))}
    tokens, others = memory.run.tokens, [degree for degree in found if degree > 1]
    if 1 not in found or not others:
        return ""
    degree = min(others, key=lambda degree: found[degree](1.0).total)
    one, split = found[1], found[degree]
    taken = split(1.0).total, one(1.0).total
    both = f"at this run's {tokens:,} a step takes {taken[0]:,.0f} ms with degree {degree} and {taken[1]:,.0f} with 1"
    both += f". That is with balanced routing: with other, degree {degree} also waits for the rank with the most rows"
    where, key = crossing(one, split, tokens), "parallelism.expert_parallel_degree"
    if where is None:
        to_them, of_weights = f"tokens should travel ({key} = {degree})", f"FSDP should gather them ({key} = 1)"
        return f"experts: {to_them if taken[0] < taken[1] else of_weights} at any number of tokens; {both}"
    return (
        f"experts: from about {where:,.0f} tokens a GPU and micro-step on FSDP should gather them ({key} = 1), with "
        f"fewer tokens should travel to them ({key} = {degree}); {both}"
    )


def _step_by_tokens(
    memory: MemoryModel, degree: int, save_list: SaveList, rates: Rates, attended: AttendedShare | None
) -> Callable[[float], StepTime] | None:
    """The time of a step under an expert-parallel degree; None if the ranks cannot be shared out so."""
    experts = memory.dims.experts
    if experts is None or experts.n_experts % degree or memory.shards % degree:
        return None
    mesh = replace(memory.config.parallelism, expert_parallel_degree=degree)
    config = replace(memory.config, parallelism=mesh)
    try:
        other = MemoryModel(config, memory.dims, memory.float8, memory.rules, memory.world, host=memory.host)
        return StepTimeModel(other, rates, attended).by_tokens(block_costs(other.run, save_list))
    except ConfigError:
        return None


def crossing(one: Callable[[float], StepTime], split: Callable[[float], StepTime], tokens: int) -> float | None:
    """Find the tokens of a micro-step from which on degree 1 is faster; None if one of both always is.

    Args:
        one: the time of a step with degree 1, by the share that its tokens are of `tokens`.
        split: likewise, with experts shared out.
        tokens: of a micro-step of the run.
    """

    def is_faster(n: float) -> bool:
        return one(n / tokens).total < split(n / tokens).total

    low, high = 1.0, float(MOST_TOKENS)
    if is_faster(low) or not is_faster(high):
        return None
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if is_faster(middle) else (middle, high)
    return float(f"{high:.2g}")
