"""Judge whether two runs train alike: with equal bits, within rounding, within seed noise, or differently.

Runs with the same seed see the same samples under any parallel layout. So their losses are compared step by step, and
the effect of the samples cancels. What remains is the effect of the change between the runs, and of rounding, which
grows: runs that differ in the last bit of their weights drift apart. This drift is measured by further runs of the
first config whose initial weights were nudged by one rounding (`training.nudge`). A run that drifts no farther than
they do is within rounding. The first steps are the most telling, because rounding is still small. Later, a single
nudged run may have drifted little by chance.

The reported difference is the mean of the paired differences over the last fifth of the steps. A block bootstrap makes
its interval, as differences of neighbouring steps are correlated. Runs of other seeds show how much is chance.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from titanlite.comparison.curves import Values, paired_differences, tokens_in_words
from titanlite.comparison.runs import RunRecord
from titanlite.observe.metric_table import METRICS
from titanlite.observe.metrics import is_of_step

# Greatest ratio of a run's drift to that of nudged runs that still counts as rounding, for 1, 2, 3 and 4 nudged runs.
# Rounding grows along one direction, so the drift of a run is one number, normally distributed, and its ratio to the
# root mean square of k others follows Student's t with k degrees of freedom. By chance 1 in 1,000 runs exceeds each of
# the first three limits, and 8 in 1,000 exceed the last.
_LIMITS = (640.0, 32.0, 13.0, 5.0)
BEYOND = _LIMITS[-1]
FLOORS = len(_LIMITS)  # greatest number of nudged runs
_RESOLUTION = {"loss": 2.0**-20, "grad_norm": 2.0**-18}  # relative effect of summing float32 in another order
_NOTHING = "nothing"  # stands for the loss of a step without targets
# Keys, up to a dot, whose values must be equal for the verdict "equal bits".
_JUDGED = {"grad_norm", *(key for key, metric in METRICS.items() if metric.group in ("Loss", "Accuracy"))}
_NOT_OF_SAMPLES = ("data.cache_dir",)  # keys of [data] that do not change the samples of a step
_FEWEST = 20  # fewest differences for which an interval is computed
# Two-sided 95 % quantiles of Student's t for 1 to 9 degrees of freedom, and of the normal distribution, for 10 and more
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 1.96)
_LAST = 0.2  # share of the steps, up to the last, over which losses and differences are averaged
_RESAMPLES, _OUTSIDE = 2000, 0.05  # of the bootstrap; probability of values outside the interval


@dataclass(frozen=True)
class Verdict:
    """How the loss of a run differs from that of the first run."""

    run: str  # name of the run
    kind: str  # "equal bits", "within" rounding, seed noise or tolerance, "no difference shown", "undecided", "differs"
    line: str  # text that `titanlite compare` prints
    low: float = math.nan  # low to high: interval of the run's mean loss minus the first's, in nats per token;
    high: float = math.nan  # infinite if there are too few steps, NaN if there is no mean
    # Tokens trained on, [n], ascending, and the loss difference up to which rounding counts as the cause at each, [n],
    # in nats per token; None without nudged runs.
    band: tuple[Values, Values] | None = None
    is_short: bool = False  # one of the two runs ended before the last step of its config

    @property
    def passes(self) -> bool:
        """Return whether the run trains like the first, and neither run ended before the last step of its config."""
        return self.kind not in ("differs", "undecided") and not self.is_short


def judge(
    first: RunRecord,
    other: RunRecord,
    nudged: Sequence[RunRecord] = (),
    seeds: Sequence[RunRecord] = (),
    tolerance: float | None = None,
) -> Verdict | None:
    """Judge a run against the first; None if they have no step in common.

    Args:
        first: the baseline.
        other: the run to judge.
        nudged: runs of the baseline's config with other values of `training.nudge`, at most `FLOORS`.
        seeds: runs of the baseline's config with other seeds.
        tolerance: largest difference of the final loss that is accepted, in nats per token.
    """
    tokens, loss = paired_differences(other, first, "loss")
    _, norm = paired_differences(other, first, "grad_norm")
    is_equal = len(tokens) > 0 and not loss.any() and not norm.any()
    if apart := _apart(first, other, is_equal):
        line = f"differs: {apart[0]} at {tokens_in_words(apart[1])} tokens"
        return Verdict(other.name, "differs", line, band=_band(first, nudged))
    if not len(tokens):
        return None
    last = slice(-max(1, round(len(loss) * _LAST)), None)
    mean, (low, high) = float(loss[last].mean()), _interval(loss[last])
    differ = _other_samples(first, other)
    is_measured = bool(nudged) and not differ
    ratio = max(drift_ratios(first, other, nudged).values()) if is_measured else math.inf
    spread = _spread(first, seeds, tokens[last]) if seeds else 0.0
    has_evidence = math.isfinite(high) or (tolerance is None and (is_measured or spread > 0))
    if is_equal:
        kind, low, high = "equal bits", 0.0, 0.0
    elif nudged and ratio <= _LIMITS[len(nudged) - 1]:
        kind = "within rounding"
    elif abs(mean) < spread:
        kind = "within seed noise"
    elif not has_evidence:
        kind = "undecided"
    elif tolerance is not None:
        kind = "within tolerance" if max(abs(low), abs(high)) <= tolerance else "differs"
    elif not is_measured and low <= 0 <= high and math.isfinite(high):
        kind = "no difference shown"
    else:
        kind = "differs"
    unfinished = [run for run in (first, other) if run.last_step < run.steps_asked]
    silent = [run for run in unfinished if not run.is_running]
    is_short = any(run.state != "running" for run in silent)
    doubts = [
        f"{run.name} {'was last seen' if run.state == 'running' else 'ended'} at step {run.last_step:,} of "
        f"{run.steps_asked:,}"
        for run in silent
    ]
    if kind == "undecided":
        doubts.insert(0, f"an interval takes {_FEWEST / _LAST:.0f} steps that both have logged")
    if not is_equal and not is_measured:
        samples = f"other samples: {', '.join(differ)} differs"
        doubts.insert(0, samples if differ else "rounding not measured: --floor")
    elif not is_equal and _is_between(ratio, len(nudged)):
        doubts.insert(0, f"too far for {len(nudged)} nudged run{'s' * (len(nudged) > 1)} to tell: --floor")
    is_all = not unfinished and len(tokens) == len(first.steps) == len(other.steps)
    among = "" if is_all else f" in the {len(tokens):,} step{'s' * (len(tokens) > 1)} that both have"
    line = _verdict_line(kind, mean, (high - low) / 2, int(tokens[-1]), among, doubts)
    return Verdict(other.name, kind, line, low, high, _band(first, nudged), is_short)


def is_open(first: RunRecord, other: RunRecord, nudged: Sequence[RunRecord]) -> bool:
    """Return whether another nudged run may change the verdict on rounding."""
    if not nudged:
        return True
    if _other_samples(first, other):
        return False
    return _is_between(max(drift_ratios(first, other, nudged).values()), len(nudged))


def _is_between(ratio: float, n: int) -> bool:
    """Return whether a drift ratio is within the limit for n nudged runs, but beyond that for `FLOORS` nudged runs."""
    return BEYOND < ratio <= _LIMITS[n - 1]


def drift_ratios(first: RunRecord, other: RunRecord, nudged: Sequence[RunRecord]) -> dict[str, float]:
    """Return, by metric, the drift of `other` from `first` relative to that of the nudged runs: the largest ratio of
    root mean squares over a window (`_windows`).
    """
    ratios = {}
    for metric in _RESOLUTION:
        tokens, drift = paired_differences(other, first, metric)
        values = {row["tokens"]: row.get(metric, math.nan) for row in first.steps}
        resolution = _RESOLUTION[metric] * np.array([abs(values[t]) for t in tokens.tolist()])
        floor = np.maximum(resolution, _envelope(tokens, first, nudged, metric))
        ratios[metric] = max(
            (_rms(drift[window]) / _rms(floor[window]) for window in _windows(len(tokens))), default=0.0
        )
    return ratios


def tokens_to_equal_loss(first: RunRecord, other: RunRecord) -> float | None:
    """Return the tokens that `other` needs, divided by those of `first`, to reach the higher of their final losses.

    Losses are running means over a fifth of the steps. Below 1, `other` is faster. None if a run has no losses, or one
    of them never was above that loss.
    """
    (x, mine), (y, its) = (_smoothed(run) for run in (other, first))
    if not len(mine) or not len(its):
        return None
    if mine[-1] <= its[-1]:
        reached = _reaches(x, mine, its[-1])
        return reached / y[-1] if reached else None
    reached = _reaches(y, its, mine[-1])
    return x[-1] / reached if reached else None


def _reaches(tokens: Values, losses: Values, loss: float) -> float | None:
    """Return the tokens after which a curve stays at or below `loss`, interpolated; None if it never was above."""
    above = np.flatnonzero(losses > loss)
    if not len(above):
        return None
    i, j = above[-1], above[-1] + 1
    share = (losses[i] - loss) / (losses[i] - losses[j])
    return float(tokens[i] + share * (tokens[j] - tokens[i]))


def _other_samples(first: RunRecord, other: RunRecord) -> list[str]:
    """Return the config keys that differ, and because of which the runs see different samples at the same step."""
    keys = {key for run in (first, other) for key in run.config if key.startswith("data.")} - {*_NOT_OF_SAMPLES}
    found = [
        k for k in (*sorted(keys), "training.seed", "training.seq_len") if first.config.get(k) != other.config.get(k)
    ]
    per_step = [{row["tokens"] / row["step"] for row in run.steps} for run in (first, other)]
    return found if per_step[0] == per_step[1] else [*found, "training.global_batch_size"]


def _apart(first: RunRecord, other: RunRecord, is_equal: bool) -> tuple[str, int] | None:
    """Return why two runs differ whatever their mean difference is, and at how many tokens; None without a reason.

    Reasons are values that are missing or not finite. With `is_equal` (all losses and gradient norms that are finite in
    both runs are equal), another metric with different values is a reason, too.
    """
    its, ours = _judged(first), _judged(other)
    for at in (at for at in its if at in ours):
        (tokens, key), pair = at, (its[at], ours[at])
        start, _, of = key.partition(".")
        name = METRICS[start].about + (of and f" of {of}")
        if pair == (None, None) and start != "grad_norm":  # the norm of a step that both skipped is not finite
            return f"both have a {name} that is not finite, which equals nothing,", tokens
        if None in pair and pair != (None, None):
            return f"one of them has no finite {name}", tokens
        if _NOTHING in pair and pair != (_NOTHING, _NOTHING):
            return f"one of them has no {name}", tokens
        if is_equal and pair[0] != pair[1]:
            return f"{name} alone,", tokens
    return None


def _judged(run: RunRecord) -> dict[tuple[int, str], Any]:
    """Return losses, gradient norms and accuracies by (tokens, key): None if not finite, `_NOTHING` without targets."""
    found: dict[tuple[int, str], Any] = {}
    for row in run.rows:
        none = dict.fromkeys(_RESOLUTION, _NOTHING) if is_of_step(row) else {}
        numbers = none if row.get("targets") == 0 else none | row
        found |= {(row["tokens"], key): x for key, x in numbers.items() if key.partition(".")[0] in _JUDGED}
    return found


def _windows(n: int) -> list[slice]:
    """Divide n steps into windows that double in length: the first step, the second, the next two, the next four, …"""
    ends = [0, *(2**k for k in range(n.bit_length())), n]
    return [slice(i, j) for i, j in pairwise(ends) if i < j <= n]


def _envelope(tokens: Values, first: RunRecord, nudged: Sequence[RunRecord], metric: str) -> Values:
    """Return the largest drift of each nudged run from `first` so far, as root mean square over runs, at `tokens`."""
    found = [np.zeros_like(tokens, dtype=np.float64)]
    for at, drift in (paired_differences(run, first, metric) for run in nudged):
        if len(at):
            largest = np.maximum.accumulate(np.abs(drift))
            found.append(largest[np.clip(np.searchsorted(at, tokens, side="right") - 1, 0, None)] ** 2)
    return np.sqrt(sum(found) / max(1, len(nudged)))


def _rms(x: Values) -> float:
    return float(np.sqrt(np.mean(x**2)))


def _interval(differences: Values) -> tuple[float, float]:
    """Return the interval of the mean by a circular block bootstrap; infinite for fewer than `_FEWEST` differences.

    A block is twice as long as the lag at which the differences are no longer correlated, but at most a fifth of them.
    Resampled means spread less than true ones, because the mean takes a degree of freedom and blocks are few. So the
    interval is widened by the ratio of the quantiles of Student's t and of the normal distribution.
    """
    n = len(differences)
    centred = differences - differences.mean()
    if n < _FEWEST:
        return -math.inf, math.inf
    mean = float(differences.mean())
    if not centred.any():
        return mean, mean
    correlation = np.fft.irfft(np.abs(np.fft.rfft(centred, 2 * n)) ** 2)[: n // 5 + 1]
    faded = np.flatnonzero(correlation < 0.05 * correlation[0])
    block = max(1, min(2 * int(faded[0]) if len(faded) else n, n // 5))
    starts = np.random.default_rng(0).integers(0, n, (_RESAMPLES, -(-n // block)))
    picked = (starts[:, :, None] + np.arange(block)).reshape(_RESAMPLES, -1)[:, :n] % n
    low, high = np.quantile(centred[picked].mean(axis=1), (_OUTSIDE / 2, 1 - _OUTSIDE / 2))
    blocks = n // block
    widened = student(blocks - 1) / _T[-1] * (blocks / (blocks - 1)) ** 0.5
    return mean + widened * float(low), mean + widened * float(high)


def student(degrees: int) -> float:
    """Return the two-sided 95 % quantile of Student's t."""
    return _T[min(degrees, len(_T)) - 1]


