"""The recorded step: what a GPU runs of it, and what each block of a kind adds."""

import inspect
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.support.needs import slow
from titanlite.commands.planned_run import plan_run
from titanlite.config.toml_file import shipped_folder
from titanlite.data.context_split import chunk_length, seen_chunks, split_by_work
from titanlite.forecast.memory import MemoryModel
from titanlite.models import llama3
from titanlite.preflight.checked_run import CheckedRun, checked_run
from titanlite.recorder import record as record_file
from titanlite.recorder.record import Recording, record
from titanlite.recorder.recorder import Recorded

WORLD = 4
LAYOUTS = {
    "FSDP": {},
    "HSDP": {"data_parallel_replicate_degree": 2},
    "FSDP × TP": {"tensor_parallel_degree": 2},
    "TP async": {"tensor_parallel_degree": 2, "async_tensor_parallel": True},
    "CP": {"context_parallel_degree": 2},
    "EP": {"expert_parallel_degree": 4},
}


def run_of(model: str, layout: str, *flags: str, world: int = WORLD) -> CheckedRun:
    given = [f"--parallelism.{key}={str(value).lower()}" for key, value in LAYOUTS[layout].items()]
    given += ["--data.document_mask=true"] if layout == "CP" else []
    of_model = [f"--model.name={model}", "--model.flavor=debug", "--training.mixed_precision_param=bfloat16"]
    return checked_run(["--config", str(shipped_folder("configs") / "debug.toml"), *of_model, *given, *flags], world)


def as_recorded(recording: Recording) -> Counter:
    found = Counter[tuple[str, str, int, int]]()
    for each, times in recording.collectives.items():
        found[each.kind, each.direction, each.ranks, each.sent_bytes] += times
    return found


@pytest.mark.parametrize("save_list", ["full", *slow("balanced")])
def test_what_backward_computes_again_it_sends_again(save_list: str) -> None:
    run = run_of("llama3", "FSDP × TP", f"--activation_checkpoint.recipe={save_list}")
    recording = record(run, WORLD, "h100")
    again = {each.direction for each in recording.collectives}
    assert ("recomputation" in again) == (save_list == "full")


