"""The derived plan of Llama 3 is the hand-written layout, for every size; less annotations never give another plan."""

import dataclasses
import itertools
import json
import time
from collections import Counter
from fnmatch import fnmatch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from tests.support.count_collectives import CountCollectives
from tests.support.needs import slow
from tests.support.ranks import run_ranks
from tests.support.sharding.execute import compare_with_one_process
from titanlite import recipes
from titanlite.config.recipe_schema import ModelDims
from titanlite.errors import ShardingError
from titanlite.kernels.collectives import Group
from titanlite.models.llama3 import Llama3
from titanlite.parallel.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    SequenceParallelRMSNorm,
    VocabParallelEmbedding,
    apply_tensor_parallel,
)
from titanlite.preflight.checked_run import checked_run
from titanlite.sharding.check import refuse_unasked
from titanlite.sharding.derive import derive, plan_model
from titanlite.sharding.graph import Graph, export
from titanlite.sharding.layers import plan_layers
from titanlite.sharding.plan import REPLICATE, PlacedTensor, Plan
from titanlite.sharding.split import sharding_plan

TOKENS = 512
SIZES = ModelDims("", 2, dim=64, n_heads=8, n_kv_heads=4, ffn_dim=512, vocab_size=32, rope_theta=1e4, norm_eps=1e-5)


