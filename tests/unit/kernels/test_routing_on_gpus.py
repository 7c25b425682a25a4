"""Device code of routing: how it is compiled, and its values on GPUs at models' shapes."""

import pytest
import torch
from torch import Tensor

from tests.support.compile_only import accesses, compiling
from tests.support.needs import slow
from tests.support.numbers import F32, normal, within
from titanlite.kernels.device.expert_rows import (
    launch_combine,
    launch_gather_rows,
    launch_row_dots,
    launch_spread_rows,
)
from titanlite.kernels.device.routing import launch_route, launch_route_grad
from titanlite.kernels.routing import combine, expert_rows, gather_rows, route, router_logits, row_dots, spread_rows


@pytest.mark.parametrize(("D", "K"), [(1536, 8), (4096, 2), *slow((2048, 8), (8192, 8))])
def test_code_for_sm_90_moves_16_bytes_of_a_row_at_once(D, K):
    x, o, rows = torch.zeros(8, D, dtype=torch.bfloat16), torch.zeros(8 * K, D, dtype=torch.bfloat16), torch.zeros(8, K)
    rows, weights = rows.int(), rows
    with compiling() as compiled:
        launch_gather_rows(x, rows.flatten(), K)
        launch_combine(o, rows, weights)
        launch_spread_rows(x, rows, weights, 8 * K)
        launch_row_dots(x, o, rows)
    found = {name: accesses(kernel) for name, kernel in compiled.items()}
    # 256 threads have 8,192 numbers of four rows, and the slots of these; of a token each has 16 bytes of each row.
    assert found["_gather_rows"]["ld", 4] in (4 + 1, 4 + 2)  # slots of rows before, too
    assert found["_gather_rows"]["st", 4] == 4
    assert (found["_combine_rows"]["ld", 4], found["_combine_rows"]["st", 4]) == (K, 1)
    assert (found["_spread_rows"]["ld", 4], found["_spread_rows"]["st", 4]) == (1, K)
    assert found["_row_dots"]["ld", 4] >= 4
    for kernel in found.values():  # all else is a row's number or weight
        assert kernel["ld", 2] <= 2
        assert kernel["st", 2] == 0


@pytest.mark.parametrize(("E", "K"), [(128, 8), *slow((8, 2), (512, 16))])
def test_code_for_sm_90_reads_and_writes_all_logits_by_16_bytes(E, K):
    """Once each: 16 for each of 128 threads."""
    logits, choices = torch.zeros(64, E), torch.zeros(64, K, dtype=torch.int32)
    with compiling() as compiled:
        launch_route(logits, None, K, "softmax", True, 1.0)
        launch_route_grad(torch.zeros(64, K), logits, choices, "softmax", False, 1.0)
    found = {name: accesses(kernel) for name, kernel in compiled.items()}
    assert found["_route"]["ld", 4] == found["_route_grad"]["st", 4] == 4
    assert found["_route_grad"]["ld", 4] == (12 if K == 16 else 4)  # choices and gradients of 16 slots by 16 bytes too


MODELS = {"Qwen3-30B-A3B": (16_384, 2048, 128, 8), "Mixtral 8x7B": (16_384, 4096, 8, 2)}  # M, D, E, K


def routed(x: Tensor, router: Tensor, score: str, normalised: bool) -> list[Tensor]:
    """Every operator, forward and backward, at a model's shapes."""
    E, K = len(router), 8 if len(router) == 128 else 2
    logits = router_logits(x, router)
    weights, choices = route(logits, None, K, score, normalised, 1.0)
    rows, slots, offsets = expert_rows(choices, 0, E)
    o = gather_rows(x, slots, K)
    y, spread = combine(o, rows, weights), spread_rows(x, rows, weights, len(slots))
    of_weights = row_dots(x, o, rows)
    of_logits = torch.ops.titanlite.route_grad(of_weights, logits, choices, score, normalised, 1.0)
    of_x, of_router = torch.ops.titanlite.router_logits_grad(of_logits, x, router)
    return [logits, weights, choices, rows, slots, offsets, o, y, spread, of_weights, of_logits, of_x, of_router]


