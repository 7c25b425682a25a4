"""Answer multiple-choice tasks with the model of a run, a checkpoint or a folder in Hugging Face's layout.

Prints the accuracy in each task and writes evaluation.json into the folder, with the model's choices and every
log-likelihood. The model computes in the run's dtype, without float8. On several GPUs:
torchrun --nproc-per-node 8 -m titanlite evaluate RUN.
"""

import json
import math
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import titanlite
from titanlite.checkpoint.publish import step_folder
from titanlite.checkpoint.resume import dims_of, require_average
from titanlite.checkpoint.saved_state import read_state
from titanlite.commands.arguments import Command
from titanlite.commands.export import asked_step, trained_tokenizer
from titanlite.config.build import show
from titanlite.config.config_json import check_weight_files, recipe_of
from titanlite.config.problems import Origin, Problems
from titanlite.config.read import read_config
from titanlite.config.recipe_schema import ModelDims
from titanlite.config.schema import FROM_CHECKPOINT, Config, Model, Training
from titanlite.data.prepare import check_vocabulary
from titanlite.data.tokenizer import Tokenizer, load_tokenizer, panics_raised
from titanlite.durable import require_reachable, write_durably
from titanlite.errors import CheckpointError, ConfigError
from titanlite.evaluation.requests import EncodedTask, encode_task
from titanlite.evaluation.tasks import HUB, load_tasks
from titanlite.json_file import read_json
from titanlite.preflight.launcher import check_launcher
from titanlite.preflight.output_file import require_place, writable
from titanlite.preflight.run_folder import RunFolder
from titanlite.text_table import columns

if TYPE_CHECKING:
    from titanlite.evaluation.score import Score

_WHERE = "titanlite evaluate"
_BATCH_TOKENS = 4096  # tokens per batch for a folder's model; a run's config has its own batch
COMMAND = Command(
    "evaluate",
    __doc__ or "",
    {
        "TARGET": "a run's folder, one of its checkpoints (step-...), or a folder with config.json and safetensors",
        "--tasks NAMES": f"tasks between commas: {', '.join(HUB)}, PATH.jsonl or NAME=PATH; default: the run's",
        "--step N": "step of the run's checkpoint; default: the newest",
        "--ema": "evaluate the average of weights that optimizer.ema_decay has kept",
        "--out FILE": "file to write; default: evaluation.json, or evaluation-ema.json, in the folder",
        "--tokenizer FILE": "the model's tokenizer.json, if it is not where the run, or the folder, has it",
    },
    takes="TARGET",
)


@dataclass(frozen=True)
class _Target:
    """The model that is to be evaluated.

    Attributes:
        folder: folder that evaluation.json is written into by default.
        seq_len: the longest sequence that the model takes, in tokens.
        checkpoint: folder with the weights; None: they are in `config.checkpoint.initial_load_path`.
        averaged: whether to evaluate the average of the weights that the checkpoint holds.
    """

    folder: Path
    config: Config
    dims: ModelDims
    tokenizer: Tokenizer
    seq_len: int
    checkpoint: Path | None = None
    averaged: bool = False


def run(argv: Sequence[str]) -> int:
    """Evaluate a model on tasks, in this process or together with the other processes that a launcher has started."""
    want = "one folder: of a run, a checkpoint, or a model in Hugging Face's layout"
    word, given = COMMAND.read_word(argv, want, "outputs/run")
    check_launcher()
    of = given.get("--step"), given.get("--tokenizer"), "--ema" in given
    target = _find_target(Path(os.path.expanduser(word)), *of)
    tasks = [task for task in given.get("--tasks", "").split(",") if task] or target.config.evaluation.tasks
    if not tasks:
        want = "tasks: the config of what is evaluated names none"
        raise ConfigError.of("command line", "--tasks", "", want, f"--tasks {next(iter(HUB))},my_questions.jsonl")
    default = target.folder / f"evaluation{'-ema' * target.averaged}.json"
    out = Path(os.path.expanduser(given.get("--out", str(default))))
    require_place("--out", out)
    check_vocabulary(target.tokenizer, target.dims.vocab_size, is_given=True)
    encoded = [encode_task(task, target.tokenizer, target.seq_len) for task in load_tasks(tasks)]
    scores = _score_tasks(target, encoded)
    if wrong := [score.task for score in scores if math.isnan(score.accuracy)]:
        saw, want = "a log-likelihood that is not finite", "a model whose logits are numbers"
        fix = "another step or folder: these weights, or what is computed of them, are not finite"
        raise CheckpointError.of(_WHERE, ", ".join(wrong), saw, want, fix)
    if os.environ.get("RANK", "0") == "0":
        _write_answers(out, target, encoded, scores)
        sys.stdout.write(_accuracy_table(encoded, scores, target.seq_len) + f"{out}\n")
    return 0


