"""experts.jsonl: no token is lost, the file stays short, and what is drawn of it is how uneven use is."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from titanlite.observe.experts_file import ROWS, ExpertsFile
from titanlite.observe.heat_map import draw_heat_map, loads
from titanlite.observe.metrics import read_metrics


def write_steps(path: Path, steps: Iterable[int], resume_step: int, last: int, saves: int = 0) -> None:
    """Write rows of steps in which expert 0 has one token and expert 1 as many as the step's number."""
    file = ExpertsFile(path, resume_step, last)
    for step in steps:
        file.experts(step, 1000 * step, {"layers.0": [1, step]})
        if step == saves:
            file.sync()
    file.close()


def test_a_row_is_the_sum_of_the_steps_since_the_row_before(tmp_path: Path) -> None:
    path = tmp_path / "experts.jsonl"
    write_steps(path, range(1, 10_001), 0, 10_000)
    rows = read_metrics(path)
    assert ROWS <= len(rows) <= ROWS + 1
    assert rows[-1]["step"] == 10_000
    before = 0
    for row in rows:
        steps = range(before + 1, row["step"] + 1)
        assert row == {"step": steps[-1], "tokens": 1000 * steps[-1], "experts": {"layers.0": [len(steps), sum(steps)]}}
        before = steps[-1]


def test_a_run_that_resumes_goes_on_where_its_checkpoint_is(tmp_path: Path) -> None:
    """The checkpoint is of step 101, in the midst of the steps of a row; the crash came after 150."""
    path = tmp_path / "experts.jsonl"
    write_steps(path, range(1, 151), 0, 3000, saves=101)
    write_steps(path, range(102, 3001), 101, 3000)
    rows = read_metrics(path)
    assert 101 in [row["step"] for row in rows]
    assert sum(row["experts"]["layers.0"][0] for row in rows) == 3000
    assert sum(row["experts"]["layers.0"][1] for row in rows) == sum(range(3001))


def test_loads_are_over_the_mean_of_a_layer_with_the_fullest_first() -> None:
    rows = [
        {"experts": {"layers.0": [1, 3], "layers.1": [0, 0, 0]}},
        {"experts": {"layers.0": [2, 2], "layers.1": [4, 0, 2]}},
    ]
    found = loads(rows)
    assert list(found) == ["layers.0", "layers.1"]
    np.testing.assert_array_equal(found["layers.0"], [[1.5, 0.5], [1, 1]])
    np.testing.assert_array_equal(found["layers.1"], [[np.nan] * 3, [2, 1, 0]])


def test_equal_use_is_white_and_a_collapsed_router_is_red_and_blue(tmp_path: Path) -> None:
    import matplotlib.image

    def share(tokens: list[int]) -> tuple[float, float, float]:
        """Give the shares of the picture that are white within the axes, dark red and dark blue."""
        rows = [{"step": n, "tokens": n, "experts": {"layers.0": tokens}} for n in (1, 2)]
        draw_heat_map({"run": rows}, tmp_path / "heat_map.png")
        red, green, blue = np.moveaxis(matplotlib.image.imread(tmp_path / "heat_map.png")[..., :3], 2, 0)
        middle = slice(red.shape[0] // 4, 3 * red.shape[0] // 4), slice(red.shape[1] // 4, red.shape[1] // 2)
        near_white = (abs(red - 0.97) < 0.01) & (abs(green - 0.97) < 0.01) & (abs(blue - 0.97) < 0.01)
        is_red, is_blue = (red > 0.35) & (green < 0.05), (blue > 0.35) & (red < 0.05)
        return tuple(float(one[middle].mean()) for one in (near_white, is_red, is_blue))  # type: ignore[return-value]

    assert share([5, 5, 5, 5, 5, 5, 5, 5])[0] > 0.95
    white, red, blue = share([40, 0, 0, 0, 40, 0, 0, 0])
    assert white < 0.05
    assert 0 < red < blue
