"""Write a config for local GPUs, other GPUs or a CPU: layout, batch, learning rate, steps, with reasons.

titanlite new                                     asks in a terminal for model, data, tokenizer and tokens
titanlite new mine.toml --model llama3-8B --data 'hf:allenai/c4:en' --tokenizer llama3/tokenizer.json --tokens 20B
titanlite new mine.toml --model 8B --data python_stdlib --gpu h100 --world 8          for GPUs that are not here
titanlite new --model list --data 'corpus/*.jsonl' --tokenizer train:8192             the models that fit, with days

The text's tokens are counted by a sample. A tokenizer of train:N is written once, to tokenizers/ beside FILE, and used
again for the same text.

Layout, micro-batch and save-list are those that the forecast finds fastest among all that fit. Batch and learning rate
follow from the compute of the whole run. Comments in the file give the reasons, the alternatives and the run's days.
"""

import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.commands.arguments import Command, number_of
from titanlite.commands.at_work import at_work
from titanlite.commands.new_wishes import (
    LIST,
    TRAIN,
    Wishes,
    check_wishes,
    file_to_write,
    ids_to_train,
    token_count,
    wished_model,
)
from titanlite.data.sources import resolve
from titanlite.errors import ConfigError, DataError, Problem, TitanliteError, Together, describe
from titanlite.forecast.network import DEFAULT_NETWORK, networks
from titanlite.preflight.machine import GPU_NAMES, NETWORK, Machine, machine_here, machine_named, network_of
from titanlite.preflight.output_file import writable
from titanlite.text_table import folded, terminal_width

if TYPE_CHECKING:
    from titanlite.commands.new_choices import Choices
    from titanlite.commands.new_text import TextSize

_MODEL, _DATA, _TOKENIZER, _TOKENS = "--model", "--data", "--tokenizer", "--tokens"
_GPU, _GIB, _WORLD = "--gpu", "--device-gib", "--world"
_COMPARING = "comparing layouts, batches and save-lists"
COMMAND = Command(
    "new",
    __doc__ or "",
    {
        "FILE": "the config to write, which must not exist; default: the model's name, as llama3-8b.toml",
        f"{_MODEL} NAME-FLAVOR": f"what to train, as llama3-8B; 8B is llama3's; {LIST}: show all, with memory and time",
        f"{_DATA} SOURCE": "text to train on, as data.source: python_stdlib, files, or hf:<dataset>",
        f"{_TOKENIZER} PATH": f"tokenizer.json, hf:OWNER/MODEL, {TRAIN}N (of N ids, on a sample of the text) or bytes; "
        "default: bytes",
        f"{_TOKENS} N": "tokens to train on, as 20B or 1.5e9; default: 20 for each parameter that a token uses",
        f"{_GPU} NAME": f"plan for this GPU instead of those here: {', '.join(GPU_NAMES)}",
        f"{_GIB} GIB": "memory of each GPU, if it is not that GPU's; without --gpu, that of the nearest in memory",
        f"{_WORLD} N": "number of GPUs, over 8 whole hosts, or of processes of a CPU; default: all GPUs here, or one",
        f"{NETWORK} NAME": f"network between hosts, one NIC a GPU: {', '.join(networks())}; default: {DEFAULT_NETWORK}",
    },
    "[FILE]",
)


def run(argv: list[str]) -> int:
    """Write the config that the flags in `argv` describe. In a terminal, ask for choices that no flag makes."""
    files, given = COMMAND.read_words(argv)
    if len(files) > 1 or (files and not files[0].endswith(".toml")):
        fix = "titanlite new mine.toml"
        raise ConfigError.of("command line", "FILE", " ".join(files), "the name of one .toml file to write", fix)
    named, model, is_terminal = (files[0] if files else None), given.get(_MODEL), _is_terminal()
    checks, is_named = Together(), _GPU in given or _GIB in given
    attempt = checks.attempt
    if not is_terminal and model != LIST:
        attempt(lambda: _refuse_to_guess(given))
    tokens = attempt(lambda: token_count(given[_TOKENS])) if _TOKENS in given else None if is_terminal else 0
    world = attempt(lambda: number_of(given, _WORLD, int, "a number of GPUs, at least 1", f"{_WORLD} 8"))
    gib = attempt(lambda: number_of(given, _GIB, float, "the GiB of a GPU", f"{_GIB} 80"))
    data, tokenizer = given.get(_DATA), given.get(_TOKENIZER, None if is_terminal else "bytes")
    network = attempt(lambda: network_of(given, world)) if world or _WORLD not in given else None
    is_known = is_named and (gib or _GIB not in given)
    machine = attempt(lambda: machine_named(given.get(_GPU, ""), gib, world or 1, network)) if is_known else None
    attempt(lambda: check_wishes(model, data, tokenizer or "bytes", is_named))
    if model != LIST and (named or (model and not checks.errors)):
        attempt(lambda: file_to_write(named, model or ""))
    checks.raise_all()
    if machine and machine.rates and world is None:
        host = f"{_WORLD} {machine.rates.host} plans for a host of {machine.rates.host}"
        sys.stderr.write(f"for one GPU, as {_WORLD} is not given; {host}\n")
    # Importing torch takes seconds, so mistakes in flags are reported before the imports below.
    with at_work("loading torch, and looking at the GPUs"):
        from titanlite.commands.new_file import config_text, outlook_in_words, start_command

        machine = machine or machine_here(world, network)
    wishes = Wishes(model or "", data or "", tokenizer or "", tokens or 0, is_named)
    if is_terminal or model == LIST:
        sys.stderr.write(f"for {machine}\n")
    if model == LIST:
        fitting = _list_models(Path(named or "").parent, replace(wishes, model=""), machine)
        if not is_terminal:
            sys.stdout.write(_next_of_list(files, given, fitting, machine))
            return 0
        wishes = replace(wishes, model="")
    file, wishes, choices, text = _ask_and_choose(named, wishes, machine, asks_tokens=tokens is None)
    _write_checked(file, config_text(choices, str(file), text), machine.world, wishes.lacks_tokenizer, text.tokens)
    if wishes.lacks_tokenizer:
        here = f"{wishes.tokenizer} is not here: the vocabulary is the model's, {choices.dims.vocab_size:,} ids"
        sys.stdout.write(f"{here}\n")
    said = [f"wrote {file}, for {machine}", outlook_in_words(choices)]
    said += [f"{wishes.data}: {text.in_words(choices.trained_on)}"]
    said += [f"{wishes.tokenizer}: {text.trained}"] * bool(text.trained)
    sys.stdout.write(folded("".join(f"{line}\n" for line in said), terminal_width()))
    sys.stdout.write(f"next: titanlite validate {file} --world {machine.world}\n")
    sys.stdout.write(f"      {start_command(machine, str(file))}\n")
    return 0


def _ask_and_choose(
    named: str | None, wishes: Wishes, machine: Machine, asks_tokens: bool
) -> tuple[Path, Wishes, "Choices", "TextSize"]:
    """Choose a run and its file; ask for wishes that are "", and for another model if one does not fit with them."""
    from titanlite.commands.new_choices import TOKENS_A_PARAMETER, UnfitError, choose_run, default_model
    from titanlite.commands.new_text import read_text

    def fits(answer: str) -> None:
        """Refuse a model that does not fit, with default values in place of choices that are not made yet."""
        if answer == LIST:
            return
        wished_model(answer)
        with at_work(_COMPARING), suppress(DataError):  # the next question is about the data
            choose_run("new", _with_defaults(replace(wishes, model=answer)), machine)

    asks_model = not wishes.model
    if wishes.model and (not wishes.data or not wishes.tokenizer or asks_tokens):
        fits(wishes.model)
    found = lambda answer: resolve(answer, "data.source")  # noqa: E731
    reads = lambda answer: check_wishes(None, wishes.data, answer, wishes.is_elsewhere)  # noqa: E731
    counted = lambda answer: 0 if answer == "0" else token_count(answer)  # noqa: E731
    how_many = f"tokens, as 20B; 0: {TOKENS_A_PARAMETER} for each parameter that a token uses"
    while True:
        if not wishes.model:
            answer = _ask(f"model, as llama3-8B; {LIST}: all, with memory and time", default_model(machine), fits)
            if answer == LIST:
                _list_models(Path(named or "").parent, wishes, machine)
                continue
            wishes = replace(wishes, model=answer)
        file = file_to_write(named, wishes.model)
        if not wishes.data:
            wishes = replace(wishes, data=_ask("data: python_stdlib, files, or hf:<dataset>", "python_stdlib", found))
        if not wishes.tokenizer:
            kinds = f"tokenizer: bytes, {TRAIN}8192, hf:OWNER/MODEL, or the path of a tokenizer.json"
            wishes = replace(wishes, tokenizer=_ask(kinds, "bytes", reads))
        wishes, text = read_text(wishes, file.parent)
        if asks_tokens:
            sys.stderr.write(f"{wishes.data}: {text.words}\n")
            wishes, asks_tokens = replace(wishes, tokens=counted(_ask(how_many, "0", counted))), False
        try:
            with at_work(_COMPARING):
                return file, wishes, choose_run(file.stem, wishes, machine), text
        except UnfitError as error:  # too large with the tokenizer's vocabulary; other answers are kept
            if not asks_model:
                raise
            sys.stderr.write(f"{error}\n")
            wishes = replace(wishes, model="")


