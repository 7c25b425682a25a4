"""The list of collectives, held against those of a real step: each with its ranks and the bytes of what it moves."""

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.needs import slow
from tests.support.ranks import run_ranks
from tests.support.short_run import DEBUG, assemble, batches_of, checked
from titanlite.commands.planned_run import plan_run
from titanlite.config.toml_file import shipped_folder
from titanlite.forecast.comm_volume import Traffic, of_update, of_weights
from titanlite.forecast.device_specs import measured_rates
from titanlite.forecast.memory import MemoryModel
from titanlite.kernels import collectives, context_attention
from titanlite.preflight.checked_run import CheckedRun, checked_run
from titanlite.sharding.sent_bytes import sent_bytes
from titanlite.training.attention import torch_order
from titanlite.training.step import train_step

Seen = Counter[tuple[str, int, int]]  # (kind, ranks, bytes of the whole) → how often


class Collectives(TorchDispatchMode):
    """Counts what runs under it: functional collectives, those inside of titanlite's operators, FSDP's and others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.seen, self._inside = Seen(), False
        self._gathered = 0  # inside an operator: bytes and their scales, two here, are one collective there
        self._exchanged = 0  # likewise; on GPUs a row travels for each slot, here one from each rank
        real = collectives._ops

        class Inside:
            """In the place of the functional collectives: a mode does not see what an operator calls."""

            def __getattr__(_, name):  # noqa: N805
                def call(x, *args):
                    if self._inside and name != "wait_tensor":
                        self._functional(name, x, args[-1])
                    return getattr(real, name)(x, *args)

                return call

        monkeypatch.setattr(collectives, "_ops", Inside())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if func.namespace == "_c10d_functional" and name != "wait_tensor":
            self._functional(name, args[0], args[-1])
        elif func.namespace == "c10d":
            kind, at, whole = {
                "_allgather_base_": ("all_gather", 2, args[0]),
                "_reduce_scatter_base_": ("reduce_scatter", 2, args[1]),
                "allreduce_": ("all_reduce", 1, args[0][0]),
            }[name]
            self._add(kind, dist.ProcessGroup.unbox(args[at]).size(), whole.nbytes)
        self._inside = func.namespace == "titanlite"
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._inside = False
            if self._gathered:
                self._add("all_gather", 2, self._gathered)
                self._gathered = 0
            if self._exchanged:
                self._add("all_to_all", 2, self._exchanged)
                self._exchanged = 0

    def _functional(self, name: str, x: torch.Tensor, group: str) -> None:
        ranks = dist.distributed_c10d._resolve_process_group(group).size()
        kinds = {"reduce_scatter_tensor": "reduce_scatter"}
        if name == "all_to_all_single":
            self._exchanged += x.nbytes
        elif name != "all_gather_into_tensor":
            self._add(kinds.get(name, name), ranks, x.nbytes)
        elif self._inside:
            self._gathered += x.nbytes * ranks
        else:
            self._add("all_gather", ranks, x.nbytes * ranks)

    def _add(self, kind: str, ranks: int, size: int) -> None:
        if ranks > 1:
            self.seen[kind, ranks, size] += 1


TP, ASYNC = ("--parallelism.tensor_parallel_degree", "2"), ("--parallelism.async_tensor_parallel",)
EXPERTS = ("--model.name", "qwen3_moe", "--parallelism.expert_parallel_degree", "2")
# Two sequences on two ranks, each of which has one: what they send each other is in `test_keys_travel_as_listed`.
CP = ("--parallelism.context_parallel_degree", "2", "--training.seq_len", "128", "--training.local_batch_size", "2")
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
        *slow((4, (*HSDP, *in_float8("tensorwise")))),
        *slow(
            (4, (*TP, *ASYNC, *in_float8("rowwise"), *keeping("balanced_tight"))),
            (2, (*TP, *in_float8("rowwise"), *keeping("full"))),
            (2, (*reshard("always"), *BF16)),
            (2, in_float8("rowwise")),
            (2, (*HSDP, "--training.global_batch_size", "4")),
            (2, (*TP, *BF16, *keeping("full"))),
            (2, (*TP, *ASYNC, *in_float8("rowwise"), *keeping("full"))),
            (2, (*TP, *ASYNC, *in_float8("tensorwise"), *keeping("matmuls"))),
        ),
        *slow((2, ("--model.name", "gemma3", *TP, *reshard("always"), *keeping("full")))),
        (4, (*EXPERTS, *keeping("full"))),
        *slow((4, (*EXPERTS, *TP, *CP)), (4, (*EXPERTS, *TP)), (2, (*EXPERTS, *TP, *keeping("full")))),
        (2, ("--model.name", "qwen3_moe", *TP, *keeping("balanced"))),
    ],
    ids=lambda value: " ".join(flag.rpartition(".")[2] for flag in value) if isinstance(value, tuple) else str(value),
)
def test_the_list_is_what_runs(
    world: int, flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_nccl = "--parallelism.fsdp_copy_engines=never"  # as on CPUs
    given = ["--model.n_layers", "2", "--training.global_batch_size", str(world), by_nccl, *flags]
    listed = assert_runs_as_listed(checked(tmp_path, world, given), world, tmp_path, monkeypatch)
    counts = {t.direction for t in listed if t.moves == "tokens of each expert"}
    assert counts == ({"forward"} if "qwen3_moe" in flags and TP[0] in flags else set())  # kept, whatever the list


def test_what_a_bias_that_balances_experts_adds_up_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a step, of both layers, whatever the micro-steps."""
    (tmp_path / "recipes" / "model").mkdir(parents=True)
    recipe = 'extends = "qwen3_moe-debug"\n[experts]\nscore = "sigmoid"\nbalance_loss = 0.0\nbalance_bias = 0.01\n'
    (tmp_path / "recipes" / "model" / "qwen3_moe-biased.toml").write_text(recipe)
    own = ["--model.name=qwen3_moe", "--model.flavor=biased", f"--job.recipe_dirs={tmp_path / 'recipes'}"]
    given = [*own, "--parallelism.fsdp_copy_engines=never", "--training.global_batch_size=4"]
    asked = checked(tmp_path, 2, given)
    listed = assert_runs_as_listed(asked, 2, tmp_path, monkeypatch)
    of_bias = [t for t in listed if t.moves == "tokens of each expert that a bias balances"]
    assert [(t.shape, t.whole_bytes, t.times) for t in of_bias] == [((2 * 8,), 8 * 2 * 8, 1)]


