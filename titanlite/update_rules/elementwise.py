"""The base class of a user's update rule. It treats each element of a parameter by itself, so it works on any shard."""

from abc import ABC, abstractmethod

from torch import Tensor


class ElementwiseRule(ABC):
    """An update rule: a parameter moves against a direction, which the rule computes for each element.

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

    state: tuple[str, ...] = ()  # names of tensors with an element for each one of a parameter, zero at first

    @abstractmethod
    def update(self, gradient: Tensor, parameter: Tensor, state: dict[str, Tensor], updates: Tensor) -> Tensor:
        """Return the direction of one update, and update the state.

        Args:
            gradient: [n] float32, clipped: the gradient of n elements of one parameter.
            parameter: [n] float32, the values of these elements; read-only.
            state: name → [n] float32; change the tensors in place, or replace them.
            updates: [] float32, the number of updates, including this one.

        Returns:
            [n] float32. Direction and state of an element may depend neither on other elements nor on random numbers.
        """