def _find_target(path: Path, step: str | None, tokenizer: str | None, averaged: bool) -> _Target:
    """Find out whether `path` is a run, a checkpoint or a model's folder, and read everything but the weights."""
    require_reachable(path / "config.toml")
    if (path / "config.toml").is_file():
        return _target_of_run(RunFolder(path), step, tokenizer, averaged)
    above = path.resolve().parent.parent
    is_model = (path / "config.json").is_file()  # an exported model in the run folder is no checkpoint
    if path.is_dir() and not is_model and path.name.startswith("step-") and (above / "config.toml").is_file():
        if step is not None:
            raise ConfigError.of("command line", "--step", step, f"{path} alone, which has its step", "leave it out")
        return _target_of_run(RunFolder(above), path.name.removeprefix("step-"), tokenizer, averaged)
    if not path.exists():
        want = "the folder of a run, a checkpoint, or a model in Hugging Face's layout; there is none of this name"
        fix = "correct the path; a model of the hub is fetched by `hf download NAME --local-dir FOLDER`"
        raise ConfigError.of(_WHERE, "TARGET", show(str(path)), want, fix)
    target = _target_of_folder(path, tokenizer)
    if averaged:
        want, fix = "a run, or a checkpoint of one: a folder of weights has no second ones", "leave it out"
        raise ConfigError.of("command line", "--ema", str(path), want, fix)
    return target


def _target_of_run(folder: RunFolder, step: str | None, tokenizer: str | None, averaged: bool) -> _Target:
    config, number = read_config(folder.config)[0], asked_step(_WHERE, folder.checkpoints, step)
    checkpoint = step_folder(folder.checkpoints, number)
    state = read_state(checkpoint, number)
    if averaged:
        require_average(_WHERE, checkpoint, state)
    name = tokenizer or config.data.tokenizer
    found = trained_tokenizer(_WHERE, name, config.data.add_bos_token, state.tokenizer)
    if found is None:  # the run read token files, which name no tokenizer
        if tokenizer is None:
            want = "the tokenizer.json that made the token files which the run read"
            raise CheckpointError.of(_WHERE, "--tokenizer", "", want, "--tokenizer FILE")
        found = load_tokenizer(tokenizer, config.data.add_bos_token)
    dims = dims_of(checkpoint, state)
    return _Target(folder.path, config, dims, found, config.training.seq_len, checkpoint, averaged)


def _target_of_folder(path: Path, tokenizer: str | None) -> _Target:
    problems = Problems(Origin(_WHERE))
    found = recipe_of(str(path), problems, "TARGET")
    if found is not None:
        check_weight_files(str(path), problems, "TARGET")
    problems.raise_all()
    assert found is not None  # noqa: S101  # else `raise_all` has raised
    architecture, dims = found
    content: dict[str, Any] = read_json(path / "config.json")
    stored = content.get("dtype") or content.get("torch_dtype")  # transformers 5 writes "dtype"
    dtype = "bfloat16" if stored == "bfloat16" else "float32"
    file = tokenizer or str(path / "tokenizer.json")
    model = Model(name=architecture, flavor=FROM_CHECKPOINT)
    config = Config(model=model, training=Training(mixed_precision_param=dtype))
    config = replace(config, checkpoint=replace(config.checkpoint, initial_load_path=str(path)))
    trained = content.get("max_position_embeddings")
    longest = dims.max_seq_len or (trained if isinstance(trained, int) and trained > 0 else Training.seq_len)
    return _Target(path, config, dims, load_tokenizer(file, _begins_with_bos(file)), longest)


