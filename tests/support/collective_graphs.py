"""Graphs of collectives and matmuls, before and after the pass that fuses them."""

import copy
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from titanlite.async_tp.apply import Pair, fuse_collective_matmuls

c10d = torch.ops._c10d_functional
F8 = torch.float8_e4m3fn


class Graphs(NamedTuple):
    """One graph before and after the pass."""

    plain: Callable
    fused: Callable
    pairs: list[Pair]
    graph: Graph


def around_the_pass(gm: GraphModule) -> Graphs:
    graph = copy.deepcopy(gm.graph)
    for node in graph.find_nodes(op="call_function", target=c10d.reduce_scatter_tensor.default):
        source = node.args[0]
        if not source.meta["val"].is_contiguous():  # the compiler sees to it, and run as it is torch 2.11 refuses it
            with graph.inserting_before(node):
                node.replace_input_with(source, graph.call_method("contiguous", (source,)))
    plain = GraphModule(gm, graph).forward  # the compiler's own is generated only when it is called
    pairs = fuse_collective_matmuls(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return Graphs(plain, gm.forward, pairs, gm.graph)


def group() -> str:
    return dist.group.WORLD.group_name


def tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, same: bool = False) -> Tensor:
    """Random numbers, different on each rank unless `same`."""
    rank = 0 if same else dist.get_rank()
    generator = torch.Generator().manual_seed(1000 * rank + 10 * seed + math.prod(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def gather(x: Tensor, dim: int = 0, spelling: str = "split") -> Tensor:
    """All-gather along a dim, as torch spells it: by split, by slices (2.13), by views (batch of 1) or as bytes."""
    n, dtype = dist.get_world_size(), x.dtype
    if spelling == "bytes" or dtype == F8:
        x = x.view(torch.uint8 if dtype == F8 else torch.int64)
    whole = c10d.wait_tensor(c10d.all_gather_into_tensor(x.contiguous(), n, group()))
    dim %= x.ndim
    if dim:
        if spelling == "view":
            whole = (
                whole.view(n, *x.shape).movedim(0, dim).reshape(*x.shape[:dim], n * x.shape[dim], *x.shape[dim + 1 :])
            )
        elif spelling == "slices":
            whole = torch.cat([whole.narrow(0, i * x.shape[0], x.shape[0]) for i in range(n)], dim)
        else:
            whole = torch.cat(whole.split(x.shape[0]), dim)
    return whole.view(dtype) if x.dtype != dtype else whole


def scatter(x: Tensor, dim: int = 0, op: str = "sum") -> Tensor:
    n = dist.get_world_size()
    if dim % x.ndim:
        x = torch.cat(x.chunk(n, dim))
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(x, op, n, group()))


def traced(f: Callable, *inputs: Tensor) -> GraphModule:
    gm = make_fx(lambda *xs: f(*xs), select_decomp_table(), tracing_mode="fake")(*inputs)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm
