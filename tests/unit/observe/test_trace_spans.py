"""The events are those that torch 2.13's profiler writes on H100s with NCCL, and on CPUs with gloo, made short."""

import itertools
import json
from dataclasses import replace

import pytest

from titanlite.explain.waits import find_waits
from titanlite.observe.metrics import RunError
from titanlite.observe.peak_memory import ACTIVATIONS, BUFFERS, FLOAT8, FRAGMENTS, GATHERED, GRADIENTS
from titanlite.observe.step_profile import (
    ATTENTION,
    CASTS,
    COMPUTE,
    DATA_WAIT,
    MATMUL,
    OF_EXPERTS,
    OPTIMIZER,
    RECOMPILATION,
    VALIDATION,
    read_profiles,
)
from titanlite.observe.trace_spans import COMPILED_FRAME, STEP, ProfiledRun, summarise

T0 = 4.8e12  # µs, as traces count
NCCL = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def event(cat, name, start, end, tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": T0 + start, "dur": end - start, "tid": tid, "args": args}


def launched(name, at, start, end, number, tid=7, cat="kernel", **args):
    """A kernel, and the call that launched it."""
    launch = event("cuda_runtime", "cudaLaunchKernel", at, at + 1, correlation=number)
    return [launch, event(cat, name, start, end, tid, correlation=number, **args)]


def marks(*edges):
    return [
        event("user_annotation", f"{STEP}{11 + i}", start, end)
        for i, (start, end) in enumerate(itertools.pairwise(edges))
    ]


def summary(events, reserved=0, **run):
    trace = {"traceEvents": events, "baseTimeNanoseconds": 1_790_000_000_000_000_000}
    return summarise(trace, ProfiledRun(**run), clock_us=1.0, reserved=reserved)


ON_GPU = {
    "device": "cuda",
    "world": 4,
    "axes": {"2": "dp_shard", "3": "tp", "4": "ep"},
    "groups": {"dp_shard": [0, 1], "tp": [0, 2], "ep": [0, 2]},
}


def test_kernels_by_category_and_collectives_by_process_group():
    events = [
        *marks(0, 100),
        event("user_annotation", OPTIMIZER, 80, 99),
        event("gpu_user_annotation", OPTIMIZER, 200, 290, tid=7),  # of the device: says nothing new
        *launched("nvjet_tst_128x256", 1, 10, 20, 1),
        *launched("flash_fwd_kernel", 2, 20, 30, 2),
        *launched("_cast_rows", 3, 30, 40, 3),
        *launched("triton_poi_fused__to_copy_3", 4, 40, 45, 4),
        *launched("triton_poi_fused__to_copy_add_mul_3", 4, 45, 50, 5),
        *launched("triton_poi_fused_mul", 85, 60, 70, 6),  # the optimizer launched it
        *launched("nvjet_hsh_128x256", 85, 130, 140, 15),
        *launched(NCCL, 5, 40, 60, 7, 20, **{"Process Group Name": "2"}),
        *launched(NCCL, 6, 70, 80, 8, 20, **{"Process Group Name": "3"}),
        *launched(NCCL, 7, 80, 90, 9, 20, **{"Process Group Description": "mesh_tp", "Process Group Name": "9"}),
        *launched(NCCL, 8, 90, 100, 10, 20, **{"Process Group Name": "0"}),
        *launched(NCCL, 8, 120, 125, 14, 20, **{"Process Group Name": "4"}),
        event("user_annotation", "FSDP::all_gather (layers.0)", 9, 10),
        *launched("_meet", 9, 100, 110, 11),
        *launched("Memcpy PtoP (Device -> Device)", 9, 110, 120, 12, cat="gpu_memcpy"),
        *launched("_meet", 11, 140, 145, 16),  # of tokens
        *launched("Memcpy PtoP (Device -> Device)", 12, 145, 150, 17, cat="gpu_memcpy"),
        event("user_annotation", "gloo:all_reduce", 20, 30, tid=99),  # of objects, on the host
        event("cpu_op", "aten::mm", 1, 2),
        event("user_annotation", VALIDATION, 86, 98),  # a validation, whose kernels are of no step
        *launched("nvjet", 90, 91, 99, 13),
    ]
    found = summary(events, **ON_GPU)
    assert found.spans == {
        MATMUL: [(10, 20)],
        ATTENTION: [(20, 30)],
        CASTS: [(30, 45)],
        COMPUTE: [(45, 50)],
        OPTIMIZER: [(60, 70), (130, 140)],
        "communication dp_shard": [(40, 60), (100, 120)],
        "communication tp": [(70, 90)],
        "communication ep": [(120, 125), (140, 150)],
        "communication all ranks": [(90, 100)],
        VALIDATION: [(86, 99)],
    }
    assert found.collectives == {
        "dp_shard": [(40, 60)],
        "dp_shard, by copy engines": [(100, 110)],  # a copy meets nobody
        "tp": [(70, 80), (80, 90)],
        "ep": [(120, 125)],
        "ep, by copy engines": [(140, 145)],
        "all ranks": [(90, 100)],
    }


def test_collectives_of_experts_weights_meet_by_themselves():
    """They are of the axis of FSDP, but of ranks 0 and 2 alone: rank 0's wait there is none for rank 1."""
    own = f"dp_shard{OF_EXPERTS}"
    groups = {"dp_shard": [0, 1, 2, 3], own: [0, 2], "ep": [0, 1]}
    run = {"device": "cuda", "world": 4, "axes": {"2": "dp_shard", "7": own}, "groups": groups}
    events = [
        *marks(0, 100),
        *launched(NCCL, 5, 10, 20, 1, 20, **{"Process Group Name": "2"}),
        *launched(NCCL, 6, 30, 50, 2, 20, **{"Process Group Name": "7", "Process Group Description": "mesh_dp_shard"}),
    ]
    found = summary(events, **run)
    assert found.spans == {"communication dp_shard": [(10, 20), (30, 50)]}
    assert found.collectives == {"dp_shard": [(10, 20)], own: [(30, 50)]}
    late = replace(found, collectives={"dp_shard": [(10, 20)], own: [(45, 50)]})
    others = {"dp_shard": [0, 1, 2, 3], own: [1, 3], "ep": [0, 1]}
    ranks = [found, replace(found, groups=others), late, replace(late, groups=others, collectives=found.collectives)]
    waits = find_waits([replace(one, rank=rank) for rank, one in enumerate(ranks)])
    assert (waits.spans, waits.caused_us, waits.unmatched) == ({0: [(30, 45)]}, {2: 15}, [])


def test_a_collective_that_names_no_group_is_its_caller_s():
    events = [
        *marks(0, 100),
        event("user_annotation", "FSDP::all_gather (layers.0)", 5, 9),
        *launched(NCCL, 8, 60, 70, 1),
        *launched(NCCL.replace("AllGather", "AllReduce"), 6, 50, 60, 2),
        *launched(NCCL, 7, 40, 50, 3),
        *launched(NCCL, 20, 80, 90, 4),
    ]
    found = summary(events, **ON_GPU)
    assert found.collectives == {
        "dp_shard": [(40, 50), (60, 70)],
        "dp_replicate": [(50, 60)],
        "all ranks": [(80, 90)],
    }


def test_a_step_on_a_gpu_ends_with_the_last_kernel_that_was_launched_in_it():
    events = [
        *marks(0, 10, 20, 60),  # the host is ahead of the device
        *launched("nvjet", 1, 5, 40, 1),
        *launched("nvjet", 9, 40, 55, 2),
        *launched("nvjet", 12, 55, 90, 3),
        *launched("nvjet", 21, 95, 130, 4),
        event("user_annotation", DATA_WAIT, 20, 22),
    ]
    found = summary(events, **ON_GPU)
    assert [(edge.step, edge.start_us, edge.end_us) for edge in found.steps] == [
        (11, 0, 55),
        (12, 55, 90),
        (13, 90, 130),
    ]
    assert found.spans[DATA_WAIT] == [(20, 22)]


def test_graphs_that_were_compiled_in_the_window_are_counted():
    frames = [event("user_annotation", COMPILED_FRAME, start, start + 5) for start in (-10, 10, 20)]
    inner = event("cpu_op", "backend_compile (dynamo_timed)", 11, 14)
    found = summary([*marks(0, 100), *frames, inner], device="cpu")
    assert found.graphs == 2
    assert found.spans[RECOMPILATION] == [(10, 15), (20, 25)]


@pytest.mark.parametrize("axis", ["tp", "cp", "ep"])
def test_operators_of_a_cpu_and_gloo_s_collectives_for_their_callers(axis):
    calls = {  # around each call, its name, when it runs
        "FSDP::all_gather (layers.0)": ("c10d::_allgather_base_", 10, 20),
        "FSDP::post_backward_reduce (layers.0)": ("c10d::allreduce_", 20, 30),
        "_c10d_functional::all_gather_into_tensor": ("c10d::_allgather_base_", 30, 40),
        "something else": ("c10d::allreduce_", 40, 50),
    }
    events = [*marks(0, 100)]
    for around, (name, start, end) in calls.items():
        category = "user_annotation" if around.startswith("FSDP") else "cpu_op"
        events += [event(category, around, start, start + 3), event("cpu_op", name, start + 1, start + 2)]
        events += [event("user_annotation", "gloo:any", start + 1, end, tid=5)]
        events += [event("cpu_op", "aten::add", start + 2, end, tid=5)]  # gloo's own
    events += [
        event("cpu_op", "aten::linear", 60, 70),
        event("cpu_op", "aten::mm", 61, 69),
        event("cpu_op", "aten::_to_copy", 70, 80),
        event("cpu_op", "aten::copy_", 72, 78),
        event("cpu_op", "aten::copy_", 80, 82),
        event("user_annotation", OPTIMIZER, 85, 95),
        event("cpu_op", "aten::mul", 90, 94),
        event("cpu_op", "aten::bmm", 94, 95),
    ]
    found = summary(events, groups={axis: [0, 1]})
    assert found.collectives == {
        "dp_shard": [(11, 20)],
        "dp_replicate": [(21, 30)],
        axis: [(31, 40)],
        "all ranks": [(41, 50)],
    }
    assert found.spans["communication dp_replicate"] == [(21, 30)]
    assert found.spans[MATMUL] == [(60, 70)]
    assert found.spans[CASTS] == [(70, 80)]
    assert found.spans[OPTIMIZER] == [(90, 95)]
    assert found.spans[COMPUTE][-1] == (80, 82)


def memory(at, size, address, device=1):
    args = {"Bytes": size, "Addr": address, "Device Type": device, "Total Allocated": 0}
    return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": T0 + at, "tid": 1, "args": args}


def test_memory_at_the_peak_by_what_it_is_for():
    events = [
        *marks(0, 100),
        event("user_annotation", OPTIMIZER, 80, 90),
        event("user_annotation", "FSDP::all_gather (layers.0)", 5, 15),
        event("cpu_op", "titanlite::cast_rows", 20, 30),
        event("cpu_op", "aten::empty", 21, 29),
        memory(10, 100, 0xA),
        memory(25, 10, 0xB),
        memory(35, 1000, 0xC),
        memory(40, 5000, 0xD, device=0),  # of the host
        memory(45, 300, 0xE),  # the gradient: it stays until after the optimizer
        memory(50, -1000, 0xC),
        memory(55, -70, 0xF),  # of before
        memory(60, -10, 0xB),
        memory(61, -100, 0xA),
        memory(82, 20, 0x10),
        memory(95, -300, 0xE),
    ]
    held = {"parameters": 400, "optimizer": 800, "before": 1250}
    found = summary(events, reserved=3000, device="cuda", held=held)
    assert found.memory is not None
    assert found.memory.categories == {
        "parameters": 400,
        "optimizer": 800,
        BUFFERS: 50,
        GATHERED: 100,
        FLOAT8: 10,
        ACTIVATIONS: 1000,
        GRADIENTS: 300,
        FRAGMENTS: 340,
    }
    assert found.memory.allocated == 2660


def written(folder, rank, world=2, steps=(0, 100)):
    folder.mkdir(parents=True, exist_ok=True)
    found = summary([*marks(*steps), event("cpu_op", "aten::mm", 10, 20.123)], rank=rank, world=world)
    (folder / f"rank{rank}.json").write_text(found.to_json())
    return found


def test_a_summary_is_read_as_it_was_written_to_a_tenth_of_a_microsecond(tmp_path):
    one = [written(tmp_path / "profile", rank) for rank in (0, 1)]
    two = read_profiles(tmp_path)
    assert [profile.steps for profile in two] == [profile.steps for profile in one]
    assert two[1].spans == {MATMUL: [(10.0, 20.1)]}
    assert (two[1].rank, two[1].world, two[1].host) == (1, 2, one[1].host)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"spans": 1}, "rank1.json"),
        ({"version": 0}, "of another version"),
        ({"rank": 0}, "of another rank"),
        ({"steps": []}, "no step"),
        (None, "rank1.json"),
        ("absent", "no rank1.json"),
    ],
)
def test_a_profile_that_lacks_something_says_what(tmp_path, change, said):
    for rank in (0, 1):
        written(tmp_path / "profile", rank)
    path = tmp_path / "profile/rank1.json"
    if change == "absent":
        path.unlink()
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | change) if change else "{")
    with pytest.raises(RunError, match=said):
        read_profiles(tmp_path)


def test_all_ranks_of_another_window_are_said_at_once(tmp_path):
    for rank in range(4):
        written(tmp_path / "profile", rank, world=4, steps=(0, 50, 100) if rank in (1, 3) else (0, 100))
    with pytest.raises(RunError, match=r"2 problems") as refusal:
        read_profiles(tmp_path)
    assert "steps [11, 12] of 4 ranks" in str(refusal.value)
    assert [name in str(refusal.value) for name in ("rank1.json", "rank2.json", "rank3.json")] == [True, False, True]
