"""The predicted time of a step against measured runs, and what it must obey on any layout."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks import tables
from tests.support.measured import arguments, measured_runs
from titanlite.config.recipe_schema import SaveList
from titanlite.config.toml_file import shipped_folder
from titanlite.forecast.activation_cost import block_costs
from titanlite.forecast.attended import AttendedShare
from titanlite.forecast.choose_save_list import choose
from titanlite.forecast.device_specs import DEVICES, Rates, measured_rates, no_rates_reason
from titanlite.forecast.memory import GIB, MemoryModel
from titanlite.forecast.step_time import StepTime, StepTimeModel
from titanlite.preflight.checked_run import checked_run

TP = "--parallelism.tensor_parallel_degree"
ASYNC = "--parallelism.async_tensor_parallel"
FLOAT8 = "--float8.recipe"
QWEN3 = ("--model.name", "qwen3", "--model.flavor")


KERNELS_BEFORE = {
    "attention": {64: (385, 361), 128: (507, 428), 256: (481, 329)},
    "attention_documents": {128: (0.84, 0.71)},
    "attention_long": (1.0, 1.0),
    "attention_window": (185, 157),
}
"""Rates of attention in steps that were measured before FlashAttention-4: cuDNN's, and of kernels that are gone."""


def rates_of(row: dict[str, Any], device: str) -> Rates:
    rates = measured_rates(device)
    return rates if rates.attention_by in row.get("note", "") else replace(rates, **KERNELS_BEFORE)


def model(
    name: str, world: int, save_list: str, *flags: str, rates: Rates | None = None
) -> tuple[StepTimeModel, StepTime]:
    config = str(shipped_folder("configs") / f"llama3_{name}.toml")
    batch = ["--training.seq_len", "8192", "--training.local_batch_size", "2"]
    argv = ["--config", config, *batch, "--activation_checkpoint.recipe", save_list, *flags]
    return step_of(argv, world, rates or measured_rates())


def step_of(argv: list[str], world: int, rates: Rates) -> tuple[StepTimeModel, StepTime]:
    run = checked_run(argv, world_size=world)
    assert run.save_list is not None
    memory = MemoryModel(run.config, run.dims, run.float8, run.optimizer, world)
    predicted = StepTimeModel(memory, rates)
    return predicted, predicted.step(block_costs(memory.run, run.save_list))


@pytest.mark.parametrize("row", measured_runs("step_time", "H200"))
def test_measured_runs(row: dict[str, Any]) -> None:
    """Async TP is 1 to 12 % too fast: nothing here waits. Narrower models than these are faster here than measured.
    Rates were taken from three of the runs in docs/performance.md, which says which. All have torch's AdamW, on
    hosts as fast as those that rates are from."""
    predicted, step = step_of(arguments(row), row["world"], rates_of(row, "h200"))
    torchs_adamw = 36 / 3184e9 * 1e3  # 11.35 ms for 1.004e9 parameters
    step = replace(step, optimizer=torchs_adamw * predicted.memory.parameters / predicted.memory.shards)
    bound = 0.125 if ASYNC in row["flags"] else 0.04
    assert predicted.tokens_per_second(step) == pytest.approx(row["tokens_per_second"], rel=bound)


@pytest.mark.parametrize("row", measured_runs("step_time", "H100"))
def test_measured_runs_on_h100(row: dict[str, Any]) -> None:
    """Two rates are from the fourth of them; all others are those of H200. With titanlite's AdamW."""
    _, step = step_of(arguments(row), row["world"], rates_of(row, "h100"))
    assert step.total == pytest.approx(row["ms_per_step"], rel=0.06)


@pytest.mark.parametrize("row", measured_runs("step_time_by_rule", "H200"))
def test_measured_runs_by_rule(row: dict[str, Any]) -> None:
    """All are predicted 0.5 to 3 % too slow, AdamW's the most: that machine is a fast one."""
    _, step = step_of(arguments(row), row["world"], rates_of(row, "h200"))
    assert step.total == pytest.approx(row["ms_per_step"], rel=0.04)


