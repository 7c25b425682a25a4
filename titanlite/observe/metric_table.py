"""Declare each metric of metrics.jsonl once: its key, and how the console, wandb, TensorBoard and the report show it.

Code that computes a metric passes it to `Report` under its key. Code that shows rows takes the format from this table.
The file has flat keys, which become columns of a table. Weights & Biases and TensorBoard group their panels by names of
the form section/name, from which `flat_key` restores the key. A metric without a declaration is logged and shown under
its key; a comparison puts its chart into the group "Other".
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

AXES = ("step", "tokens")
"""Keys that are the x axes of charts and are not drawn themselves."""


class Column(NamedTuple):
    """A column of a comparison's table: heading, function from a run's logged values to the cell's number, format."""

    heading: str
    pick: Callable[[Sequence[float]], float]
    form: str

    def text(self, values: Sequence[float]) -> str:
        """Return the cell's text for a run that logged these values; "-" if there are none."""
        return self.form.format(self.pick(values)) if values else "-"


@dataclass(frozen=True)
class Metric:
    """The declaration of one logged number.

    Attributes:
        key: key in metrics.jsonl; a source, task, group or layer may follow after a dot, as in "loss.wiki".
        name: name in Weights & Biases and TensorBoard, section/name.
        group: group of its charts in a comparison's report; "": they are in the group "Other", under the key.
        about: description in the report.
        unit: unit in the report; "" if `about` names it, or there is none.
        is_noisy: whether the report may smooth its line; False where smoothing would distort it.
        console: formats its field of a step line, where fields have the order of the table. None: it has no field.
        column: its column in a comparison's table of speed and memory; None: it has no column.
        loss_of: label of the loss in a run's summary and in the console's line of a validation; "": it has none.
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
    Metric("z_loss", "train/z_loss", "Loss", "mean square of the logits' log-sum-exp"),  # without its coefficient
    # Bits per byte include the loss of separator tokens, which have no bytes: ending a document costs bits, too.
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
    Metric(  # FLOPs of recomputed activations do not count
        "tflops_per_gpu",
        "perf/tflops_per_gpu",
        "Speed",
        "model TFLOP/s per GPU",
        column=Column("TFLOP/s/GPU", median, "{:.4g}"),
    ),
    Metric(  # relative to the device's dense bf16 peak, or to a measured rate if the peak is not known
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
    Metric("share", "data/share"),  # share of a source in the tokens since step 1
    Metric("targets", "targets"),  # logged only as 0: the step had no token with a target, thus no loss
    *(Metric(f"float8_{what}", f"float8/{what}", f"float8: {what.replace('_', ' ')}") for what in _FLOAT8),
    *(Metric(f"experts_{what}", f"experts/{what}") for what in _EXPERTS),
)
METRICS = {metric.key: metric for metric in _METRICS}
_KEYS = {metric.name: metric.key for metric in _METRICS}


def shown_name(key: str) -> str:
    """Return the name under which Weights & Biases and TensorBoard show a key of metrics.jsonl."""
    start, dot, of = key.partition(".")
    return (METRICS[start].name if start in METRICS else start) + dot + of


def flat_key(name: str) -> str:
    """Return the key of metrics.jsonl for a name in Weights & Biases or TensorBoard: the inverse of `shown_name`."""
    start, dot, of = name.partition(".")
    return _KEYS.get(start, start) + dot + of
