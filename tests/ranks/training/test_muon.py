"""Muon, NorMuon and Dion2 in every layout against plain ones on whole matrices; Muon against torch's; the receipt."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from tests.support.needs import slow
from tests.support.ranks import run_ranks
from tests.support.short_run import whole
from titanlite.config.parameter_groups import update_settings
from titanlite.config.recipe_schema import MuonGroup, OptimizerRecipe
from titanlite.config.schema import Optimizer, Parallelism
from titanlite.device import CPU
from titanlite.kernels.orthogonalise import ITERATIONS, Polynomials, orthogonalise_flops
from titanlite.models.experts import GroupedProjection
from titanlite.models.layers import Linear
from titanlite.models.matrices import Matrix, matrices_of
from titanlite.optimizers import muon as module
from titanlite.optimizers.dion2 import Dion2
from titanlite.optimizers.muon import Muon, MuonRule, Pace
from titanlite.optimizers.normuon import NorMuon
from titanlite.optimizers.sharded import ShardedOptimizer
from titanlite.parallel.initialise import local_slice
from titanlite.parallel.mesh import Mesh, build_mesh

LR, MOMENTUM, DECAY, STEPS = 0.02, 0.9, 0.1, 3
EXACT = MuonRule(momentum=MOMENTUM, dtype=torch.float64, state_dtype=torch.float64, bucket=4000)
PACES = {f"{name}.weight": Pace(1.0, DECAY) for name in ("wqkv", "w13", "w2", "short", "experts.w13", "experts.w2")}
PACES["wo.weight"] = Pace(0.5, 0.3)
ZERO, ONE = torch.zeros(()), torch.ones(())
TWO = torch.full((), 2.0)


class Layers(nn.Module):
    """Rows that no number of ranks divides, shards that are empty, matrices that are wide and tall."""

    def __init__(self) -> None:
        super().__init__()
        self.wqkv = Linear(24, {"wq": 8, "wk": 4, "wv": 4}, groups=6, std=1)
        self.wo = Linear(48, {"wo": 24}, std=1)
        self.w13 = Linear(24, {"w1": 3, "w3": 3}, groups=11, std=1)
        self.w2 = Linear(34, {"w2": 24}, std=1)
        self.short = Linear(10, {"short": 3}, std=1)
        each = {"n_experts": 4, "top_k": 2, "std": 1.0}
        self.experts = nn.ModuleDict(
            {
                "w13": GroupedProjection(12, {"w1": 4, "w3": 4}, groups=8, **each),
                "w2": GroupedProjection(8, {"w2": 12}, groups=4, **each),
            }
        )


OVER_TP: dict[str, Placement] = {
    "wqkv": Shard(0),
    "wo": Shard(1),
    "w13": Shard(0),
    "w2": Shard(1),
    "short": Replicate(),
}


def by_hand(name: str, weight: Tensor) -> list[Tensor]:
    """The matrices of a weight, as views of it."""
    if name == "wqkv.weight":  # 6 groups of 8 rows of queries, 4 of keys, 4 of values
        groups = weight.view(6, 16, 24)
        return [groups[:, :8], groups[:, 8:12], groups[:, 12:]]
    if name == "w13.weight":
        groups = weight.view(11, 6, 24)
        return [groups[:, :3], groups[:, 3:]]
    if name == "experts.w13.weight":  # 2 groups each
        experts = weight.view(4, 2, 8, 12)
        return [part for expert in experts for part in (expert[:, :4], expert[:, 4:])]
    if name == "experts.w2.weight":
        return list(weight.view(4, 12, 8))
    return [weight]


def normal(name: str, shape: torch.Size, step: int) -> Tensor:
    seed = 100 * step + sum(map(ord, name))
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def of_numbers(x: Tensor, polynomials: Polynomials) -> Tensor:
    for a, b, c in polynomials:
        x = a * x + b * x**3 + c * x**5
    return x


def orthogonal(x: Tensor, rule: MuonRule) -> Tensor:
    left, s, right = torch.linalg.svd(x, full_matrices=False)
    return (left * of_numbers(s / s.norm(), rule.polynomials)) @ right


def of_largest(m: Tensor, rule: MuonRule) -> tuple[Tensor, Tensor]:
    """Dion2's update of one matrix, and the factor of each element of its momentum."""
    assert rule.share is not None
    if m.shape[0] > m.shape[1]:
        o, decays = of_largest(m.T, rule)
        return o.T, decays.T
    largest = sorted(range(len(m)), key=lambda row: -sum(map(abs, m[row].tolist())))
    chosen = sorted(largest[: math.ceil(rule.share * len(m))])
    o, decays = torch.zeros_like(m), torch.ones_like(m)
    o[chosen], decays[chosen] = orthogonal(m[chosen], rule), rule.momentum
    return o, decays


