"""The collective matmuls on all GPUs of this machine, and on eight ranks; and the program that tests them, on none."""

import random

import pytest
import torch

from tests.gpu.collective_gpu import run


@pytest.mark.gpu
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("world", sorted({8, max(2, min(torch.cuda.device_count(), 8))}))
def test_on_gpus(world):
    shared = world > torch.cuda.device_count()
    failed = [result for result in run(world, only=f"all-{world}" if shared else "") if result.problems]
    assert not failed, "\n".join(map(str, failed))


@pytest.mark.slow
def test_over_gloo():
    results = run(2, "cpu", only="out of step", timeout_s=60)
    names = ["operators out of step all-2", "network out of step all-2"]
    assert [(result.name, result.problems) for result in results] == [(name, []) for name in names]


def test_only_must_match():
    with pytest.raises(ValueError, match="no check of 2 ranks on cpu has 'out of stap' in its name"):
        run(2, "cpu", only="out of stap")


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_piece_is_there_when_this_operator_has_published_it(ranks):
    """Not where its word is of an operator long ago, however far the count has come since."""
    from tests.gpu.published_pieces import published
    from titanlite.kernels.device.specialised_protocol import N_CHUNKS

    choose, n = random.Random(ranks), ranks * N_CHUNKS.value
    for number in (0, 5, 2**31 - 2, 2**31 - 1, -(2**31), 1000 - 2**31, -2):
        now = (number + 1 + 2**31) % 2**32 - 2**31
        words = [choose.choice((now, number, 7 - 2**31, 3, 0)) for _ in range(n)]
        wanted = {piece for piece, word in enumerate(words) if word == now}
        assert published(words, number, ranks) == wanted, number


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
