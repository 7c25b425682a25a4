"""The completion script that tyro makes, as bash itself runs it: commands, flags, keys of the config and choices."""

import subprocess
from pathlib import Path

import pytest

from titanlite.commands import COMMANDS, main
from titanlite.config.schema import schema_keys

COMPLETE = """
source ./script
while IFS= read -r line; do
    eval "COMP_WORDS=($line)"
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
    _tyro_titanlite
    echo "${COMPREPLY[@]}"
done
complete -p titanlite
"""


def test_bash_completes_commands_keys_and_choices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tyro-print-completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    lines = [
        "titanlite ''",
        "titanlite validate mine.toml --training.",
        "titanlite plan mine.toml --world 8 --training.on_nonfinite ''",
        "titanlite export run --",
    ]
    done = subprocess.run(
        ["bash", "-c", COMPLETE], input="\n".join(lines) + "\n", cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.stderr, done.returncode) == ("", 0)
    *found, registered = done.stdout.splitlines()
    commands, keys, choices, own = ({*line.split()} for line in found)
    assert registered.endswith("-o default -F _tyro_titanlite titanlite")
    assert commands == {*COMMANDS, "-h", "--help"}
    assert keys == {f"--{key}" for key in schema_keys() if key.startswith("training.")}
    assert choices == {"stop", "skip"}
    assert {"--step", "--out", "--dtype"} <= own
    assert not {f"--{key}" for key in schema_keys()} & own


def test_zsh_registers_what_eval_runs_and_completes_by_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tyro-print-completion=zsh"]) == 0
    script = capsys.readouterr().out
    last = 'if [[ $funcstack[1] == _titanlite ]]; then _tyro_titanlite "$@"; else compdef _tyro_titanlite titanlite; fi'
    assert script.startswith("#compdef titanlite\n")
    assert script.splitlines()[-1] == last
    assert script.count('_tyro_titanlite "$@"') == 1


@pytest.mark.parametrize("words", [[], ["fish"], ["bash", "x"]])
def test_another_shell_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tyro-print-completion", *words]) == 2
    assert "want: bash or zsh" in capsys.readouterr().err
    assert main(["completion", *words]) == 2  # which was a command
    assert "fix:  titanlite --tyro-print-completion bash\n" in capsys.readouterr().err
