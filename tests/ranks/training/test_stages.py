"""Mixtures and stages in real runs: what the rows and checkpoints say, resumes at boundaries, new weights, branches."""

import argparse
import difflib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tomli_w

from titanlite.checkpoint.saved_state import read_state
from titanlite.commands import main
from titanlite.observe.metric_table import AXES, METRICS

if TYPE_CHECKING:
    from tests.support.launched import Desk, Ended

RAMP = [
    {"from_tokens": 512, "seq_len": 32},
    {"from_tokens": 2000, "seq_len": 64, "global_batch_size": 32, "local_batch_size": 4, "lr_decay_to": 0.5},
]
STARTS, PER_STEP, LAST = (0, 4, 10), (128, 256, 2048), 14  # from 8 sequences of 16 tokens to 32 of 64


def write(
    desk: "Desk",
    name: str,
    weights: dict[str, float] | None = None,
    stages: list[dict[str, object]] = RAMP,
    tokens: int = 10_000,
    path: str = "",
) -> Path:
    """A config of two sources and stages, which starts from what is at `path`."""
    for module in (argparse, difflib):
        (desk.folder / f"{module.__name__}.txt").write_text(Path(str(module.__file__)).read_text())
    sources = {"args": desk.folder / "argparse.txt", "diff": desk.folder / "difflib.txt"}
    weights = weights or {"args": 0.75, "diff": 0.25}
    mixture = [{"name": of, "source": str(path), "weight": weights[of]} for of, path in sources.items()]
    table: dict[str, dict[str, object]] = {
        "job": {"name": name, "dump_folder": str(desk.folder / "runs")},
        "model": {"flavor": "debug", "n_layers": 1, "dim": 64, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 128},
        "data": {"mixture": mixture, "stage": stages, "cache_dir": str(desk.folder / "cache")},
        "training": {"tokens": tokens, "seq_len": 16, "local_batch_size": 2, "global_batch_size": 8},
        "optimizer": {"lr": 2e-3},
        "lr_scheduler": {"warmup_tokens": 300, "decay_type": "linear"},
        "compile": {"enable": False},
        "checkpoint": {"interval": 100, "initial_load_path": path},
    }
    table["training"]["mixed_precision_param"] = "float32"
    file = desk.folder / f"{name}.toml"
    file.write_text(tomli_w.dumps(table))
    return file


def ended(desk: "Desk", name: str) -> "Ended":
    from tests.support.launched import Ended  # slow to import

    return Ended(desk.folder / "runs" / name, (desk.folder / "runs" / name / "logs" / "rank0.log").read_text())


def tokens_after(step: int) -> int:
    """By hand: 4 steps of 128 tokens, 6 of 256, then of 2048."""
    counted = [PER_STEP[0]] * 4 + [PER_STEP[1]] * 6 + [PER_STEP[2]] * (LAST - 10)
    return sum(counted[:step])


@pytest.fixture(scope="module")
def ramp(desk: "Desk") -> "Ended":
    desk.rerun(write(desk, "ramp"), world=2)
    return ended(desk, "ramp")


def test_a_ramp_says_tokens_rates_and_shares(ramp: "Ended") -> None:
    rows = ramp.steps
    assert [row["tokens"] for row in rows] == [tokens_after(step) for step in range(1, LAST + 1)]
    for step, row in enumerate(rows, 1):
        before, after = tokens_after(step - 1), tokens_after(step)
        left = 1 - 0.5 * (before - 2048) / (10_000 - 2048) if step > 10 else 1.0  # linear, to half of the peak
        rate = 2e-3 * (after / 300 if after <= 300 else left)
        assert row["lr"] == pytest.approx(rate, rel=1e-12)
        assert row["share.args"] + row["share.diff"] == pytest.approx(1)
        # Within a sample of what was asked, of the longest, in each of three stages.
        assert abs(row["share.args"] * after - 0.75 * after) < 16 + 32 + 64
    entry = ramp.receipt["data.mixture"]["applied"]
    assert entry["args"]["share"] == pytest.approx(rows[-1]["share.args"], abs=1e-6)
    assert entry["diff"]["epochs"] == pytest.approx(rows[-1]["epoch.diff"], abs=1e-4)
    masked = ramp.receipt["data.document_mask"]["applied"]
    assert (masked["sources"], masked["separators"]) == (2, {"data.mixture[0].source": 0, "data.mixture[1].source": 0})
    assert masked["documents in this rank's first step"] == 4  # of 8 samples on two ranks, each in the midst of a text
    assert masked["tokens attended to in it, in the mean"] == 8.5  # 1 to 16
    stages = ramp.receipt["data.stage"]["applied"]
    assert [stages[f"from_step_{start + 1}"]["from_tokens"] for start in STARTS] == [0, 512, 2048]


