"""Write the shipped configs and the table of them in docs/reference/configs.md: python scripts/ladder.py [NAME ...]

Each file is what `titanlite new` chooses for its model and GPUs, with the figures of `titanlite plan` at the top. Of a
file that tests and measurements begin with, the figures alone are written anew. What no search finds is in `LADDER`.
"""

import os
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from titanlite.byte_size import GIB
from titanlite.commands.forecast import Forecast, forecast
from titanlite.commands.new_choices import Choices, choose_run
from titanlite.commands.new_file import comment, keys_text, reasons_of_keys, start_command
from titanlite.commands.new_text import TextSize
from titanlite.commands.new_wishes import Wishes
from titanlite.forecast.memory import MemoryModel
from titanlite.forecast.search import Candidate, Setting, best, candidates_of_layout
from titanlite.preflight.checked_run import CheckedRun, checked_run
from titanlite.preflight.machine import Machine, machine_named

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "configs.md"
_TABLE = re.compile("(?<=<!-- table: ladder -->\n).*?(?=<!-- end -->)", re.DOTALL)
BF16, ROWWISE = "bf16", "rowwise"
Figures = dict[str, tuple[CheckedRun, Forecast, str]]  # run, prediction and flags, by arithmetic
_REASONS = {
    "data.source": "Real text that every machine has, so that this file runs as it is. It is tens of megabytes, soon "
    'repeated: for a real run name a dataset, as "hf:allenai/c4:en", or your own files, as "/data/*.parquet", and a '
    "tokenizer.",
    "data.tokenizer": "or the path of the model's tokenizer.json, whose ids the model has rows for",
}


@dataclass(frozen=True)
class Rung:
    """A shipped config.

    Attributes:
        name: of the file.
        title: what is trained, in words.
        model: as `titanlite new --model` takes it; "": the keys of the file stay as they are.
        world: number of H100.
        wishes: further fields of `Wishes`.
        values: values in the place of chosen ones, by key.
        reasons: comments in the place of those that `titanlite new` writes, by key.
        notes: paragraphs for the top of the file.
    """

    name: str
    title: str
    model: str
    world: int
    wishes: Mapping[str, int] = field(default_factory=dict)
    values: Mapping[str, object] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """Return the file's path in a checkout."""
        return f"configs/{self.name}.toml"

    @property
    def machine(self) -> Machine:
        """Return the GPUs that the file is for."""
        return machine_named("h100", None, self.world)


_EACH = "Weights, gradients and optimizer state take 16 bytes a parameter, {} TB in all, spread over all GPUs."
_MIXTURE = "docs/how_to/mixture_of_experts.md says how to change its experts."
LADDER = (
    Rung(
        "llama3_150m",
        "Llama 3's architecture at 150 million parameters, byte by byte",
        "",
        1,
        notes=(
            "Small enough to repeat with other seeds and recipes (`scripts/bench/loss_parity.py`), large enough that "
            "float8 converts it.",
        ),
    ),
    Rung("llama3_1b", "Llama 3.2 1B", "llama3-1B", 1),
    Rung("llama3_1b_8gpus", "Llama 3.2 1B", "llama3-1B", 8),
    Rung("llama3_3b", "Llama 3.2 3B", "llama3-3B", 8),
    Rung("llama3_8b", "Llama 3.1 8B", "llama3-8B", 8),
    Rung(
        "llama3_8b_128k",
        "Llama 3.1 8B on sequences of 131,072 tokens",
        "llama3-8B",
        8,
        {"seq_len": 131_072, "tokens": 21 * 10**9},
        {"optimizer.lr": 3e-5},
        {
            "model.flavor": "its rotary embedding is scaled from 8,192 positions to 131,072",
            "training.steps": "21 billion tokens: a last stage, after training on shorter sequences",
            "training.seq_len": "choose text with long documents: `titanlite data` shows their lengths",
            "optimizer.lr": "low, to go on with trained weights (checkpoint.initial_load_path)",
        },
    ),
    Rung("olmoe_1b_7b", "OLMoE 1B-7B, a mixture of experts", "olmoe-1B-7B", 8, notes=(_MIXTURE,)),
    Rung("qwen3_moe_30b_a3b", "Qwen3 30B-A3B, a mixture of experts", "qwen3_moe-30B-A3B", 8, notes=(_MIXTURE,)),
    Rung("qwen3_moe_30b_a3b_64gpus", "Qwen3 30B-A3B, a mixture of experts", "qwen3_moe-30B-A3B", 64, notes=(_MIXTURE,)),
    Rung("llama3_70b", "Llama 3.1 70B", "llama3-70B", 64, notes=(_EACH.format(1.1),)),
    Rung("llama3_405b", "Llama 3.1 405B", "llama3-405B", 512, notes=(_EACH.format(6.5),)),
)


def choose(rung: Rung) -> Choices:
    """Choose a config as `titanlite new` does."""
    wishes = Wishes(rung.model, "python_stdlib", "the model's own", is_elsewhere=True, **rung.wishes)
    choices = choose_run(rung.name, wishes, rung.machine)
    # Whoever extends the file names other text, of which no part is held out.
    config = replace(choices.config, validation=replace(choices.config.validation, enable=False))
    for key, value in {"data.tokenizer": "bytes", **rung.values}.items():
        section, _, name = key.partition(".")
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return replace(choices, config=config)