def _begins_with_bos(file: str) -> bool:
    """Return whether a tokenizer.json makes transformers put a token, as BOS, before each text."""
    import tokenizers

    if not os.path.isfile(path := os.path.expanduser(file)):
        return False
    with suppress(Exception), panics_raised():  # no tokenizer (`load_tokenizer` refuses it), or no token for "a"
        tokenizer = tokenizers.Tokenizer.from_file(path)
        whole, bare = (tokenizer.encode("a", add_special_tokens=adds).ids for adds in (True, False))
        return len(whole) > len(bare) and whole[0] != bare[0]
    return False


def _score_tasks(target: _Target, encoded: list[EncodedTask]) -> "list[Score]":
    """Load the target's model onto all ranks, and return its score in each task."""
    import torch.distributed as dist

    from titanlite.checkpoint.collective import on_all_ranks
    from titanlite.device import device_of
    from titanlite.evaluation.load import load_model
    from titanlite.evaluation.score import Evaluator, require_same_questions
    from titanlite.parallel.process_group import start_process_group
    from titanlite.training.attention import choose_attention

    config, is_run = target.config, target.checkpoint is not None
    if not is_run:  # sequences as long as the longest text, rounded up to a power of two
        longest = max(len(request.tokens) - 1 for task in encoded for request in task.requests)
        seq_len = min(target.seq_len, max(32, 1 << (longest - 1).bit_length()))
        training = replace(config.training, seq_len=seq_len, local_batch_size=max(1, _BATCH_TOKENS // seq_len))
        config = replace(config, training=training)
    device = start_process_group(config.comm)
    try:
        require_same_questions(on_all_ranks(lambda: [e.task.fingerprint for e in encoded]))
        model, mesh = load_model(config, target.dims, device_of(device), target.checkpoint, target.averaged)
        if mesh.built_for.is_gpu:
            chosen = choose_attention(mesh.built_for, config, target.dims)
            if chosen.missed and dist.get_rank() == 0:
                sys.stderr.write(f"warning: {chosen.feature}: {chosen.missed[0].why}\n")
        seq_len = config.training.seq_len
        shape = {"seq_len": seq_len, "tokens": seq_len * config.training.local_batch_size}
        of_model = {"whole_rows": bool(config.model.file), "softcap": target.dims.logit_softcap}
        return Evaluator(encoded, **shape, **of_model).score(model, mesh)
    finally:
        dist.destroy_process_group()


def _accuracy_table(encoded: list[EncodedTask], scores: "list[Score]", seq_len: int) -> str:
    rows: list[tuple[str, ...]] = [("task", "questions", "accuracy", "by bytes")]
    for score in scores:
        shares = (f"{x:.2%} ± {score.standard_error(x):.2%}" for x in (score.accuracy, score.accuracy_norm))
        rows.append((score.task, f"{score.questions:,}", *shares))
    cut = [
        f"{e.task.name}: {e.n_cut:,} choices are longer than {seq_len} tokens with their context, which lost its "
        "beginning\n"
        for e in encoded
        if e.n_cut
    ]
    return columns(*rows) + "".join(cut)


def _write_answers(out: Path, target: _Target, encoded: list[EncodedTask], scores: "list[Score]") -> None:
    tasks: dict[str, Any] = {}
    for e, score in zip(encoded, scores, strict=True):
        of_task = {"source": e.task.source, "fingerprint": e.task.fingerprint, **vars(score)}
        for name in ("accuracy", "accuracy_norm"):
            error = score.standard_error(of_task[name])
            of_task[f"{name}_standard_error"] = None if math.isnan(error) else error
        tasks[of_task.pop("task")] = of_task
    content = {
        "titanlite": titanlite.__version__,
        "model": str(target.checkpoint or target.folder) + " (ema)" * target.averaged,
        "dtype": target.config.training.mixed_precision_param,
        "tasks": tasks,
    }
    with writable(_WHERE, "--out", out):
        write_durably(out, json.dumps(content) + "\n")