@pytest.mark.gpu
@pytest.mark.parametrize(("score", "normalised"), [("softmax", True), ("softmax", False), ("sigmoid", True)])
@pytest.mark.parametrize("model", MODELS)
def test_the_definitions_at_a_models_shapes(model, score, normalised):
    """Step by step: each has the device's own results as its inputs."""
    M, D, E, K = MODELS[model]
    x, router = normal(M, D, dtype=torch.bfloat16).cuda(), (normal(E, D, seed=1) / D**0.5).bfloat16().cuda()
    found = routed(x, router, score, normalised)
    logits, weights, choices, rows, slots, offsets, o, y, spread, of_weights, of_logits, of_x, of_router = found
    eps = torch.finfo(torch.bfloat16).eps
    close = torch.testing.assert_close
    sizes = x.double().abs() @ router.double().abs().t()
    assert ((logits - x.double() @ router.double().t()).abs() <= D * F32 * sizes).all()
    wanted = route.definition(logits, None, K, score, normalised, 1.0)
    close(weights, wanted[0], rtol=(2 + 2 * float(logits.abs().max()) + E + 8) * F32, atol=0)
    assert torch.equal(choices, wanted[1])
    for got, want in zip((rows, slots, offsets), expert_rows.definition(choices, 0, E), strict=True):
        assert torch.equal(got, want)
    assert torch.equal(o, gather_rows.definition(x, slots, K))
    # A product that is fused with its sum rounds otherwise, and so may the last bit of the result.
    sizes = combine.definition(o.abs().double(), rows, weights.double())
    assert ((y - combine.definition(o.double(), rows, weights.double())).abs() <= (eps / 2 + 2 * K * F32) * sizes).all()
    assert torch.equal(spread, spread_rows.definition(x, rows, weights, M * K))
    sizes = row_dots.definition(x.abs(), o.abs(), rows)
    assert ((of_weights - row_dots.definition(x.double(), o.double(), rows)).abs() <= D * F32 * sizes).all()
    truth = torch.ops.titanlite.route_grad.default.definition(
        of_weights.double(), logits.double(), choices, score, normalised, 1.0
    )
    largest = of_weights.abs().amax(1, keepdim=True) * K
    slack = 2 * (2 + 2 * float(logits.abs().max()) + E + 8) * F32
    assert ((of_logits - truth).abs() <= slack * largest).all()
    grad = of_logits.bfloat16().double()
    for got, left, right in ((of_x, grad, router.double()), (of_router, grad.t(), x.double())):
        assert within(got, left @ right, left.shape[1] * F32 * (left.abs() @ right.abs()))


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_two_runs_and_replays_of_a_graph_give_the_same_bits(model):
    M, D, E, _ = MODELS[model]
    x, other = (normal(M, D, seed=seed, dtype=torch.bfloat16).cuda() for seed in (0, 5))
    router = (normal(E, D, seed=1) / D**0.5).bfloat16().cuda()
    wanted, of_other = routed(x, router, "softmax", True), routed(other, router, "softmax", True)
    given, graph = x.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = routed(given, router, "softmax", True)
    for tokens, results in ((x, wanted), (other, of_other), (x, routed(x, router, "softmax", True))):
        given.copy_(tokens)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, results, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("expert", [0, 77, 127])
def test_all_tokens_on_one_expert(expert):
    choices = torch.full((16_384, 1), expert, dtype=torch.int32, device="cuda")
    for first, count in ((0, 128), (64, 32), (expert, 1)):
        wanted = expert_rows.definition(choices, first, count)
        assert all(torch.equal(a, b) for a, b in zip(expert_rows(choices, first, count), wanted, strict=True))


@pytest.mark.gpu
def test_what_kernels_do_not_take_is_refused():
    rows = torch.zeros(3, 1, dtype=torch.int32, device="cuda")
    x = torch.zeros(3, 8, dtype=torch.float64, device="cuda")
    with pytest.raises(TypeError, match="float64 on a GPU; want float32"):
        route(x, None, 1, "softmax", True, 1.0)
    with pytest.raises(TypeError, match="rows of experts: float64 on a GPU"):
        combine(x, rows, None)
    with pytest.raises(TypeError, match=r"weights are torch\.bfloat16 on a GPU; want float32"):
        combine(x.bfloat16(), rows, torch.ones(3, 1, dtype=torch.bfloat16, device="cuda"))
