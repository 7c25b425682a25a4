import base64
import math

import numpy as np

from tests.support.run_folder import falling, record
from titanlite.comparison.axis import fitted_limits
from titanlite.comparison.curves import DIFFERENCE, LONGEST, Curve, metrics_of, packed, rows_a_piece, thin
from titanlite.comparison.picture import running_median
from titanlite.comparison.runs import RunRecord


def line_of(run: RunRecord, name: str = "loss"):
    (line,) = next(metric.lines for metric in metrics_of([run]) if metric.name == name)
    return line


def differences(*runs: RunRecord) -> list[Curve]:
    return [line for metric in metrics_of(runs) if metric.name == DIFFERENCE for line in metric.lines]


def test_every_number_of_a_row_is_a_metric_and_stands_in_its_group() -> None:
    rows = [
        {"step": 1, "tokens": 10, "loss": 5.0, "lr": 1e-3, "expert_balance": 0.5},
        {
            "step": 1,
            "tokens": 10,
            "float8_output_sqnr_db.layers.0.wqkv": 30.0,
            "moe/dropped": None,
            "note": "no number",
        },
        {"step": 1, "tokens": 10, "validation_loss.code": 3.0, "validation_bits_per_byte.code": 4.0},
        {"step": 1, "tokens": 10, "accuracy.piqa": 0.5, "accuracy_norm.piqa": 0.6},
    ]
    found = metrics_of([RunRecord("a", rows, {}, "", None)])
    assert {(m.group, m.name) for m in found} == {
        ("Loss", "loss"),
        ("Optimization", "lr"),
        ("Other", "expert_balance"),
        ("float8: output sqnr db", "float8_output_sqnr_db.layers.0.wqkv"),
        ("moe", "moe/dropped"),
        ("Loss", "validation_loss.code"),
        ("Loss", "validation_bits_per_byte.code"),
        ("Accuracy", "accuracy.piqa"),
        ("Accuracy", "accuracy_norm.piqa"),
    }
    dropped = next(m for m in found if m.name == "moe/dropped")
    assert math.isnan(dropped.lines[0].values[0])


def test_the_norm_of_a_recipe_s_only_group_has_no_chart_beside_that_of_all() -> None:
    def of(*groups: str) -> RunRecord:
        norms = {f"{kind}.{group}": 1.0 for kind in ("grad_norm", "weight_norm") for group in groups}
        return RunRecord("a", [{"step": 1, "tokens": 10, "grad_norm": 1.0} | norms], {}, "", None)

    names = {metric.name for metric in metrics_of([of("all"), of("matrices", "others")])}
    norms = {f"{kind}.{group}" for kind in ("grad_norm", "weight_norm") for group in ("matrices", "others")}
    assert names == {"grad_norm", "weight_norm.all"} | norms


def test_time_is_the_sum_of_the_steps_and_a_validation_lies_on_it() -> None:
    rows = [
        {"step": 10, "tokens": 100, "loss": 5.0, "seconds": 2.0},  # a mean over ten steps
        {"step": 20, "tokens": 200, "loss": 4.0, "seconds": 1.0},
        {"step": 15, "tokens": 150, "validation_loss": 4.5},
    ]
    run = RunRecord("a", rows, {}, "", None)
    assert list(line_of(run).seconds) == [20, 30]
    assert list(line_of(run, "validation_loss").seconds) == [25]
    del rows[0]["seconds"]
    assert line_of(run).seconds is None


def test_differences_are_of_equal_tokens_where_both_have_a_loss() -> None:
    def run(losses: list[float | None], batch: int = 1) -> RunRecord:
        rows = [{"step": i, "tokens": 10 * batch * i, "loss": loss} for i, loss in enumerate(losses, 1)]
        return RunRecord("run", rows, {}, "", None)

    first = run([4.0, 3.0, None, 1.0])
    one, other = differences(first, run([4.5, None, 2.0, 1.25, 1.0]), run([2.0], 2))
    np.testing.assert_array_equal(one.tokens, [10, 20, 30, 40])
    np.testing.assert_array_equal(one.values, [0.5, math.nan, math.nan, 0.25])
    np.testing.assert_array_equal(other.values, [-1.0])  # step 1 of twice the batch, at the tokens of step 2
    assert differences(first, RunRecord("b", [{"step": 1, "tokens": 15, "loss": 1.0}], {}, "", None)) == []