def _with_defaults(wishes: Wishes) -> Wishes:
    """Return wishes with the default data and tokenizer where there are none, or where one is to be trained."""
    is_there = wishes.tokenizer and not ids_to_train(wishes.tokenizer)
    return replace(wishes, data=wishes.data or "python_stdlib", tokenizer=wishes.tokenizer if is_there else "bytes")


def _list_models(folder: Path, wishes: Wishes, machine: Machine) -> list[str]:
    """Print the text's size and the models of `--model list`; return those that fit. `folder`: of the config."""
    from titanlite.commands.new_models import list_models
    from titanlite.commands.new_text import read_text

    wishes = replace(wishes, data=wishes.data or "python_stdlib", tokenizer=wishes.tokenizer or "bytes")
    wishes, text = read_text(wishes, folder)
    sys.stdout.write(f"{wishes.data}: {text.words}\n")
    return list_models(wishes, machine, text.tokens)


def _next_of_list(files: list[str], given: dict[str, str], fitting: Sequence[str], machine: Machine) -> str:
    """Return the line that says how to write the config of a model of the list; "" if none fits."""
    from titanlite.commands.new_choices import default_model

    if not fitting:
        return ""
    model = usual if (usual := default_model(machine)) in fitting else fitting[-1]
    flags = {_DATA: "python_stdlib", **given, _MODEL: model}
    return f"next: titanlite new {shlex.join([*files, *(word for flag in flags.items() for word in flag)])}\n"


def _is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


def _refuse_to_guess(given: dict[str, str]) -> None:
    """Refuse a command line without --model or --data: there is no terminal to ask the user for them."""
    choices = (_MODEL, "a model", f"llama3-8B, or {_MODEL} {LIST}"), (_DATA, "a source", "python_stdlib")
    why = "there is no terminal to ask for it"
    if missing := [Problem(at, "", f"{what}: {why}", f"{at} {as_}") for at, what, as_ in choices if at not in given]:
        raise ConfigError(describe("command line", missing))


def _ask(question: str, default: str, check: Callable[[str], object]) -> str:
    """Ask until an answer passes `check`, and return it. An empty answer means `default`."""
    while True:
        sys.stderr.write(f"{question} [{default}]: ")
        sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            raise KeyboardInterrupt
        answer = line.strip() or default
        try:
            check(answer)
        except TitanliteError as error:
            sys.stderr.write(f"{error}\n")
            continue
        return answer


def _write_checked(file: Path, text: str, world: int, lacks_tokenizer: bool, tokens: float | None) -> None:
    """Write the config, and delete it again if it fails a check of `titanlite train`; print its warnings.

    `lacks_tokenizer`: the tokenizer is not on this machine, so the checks take `bytes` in its place. `tokens`: of the
    text, as far as they are known.
    """
    from titanlite.preflight.checked_run import checked_run
    from titanlite.preflight.start import check_sources

    with writable("titanlite new", "FILE", file), file.open("x", encoding="utf-8") as opened:
        opened.write(text)
    try:
        instead = ["--data.tokenizer", "bytes"] * lacks_tokenizer
        checked = checked_run(["--config", str(file), *instead], world)
    except BaseException:
        file.unlink()
        raise
    warnings = [] if lacks_tokenizer else [*checked.warnings]  # they concern the vocabulary of `bytes`
    if tokens and not checked.inputs.tokens:  # else the checks have counted the text themselves
        inputs = replace(checked.inputs, tokens={"data.source": round(tokens)})
        warnings += check_sources(checked.config, inputs, checked.table)
    sys.stderr.writelines(f"warning: {text}\n" for text in warnings)
