"""Name the numbers of metrics.jsonl as Weights & Biases and TensorBoard show them: in groups, each a section of panels.

The file keeps its flat keys, which are columns for whoever loads it. This table is the one place that maps them, and it
maps both ways, so that a run can be read back from what was shown. A key that is not in it keeps its name. The report
of a comparison (`comparison/curves.py`) takes its groups and what it calls a number from here, too.
"""

from collections.abc import Mapping
from typing import NamedTuple

AXES = ("step", "tokens")
"""The axes that other numbers are drawn over: no panels of their own."""


class Known(NamedTuple):
    """How one number is shown: its name in a section of panels, and in a report its group of charts and what it is."""

    name: str
    group: str
    about: str
    unit: str = ""
    is_noisy: bool = True  # of what is not, smoothing would bend the line


KNOWN: Mapping[str, Known] = {
    "loss": Known("train/loss", "Loss", "training loss", "nats per token"),
    "z_loss": Known("train/z_loss", "Loss", "mean square of the logits' log-sum-exp"),
    "validation_loss": Known("val/loss", "Loss", "validation loss", "nats per token"),
    "validation_bits_per_byte": Known("val/bits_per_byte", "Loss", "validation loss", "bits per byte"),
    "validation_loss_ema": Known("val/loss_ema", "Loss", "validation loss of averaged weights", "nats per token"),
    "validation_bits_per_byte_ema": Known(
        "val/bits_per_byte_ema", "Loss", "validation loss of averaged weights", "bits per byte"
    ),
    "grad_norm": Known("train/grad_norm", "Optimization", "gradient norm before clipping"),
    "weight_norm": Known("optim/weight_norm", "Optimization", "norm of the weights", is_noisy=False),
    "update_ratio": Known("optim/update_ratio", "Optimization", "norm of the update over that of the weights"),
    "lr": Known("optim/lr", "Optimization", "learning rate", is_noisy=False),
    "epoch": Known("train/epoch", "Optimization", "times through the data", is_noisy=False),
    "tokens_per_second_per_gpu": Known("perf/tokens_per_second_per_gpu", "Speed", "tokens per second and GPU"),
    "tflops_per_gpu": Known("perf/tflops_per_gpu", "Speed", "model TFLOP/s per GPU"),
    "mfu": Known("perf/mfu", "Speed", "model FLOPs utilization", "share of the peak"),
    "seconds": Known("perf/seconds", "Speed", "time per step", "seconds"),
    "data_wait_seconds": Known("perf/data_wait_seconds", "Speed", "wait for data per step", "seconds"),
    "memory_gib": Known("perf/memory_gib", "Memory", "peak reserved", "GiB", is_noisy=False),
    "memory_allocated_gib": Known("perf/memory_allocated_gib", "Memory", "peak allocated", "GiB", is_noisy=False),
    "accuracy": Known("eval/accuracy", "Accuracy", "accuracy"),
    "accuracy_norm": Known("eval/accuracy_norm", "Accuracy", "accuracy by bytes"),
}
"""Each key; behind a dot may stand the name of a source, a task or a group, as in "validation_loss.wiki"."""

PREFIXES: Mapping[str, str] = {
    "loss.": "train/loss.",
    "epoch.": "train/epoch.",
    "grad_norm.": "train/grad_norm.",
    "weight_norm.": "optim/weight_norm.",
    "update_ratio.": "optim/update_ratio.",
    "share.": "data/share.",
    "validation_": "val/",
    "accuracy": "eval/accuracy",
    "evaluation_": "eval/",  # after what is longer
    "float8_": "float8/",
    "experts_": "experts/",
}
"""Beginnings of keys whose rest names a source, a task, a group or a layer, and what is shown in their place."""

NAMES: Mapping[str, str] = {key: known.name for key, known in KNOWN.items() if not key.startswith(tuple(PREFIXES))}
"""Keys with a name of their own, each with it."""

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
