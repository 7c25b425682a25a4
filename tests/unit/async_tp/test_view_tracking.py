"""Layouts say where elements are: whatever torch moves, indices computed from the layout are the elements moved."""

import itertools
import math
import random

import pytest
import torch
from torch import Tensor
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from tests.support.needs import slow
from titanlite.async_tp.layout_modes import Layout, identity, joined, relocated, reshaped, steps
from titanlite.async_tp.view_tracking import ViewTracker, path


def indices(layout: Layout) -> list[int]:
    """Elements of the flat source, in row-major order."""
    ranges = [range(0, size * stride, stride) for size, stride in layout.modes]
    return [layout.offset + sum(index) for index in itertools.product(*ranges)]


def moved(x: Tensor, choose: random.Random) -> Tensor:
    """Some random movement."""
    dim = choose.randrange(x.ndim)
    match choose.randrange(11):
        case 0:
            return x.permute(choose.sample(range(x.ndim), x.ndim))
        case 1:
            return x.transpose(0, dim)
        case 2:
            return x.flatten()
        case 3 if x.shape[dim] % 2 == 0:
            return x.unflatten(dim, (2, -1))
        case 4 if x.shape[dim] % 2 == 0:
            return torch.cat(x.chunk(2, dim), choose.randrange(x.ndim))
        case 5 if x.shape[dim] % 3 == 0:
            pieces = [x.narrow(dim, i * x.shape[dim] // 3, x.shape[dim] // 3) for i in range(3)]
            return torch.cat(pieces, choose.randrange(x.ndim))
        case 6 if x.shape[dim] > 1:
            return x.narrow(dim, x.shape[dim] // 2, x.shape[dim] - x.shape[dim] // 2)
        case 7:
            return x.unsqueeze(dim).contiguous()
        case 8 if x.ndim > 1:
            return x.flatten(dim - 1, dim) if dim else x.squeeze()
        case 9:
            return x.select(dim, choose.randrange(x.shape[dim]) - x.shape[dim])
        case 10:
            return torch.select_scatter(x.new_zeros(x.unsqueeze(dim).shape), x, dim, 0)
    return x


def chain(x: Tensor, seed: int) -> Tensor:
    """Some random movements, the same for each seed."""
    choose = random.Random(seed)
    for _ in range(choose.randint(1, 6)):
        x = moved(x, choose) if x.ndim else x
    return x


def traced(x: Tensor, seed: int) -> Graph:
    return make_fx(lambda x: chain(x, seed).sin(), tracing_mode="fake")(x).graph


@pytest.mark.parametrize("shape", [(12,), (4, 6), *slow(((2, 1, 6),)), (2, 3, 4, 2)])
def test_random_movements(shape):
    x, followed = torch.arange(math.prod(shape)).view(shape), 0
    for seed in range(60):
        (sin,) = (n for n in traced(x, seed).nodes if n.target == torch.ops.aten.sin.default)
        (last,) = sin.all_input_nodes
        source, layout = ViewTracker().trace(last)
        if source.op != "placeholder":  # a piece that no layout describes; what is followed has to be right
            continue
        followed += 1
        truth = chain(x, seed)
        assert [math.prod(n for n, _ in dim) for dim in layout.dims] == list(truth.shape)
        assert indices(layout) == truth.flatten().tolist()
        assert source not in path(last, source)
        how = steps(layout.dims, x.numel())
        if how is None:
            assert sorted(indices(layout)) != list(range(x.numel()))
        else:
            assert torch.equal(x.reshape(how.sizes).permute(how.order).reshape(how.shape), truth)
    assert followed > 40


def test_an_uneven_cut_has_no_layout():
    assert reshaped(Layout((((6, 4), (2, 1)),)), [4, 3]) is None
    assert reshaped(identity([6, 2]), [4, 3]) == Layout((((4, 3),), ((3, 1),)))


def test_joined():
    pieces = [Layout(((), ((3, 1),)), offset) for offset in (0, 6, 12)]
    assert joined(pieces, 0) == Layout((((3, 6),), ((3, 1),)))
    assert joined(pieces[:1], 0) == pieces[0]
    assert joined([pieces[0], pieces[1], Layout(((), ((3, 1),)), 9)], 0) is None
    assert joined(pieces[::-1], 0) is None
    assert joined([pieces[0], Layout(((), ((3, 2),)), 6)], 0) is None


def test_relocated():
    # [4, 6] flat, whose rows lie in another tensor in the order (2, 2) transposed.
    places = [(2, 12, 6), (2, 6, 12), (6, 1, 1)]
    assert relocated(((4, 6),), places) == ((2, 6), (2, 12))
    assert relocated(((2, 3), (3, 1)), places) == ((6, 1),)
    assert relocated(((3, 2), (2, 1)), places) == ((6, 1),)
    assert relocated(((3, 8),), places) is None
    assert relocated(((5, 6),), places) is None
