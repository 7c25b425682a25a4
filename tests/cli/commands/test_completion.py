"""The completion scripts, as bash itself runs one: commands, flags, files, keys of the config and their choices."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.commands.conftest import Call
from titanlite.commands import COMMANDS, main
from titanlite.config.schema import schema_keys

COMPLETE = """
source ./script
while IFS= read -r line; do
    eval "COMP_WORDS=($line)"
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
    _shtab_titanlite
    echo "${COMPREPLY[@]}"
done
complete -p titanlite
"""


@pytest.fixture
def complete(call: Call, tmp_path: Path):
    (tmp_path / "script").write_text(call("completion", "bash"))
    (tmp_path / "mine.toml").touch()

    def words(*lines: str) -> list[list[str]]:
        done = subprocess.run(
            ["bash", "-c", COMPLETE], input="\n".join(lines) + "\n", cwd=tmp_path, capture_output=True, text=True
        )
        assert (done.stderr, done.returncode) == ("", 0)
        *found, registered = done.stdout.splitlines()
        assert registered.endswith("-F _shtab_titanlite titanlite")
        return [line.split() for line in found]

    return words


def test_bash_completes_commands_files_keys_and_choices(complete) -> None:
    commands, files, keys, names, boolean, choices, own, kinds, recipe, model, gpu, dtype, help_of = complete(
        "titanlite ''",
        "titanlite validate m",
        "titanlite validate mine.toml --training.",
        "titanlite validate mine.toml --float8.recipe r",
        "titanlite plan mine.toml --compile.enable ''",
        "titanlite plan mine.toml --world 8 --training.on_nonfinite ''",
        "titanlite export run --",
        "titanlite recipes ''",
        "titanlite recipes float8 row",
        "titanlite new --model llama3-8",
        "titanlite new my.toml --gpu h",
        "titanlite export run --dtype ''",
        "titanlite train --help tr",
    )
    assert commands == list(COMMANDS)
    assert files == ["mine.toml"]
    assert keys == [f"--{key}" for key in schema_keys() if key.startswith("training.")]
    assert names == ["rowwise", "rowwise_with_gw_hp"]
    assert boolean == ["true", "false"]
    assert choices == ["stop", "skip"]
    assert {"--step", "--out", "--dtype"} <= set(own)
    assert not {f"--{key}" for key in schema_keys()} & set(own)
    assert set(kinds) == {"model", "float8", "activation_checkpoint", "optimizer"}
    assert recipe == names
    assert model == ["llama3-8B"]
    assert {"h100", "h200"} <= set(gpu)
    assert dtype == ["bfloat16", "float32"]
    assert help_of == ["training"]


def test_zsh_is_given_the_same_words(call: Call, tmp_path: Path) -> None:
    script = call("completion", "zsh")
    assert script.startswith("#compdef titanlite\n")
    for word in (*COMMANDS, *(f"--{key}" for key in schema_keys())):
        assert word in script
    if zsh := shutil.which("zsh"):
        (tmp_path / "script").write_text(script)
        subprocess.run([zsh, "-n", str(tmp_path / "script")], check=True)


@pytest.mark.parametrize("words", [[], ["fish"], ["bash", "zsh"]])
def test_another_shell_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", *words]) == 2
    assert "want: one of bash, zsh" in capsys.readouterr().err
