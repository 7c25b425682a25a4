"""One process is the truth: every other layout trains the same model on the same data to the same numbers.

Gradients are sums over tokens, in an order that depends on the layout. A sum of n float32 terms in another order
differs by about sqrt(n) · 6e-8 of its largest terms; n is 256 tokens here, so 1e-6, and 1e-5 is ten times that. A loss
is a mean of rounded terms near 5 and differs by a few units in the last place of float32, 1e-7 relative; the bound is
1e-6. A reduction that is missing is wrong by half.

The learning rate is below that of `configs/debug.toml`: at 2e-3, with batches as small as these, training is at the
edge of stability, and layouts that agree to 1e-7 in every gradient are 1e-5 apart by step 18.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from tests.support.needs import slow
from tests.support.ranks import run_ranks
from tests.support.short_run import STEPS, Trained, assemble, checked, count_graphs, take_steps, train
from titanlite import recipes

LR = ["--optimizer.lr", "3e-4"]
BATCH = "--training.local_batch_size"
ONE_PROCESS = (1, [*LR, BATCH, "4"])
TP_2 = ["--parallelism.tensor_parallel_degree", "2"]
HSDP = ["--parallelism.data_parallel_replicate_degree", "2"]
LAYOUTS = {
    "gradient accumulation 2": (1, [*LR, BATCH, "2"]),
    "FSDP 2": (2, [*LR, BATCH, "2"]),
    "FSDP 4": (4, [*LR, BATCH, "1"]),
    "HSDP 2 × 2": (4, [*LR, BATCH, "1", *HSDP]),
    "TP 2": (2, [*LR, BATCH, "4", *TP_2]),
    "FSDP 2 × TP 2": (4, [*LR, BATCH, "2", *TP_2]),
}
COMPARED = 6  # steps of a layout: a sum that is wrong is seen in the first
SLOW = ("FSDP 4", "TP 2")  # "FSDP 2 × TP 2" has the collectives of both
SAVE_LISTS = [name for name in recipes.names("activation_checkpoint") if name != "none"]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("one"), *ONE_PROCESS)


def assert_same_losses(got: Trained, truth: Trained) -> None:
    losses = truth.losses[: len(got.losses)]
    error = ((got.losses.double() - losses) / losses).abs()
    assert error.max() <= 1e-6, f"loss is off by {error.max():.1e} at step {error.argmax() + 1}"


def assert_same_gradients(got: Trained, truth: Trained) -> None:
    assert got.gradients.keys() == truth.gradients.keys()
    errors = {
        name: ((got.gradients[name].double() - gradient).abs().max() / gradient.abs().max()).item()
        for name, gradient in truth.gradients.items()
    }
    wrong = {name: f"{error:.1e}" for name, error in errors.items() if not error <= 1e-5}
    assert not wrong, f"gradients are off: {wrong}"
    norm, true_norm = got.norms[0].item(), truth.norms[0].item()
    assert abs(norm - true_norm) <= 1e-5 * true_norm, f"gradients agree, their norm does not: {norm}, not {true_norm}"


def assert_same_weights(got: Trained, truth: Trained) -> None:
    assert got.weights.keys() == truth.weights.keys()
    different = [name for name, weight in truth.weights.items() if not torch.equal(got.weights[name], weight)]
    assert not different, f"initial weights differ: {different}"


def test_one_process_learns(one_process):
    assert len(one_process.losses) == STEPS
    assert 5.3 < one_process.losses[0] < 5.8  # ln 256 = 5.55, and a little
    assert one_process.losses[-1] < one_process.losses[0] - 0.5


@pytest.mark.parametrize("layout", [*(name for name in LAYOUTS if name not in SLOW), *slow(*SLOW)])
def test_layout_trains_as_one_process(layout, one_process, tmp_path):
    got = train(tmp_path, *LAYOUTS[layout], steps=COMPARED)
    assert len(got.losses) == COMPARED
    assert_same_weights(got, one_process)
    assert_same_gradients(got, one_process)
    assert_same_losses(got, one_process)


def test_what_a_model_draws_is_of_its_data_parallel_rank_and_in_every_run_the_same(tmp_path):
    asked = checked(tmp_path, 4, TP_2)

    def body() -> None:
        own, said = (assemble(asked).mesh.dp_rank, torch.rand(3).tolist()), [None] * 4
        dist.all_gather_object(said, own)
        of_data_parallel_rank = dict(said)
        assert said == [(rank, of_data_parallel_rank[rank]) for rank, _ in said]
        assert of_data_parallel_rank[0] != of_data_parallel_rank[1]
        assemble(asked)
        assert torch.rand(3).tolist() == own[1]

    run_ranks(body, tmp_path, 4)


def test_torch_is_told_to_be_deterministic(tmp_path, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    asked = [checked(tmp_path, 1, flags) for flags in ([], ["--training.deterministic"])]

    def body() -> None:
        for wanted in (False, True):
            take_steps(assemble(asked[wanted]), 1)
            assert torch.are_deterministic_algorithms_enabled() == wanted
            assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if wanted else None)

    run_ranks(body, tmp_path, 1)


@pytest.mark.parametrize(
    ("flags", "ours"),
    [([], True), ([BATCH, "1"], False), (["--training.mixed_precision_reduce", "bfloat16"], False)],
    ids=["a micro-step", "two micro-steps", "widened"],
)
def test_gradients_are_in_memory_of_the_compute_stream_where_nothing_is_added_to_them(flags, ours, tmp_path):
    asked = checked(tmp_path, 2, [BATCH, "2", *flags])

    def body() -> None:
        units = [module for module in assemble(asked).model.modules() if isinstance(module, FSDPModule)]
        groups = [group for unit in units if (group := unit._get_fsdp_state()._fsdp_param_group)]
        assert groups
        assert {group.arena.reduction._follows for group in groups} == {ours}

    run_ranks(body, tmp_path, 2)


def compiled_trains_as_one_process(layout: str, one_process: Trained, folder: Path) -> None:
    world, flags = {"one process": ONE_PROCESS, **LAYOUTS}[layout]
    counted = count_graphs(folder / "graphs")
    steps = 4  # what is compiled again is so in the second
    got = train(folder, world, [*flags, "--compile.enable"], steps=steps, change=counted, timeout_s=200)
    assert_same_gradients(got, one_process)
    assert_same_losses(got, one_process)
    # In every step, on every rank: one graph for both blocks.
    assert (folder / "graphs").read_text().split() == ["1"] * steps * world


@pytest.mark.skipif(not shutil.which("g++"), reason="the compiler's CPU back end needs g++")
def test_machine_code_trains_as_one_process(one_process, tmp_path):
    compiled_trains_as_one_process("one process", one_process, tmp_path)


@pytest.mark.parametrize(
    "layout", slow("FSDP 2 × TP 2", "gradient accumulation 2", "FSDP 2", "FSDP 4", "HSDP 2 × 2", "TP 2")
)
@pytest.mark.usefixtures("without_machine_code")
def test_compiled_layout_trains_as_one_process(layout, one_process, tmp_path):
    compiled_trains_as_one_process(layout, one_process, tmp_path)


@pytest.mark.parametrize(
    ("layout", "save_list"),
    [
        ("one process", "every_second_matmul"),
        *(("TP 2", "balanced"), *slow(("TP 2", "full"))),
        *slow(*(("one process", name) for name in SAVE_LISTS if name != "every_second_matmul")),
    ],
)
def test_save_list_changes_no_bit(layout, save_list, tmp_path, without_checkpointing):
    world, flags = {"one process": ONE_PROCESS, **LAYOUTS}[layout]
    got = train(tmp_path, world, [*flags, "--activation_checkpoint.recipe", save_list], steps=2)
    truth = without_checkpointing(layout)
    assert torch.equal(got.losses, truth.losses)
    assert torch.equal(got.norms, truth.norms)
    for name, gradient in truth.gradients.items():
        assert torch.equal(got.gradients[name], gradient), name


@pytest.fixture(scope="module")
def without_checkpointing(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    known: dict[str, Trained] = {}

    def run(layout: str) -> Trained:
        if layout not in known:
            world, flags = {"one process": ONE_PROCESS, **LAYOUTS}[layout]
            known[layout] = train(tmp_path_factory.mktemp("none"), world, flags, steps=2)
        return known[layout]

    return run


TIED = """
help = "Two layers with tied embeddings, and widths that three ranks cannot share equally."
n_layers = 2
dim = 128
n_heads = 4
n_kv_heads = 2
ffn_dim = 256
vocab_size = 260
rope_theta = 10000.0
norm_eps = 1e-5
tied_embeddings = true
"""


@pytest.mark.parametrize("layouts", [["FSDP 3"], *slow(["both"], ["TP 2"])])
def test_tied_embeddings_and_uneven_shards(layouts, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "llama3-tied.toml").write_text(TIED)
    flags = ["--job.recipe_dirs", str(tmp_path), "--model.flavor", "tied", "--training.global_batch_size", "12"]
    truth = train(tmp_path, 1, [*flags, BATCH, "12"], steps=4)
    assert "output.weight" not in truth.weights
    of_ranks = {"FSDP 3": (3, [BATCH, "4"]), "TP 2": (2, [BATCH, "12", *TP_2]), "both": (4, [BATCH, "6", *TP_2])}
    for world, layout in map(of_ranks.__getitem__, layouts):
        got = train(tmp_path, world, [*flags, *layout], steps=4)
        assert_same_weights(got, truth)
        assert_same_gradients(got, truth)
        assert_same_losses(got, truth)


def test_another_seed_makes_other_weights(one_process, tmp_path):
    got = train(tmp_path, 1, [BATCH, "4", "--training.seed", "1"], steps=1)
    for name, weight in one_process.weights.items():
        assert torch.equal(got.weights[name], weight) == name.endswith("norm.weight"), name
