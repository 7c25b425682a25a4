"""The messages of fifty mistakes, whole, as a user sees them: `tests/data/messages.txt`.

After a change of a message on purpose write the page anew, and read what has changed:

    PYTHONPATH=. python tests/cli/test_message_page.py > tests/data/messages.txt
"""

import contextlib
import errno
import io
import shlex
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

import titanlite.train
from tests.support.refusals import alone, write_files
from tests.support.run_folder import make_run, saved_run
from titanlite.commands import main
from titanlite.config.toml_file import shipped_folder
from titanlite.data.shards import Meta
from titanlite.exit_code import exit_code

PAGE = Path(__file__).parents[1] / "data" / "messages.txt"
DEBUG = 'extends = ["configs/debug.toml"]\n'
CONFIG, TRAIN = "titanlite validate run.toml", "train.py --config run.toml"


Patch = pytest.MonkeyPatch
Before = Callable[[Patch], object]
NO_FILES: Mapping[str, str] = {}


def nothing(_: Patch) -> None:
    """Have nothing happen before."""


class Mistake(NamedTuple):
    """A command line in a folder with a few files, and what happened there before."""

    command: str
    files: dict[str, str]
    before: Before = nothing


def in_config(
    text: str, command: str = CONFIG, files: Mapping[str, str] = NO_FILES, before: Before = nothing
) -> Mistake:
    """A mistake in a config that is otherwise that of the shipped debug model."""
    return Mistake(command, {"run.toml": DEBUG + text, **files}, before)


def trained(_: Patch) -> None:
    """Leave the folder of a run of run.toml with a checkpoint of step 50."""
    saved_run(["run.toml"], 1, 50)


def damaged(patch: Patch) -> None:
    """Leave the folder of a run whose checkpoint lost a byte."""
    trained(patch)
    (state,) = Path("outputs").glob("*/checkpoints/*/state.json")
    state.write_text(state.read_text()[:-1])


def moved_in(patch: Patch) -> None:
    """Leave a checkpoint of another seed than is asked for, without the config that says so."""
    trained(patch)
    Path("outputs/debug/config.toml").unlink()


def full_disk(patch: Patch) -> None:
    """Write a text, and let no room be left where its token shards are to be ended."""
    Path("a.txt").write_text("once upon a time " * 200)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    patch.setattr(Meta, "write", full)


def trained_elsewhere(_: Patch) -> None:
    """Leave a run of two steps in outputs/a."""
    Path("outputs/a").mkdir(parents=True)
    make_run(Path("outputs/a"), [5.0, 4.0])


