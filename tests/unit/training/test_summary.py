"""The commands that a run ends with can be pasted."""

import subprocess
from pathlib import Path

import pytest

from titanlite.commands.generate import COMMAND as GENERATE
from titanlite.config.schema import Config, LRScheduler, Training, Validation
from titanlite.config.stages import AskedStage
from titanlite.data.stages import StageRow, StageTable, stage_table
from titanlite.preflight.run_folder import RunFolder
from titanlite.training.summary import _jump, _prompt, _sizes_of_steps, last_lines


def test_a_command_that_takes_several_lines_is_one_for_the_shell(tmp_path: Path) -> None:
    folder = tmp_path / "a run" / ("x" * 100)
    lines = last_lines(Config(), RunFolder(folder), 1, 1.0, False, stage_table(Config(), 1))
    line = next(line for line in lines if line.startswith("compare"))
    assert "\n" in line
    script = f"titanlite() {{ printf '%s,' \"$@\"; }}\n{line.removeprefix('compare').strip()}"
    assert subprocess.run(["sh", "-c", script], capture_output=True, text=True).stdout == f"compare,{folder},"


@pytest.mark.parametrize(("tokens", "twice"), [(0, "8 steps"), (64, "128 tokens")])
def test_a_longer_run_says_where_its_rate_jumps(tokens: int, twice: str) -> None:
    training = Training(seq_len=8, steps=4, tokens=tokens, global_batch_size=2)
    config = Config(training=training, lr_scheduler=LRScheduler(warmup_steps=0))
    told = _jump(config, 4, stage_table(config, 1))
    assert str(told).startswith(f"with a schedule of {twice} the learning rate jumps from ")


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


@pytest.mark.parametrize(
    ("begins", "steps", "said"),
    [
        ({0: 512}, 6, " of 512"),
        ({0: 512, 4: 512, 9: 512}, 12, " of 512"),  # only the weights of sources change
        ({0: 512, 20: 2048}, 30, ": 20 of 512, then 10 of 2,048"),
        ({0: 512, 20: 2048}, 20, " of 512"),
        ({0: 512, 2: 512, 20: 2048, 25: 512}, 1100, ": 20 of 512, then 5 of 2,048, then 1,075 of 512"),
    ],
)
def test_the_tokens_of_all_steps_are_the_sum_of_those_of_each_size(
    begins: dict[int, int], steps: int, said: str
) -> None:
    rows = [StageRow(step, 0, 0, AskedStage(None, 0, 128, size // 128, 1, {"": 1.0})) for step, size in begins.items()]
    assert _sizes_of_steps(StageTable(rows, steps, 128, ()), steps) == said
