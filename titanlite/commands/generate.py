"""Continue texts with the model of a run, a checkpoint or a folder in Hugging Face's layout.

The text of one prompt is shown as it is made; several are continued together, and shown when all are finished. Without
a prompt, in a terminal, each line that you type is one. A text ends after N tokens, where the model ends the document,
or at the stop text. The model computes in the run's dtype, without float8. A model that does not fit one GPU is split
by tensor parallelism: torchrun --nproc-per-node 2 -m titanlite generate RUN --prompt TEXT.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from titanlite.commands.arguments import Command, number_of
from titanlite.config.build import show
from titanlite.errors import ConfigError
from titanlite.preflight.launcher import check_launcher
from titanlite.preflight.trained_model import find_trained_model

_WHERE = "titanlite generate"
_TOKENS, _TEMPERATURE = 128, 0.8
COMMAND = Command(
    "generate",
    __doc__ or "",
    {
        "TARGET": "a run's folder, one of its checkpoints (step-...), or a folder with config.json and safetensors",
        "--prompt TEXT": "text to continue",
        "--file PROMPTS": "text file with a prompt in each line",
        "--tokens N": f"most tokens to add to each prompt; default: {_TOKENS}",
        "--stop TEXT": "end at this text, which is not shown",
        "--temperature T": f"0: the likeliest token; 1: the model's own probabilities; default: {_TEMPERATURE}",
        "--top-k K": "sample from the K likeliest tokens; default: from all",
        "--top-p P": "sample from the likeliest tokens whose probabilities add up to P; default: 1",
        "--seed S": "of the random numbers; equal seeds give equal texts; default: 0",
        "--step N": "step of the run's checkpoint; default: the newest",
        "--ema": "use the average of weights that optimizer.ema_decay has kept",
        "--tokenizer FILE": "the model's tokenizer.json, if it is not where the run, or the folder, has it",
    },
    takes="TARGET",
)


def run(argv: Sequence[str]) -> int:
    """Carry out the command, on one process or on all that a launcher has started.

    Raises:
        TitanliteError: there is no such model, its weights are damaged, its tokenizer is another, a prompt is too long,
            or there is none.
    """
    want = "one folder: of a run, a checkpoint, or a model in Hugging Face's layout"
    word, given = COMMAND.read_word(argv, want, "outputs/run")
    check_launcher()
    if "--prompt" in given and "--file" in given:
        want = "either --prompt or --file"
        raise ConfigError.of("command line", "--file", given["--file"], want, "leave one out")
    n = number_of({"--tokens": str(_TOKENS), **given}, "--tokens", int, "a number of tokens", "--tokens 64")
    temperature = number_of(given, "--temperature", float, "0 or more", "--temperature 0.8", above=-1e-9)
    choice = {
        "stop": given.get("--stop", ""),
        "temperature": _TEMPERATURE if temperature is None else temperature,
        "top_k": number_of(given, "--top-k", int, "a number of tokens", "--top-k 50") or 0,
        "top_p": number_of(given, "--top-p", float, "above 0, at most 1", "--top-p 0.95", below=1 + 1e-9) or 1.0,
        "seed": number_of(given, "--seed", int, "a whole number", "--seed 1", above=-1, below=2**63) or 0,
    }
    prompts = _prompts(given)
    path = Path(os.path.expanduser(word))
    target = find_trained_model(_WHERE, path, given.get("--step"), given.get("--tokenizer"), "--ema" in given)

    import torch.distributed as dist

    from titanlite.generation.model import TextModel

    assert n is not None  # noqa: S101  # it has a default
    longest = max((len(ids) for ids in target.tokenizer.encode_batch(prompts)), default=0) if prompts else 0
    model = TextModel(target, max(target.seq_len, longest + n + 1))
    if model.capacity > target.seq_len:
        _say_on_rank_0(f"note: longer than the {target.seq_len} tokens that the model was trained on\n", sys.stderr)
    try:
        if prompts is None:
            for line in _typed_lines():
                model.generate(line, n, **choice, show=_say_on_rank_0)
                _say_on_rank_0("\n")
        elif len(prompts) == 1:
            _say_on_rank_0(prompts[0])
            model.generate(prompts[0], n, **choice, show=_say_on_rank_0)
            _say_on_rank_0("\n")
        else:
            for prompt, text in zip(prompts, model.generate(prompts, n, **choice), strict=True):
                _say_on_rank_0(f"{prompt}{text}\n\n")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def _prompts(given: dict[str, str]) -> list[str] | None:
    """Return the prompts that are given, or None: they are typed."""
    if "--prompt" in given:
        return [given["--prompt"]]
    if "--file" in given:
        path = Path(os.path.expanduser(given["--file"]))
        try:
            lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line]
        except (OSError, UnicodeDecodeError) as error:
            want, fix = "a text file with a prompt in each line", "name one that can be read"
            raise ConfigError.of("command line", "--file", f"{show(str(path))} ({error})", want, fix) from error
        if not lines:
            raise ConfigError.of(
                "command line", "--file", show(str(path)), "a prompt in each line; it has none", "add one"
            )
        return lines
    if "RANK" in os.environ or sys.stdin is None or not sys.stdin.isatty():
        want = "a prompt: there is no terminal to type one in"
        raise ConfigError.of("command line", "--prompt", "", want, '--prompt "Once upon a time"')
    return None


def _typed_lines() -> Iterator[str]:
    while True:
        sys.stderr.write("prompt> ")
        sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            return
        yield line.rstrip("\n")


def _say_on_rank_0(text: str, to: TextIO | None = None) -> None:
    """Write on rank 0, on standard output if nothing else is given."""
    if os.environ.get("RANK", "0") == "0":
        to = to or sys.stdout
        to.write(text)
        to.flush()