def test_a_long_line_is_cut_into_pieces_that_keep_mean_and_extremes() -> None:
    run = record("long", LONGEST + 1, lambda step: None if step <= 4 else 9.0 if step == 6 else 2.0 + step % 2)
    size, mean, low, high = thin(line_of(run))
    assert size == 4
    assert len(mean.values) == math.ceil((LONGEST + 1) / 4)
    np.testing.assert_array_equal(mean.steps[:2], [2.5, 6.5])
    np.testing.assert_array_equal(mean.seconds[:1], [1.25])
    np.testing.assert_array_equal([mean.values[1], low[1], high[1]], [(3 + 9 + 3 + 2) / 4, 2, 9])
    np.testing.assert_array_equal([mean.values[0], low[0], high[0]], [math.nan] * 3)
    assert (mean.steps[-1], mean.values[-1]) == (LONGEST + 1, 3.0)  # the last piece is of one row
    assert thin(line_of(record("short", LONGEST, falling)))[0] == 1


def test_a_line_never_has_many_more_values_than_one_that_is_kept_whole() -> None:
    for rows in (LONGEST, LONGEST + 1, 10_000, 20_000, 123_456, 10**7):
        size = rows_a_piece(rows)
        assert (1 if size == 1 else 3) * math.ceil(rows / size) <= LONGEST
        assert size.bit_count() == 1


def test_packed_numbers_are_little_endian_floats() -> None:
    assert base64.b64decode(packed(np.array([1.0]))) == b"\x00\x00\x80\x3f"
    assert len(base64.b64decode(packed(np.array([1.0]), "f8"))) == 8


def test_axis_of_a_long_run_shows_an_offset_of_a_hundredth() -> None:
    x, y = line_of(record("a", 20_000, falling)).tokens, line_of(record("a", 20_000, falling)).values
    shown = running_median(x, y)
    low, high = fitted_limits([shown], 0, x[-1], x[-1])
    assert low < shown[1].min()
    assert shown[1][0] > 10
    assert 0.01 / (high - low) * 350 > 3  # pixels of a chart 400 high
    values = y[x >= 0.98 * x[-1]]
    low, high = fitted_limits([(x, y)], 0.98 * x[-1], x[-1], x[-1])
    assert values.min() > low > values.min() - 0.02
    assert values.max() < high < values.max() + 0.02


def test_axis_has_all_of_a_short_line_and_all_that_adds_little() -> None:
    x = np.arange(1.0, 11)
    low, high = fitted_limits([(x, x), (x, np.full(10, math.nan))], 0, 10, 10)
    assert (low, high) == (1 - 0.45, 10 + 0.45)
    x = np.arange(1.0, 1001)
    assert fitted_limits([(x, -x)], 0, 1000, 1000)[0] < -1000  # a straight line is shown to its end
    spiked = np.where(x == 700, 1e6, np.sin(x))
    assert fitted_limits([(x, spiked)], 0, 1000, 1000)[1] < 2
    assert fitted_limits([(x, np.full(1000, 3.0))], 0, 1000, 1000) == (3 - 0.15, 3 + 0.15)
    assert fitted_limits([], 0, 1, 1) == fitted_limits([(x, x * math.nan)], 0, 1000, 1000) == (0, 1)


def test_axis_of_the_beginning_shows_the_beginning() -> None:
    x = np.arange(1.0, 1001)
    assert fitted_limits([(x, 100 / x)], 0, 15, 1000)[1] > 100


def test_a_smoothed_line_ends_where_the_run_ends_and_not_at_its_last_step() -> None:
    y = np.where(np.arange(1000) % 2, 2.1, 1.9)
    y[-1] = 9.0
    at, median = running_median(np.arange(1000.0), y)
    assert (at[0], at[-1]) == (0, 999)
    assert median[-1] < 2.2
    steep = 100 - np.arange(1000.0)
    assert running_median(np.arange(1000.0), steep)[1][0] == 100
    gap = np.where(np.arange(1000) < 500, math.nan, 2.0)
    assert np.isnan(running_median(np.arange(1000.0), gap)[1][:200]).all()