def plain(rule: MuonRule, kind: type[Muon] = Muon) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What whole weights, and NorMuon's second moments, are after the steps, in a loop over matrices."""
    weights, moments = dict[str, Tensor](), dict[str, Tensor]()
    for name, p in Layers().named_parameters():
        lr, decay = LR * PACES[name].lr_factor, PACES[name].weight_decay
        weight, momentum = normal(name, p.shape, 0), torch.zeros(p.shape, dtype=torch.float64)
        moment = torch.zeros(p.shape, dtype=torch.float64)  # of a row, at each of its numbers
        for step in range(1, STEPS + 1):
            grad = normal(name, p.shape, step) / 2
            momentum = (1.0 if kind is Dion2 else rule.momentum) * momentum + (1 - rule.momentum) * grad
            ahead = rule.nesterov and kind is not Dion2
            update = rule.momentum * momentum + (1 - rule.momentum) * grad if ahead else momentum
            for w, u, v in zip(by_hand(name, weight), by_hand(name, update), by_hand(name, moment), strict=True):
                whole_matrix = u.reshape(-1, u.shape[-1])
                if kind is Dion2:
                    o, decays = of_largest(whole_matrix, rule)
                    u.mul_(decays.view(u.shape))
                else:
                    o = orthogonal(whole_matrix, rule)
                size = 0.2 * math.sqrt(max(o.shape))
                if kind is NorMuon:
                    v.mul_(rule.beta2).add_((1 - rule.beta2) * (o**2).mean(1, keepdim=True).expand_as(o).view(v.shape))
                    o = o / (v.reshape(o.shape).sqrt() + 1e-8)
                    o, size = o / o.norm(), 0.2 * math.sqrt(o.numel())
                w.mul_(1 - lr * decay).sub_(o.view(u.shape), alpha=lr * size)
        weights[name], moments[name] = weight, moment[:, 0]
    return weights, moments


def sharded(mesh: Mesh) -> Layers:
    """The layers as a run has them, float64, with the weights of step 0."""
    model = Layers().double()
    for name, p in model.named_parameters():
        p.data.copy_(normal(name, p.shape, 0))
    for name, layer in model.named_modules():
        if not isinstance(layer, Linear | GroupedProjection):
            continue
        on, is_expert = mesh.fsdp, isinstance(layer, GroupedProjection)
        if is_expert and mesh.experts is not None:
            split = distribute_tensor(layer.weight.data, mesh.experts["ep"], [Shard(0)])
            layer.weight, on = nn.Parameter(split), mesh.expert_shards
        elif not is_expert and mesh.tp_size > 1:
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.data, mesh.tp, [OVER_TP[name]]))
        fully_shard(layer, mesh=on)
    return model


def after_steps(mesh: Mesh, rule: MuonRule, kind: type[Muon] = Muon) -> tuple[Muon, dict[str, Tensor]]:
    model = sharded(mesh)
    named = dict(model.named_parameters())
    ours = kind(named, mesh, matrices_of(model), rule, PACES)
    for step in range(1, STEPS + 1):
        grads = {n: local_slice(normal(n, p.shape, step), p).clone() for n, p in named.items()}
        ours.step(grads, LR, TWO, ZERO)
        nan = {n: torch.full_like(local, float("nan")) for n, local in ours.locals.items()}
        ours.step(nan, LR, ONE, ONE)  # left out
    return ours, {name: whole(p) for name, p in named.items()}


def bound(weight: Tensor) -> float:
    """Rounding of a matrix of norm 1 is moved by at most the product of the slopes at 0; there are less than a hundred
    roundings, of the momentum, the singular vectors and each product, a step."""
    steep = math.prod(a for a, _, _ in EXACT.polynomials)
    per_step = 100 * steep * torch.finfo(torch.float64).eps * LR * 0.2 * math.sqrt(max(weight.shape))
    return STEPS * per_step


