"""The base of an update rule of a user's own: of each number of a parameter by itself, so right on any shard."""

from abc import ABC, abstractmethod

from torch import Tensor


class ElementwiseRule(ABC):
    """An update rule: a parameter moves against a direction, which the rule finds for each of its numbers.

    A subclass says what it keeps, and which keys a group of a recipe has, with their types and defaults:

        class SignOfMean(ElementwiseRule):
            state = ("mean",)
            decay: float = 0.9

            def update(self, gradient, parameter, state, updates):
                state["mean"] = state["mean"].lerp(gradient, 1 - self.decay)
                return state["mean"].sign()

    The optimizer then sets, with the learning rate and weight decay of the group:

        parameter ← (1 - lr · weight_decay) parameter - lr · direction

    The rest is the optimizer's: clipping, steps that are left out, the state's dtype, shards and checkpoints.

    Attributes:
        state: names of what is kept, each a number for each of a parameter's; zeros at first.
    """

    state: tuple[str, ...] = ()

    @abstractmethod
    def update(self, gradient: Tensor, parameter: Tensor, state: dict[str, Tensor], updates: Tensor) -> Tensor:
        """Return the direction, and change the state.

        Args:
            gradient: [n] float32, clipped; n numbers of any one parameter.
            parameter: [n] float32, to be read alone.
            state: [n] float32 each, by name; changed in place or replaced.
            updates: [] float32, how many there have been, this one included.

        Returns:
            [n] float32. It and the state of a number may depend on nothing of the others, and on no random number.
        """