def test_keys_of_documents_are_exchanged_as_the_split_has_them_in_the_mean_of_ranks() -> None:
    run = run_of(
        "llama3", "FSDP", "--parallelism.context_parallel_degree=4", "--data.document_mask=true", "--model.n_layers=1"
    )
    S, random = 256, np.random.default_rng(0)
    cuts = [np.sort(random.choice(np.arange(1, 2 * S), 3, replace=False)) for _ in range(4)]
    documents = [np.repeat([0, *at], np.diff([0, *at, 2 * S])).astype(np.int32) for at in cuts]
    documents = [np.maximum(starts, np.arange(2 * S) // S * S).astype(np.int32) for starts in documents]
    memory = MemoryModel(run.config, run.dims, run.float8, run.optimizer, WORLD)
    (each, *_) = [op for op in memory.run.blocks[0].forward if op.op == "titanlite.context_attention.default"]
    share = np.mean([keys_of_others(starts, S) for starts in documents])
    sent = [sum(sent_of_keys(record(run, WORLD, "h100", rank, documents))) for rank in range(WORLD)]
    M, K, E = each.call[1][1].size
    of_micro_steps = memory.micro_steps * run.dims.n_layers * 3  # forward, and backward twice
    assert sum(sent) / WORLD == pytest.approx(of_micro_steps * share * M * WORLD * 2 * K * E * 2)
    assert share > 0


def keys_of_others(starts: np.ndarray, seq_len: int) -> float:
    """Share of all keys that a rank gets, in the mean of ranks."""
    owner = split_by_work(starts, C := chunk_length(len(starts), seq_len, WORLD), WORLD)
    of_ranks = [np.flatnonzero(owner == rank) for rank in range(WORLD)]
    return np.mean([seen_chunks(starts, C, own, 0).sum() - len(own) for own in of_ranks]) / len(owner)  # type: ignore[return-value]


def sent_of_keys(recording: Recording) -> list[int]:
    found = recording.collectives.items()
    return [each.sent_bytes * times for each, times in found if "context_attention" in each.operator]


def test_matrices_travel_as_they_are_shared_out_and_the_forecast_has_the_busiest_rank() -> None:
    run = run_of("llama3", "FSDP", "--optimizer.recipe=muon", "--training.mixed_precision_param=float32")
    of_ranks = [as_recorded(record(run, WORLD, "h100", rank)) for rank in range(WORLD)]
    listed = plan_run(run, "", WORLD, "h100").collectives.items()
    (planned,) = {each.sent_bytes * times for each, times in listed if each.kind == "all_to_all"}  # there and back
    sent = [sum(key[3] * n for key, n in rank.items() if key[0] == "all_to_all") for rank in of_ranks]
    assert max(sent) == planned
    assert sum(sent) / WORLD == pytest.approx(planned, rel=0.06)


ALIKE = [
    ("llama3", "FSDP × TP", ["--activation_checkpoint.recipe=full", "--model.n_layers=4"]),
    *slow(
        ("llama3", "FSDP × TP", ["--activation_checkpoint.recipe=full", "--float8.recipe=rowwise"]),
        ("gemma3", "CP", ["--model.n_layers=7"]),
        ("qwen3_moe", "TP async", ["--activation_checkpoint.recipe=balanced"]),
        ("llama3", "FSDP", ["--float8.recipe=rowwise", "--float8.filter_fqns=output,layers.2."]),
    ),
]


@pytest.mark.parametrize(("model", "layout", "flags"), ALIKE)
def test_blocks_of_one_kind_are_recorded_once(model: str, layout: str, flags: list[str]) -> None:
    run = run_of(model, layout, *([] if "n_layers" in str(flags) else ["--model.n_layers=6"]), *flags)
    one, each = (record(run, WORLD, "h100", all_blocks=every) for every in (False, True))
    assert (one.collectives, one.pairs) == (each.collectives, each.pairs)


def test_a_frozen_embedding_leaves_blocks_alike_but_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block sends no gradient of its input."""
    (mine := tmp_path / "mine.toml").write_text(
        'extends = "adamw"\nhelp = ""\n[groups.kept]\nrule = "adamw"\npattern = ["tok_*"]\nlr_factor = 0.0\n'
    )
    run = run_of("llama3", "FSDP × TP", "--model.n_layers=6", f"--optimizer.recipe={mine}")
    each, built = record(run, WORLD, "h100", all_blocks=True), list[list[int] | None]()
    build = record_file.build
    monkeypatch.setattr(record_file, "build", lambda *given: (built.append(given[2]), build(*given))[1])
    assert record(run, WORLD, "h100").collectives == each.collectives
    assert built == [[0, 5], [0, 1, 5]]


def test_a_plan_has_no_reduction_of_frozen_parameters_in_whichever_block(tmp_path: Path) -> None:
    (mine := tmp_path / "mine.toml").write_text(
        'extends = "muon"\nhelp = ""\n[groups.kept]\nrule = "adamw"\npattern = ["layers.[23].*"]\nlr_factor = 0.0\n'
    )
    reduced = []
    for recipe in ("muon", mine):
        run = run_of("llama3", "FSDP", "--model.n_layers=6", f"--optimizer.recipe={recipe}")
        listed = plan_run(run, "", WORLD, "h100").collectives.items()
        reduced.append(sum(n for each, n in listed if each.kind == "reduce_scatter" and "layers" in each.module))
    assert reduced[0] * 4 == reduced[1] * 6 > 0


def test_a_run_of_a_cpu_sends_what_its_definitions_do() -> None:
    run = run_of("qwen3_moe", "EP")
    on_gpus, here = (record(run, WORLD, device) for device in ("h100", None))
    name = "combine_windows_at_owners"
    (stored,) = {each.sent_bytes for each in on_gpus.collectives if each.operator == name}
    (moved,) = {each.sent_bytes for each in here.collectives if each.operator == name}
    assert moved == WORLD * stored  # a collective moves a row for each slot of each rank


def test_bytes_of_an_operator_are_what_a_rank_sends() -> None:
    assert Recorded("all_gather", "forward", "", 4, 400).sent_bytes == 300
    assert Recorded("all_gather", "forward", "", 4, 300, "all_gather_matmul").sent_bytes == 300
    assert Recorded("all_to_all", "update", "", 4, 300).sent_bytes == 300


@pytest.mark.parametrize("layout", ["FSDP", "TP async"])
def test_micro_steps_between_the_first_and_the_last_are_alike(layout: str) -> None:
    run = run_of("llama3", layout, "--training.global_batch_size=40", "--activation_checkpoint.recipe=full")
    few, each = (record(run, WORLD, "h100", all_blocks=every) for every in (False, True))
    assert (few.collectives, few.pairs) == (each.collectives, each.pairs)


BLOCKS = "for block in self.layers:"


@pytest.mark.parametrize(
    ("written", "instead"),
    [
        (BLOCKS, "for block in [self.layers[n] for n in range(4)]:"),
        (BLOCKS, "for block, _ in zip(self.layers, range(4), strict=True):"),
        ("x = block(", "x = nn.Identity()(block)("),
    ],
)
def test_a_file_of_ones_own_may_look_for_its_blocks(written: str, instead: str, tmp_path: Path) -> None:
    text = inspect.getsource(llama3)
    assert text.count(written) == 1
    (tmp_path / "mine.py").write_text(text.replace(written, instead))
    (tmp_path / "model").mkdir()
    sizes = shipped_folder("recipes") / "model" / "llama3-debug.toml"
    (tmp_path / "model" / "mine-debug.toml").write_text(sizes.read_text())
    shipped = run_of("llama3", "FSDP", "--model.n_layers=4")
    own = f"--model.file={tmp_path / 'mine.py'}", f"--job.recipe_dirs={tmp_path}", "--model.flavor=debug"
    given = "--config", str(shipped_folder("configs") / "debug.toml"), "--training.mixed_precision_param=bfloat16"
    mine = checked_run([*given, *own, "--model.n_layers=4"], WORLD)
    assert record(mine, WORLD, "h100").collectives == record(shipped, WORLD, "h100").collectives