def errors(ours: Mapping[str, Tensor], rule: MuonRule = EXACT, kind: type[Muon] = Muon) -> dict[str, float]:
    """Of each weight, over its bound."""
    truth, _ = plain(rule, kind)
    return {name: ((weight - truth[name]).norm() / bound(weight)).item() for name, weight in ours.items()}


LAYOUTS = {
    "one": (1, Parallelism()),
    "fsdp 2": (2, Parallelism()),
    "fsdp 4": (4, Parallelism()),
    "tp 2": (2, Parallelism(tensor_parallel_degree=2)),
    "fsdp 2, tp 2": (4, Parallelism(tensor_parallel_degree=2)),
    "hsdp 2 x 2": (4, Parallelism(data_parallel_replicate_degree=2)),
    "hsdp 2, tp 2": (4, Parallelism(data_parallel_replicate_degree=2, tensor_parallel_degree=2)),
    "ep 2 of 4": (4, Parallelism(expert_parallel_degree=2)),
    "hsdp 2, ep 2": (4, Parallelism(data_parallel_replicate_degree=2, expert_parallel_degree=2)),
    "ep 4, tp 2": (4, Parallelism(expert_parallel_degree=4, tensor_parallel_degree=2)),
}


@pytest.mark.parametrize(
    "layout",
    [*list(LAYOUTS)[:5], *slow("hsdp 2 x 2"), "hsdp 2, ep 2", *slow("hsdp 2, tp 2", "ep 2 of 4"), "ep 4, tp 2"],
)
def test_updates_are_those_of_whole_matrices(layout, tmp_path):
    world, degrees = LAYOUTS[layout]

    def body() -> None:
        _, weights = after_steps(build_mesh(degrees, CPU, has_experts=True), EXACT)
        found = errors(weights)
        assert max(found.values()) <= 1, found

    run_ranks(body, tmp_path, world)


@pytest.mark.parametrize("layout", ["tp 2", *slow("one", "fsdp 4", "hsdp 2 x 2", "fsdp 2, tp 2", "ep 2 of 4")])
def test_rows_of_normuon_are_those_of_whole_matrices(layout, tmp_path):
    world, degrees = LAYOUTS[layout]
    rule = replace(EXACT, beta2=0.7)

    def body() -> None:
        ours, found = after_steps(build_mesh(degrees, CPU, has_experts=True), rule, NorMuon)
        weights, moments = plain(rule, NorMuon)
        for name, weight in found.items():
            # A row is divided by its size, and errors with it: by less than a tenth of the rows' mean size here.
            assert (weight - weights[name]).norm() <= 10 * bound(weight), name
            torch.testing.assert_close(ours.second_moment[name], moments[name], rtol=1e-9, atol=0)

    run_ranks(body, tmp_path, world)


@pytest.mark.parametrize(
    "layout",
    ["one", "fsdp 4", "ep 4, tp 2", *slow("tp 2", "fsdp 2, tp 2", "hsdp 2 x 2", "ep 2 of 4", "hsdp 2, ep 2")],
)
def test_shares_of_dion2_are_those_of_whole_matrices(layout, tmp_path):
    world, degrees = LAYOUTS[layout]
    rule = replace(EXACT, share=0.3)

    def body() -> None:
        _, weights = after_steps(build_mesh(degrees, CPU, has_experts=True), rule, Dion2)
        found = errors(weights, rule, Dion2)
        assert max(found.values()) <= 1, found

    run_ranks(body, tmp_path, world)


def alone(body: Callable[[Mesh], None], folder: Path) -> None:
    run_ranks(lambda: body(build_mesh(Parallelism(), CPU, has_experts=True)), folder, 1)


@pytest.mark.parametrize("change", [{"nesterov": False}, {"polynomials": ITERATIONS["newton_schulz"]}, {"bucket": 1}])
def test_settings_are_followed(change, tmp_path):
    rule = MuonRule(**{**vars(EXACT), **change})

    def body(mesh: Mesh) -> None:
        assert max(errors(after_steps(mesh, rule)[1], rule).values()) <= 1
        if "bucket" not in change:
            assert min(errors(after_steps(mesh, EXACT)[1], rule).values()) > 1e6

    alone(body, tmp_path)


def test_a_share_of_one_is_muon_without_nesterovs_momentum(tmp_path):
    rule = replace(EXACT, share=1.0)

    def body(mesh: Mesh) -> None:
        found = errors(after_steps(mesh, rule, Dion2)[1], replace(EXACT, nesterov=False))
        assert max(found.values()) <= 1, found

    alone(body, tmp_path)


