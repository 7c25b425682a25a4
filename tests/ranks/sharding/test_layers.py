"""From the plan to the layers: two blocks stand for all, every move has its layer, and what has none is refused."""

import copy
import dataclasses
from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from tests.support.ranks import run_ranks
from titanlite import recipes
from titanlite.config.recipe_schema import ModelDims
from titanlite.errors import ShardingError
from titanlite.kernels.collectives import Group
from titanlite.models.layers import CausalAttention, Embedding, Linear, RMSNorm, Sequences
from titanlite.models.llama3 import Llama3
from titanlite.parallel.tensor import LayerPlan, apply_tensor_parallel
from titanlite.sharding.graph import export
from titanlite.sharding.layers import plan_layers, planned_layers

TOKENS = 16
SIZES = ModelDims("", 4, dim=64, n_heads=8, n_kv_heads=4, ffn_dim=512, vocab_size=32, rope_theta=1e4, norm_eps=1e-5)


def on_meta(dims: ModelDims, **annotations: str) -> Llama3:
    with torch.device("meta"):
        model = Llama3(dims, TOKENS // 2)
    model.sharding = {**Llama3.sharding, **annotations}  # type: ignore[misc]
    return model


def of_the_whole_model(model: nn.Module, annotations: Mapping[str, str], ranks: int) -> dict[str, LayerPlan]:
    graph = export(model, [torch.empty(TOKENS, dtype=torch.long, device="meta")])
    return planned_layers(graph, annotations, ranks, {})[1]


@pytest.mark.parametrize(("n_layers", "tied"), [(1, False), (1, True), (2, True)])
def test_two_blocks_stand_for_all(n_layers: int, tied: bool) -> None:
    dims = dataclasses.replace(recipes.load("model", "llama3-debug"), n_layers=n_layers, tied_embeddings=tied)
    model = on_meta(dims)
    layers = plan_layers(model, TOKENS, 2).layers
    assert layers == of_the_whole_model(model, Llama3.sharding, 2)
    assert set(layers) == {name for name, module in model.named_modules() if module._parameters}


def test_blocks_of_other_kinds_are_planned_for_themselves(monkeypatch) -> None:
    planned: list[int] = []
    monkeypatch.setattr(
        "titanlite.sharding.layers.export",
        lambda model, inputs: (planned.append(len(model.layers)), export(model, inputs))[1],
    )
    model = on_meta(dataclasses.replace(SIZES, n_layers=6))
    with torch.device("meta"):
        for block in list(model.layers)[1::3]:
            block.ffn_norm = nn.Identity()
            block.ffn_norm.add = lambda x, residual: (x + residual,) * 2
    layers = plan_layers(model, TOKENS, 4).layers
    assert planned == [4]  # of six blocks, two with a norm less
    assert layers == of_the_whole_model(model, Llama3.sharding, 4)
    assert [n for n in range(6) if f"layers.{n}.ffn_norm" in layers] == [0, 2, 3, 5]


@pytest.mark.slow
def test_blocks_that_annotations_number_are_planned_as_they_are() -> None:
    numbered = {"layers.0.feed_forward.w13.weight": "tp:0", "layers.[1-3].feed_forward.w13.weight": "tp:0"}
    model = on_meta(SIZES)
    model.sharding = {k: v for k, v in Llama3.sharding.items() if "w13" not in k} | numbered  # type: ignore[misc]
    assert plan_layers(model, TOKENS, 4).layers == of_the_whole_model(model, Llama3.sharding, 4)


class Separate(nn.Module):
    """Queries, keys and values of a linear layer each."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (Linear(64, {part: 64}, std=1) for part in ("wq", "wk", "wv"))
        self.attend = CausalAttention()
        self.wo = Linear(64, {"wo": 64}, std=1)

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        q, k, v = (
            w(x).unflatten(-1, (-1, 8)).unflatten(0, (2, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        return self.wo(self.attend(q, k, v).transpose(1, 2).flatten(2).flatten(0, 1))


class Scores(nn.Module):
    """A table made from nothing, with a row for each head: a rank would make that of other heads."""

    def __init__(self, attend: nn.Module) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
        return self.attend(q, k, v, sequences) * torch.arange(1, q.shape[1] + 1, device=q.device)[:, None]


class WithLoss(Llama3):
    """Returns its loss."""

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(tokens), tokens)


REFUSED = {
    "its loss": (
        lambda model: setattr(model, "__class__", WithLoss),
        r"cross_entropy_loss \[\] = a loss\n +want: a model that ends with its logits",
    ),
    "whole tokens between layers": (
        lambda model: setattr(model, "sharding", {**Llama3.sharding, "@tok_embeddings": "replicate"}),
        r"embedding of tok_embeddings \[16, 64\] = computed as P, needed as R\n +want: what a layer can do",
    ),
    "separate projections": (
        lambda model: (
            setattr(model.layers[0], "attention", Separate()),
            setattr(
                model,
                "sharding",
                {k: v for k, v in Llama3.sharding.items() if "wqkv" not in k}
                | {f"layers.*.attention.w{part}.weight": "tp:0" for part in "qkv"},
            ),
        ),
        r"= gathered for layers\.0\.attention\.wq, layers\.0\.attention\.wk, layers\.0\.attention\.wv\n"
        r" +want: one linear layer .*\n +fix:  one Linear with all parts of wq, wk, wv",
    ),
    "made from nothing, and split": (
        lambda model: setattr(model.layers[0].attention, "attend", Scores(model.layers[0].attention.attend)),
        r"R, needed as S\(0\) by mul\w* \(aten\.mul",
    ),
    "logits of one's own tokens": (
        lambda model: setattr(model, "sharding", {**Llama3.sharding, "output.weight": "replicate"}),
        r"linear_4 of output \[16, 32\] = returned as S\(0\)\n +want: logits \[M, V\] that are split by vocabulary",
    ),
    "no annotations": (
        lambda model: setattr(model, "sharding", None),
        "no annotations\n +want: annotations, as a class",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_layer_does_is_refused_by_name(case: str) -> None:
    change, message = REFUSED[case]
    model = on_meta(dataclasses.replace(SIZES, n_layers=1))
    with torch.device("meta"):
        change(model)
    with pytest.raises(ShardingError, match=message):
        plan_layers(model, TOKENS, 4)


W13, EMBEDDED = "layers.*.feed_forward.w13.weight", "@tok_embeddings"

MISTAKES = {
    "the wrong dim of a weight": (
        {"layers.*.attention.wo.weight": "tp:0"},
        ['annotation "layers.*.attention.wo.weight = tp:0"', f'and "{EMBEDDED} = tp:0"'],
        '"layers.*.attention.wo.weight" = "tp:1" or none instead of "tp:0"',
    ),
    "the wrong dim of the first of two": (
        {W13: "tp:1"},
        ["and: layers.0.feed_forward.w13.weight: S(1)", f'annotations "{EMBEDDED} = tp:0" and "{W13} = tp:1"'],
        f'"{W13}" = "tp:0" instead of "tp:1"',
    ),
    "the wrong dim of an activation": ({EMBEDDED: "tp:1"}, [], f'"{EMBEDDED}" = "tp:0" instead of "tp:1"'),
    "a norm": ({"norm.weight": "tp:0"}, [], '"norm.weight" = "replicate" or none instead of "tp:0"'),
    "nothing": ({W13: ""}, [], f'"{W13}" = "tp:0" instead of none'),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_annotation_at_fault_is_named(mistake: str) -> None:
    changes, words, cure = MISTAKES[mistake]
    model = on_meta(dataclasses.replace(SIZES, n_layers=1))
    model.sharding = {k: v for k, v in {**Llama3.sharding, **changes}.items() if v}  # type: ignore[misc]
    with pytest.raises(ShardingError) as caught:
        plan_layers(model, TOKENS, 2)
    message = str(caught.value)
    assert message.endswith(f"\n  one of these changes makes a plan; each was tried:\n    {cure}")
    assert all(word in message for word in words), message


class Scaled(RMSNorm):
    """Computes something that no layer of titanlite's does."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Doubled(Embedding):
    """The same."""


def test_a_class_of_ones_own_is_refused_and_so_are_plans_that_differ(tmp_path) -> None:
    model = on_meta(dataclasses.replace(SIZES, n_layers=1))
    with torch.device("meta"):
        changed = [copy.deepcopy(model) for _ in range(2)]
        changed[0].norm = Scaled(64, 1e-5)
        changed[1].tok_embeddings = Doubled(32, 64, 1.0)
    plans = [plan_layers(m, TOKENS, 2).layers for m in changed]
    good = plan_layers(model, TOKENS, 2).layers

    def body() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        group = Group(mesh.get_group().group_name, 2, mesh.get_local_rank())
        for m, plan, name in zip(changed, plans, ("norm = Scaled", "tok_embeddings = Doubled"), strict=True):
            with pytest.raises(ShardingError, match=f"{name}\n      want: a layer of titanlite.models.layers"):
                apply_tensor_parallel(m, plan, mesh, group)
        mine = good if dist.get_rank() == 0 else {**good, "norm": LayerPlan({"weight": Shard(0)})}
        with pytest.raises(ShardingError, match=r"rank 1\n +want: the sharding plan of rank 0; this rank has another"):
            apply_tensor_parallel(model, mine, mesh, group)

    run_ranks(body, tmp_path)
