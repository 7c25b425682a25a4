"""The base of a user's update rule, which updates each number of a parameter by itself, on any shard."""

from abc import ABC, abstractmethod

from torch import Tensor


class ElementwiseRule(ABC):
    """An update rule: a parameter moves against a direction, which the rule computes for each number.

    A subclass declares its state, and the keys of a recipe's groups with types and defaults:

        class SignOfMean(ElementwiseRule):
            state = ("mean",)
            decay: float = 0.9

            def update(self, gradient, parameter, state, updates):
                state["mean"] = state["mean"].lerp(gradient, 1 - self.decay)
                return state["mean"].sign()

    The optimizer then sets, with the learning rate and weight decay of the group:

        parameter ← (1 - lr · weight_decay) parameter - lr · direction

    The optimizer does the rest: clipping, skipped steps, the state's dtype, shards and checkpoints.
    """

    state: tuple[str, ...] = ()  # names; each has a number for each number of a parameter, zero at first

    @abstractmethod
    def update(self, gradient: Tensor, parameter: Tensor, state: dict[str, Tensor], updates: Tensor) -> Tensor:
        """Return the direction, and change the state.

        Args:
            gradient: [n] float32, clipped: n numbers of one parameter.
            parameter: [n] float32, read-only.
            state: [n] float32 each, by name; changed in place or replaced.
            updates: [] float32, the number of updates, with this one.

        Returns:
            [n] float32. Direction and state of a number depend neither on other numbers nor on random ones.
        """
