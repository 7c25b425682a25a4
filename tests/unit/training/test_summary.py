"""The commands that a run ends with can be pasted."""

import subprocess
from pathlib import Path

from titanlite.config.schema import Config
from titanlite.preflight.run_folder import RunFolder
from titanlite.training.summary import last_lines


def test_a_command_that_takes_several_lines_is_one_for_the_shell(tmp_path: Path) -> None:
    folder = tmp_path / "a run" / ("x" * 100)
    line = next(line for line in last_lines(Config(), RunFolder(folder), 1, 1.0, False) if line.startswith("compare"))
    assert "\n" in line
    script = f"titanlite() {{ printf '%s,' \"$@\"; }}\n{line.removeprefix('compare').strip()}"
    assert subprocess.run(["sh", "-c", script], capture_output=True, text=True).stdout == f"compare,{folder},"
