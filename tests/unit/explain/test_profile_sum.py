"""The script that holds a profile's sum against a clock of its own."""

import runpy
import sys
from pathlib import Path

import pytest

from tests.support.profiles import rank_profile
from titanlite.observe.step_profile import MATMUL

SCRIPT = Path(__file__).parents[3] / "scripts" / "check_profile_sum.py"


@pytest.mark.parametrize(("clock_us", "code"), [(201.0, 0), (208.0, 1), (190.0, 1)])
def test_a_clock_that_says_otherwise_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], clock_us: float, code: int
) -> None:
    (tmp_path / "profile").mkdir()
    (tmp_path / "config.toml").touch()
    for rank in (0, 1):
        profile = rank_profile(
            {MATMUL: [(3.0, 7.0)]}, rank=rank, world=2, steps=2, clock_us=clock_us if rank else 200.0
        )
        (tmp_path / "profile" / f"rank{rank}.json").write_text(profile.to_json())
    monkeypatch.setattr(sys, "argv", ["check_profile_sum.py", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "rank 0: 2 steps, parts 0.200 ms, clock 0.200 ms, 0.00% off"
    assert lines[1].startswith(f"rank 1: 2 steps, parts 0.200 ms, clock {clock_us / 1e3:.3f} ms, ")
