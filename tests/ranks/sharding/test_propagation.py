"""Placements and collectives of nvFuser's cases: as planned there, and as computed by four ranks in float64."""

from collections import Counter

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.support.ranks import run_ranks
from tests.support.sharding.cases import CASES, Tied
from tests.support.sharding.execute import compare_with_one_process
from titanlite.sharding.derive import derive
from titanlite.sharding.graph import Graph, export
from titanlite.sharding.plan import Plan, placement_text


def planned_case(name: str, small: bool = False) -> tuple[torch.nn.Module, list[torch.Tensor], Graph, Plan]:
    case = CASES[name]
    with torch.device("meta"):
        model, shapes = case.build(small)
        is_tokens = isinstance(model, Tied)
        inputs = [
            torch.empty(shape, dtype=torch.long) if is_tokens else torch.empty(shape, requires_grad=True)
            for shape in shapes
        ]
    model, inputs = model.double(), [x if is_tokens else x.double().detach().requires_grad_() for x in inputs]
    graph = export(model, inputs)
    return model, inputs, graph, derive(graph, min(case.ranks, 4) if small else case.ranks, case.annotations)


@pytest.mark.parametrize("name", CASES)
def test_placements_and_collectives(name: str) -> None:
    case, plan = CASES[name], planned_case(name)[-1]
    assert {tensor: placement_text(plan.tensors[tensor].placement) for tensor in case.placements} == case.placements
    assert Counter(move.forward for move in plan.moves if move.forward) == case.forward
    assert Counter(move.backward for move in plan.moves if move.backward) == case.backward


def test_every_case_on_four_ranks(tmp_path) -> None:
    cases = {name: planned_case(name, small=True) for name in CASES}

    def body() -> None:
        for name, (model, inputs, graph, plan) in cases.items():
            print(name)
            mesh = init_device_mesh("cpu", (4 // plan.ranks, plan.ranks), mesh_dim_names=("copies", "tp"))
            torch.manual_seed(0)
            model.to_empty(device="cpu")
            if isinstance(model, Tied):  # to_empty gave each name a tensor of its own
                model.output.weight = model.embedding.weight
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter)
            given = [
                torch.randn(x.shape, dtype=torch.float64, requires_grad=True)
                if x.is_floating_point()
                else torch.randint(0, 32, x.shape)
                for x in inputs
            ]
            compare_with_one_process(model, given, graph, plan, mesh["tp"])

    run_ranks(body, tmp_path, world=4)
