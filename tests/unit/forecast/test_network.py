"""Collectives between hosts: their time by size and placement, and published speeds on many hosts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli

from tests.support.copied_weights import TimeWithCopies, WithCopies
from titanlite import recipes
from titanlite.config.schema import Compile, Config, Training
from titanlite.config.toml_file import shipped_folder
from titanlite.forecast.activation_cost import block_costs
from titanlite.forecast.device_specs import Rates
from titanlite.forecast.network import Ranks, networks, placed
from titanlite.forecast.search import Candidate, Setting, gpu_candidates, optimizer_rules
from titanlite.forecast.step_time import StepTime, StepTimeModel
from titanlite.preflight.checked_run import checked_run
from titanlite.preflight.machine import machine_named

PUBLISHED = tomli.loads((Path(__file__).parents[2] / "data" / "published_scaling.toml").read_text())["series"]
PAGE = (Path(__file__).parents[3] / "docs" / "performance.md").read_text()
MB = 1e6


@pytest.mark.parametrize(
    ("size", "stride", "world", "host", "ranks"),
    [
        (8, 1, 8, 8, (8, 8)),
        (6, 1, 6, 8, (6, 6)),  # one host, not full
        (64, 1, 64, 8, (64, 8)),  # FSDP
        (8, 8, 64, 8, (8, 1)),  # replicas of a host each; FSDP beside TP 8
        (16, 4, 64, 8, (16, 2)),  # FSDP beside TP 4
        (16, 1, 32, 8, (16, 8)),  # TP over two hosts
        (2, 4, 64, 8, (2, 2)),  # two CP ranks of a host, beside TP 4
        (3, 1, 24, 8, (3, 1)),  # hosts do not hold whole groups
        (4, 16, 64, 4, (4, 1)),
    ],
)
def test_where_the_ranks_of_a_group_are(size: int, stride: int, world: int, host: int, ranks: Ranks) -> None:
    assert placed(size, stride, world, host) == ranks


@pytest.mark.parametrize(
    ("kind", "mb", "ranks", "us"),
    [
        ("all_gather", 185, (8, 8), 1000),  # within a host: bytes over the rate alone
        ("all_to_all", 185, (8, 8), 1000),
        ("all_reduce", 0, (1, 1), 0),
        # A ring by eight NICs is as fast as within the host; Simple: 15 steps, one between hosts.
        ("all_gather", 1850, (16, 8), 10_000 + 8.4 + 14 * 3.4 + 14),
        # By one NIC: the network alone counts.
        ("reduce_scatter", 457, (8, 1), 10_000 + 8.4 + 7 * 14),
        # Few bytes: LL128, which has short steps and less bandwidth.
        ("all_gather", 18.5, (64, 8), 100 / 0.92 + 14 + 56 * 1.9 + 7 * 4),
        # Around twice, or by a tree with few steps.
        ("all_reduce", 4570, (2, 1), 100_000 + 8.4 + 2 * 14),
        ("all_reduce", 4.57, (64, 1), 100 / 0.92 + 8.4 + 2 * 6 * 14),
        # Eight of the fifteen others are on the other host, and each rank has one NIC.
        ("all_to_all", 457, (16, 8), 10_000 * 8 / 15 + 8.4 + 14),
    ],
)
def test_the_time_of_a_collective(kind: str, mb: float, ranks: tuple[int, int], us: float) -> None:
    assert 1e6 * networks()["ib400"].seconds(kind, mb * MB, Ranks(*ranks), 185) == pytest.approx(us)


def of_run(flags: str, world: int, rates: Rates) -> tuple[StepTimeModel, StepTime]:
    """A step with the copies of torch's FSDP."""
    config = str(shipped_folder("configs") / "llama3_8b.toml")
    run = checked_run(["--config", config, "--data.document_mask=false", *flags.split()], world_size=world)
    assert run.save_list is not None
    memory = WithCopies(run.config, run.dims, run.float8, run.optimizer, world, host=rates.host)
    model = TimeWithCopies(memory, rates)
    return model, model.step(block_costs(memory.run, run.save_list))