@pytest.mark.parametrize("recipe", ["muon", "normuon"])
def test_what_a_rule_takes_beyond_adamw(recipe: str) -> None:
    """Muon's rate is from this difference, NorMuon's is predicted. With eight micro-steps 149 ms are predicted of Muon,
    too, and 215 were measured, of one run each with three steps."""
    runs = {row["flags"]: row for row in tables.rows("runs", table="optimizers")}
    pair = [
        runs[f"--activation_checkpoint.recipe none --model.n_layers 12 --optimizer.recipe {name}"]
        for name in ("adamw", recipe)
    ]
    plain, other = (step_of(arguments(row), row["world"], rates_of(row, "h200"))[1].total for row in pair)
    assert other - plain == pytest.approx(pair[1]["ms_per_step"] - pair[0]["ms_per_step"], rel=0.02)


def test_a_mixture_of_experts_multiplies_by_the_experts_of_a_token_alone() -> None:
    """Four layers of Qwen3 30B-A3B on one H200, compiled, without a list: 140 ms were measured."""
    asked = [
        "--config",
        str(shipped_folder("configs") / "debug.toml"),
        "--compile.enable",
        "--data.document_mask=false",
    ]
    asked += ["--model.name=qwen3_moe", "--model.flavor=30B-A3B", "--model.n_layers=4", "--training.seq_len=4096"]
    asked += ["--training.local_batch_size=4", "--training.global_batch_size=4", "--activation_checkpoint.recipe=none"]
    predicted, step = step_of([*asked, "--training.mixed_precision_param=bfloat16"], 1, measured_rates())
    D, F, M, top_k = 2048, 768, 4 * 4096, 8
    others = 4 * (D * (32 + 2 * 4) * 128 + 32 * 128 * D) + D * 151936
    of_rows, of_weights = predicted.rates.grouped[M * top_k // 128]
    of_experts = 4 * top_k * 3 * F * D * (4 / of_rows + 2 / of_weights)
    assert step.matmul == pytest.approx(M * (6 * others / predicted.rates.matmul_alone + of_experts) / 1e9, rel=1e-6)
    assert step.total == pytest.approx(140, rel=0.04)


@pytest.mark.parametrize(
    ("recipe", "degree", "tokens_per_second", "reserved_gib"),
    [
        ("none", 1, 70112, 48.88),
        ("rowwise", 1, 78590, 48.25),
        ("none", 2, 66192, 50.84),
        ("none", 2, 71480, 50.84),
        ("rowwise", 2, 74694, 51.09),
        ("rowwise", 2, 78288, 51.09),
    ],
)
def test_measured_steps_of_experts(recipe: str, degree: int, tokens_per_second: float, reserved_gib: float) -> None:
    """Eight layers of Qwen3 30B-A3B on two H200, which gather experts or send tokens to them, the second
    of each with balanced routing (rows of 1a6a339, 5966335
    and 06af9eb in benchmarks/results/runs.jsonl)."""
    flags = ["--model.n_layers", "8", "--training.seq_len", "4096", "--training.local_batch_size", "4"]
    flags += ["--model.name", "qwen3_moe", "--model.flavor", "30B-A3B", FLOAT8, recipe, "--data.document_mask=false"]
    predicted, step = model("8b", 2, "none", *flags, f"--parallelism.expert_parallel_degree={degree}")
    assert predicted.tokens_per_second(step) == pytest.approx(tokens_per_second, rel=0.06)
    peak = predicted.memory.peak(block_costs(predicted.run, SaveList("", "save")))
    assert peak.total / GIB == pytest.approx(reserved_gib, rel=0.02)


def test_devices_have_all_rates() -> None:
    assert DEVICES == ["h100", "h200"]
    h100, h200 = map(measured_rates, DEVICES)
    differ = {name for name, rate in vars(h100).items() if rate != getattr(h200, name)}
    assert differ == {"device", "device_gib", "memory", "optimizer"}


def test_the_list_that_auto_would_choose() -> None:
    """As fast as the one that it did choose for as much, by times of its own (docs/performance.md)."""
    predicted, _ = model("8b", 2, "none", rates=replace(measured_rates(), **KERNELS_BEFORE))
    choice = choose(predicted.memory, predicted.times(), 100)
    step = predicted.step(block_costs(predicted.run, choice.save_list))
    assert predicted.tokens_per_second(step) == pytest.approx(10_432, rel=0.01)
    assert step.recomputation == pytest.approx(1e3 * choice.seconds)


def test_matmuls_are_their_flops_over_the_rate() -> None:
    """6 FLOPs per parameter that multiplies, and token: 8B less the embedding and the norms."""
    multiplied = 8_030_261_248 - 128_256 * 4096 - 65 * 4096
    _, step = model("8b", 4, "none")
    assert step.matmul == pytest.approx(6 * multiplied * 16_384 / 680e12 * 1e3)
    _, alone = model("8b", 4, "none", TP, "4")
    assert alone.matmul == pytest.approx(6 * multiplied * 16_384 / 4 / 745e12 * 1e3)


def test_attention_takes_the_scores_that_it_computes() -> None:
    """Two products in forward, and backward two and a half times that. Heads of Qwen3 0.6B are together twice as wide
    as the stream; of Gemma 3 1B's layers 22 attend to a window of 512, 4 to all."""
    _, qwen3 = model("1b", 1, "none", *QWEN3, "0.6B")

    def to_all_tokens(forward: float, backward: float) -> float:
        return 4 * 16_384 * 8192 / 2 * (1 / forward + 2.5 / backward) * 1e-9

    assert qwen3.attention == pytest.approx(28 * 2048 * to_all_tokens(574, 460))
    _, narrow = model("1b", 1, "none")  # heads of 64
    assert narrow.attention == pytest.approx(16 * 2048 * to_all_tokens(460, 434))
    _, gemma3 = model("1b", 1, "none", "--model.name", "gemma3", "--model.flavor", "1B")
    window = 2 * 16_384 * 512 * (2 - 512 / 8192) * (1 / 203 + 2.5 / 172) * 1e-9
    assert gemma3.attention == pytest.approx(22 * 1024 * window + 4 * 1024 * to_all_tokens(527, 360))


def test_plain_collectives_are_in_the_open_and_fused_ones_hide_behind_their_matmul() -> None:
    """Eight a layer and four at the ends, [16384, 4096] in bfloat16, of which three quarters come from other ranks."""
    _, plain = model("8b", 4, "none", TP, "4")
    assert plain.tokens == pytest.approx((8 * 32 + 4) * 16_384 * 4096 * 2 * 3 / 4 / 280e9 * 1e3)
    _, fused = model("8b", 4, "none", TP, "4", ASYNC)
    assert fused.tokens < plain.tokens / 2
    assert fused.matmul == plain.matmul


@pytest.mark.parametrize(
    ("name", "of_stream", "rotated", "gated", "biases"),
    [
        ("llama3", 8, (2, 2), (3, 6), False),
        ("qwen3", 8, (2, 3), (3, 6), False),
        ("gemma3", 12, (2, 3), (3, 6), False),
        ("gpt2", 8, (0, 0), (2, 4), True),
    ],
)
def test_elementwise_work_moves_its_tensors(
    name: str, of_stream: int, rotated: tuple[int, int], gated: tuple[int, int], biases: bool
) -> None:
    """By tensors read or written, forward and backward: as wide as the stream, as queries and keys, as the gate's
    result. A bias is added in a pass that there is, but for that of attention; its gradient is a sum.

    The trace has what is small beside: statistics, tables, and values that are a part of what is read with them.
    """
    flags = ["--model.name", name, "--model.flavor", "debug", "--training.seq_len", "512"]
    predicted, step = model("1b", 1, "none", *flags)
    dims, M = predicted.memory.dims, 2 * 512
    D, F, E, H, K = dims.dim, dims.ffn_dim, dims.head_width, dims.n_heads, dims.n_kv_heads
    numbers = 2 * of_stream * M * D + sum(rotated) * M * (H + K) * E + sum(gated) * M * F
    if biases:
        numbers += 2 * M * (H + 2 * K) * E + M * ((H + 2 * K) * E + D + F + D)
    numbers = dims.n_layers * numbers + 3 * M * dims.vocab_size
    assert step.elementwise == pytest.approx(2 * numbers / 2950e9 * 1e3, rel=0.08)


def test_casts_to_float8_are_elementwise_work() -> None:
    """Of each layer's input in forward, and of its output's gradient in backward: 2 bytes read and 1 written, and
    those bytes turned. The trace has also what is cast once more by column, and what casts wait for."""
    _, plain = model("8b", 4, "none")
    _, float8 = model("8b", 4, "none", FLOAT8, "rowwise")
    D, F, kv = 4096, 14_336, 1024
    widths = (D + D + D + F) + (D + 2 * kv + D + 2 * F + D)
    assert float8.elementwise - plain.elementwise == pytest.approx(32 * 5 * 16_384 * widths / 2950e9 * 1e3, rel=0.2)


@pytest.mark.parametrize(("reshard", "of_blocks", "of_head"), [("default", 2, 1), ("always", 2, 2), ("never", 1, 1)])
def test_weights_are_cast_and_copied_as_often_as_they_are_gathered(reshard: str, of_blocks: int, of_head: int) -> None:
    """A shard of 4 bytes is read and one of 2 written, the whole is read and written; a gradient goes into 4 bytes."""
    _, step = model("8b", 4, "none", "--parallelism.fsdp_reshard_after_forward", reshard)
    parameters, head = 8_030_261_248, 128_256 * 4096 + 4096
    embedding = 128_256 * 4096  # for forward alone
    gathered = embedding + of_blocks * (parameters - head - embedding) + of_head * head
    moved = gathered * ((4 + 2) / 4 + 2 * 2) + parameters * (2 + 4)
    assert step.weights == pytest.approx(moved / 2950e9 * 1e3)


def test_the_first_gathers_and_the_last_reduction_are_in_the_open() -> None:
    """Of the embedding and a block, and of the embedding's gradient: among shards, then a shard among replicas."""
    block, embedding = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14_336) + 2 * 4096, 128_256 * 4096
    _, four = model("8b", 4, "none")
    assert four.fsdp == pytest.approx(3 / 4 * (2 * block + (2 + 4) * embedding) / 185e9 * 1e3)
    _, replicas = model("8b", 4, "none", "--parallelism.data_parallel_replicate_degree", "2")
    among_two = 1 / 2 * (2 * block + (2 + 4) * embedding) + 2 * 1 / 2 * 4 * embedding / 2
    assert replicas.fsdp == pytest.approx(among_two / 185e9 * 1e3)


