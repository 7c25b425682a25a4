"""Samples are the same under every layout, and leave training as it is."""

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.needs import slow
from tests.support.ranks import run_ranks
from tests.support.short_run import assemble, checked
from titanlite.observe.observer import Sample
from titanlite.training.samples import Sampler

FLAGS = (
    "--validation.enable=true",
    '--validation.samples=["import sys", "", "def parse_args(self"]',
    "--validation.sample_tokens=24",
    "--model.n_layers=2",
)
MOE = ("--model.name=qwen3_moe", "--model.flavor=debug")
LAYOUTS = {
    "FSDP 2": (2, ()),
    "TP 2": (2, ("--parallelism.tensor_parallel_degree=2",)),
    "CP 2": (2, ("--parallelism.context_parallel_degree=2", "--training.seq_len=256")),
    "EP 2": (2, (*MOE, "--parallelism.expert_parallel_degree=2")),
    "TP 2, experts": (2, (*MOE, "--parallelism.tensor_parallel_degree=2")),
    "async TP 2 × FSDP 2": (
        4,
        ("--parallelism.tensor_parallel_degree=2", "--parallelism.async_tensor_parallel=true"),
    ),
    "rowwise": (1, ("--float8.recipe=rowwise",)),
}


def samples(folder: Path, world: int, *flags: str) -> list[Sample]:
    """What all ranks make with the weights of the seed, four times as large, so that texts have several letters."""
    folder.mkdir()
    asked = checked(folder, world, (*FLAGS, *flags))

    def body() -> None:
        run = assemble(asked)
        for parameter in run.parameters:
            if parameter.ndim == 2:
                parameter.data.mul_(4)
        run.model.eval()
        tokens = list[str]()
        made = Sampler(asked, run).samples(tokens.append)
        assert len(tokens) == 24  # each is told to the watchdog
        (folder / f"{dist.get_rank()}.json").write_text(json.dumps(made))

    run_ranks(body, folder, world)
    of_ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
    assert all(made == of_ranks[0] for made in of_ranks)
    return [Sample(*sample) for sample in of_ranks[0]]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, list[Sample]]:
    folder = tmp_path_factory.mktemp("single")
    return {has_experts: samples(folder / str(has_experts), 1, *MOE * has_experts) for has_experts in (False, True)}


@pytest.mark.parametrize("layout", ["FSDP 2", "TP 2", *slow("CP 2", "EP 2", "TP 2, experts", "async TP 2 × FSDP 2")])
def test_every_layout_says_what_one_process_says(single: dict[bool, list[Sample]], layout: str, tmp_path: Path) -> None:
    world, flags = LAYOUTS[layout]
    truth = single[MOE[0] in flags]
    assert [sample.prompt for sample in truth] == ["import sys", "", "def parse_args(self"]
    assert len({sample.text for sample in truth}) == 3
    assert samples(tmp_path / "run", world, *flags) == truth


def test_float8_has_samples(tmp_path: Path) -> None:
    world, flags = LAYOUTS["rowwise"]
    assert all(sample.text for sample in samples(tmp_path / "run", world, *flags))
