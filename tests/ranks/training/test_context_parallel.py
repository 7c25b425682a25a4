"""Ranks that share the tokens of a sequence out train as one process that has them all.

In float64 what is left of a difference is rounding, and a gradient that is not handed back, or a label that is wrong at
a seam, is not. In float32 the losses of steps are within a few units in the last place, as for other layouts.
"""

import argparse
import difflib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tomli_w
import torch

from tests.support.needs import slow
from tests.support.own_model import mine
from tests.support.ranks import run_ranks
from tests.support.short_run import Trained, checked, count_graphs, require_loads, train
from titanlite.data.batches import Batch, TrainBatches
from titanlite.errors import DataError
from titanlite.observe.metrics import read_metrics

if TYPE_CHECKING:
    from tests.support.launched import Desk

S, SEPARATOR = 512, 255
# A rank of two has 512 tokens of a micro-batch, one of four 256: some documents are longer, one ends where a rank's
# tokens do, some have one token.
LENGTHS = [300, 1, 1, 211, 256, 256, 1, 500, 1, 10, 130, 700, 40, 2, 1, 333, 90, 64, 64, 128, 128]
CP_2, CP_4, TP_2 = (
    ["--parallelism.context_parallel_degree", "2"],
    ["--parallelism.context_parallel_degree", "4"],
    ["--parallelism.tensor_parallel_degree", "2"],
)
HALF = ["--training.local_batch_size", "1"]
LAYOUTS = {
    "CP 2": (2, CP_2),
    "CP 4": (4, CP_4),
    "TP 2 × CP 2": (4, [*TP_2, *CP_2]),
    "FSDP 2 × CP 2": (4, [*CP_2, *HALF]),
    "HSDP 2 × CP 2": (4, ["--parallelism.data_parallel_replicate_degree", "2", *CP_2, *HALF]),
}
COMPARED = ("step", "tokens", "loss", "grad_norm", "share", "validation_loss")
QUICK = [("llama3", "FSDP 2 × CP 2")]
MODELS = ["llama3", "gemma3", "qwen3", "gpt2"]


def of_model(name: str) -> list[str]:
    return ["--model.name", name, "--model.flavor", "debug", "--model.n_layers", "3"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    random, ids = np.random.default_rng(0), list[int]()
    for length in LENGTHS * 4:
        ids += [*random.integers(0, 200, length - 1).tolist(), SEPARATOR]
    file = tmp_path_factory.mktemp("data") / "ids.bin"
    np.array(ids, "<u2").tofile(file)
    shape = ["--training.seq_len", str(S), "--training.local_batch_size", "2", "--optimizer.lr", "3e-4"]
    return ["--data.source", str(file), "--data.separator_id", str(SEPARATOR), "--data.document_mask", "true", *shape]


@pytest.fixture(scope="module")
def one_process(data: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trained]:
    """Train on one process, each run once."""

    @cache
    def of(name: str, *, wide: bool, steps: int = 1) -> Trained:
        folder = tmp_path_factory.mktemp("one")
        return train(folder, 1, [*data, *of_model(name)], steps=steps, wide=wide, timeout_s=120)

    return of


def error(got: Trained, truth: Trained) -> float:
    """Return the largest difference of a gradient, over its largest element, or of a loss, over itself."""
    assert got.gradients.keys() == truth.gradients.keys()
    errors = [
        ((got.gradients[name] - gradient).abs().max() / gradient.abs().max()).item()
        for name, gradient in truth.gradients.items()
    ]
    return max(*errors, ((got.losses - truth.losses).abs() / truth.losses).max().item())


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *QUICK,
        *slow(*((model, layout) for model in MODELS for layout in LAYOUTS if (model, layout) not in QUICK)),
        # Routers balance whole micro-batches, which are others in FSDP 2 × CP 2.
        *slow(("qwen3_moe", "CP 2"), ("qwen3_moe", "CP 4"), ("qwen3_moe", "TP 2 × CP 2")),
    ],
)
def test_gradients_are_those_of_one_process(
    model: str, layout: str, data: list[str], one_process: Callable[..., Trained], tmp_path: Path
) -> None:
    world, flags = LAYOUTS[layout]
    got = train(tmp_path, world, [*data, *of_model(model), *flags], steps=1, wide=True)
    assert got.losses.dtype == torch.float64
    assert error(got, one_process(model, wide=True)) < 1e-12


RUNS = {
    **{f"20 steps, {layout}": LAYOUTS[layout] for layout in ("CP 4", "TP 2 × CP 2", "FSDP 2 × CP 2")},
    "a save-list": (2, [*CP_2, "--activation_checkpoint.recipe=balanced"]),
    "one that is chosen": (2, [*CP_2, "--activation_checkpoint.recipe=auto", "--activation_checkpoint.budget_gib=8"]),
    "all of forward again": (2, [*CP_2, "--activation_checkpoint.recipe=full"]),
    "async TP": (4, [*CP_2, *TP_2, "--parallelism.async_tensor_parallel"]),
}


@pytest.mark.parametrize("name", slow(*RUNS))
def test_losses_are_those_of_one_process(
    name: str, data: list[str], one_process: Callable[..., Trained], tmp_path: Path
) -> None:
    (world, flags), steps = RUNS[name], 20 if "20" in name else 3
    got = train(tmp_path, world, [*data, *of_model("llama3"), *flags], steps=steps, timeout_s=120)
    truth = one_process("llama3", wide=False, steps=steps)
    assert ((got.losses - truth.losses).abs() / truth.losses).max() < 1e-6