def test_micro_steps_repeat_all_but_the_optimizer() -> None:
    _, one = model("8b", 4, "balanced")
    _, three = model("8b", 4, "balanced", "--training.global_batch_size", "24")
    expected = {name: value * (1 if name == "optimizer" else 3) for name, value in one.categories().items()}
    assert three.categories() == pytest.approx(expected)


def test_collectives_that_are_longer_than_compute_are_in_the_open() -> None:
    """So few tokens that weights take longer to gather than to multiply by."""
    _, many = model("8b", 4, "none")
    _, few = model("8b", 4, "none", "--training.seq_len", "512", "--training.local_batch_size", "1")
    assert few.fsdp > 0.5 * few.total
    assert many.fsdp < 0.02 * many.total


def test_more_kept_is_less_computed_again() -> None:
    again = [model("8b", 4, name)[1].recomputation for name in ("full", "attention", "balanced", "matmuls", "none")]
    assert again == sorted(again, reverse=True)
    assert again[-1] == 0.0


@pytest.mark.parametrize(
    ("flags", "where"),
    [
        (["--training.mixed_precision_param", "float32"], "training.mixed_precision_param"),
        (["--compile.enable", "false"], "compile.enable"),
        ([FLOAT8, "blockwise"], "float8.recipe"),
        (["--model.vocab_size", "128004"], "model.vocab_size"),
    ],
)
def test_what_rates_do_not_hold_for(flags: list[str], where: str) -> None:
    run = checked_run(["--config", str(shipped_folder("configs") / "llama3_8b.toml"), *flags], world_size=4)
    problem = no_rates_reason(MemoryModel(run.config, run.dims, run.float8, run.optimizer, 4))
    assert problem is not None
    assert problem.where == where