@pytest.mark.parametrize("shape", [(8, 16), (16, 8)])
def test_of_equal_rows_or_columns_the_first_are_taken_and_the_others_next(shape, tmp_path):
    def body(mesh: Mesh) -> None:
        weight, grad = nn.Parameter(torch.zeros(shape)), normal("a", torch.Size(shape), 1).sign().float()
        matrices, rule = {"a": [Matrix("a", "a", torch.arange(shape[0]), shape[1])]}, MuonRule(share=0.4)
        ours = Dion2({"a": weight}, mesh, matrices, rule, {"a": Pace(weight_decay=0.0)})
        for taken in (range(4), range(4, 8)):
            before = weight.detach().clone()
            ours.step({"a": grad.clone()}, LR, ONE, ZERO)
            changed = (weight != before).all(int(shape[0] < shape[1]))
            assert changed.nonzero().flatten().tolist() == [*taken]
            assert (weight != before).sum() == 4 * 16

    alone(body, tmp_path)


def test_a_step_looks_for_tensors_once_however_many_buckets(tmp_path, monkeypatch):
    """Where gradients lie is sent to the device once; weights and momenta stay where they are."""

    def body(mesh: Mesh) -> None:
        named = dict(sharded(mesh).named_parameters())
        ours = Muon(named, mesh, matrices_of(Layers()), replace(EXACT, bucket=1), PACES)
        seen, original = [], module.tensor_table
        monkeypatch.setattr(module, "tensor_table", lambda kind, of: (seen.append(kind), original(kind, of))[1])
        ours.step({n: torch.zeros_like(local) for n, local in ours.locals.items()}, LR, ONE, ZERO)
        assert len(ours.buckets) > 10
        assert seen == ["gradient"]

    alone(body, tmp_path)


def test_rows_that_no_matrix_has_are_an_error(tmp_path):
    def body(mesh: Mesh) -> None:
        model = sharded(mesh)
        matrices = matrices_of(model)
        matrices["wqkv.weight"].pop()
        with pytest.raises(ValueError, match=r"matrices of wqkv\.weight do not have each of its 96 rows once"):
            Muon(dict(model.named_parameters()), mesh, matrices, EXACT, PACES)

    alone(body, tmp_path)


