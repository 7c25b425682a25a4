"""Steps against torch's AdamW and clipping; weight decay over a run, by every rule; the norm under any mesh."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support.needs import slow
from tests.support.own_rule import lion
from tests.support.ranks import run_ranks
from tests.support.short_run import assemble, batches_of, checked, take_steps, whole_model
from titanlite.config.parameter_groups import update_settings
from titanlite.config.recipe_schema import AdamWGroup, OptimizerRecipe
from titanlite.config.schema import Optimizer, Parallelism
from titanlite.device import CPU
from titanlite.errors import StepError
from titanlite.optimizers.sharded import ShardedOptimizer
from titanlite.parallel.mesh import Mesh, build_mesh
from titanlite.parallel.replicated_gradients import is_replicated
from titanlite.recipes import load
from titanlite.training.schedule import learning_rate
from titanlite.training.step import train_step

EPS = torch.finfo(torch.float32).eps
LR = 1e-2
PEAK, WEIGHT_DECAY = 0.5, 0.25
SHAPES = {"a.weight": (33, 7), "b.weight": (5,), "norm.weight": (16,)}
ZERO, ONE = torch.zeros(()), torch.ones(())
ADAMW = load("optimizer", "adamw")


def normal(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parameters() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(normal(shape, i)) for i, (name, shape) in enumerate(SHAPES.items())}


def gradients(step: int) -> dict[str, Tensor]:
    return {name: normal(shape, 100 * step + i) for i, (name, shape) in enumerate(SHAPES.items())}


def optimizer_of(
    given: dict[str, nn.Parameter], config: Optimizer, recipe: OptimizerRecipe, mesh: Mesh
) -> ShardedOptimizer:
    settings = update_settings(recipe, config, {name: p.shape for name, p in given.items()})
    return ShardedOptimizer(given, config, recipe, settings, mesh, {})


def alone(test: Callable[[Callable[..., ShardedOptimizer]], None], folder: Path) -> None:
    """Run a test body on one rank; it gets a maker of optimizers."""

    def body() -> None:
        mesh = build_mesh(Parallelism(), CPU)
        test(lambda recipe=ADAMW, **options: optimizer_of(parameters(), Optimizer(**options), recipe, mesh))

    run_ranks(body, folder, 1)


def test_groups_equal_those_of_torchs_adamw(tmp_path):
    recipe = OptimizerRecipe(
        "mine",
        {
            "matrices": AdamWGroup("adamw", shape="matrix", lr_factor=0.1, weight_decay=0.5),
            "norms": AdamWGroup("adamw", ("norm.*",), beta1=0.5, beta2=0.7, eps=1e-3),
            "rest": AdamWGroup("adamw"),
        },
    )
    groups = {
        "a.weight": {"lr": 0.1 * LR, "weight_decay": 0.5},
        "norm.weight": {"betas": (0.5, 0.7), "eps": 1e-3, "weight_decay": 0.0},
        "b.weight": {},
    }

    def body(make: Callable[..., ShardedOptimizer]) -> None:
        ours, reference = make(recipe), parameters()
        theirs = torch.optim.AdamW(
            [{"params": [reference[name]], **keys} for name, keys in groups.items()],
            lr=LR,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            fused=True,
        )
        for step in range(1, 11):
            for name, parameter in reference.items():
                parameter.grad = gradients(step)[name]
            theirs.step()
            ours.step(gradients(step), LR, ONE, ZERO)
        for name, parameter in reference.items():  # the same kernel, with rates that differ in their last bit
            bound = 10 * EPS * (parameter.abs() + 2 * LR)
            assert ((ours.parameters[name] - parameter).abs() <= bound).all(), name
        listed = ours.entry().applied["groups"]  # type: ignore[index]
        assert {name: (row["rule"], row["names"], row["elements"]) for name, row in listed.items()} == {
            "matrices": ("adamw", ["a.weight"], 33 * 7),
            "rest": ("adamw", ["b.weight"], 5),
            "norms": ("adamw", ["norm.weight"], 16),
        }

    alone(body, tmp_path)


@pytest.mark.parametrize(("replicas", "tp"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)])
def test_norm_counts_each_entry_once(replicas, tp, tmp_path):
    # Rows that no number of ranks divides; with 4 shards some ranks hold nothing of the last.
    full = {"sharded": normal((12, 8), 0), "norm.weight": normal((10,), 1), "short": normal((2, 4), 2)}
    truth = torch.cat([g.double().flatten() for g in full.values()]).norm()

    def body() -> None:
        degrees = Parallelism(data_parallel_replicate_degree=replicas, tensor_parallel_degree=tp)
        mesh = build_mesh(degrees, CPU)
        over_tp = {"sharded": Shard(1), "norm.weight": Replicate(), "short": Shard(1)}
        laid_out = {
            name: distribute_tensor(tensor, mesh.all, [Replicate(), Shard(0), over_tp[name]])
            for name, tensor in full.items()
        }
        ours = optimizer_of({n: nn.Parameter(t) for n, t in laid_out.items()}, Optimizer(), ADAMW, mesh)
        norm = ours.norm({name: tensor.to_local() for name, tensor in laid_out.items()})
        assert abs(norm.double() - truth) <= 4 * EPS * truth
        ours.step({name: tensor.to_local() for name, tensor in laid_out.items()}, LR, ONE, ZERO)
        everyone = [torch.empty_like(norm) for _ in range(4)]
        dist.all_gather(everyone, norm)
        assert all(torch.equal(norm, other) for other in everyone)

    run_ranks(body, tmp_path, 4)


def test_a_step_without_a_gradient_changes_nothing(tmp_path):
    asked = checked(tmp_path, 2, ["--parallelism.tensor_parallel_degree", "2"])

    def body() -> None:
        run = assemble(asked)
        whole = [p for p in run.parameters if is_replicated(p)]
        before = [p.detach().clone() for p in run.optimizer.locals.values()]
        assert whole
        for parameter in whole:  # as if a backward of the model's own had returned None for all of them
            parameter.requires_grad_(False)
        with pytest.raises(StepError, match=rf"model: {len(whole)} problems\n.*norm\.weight = no gradient"):
            take_steps(run, 1)
        assert all(map(torch.equal, before, run.optimizer.locals.values()))

    run_ranks(body, tmp_path)


@pytest.mark.parametrize("max_norm", [0.5, *slow(0.0, 1e6)])
def test_a_step_is_the_textbook_loop(max_norm, tmp_path):
    flags = ["--training.local_batch_size", "4", "--training.max_norm", str(max_norm), "--optimizer.lr", "3e-4"]
    asked = checked(tmp_path, 1, flags)

    def body() -> None:
        run = assemble(asked)
        model = whole_model(run)
        norms = [p for n, p in model.named_parameters() if "norm" in n]
        others = [p for n, p in model.named_parameters() if "norm" not in n]
        groups = [{"params": others, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
        adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
        clipped = 0
        with closing(batches_of(run)) as batches:
            for step in range(1, 11):
                (batch,) = batches.next()
                lr = learning_rate(step, run.config)
                found = train_step(run, [batch], lr, False)
                loss, norm, skipped = found["loss"], found["grad_norm"], found["skipped"]
                truth = F.cross_entropy(model(batch.tokens), batch.targets)
                truth.backward()
                true_norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm or float("inf"))
                for group in adamw.param_groups:
                    group["lr"] = lr
                adamw.step()
                adamw.zero_grad()
                assert skipped == 0
                assert abs(loss - truth) <= 1e-6 * truth
                # A norm is as exact as gradients are: 1e-5 of the largest entry.
                assert abs(norm - true_norm) <= 1e-5 * true_norm
                clipped += bool(norm > max_norm)
        assert clipped == (0 if max_norm == 1e6 else 10)

    run_ranks(body, tmp_path, 1)


@pytest.mark.parametrize(
    ("recipe", "rules"),
    [
        ("muon", {"adamw", "muon"}),
        *slow(("normuon", {"adamw", "normuon"}), ("dion2", {"adamw", "dion2"}), ("lion", {"adamw", "Lion"})),
    ],
)
def test_weight_decay_follows_the_schedule(recipe: str, rules: set[str], tmp_path: Path) -> None:
    """By every rule: with the rate, half of it at half the peak; and with `"lr"` a quarter."""
    asked = checked(tmp_path, 1, lion(tmp_path) if recipe == "lion" else ["--optimizer.recipe", recipe])

    def shrunk(schedule: str, share: float) -> None:
        own = replace(asked.config.optimizer, lr=PEAK, weight_decay=WEIGHT_DECAY, weight_decay_schedule=schedule)
        run = assemble(replace(asked, config=replace(asked.config, optimizer=own)))
        optimizer = run.optimizer
        assert {own.rule for own in optimizer.settings.values()} == rules
        for lr in (PEAK, PEAK / 2):
            before = {name: p.clone() for name, p in optimizer.locals.items()}
            zeros = {name: torch.zeros_like(p) for name, p in before.items()}
            optimizer.step(zeros, lr, torch.ones(()), torch.zeros(()))
            for name, p in optimizer.locals.items():
                decays = 0.0 if name.endswith("norm.weight") else WEIGHT_DECAY
                factor = 1 - lr * optimizer.settings[name].lr_factor * decays * (1 if lr == PEAK else share)
                assert ((p - factor * before[name]).abs() <= 2 * EPS * p.abs()).all(), (name, lr)
                assert p.any()

    def body() -> None:
        shrunk("constant", 1.0)
        shrunk("lr", 0.5)

    run_ranks(body, tmp_path, 1)
