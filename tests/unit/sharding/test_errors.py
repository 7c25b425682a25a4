"""What is refused, and in which words: the tensor, the dim, the chain to the annotation, and the fixes."""

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from tests.support.sharding.cases import MLP, Function, Mlp
from titanlite import recipes
from titanlite.errors import ShardingError
from titanlite.models.llama3 import Llama3
from titanlite.sharding import dtensor_rules, rules
from titanlite.sharding.derive import plan_model
from titanlite.sharding.plan import REPLICATE


def refused(
    model: nn.Module,
    shapes: list[tuple[int, ...]],
    annotations: Mapping[str, str],
) -> str:
    inputs = [torch.empty(shape, device="meta") for shape in shapes]
    with pytest.raises(ShardingError) as caught:
        plan_model(model.to("meta"), inputs, 2, annotations)
    return str(caught.value)


def refused_function(body: Callable[..., Tensor], *shapes: tuple[int, ...], **annotations: str) -> str:
    return refused(Function(body), list(shapes), annotations)


def llama(size: str, tp: int) -> str:
    dimensions = recipes.load("model", f"llama3-{size}")
    with torch.device("meta"):
        model, tokens = Llama3(dimensions, 256), torch.empty(256, dtype=torch.long)
    named = {name: getattr(dimensions, name) for name in ("n_heads", "n_kv_heads", "ffn_dim")}
    with pytest.raises(ShardingError) as caught:
        plan_model(model, [tokens], tp, Llama3.sharding, named)
    return str(caught.value)


def test_heads_that_do_not_divide() -> None:
    message = llama("1B", 16)
    assert message == (
        "sharding plan: 1 problem\n"
        "  linear of layers.0.attention.wqkv [256, 3072] = S(1) on tp, needed as R by unflatten: "
        "an unasked all_gather of 2.8 MiB\n"
        "      because: linear of layers.0.attention.wqkv: S(1)\n"
        "          <- layers.0.attention.wqkv.weight: S(0)\n"
        '          <- annotation "layers.*.attention.wqkv.weight = tp:0"\n'
        "      want: a shard that lives through the reshape to [256, 8, 6, 64], which takes dim 1 to dim 1 of size 8, "
        "which is not divisible by 16\n"
        "      fix:  n_kv_heads 8 is not divisible by tensor_parallel_degree 16: use 8, or "
        '"layers.*.attention.wqkv.weight" = "replicate"'
    )


def test_all_problems_at_once() -> None:
    message = llama("debug", 8)  # 4 key/value heads, 6 blocks of the feed-forward
    assert message.startswith("sharding plan: 2 problems")
    assert "n_kv_heads 4 is not divisible by tensor_parallel_degree 8: use 4, or" in message
    assert "the dim of size 6 is not divisible by tensor_parallel_degree 8: use 2, or" in message


def test_a_reshape_that_is_not_even() -> None:
    message = refused_function(lambda x: x.view(3, 2), (6,), inputs_0="tp:0")
    assert "inputs_0 [6] = S(0) on tp" in message
    assert "takes dim 0 to dim 0 of size 3, which is not divisible by 2" in message


def test_a_reshape_of_an_inner_dim() -> None:
    message = refused_function(lambda x: x.view(30), (3, 10), inputs_0="tp:1")
    assert "merges dim 1 as an inner dim, under dim 0" in message


def test_an_unasked_move() -> None:
    message = refused_function(lambda a, b: a + b, (4, 4), (4, 4), inputs_0="tp:0", inputs_1="tp:1")
    assert "inputs_1 [4, 4] = S(1) on tp, needed as S(0) by add: an unasked all_to_all" in message
    assert '<- annotation "inputs_1 = tp:1"' in message
    message = refused_function(lambda x: x.softmax(-1), (4, 4), inputs_0="tp:1")
    assert "inputs_0 [4, 4] = S(1) on tp, needed as R by softmax: an unasked all_gather" in message


def test_a_weight_is_never_gathered_in_silence() -> None:
    message = refused(nn.Linear(8, 8), [(4, 8)], {"weight": "tp:0", "@": "tp:0"})
    assert "want: the name of a parameter" in message
    body = Function(lambda x, w: x.softmax(-1) + w.softmax(-1), weight=(4, 4))
    assert "weight [4, 4] = S(1) on tp, needed as" in refused(body, [(4, 4)], {"weight": "tp:1"})


def test_a_matmul_weight_that_nobody_placed() -> None:
    message = refused(Mlp(8, 16), [(2, 4, 8)], {"x": "tp:1"})
    assert message.startswith("sharding plan: 2 problems")
    assert (
        "up.weight [16, 8] = whole on every rank, and no annotation says so; used by linear (aten.linear.default)"
        in message
    )
    assert 'fix:  "up.weight" = "tp:0" (its output features), "tp:1" (its input features) or "replicate"' in message


