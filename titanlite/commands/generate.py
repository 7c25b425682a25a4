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

from titanlite.commands.arguments import OF_TARGET, ONE_TARGET, TARGET, Command, number_of
from titanlite.config.build import show
from titanlite.errors import ConfigError, DataError
from titanlite.evaluation.prompts import encode_prompts
from titanlite.preflight.launcher import check_launcher
from titanlite.preflight.trained_model import find_trained_model
from titanlite.streams import say_first

_WHERE = "titanlite generate"
_TOKENS, _TEMPERATURE = 128, 0.8
_AT_ONCE = 32  # prompts of a batch
COMMAND = Command(
    "generate",
    __doc__ or "",
    {
        **TARGET,
        "--prompt TEXT": "text to continue",
        "--file PROMPTS": "text file with a prompt in each line",
        "--tokens N": f"most tokens to add to each prompt; default: {_TOKENS}",
        "--stop TEXT": "end at this text, which is not shown",
        "--temperature T": f"0: the likeliest token; 1: the model's own probabilities; default: {_TEMPERATURE}",
        "--top-k K": "sample from the K likeliest tokens; default: from all",
        "--top-p P": "sample from the likeliest tokens whose probabilities add up to P; default: 1",
        "--seed S": "of the random numbers; equal seeds give equal texts; default: 0",
        **OF_TARGET,
    },
    takes="TARGET",
)


def run(argv: Sequence[str]) -> int:
    """Carry out the command, on one process or on all that a launcher has started.

    Raises:
        TitanliteError: there is no such model, its weights are damaged, its tokenizer is another, a prompt is too long,
            or there is none.
    """
    word, given = COMMAND.read_word(argv, ONE_TARGET, "outputs/run")
    check_launcher()
    if "--prompt" in given and "--file" in given:
        want = "either --prompt or --file"
        raise ConfigError.of("command line", "--file", given["--file"], want, "leave one out")
    n = number_of(given, "--tokens", int, "a number of tokens", "--tokens 64") or _TOKENS
    temperature = number_of(given, "--temperature", float, "0 or more", "--temperature 0.8", above=-1e-9)
    choice = {
        "stop": given.get("--stop", ""),
        "temperature": _TEMPERATURE if temperature is None else temperature,
        "top_k": number_of(given, "--top-k", int, "a number of tokens", "--top-k 50") or 0,
        "top_p": number_of(given, "--top-p", float, "above 0, at most 1", "--top-p 0.95", below=1 + 1e-9) or 1.0,
    }
    seed = number_of(given, "--seed", int, "a whole number", "--seed 1", above=-1, below=2**63) or 0
    prompts = _prompts(given)
    path = Path(os.path.expanduser(word))
    target = find_trained_model(_WHERE, path, given.get("--step"), given.get("--tokenizer"), "--ema" in given)
    say_first(f"loading {target.checkpoint or target.folder}")
    flag = "--file" if "--file" in given else "--prompt"
    known = encode_prompts(prompts or (), target.tokenizer, n, sys.maxsize, flag, "--tokens")
    # Lines that will be typed have half of the sequence, at least.
    n = n if prompts is not None else min(n, max(1, target.seq_len // 2))

    import torch.distributed as dist

    from titanlite.generation.model import TextModel

    model = TextModel(target, max([target.seq_len, *(len(ids) + n for ids in known)]))
    if model.capacity > target.seq_len and os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"note: longer than the {target.seq_len} tokens that the model was trained on\n")
    try:
        if prompts is None:
            for number, line in enumerate(_typed_lines()):
                try:
                    model.generate(line, n, **choice, seed=seed + number, show=_say_on_rank_0)
                    _say_on_rank_0("\n")
                except DataError as error:
                    sys.stderr.write(f"{error}\n")
        elif len(prompts) == 1:
            _say_on_rank_0(prompts[0])
            model.generate(prompts[0], n, **choice, seed=seed, show=_say_on_rank_0)
            _say_on_rank_0("\n")
        else:
            for first in range(0, len(prompts), _AT_ONCE):
                some = prompts[first : first + _AT_ONCE]
                for prompt, text in zip(some, model.generate(some, n, **choice, seed=seed), strict=True):
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
            lines = [line for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
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
        fix = '--prompt "Once upon a time", or --file PROMPTS; --file /dev/stdin reads a pipe'
        raise ConfigError.of("command line", "--prompt", "", want, fix)
    return None


def _typed_lines() -> Iterator[str]:
    while True:
        sys.stderr.write("prompt> ")
        sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:  # Ctrl-D
            sys.stderr.write("\n")
            return
        yield line.rstrip("\n")


def _say_on_rank_0(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(text)
        sys.stdout.flush()