def on_meta(dims: ModelDims, tokens: int = TOKENS) -> tuple[Llama3, Tensor]:
    with torch.device("meta"):
        model = Llama3(dims, tokens // 2)
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
        return model, torch.empty(tokens, dtype=torch.long)


BY_HAND: dict[str, tuple[type[nn.Module], Placement]] = {
    "tok_embeddings": (VocabParallelEmbedding, Shard(0)),
    "*.wqkv": (ColumnParallelLinear, Shard(0)),
    "*.wo": (RowParallelLinear, Shard(1)),
    "*.w13": (ColumnParallelLinear, Shard(0)),
    "*.w2": (RowParallelLinear, Shard(1)),
    "*norm": (SequenceParallelRMSNorm, REPLICATE),
    "output": (ColumnParallelLinear, Shard(0)),
}


def hand_written(model: nn.Module) -> tuple[dict[str, object], Counter[tuple[object, ...]]]:
    """Placements and collectives of the layers that a person would choose, as their docstrings have them."""
    placements: dict[str, object] = {}
    collectives = Counter[tuple[object, ...]]()
    for name, module in model.named_modules():
        if not module._parameters:
            continue
        layer, placement = next(rule for pattern, rule in BY_HAND.items() if fnmatch(name, pattern))
        placements[f"{name}.weight"] = placement
        N, K = module.weight.shape if module.weight.ndim == 2 else (0, module.weight.numel())
        if layer is ColumnParallelLinear:
            both = ("all_gather", "reduce_scatter", (TOKENS, K))
        elif layer is RowParallelLinear:
            both = ("reduce_scatter", "all_gather", (TOKENS, N))
        elif layer is VocabParallelEmbedding:
            both = ("reduce_scatter", "all_gather", (TOKENS, K))
        else:
            assert layer is SequenceParallelRMSNorm
            collectives[name, "backward", "all_reduce", (K,)] += 1
            continue
        collectives[name, "forward", both[0], both[2]] += 1
        collectives[name, "backward", both[1], both[2]] += 1
    return placements, collectives


@pytest.mark.parametrize(
    ("size", "tp", "every_block"),
    [("debug", 2, True), ("debug", 2, False), ("8B", 8, False), *slow(("405B", 8, False))],
)
def test_the_plan_is_the_hand_written_layout(size: str, tp: int, every_block: bool, tmp_path, monkeypatch) -> None:
    """As `titanlite plan` derives it: of two blocks of a kind, which stand for the others, or of all."""
    model, _ = on_meta(recipes.load("model", f"llama3-{size}"))
    if every_block:
        each = [[n] for n in range(model.dims.n_layers)]
        monkeypatch.setattr("titanlite.sharding.layers.representative_blocks", lambda model: (model, each))
    flags = {"model.flavor": size, "parallelism.tensor_parallel_degree": tp}
    flags |= {"training.seq_len": TOKENS // 2, "training.local_batch_size": 2}
    (config := tmp_path / "empty.toml").touch()
    argv = ["--config", str(config), *(word for key, value in flags.items() for word in (f"--{key}", str(value)))]
    checked = checked_run(argv, world_size=tp)
    began = time.process_time()  # of this process: other work on the machine does not count
    planned = sharding_plan(checked.config, checked.dims)
    took = time.process_time() - began
    assert len(planned.stand_for) == (model.dims.n_layers if every_block else 2)
    placements, collectives = hand_written(model)
    began_layers = time.process_time()
    layers = plan_layers(model, TOKENS, tp).layers
    assert time.process_time() - began_layers < 3  # what a run waits for
    assert {f"{name}.{own}": p for name, layer in layers.items() for own, p in layer.placements.items()} == placements
    tensors = {name: t for t in planned.plan.tensors.values() for name in planned.names(t.name)}
    assert {name: tensors[name].placement for name in placements} == placements
    assert {name for name in tensors if name.endswith(".weight")} == set(placements)
    moved = Counter[tuple[object, ...]]()
    for move in planned.plan.moves:
        placed = planned.plan.tensors[move.tensor]
        at = planned.plan.tensors[move.consumers[0]].module if move.consumers else placed.module
        for kind, direction in ((move.forward, "forward"), (move.backward, "backward")):
            moved.update((name, direction, kind, placed.shape) for name in planned.names(at) if kind)
            assert not kind or placed.dtype == "bfloat16"
    assert moved == collectives
    assert took < 10


def part_of(placed: PlacedTensor) -> tuple[int, ...]:
    dim = placed.placement.dim if isinstance(placed.placement, Shard) else None
    return tuple(n // 4 if d == dim else n for d, n in enumerate(placed.shape))


def test_the_plan_is_what_the_layers_do(tmp_path) -> None:
    model, tokens = on_meta(SIZES, 16)
    plan = plan_model(model, [tokens], 4, Llama3.sharding)
    parts = {name: part_of(t) for name, t in plan.tensors.items()}

    def body() -> None:
        with torch.device("meta"):
            split = Llama3(SIZES, 8)
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        group = Group(mesh.get_group().group_name, 4, mesh.get_local_rank())
        apply_tensor_parallel(split, plan_layers(split, 16, 4).layers, mesh, group)
        shapes = {name: tuple(p.to_local().shape) for name, p in split.named_parameters()}
        assert shapes == {name: parts[name] for name in shapes}
        placed = {n: (plan.tensors[n].placement,) for n in shapes}
        assert {n: p.placements for n, p in split.named_parameters()} == placed
        split.to_empty(device="cpu")
        split.fill_buffers()
        for parameter in split.parameters():
            nn.init.ones_(parameter)
        ops = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}
        with CountCollectives() as forward:
            logits = split(torch.arange(16))
        assert logits.shape == parts[list(parts)[-1]]
        with CountCollectives() as backward:
            logits.sum().backward()
        for seen, direction in ((forward, "forward"), (backward, "backward")):
            kinds = (getattr(move, direction) for move in plan.moves)
            assert seen.counts == Counter(ops[kind] for kind in kinds if kind in ops)

    run_ranks(body, tmp_path, world=4)


@pytest.mark.parametrize("tied", [True, *slow(False)])
def test_the_plan_computes_llama(tied: bool, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Tensor, "float", Tensor.double)  # statistics in float64
    dims = dataclasses.replace(SIZES, tied_embeddings=tied)
    with torch.device("meta"):
        model, tokens = Llama3(dims, 8).double(), torch.empty(16, dtype=torch.long)
    graph = export(model, [tokens])
    plan = derive(graph, 4, Llama3.sharding)

    def body() -> None:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        torch.manual_seed(0)
        model.to_empty(device="cpu")
        model.fill_buffers()
        if tied:
            model.output.weight = model.tok_embeddings.weight
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
        compare_with_one_process(model, [torch.randint(0, 32, (16,))], graph, plan, mesh)

    run_ranks(body, tmp_path, world=4)


def test_tokens_that_are_whole_between_layers_are_all_reduced() -> None:
    model, tokens = on_meta(SIZES)
    plan = plan_model(model, [tokens], 4, {**Llama3.sharding, "@tok_embeddings": "replicate"})
    L = SIZES.n_layers
    # Forward: wo, w2; embedding. Backward: wqkv, w13; output; norms see whole gradients.
    for kinds in ([move.forward for move in plan.moves], [move.backward for move in plan.moves]):
        assert +Counter(filter(None, kinds)) == {"all_reduce": 2 * L + 1}
    assert plan.why("add_3")[-1] == 'annotation "@tok_embeddings = replicate"'


COMPLETE = {**Llama3.sharding, "layers.*.attention.wo.weight": "tp:1", "layers.*.feed_forward.w2.weight": "tp:1"}


def result(graph: Graph, annotations: dict[str, str]) -> tuple[object, object] | None:
    """What a plan says, without the words of its origins; None for an error."""
    try:
        plan = derive(graph, 4, annotations)
        refuse_unasked(graph, plan, {})
    except ShardingError:
        return None
    return {name: t.placement for name, t in plan.tensors.items()}, plan.moves


@pytest.mark.slow
def test_without_any_two_annotations_the_plan_is_the_same_or_an_error() -> None:
    model, tokens = on_meta(SIZES)
    graph = export(model, [tokens])
    complete = result(graph, dict(Llama3.sharding))
    assert complete is not None
    assert result(graph, COMPLETE) == complete
    same = set()
    for count in (1, 2):
        for left_out in itertools.combinations(COMPLETE, count):
            left = {pattern: text for pattern, text in COMPLETE.items() if pattern not in left_out}
            got = result(graph, left)
            assert got in (None, complete), left_out
            if got is not None:
                same.add(frozenset(left_out))
    wo, w2 = list(COMPLETE)[-2:]
    assert same == {frozenset({wo}), frozenset({w2}), frozenset({wo, w2})}  # what can be inferred, and nothing else


def test_plans_are_deterministic_and_plain() -> None:
    model, tokens = on_meta(SIZES)
    plans: list[Plan] = [plan_model(model, [tokens], 4, Llama3.sharding) for _ in range(2)]
    assert json.dumps(plans[0].as_dict()) == json.dumps(plans[1].as_dict())
    assert plans[0].tensors["norm.weight"].placement == REPLICATE