RULE = 'help = "mine"\ndefault = "recompute"\n[[rules]]\nop = "{}"\nmodule = ["{}"]\naction = "save"\n'
MISTAKES: dict[str, Mistake] = {
    # What a file says.
    "a misspelt key": in_config("[training]\nstepz = 5\n"),
    "a key of another section": in_config("[training]\nlr = 1e-3\n"),
    "a section that is none": in_config("[optimiser]\nlr = 1e-3\n"),
    "a text for a number": in_config('[training]\nsteps = "many"\n'),
    "a misspelt choice": in_config('[lr_scheduler]\ndecay_type = "cosin"\n'),
    "a number out of its range": in_config("[optimizer]\nbeta2 = 1.0\n"),
    "several at once": in_config('[training]\nsteps = 0\nseq_len = "long"\n[model]\nflavor = "9B"\n'),
    "a key of torchtitan's": in_config("[parallelism]\npipeline_parallel_degree = 2\n"),
    "no TOML": in_config("[training\nsteps = 5\n"),
    "a base that is missing": Mistake(CONFIG, {"run.toml": 'extends = ["base.toml"]\n', "bas.toml": ""}),
    "a source without a weight": in_config('[[data.mixture]]\nname = "web"\nsource = "*.txt"\n'),
    # What a command line says.
    "a config that is missing": Mistake("titanlite validate rum.toml", {"run.toml": DEBUG}),
    "no config": Mistake("titanlite validate", {}),
    "a misspelt flag": in_config("", f"{CONFIG} --training.seqlen 128"),
    "a flag without its value": in_config("", f"{CONFIG} --training.steps"),
    "a misspelt flag of a command": in_config("", f"{CONFIG} --wrld 8"),
    "a misspelt command": Mistake("titanlite valdate run.toml", {}),
    # How a run is laid out.
    "a degree that divides nothing": in_config("[parallelism]\ntensor_parallel_degree = 3\n"),
    "a world too small": in_config("[parallelism]\ntensor_parallel_degree = 2\n", f"{CONFIG} --world 1"),
    "a batch that ranks cannot share": in_config("", f"{CONFIG} --world 3"),
    "a model that the host cannot hold": in_config("", f"{TRAIN} --model.flavor 405B"),
    # What it reads.
    "data that are missing": in_config('[data]\nsource = "texts/*.jsonl"\n', files={"text/a.jsonl": ""}),
    "a record without text": in_config(
        '[data]\nsource = "a.jsonl"\n',
        "titanlite prepare run.toml",
        {"a.jsonl": '{"text": "one"}\n{"body": "two"}\n'},
    ),
    "a tokenizer that is missing": in_config('[data]\ntokenizer = "tokenizer.json"\n'),
    "a tokenizer too large": in_config("[model]\nvocab_size = 128\n"),
    "a URL of no protocol": in_config('[data]\nsource = "htp://example.org/a.txt"\n'),
    "a full disk": in_config('[data]\nsource = "a.txt"\n', "titanlite prepare run.toml", before=full_disk),
    # Recipes, and files of the user's own.
    "a float8 recipe that is none": in_config('[float8]\nrecipe = "row_wise"\n'),
    "a float8 filter of no layer": in_config('[float8]\nrecipe = "rowwise"\nfilter_fqns = ["lm_head"]\n'),
    "a flavor that is none": in_config('[model]\nflavor = "8b-instruct"\n'),
    "a save-list that is none": in_config('[activation_checkpoint]\nrecipe = "ful"\n'),
    "a save-list of no operation": in_config(
        '[activation_checkpoint]\nrecipe = "mine.toml"\n', TRAIN, {"mine.toml": RULE.format("matmull", "wqkv")}
    ),
    "a save-list of no layer": in_config(
        '[activation_checkpoint]\nrecipe = "mine.toml"\n', files={"mine.toml": RULE.format("matmul", "wq")}
    ),
    "an update rule that is none": in_config(
        '[optimizer]\nrecipe = "mine.toml"\n', files={"mine.toml": 'help = "mine"\n[groups.all]\nrule = "adam"\n'}
    ),
    "a model file without a model": in_config(
        '[model]\nfile = "mine.py"\nflavor = "small"\n[job]\nrecipe_dirs = ["."]\n',
        TRAIN,
        {"mine.py": "class Mine:\n    pass\n", "model/mine-small.toml": 'extends = "llama3-debug"\n'},
    ),
    "a rule file without a rule": in_config('[optimizer]\nfile = "lion.py"\n', files={"lion.py": "import torch\n"}),
    # Folders of runs.
    "the folder of another run": in_config("", f"{TRAIN} --training.seed 7", before=trained),
    "a folder that is not new": in_config("", f"{CONFIG} --checkpoint.resume never", before=trained),
    "a step that was not saved": in_config("", f"{CONFIG} --checkpoint.resume 100", before=trained),
    "a checkpoint of another run": in_config("", f"{CONFIG} --training.seed 7", before=moved_in),
    "a damaged checkpoint": in_config("", before=damaged),
    "a folder that cannot be made": in_config('[job]\ndump_folder = "run.toml"\n', TRAIN),
    "a comparison of nothing": Mistake("titanlite compare", {}),
    "a comparison with no run": Mistake("titanlite compare outputs/a outputs/b", {}, trained_elsewhere),
    "an export of no run": Mistake("titanlite export outputs/run --out weights", {}),
    "an evaluation of no run": Mistake("titanlite evaluate outputs/run --tasks hellaswag", {}),
    "an evaluation without tasks": in_config("", "titanlite evaluate outputs/debug", before=trained),
    "a plan without a world": in_config("", "titanlite plan run.toml"),
}


def message_of(mistake: Mistake, folder: Path) -> str:
    """Make a mistake in a new folder, and return what is printed, with names for its path and that of the checkout."""
    program, *words = shlex.split(mistake.command)
    with alone(folder), pytest.MonkeyPatch.context() as patch:
        (folder / "configs").symlink_to(shipped_folder("configs"))
        write_files(mistake.files, folder)
        mistake.before(patch)
        patch.setattr("titanlite.preflight.host_memory.memory_of_host", lambda: 64 << 30)
        patch.setattr(sys, "argv", [program, *words])
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(words) if program == "titanlite" else exit_code(titanlite.train.main)
    text = out.getvalue() + err.getvalue()
    assert code == 2, text
    for path, name in {folder: "HERE", shipped_folder("configs").parent: "TITANLITE"}.items():
        text = text.replace(str(path), name)
    return text


def part_of_page(title: str, message: str) -> str:
    """Return a mistake and its message, as on the page."""
    mistake = MISTAKES[title]
    shown = [f"  {name}:\n{textwrap.indent(text, '    ')}" for name, text in mistake.files.items()]
    before = f"  before: {mistake.before.__doc__}\n" if mistake.before is not nothing else ""
    return f"## {title}\n\n{''.join(shown)}{before}  $ {mistake.command}\n\n{message}\n"


def page(folder: Path) -> Iterator[str]:
    """Yield the page, mistake by mistake."""
    for n, (title, mistake) in enumerate(MISTAKES.items()):
        yield part_of_page(title, message_of(mistake, folder / str(n)))


def test_each_message_is_that_of_the_page(tmp_path: Path) -> None:
    assert "".join(page(tmp_path)) == PAGE.read_text(encoding="utf-8")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        sys.stdout.write("".join(page(Path(made).resolve())))