def _spread(first: RunRecord, seeds: Sequence[RunRecord], tokens: Values) -> float:
    """Return how far from the given runs' mean loss at `tokens` a further seed's may be by chance (19 times of 20)."""
    wanted = {*tokens.tolist()}
    of_runs = [{r["tokens"]: r["loss"] for r in run.steps if r["tokens"] in wanted} for run in (first, *seeds)]
    common = [t for t in wanted if all(losses.get(t) is not None for losses in of_runs)]
    if not common:
        return 0.0
    means = [float(np.mean([losses[t] for t in common])) for losses in of_runs]
    n = len(means)
    return student(n - 1) * float(np.std(means, ddof=1)) * (1 + 1 / n) ** 0.5


def _band(first: RunRecord, nudged: Sequence[RunRecord]) -> tuple[Values, Values] | None:
    tokens = np.array([row["tokens"] for row in first.steps], dtype=np.float64)
    return (tokens, BEYOND * _envelope(tokens, first, nudged, "loss")) if nudged else None


def _smoothed(run: RunRecord) -> tuple[Values, Values]:
    rows = [(row["tokens"], row["loss"]) for row in run.steps if row["loss"] is not None]
    tokens, losses = np.array(rows, dtype=np.float64).reshape(-1, 2).T
    length = max(1, round(len(losses) * _LAST))
    means = np.convolve(losses, np.full(length, 1 / length), mode="valid") if len(losses) else losses
    return tokens[length - 1 :], means


def _verdict_line(kind: str, mean: float, half: float, tokens: int, among: str, doubts: Sequence[str]) -> str:
    more = f" ({'; '.join(doubts)})" if doubts else ""
    if kind == "equal bits":
        return f"{kind}{among}{more}"
    interval = f" ± {half:.1g}" if math.isfinite(half) else ", of too few steps for an interval,"
    size = f"{mean:+.2g}{interval} at {tokens_in_words(tokens)} tokens".replace("-", "\N{MINUS SIGN}")
    return f"{kind}: {size}{among and ','}{among}{more}"
