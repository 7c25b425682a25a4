"""The collective matmuls on all GPUs of this machine, and on eight ranks; and the program that tests them, on none."""

import random

import pytest
import torch

from tests.gpu.collective_checks import names
from tests.gpu.collective_gpu import Result, run

GPUS = torch.cuda.device_count()
WORLDS = sorted({8, max(2, min(GPUS, 8))})
CHECKS = [(world, name) for world in WORLDS for name in names(world, "cuda", f"all-{world}" if world > GPUS else "")]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[tuple[int, str], Result]:
    """Run the selected checks, those of a world side by side: ranks are slow to start, and kernels to compile."""
    items = [item for item in request.session.items if getattr(item, "function", None) is test_on_gpus]
    todo: dict[int, list[str]] = {}
    for item in items:
        todo.setdefault(item.callspec.params["world"], []).append(item.callspec.params["name"])  # type: ignore[attr-defined]
    return {(world, result.name): result for world, checks in todo.items() for result in run(world, checks)}


@pytest.mark.gpu
@pytest.mark.timeout(1600 * len(WORLDS))
@pytest.mark.parametrize(("world", "name"), CHECKS)
def test_on_gpus(world: int, name: str, results: dict[tuple[int, str], Result]) -> None:
    assert not results[world, name].problems, str(results[world, name])


@pytest.mark.slow
def test_over_gloo():
    todo = names(2, "cpu", "out of step")
    assert todo == ["operators out of step all-2"]
    results = run(2, todo, "cpu", timeout_s=60)
    assert [(result.name, result.problems) for result in results] == [(name, []) for name in todo]


def test_only_must_match():
    with pytest.raises(ValueError, match="no check of 2 ranks on cpu has 'out of stap' in its name"):
        names(2, "cpu", "out of stap")


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_chunk_is_ready_when_this_operator_has_set_its_flag(ranks):
    """Not where its word is of an operator long ago, however far the count has come since."""
    from tests.gpu.ready_chunks import ready
    from titanlite.kernels.device.specialised_protocol import N_CHUNKS

    choose, n = random.Random(ranks), ranks * N_CHUNKS.value
    for number in (0, 5, 2**31 - 2, 2**31 - 1, -(2**31), 1000 - 2**31, -2):
        now = (number + 1 + 2**31) % 2**32 - 2**31
        words = [choose.choice((now, number, 7 - 2**31, 3, 0)) for _ in range(n)]
        wanted = {chunk for chunk, word in enumerate(words) if word == now}
        assert ready(words, number, ranks) == wanted, number


@pytest.mark.gpu
def test_each_capture_has_a_number_which_streams_take_on_with_a_fork():
    from titanlite.kernels.device.channel import _capture

    origin, forked, other = (torch.cuda.Stream() for _ in range(3))
    of = lambda *streams: [_capture(stream.cuda_stream) for stream in streams]  # noqa: E731
    numbers = []
    for _ in range(2):
        assert of(origin, forked, other) == [0, 0, 0]
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=origin):
            numbers += of(origin)
            assert of(forked) == [0]
            forked.wait_stream(origin)
            with torch.cuda.stream(forked):
                torch.cuda._sleep(1)
            origin.wait_stream(forked)
            torch.cuda._sleep(1)
            assert of(origin, forked, other) == [numbers[-1], numbers[-1], 0]
    assert 0 < numbers[0] != numbers[1] > 0