@pytest.mark.parametrize("ranks", [1, 2])
def test_reductions_of_one_number_have_no_rates(ranks: int, tmp_path) -> None:
    """There are none where no rank has a part alone."""
    (tmp_path / "mine.toml").write_text('extends = "tensorwise"\nreduce_amax = true\n')
    flags = [FLOAT8, str(tmp_path / "mine.toml"), TP, str(ranks)]
    run = checked_run(["--config", str(shipped_folder("configs") / "llama3_8b.toml"), *flags], world_size=4)
    problem = no_rates_reason(MemoryModel(run.config, run.dims, run.float8, run.optimizer, 4))
    assert (problem is None) == (ranks == 1)
    assert problem is None or "reduce_amax" in problem.want


def test_layers_that_float8_leaves_alone_take_their_time_in_bf16() -> None:
    """1,000 tokens are no multiple of 16: the trainer converts nothing then."""
    odd = ["--training.seq_len", "1000", "--training.local_batch_size", "1", "--job.strict", "false"]
    _, plain = model("8b", 4, "none", *odd)
    _, asked = model("8b", 4, "none", *odd, FLOAT8, "rowwise")
    assert asked.matmul == plain.matmul


def test_the_optimizer_moves_its_bytes() -> None:
    """Norm 4, update 28; moments in bfloat16 are two bytes less to read and two to write, of each."""
    parameters = 8_030_261_248 / 4
    _, wide = model("8b", 4, "none")
    assert wide.optimizer == pytest.approx(32 * parameters / 4087e9 * 1e3)
    _, narrow = model("8b", 4, "none", "--optimizer.state_dtype", "bfloat16")
    assert narrow.optimizer == pytest.approx(24 * parameters / 4087e9 * 1e3)
    others = {name: ms for name, ms in wide.categories().items() if name != "optimizer"}
    assert {name: narrow.categories()[name] for name in others} == others


