"""The predicted peak against measured runs, that of the head against a CPU, and what they must obey on any layout."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.held_for_backward import Peak, stream
from tests.support.measured import arguments, measured_runs
from titanlite import recipes
from titanlite.config.recipe_schema import ModelDims, SaveList, SaveRule
from titanlite.config.schema import Compile, Config, Float8, Training
from titanlite.config.toml_file import shipped_folder
from titanlite.device import CPU
from titanlite.float8.cast import cast
from titanlite.float8.convert import apply_float8
from titanlite.float8.weight import GatheredWeight, WeightShard
from titanlite.forecast.activation_cost import block_costs
from titanlite.forecast.memory import (
    GIB,
    HOLES,
    HOLES_AT_THE_END,
    HOLES_OF_SHARDS,
    MARGIN,
    SLACK,
    Memory,
    MemoryModel,
)
from titanlite.kernels import cross_entropy
from titanlite.kernels.cross_entropy import CrossEntropy
from titanlite.models.find import model_class
from titanlite.models.llama3 import Llama3
from titanlite.preflight.checked_run import CheckedRun, checked_run
from titanlite.sharding.layers import plan_layers

COPIES = "--parallelism.fsdp_copy_engines=always"
TP, REPLICAS = "--parallelism.tensor_parallel_degree", "--parallelism.data_parallel_replicate_degree"


def checked(model: str, world: int, name: str, *flags: str) -> CheckedRun:
    config = str(shipped_folder("configs") / f"llama3_{model}.toml")
    batch = ["--training.seq_len", "8192", "--training.local_batch_size", "2"]
    by_nccl = () if COPIES in flags else ("--parallelism.fsdp_copy_engines=never",)
    asked = ["--config", config, *batch, "--activation_checkpoint.recipe", name, *by_nccl, *flags]
    return checked_run(asked, world_size=world)


def peak_of(run: CheckedRun, world: int, follow: bool | None = None) -> Memory:
    assert run.save_list is not None
    memory = MemoryModel(run.config, run.dims, run.float8, run.optimizer, world)
    if follow is not None:
        memory.gradients_follow = follow
    return memory.peak(block_costs(memory.run, run.save_list))


def peak(model: str, world: int, name: str, *flags: str, follow: bool | None = None) -> Memory:
    return peak_of(checked(model, world, name, *flags), world, follow)


@pytest.mark.parametrize("row", measured_runs("memory"))
def test_measured_runs(row: dict[str, Any]) -> None:
    run = checked_run(arguments(row), world_size=row["world"])
    assert peak_of(run, row["world"]).total / GIB == pytest.approx(row["reserved_gib"], rel=0.015)


@pytest.mark.parametrize("row", measured_runs("memory_full"))
def test_measured_runs_that_keep_nothing(row: dict[str, Any]) -> None:
    """None needs more than is predicted and a budget leaves free; bf16 runs of the whole model are within 2 %."""
    run = checked_run(arguments(row), world_size=row["world"])
    off = peak_of(run, row["world"]).total / GIB / row["reserved_gib"] - 1
    config = run.config
    is_usual = config.float8.recipe == "none" and run.dims.n_layers == 32 and config.training.local_batch_size == 2
    assert -MARGIN < off < (0.02 if is_usual else 0.045)


@pytest.mark.parametrize("row", measured_runs("memory_before"))
def test_measured_runs_before(row: dict[str, Any]) -> None:
    """All are within 1.4 %, with the two float32 tensors that the last norm kept in the place of its input, and with
    gradients that lay apart where there are others to reduce with."""
    run = checked_run(arguments(row), world_size=row["world"])
    memory = peak_of(run, row["world"], follow=row["world"] == 1)
    tokens = 2 * 8192 // run.config.parallelism.tensor_parallel_degree
    kept = (2 * 4 - 2) * tokens * run.dims.dim if memory.logits else 0
    assert (memory.total + kept) / GIB == pytest.approx(row["reserved_gib"], rel=0.015)


def test_a_mixture_of_experts_holds_no_rows_that_forward_dispatched() -> None:
    """Four layers of Qwen3 30B-A3B on one H200, compiled, without a list: 51,548 MiB were allocated at the peak, and
    9,871 of them activations; 53,848 were reserved, of which holes took 2,300."""
    asked = {
        "model.name": "qwen3_moe",
        "model.flavor": "30B-A3B",
        "model.n_layers": "4",
        "training.seq_len": "4096",
        "training.local_batch_size": "4",
        "training.global_batch_size": "4",
        "training.mixed_precision_param": "bfloat16",
        "activation_checkpoint.recipe": "none",
        "compile.enable": "true",
    }
    given = [word for key, value in asked.items() for word in (f"--{key}", value)]
    run = checked_run(["--config", str(shipped_folder("configs") / "debug.toml"), *given], world_size=1)
    assert peak_of(run, 1).total / 2**20 == pytest.approx(51548, rel=0.01)


def test_a_rank_alone_has_its_gradients_when_activations_are_gone() -> None:
    """Of 3B: with `full` the worst moment is in one of the first blocks, with `none` in the head."""
    block = 4 * (3072 * (3072 + 2 * 1024 + 3072 + 3 * 8192) + 2 * 3072)
    full, none = peak("3b", 1, "full"), peak("3b", 1, "none")
    assert full.gradients in [n * block for n in range(20, 28)]
    assert full.slack - none.slack == pytest.approx(HOLES * full.gradients, rel=1e-6)
    assert none.gradients == 0
    assert none.activations > 0
    assert full.logits == 0


FEW_TOKENS = ("--training.local_batch_size", "1", "--training.seq_len")
APART = ("--training.global_batch_size", "64")  # in many micro-steps: gradients are always there


def test_a_rank_alone_may_peak_when_an_end_hands_its_gradient_over() -> None:
    """Of eight layers: with `full` the embedding, when there are all, and with `none` the head, when there is one."""
    D, V = 4096, 128_256
    embedding = peak("8b", 1, "full", "--model.n_layers", "8", *FEW_TOKENS, "4096")
    assert embedding.gradients == embedding.parameters
    assert (embedding.activations, embedding.logits, embedding.working_set) == (0, 0, 2 * V * D)
    assert embedding.gathered_weights == 2 * V * D
    head = peak("8b", 1, "none", "--model.n_layers", "8", *FEW_TOKENS, "6144")
    assert head.gradients == 4 * (V + 1) * D
    assert (head.activations > 0, head.logits, head.working_set) == (True, 0, 2 * (V + 1 + 6144) * D)
    assert head.gathered_weights == head.parameters // 2


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (1, ("--training.global_batch_size", "16")),
        (2, ("--training.global_batch_size", "16")),
        (2, ("--training.mixed_precision_reduce", "bfloat16")),
    ],
    ids=["accumulation", "of two ranks", "widened"],
)
def test_gradients_that_are_added_to_others_or_widened_are_always_there(world: int, flags: tuple[str, ...]) -> None:
    for name in ("none", "full"):
        memory = peak("1b", world, name, *flags)
        assert memory.gradients == memory.parameters


@pytest.mark.parametrize(("world", "replicas"), [(2, "1"), (4, "1"), (8, "1"), (4, "2"), (8, "2")])
def test_gradients_take_what_activations_leave(world: int, replicas: str) -> None:
    flags = REPLICAS, replicas
    for name in ("none", "balanced"):
        apart, among = (peak("8b", world, name, *flags, follow=follow) for follow in (False, None))
        assert apart.gradients == apart.parameters
        assert apart.total - among.total == apart.gradients
    full = peak("8b", world, "full", *flags)
    assert 0 < full.gradients <= full.parameters


def test_many_ranks_may_peak_when_what_is_reduced_of_an_end_is_there() -> None:
    """Whole and in float32, beside its gradient as it came: with `full` the embedding's, after all gradients of blocks,
    and with `none` the head's. An embedding that is the head, too, is the last of all."""
    D, V = 4096, 128_256
    block = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14_336) + 2 * 4096
    on_their_way = 2 * block + 2 * (V * D + D) * 3 // 2  # what FSDP gathers: a block, the head, and a shard of that
    embedding = peak("8b", 2, "full", "--model.n_layers", "8", *FEW_TOKENS, "4096")
    assert embedding.communication == 4 * V * D + on_their_way
    assert embedding.gradients == embedding.parameters
    assert (embedding.gathered_weights, embedding.working_set) == (0, 2 * V * D)
    holes = HOLES_OF_SHARDS * 4 * 8 * block // 2 + HOLES_AT_THE_END * 4 * V * D
    assert embedding.slack - SLACK == pytest.approx(holes, abs=2)
    head = peak("8b", 2, "none", "--model.n_layers", "8", *FEW_TOKENS, "6144")
    assert head.communication == 4 * (V + 1) * D + on_their_way
    assert head.gradients == 4 * (V + 1) * D // 2
    assert (head.gathered_weights, head.working_set) == (2 * (V + 1) * D, 2 * (V + 1 + 6144) * D)
    tied = peak("1b", 2, "full", *FEW_TOKENS, "4096")
    assert tied.communication == (4 + 2 * 3 // 2) * (V + 1) * 2048  # no block and shard are as much as a shard of it
    assert tied.gradients == tied.parameters


def test_replicas_that_are_whole_copy_what_they_reduce() -> None:
    """FSDP does, in float32; the worst moment is in the last block, when the head's is there, too."""
    memory, head = peak("8b", 2, "balanced", REPLICAS, "2"), 4 * (128_256 * 4096 + 4096)
    assert memory.gradients == head
    assert memory.communication == 2 * head


def test_a_rank_alone_reduces_nothing() -> None:
    """So neither what it adds up nor the dtype in which others would be sent them needs memory of its own."""
    batch = ["--training.global_batch_size", "16"]
    added = peak("1b", 1, "none", *batch)
    assert added.total - peak("1b", 1, "none").total == added.gradients
    assert peak("1b", 1, "none", *batch, "--training.mixed_precision_reduce", "bfloat16") == added


def test_categories_add_up() -> None:
    memory = peak("8b", 4, "balanced")
    assert sum(memory.categories().values()) == memory.total
    shard = 8_030_261_248 // 4
    assert (memory.parameters, memory.gradients, memory.optimizer) == (4 * shard, 0, 8 * shard)
    assert memory.activations == 32 * (130 + 1088 + 128) * 2**20


@pytest.mark.parametrize("name", ["llama3", "qwen3", "gemma3", "gpt2"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_parameters_are_those_of_the_model(name: str, ranks: int) -> None:
    """On one of so many ranks, each of which has its part of what the sharding plan splits."""
    flags = ["--model.name", name, "--model.flavor", "debug", TP, str(ranks), "--training.seq_len", "64"]
    run = checked("8b", ranks, "full", *flags)
    with torch.device("meta"):
        model = model_class(run.config.model)(run.dims, 64)
        plans = plan_layers(model, 128, ranks).layers if ranks > 1 else {}
    count = 0
    for full_name, parameter in model.named_parameters():
        module, _, own_name = full_name.rpartition(".")
        is_split = ranks > 1 and plans[module].placements[own_name].is_shard()
        count += parameter.numel() // (ranks if is_split else 1)
    assert MemoryModel(run.config, run.dims, run.float8, run.optimizer, ranks).parameters == count


def test_eight_gpus_hold_less_of_the_model_and_as_much_of_the_rest() -> None:
    """docs/performance.md counts 11.2 GiB, and FSDP's buffers are smaller."""
    four, eight = peak("8b", 4, "balanced"), peak("8b", 8, "balanced")
    assert (four.total - eight.total) / GIB == pytest.approx(11.3, abs=0.2)
    assert four.activations == eight.activations


@pytest.mark.parametrize(
    ("flags", "more"),
    [
        # All gradients, and of the head a shard more.
        (["--training.global_batch_size", "16"], 4 * (8_030_261_248 + 128_256 * 4096 + 4096) // 4),
        (["--optimizer.state_dtype", "bfloat16"], -4 * 8_030_261_248 // 4),
        ([REPLICAS, "2"], 12 * 8_030_261_248 // 4),
    ],
    ids=["accumulation", "moments in bfloat16", "replicas"],
)
def test_what_a_key_changes(flags: list[str], more: int) -> None:
    """To a thousandth of all, which is less than any of them: FSDP's buffers change a little with the shards."""
    before, after = (peak("8b", 4, "balanced", *given).total for given in ([], flags))
    assert after - before == pytest.approx(more, abs=0.004 * before)
    assert abs(more) > 0.004 * before


def test_weights_that_are_not_freed_are_held() -> None:
    always, never = (
        peak("8b", 4, "balanced", "--parallelism.fsdp_reshard_after_forward", which) for which in ("always", "never")
    )
    assert never.gathered_weights - always.gathered_weights == 2 * (8_030_261_248 - 128_256 * 4096 - 4096)


def test_copy_engines_are_those_of_a_host() -> None:
    """Of eight GPUs, over which tensor parallelism goes first: 405B of TP 8 has a shard on each of eight hosts."""
    for world, tensor, expected in ((2, "1", True), (8, "1", True), (16, "1", False), (8, "4", True), (16, "8", False)):
        run = checked("8b", world, "none", TP, tensor, "--parallelism.fsdp_copy_engines=default")
        model = MemoryModel(run.config, run.dims, run.float8, run.optimizer, world)
        assert model.copy_engines == expected
        assert (model.symmetric_memory > 0) == expected
    pushed = peak("8b", 4, "none", COPIES)
    assert peak("8b", 4, "none").total - pushed.total == pytest.approx(218_112_000 * 2, rel=0.01)  # a block's place


def test_a_short_sequence_peaks_in_a_block_and_a_long_one_in_the_head() -> None:
    """What the head holds grows with the tokens; gathered weights and what is reduced do not."""
    few = peak("8b", 4, "full", *APART, "--training.local_batch_size", "1")
    many = peak("8b", 4, "full", *APART, "--training.local_batch_size", "4")
    assert few.gathered_weights == 2 * (4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336) + 2 * 4096)
    assert many.gathered_weights == 2 * (128_256 * 4096 + 4096)


@pytest.mark.parametrize("recipe", ["none", "rowwise"])
def test_a_block_computes_its_forward_again_and_has_gradients(recipe: str) -> None:
    """Of few tokens the worst is its end, when there are the gradients of all its weights, and a few of the stream's
    width: what is given and returned, and what leads to the last of them."""
    M, D = 512, 4096
    short = [*FEW_TOKENS, str(M), "--model.vocab_size", "8192", "--data.tokenizer", "bytes", "--float8.recipe", recipe]
    full, whole = (peak("8b", 4, name, *APART, *short) for name in ("full", "none"))
    assert full.activations == 31 * 2 * M * D  # of the last block but one, while what is reduced of the last is there
    again = (whole.activations - full.activations) // 31
    weights = 2 * (4096 * (4096 + 2 * 1024 + 4096 + 3 * 14_336) + 2 * 4096)
    assert 2 * 2 * M * D <= full.working_set - again - weights <= 14 * 2 * M * D
    assert (full.logits, whole.logits) == (0, 0)


def test_two_units_and_a_shard_are_on_their_way() -> None:
    """What is gathered while the one before is copied out: a head behind a block, or a block behind an embedding that
    is the head, too."""
    block = 2 * (4096 * (4096 + 2 * 1024 + 4096 + 3 * 14_336) + 2 * 4096)
    head = 2 * (128_256 * 4096 + 4096)
    assert peak("8b", 4, "balanced").communication == block + head + head // 4
    block = 2 * (2048 * (2048 + 2 * 512 + 2048 + 3 * 8192) + 2 * 2048)
    embedding = 2 * (128_256 * 2048 + 2048)
    assert peak("1b", 4, "balanced").communication == embedding + block + block // 4
    assert peak("1b", 1, "balanced").communication == 0
    # And gradients: of the largest unit, the one that is reduced and the one that it is added to.
    more = ["--training.global_batch_size", "16"]
    assert peak("1b", 4, "balanced", *more).communication == embedding + block + block // 4 + 4 * embedding // 2 // 4
    in_bfloat16 = [*more, "--training.mixed_precision_reduce", "bfloat16"]
    reduced = (4 + 2) * embedding // 2 // 4
    assert peak("1b", 4, "balanced", *in_bfloat16).communication == embedding + block + block // 4 + reduced


def test_more_kept_is_more_held() -> None:
    ordered = [peak("8b", 4, name) for name in ("full", "attention", "balanced_tight", "balanced", "matmuls", "none")]
    assert all(one.total < other.total for one, other in pairwise(ordered))


def test_whole_blocks_are_priced_as_a_list_that_saves_everything() -> None:
    run = checked("8b", 4, "none")
    memory = MemoryModel(run.config, run.dims, run.float8, run.optimizer, 4)
    whole = SaveList("", "recompute", (SaveRule("block", "save"),))
    everything = recipes.load("activation_checkpoint", "none")
    assert block_costs(memory.run, whole) == block_costs(memory.run, everything)


@pytest.mark.parametrize(
    ("recipe", "tied", "tokens", "compiled"),
    [
        *((recipe, False, 256, compiled) for recipe in ("none", "rowwise", "tensorwise") for compiled in (True, False)),
        ("none", False, 1024, False),
        *((recipe, tied, 16, True) for recipe in ("none", "rowwise", "tensorwise") for tied in (False, True)),
        *(("blockwise", tied, tokens, True) for tied, tokens in ((False, 256), (False, 128), (True, 128))),
    ],
)
def test_the_head_holds_what_is_predicted(recipe: str, tied: bool, tokens: int, compiled: bool, monkeypatch) -> None:
    """Of many tokens the worst is a cast of the logits' gradient, or an eager loss; of few what has the weight's size.

    Not predicted are vectors: of the vocabulary at most an id and a scale, 12 bytes, and of tokens a dozen of float32.
    The gradient of the norm's weight comes after the worst.
    """
    dims = ModelDims("", 1, 128, 4, 2, 128, vocab_size=1024, rope_theta=1e4, norm_eps=1e-5, tied_embeddings=tied)
    D, V, float8 = dims.dim, dims.vocab_size, None if recipe == "none" else recipes.load("float8", recipe)
    with torch.device("meta"):
        model = Llama3(dims, tokens)
    if float8:
        apply_float8(model, float8, (), CPU, tokens, shards=1)
    weight = inner = torch.randn(V, D).bfloat16()
    if float8 and isinstance(model.output.weight.data, WeightShard):
        inner, unit = cast(weight, float8.weight.output, float8.weight.dtype, float8.scale_rounding)
        weight = GatheredWeight(inner, unit, torch.bfloat16)
    model.output.weight, model.norm.weight = nn.Parameter(weight), nn.Parameter(torch.ones(D).bfloat16())
    apart = [inner, model.norm.weight, *([weight.scale_inv] if isinstance(weight, GatheredWeight) else [])]
    loss, targets = CrossEntropy(), torch.arange(tokens)
    if compiled:  # a compiled pass makes nothing of the logits' size, nor does this
        monkeypatch.setattr(cross_entropy, "ROWS", 1)
    with Peak(apart) as found:
        x = stream(tokens, D, torch.bfloat16)
        loss(model.output(model.norm(x)), targets).backward()

    training = Training(seq_len=tokens, local_batch_size=1, global_batch_size=2)  # so that gradients are there always
    config = Config(training=training, float8=Float8(recipe, filter_fqns=()), compile=Compile(compiled))
    predicted = MemoryModel(config, dims, float8, recipes.load("optimizer", "adamw"), world=1).peak([])
    embedding = 0 if tied else 2 * V * D  # of one shard, so that it stays
    assert predicted.gathered_weights == embedding + inner.nbytes + 2 * D
    vectors = 12 * V + 12 * 4 * tokens
    assert vectors < tokens * D or tokens < 256  # the least of what is predicted, of many tokens
    # A cast of the weight may be the worst, before there are logits; of many tokens it is not.
    assert predicted.logits == 2 * tokens * V or (predicted.logits == 0 and tokens < 256)
    assert -2 * D <= found.bytes - predicted.logits - predicted.working_set <= vectors