def keys_of(rung: Rung) -> str:
    """Return the keys of a file, chosen anew unless they stay as they are."""
    if not rung.model:
        text = (ROOT / rung.path).read_text()
        return text[text.index("\n[") :]
    choices = choose(rung)
    return keys_text(choices, {**reasons_of_keys(choices, TextSize(None, "")), **_REASONS, **rung.reasons})


def figures(rung: Rung, file: Path) -> Figures:
    """Predict a file in bf16, and in rowwise with the save-list that is fastest with it."""
    rates, found = rung.machine.rates, Figures()
    assert rates is not None  # noqa: S101
    given = "--config", str(file), "--data.document_mask", "false"
    for name in (BF16, ROWWISE):
        flags = f"--float8.recipe {name}" if name == ROWWISE else ""
        run = checked_run([*given, *flags.split()], rung.world)
        if name == ROWWISE and run.save_list is not None:
            setting = Setting(run.dims, run.float8, run.optimizer, rates, host=rates.host)
            fastest = best(candidates_of_layout(Candidate(setting, rung.world, run.config)))
            if fastest and fastest.recipe != run.config.activation_checkpoint.recipe:
                flags += f" --activation_checkpoint.recipe {fastest.recipe}"
                run = checked_run([*given, *flags.split()], rung.world)
        memory = MemoryModel(run.config, run.dims, run.float8, run.optimizer, rung.world, host=rates.host)
        found[name] = run, forecast(memory, run.save_list, rates), flags
    return found


def numbers(predicted: Forecast) -> list[str]:
    """Return tok/s/GPU, MFU, GiB on each GPU and the run's time, each as a text."""
    speed = predicted.outlook
    assert speed is not None  # noqa: S101
    return [f"{speed.tokens_per_second:,.0f}", f"{speed.mfu:.1%}", f"{predicted.on_device / GIB:.1f}", speed.lasts]


def heading(rung: Rung, found: Figures) -> str:
    """Return the comment at the top of a file: what it is for, how it starts, its figures."""
    machine, (run, predicted, _) = rung.machine, found[BF16]
    start = start_command(machine, rung.path).replace(" train.py", " \\\n#         train.py")
    plan = f"titanlite plan {rung.path} {machine.flags} --data.document_mask false"
    said = "Predicted, not measured, for whole sequences, with attention by"
    rows = [
        f"    {name:7}  {{}} tok/s/GPU, MFU {{}}, {{}} GiB of {machine.gib:.1f}, {{}}".format(*numbers(each))
        + (f", with\n#              {flags}" if flags else f" for {run.config.training.steps:,} steps")
        for name, (_, each, flags) in found.items()
    ]
    between = [note[:1].upper() + note[1:] + "." for note in predicted.notes if "between hosts" in note]
    lines = [f"{rung.title}, on {rung.world if rung.world > 1 else 'one'} H100 of 80 GB.", "", f"    {start}", ""]
    lines += [f"{said} {predicted.rates.attention_by}:", "", f"    {plan}", "", *rows]
    return comment([*lines, *([""] if between or rung.notes else []), *between, *rung.notes])


def layout(run: CheckedRun, world: int) -> str:
    """Return the layout of a run in words."""
    mesh = run.config.parallelism
    names = {"HSDP": mesh.data_parallel_replicate_degree, "CP": mesh.context_parallel_degree}
    names |= {"TP": mesh.tensor_parallel_degree, "EP": mesh.expert_parallel_degree}
    parts = [f"{name} {degree}" for name, degree in names.items() if degree > 1]
    return ", ".join([*parts] or ["FSDP" if world > 1 else "one GPU"])


def rows(rung: Rung, found: Figures) -> str:
    """Return the rows of the table for a file."""
    text = ""
    for name, (run, predicted, _) in found.items():
        of = f"`{rung.name}`", str(rung.world), layout(run, rung.world), f"`{run.config.activation_checkpoint.recipe}`"
        text += f"| {' | '.join([*of, name, *numbers(predicted)])} |\n"
    return text


def main(names: list[str]) -> None:
    """Write the files with these names, or all; then the table."""
    if unknown := set(names) - (known := {rung.name for rung in LADDER}):
        raise SystemExit(f"{', '.join(sorted(unknown))}: none of {', '.join(sorted(known))}")
    head = "config", "H100", "layout", "save-list", "arithmetic", "tok/s/GPU", "MFU", "GiB", "the run takes"
    table = f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n"
    with tempfile.TemporaryDirectory() as home:
        os.environ["HOME"] = home  # where no text is prepared, so that attention is to whole sequences
        for rung in LADDER:
            file = ROOT / rung.path
            if not names or rung.name in names:
                keys = keys_of(rung)
                file.write_text(keys)
                file.write_text(f"{heading(rung, figures(rung, file))}{keys}")
                print(rung.path, flush=True)
            table += rows(rung, figures(rung, file))
    PAGE.write_text(_TABLE.sub(lambda _: table, PAGE.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