@pytest.mark.parametrize("series", PUBLISHED, ids=lambda series: series["name"])
def test_published_speeds_fall_with_the_number_of_gpus_as_predicted(series: dict[str, Any]) -> None:
    """Relative to the smallest number, as absolute rates are of other trainers. The page has the last one."""
    rates = machine_named(series.get("gpu", "h100"), None, 16, series.get("network")).rates
    assert rates is not None
    rates, batch, found = replace(rates, host=series.get("host", 8)), series["local_batch"], list[tuple[float, float]]()
    for world, published in series["points"]:
        sequences = f"--training.local_batch_size {batch} --training.global_batch_size {series['sequences'] * world}"
        model, step = of_run(f"--training.seq_len 8192 {sequences} {series['flags']}", world, rates)
        found.append((model.tokens_per_second(step), published))
    (predicted, published), *others = found
    for more, seen in others:
        assert more / predicted == pytest.approx(seen / published, rel=0.06)
    gpus = f"{series['points'][0][0]} to {series['points'][-1][0]}"
    seen, expected = (
        f"{last / first - 1:.1%}" for last, first in zip(others[-1][::-1], (published, predicted), strict=True)
    )
    assert f"| {series['name']} | {gpus} | {seen} | {expected} |" in PAGE


def test_there_are_ten_published_points_of_two_trainers_with_fsdp2() -> None:
    of = [series for series in PUBLISHED if not series["name"].startswith("llm-foundry")]
    assert len({series["name"].split(",")[0].split()[0] for series in of}) == 2
    assert sum(len(series["points"]) - 1 for series in of) == 13


QWEN3 = "--model.name qwen3_moe --model.flavor 30B-A3B --training.seq_len 4096"


@pytest.mark.parametrize(
    ("flags", "world", "named"),
    [
        ("", 16, "gathers of weights over 16 ranks"),
        ("--parallelism.data_parallel_replicate_degree 4", 16, "sums of gradients over 4 replicas"),
        ("--parallelism.tensor_parallel_degree 8", 8, "collectives of tokens, none of them hidden"),
        (
            "--parallelism.tensor_parallel_degree 8 --parallelism.async_tensor_parallel",
            8,
            "collectives of tokens, none of them hidden",
        ),
        ("--parallelism.context_parallel_degree 8", 8, "collectives of tokens, none of them hidden"),
        (f"{QWEN3} --parallelism.expert_parallel_degree 8", 8, "collectives of tokens, none of them hidden"),
        ("--optimizer.recipe muon", 16, "reductions of gradients over 16 ranks"),
    ],
)
def test_every_layout_is_slower_over_a_slower_network(flags: str, world: int, named: str) -> None:
    """Hosts of four GPUs, and one host of all."""
    base = machine_named("h100", None, 16).rates
    assert base is not None
    run = f"--model.n_layers 2 --training.local_batch_size 1 --activation_checkpoint.recipe none {flags}"
    steps = [of_run(run, world, replace(base, host=16))[1].total]
    for network in networks().values():
        model, step = of_run(run, world, replace(base, host=4, network=network))
        assert model.between_hosts(step)[named] > 0
        steps.append(step.total)
    assert steps == sorted(set(steps))


def test_shards_span_fewer_hosts_where_rings_are_long() -> None:
    """Of 512 GPUs replicas win by the latency of a ring of 512; of 16, one group of shards uses all NICs of a host."""
    base = machine_named("h200", None, 512).rates
    assert base is not None
    run = "--training.seq_len 8192 --training.local_batch_size 1 --activation_checkpoint.recipe none"
    for world, replicas, is_faster in ((512, 4, True), (16, 2, False)):
        steps = [
            of_run(f"{run} --parallelism.data_parallel_replicate_degree {n}", world, base)[1].total
            for n in (1, replicas)
        ]
        assert (steps[1] < steps[0]) == is_faster


@pytest.mark.parametrize(("world", "replicas"), [(8, {1}), (24, {1, 3}), (48, {1, 2, 6}), (64, {1, 2, 4, 8})])
def test_a_new_run_is_tried_with_replicas_of_whole_hosts(world: int, replicas: set[int]) -> None:
    config = Config(compile=Compile(enable=True), training=Training(seq_len=2048, global_batch_size=1))
    dims = replace(recipes.model_dims(config), n_layers=1)
    base = Candidate(Setting(dims, None, optimizer_rules(config), machine_named("h100", None, 8).rates), world, config)
    assert {found.replicas for found in gpu_candidates(base)} == replicas
