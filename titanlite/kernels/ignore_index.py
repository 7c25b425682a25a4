"""The target of a token that has nothing to predict. This is a separate file so that reading data needs no torch."""

IGNORE_INDEX = -100
"""A target with nothing to predict: it adds neither to the loss nor to the count of targets."""
