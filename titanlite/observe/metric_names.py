"""Name the numbers of metrics.jsonl as Weights & Biases and TensorBoard show them: in groups, each a section of panels.

The file keeps its flat keys, which are columns for whoever loads it. This table is the one place that maps them, and it
maps both ways, so that a run can be read back from what was shown. A key that is not in it keeps its name.
"""

from collections.abc import Mapping

AXES = ("step", "tokens")
"""The axes that other numbers are drawn over: no panels of their own."""

NAMES: Mapping[str, str] = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "epoch": "train/epoch",
    "lr": "optim/lr",
    "tokens_per_second_per_gpu": "perf/tokens_per_second_per_gpu",
    "tflops_per_gpu": "perf/tflops_per_gpu",
    "mfu": "perf/mfu",
    "memory_gib": "perf/memory_gib",
    "memory_allocated_gib": "perf/memory_allocated_gib",
    "seconds": "perf/seconds",
    "data_wait_seconds": "perf/data_wait_seconds",
}
PREFIXES: Mapping[str, str] = {
    "validation_": "val/",
    "accuracy": "eval/accuracy",
    "evaluation_": "eval/",  # after what is longer
    "float8_": "float8/",
}
"""Beginnings of keys whose rest names a source, a task or a layer, and what is shown in their place."""

_FLAT = {name: key for key, name in NAMES.items()}


def shown_name(key: str) -> str:
    """Return the name under which a key of metrics.jsonl is shown."""
    if key in NAMES:
        return NAMES[key]
    return next((name + key.removeprefix(start) for start, name in PREFIXES.items() if key.startswith(start)), key)


def flat_key(name: str) -> str:
    """Return the key of metrics.jsonl that is shown under a name."""
    if name in _FLAT:
        return _FLAT[name]
    return next((key + name.removeprefix(start) for key, start in PREFIXES.items() if name.startswith(start)), name)
