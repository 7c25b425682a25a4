"""Tasks of an evaluation are checked before a run starts, together with all else."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.cli.commands.conftest import Call

DEBUG = Path(__file__).parents[3] / "configs" / "debug.toml"


def test_wrong_tasks_and_sources_are_said_at_once(tmp_path: Path, call: "Call") -> None:
    config = tmp_path / "mine.toml"
    config.write_text(
        f'extends = "{DEBUG}"\n[validation]\nsources = ["a=nothing.txt"]\n[evaluation]\ntasks = ["helaswag"]\n'
    )
    said = call("validate", str(config), ends=2)
    assert f"{config}: 2 problems\n" in said
    assert "  line 3  validation.sources.a = 'nothing.txt', which matches no file" in said
    assert '  line 5  evaluation.tasks = "helaswag"' in said
    assert "fix:  did you mean hellaswag?" in said


def test_token_files_need_the_tokenizer_that_made_them(tmp_path: Path, call: "Call") -> None:
    (tmp_path / "ids.bin").write_bytes(bytes(range(256)) * 400)
    (tmp_path / "meta.json").write_text('{"dtype": "uint16"}')
    task = tmp_path / "task.jsonl"
    task.write_text('{"query": "1 + 1 =", "choices": ["2", "3"], "gold": 0}\n')
    sources = f'[data]\nsource = "{tmp_path}/ids.bin"\ncache_dir = "{tmp_path}/cache"\n[validation]\nenable = false\n'
    config = tmp_path / "mine.toml"
    sizes = '[model]\nvocab_size = 65536\nflavor = "debug"\n'
    config.write_text(f'{sizes}{sources}[training]\nseq_len = 64\nsteps = 300\n[evaluation]\ntasks = ["{task}"]\n')
    said = call("validate", str(config), ends=2)
    assert "want: data.tokenizer as well: token files do not say which tokenizer made their ids" in said
