"""Declare every number of metrics.jsonl once: its key, and how the console, the pages and the report show it.

Whoever computes a number gives it to `Report` under its key, and all that shows rows looks here for how. The file keeps
flat keys, which are columns for whoever loads it; Weights & Biases and TensorBoard show names in sections of panels,
which lead back to the keys, so that a run can be read from what was shown. A key that is not declared is in the file
all the same, keeps its name, and is among the "Other" charts of a comparison.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

AXES = ("step", "tokens")
"""The axes that other numbers are drawn over: no panels of their own."""


class Column(NamedTuple):
    """A column of a comparison's table: its heading, which number of a run's values it has, and the number's format."""

    heading: str
    pick: Callable[[Sequence[float]], float]
    form: str

    def text(self, values: Sequence[float]) -> str:
        """Return the cell of a run with these values; "-" if there are none."""
        return self.form.format(self.pick(values)) if values else "-"


@dataclass(frozen=True)
class Metric:
    """The declaration of one logged number.

    Attributes:
        key: in metrics.jsonl; after a dot may follow a source, a task, a group or a layer, as in "loss.wiki".
        name: in Weights & Biases and TensorBoard, section/name.
        group: of charts in a comparison's report; "": its charts are among the others, under the key.
        about: what it is, as the report says.
        unit: likewise; "" where `about` says it, or there is none.
        is_noisy: whether smoothing helps; else it would bend the line.
        console: makes its part of a step's line, in the order of the table; None: it is not there.
        column: in a comparison's table of speed and memory; None: it is not there.
        loss_of: what a run says whose lowest loss it was, and the console whose loss of a validation; "": neither.
    """

    key: str
    name: str
    group: str = ""
    about: str = ""
    unit: str = ""
    is_noisy: bool = True
    console: Callable[[float], str] | None = None
    column: Column | None = None
    loss_of: str = ""


_NATS = "nats per token"
_FLOAT8 = ("input_saturated", "weight_saturated", "input_flushed", "weight_flushed", "output_sqnr_db")
_EXPERTS = ("fullest", "emptiest", "entropy", "balance_loss", "z_loss", "bias_range")
_METRICS = (
    Metric("loss", "train/loss", "Loss", "training loss", _NATS, console="loss {:7.4f}".format, loss_of="train loss"),
    Metric("z_loss", "train/z_loss", "Loss", "mean square of the logits' log-sum-exp"),  # before its coefficient
    # Separators count among the tokens, and have no bytes: the end of a document costs bits, too.
    *(
        Metric(f"validation_{what}{end}", f"val/{what}{end}", "Loss", f"validation loss{of}", unit, loss_of=lowest)
        for end, of, average in (("", "", ""), ("_ema", " of averaged weights", " of the average"))
        for what, unit, lowest in (("loss", _NATS, f"validation loss{average}"), ("bits_per_byte", "bits per byte", ""))
    ),
    Metric(
        "grad_norm",
        "train/grad_norm",
        "Optimization",
        "gradient norm before clipping",
        console=lambda norm: f"grad {norm:6.{3 if norm < 100 else 1}f}",
    ),
    Metric("weight_norm", "optim/weight_norm", "Optimization", "norm of the weights", is_noisy=False),
    Metric("update_ratio", "optim/update_ratio", "Optimization", "norm of the update over that of the weights"),
    Metric("lr", "optim/lr", "Optimization", "learning rate", is_noisy=False),
    Metric("epoch", "train/epoch", "Optimization", "times through the data", is_noisy=False),
    Metric(
        "tokens_per_second_per_gpu",
        "perf/tokens_per_second_per_gpu",
        "Speed",
        "tokens per second and GPU",
        console="{:7,.0f} tok/s/gpu".format,
        column=Column("tok/s/GPU", median, "{:,.0f}"),
    ),
    Metric(  # without recomputation
        "tflops_per_gpu",
        "perf/tflops_per_gpu",
        "Speed",
        "model TFLOP/s per GPU",
        column=Column("TFLOP/s/GPU", median, "{:.4g}"),
    ),
    Metric(  # of the device's dense peak, or of the measured one where that is not known
        "mfu",
        "perf/mfu",
        "Speed",
        "model FLOPs utilization",
        "share of the peak",
        console="mfu {:5.1%}".format,
        column=Column("MFU", median, "{:.1%}"),
    ),
    Metric("seconds", "perf/seconds", "Speed", "time per step", "seconds", column=Column("step, s", median, "{:.4g}")),
    Metric(
        "data_wait_seconds",
        "perf/data_wait_seconds",
        "Speed",
        "wait for data per step",
        "seconds",
        column=Column("wait for data, s", median, "{:.2g}"),
    ),
    Metric(
        "memory_gib",
        "perf/memory_gib",
        "Memory",
        "peak reserved",
        "GiB",
        is_noisy=False,
        console="{:5.1f} GiB".format,
        column=Column("reserved, GiB", max, "{:.2f}"),
    ),
    Metric(
        "memory_allocated_gib",
        "perf/memory_allocated_gib",
        "Memory",
        "peak allocated",
        "GiB",
        is_noisy=False,
        column=Column("allocated, GiB", max, "{:.2f}"),
    ),
    Metric("accuracy", "eval/accuracy", "Accuracy", "accuracy"),
    Metric("accuracy_norm", "eval/accuracy_norm", "Accuracy", "accuracy by bytes"),
    Metric("evaluation_seconds", "eval/seconds"),
    Metric("share", "data/share"),  # of a source in the tokens since step 1
    Metric("targets", "targets"),  # 0, of a step that has none: it changes nothing, and has no loss
    *(Metric(f"float8_{what}", f"float8/{what}", f"float8: {what.replace('_', ' ')}") for what in _FLOAT8),
    *(Metric(f"experts_{what}", f"experts/{what}") for what in _EXPERTS),
)
METRICS = {metric.key: metric for metric in _METRICS}
_KEYS = {metric.name: metric.key for metric in _METRICS}


def shown_name(key: str) -> str:
    """Return the name under which a key of metrics.jsonl is shown."""
    start, dot, of = key.partition(".")
    return (METRICS[start].name if start in METRICS else start) + dot + of


def flat_key(name: str) -> str:
    """Return the key of metrics.jsonl that is shown under a name."""
    start, dot, of = name.partition(".")
    return _KEYS.get(start, start) + dot + of