@pytest.mark.slow
@pytest.mark.usefixtures("without_machine_code")
def test_documents_that_change_are_not_compiled_anew(
    data: list[str], one_process: Callable[..., Trained], tmp_path: Path
) -> None:
    counted = count_graphs(tmp_path / "graphs")
    flags = [*data, *of_model("llama3"), *CP_2, "--compile.enable"]
    got = train(tmp_path, 2, flags, steps=3, change=counted, timeout_s=200)
    truth = one_process("llama3", wide=False, steps=3)
    assert ((got.losses - truth.losses).abs() / truth.losses).max() < 1e-6
    # In every step, on each rank: one graph for both blocks.
    assert (tmp_path / "graphs").read_text().split() == ["1"] * 3 * 2


@pytest.mark.parametrize(
    ("before", "after"), slow(("FSDP 2 × CP 2", "TP 2 × CP 2"), ("CP 4", "FSDP 4"), ("TP 2 × CP 2", "CP 4"))
)
def test_checkpoints_load_under_another_layout(before: str, after: str, data: list[str], tmp_path: Path) -> None:
    flags = [LAYOUTS.get(layout, (4, ["--training.local_batch_size", "1"]))[1] for layout in (before, after)]
    asked = [checked(tmp_path, 4, [*data, *of]) for of in flags]
    run_ranks(lambda: require_loads(*asked, tmp_path / "checkpoint"), tmp_path, 4)


def test_validation_and_the_losses_of_sources_are_those_of_one_process(desk: "Desk") -> None:
    """Two sources, two stages of other lengths, documents, a text to validate on that leaves a rank with padding."""
    for n, module in enumerate((argparse, difflib)):
        text = Path(str(module.__file__)).read_text()
        lines = [json.dumps({"text": part}) for part in text.split("\n\n") if part]
        (desk.folder / f"{n}.jsonl").write_text("\n".join(lines))
    shapes = [{"from_tokens": 0, "seq_len": 128}, {"from_tokens": 1024, "seq_len": 256}]

    def write(name: str, ranks: int) -> Path:
        sources = [{"name": "ab"[n], "source": str(desk.folder / f"{n}.jsonl"), "weight": 0.5} for n in (0, 1)]
        table: dict[str, dict[str, object]] = {
            "job": {"name": name, "dump_folder": str(desk.folder / "runs")},
            "model": {"flavor": "debug", "n_layers": 1, "dim": 64, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 128},
            "data": {"mixture": sources, "stage": shapes, "document_mask": True, "cache_dir": str(desk.folder / "c")},
            "training": {"tokens": 4096, "local_batch_size": 2, "global_batch_size": 4},
            "validation": {"enable": True, "source": str(desk.folder / "1.jsonl"), "freq": 2, "steps": 1},
            "parallelism": {"context_parallel_degree": ranks},
            "compile": {"enable": False},
        }
        table["training"]["mixed_precision_param"] = "float32"
        (desk.folder / f"{name}.toml").write_text(tomli_w.dumps(table))
        return desk.folder / f"{name}.toml"

    found = []
    for name, ranks in (("whole", 1), ("split", 2)):
        desk.rerun(write(name, ranks), world=ranks)
        rows = read_metrics(desk.folder / "runs" / name / "metrics.jsonl")
        kept = [{k: v for k, v in row.items() if k.partition(".")[0] in COMPARED} for row in rows]
        found.append(kept)
    assert any("validation_loss" in row for row in found[0])
    assert any("loss.a" in row for row in found[0])
    assert found[1] == [pytest.approx(row, rel=1e-5) for row in found[0]]


@pytest.mark.slow
def test_ranks_end_together_where_one_lacks_its_data(desk: "Desk", data: list[str]) -> None:
    """The other has its batch, whose keys nobody would send it."""

    def plant() -> None:
        read, n_read = TrainBatches.next, [0]

        def damaged(self: TrainBatches, *given: Any) -> list[Batch]:
            n_read[0] += 1
            if n_read[0] == 3 and torch.distributed.get_rank() == 1:
                raise DataError("planted damage")
            return read(self, *given)

        TrainBatches.next = damaged

    source = f"--data.source={data[1]}", f"--data.separator_id={SEPARATOR}"
    flags = ("--training.seq_len=512", "--training.local_batch_size=1", "--parallelism.context_parallel_degree=2")
    ended = desk.run("lacks", 2, *source, *flags, plant=plant, ends=2)
    assert ended.status["state"] == "failed"
    assert [row["step"] for row in ended.steps] == [1, 2]
    assert "planted damage" in ended.output


def test_a_model_file_that_keeps_its_sequences_to_itself_is_refused(desk: "Desk", tmp_path: Path) -> None:
    """Its attention ends with the rank's tokens: a run is strict, and ends after the first step."""
    own = mine(tmp_path, ("sequences = sequences or Sequences(self.seq_len)", "sequences = Sequences(len(tokens))"))
    flags = ("--training.seq_len=256", "--training.local_batch_size=1", "--parallelism.context_parallel_degree=2")
    sizes = [f"--model.{name}={size}" for name, size in (("n_heads", 4), ("n_kv_heads", 2), ("ffn_dim", 256))]
    ended = desk.run("keeps", 2, *own, *flags, *sizes, ends=2)
    assert "context_parallel" in ended.output.partition("problem")[2]
