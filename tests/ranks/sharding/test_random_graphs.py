"""Random small graphs under random annotations: what is planned is what runs, and the numbers are exact.

The graphs come from hypothesis in this process; two ranks then run all of them. Weights and inputs are small whole
numbers and operators keep them whole, so results are exact and compared as such.
"""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.support.ranks import run_ranks
from tests.support.sharding.execute import Executor, planned
from titanlite.errors import ShardingError
from titanlite.sharding.derive import derive
from titanlite.sharding.graph import Graph, export
from titanlite.sharding.plan import Plan

SHAPES = [(4, 8), (8, 4), (2, 4, 4), (4, 4, 2)]

Program = list[tuple[str, int, int]]


class Random(nn.Module):
    """A list of operators; each takes earlier tensors and skips what does not fit."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(shape)) for shape in [(8, 8), (4, 8), (8, 4), (4, 4)])

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        known = [a, b]
        for op, i, j in self.program:
            x, y = known[i % len(known)], known[j % len(known)]
            known.append(self.apply_one(op, x, y, j))
        new = {id(t): t for t in known if t is not a and t is not b}
        return tuple(new.values()) or (a * b,)

    def apply_one(self, op: str, x: Tensor, y: Tensor, n: int) -> Tensor:
        if op == "linear":
            weight = self.weights[n % 4]
            return nn.functional.linear(x, weight) if weight.shape[1] == x.shape[-1] else x
        if op == "matmul":
            return x @ y.transpose(-1, -2) if x.shape[-1] == y.shape[-1] and x.ndim == y.ndim == 2 else x
        if op == "add":
            return x + y if x.shape == y.shape else x + y.sum()
        if op == "mul":
            return x * y if x.shape == y.shape else x * 2
        if op == "reshape":
            return x.reshape(SHAPES[n % 4]) if x.numel() == 32 else x.flatten()[None]
        if op == "transpose":
            return x.transpose(0, -1)
        if op == "sum":
            return x.sum(n % x.ndim, keepdim=True)
        if op == "cat":
            return torch.cat((x, x * 3), n % x.ndim)
        if op == "split":
            first, second = x.split([x.shape[-1] // 2, x.shape[-1] - x.shape[-1] // 2], -1)
            return first if n % 2 else second * 2
        if op == "relu":
            return x.relu()
        assert op == "ones"
        return x + torch.ones(x.shape, dtype=x.dtype, device=x.device)


OPERATORS = ["linear", "matmul", "add", "mul", "reshape", "transpose", "sum", "cat", "split", "relu", "ones"]
programs = st.lists(
    st.tuples(st.sampled_from(OPERATORS), st.integers(0, 9), st.integers(0, 9)), min_size=4, max_size=10
)
placements = st.sampled_from(["tp:0", "tp:1", "replicate"])
annotated = st.dictionaries(
    st.sampled_from(["a", "b", "weights.0", "weights.1", "weights.2", "weights.3"]), placements, min_size=3, max_size=6
)


@pytest.mark.slow
def test_planned_is_executed_and_exact(tmp_path) -> None:
    found: list[tuple[Random, Graph, Plan]] = []

    @settings(
        max_examples=120,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs, annotated)
    def collect(program: Program, annotations: dict[str, str]) -> None:
        with torch.device("meta"):
            model = Random(program).double()
            inputs = [torch.empty(4, 8, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        graph = export(model, inputs)
        try:
            found.append((model, graph, derive(graph, 2, annotations)))
        except ShardingError as error:
            assert "sharding annotations" in str(error)  # noqa: PT017

    collect()
    kinds = Counter(kind for _, _, plan in found for move in plan.moves for kind in (move.forward, move.backward))
    assert len(found) >= 100
    assert min(kinds[kind] for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")) >= 10, kinds

    def body() -> None:
        mesh = init_device_mesh("cpu", (2,))
        for number, (model, graph, plan) in enumerate(found):
            try:
                exact(model, graph, plan, Executor(graph, plan, mesh), number)
            except Exception as error:
                raise AssertionError(f"{model.program}\n{plan.tensors}\n{plan.steps}") from error
        dist.barrier()

    run_ranks(body, tmp_path)


def exact(model: Random, graph: Graph, plan: Plan, executor: Executor, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data = torch.randint(-2, 3, parameter.shape, generator=random).double()
    inputs = [torch.randint(-2, 3, (4, 8), generator=random).double().requires_grad_() for _ in range(2)]
    state = dict(model.named_parameters()) | {"a": inputs[0], "b": inputs[1]}
    expected = model(*inputs)
    parts = {
        name: executor.part(state[name].detach(), plan.tensors[name].placement).clone().requires_grad_()
        for node, name in graph.names.items()
        if node.op == "placeholder"
    }
    got = executor.run(parts)
    forward = {k: n for k, n in executor.executed.items() if k[1] == "forward"}
    assert forward == {k: n for k, n in planned(plan).items() if k[1] == "forward"}
    places = [plan.tensors[graph.names[node]].placement for node in graph.outputs]
    for e, g, p in zip(expected, got, places, strict=True):
        assert torch.equal(g, executor.part(e, p))
    # In both, gradients of the outputs 1, 2, …: every one of them reaches everything that is trained.
    grads = [torch.full_like(e, n + 1) for n, e in enumerate(expected)]
    torch.autograd.backward(expected, grads)
    torch.autograd.backward(got, [executor.part(g, p) for g, p in zip(grads, places, strict=True)])
    for name, part in parts.items():
        whole = state[name].grad
        if whole is not None:
            assert torch.equal(part.grad, executor.part(whole, plan.tensors[name].placement)), name
    assert executor.executed == planned(plan)
