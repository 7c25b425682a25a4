"""What is predicted where ranks share experts out, against formulas, at sizes that need no GPU."""

import json
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from tests.support.measured import MEASURED_CONFIGS
from titanlite import recipes
from titanlite.activation_checkpoint.operations import CLASSES, EXCHANGES, WINDOWS
from titanlite.commands.planned_run import plan_run
from titanlite.config.recipe_schema import SaveList, SaveRule
from titanlite.config.toml_file import shipped_folder
from titanlite.forecast.activation_cost import activations, block_costs
from titanlite.forecast.choose_save_list import choose
from titanlite.forecast.device_specs import DEVICES, measured_rates
from titanlite.forecast.memory import GPUS_OF_A_HOST, MemoryModel, usable
from titanlite.forecast.search import LEAST
from titanlite.forecast.step_time import StepTimeModel, units
from titanlite.forecast.time_activations import operands
from titanlite.kernels.expert_windows import window_rows
from titanlite.preflight.checked_run import CheckedRun, checked_run
from titanlite.recorder.record import record

CONFIG = str(shipped_folder("configs") / "qwen3_moe_debug.toml")
MEASURED = shipped_folder("configs").parent / "benchmarks" / "results" / "kernels.jsonl"
SMALL = (
    "--training.seq_len=64",
    "--training.local_batch_size=2",
    "--training.global_batch_size=16",
    "--parallelism.fsdp_copy_engines=never",
)
BF16 = ("--training.mixed_precision_param=bfloat16", "--compile.enable")
M, D, E, K, F = 128, 256, 8, 2, 128
OF_EXPERT = 3 * D * F


def run_of(ranks: int, *flags: str) -> CheckedRun:
    degree = f"--parallelism.expert_parallel_degree={ranks}"
    return checked_run(["--config", CONFIG, *SMALL, degree, *flags], world_size=8)


def memory_of(ranks: int, *flags: str) -> MemoryModel:
    run = run_of(ranks, *flags)
    return MemoryModel(run.config, run.dims, run.float8, run.optimizer, 8)