@pytest.mark.parametrize("nesterov", [True, False])
def test_equals_torchs_muon_in_float64(nesterov, tmp_path, monkeypatch):
    """Whose dtype is bfloat16 otherwise: rounding would hide a difference of settings."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.clone())
    rule = MuonRule(ITERATIONS["newton_schulz"], MOMENTUM, nesterov, dtype=torch.float64, state_dtype=torch.float64)
    shapes = {"wide": (24, 40), "tall": (40, 24), "square": (16, 16)}
    shaped = {name: torch.Size(shape) for name, shape in shapes.items()}

    def body(mesh: Mesh) -> None:
        ours = {n: nn.Parameter(normal(n, shape, 0)) for n, shape in shaped.items()}
        theirs = {n: nn.Parameter(normal(n, shape, 0)) for n, shape in shaped.items()}
        whole_rows = {n: [Matrix(n, n, torch.arange(shape[0]), shape[1])] for n, shape in shapes.items()}
        muon = Muon(ours, mesh, whole_rows, rule, dict.fromkeys(shapes, Pace(1.0, DECAY)))
        reference = torch.optim.Muon(
            theirs.values(),
            lr=LR,
            weight_decay=DECAY,
            momentum=MOMENTUM,
            nesterov=nesterov,
            adjust_lr_fn="match_rms_adamw",
        )
        for step in range(1, STEPS + 1):
            for name, parameter in theirs.items():
                parameter.grad = normal(name, parameter.shape, step)
            reference.step()
            muon.step({n: normal(n, p.shape, step) for n, p in ours.items()}, LR, ONE, ZERO)
        for name, parameter in ours.items():
            assert (parameter - theirs[name]).norm() <= bound(parameter), name
            assert (parameter - normal(name, parameter.shape, 0)).abs().min() > 1e-6

    alone(body, tmp_path)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_momentum_is_rounded_after_it_was_used(state_dtype, tmp_path):
    """The first update is that of a wide momentum bit for bit; the momentum of a second, of the rounded one."""

    def body(mesh: Mesh) -> None:
        shape = torch.Size((24, 40))
        matrices, grad = {"a": [Matrix("a", "a", torch.arange(24), 40)]}, normal("a", shape, 1).float()
        weights, kept = [], []
        for dtype in (torch.float32, state_dtype):
            weight = nn.Parameter(torch.zeros(shape))
            muon = Muon({"a": weight}, mesh, matrices, MuonRule(state_dtype=dtype), {"a": Pace()})
            muon.step({"a": grad.clone()}, LR, ONE, ZERO)
            weights.append(weight)
            kept.append(muon.kept["momentum"]["a"])
        assert torch.equal(*weights)
        assert kept[1].dtype == state_dtype
        assert torch.equal(kept[0].to(state_dtype), kept[1])
        assert kept[0].any()

    alone(body, tmp_path)


def test_a_matrix_that_has_no_gradient_stays(tmp_path):
    """Nothing is divided by the size of nothing."""

    def body(mesh: Mesh) -> None:
        model = sharded(mesh)
        named = dict(model.named_parameters())
        paces = {name: pace._replace(weight_decay=0.0) for name, pace in PACES.items()}
        ours = NorMuon(named, mesh, matrices_of(model), replace(EXACT, dtype=torch.bfloat16), paces)
        ours.step({n: torch.zeros_like(t) for n, t in ours.locals.items()}, LR, ONE, ZERO)
        assert all(torch.equal(whole(p), normal(name, p.shape, 0)) for name, p in named.items())

    alone(body, tmp_path)


def test_replicas_have_the_same_bits(tmp_path):
    """In the dtype that travels, with matrices that two ranks of a replica have halves of."""

    def body() -> None:
        mesh = build_mesh(Parallelism(data_parallel_replicate_degree=2), CPU, has_experts=True)
        named = dict(sharded(mesh).named_parameters())
        ours = Muon(named, mesh, matrices_of(Layers()), MuonRule(bucket=4000), PACES)
        ours.step({n: local_slice(normal(n, p.shape, 1), p).clone() for n, p in named.items()}, LR, ONE, ZERO)
        owners = {stack.owner for bucket in ours.buckets for stack in bucket.stacks}
        assert owners == {0, 1, 2, 3}
        shards = torch.cat([shard.flatten() for shard in ours.locals.values()])
        everyone = [torch.empty_like(shards) for _ in range(2)]
        dist.all_gather(everyone, shards, group=mesh.all.get_group("dp_replicate"))
        assert torch.equal(*everyone)

    run_ranks(body, tmp_path, 4)


def test_the_receipt_says_who_orthogonalises_how_much_and_what_travels(tmp_path: Path) -> None:
    def body() -> None:
        mesh = build_mesh(Parallelism(), CPU)
        model = torch.nn.ModuleDict(
            {
                "large": Linear(1024, {"a": 512}, std=1),
                "small": Linear(256, {"a": 128, "b": 128}, std=1),
            }
        )
        for layer in model.values():
            fully_shard(layer, mesh=mesh.fsdp)
        fast, slow = MuonGroup("muon", ("large.*",)), MuonGroup("muon", polynomials=((1.5, -0.5, 0.0),))
        recipe = OptimizerRecipe("two", {"fast": fast, "slow": slow})
        config = Optimizer(weight_decay_exclude=())
        named, matrices = dict(model.named_parameters()), matrices_of(model)
        settings = update_settings(recipe, config, {name: p.shape for name, p in named.items()}, of_matrices=matrices)
        ours = ShardedOptimizer(named, config, recipe, settings, mesh, matrices)
        applied = ours.entry().applied
        assert isinstance(applied, dict)
        large, small = orthogonalise_flops(512, 1024, 5), orthogonalise_flops(128, 256, 1)
        assert applied["of muon"] == {
            "matrices": 3,
            "owners": 2,
            "buckets": 2,  # of one rule each
            "gflop_of_a_rank_a_step": {"least": round(small / 1e9, 3), "most": round((large + small) / 1e9, 3)},
            # Half of the large one goes to its owner, and half of its result from there. Each rank holds what it owns
            # of the small ones.
            "bytes_sent_by_a_rank_a_step": {"most": 256 * 1024 * 2},
            "dtype_sent": "bfloat16",
        }

    run_ranks(body, tmp_path, 2)