def test_a_head_in_float8_is_gathered_as_bytes_and_multiplied_faster() -> None:
    """A byte less of each of [V, D], but for a scale of each row: of this rank's shard as it is cast, of all as it is
    copied, read and written."""
    before, plain = model("8b", 4, "none", FLOAT8, "rowwise")
    after, converted = model("8b", 4, "none", FLOAT8, "rowwise", "--float8.filter_fqns")
    weight = 128_256 * 4096
    assert before.memory.gathered_head - after.memory.gathered_head == weight
    fewer = weight - 4 * 128_256
    assert plain.weights - converted.weights == pytest.approx((fewer / 4 + 2 * fewer) / 2950e9 * 1e3)
    flops = 2 * 16_384 * weight
    faster = 3 * flops / 680e12 - flops / 1520e12 - 2 * flops / 1207e12  # one product fast, two of them split
    assert plain.matmul - converted.matmul == pytest.approx(1e3 * faster)


def test_keys_that_documents_spare_are_not_exchanged() -> None:
    """Under context parallelism, of the rank that gets or sends most."""
    flags = ["--config", str(shipped_folder("configs") / "llama3_8b_128k.toml"), "--model.n_layers", "4"]
    flags += ["--activation_checkpoint.recipe", "none", "--parallelism.context_parallel_degree", "4"]
    run = checked_run(flags, 4)
    assert run.save_list is not None
    memory = MemoryModel(run.config, run.dims, run.float8, run.optimizer, 4)
    blocks, S = block_costs(memory.run, run.save_list), run.config.training.seq_len

    def of(length: int | None) -> tuple[float, float]:
        attended = length and AttendedShare(S, 1, length, np.full(S // length, length))
        time = StepTimeModel(memory, measured_rates(), attended or None)
        return time.key_exchange(blocks), time.step(blocks).attention

    whole, one, short = of(None), of(S), of(4096)
    assert whole[0] == one[0] > 5 * short[0] > 0  # zeros for all keys, and copies, stay
    assert whole[1] > 10 * short[1]