def test_losses_by_source_are_listed() -> None:
    """Sums of losses and numbers of targets in float64; none of a single source."""
    by_source = {t.moves: t.whole_bytes for t in of_update(0, 1, 2, sources=3)}
    assert by_source["loss and targets of each source"] == 2 * 3 * 8
    assert "loss and targets of each source" not in {t.moves for t in of_update(0, 1, 2)}


@pytest.mark.parametrize(
    ("world", "flags"),
    [(2, keeping("full")), *slow((4, ("--model.name", "gemma3")), (4, (*TP, *keeping("full"))))],
    ids=lambda value: str(len(value)) if isinstance(value, tuple) else str(value),
)
def test_keys_travel_as_listed(world: int, flags: tuple[str, ...], tmp_path: Path) -> None:
    """Ranks send as many bytes in the mean: one needs keys of all others, another few."""
    ranks = world // (2 if TP[0] in flags else 1)
    given = [f"--parallelism.context_parallel_degree={ranks}", "--training.seq_len=512", *flags]
    asked = checked(tmp_path, world, [*given, "--training.global_batch_size=2"])
    listed = [t for t in plan_run(asked, str(DEBUG), world).traffic if t.kind == "all_to_all"]
    assert {t.direction for t in listed} >= {"forward", "backward"}
    assert ("recomputation" in {t.direction for t in listed}) == ("full" in flags)

    def body() -> None:
        run, sent, exchange = assemble(asked), torch.zeros((), dtype=torch.int64), context_attention._swap_chunks

        def counted(rows: torch.Tensor, *others: Any) -> torch.Tensor:
            sent.add_(rows.nbytes)
            return exchange(rows, *others)

        context_attention._swap_chunks = counted
        with closing(batches_of(run)) as batches, torch_order():
            train_step(run, batches.next(), 1e-3, False)
        dist.all_reduce(sent)
        assert sent.item() == pytest.approx(world * sum(t.times * t.sent_bytes for t in listed), rel=1e-3)

    run_ranks(body, tmp_path, world)


