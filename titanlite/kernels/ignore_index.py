"""Name the target of a token that has nothing to predict; apart, for those who read data without torch."""

IGNORE_INDEX = -100
"""A target with nothing to predict: it adds neither to the loss nor to the count of targets."""
