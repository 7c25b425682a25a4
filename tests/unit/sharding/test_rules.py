"""Every rule computes what it says: parts that go in so placed give parts of the result so placed."""

from collections.abc import Callable
from math import prod

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.distributed.tensor import Partial, Shard

from tests.support.sharding.cases import Function
from titanlite.kernels.attention import attention
from titanlite.sharding.graph import export, is_item, tensor_inputs, value
from titanlite.sharding.op_rules import RESHAPES, Rule
from titanlite.sharding.reshape import moved_shards
from titanlite.sharding.rules import rules_of

RANKS = 2
aten = torch.ops.aten

# What runs, the shapes of its inputs, and how many rules there are with a shard, over all of its operators.
OPERATORS: dict[str, tuple[Callable[..., object], list[tuple[int, ...]], int]] = {
    "linear": (F.linear, [(4, 6, 8), (2, 8)], 4),
    "matmul": (torch.matmul, [(4, 8), (8, 6)], 3),
    "matmul, batches": (torch.matmul, [(2, 4, 6, 8), (2, 4, 8, 6)], 5),
    "matmul, a batch of one": (torch.matmul, [(2, 4, 6, 8), (1, 4, 8, 6)], 5),
    "matmul, fewer batches": (torch.matmul, [(2, 4, 6, 8), (8, 6)], 5),
    "matmul, a vector": (torch.matmul, [(4, 8), (8,)], 2),
    "a vector, matmul": (torch.matmul, [(8,), (4, 8, 6)], 3),
    "broadcast": (lambda x, y: x * y, [(4, 1, 6), (8, 1)], 3),
    "where": (lambda x, y: torch.where(x > 0, x, y), [(4, 6), (6,)], 4),
    "and, or": (lambda x, y: (x > 0) & (y > 0) | (x > 1), [(4, 6), (4, 6)], 10),
    "and, no dim divides": (lambda x, y: (x > 0) & (y > 0), [(3, 5), (3, 5)], 0),
    "pad": (lambda x: F.pad(x, (0, 0, 1, -1)), [(4, 6, 8)], 2),
    "softmax": (lambda x: x.softmax(1), [(4, 6, 8)], 2),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (8,), w, b), [(4, 6, 8), (8,), (8,)], 2),
    "rms_norm": (lambda x, w: F.rms_norm(x, (6, 8), w), [(4, 6, 8), (6, 8)], 1),
    "sum": (lambda x: x.sum((0, 2)), [(4, 6, 8)], 3),
    "mean": (lambda x: x.mean(-1, keepdim=True), [(4, 6)], 2),
    "amax": (lambda x: x.amax(0), [(4, 6)], 1),
    "cumsum": (lambda x: x.cumsum(1), [(4, 6)], 1),
    "transpose": (lambda x: x.transpose(0, 2), [(4, 6, 8)], 3),
    "permute": (lambda x: x.permute(2, 0, 1), [(4, 6, 8)], 3),
    "expand": (lambda x: x[:, None].expand(4, 6, 8), [(4, 8)], 4),
    "stack": (lambda x, y: torch.stack((x, y), 1), [(4, 6), (4, 6)], 2),
    "cat": (lambda x, y: torch.cat((x, y), 1), [(4, 6), (4, 2)], 1),
    "select": (lambda x: x[:, 1], [(4, 6)], 1),
    "slice": (lambda x: x[:, 1:3], [(4, 6)], 1),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), [(2, 4, 6, 8)] * 3, 2),
    "attention, grouped": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        [(2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8)],
        2,
    ),
    "attention, one key head": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        [(2, 4, 6, 8), (2, 1, 6, 8), (2, 1, 6, 8)],
        1,
    ),
    "attention, a mask": (
        lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask),
        [(2, 4, 6, 8)] * 3 + [(4, 6, 6)],
        2,
    ),
    "attention to a window": (
        lambda q, k, v: attention(q, k, v, 6, 3),
        [(12, 4, 8), (12, 2, 8), (12, 2, 8)],
        1,
    ),
    "several outputs": (lambda x: x.split([2, 4], 1)[1], [(4, 6)], 1),
    "chunk": (lambda x: x.chunk(2, -1)[0], [(4, 6)], 1),
    "reshape": (lambda x: x.reshape(8, 3, 2, 4), [(4, 6, 8)], 2),
    "squeeze": (lambda x: x[:, None].squeeze(1), [(4, 6)], 4),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_a_rule_computes_what_it_says(name: str) -> None:
    function, shapes, count = OPERATORS[name]
    random = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, dtype=torch.float64, generator=random) for shape in shapes]
    graph = export(Function(function), [x.to("meta") for x in inputs])
    at: dict[fx.Node, object] = dict(zip(graph.inputs, inputs, strict=True))
    rules = 0
    for node in graph.operators:
        at[node] = run(node, [at[n] for n in tensor_inputs(node)], None)
        if is_item(node):
            continue
        for rule in rules_of(node, RANKS)[1:]:
            rules += 1
            parts = [
                run(node, [part(at[n], p, rank) for n, p in zip(tensor_inputs(node), rule.inputs, strict=True)], rule)
                for rank in range(RANKS)
            ]
            whole = at[node]
            pairs = (
                zip(zip(*parts, strict=True), whole, strict=True)
                if isinstance(whole, tuple | list)
                else [(parts, whole)]
            )
            for pieces, expected in pairs:
                torch.testing.assert_close(joined(pieces, rule), expected, rtol=1e-13, atol=1e-13)
    assert rules == count


def run(node: fx.Node, tensors: list[object], rule: Rule | None) -> object:
    given = iter(tensors)
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda _: next(given))
    if rule and (node.target in RESHAPES or node.target is aten.expand.default):
        shape = part(value(node), rule.output, 0).shape
        return args[0].expand(shape) if node.target is aten.expand.default else args[0].reshape(shape)
    return node.target(*args, **kwargs)


def part(whole: object, placement: object, rank: int) -> object:
    return whole.chunk(RANKS, placement.dim)[rank] if isinstance(placement, Shard) else whole


def joined(parts: tuple[Tensor, ...], rule: Rule) -> Tensor:
    if isinstance(rule.output, Shard):
        return torch.cat(list(parts), rule.output.dim)
    assert isinstance(rule.output, Partial)
    return sum(parts) / (RANKS if rule.output.reduce_op == "avg" else 1)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_a_reshape_moves_all_shards_that_it_can(data: st.DataObject) -> None:
    """Against the elements themselves: which parts of one shape are parts of the other."""
    factors = data.draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=5))
    shapes = []
    for _ in range(2):
        cuts = data.draw(st.lists(st.booleans(), min_size=len(factors), max_size=len(factors)))
        shape = [1]
        for factor, cut in zip(factors, cuts, strict=True):
            shape = [*shape, factor] if cut else [*shape[:-1], shape[-1] * factor]
        shapes.append(shape)
    before, after = shapes
    x = torch.arange(prod(before))
    expected = {
        (i, o)
        for i, m in enumerate(before)
        for o, n in enumerate(after)
        if m % RANKS == n % RANKS == 0
        and all(
            torch.equal(a.reshape(-1), b.reshape(-1))
            for a, b in zip(x.view(before).chunk(RANKS, i), x.view(after).chunk(RANKS, o), strict=True)
        )
    }
    assert set(moved_shards(before, after, RANKS).items()) == expected
