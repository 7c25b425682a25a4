"""A step that is recorded without memory calls what a real one does: each collective, where, with its bytes."""

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.measured import MEASURED_CONFIGS
from tests.support.needs import slow
from tests.support.ranks import run_ranks
from tests.support.short_run import DEBUG, assemble, batches_of, checked
from titanlite.commands.planned_run import plan_run
from titanlite.device import CPU
from titanlite.forecast.device_specs import measured_rates
from titanlite.preflight.checked_run import checked_run
from titanlite.recorder.record import record
from titanlite.recorder.recorder import Recorder
from titanlite.sharding.sent_bytes import sent_bytes
from titanlite.training.attention import torch_order
from titanlite.training.step import train_step

TP, ASYNC = ("--parallelism.tensor_parallel_degree", "2"), ("--parallelism.async_tensor_parallel",)
EXPERTS = ("--model.name", "qwen3_moe", "--parallelism.expert_parallel_degree", "2")
CP = ("--parallelism.context_parallel_degree", "2", "--training.seq_len", "512")
HSDP = ("--parallelism.data_parallel_replicate_degree", "2")
BF16 = ("--training.mixed_precision_param", "bfloat16")


def keeping(save_list: str) -> tuple[str, ...]:
    return ("--activation_checkpoint.recipe", save_list)


def in_float8(recipe: str) -> tuple[str, ...]:
    return (*BF16, "--float8.recipe", recipe)


def reshard(when: str) -> tuple[str, ...]:
    return ("--parallelism.fsdp_reshard_after_forward", when)


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (2, ()),
        (2, (*in_float8("tensorwise"), *reshard("always"))),
        (2, (*CP, *keeping("full"))),
        (4, (*EXPERTS, *keeping("full"))),
        (2, ("--model.name", "qwen3_moe", *TP, *keeping("balanced"))),
        *slow(
            (4, (*HSDP, *in_float8("tensorwise"))),
            (4, (*TP, *ASYNC, *in_float8("rowwise"), *keeping("balanced_tight"))),
            (2, (*TP, *in_float8("rowwise"), *keeping("full"))),
            (2, (*reshard("always"), *BF16)),
            (2, in_float8("rowwise")),
            (2, (*HSDP, "--training.global_batch_size", "4")),
            (2, (*TP, *BF16, *keeping("full"))),
            (2, (*TP, *ASYNC, *in_float8("rowwise"), *keeping("full"))),
            (2, (*TP, *ASYNC, *in_float8("tensorwise"), *keeping("matmuls"))),
            (2, ("--model.name", "gemma3", *TP, *reshard("always"), *keeping("full"))),
            (4, (*EXPERTS, *TP, *CP)),
            (4, (*EXPERTS, *TP)),
            (4, ("--model.name", "gemma3", *CP)),
            (4, (*TP, *CP, *keeping("full"))),
            (2, ("--optimizer.recipe", "muon")),
        ),
    ],
    ids=lambda value: " ".join(flag.rpartition(".")[2] for flag in value) if isinstance(value, tuple) else str(value),
)
def test_what_is_recorded_is_what_runs(world: int, flags: Sequence[str], tmp_path: Path) -> None:
    by_nccl = "--parallelism.fsdp_copy_engines=never"  # as on CPUs
    batch = [] if "--training.global_batch_size" in flags else ["--training.global_batch_size", str(world)]
    asked = checked(tmp_path, world, ["--model.n_layers", "2", *batch, by_nccl, *flags])
    recorded = [record(asked, world, rank=rank, all_blocks=True).collectives for rank in range(world)]

    def body() -> None:
        run = assemble(asked)
        running = Recorder(CPU, run.model)
        with closing(batches_of(run)) as batches, torch_order(), running, running.modules:
            train_step(run, batches.next(), 1e-3, False)
        seen = Counter(each for work in running.work for each in work.collectives)
        listed = Counter(recorded[dist.get_rank()])
        wrong = {key: (listed[key], seen[key]) for key in seen | listed if listed[key] != seen[key]}
        assert not wrong, f"(recorded, ran): {wrong}"

    run_ranks(body, tmp_path, world)
    assert sum(recorded[0].values()) > 8


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_bytes_of_a_ring(kind: str) -> None:
    """4 ranks and 16 bytes: 4 of each rank's own, and each step of a ring hands on what one rank has."""
    steps = {"all_gather": 3 * 4, "reduce_scatter": 3 * 4, "all_reduce": 2 * 3 * 4, "all_to_all": 3 * 1}
    assert sent_bytes(kind, 16, 4) == steps[kind]
    assert sent_bytes(kind, 16, 1) == 0


def test_the_time_of_a_step_is_of_the_bytes_that_are_recorded() -> None:
    flags = [*TP, *BF16, *keeping("full"), "--compile.enable", "true"]
    planned = plan_run(checked_run(["--config", str(DEBUG), *flags], world_size=2), str(DEBUG), 2)
    assert planned.predicted is not None
    assert planned.predicted.step is not None
    of_tokens = {
        each: n
        for each, n in planned.collectives.items()
        if each.module and each.direction in ("forward", "backward")  # without FSDP those of the layers are left
    }
    seconds = sum(n * each.sent_bytes for each, n in of_tokens.items()) / measured_rates().tensor_parallel / 1e9
    assert planned.predicted.step.tokens == pytest.approx(1e3 * seconds)


@pytest.mark.parametrize(("model", "weights"), [("1b", 16 * 4), *slow(("8b", 32 * 4 + 1))])
def test_a_head_that_is_the_embedding_too_has_no_scale_of_the_whole(model: str, weights: int) -> None:
    """It is gathered as the embedding needs it."""
    config = str(MEASURED_CONFIGS / f"llama3_{model}.toml")
    flags = [*in_float8("tensorwise"), "--float8.filter_fqns"]
    planned = plan_run(checked_run(["--config", config, *flags], world_size=4), config, 4)
    reduced = [each.n_bytes for each in planned.collectives if each.kind == "all_reduce"]
    assert 4 * weights in reduced


def test_gradients_travel_by_copy_engines_as_autograd_made_them(tmp_path: Path) -> None:
    """Sums that replicas add are float32."""
    found: list[dict[tuple[str, str], int]] = []
    for on in ("never", "always"):
        run = checked(tmp_path, 4, [*BF16, *HSDP, f"--parallelism.fsdp_copy_engines={on}"])
        step = record(run, 4, "h100").collectives
        found.append({(each.kind, each.module): each.n_bytes for each in step if each.kind.startswith("reduce")})
    by_nccl, pushed = found
    assert pushed.keys() == by_nccl.keys()
    for (kind, module), n_bytes in by_nccl.items():
        assert pushed[kind, module] == n_bytes // (2 if kind == "reduce_scatter" else 1)
