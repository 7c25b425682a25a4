"""Write a checkpoint of a run as a folder that Hugging Face's transformers loads, and push it if asked."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import titanlite
from titanlite.checkpoint import publish
from titanlite.checkpoint.resume import dims_of, require_average
from titanlite.checkpoint.saved_state import read_state
from titanlite.commands.arguments import Command
from titanlite.commands.model_card import model_card
from titanlite.comparison.run_paths import require_runs
from titanlite.config.read import read_config
from titanlite.config.schema import Config
from titanlite.errors import CheckpointError, Problem, describe
from titanlite.hub import push, require_login
from titanlite.preflight.run_folder import RunFolder
from titanlite.preflight.trained_model import asked_step, trained_tokenizer
from titanlite.streams import say_first

_DTYPES = ("bfloat16", "float32")
COMMAND = Command(
    "export",
    __doc__ or "",
    {
        "RUN": "run folder, <dump_folder>/<name>",
        "--step N": "step of the checkpoint, or best: the one with the lowest validation loss; default: the newest",
        "--ema": "write the average of weights that optimizer.ema_decay has kept, in their place",
        "--out FOLDER": "folder to create; default: hugging_face/step-<step>, or step-<step>-ema, in the run folder",
        "--dtype DTYPE": "dtype of the weights, bfloat16 or float32; default: the run's compute dtype",
        "--tokenizer FILE": "the run's tokenizer.json, if it is no longer where data.tokenizer says; or hf:OWNER/MODEL",
        "--push NAME": "push it, with a model card, to OWNER/MODEL of the Hugging Face hub; a new one is private",
    },
    takes="RUN",
)


def run(argv: Sequence[str]) -> int:
    """Export a checkpoint of a run into a new folder, push it if asked, and print the commit's URL and the path."""
    word, given = COMMAND.read_word(argv, "one run's folder", "outputs/run")
    folder = RunFolder(word)
    require_runs("titanlite export", [folder.path])
    config = read_config(folder.config)[0]
    dtype = given.get("--dtype", config.training.mixed_precision_param)
    step = asked_step("titanlite export", folder.checkpoints, given.get("--step"))
    checkpoint = publish.step_folder(folder.checkpoints, step)
    averaged = "--ema" in given
    out = Path(given.get("--out", folder.path / "hugging_face" / f"{checkpoint.name}{'-ema' * averaged}"))
    _check_target(config, out, dtype, given.get("--push"))
    state = read_state(checkpoint, step)
    if averaged:
        require_average("titanlite export", checkpoint, state)
    if repo := given.get("--push"):
        require_login(repo, "--push")  # before an export that may take long
    say_first(f"exporting {checkpoint}")

    from titanlite.checkpoint.hugging_face import export_checkpoint

    dims = dims_of(checkpoint, state)
    name = given.get("--tokenizer", config.data.tokenizer)
    tokenizer = trained_tokenizer("titanlite export", name, config.data.add_bos_token, state.tokenizer)
    say = lambda line: _print_line(f"  {line}")  # noqa: E731
    export_checkpoint(checkpoint, out, config, dims, tokenizer, dtype, say, averaged=averaged)
    if tokenizer is None:
        _print_line("  no tokenizer: the run read token files")
    if repo:
        card = model_card(folder, config, state, repo.rpartition("/")[2], averaged)
        (out / "README.md").write_text(card, encoding="utf-8")
        message = f"Step {step:,}, by titanlite {titanlite.__version__}"
        _print_line(f"  pushed to {push(out, repo, message, '--push')}")
    _print_line(str(out))
    return 0


def _print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _check_target(config: Config, out: Path, dtype: str, repo: str | None) -> None:
    problems: list[Problem] = []
    if dtype not in _DTYPES:
        problems.append(Problem("--dtype", dtype, " or ".join(_DTYPES), f"--dtype {_DTYPES[0]}"))
    if config.model.file:
        want = "a shipped architecture: for others the Hugging Face names of weights are not known"
        fix = "read the checkpoint's safetensors (docs/checkpoint.md)"
        problems.append(Problem("model.file", f'"{config.model.file}"', want, fix))
    if os.path.lexists(out):
        fix = "name another, or delete it"
        fix += f"; or push what is there: hf upload {repo} {out} --private" if repo else ""
        problems.append(Problem("--out", str(out), "a folder that does not exist yet", fix))
    elif os.path.lexists(tmp := out.with_name(f"{out.name}.tmp")):
        want = (
            f"no {tmp}, where an export writes first: another export is running or was killed, or it is something else"
        )
        problems.append(Problem("--out", str(out), want, "name another, or delete what is there"))
    if problems:
        raise CheckpointError(describe("titanlite export", problems))