def ops_of(operations: Sequence, *names: str) -> list:
    return [each for each in operations if each.op.split(".")[1] in names]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_experts_travel_among_the_ranks_of_other_groups_alone(ranks: int) -> None:
    memory, whole = memory_of(ranks), 4 * E // ranks * OF_EXPERT
    step = record(run_of(ranks), 8, "h100").collectives.items()
    seen = Counter[tuple[str, str, int]]()
    for each, times in step:
        if each.n_bytes == whole and not each.operator:
            seen[each.kind, each.direction, each.ranks] += times
    want = [("all_gather", "forward"), ("all_gather", "backward"), ("reduce_scatter", "backward")]
    assert seen == {(*each, 8 // ranks): 2 for each in want if ranks < 8}  # of two blocks
    assert [unit.shards for unit in units(memory)[1]] == [8, 8 // ranks]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_tokens_go_to_all_ranks_and_come_back_by_slot(ranks: int) -> None:
    """In bytes of bfloat16; choices and weights have four, and gradients of weights."""
    memory = memory_of(ranks, *BF16)
    run = run_of(ranks, *BF16, "--activation_checkpoint.recipe=full")
    step = plan_run(run, "", 8, "h100").collectives.items()
    seen = {(each.kind, each.direction): (each, times) for each, times in step if each.operator}
    others = ranks - 1
    sent = {
        ("all_gather", "forward"): others * M * (2 * D + 4 * K),
        ("all_to_all", "forward"): others * M * K * 2 * D // ranks,
        ("all_gather", "backward"): others * M * (2 * 2 * D + 4 * K),
        ("all_to_all", "backward"): others * M * K * (2 * D + 4) // ranks,
        ("all_gather", "recomputation"): others * M * (2 * D + 4 * K),  # for the rows that w13 multiplies
    }
    assert {key: each.sent_bytes for key, (each, _) in seen.items()} == sent
    assert {each.ranks for each, _ in seen.values()} == {ranks}
    assert memory.symmetric_memory == max(ranks * M * (2 * 2 * D + 4 * K), M * K * (2 * D + 4))
    assert {times for _, times in seen.values()} == {2}  # blocks


def test_hosts_are_of_as_many_gpus_as_rates_are_of() -> None:
    assert {measured_rates(device).host for device in DEVICES} == {GPUS_OF_A_HOST}


def test_lists_keep_the_exchange_and_what_experts_make() -> None:
    """Of the first window `dispatch` keeps the rows, `experts` the product of w13; what nothing in backward reads, the
    results that come back, is kept by no list."""
    memory = memory_of(4, *BF16)

    def held(rule: str) -> int:
        costs = block_costs(memory.run, SaveList("", "recompute", (SaveRule(rule, "save"),)))
        repeated = {each.op.split(".")[1] for each in costs[0].recomputed}
        assert ("gather_from_ranks" in repeated) == (rule not in ("dispatch", "experts"))
        assert "expert_rows" not in repeated
        return costs[0].held - block_costs(memory.run, LEAST)[0].held

    window = 4 * M  # the rows of 1.5 times the mean, M·K·3/2, would be fewer than an expert can have
    assert held("experts") == window * 2 * F * 2
    assert held("dispatch") == window * D * 2


def test_later_windows_take_what_is_alive_in_their_backward() -> None:
    """With two experts on a rank most is alive at the gate: gradients of rows, before and behind w2, a, and what is
    made of them. With four it is at w13: its gradient's operands, and the gradients of both weights. Of one more window
    the rows' gradients stay. NCCL joins the rows of all windows."""

    def later(ranks: int, host: int = 8) -> tuple[int, int]:
        run = run_of(ranks, *BF16)
        memory = MemoryModel(run.config, run.dims, run.float8, run.optimizer, 8, host=host)
        (found,) = {block.later_windows for block in memory.run.blocks}
        return found

    W, dots = 3 * M * K // 2, 2 * M * K * 4
    assert later(1) == later(8) == (0, 0)  # an expert on a rank fits in a window
    assert later(4) == (4 * M * (2 * D + 2 * 2 * 2 * F + 2 * 2 * F) + 2 * dots,) * 2
    second = W * 2 * (D + 2 * F) + 4 * OF_EXPERT * 2 + dots
    assert later(2) == (second, second + W * 2 * D)
    assert later(2, host=1) == (second, max(second + W * 2 * D, 5 * W * 2 * D))


def test_auto_leaves_room_for_a_second_window() -> None:
    """A run whose measured peak exceeds the budget ends, and the router decides whether there are two."""
    layers = "--model.name=qwen3_moe", "--model.flavor=30B-A3B", "--model.n_layers=4", "--training.local_batch_size=8"
    config = ("--config", str(MEASURED_CONFIGS / "llama3_8b.toml"), "--parallelism.expert_parallel_degree=2")
    run = checked_run([*config, *layers, "--training.global_batch_size=16", "--training.seq_len=4096"], world_size=2)
    memory = MemoryModel(run.config, run.dims, run.float8, run.optimizer, 2)
    times = StepTimeModel(memory, measured_rates("h200")).times()
    most = memory.peak_under(recipes.load("activation_checkpoint", "none")).total
    fits, kept = (choose(memory, times, n / usable(1)).peak for n in (most + memory.later_window + 1, most + 1))
    assert kept < fits == most
    assert kept + memory.later_window <= most


@pytest.mark.parametrize("float8", ["none", "rowwise"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_auto_times_has_the_rows_of_the_mean(ranks: int, float8: str) -> None:
    """Products have M·K rows, though windows have room for more; and each rank is sent as many."""
    memory, seen = memory_of(ranks, *BF16, f"--float8.recipe={float8}"), list[str]()
    for each in activations(memory.run.blocks[0]):
        args, _ = operands(each, ranks, torch.device("cpu"))
        indices = [a for a in args if isinstance(a, torch.Tensor) and a.dtype == torch.int32]
        if each.op in CLASSES["experts"]:
            (offsets,) = indices
            assert len(args[0]) == window_rows(ranks, ranks * M, K, E // ranks)
            assert (len(offsets), offsets[0], offsets[-1]) == (E // ranks + 1, 0, M * K)
            assert (offsets.diff() == M * K * ranks // E).all()
        elif each.op in CLASSES["dispatch"] and indices:
            places = indices[0].flatten()
            of_tokens = places[places >= 0]
            if each.op in WINDOWS:
                assert (indices[3][0], indices[3][-1]) == (0, M * K)
            assert len(of_tokens.unique()) == len(of_tokens) == M * K
            assert (torch.bincount(of_tokens // (M * K)) == M * K // ranks).all()
        else:
            continue
        seen.append(each.op)
    assert len(seen) >= 3


def test_a_rate_of_grouped_products_follows_the_rows_of_an_expert() -> None:
    """All FLOPs over all time of the rows in benchmarks/results/kernels.jsonl; a row of few takes longer."""
    rows = [json.loads(line) for line in MEASURED.read_text().splitlines()]
    rates = measured_rates()
    for model, n in (("Qwen3-30B-A3B", 1024), ("Mixtral 8x7B", 4096)):
        for fast, kind in ((None, ""), (True, ", float8, fast"), (False, ", float8, split")):
            for is_gradient in (False, True):
                of = [
                    row
                    for row in rows
                    if row["kernel"] == "grouped_matmul"
                    and row["model"] == model
                    and row["product"].endswith(kind)
                    and ("float8" in row["product"]) == bool(kind)
                    and ("of itself" in row["product"]) == is_gradient
                ]
                measured = sum(row["ms"] * row["tflops"] for row in of) / sum(row["ms"] for row in of)
                assert rates.grouped_of(n, is_gradient, fast) == pytest.approx(measured, rel=0.1)
    by_rows = [rates.grouped_of(n, False, None) for n in (64, 256, 1024, 2048, 4096, 16384)]
    assert by_rows == sorted(by_rows)
    assert by_rows[0] > 0
    assert by_rows[-1] < 745


@pytest.mark.parametrize(
    ("name", "flavor", "model"), [("qwen3_moe", "30B-A3B", "Qwen3-30B-A3B"), ("mixtral", "8x7B", "Mixtral 8x7B")]
)
def test_an_exchange_takes_as_long_as_it_was_measured(name: str, flavor: str, model: str) -> None:
    """Of 16,384 tokens on each of two H200, alone."""
    rows = [json.loads(line) for line in MEASURED.read_text().splitlines()]
    measured = {
        row["operator"]: row["ms"] for row in rows if row["kernel"] == "token_exchange" and row["model"] == model
    }
    flags = ["--config", str(MEASURED_CONFIGS / "llama3_8b.toml"), f"--model.name={name}"]
    flags += [f"--model.flavor={flavor}", "--model.n_layers=1", "--training.seq_len=4096", "--data.document_mask=false"]
    run = checked_run([*flags, "--training.local_batch_size=4", "--parallelism.expert_parallel_degree=2"], world_size=2)
    memory = MemoryModel(run.config, run.dims, run.float8, run.optimizer, 2)
    rates, (block, *_) = measured_rates(), memory.run.blocks
    times = StepTimeModel(memory, rates).times().activations
    found = {each.op.split(".")[1]: 1e3 * seconds for each, seconds in times.items() if each.op in EXCHANGES}
    found["combine_at_owners"] = found.pop("combine_windows_at_owners")
    (of_backward,) = ops_of(block.backward, "window_gradients_at_owners")
    passes = (of_backward.moved - of_backward.received) / rates.memory
    found["gradients_at_owners"] = (of_backward.received / rates.exchange[1] + passes) / 1e6
    assert found == pytest.approx(measured, rel=0.05)
