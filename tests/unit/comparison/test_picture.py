import matplotlib.image
import numpy as np

from tests.support.run_folder import falling, record
from titanlite.comparison.curves import COLOURS
from titanlite.comparison.judge import Verdict
from titanlite.comparison.picture import draw_losses, loss_figure
from titanlite.comparison.runs import RunRecord


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_two_long_runs_with_a_verdict() -> None:
    runs = [record("base", 20_000, falling), record("other", 20_000, lambda step: falling(step) + 0.01 * (step > 500))]
    band = (np.array([200_000.0, 10_000_000, 20_000_000]), np.array([0.5, 0.002, 0.003]))
    verdict = Verdict("other", "differs", "differs: +0.0100 ± 0.0003", 0.0097, 0.0103, band)
    figure = loss_figure(runs, [verdict])
    losses, differences = figure.axes
    assert figure.get_suptitle() == "other compared with base\ndiffers: +0.0100 ± 0.0003"
    assert texts(losses) == ["base", "other", "no more than noise"]
    low, high = losses.get_ylim()
    assert high - low < 1.2  # of 9.9
    low, high = differences.get_ylim()
    assert low < -0.002
    assert 0.01 < high < 0.03
    assert len(differences.collections) == 1  # the band


def test_no_run_is_missing_and_each_has_one_line_of_the_legend() -> None:
    runs = [record(f"run {i}", 300 if i != 3 else 0, falling) for i in range(12)]
    runs[1].rows.append({"step": 300, "tokens": 300_000, "validation_loss": 4.0})
    figure = loss_figure(runs)
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == [f"run {i}" + " (no logged step)" * (i == 3) for i in range(12)] + ["validation"]
    styles = {(line.get_color(), line.is_dashed()) for line in legend.get_lines()[:12]}
    assert len(styles) == 12
    assert figure.get_suptitle() == "11 runs compared with run 0"


def test_one_run_has_one_panel() -> None:
    figure = loss_figure([record("alone", 10, falling)])
    assert len(figure.axes) == 1
    assert figure.get_suptitle() == "Run alone"


def test_runs_that_share_no_number_of_tokens_have_no_panel_of_differences() -> None:
    other = RunRecord("other", [{"step": 1, "tokens": 1500, "loss": 5.0}], {}, "", None)
    assert len(loss_figure([record("base", 10, falling), other]).axes) == 1


def test_a_long_noisy_run_keeps_its_colour(tmp_path) -> None:
    def noisy(step: int) -> float | None:
        return None if step == 500 else 2 + (step * 7919 % 13) / 10

    draw_losses([record("long", 5_000, noisy)], tmp_path / "p.png")
    pixels = matplotlib.image.imread(tmp_path / "p.png")[..., :3]
    blue = [int(COLOURS[0][i : i + 2], 16) / 255 for i in (1, 3, 5)]
    assert (abs(pixels - blue).max(axis=-1) < 0.01).any()  # the median, opaque above the faint raw curve