def assert_runs_as_listed(
    asked: CheckedRun, world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Sequence[Traffic]:
    """Take a step, and compare its collectives with those of the plan, which are returned."""
    listed = plan_run(asked, str(DEBUG), world).traffic
    expected = Seen()
    for t in listed:
        expected[t.kind, t.ranks, t.whole_bytes] += t.times

    def body() -> None:
        run = assemble(asked)
        batches = batches_of(run)
        with torch_order(), Collectives(monkeypatch) as running:
            train_step(run, batches.next(), 1e-3, False)
        batches.close()
        both = running.seen.keys() | expected.keys()
        wrong = {key: (expected[key], running.seen[key]) for key in sorted(both) if expected[key] != running.seen[key]}
        assert not wrong, f"(listed, ran): {wrong}"

    run_ranks(body, tmp_path, world)
    return listed


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_bytes_of_a_ring(kind: str) -> None:
    """4 ranks and 16 bytes: 4 of each rank's own, and each step of a ring hands on what one rank has."""
    steps = {"all_gather": 3 * 4, "reduce_scatter": 3 * 4, "all_reduce": 2 * 3 * 4, "all_to_all": 3 * 1}
    assert sent_bytes(kind, 16, 4) == steps[kind]
    assert sent_bytes(kind, 16, 1) == 0


def test_the_time_of_a_step_is_of_the_bytes_that_are_listed() -> None:
    flags = [*TP, *BF16, *keeping("full"), "--compile.enable", "true"]
    planned = plan_run(checked_run(["--config", str(DEBUG), *flags], world_size=4), str(DEBUG), 4)
    assert planned.predicted is not None
    assert planned.predicted.step is not None
    of_tokens = [t for t in planned.traffic if "→" in t.moves and t.direction != "recomputation"]
    seconds = sum(t.times * t.sent_bytes for t in of_tokens) / measured_rates().tensor_parallel / 1e9
    assert planned.predicted.step.tokens == pytest.approx(1e3 * seconds)


@pytest.mark.parametrize(("model", "weights"), [("1b", 16 * 4), ("8b", 32 * 4 + 1)])
def test_a_head_that_is_the_embedding_too_has_no_scale_of_the_whole(model: str, weights: int) -> None:
    """It is gathered as the embedding needs it."""
    config = str(shipped_folder("configs") / f"llama3_{model}.toml")
    flags = [*in_float8("tensorwise"), "--float8.filter_fqns"]
    planned = plan_run(checked_run(["--config", config, *flags], world_size=4), config, 4)
    assert [(t.shape, t.whole_bytes) for t in planned.traffic if t.moves == "maxima of weights"] == [
        ((weights,), 4 * weights)
    ]


def test_gradients_of_blocks_travel_by_copy_engines_as_autograd_made_them(tmp_path: Path) -> None:
    """Those of the ends by NCCL in float32, as the sums that replicas add."""
    bytes_of: list[dict[tuple[str, str], int]] = []
    for on in ("never", "always"):
        run = checked(tmp_path, 4, [*BF16, *HSDP, f"--parallelism.fsdp_copy_engines={on}"])
        found = of_weights(MemoryModel(run.config, run.dims, run.float8, run.optimizer, 4))
        bytes_of.append({(t.kind, t.module): t.whole_bytes for t in found if t.moves == "sum of gradients"})
    by_nccl, pushed = bytes_of
    for (kind, module), n_bytes in by_nccl.items():
        halves = kind == "reduce_scatter" and module.startswith("layers.")
        assert pushed[kind, module] == (n_bytes // 2 if halves else n_bytes)
