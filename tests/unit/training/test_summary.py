"""The commands that a run ends with can be pasted."""

import subprocess
from pathlib import Path

import pytest

from titanlite.commands.generate import COMMAND as GENERATE
from titanlite.config.schema import Config, Validation
from titanlite.preflight.run_folder import RunFolder
from titanlite.training.summary import _prompt, last_lines


def test_a_command_that_takes_several_lines_is_one_for_the_shell(tmp_path: Path) -> None:
    folder = tmp_path / "a run" / ("x" * 100)
    line = next(line for line in last_lines(Config(), RunFolder(folder), 1, 1.0, False) if line.startswith("compare"))
    assert "\n" in line
    script = f"titanlite() {{ printf '%s,' \"$@\"; }}\n{line.removeprefix('compare').strip()}"
    assert subprocess.run(["sh", "-c", script], capture_output=True, text=True).stdout == f"compare,{folder},"


@pytest.mark.parametrize(
    ("samples", "prompt"),
    [
        (("def f", "x"), "def f"),
        (("", "--ema", "a\nb", "x" * 51, "for "), "for "),
        (("",), "Once upon a time"),
        ((), "Once upon a time"),
    ],
)
def test_a_prompt_is_one_that_the_command_takes(samples: tuple[str, ...], prompt: str) -> None:
    assert _prompt(Config(validation=Validation(samples=samples))) == prompt
    _, given = GENERATE.read_words(["outputs/run", "--prompt", prompt])
    assert given == {"--prompt": prompt}