def test_a_partial_sum_that_nobody_wants_whole() -> None:
    message = refused(Mlp(8, 16), [(2, 4, 8)], MLP)
    assert "linear_1 of down [2, 4, 8] = a partial sum on tp, and nothing says where it is wanted" in message
    assert 'fix:  "@down" = "tp:0" or "replicate"' in message
    plan = plan_model(Mlp(8, 16).to("meta"), [torch.empty(2, 4, 8, device="meta")], 2, {**MLP, "@down": "replicate"})
    assert [move.forward for move in plan.moves if move.forward] == ["all_reduce"]


@pytest.mark.parametrize(
    ("annotations", "words"),
    [
        ({"up.wieght": "tp:0"}, ["up.wieght = tp:0", "did you mean up.weight?"]),
        (
            {"up.weight": "tq:0"},
            ['"replicate", or tp with one of the 2 dims of up.weight, as "tp:0"', 'fix:  "up.weight" = "tp:0"'],
        ),
        *(({"up.weight": text}, ["or tp with one"]) for text in ("tp", "", "tp:1 tp:0", "tp:--1", "tp:2")),
        ({"up.weight": 0}, ["want: a dict of pattern → placement"]),
        ({"up.weight": "tp:0", "*.weight": "tp:1"}, ["one placement of up.weight; up.weight = tp:0 gives another"]),
        ({"x": "tp:0"}, ["dim 0 of x, of size 3, to be divisible by the 2 ranks of tp", "fix:  tp = 1"]),
        ({"x": "tp:0", "nothing": "tp:0"}, ["2 problems"]),
    ],
)
def test_annotations_that_cannot_be(annotations: dict[str, str], words: list[str]) -> None:
    message = refused(Mlp(8, 16), [(3, 4, 8)], annotations)
    assert message.startswith("sharding annotations: ")
    assert all(word in message for word in words), message


def test_a_name_for_all_blocks_is_suggested_where_one_was_meant() -> None:
    message = refused(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), [(4, 8)], {"*.wieght": "tp:0"})
    assert "did you mean *.weight?" in message


def test_a_scalar_has_nothing_to_split() -> None:
    message = refused_function(torch.neg, (), inputs_0="tp:0")
    assert 'want: "replicate": inputs_0 has no dims' in message
    assert "fix:  remove it" in message


def test_an_operator_without_rules() -> None:
    body = Function(torch.inverse)
    message = refused(body, [(4, 4)], {"inputs_0": "tp:1"})
    assert "inverse of the model = aten.inverse.default" in message
    assert "an operator with a sharding rule" in message


def test_an_operator_that_works_in_place() -> None:
    message = refused_function(lambda x: (x * 2).add_(1), (4, 4), inputs_0="tp:1")
    assert "add_ of the model = aten.add_.Tensor" in message
    assert "fix:  x = x + y for x += y" in message


def test_constants_of_a_model_are_whole() -> None:
    body = Function(lambda x: x * torch.tensor(2.0, dtype=x.dtype))
    plan = plan_model(body, [torch.empty(4, 4, device="meta")], 2, {"inputs_0": "tp:1"})
    assert plan.tensors["lifted_tensor_0"].placement == REPLICATE
    assert plan.tensors["mul"].placement == Shard(1)
    assert not any(move.forward or move.backward for move in plan.moves)


def test_a_torch_with_other_rules(monkeypatch) -> None:
    """DTensor's private parts may change: then nothing is planned with them."""
    assert dtensor_rules.self_test() == []
    rules._require_known_rules.cache_clear()
    monkeypatch.setattr(dtensor_rules, "rules", lambda *_: [])
    try:
        message = refused_function(lambda x: x.cumprod(0), (4, 4), inputs_0="tp:1")
        assert "DTensor's sharding rules are not those that titanlite was tested with" in message
        assert "aten.cat.default: rules []" in message
    finally:
        rules._require_known_rules.cache_clear()


def test_a_chain_leads_to_the_annotation() -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        return F.relu(F.linear(x, w)).view(2, 2, 4)

    plan = plan_model(
        Function(body, weight=(8, 4)).to("meta"), [torch.empty(2, 4, device="meta")], 2, {"weight": "tp:0"}
    )
    assert plan.why("view") == [
        "view of the model: S(1)",
        "relu of the model: S(1)",
        "linear of the model: S(1)",
        "weight of the model: S(0)",
        'annotation "weight = tp:0"',
    ]
    assert plan.why("inputs_0") == ["inputs_0 of the model: R", "nothing reached it"]
