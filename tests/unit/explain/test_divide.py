import random

import pytest

from tests.support.profiles import profiled, rank_profile
from titanlite.explain.divide import HOST, STRAGGLER_WAIT
from titanlite.observe.step_profile import (
    ASIDE,
    ATTENTION,
    COMPUTE,
    DATA_WAIT,
    DEVICE_WORK,
    EVALUATION,
    MATMUL,
    RECOMPILATION,
)

SHARD, TP = "communication dp_shard", "communication tp"


def test_of_what_overlaps_on_a_gpu_work_comes_first_then_communication_then_the_host():
    spans = {
        MATMUL: [(0.0, 20.0)],
        ATTENTION: [(15.0, 30.0)],
        SHARD: [(25.0, 50.0)],  # 5 of it hidden
        TP: [(45.0, 60.0)],  # 5 of it beside the other axis
        DATA_WAIT: [(10.0, 70.0)],  # the host waits while the device works; only the last 10 cost time
        RECOMPILATION: [(80.0, 85.0)],
    }
    (division,) = profiled(rank_profile(spans)).divisions
    assert division.parts == {
        MATMUL: 15.0,
        ATTENTION: 15.0,
        SHARD: 20.0,
        TP: 10.0,
        DATA_WAIT: 10.0,
        RECOMPILATION: 5.0,
        HOST: 25.0,
    }
    assert division.hidden == {SHARD: 5.0, TP: 0.0}


def test_on_a_cpu_what_the_host_is_seen_at_has_the_operators_within_it():
    spans = {COMPUTE: [(0.0, 60.0)], DATA_WAIT: [(10.0, 20.0)], EVALUATION: [(50.0, 90.0)]}
    (division,) = profiled(rank_profile(spans, device="cpu")).divisions
    assert division.parts == {COMPUTE: 40.0, DATA_WAIT: 10.0, EVALUATION: 40.0, HOST: 10.0}


def test_an_interval_across_an_edge_counts_in_both_steps():
    first, second = profiled(rank_profile({MATMUL: [(60.0, 130.0)]}, steps=2)).divisions
    assert (first.step, first.parts[MATMUL], first.wall_us) == (11, 40.0, 100.0)
    assert (second.step, second.parts[MATMUL], second.wall_us) == (12, 30.0, 100.0)


def test_a_wait_is_what_a_collective_lasts_longer_than_on_the_rank_that_comes_last():
    early, late = {MATMUL: [(0.0, 10.0)], SHARD: [(10.0, 50.0)]}, {MATMUL: [(0.0, 40.0)], SHARD: [(40.0, 50.0)]}
    run = profiled(rank_profile(early, world=2), rank_profile(late, rank=1, world=2))
    first, second = run.divisions
    assert (first.parts[STRAGGLER_WAIT], first.parts[SHARD]) == (30.0, 10.0)
    assert (second.parts.get(STRAGGLER_WAIT, 0.0), second.parts[SHARD]) == (0.0, 10.0)
    assert run.waits.straggler == (1, 30.0)


def test_a_wait_behind_work_is_no_part_of_the_step():
    early = {MATMUL: [(0.0, 30.0)], SHARD: [(10.0, 50.0)]}
    run = profiled(rank_profile(early, world=2), rank_profile({SHARD: [(40.0, 50.0)]}, rank=1, world=2))
    assert run.divisions[0].parts[STRAGGLER_WAIT] == 10.0


def test_clocks_of_hosts_need_not_agree():
    early, late = {SHARD: [(10.0, 50.0)]}, {SHARD: [(40.0, 50.0)]}
    far = profiled(rank_profile(early, world=2), rank_profile(late, rank=1, world=2, origin_us=2e15))
    assert far.waits.straggler == (1, 30.0)


def test_groups_of_an_axis_wait_each_for_its_own():
    spans = [{SHARD: [(start, 50.0)]} for start in (10.0, 40.0, 30.0, 20.0)]
    groups = [[0, 1], [0, 1], [2, 3], [2, 3]]
    profiles = [
        rank_profile(found, rank=rank, world=4, groups={"dp_shard": group})
        for rank, (found, group) in enumerate(zip(spans, groups, strict=True))
    ]
    assert dict(profiled(*profiles).waits.caused_us) == {1: 30.0, 2: 10.0}


def test_ranks_with_unequal_numbers_of_collectives_are_not_matched_and_it_is_said():
    run = profiled(
        rank_profile({SHARD: [(10.0, 50.0), (60.0, 70.0)]}, world=2), rank_profile({SHARD: []}, rank=1, world=2)
    )
    assert run.waits.unmatched == ["dp_shard"]
    assert run.waits.straggler is None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_parts_of_any_intervals_sum_to_the_wall_time(device):
    draw = random.Random(0)
    for _ in range(50):
        spans = {}
        for name in (*DEVICE_WORK, SHARD, TP, DATA_WAIT, RECOMPILATION, *ASIDE):
            edges = sorted(draw.uniform(0, 300) for _ in range(2 * draw.randrange(6)))
            spans[name] = list(zip(edges[::2], edges[1::2], strict=True))
        run = profiled(rank_profile(spans, steps=3, device=device))
        for division in run.divisions:
            assert sum(division.parts.values()) == pytest.approx(division.wall_us, rel=1e-9)
        assert sum(run.parts.values()) == pytest.approx(run.wall_us, rel=1e-9)