def test_validate_says_what_each_stage_takes(desk: "Desk", ramp: "Ended", capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(write(desk, "told"))]) == 0
    said = f"  batch     128, then 256, then 2,048 tokens a step, {tokens_after(LAST):,} in {LAST} steps\n"
    assert said in capsys.readouterr().out


def test_losses_of_sources_make_the_loss(ramp: "Ended") -> None:
    """In a step of 8 samples, 6 of one source: the document mask leaves no target out of these texts."""
    assert {key.partition(".")[0] for row in ramp.rows for key in row} <= {*AXES, *METRICS}  # all are declared
    for row in ramp.steps[:4]:
        assert (6 * row["loss.args"] + 2 * row["loss.diff"]) / 8 == pytest.approx(row["loss"], rel=1e-5)


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_is_resumed_at_each_boundary_is_the_same(desk: "Desk", ramp: "Ended", world: int) -> None:
    config = write(desk, f"boundaries{world}")
    for stop in (*STARTS[1:], 0):
        desk.rerun(config, "--job.stop_after", str(stop), world=world)
    again = ended(desk, f"boundaries{world}")
    columns = ("step", "tokens", "lr", "share.args", "epoch", "epoch.diff")
    assert [[row[key] for key in columns] for row in again.steps] == [
        [row[key] for key in columns] for row in ramp.steps
    ]
    if world == 2:
        assert again.trained() == ramp.trained()
        assert again.content(LAST) == ramp.content(LAST)
    else:  # another order of additions, in float32
        assert again.losses() == pytest.approx(ramp.losses(), rel=1e-3)
    states = [read_state(run.folder / "checkpoints" / f"step-{LAST:08d}", LAST).stages for run in (ramp, again)]
    assert states[0] == states[1]


@pytest.mark.slow
def test_new_weights_begin_a_stage_and_a_branch_goes_on(desk: "Desk", capsys: pytest.CaptureFixture[str]) -> None:
    other = {"args": 0.25, "diff": 0.75}
    desk.rerun(write(desk, "weights", stages=[], tokens=1024), "--job.stop_after", "3")
    changed = write(desk, "weights", other, [], 1024)
    desk.rerun(changed, "--job.stop_after", "6")
    run = ended(desk, "weights")
    change = "from step 4 on, after 384 tokens: weights args 0.75, diff 0.25 → args 0.25, diff 0.75"
    assert run.output.count(change) == 1
    assert run.steps[-1]["share.args"] == 0.5  # 18 of 24, then 6 of 24
    path = str(run.folder / "checkpoints" / "step-00000006")
    anneal = [{"from_tokens": 768, "weights": {"diff": 1.0}, "lr_decay_to": 0.0}]
    branch = write(desk, "branch", other, anneal, 1024, path)
    assert main(["validate", str(branch)]) == 0
    desk.rerun(branch)
    annealed = ended(desk, "branch")
    # The run's own rate fell from 300 tokens on to a tenth of the peak at 1,024; the branch's is still the peak.
    jump = f"with a schedule of 1,024 tokens the learning rate jumps from {2e-3 * (1 - 0.9 * 340 / 724):.3g} to 0.002"
    assert jump in capsys.readouterr().out
    assert annealed.output.count(jump) == 1
    assert f"branches off {path}: weights, optimizer and place in the data, after step 6" in annealed.output
    assert [row["step"] for row in annealed.steps] == [7, 8]
    assert [row["lr"] for row in annealed.steps] == pytest.approx([2e-3, 1e-3])
    assert annealed.steps[-1]["tokens"] == 1024
    assert annealed.steps[-1]["share.args"] == 24 / 64
    assert annealed.receipt["branch"]["applied"]["step"] == 6
    assert main(["validate", str(write(desk, "late", other, [], 768, path))]) == 2
    late = capsys.readouterr().err
    assert "training.tokens = 768, which takes 6 steps" in late
    assert "nothing is left for this branch to train" in late
    # With an unchanged config, a branch takes the next step of the run itself; without a checkpoint of its own it does
    # so again, though that run has gone on meanwhile.
    same = write(desk, "same", other, [], 1024, str(run.folder))
    desk.rerun(same, "--job.stop_after", "7", "--checkpoint.enable", "false")
    desk.rerun(changed, "--job.stop_after", "8")
    assert ended(desk, "same").trained() == ended(desk, "weights").trained()[-2:-1]
    assert "learning rate jumps" not in ended(desk, "same").output
    desk.rerun(same, "--job.stop_after", "7")
    assert ended(desk, "same").trained() == ended(desk, "weights").trained()[-2:-1]
    assert f"branches off {path}, as at its first start: weights" in ended(desk, "same").output
