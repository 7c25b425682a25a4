"""Norms by group in a step that is logged, under every layout, against those of whole tensors; and nothing beside them.

Bounds: norms are sums of squares in float32, in another order; the weights after a step differ in their last place.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.needs import slow
from tests.support.ranks import run_ranks
from tests.support.short_run import assemble, batches_of, checked, whole
from titanlite.optimizers import muon_of_groups
from titanlite.optimizers.group_norms import KINDS
from titanlite.optimizers.muon import MuonRule
from titanlite.training.attention import torch_order
from titanlite.training.build import Run
from titanlite.training.step import train_step

TP_2 = ["--parallelism.tensor_parallel_degree", "2"]
HSDP = ["--parallelism.data_parallel_replicate_degree", "2"]
RECIPE = """
extends = "muon"
help = "With groups of all kinds: split over tensor-parallel ranks, whole on each, and both in one."
[groups.embeddings]
rule = "adamw"
pattern = ["tok_embeddings.*", "norm.weight"]
lr_factor = 0.5
"""


def weights(run: Run) -> dict[str, Tensor]:
    return {name: whole(p).double() for name, p in run.model.named_parameters()}


def norm(tensors: list[Tensor]) -> float:
    return float(torch.stack([t.double().norm() for t in tensors]).norm())


@pytest.fixture
def recipe(tmp_path: Path) -> list[str]:
    (tmp_path / "recipes" / "optimizer").mkdir(parents=True)
    (tmp_path / "recipes" / "optimizer" / "mixed.toml").write_text(RECIPE)
    return ["--optimizer.recipe", "mixed", "--job.recipe_dirs", str(tmp_path / "recipes")]


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (4, [*HSDP, *TP_2]),
        *slow((2, ["--model.name", "qwen3_moe"]), (1, []), (4, TP_2), (4, HSDP)),
    ],
    ids=["replicas 2 × TP 2", "experts, FSDP 2", "one process", "FSDP 2 × TP 2", "HSDP 2 × 2"],
)
def test_they_are_those_of_whole_tensors(world: int, flags: list[str], recipe: list[str], tmp_path: Path) -> None:
    asked = checked(tmp_path, world, [*flags, *recipe])

    def body() -> None:
        muon_of_groups.MuonRule = partial(MuonRule, bucket=1 << 16)  # of several buckets; in the forked ranks alone
        run = assemble(asked)
        groups = {name: own.group for name, own in run.optimizer.settings.items()}
        gradients, update = {}, run.optimizer.step
        rules = {own.rule for own in run.optimizer.settings.values()}
        assert rules == {"adamw", "muon"}

        def record_then_update(*given: Any) -> None:
            gradients.update({name: whole(p.grad) for name, p in run.model.named_parameters() if p.grad is not None})
            update(*given)

        run.optimizer.step = record_then_update  # type: ignore[method-assign]
        with torch_order():
            batches = batches_of(run)
            before = weights(run)
            left_out = of_groups(train_step(run, batches.next(), 1e-3, False, lacks_data=True, logged=True))
            found = of_groups(train_step(run, batches.next(), 1e-3, False, logged=True))
        after = weights(run)
        assert len(found) == len(KINDS) * len(set(groups.values()))
        for group in run.optimizer.groups:
            names = [name for name in before if groups[name] == group]
            change = norm([after[name] - before[name] for name in names]) / norm([before[name] for name in names])
            true = norm([gradients[name] for name in names]), norm([before[name] for name in names]), change
            for kind, expected in zip(KINDS, true, strict=True):
                got = found[f"{kind}.{group}"]
                assert expected > 0
                assert abs(got - expected) <= 1e-5 * expected, (kind, group, got, expected)
            assert left_out[f"weight_norm.{group}"] == found[f"weight_norm.{group}"]
            assert left_out[f"update_ratio.{group}"] == 0
        said = [None] * world
        dist.all_gather_object(said, found)
        assert all(other == found for other in said)

    run_ranks(body, tmp_path, world)


def of_groups(result: dict[str, Tensor]) -> dict[str, float]:
    return {key: number.item() for key, number in result.items() if key.partition(".")[0] in KINDS and "." in key}


class Operations(TorchDispatchMode):
    """Counts what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_bucket_has_one_sum_for_all_rows_of_a_place(tmp_path: Path) -> None:
    """However many parameters they are of: each would be a kernel."""
    asked = checked(tmp_path, 1, ["--optimizer.recipe", "muon"])

    def body() -> None:
        optimizer = assemble(asked).optimizer
        zeros = {name: torch.zeros_like(p) for name, p in optimizer.locals.items()}
        norms = optimizer.group_norms()
        taken, original = [], norms.add_update
        norms.add_update = lambda name, squares: (taken.append(name), original(name, squares))[1]  # type: ignore[method-assign]
        optimizer.step(zeros, 1e-3, torch.ones(()), torch.zeros(()), norms)
        of_muon = [name for name in taken if optimizer.settings[name].rule == "muon"]
        assert len(of_muon) == 1 < sum(own.rule == "muon" for own in optimizer.settings.values())
        with Operations() as operations:
            norms.numbers()
        assert operations.count <= 12, operations.count  # of no group by itself, where no rank has a part of a sum

    run_ranks(body, tmp_path, 1)


def test_a_step_that_is_not_logged_does_nothing_for_them_and_both_have_the_same_bits(tmp_path: Path) -> None:
    asked = checked(tmp_path, 1, ["--training.local_batch_size", "4"])

    def body() -> None:
        results, trained, counts = [], [], []
        for logged in (False, True):
            run = assemble(asked)
            run.optimizer.group_norms = None if not logged else run.optimizer.group_norms  # type: ignore[assignment]
            batches = batches_of(run)
            with torch_order():
                taken = [train_step(run, batches.next(), 1e-3, False, logged=logged) for _ in range(2)]
                results.append([[number for key, number in of.items() if "." not in key] for of in taken])
                with Operations() as operations:
                    train_step(run, batches.next(), 1e-3, False, logged=logged)
            counts.append(operations.count)
            trained.append([*weights(run).values(), *run.optimizer.state_tensors()])
        assert results[0] == results[1]
        assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))
        assert counts[0] < counts[1]

    run_ranks(body, tmp_path, 1)
