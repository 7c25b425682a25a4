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
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import titanlite
from titanlite.commands.arguments import OF_TARGET, ONE_TARGET, TARGET, Command
from titanlite.data.prepare import check_vocabulary
from titanlite.durable import write_durably
from titanlite.errors import CheckpointError, ConfigError
from titanlite.evaluation.requests import EncodedTask, encode_task
from titanlite.evaluation.tasks import HUB, load_tasks
from titanlite.hub import is_hub_name
from titanlite.preflight.launcher import check_launcher
from titanlite.preflight.output_file import require_place, writable
from titanlite.preflight.trained_model import TrainedModel, find_trained_model
from titanlite.streams import say_first
from titanlite.text_table import columns

if TYPE_CHECKING:
    from titanlite.evaluation.score import Score

_WHERE = "titanlite evaluate"
_BATCH_TOKENS = 4096  # tokens per batch for a folder's model; a run's config has its own batch
COMMAND = Command(
    "evaluate",
    __doc__ or "",
    {
        **TARGET,
        "--tasks NAMES": f"tasks between commas: {', '.join(HUB)}, PATH.jsonl or NAME=PATH; default: the run's",
        "--out FILE": "file to write; default: evaluation.json, or evaluation-ema.json, in the folder",
        **OF_TARGET,
    },
    takes="TARGET",
)


def run(argv: Sequence[str]) -> int:
    """Evaluate a model on tasks, in this process or together with the other processes that a launcher has started."""
    word, given = COMMAND.read_word(argv, ONE_TARGET, "outputs/run")
    check_launcher()
    if is_hub_name(word) and "--out" not in given:
        want = "a file for the answers, as a model of the hub has no folder of yours"
        raise ConfigError.of("command line", "--out", "", want, "--out evaluation.json")
    of = given.get("--step"), given.get("--tokenizer"), "--ema" in given
    target = find_trained_model(_WHERE, Path(os.path.expanduser(word)), *of)
    tasks = [task for task in given.get("--tasks", "").split(",") if task] or target.config.evaluation.tasks
    if not tasks:
        want = "tasks: the config of what is evaluated names none"
        raise ConfigError.of("command line", "--tasks", "", want, f"--tasks {next(iter(HUB))},my_questions.jsonl")
    default = target.folder / f"evaluation{'-ema' * target.averaged}.json"
    out = Path(os.path.expanduser(given.get("--out", str(default))))
    require_place("--out", out)
    check_vocabulary(target.tokenizer, target.dims.vocab_size, is_given=True)
    say_first(f"loading {', '.join(tasks)}, and {target.checkpoint or target.folder}")
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


def _score_tasks(target: TrainedModel, encoded: list[EncodedTask]) -> "list[Score]":
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


def _write_answers(out: Path, target: TrainedModel, encoded: list[EncodedTask], scores: "list[Score]") -> None:
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
