"""Write the model card of an exported checkpoint: README.md, from the files of its run.

It has no paths of the machine: of a source that is neither on the hub nor shipped only the last part of its name.
"""

import math
import re
from pathlib import Path
from typing import Any

from titanlite.checkpoint.saved_state import SavedState
from titanlite.comparison.runs import recorded_receipt
from titanlite.config.architectures import ARCHITECTURES
from titanlite.config.schema import Config
from titanlite.config.stages import source_keys
from titanlite.errors import CheckpointError
from titanlite.hub import is_hub_name, read_name
from titanlite.json_file import MALFORMED, read_json
from titanlite.observe.metrics import read_metrics
from titanlite.observe.samples_file import read_samples
from titanlite.preflight.run_folder import RunFolder
from titanlite.redact import redact

_LOSSES = ("loss", "validation_loss", "validation_bits_per_byte")


def model_card(folder: RunFolder, config: Config, state: SavedState, title: str, averaged: bool) -> str:
    """Return the text of README.md for a checkpoint of a run.

    Args:
        folder: of the run; a file that it does not have leaves its part out.
        config: of the run.
        state: of the checkpoint.
        title: name of the model.
        averaged: whether the exported weights are the average.

    Raises:
        TitanliteError: a file of the run is damaged.
    """
    from huggingface_hub import ModelCardData

    rows = [row for row in read_metrics(folder.metrics) if row["step"] <= state.step] if folder.metrics.exists() else []
    start, sources = config.checkpoint.initial_load_path, dict(source_keys(config).values())
    head = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["titanlite", "text-generation"],
        base_model=read_name(start, "").repo if is_hub_name(start) else None,
        datasets=[_dataset(source) for source in sources.values() if _dataset(source)] or None,
    )
    weights = "the moving average of its weights" if averaged else "its weights"
    began = f", which began from `{start}`" if is_hub_name(start) else ""
    name = (
        f"{ARCHITECTURES[config.model.name].hub_class} of {state.model['n_layers']} layers, {state.model['dim']} wide"
    )
    samples = [row for row in read_samples(folder.samples) if row[0] <= state.step]
    parts = [
        f"---\n{head.to_yaml()}\n---\n\n# {title}",
        f"{name}: {weights} at step {state.step:,} of a run{began}.",
        "## Training\n\n" + _table(["", ""], _facts(folder, config, state, sources, rows)),
        "## Loss\n\n" + _table(["", "value", "step"], losses) if (losses := _last(rows, _LOSSES)) else "",
        _evaluation(folder, state, rows, averaged),
        "## Samples\n\n" + "\n\n".join(_fenced(s.prompt + s.text) for s in samples[-1][1]) if samples else "",
    ]
    return redact("\n\n".join(filter(None, parts)) + "\n")


def _facts(
    folder: RunFolder, config: Config, state: SavedState, sources: dict[str, str], rows: list[dict[str, Any]]
) -> list[list[str]]:
    """Return the rows of the table of the training: names and values."""
    mesh, ranks, batch = config.parallelism, state.world_size, state.sequences_per_step
    degrees = {
        "replicas": mesh.data_parallel_replicate_degree,
        "tensor parallel": mesh.tensor_parallel_degree,
        "context parallel": mesh.context_parallel_degree,
    }
    split = {"FSDP": ranks // math.prod(degrees.values()), **degrees, "expert parallel": mesh.expert_parallel_degree}
    layout = " × ".join(f"{name} {n}" for name, n in split.items() if n > 1)
    receipt = {entry["feature"]: entry["applied"] for entry in recorded_receipt(folder.path) or ()}
    facts = [["tokens", f"{rows[-1]['tokens']:,}"]] if rows else []
    facts += [["batch", f"{batch} sequences of {config.training.seq_len:,} tokens"]] if batch else []
    for key, source in sources.items():
        applied = receipt.get(key)
        tokens = applied.get("tokens") if isinstance(applied, dict) else None
        facts.append([key, f"`{_public(source)}`" + (f", {tokens:,} tokens" if isinstance(tokens, int) else "")])
    facts.append(["tokenizer", f"`{_public(config.data.tokenizer)}`"])
    facts.append(["optimizer", f"{config.optimizer.recipe}, learning rate {config.optimizer.lr:g}"])
    precision, recipe = config.training.mixed_precision_param, Path(config.float8.recipe).stem
    facts.append(["precision", precision + f", float8 {recipe}" * (recipe != "none")])
    facts.append(["layout", f"{ranks} process{'es' * (ranks > 1)}" + f": {layout}" * bool(layout)])
    return [*facts, ["software", f"titanlite {state.titanlite}, torch {state.torch}"]]


def _evaluation(folder: RunFolder, state: SavedState, rows: list[dict[str, Any]], averaged: bool) -> str:
    """Return the part on tasks: of `titanlite evaluate` for this checkpoint, else what the run itself has logged."""
    file = folder.path / f"evaluation{'-ema' * averaged}.json"
    try:
        said = read_json(file) if file.exists() else {}
        if f"step-{state.step:08d}" in said.get("model", ""):
            found = [[task, f"{of['accuracy']:.2%}", f"{state.step:,}"] for task, of in said["tasks"].items()]
            return "## Evaluation\n\n" + _table(["task", "accuracy", "step"], found)
    except MALFORMED as error:
        fix = "move it away, or evaluate again"
        raise CheckpointError.of(str(folder.path), file.name, str(error), "what titanlite writes", fix) from error
    logged = [] if averaged else _last(rows, ("accuracy",))
    return "## Evaluation\n\n" + _table(["task", "accuracy", "step"], logged) if logged else ""


def _last(rows: list[dict[str, Any]], keys: tuple[str, ...]) -> list[list[str]]:
    """Return [name, value, step] of the last value of each metric whose name before a dot is in `keys`."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for key, value in row.items():
            start, _, of = key.partition(".")
            if start.removesuffix("_ema") in keys and math.isfinite(value):
                found[key] = [of if start == "accuracy" else key, f"{value:.4f}", f"{row['step']:,}"]
    return list(found.values())


def _dataset(source: str) -> str:
    """Return the name of a source's dataset on the hub; "" for other sources."""
    name = source.removeprefix("hf:").partition(":")[0] if source.startswith("hf:") else ""
    return "" if name.startswith(("/", ".", "~")) else name


def _public(name: str) -> str:
    """Return what may be told of the name of a source or tokenizer: that of the hub, else its last part."""
    if _dataset(name):
        return name
    return re.split(r"[?#]", name)[0].rstrip("/").rpartition("/")[2]


def _table(head: list[str], rows: list[list[str]]) -> str:
    cells = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _fenced(text: str) -> str:
    """Return a text as a block of code, whatever it contains."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"
