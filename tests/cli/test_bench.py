"""The scripts of scripts/bench: where they deal with processes, and the rows that they print."""

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import tables
from scripts.bench import runs

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


def script(name: str, folder: Path = BENCH) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_run_over_its_time_leaves_no_rank_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    throughput = script("throughput")
    monkeypatch.setattr(throughput, "ROOT", tmp_path)
    stalls = "import os, pathlib, time\npathlib.Path(f'pid{os.getpid()}').touch()\ntime.sleep(600)\n"
    (tmp_path / "train.py").write_text(stalls)
    assert throughput.run("stalls", "", Namespace(gpus=2, alone=False, steps=1, timeout_s=25, logs=tmp_path)) is None
    ranks = [int(path.name.removeprefix("pid")) for path in tmp_path.glob("pid*")]
    assert len(ranks) == 2
    for rank in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(rank, 0)


def test_a_row_is_what_the_tables_read(tmp_path: Path) -> None:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    receipt = [{"feature": "environment", "applied": {"device": "NVIDIA H100"}}]
    (tmp_path / "runs" / "a" / "receipt.json").write_text(json.dumps(receipt))
    keys = ("tokens_per_second_per_gpu", "mfu", "seconds", "memory_gib")
    measured = [
        dict(zip(keys, values, strict=True)) for values in ((9000.4, 0.5, 1.5, 70.04), (8000.0, 0.25, 2.5, 70.0))
    ]
    flags = "--config configs/llama3_8b.toml --activation_checkpoint.recipe none --parallelism.tensor_parallel_degree 2"
    args = Namespace(gpus=4, alone=False, repeats=2, steps=12, logs=tmp_path)
    row = script("throughput").as_row(flags, measured, args)
    assert (tables.model(row), tables.layout(row), tables.save_list(row)) == ("8B", "FSDP 2 × TP 2", "`none`")
    assert (row["gpu"], row["steps"], row["repeats"]) == ("NVIDIA H100", "6-12", 2)
    assert (row["tokens_per_second"], row["tokens_per_second_spread"]) == (8500, [8000, 9000])
    assert (row["mfu_percent"], row["ms_per_step"], row["reserved_gib"]) == (37.5, 2000, 70.0)


@pytest.mark.slow
def test_one_rank_trains_without_the_others(tmp_path: Path):
    """Of FSDP 4 x TP 2, in one process: it holds what a rank of eight would."""
    flags = "--config configs/debug.toml --parallelism.tensor_parallel_degree 2"
    row = script("throughput").run("alone", flags, Namespace(gpus=8, alone=True, steps=7, timeout_s=200, logs=tmp_path))
    assert row is not None
    receipt = json.loads((tmp_path / "runs" / "alone" / "receipt.json").read_text())
    applied = {entry["feature"]: entry["applied"] for entry in receipt}
    shares = {"data_parallel_replicate": 1, "data_parallel_shard": 4, "tensor_parallel": 2}
    assert applied["parallelism"] == shares


def _finished_run(folder: Path, loss: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "status.json").write_text(json.dumps({"state": "finished"}))
    (folder / "config.toml").write_text("[job]\n")
    rows = [
        {"step": step, "tokens": step, "loss": loss if step > 20 else 9.0, "experts_fullest.layers.0": 1.5}
        for step in range(1, 121)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_recipe_is_judged_by_the_noise_of_the_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Seeds at 1.99, 2, 2.01: a mean of 2, and three deviations of 0.01. A flavor is shown and not judged."""
    losses = {
        "bf16-seed-0": 2.0,
        "bf16-seed-1": 1.99,
        "bf16-seed-2": 2.01,
        "rowwise": 2.02,
        "blockwise": 2.04,
        "other": 3.0,
    }
    for name, loss in losses.items():
        _finished_run(tmp_path / "runs" / name, loss)
    parity = script("loss_parity")

    def judge(*recipes: str) -> int:
        given = [*recipes, "--flavors", "other", "--logs", str(tmp_path), "--picture", str(tmp_path / "curves.png")]
        monkeypatch.setattr("sys.argv", ["loss_parity.py", *given])
        return parity.main()

    assert judge("rowwise", "blockwise") == 1
    said = capsys.readouterr().out
    assert "bf16: 2.0000 ± 0.0300, 3 seeds" in said
    assert "| rowwise | 2.0200 | +0.0200 | inside | 1.50 |" in said
    assert "| blockwise | 2.0400 | +0.0400 | OUTSIDE | 1.50 |" in said
    assert said.endswith("outside of the noise: blockwise\n")
    assert (tmp_path / "curves.png").stat().st_size > 0
    monkeypatch.setattr(parity, "titanlite", lambda *arguments: None)  # which has drawn already
    assert judge("rowwise") == 0


def test_an_optimizer_saves_tokens_if_it_gets_as_far_in_a_part_of_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """AdamW at 2 with its best rate, Muon at 1.9 with another, whose other seeds are at 2.2 each: 2.1 of all."""
    fewer, made = script("fewer_tokens"), dict[str, list[str]]()

    def train(runs: dict[str, list[str]], *_: object) -> bool:
        made.update(runs)
        for name in runs:
            recipe, rate, seed = name.replace("-seed-", " ").replace("-", " ", 1).split()
            best = {"adamw": ("0.001", 2.0), "muon": ("0.002", 1.9)}[recipe]
            later = worse if recipe == "muon" and seed != "0" else 0.0
            _finished_run(tmp_path / "runs" / name, best[1] + (rate != best[0]) + later)
        return True

    monkeypatch.setattr(fewer, "train_all", train)
    monkeypatch.setattr(fewer, "titanlite", lambda *_: None)
    given = ["--rates", "1e-3", "2e-3", "--logs", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["fewer_tokens.py", *given])
    worse = 0.3
    assert fewer.main() == 1
    assert "| muon | 1125 | 2.9000 | 1.9000 | 2.1000 ± 0.1732 |" in capsys.readouterr().out
    worse = 0.1
    assert fewer.main() == 0
    assert "| adamw | 1500 | 2.0000 | 3.0000 | 2.0000 ± 0.0000 |" in capsys.readouterr().out
    assert sorted(made) == sorted(
        f"{recipe}-{rate}-seed-{seed}"
        for recipe, best in (("adamw", "0.001"), ("muon", "0.002"))
        for rate, seed in {("0.001", 0), ("0.002", 0), (best, 1), (best, 2)}
    )
    assert made["muon-0.002-seed-1"][-2:] == ["--training.steps", "1125"]


def test_an_arm_tries_rates_until_its_best_is_inside_and_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Rates 1, 2, 4: bf16 is best at 4 and tries 8, muon at 1 and tries 0.5. Seeds are 0.01 apart, muon 0.5 above."""
    parity, made, rows = script("loss_parity"), list[str](), tmp_path / "rows.jsonl"

    def train(name: str, flags: list[str], *_: object) -> bool:
        made.append(name)
        if len(made) == stopped_at:
            return False
        value = dict(zip(flags[::2], flags[1::2], strict=True))
        seed, is_muon = int(value["--training.seed"]), value.get("--optimizer.recipe") == "muon"
        loss = 2 + abs(math.log2(float(value["--optimizer.lr"]) / (1 if is_muon else 4))) + 0.01 * seed + 0.5 * is_muon
        folder = tmp_path / "runs" / name
        _finished_run(folder, loss)
        step = {"step": 121, "tokens": 121, "loss": loss, "seconds": 1.0, "epoch": 1.0, "memory_gib": 1.0}
        last = 375 if "quarter" in name else 1500
        assert value["--training.steps"] == str(last)
        lines = [step | {"step": at, "tokens": at * 512} for at in range(last - 120, last + 1)]
        lines.append({"step": last, "tokens": last * 512, "validation_loss": loss})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "receipt.json").write_text(json.dumps([{"feature": "environment", "applied": {"device": "H200"}}]))
        return True

    monkeypatch.setattr(runs, "_train", train)
    monkeypatch.setattr(runs, "titanlite", lambda *_, **__: None)
    monkeypatch.setattr(parity, "titanlite", lambda *_, **__: None)
    given = [
        "--rows",
        str(rows),
        "--logs",
        str(tmp_path),
        "--commit",
        "abc",
        "--rates",
        "1",
        "2",
        "4",
        "--seeds",
        "0",
        "1",
    ]
    monkeypatch.setattr("sys.argv", ["loss_parity.py", "bf16*2", "muon+bf16", *given])
    stopped_at = 5
    assert parity.main() == 1
    assert len(rows.read_text().splitlines()) == 5  # the others of that call went on
    shutil.rmtree(tmp_path / "runs")  # as on another machine, to which the rows alone were carried
    stopped_at, before = -1, len(made)
    assert parity.main() == 0
    again = made[before:]
    wanted = [
        "bf16-8-seed-0-quarter",
        "muon-bf16-0.5-seed-0-quarter",
        "bf16-4-seed-0",
        "bf16-4-seed-1",
        "muon-bf16-1-seed-0",
    ]
    assert again == [made[4], *wanted]
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert len({row["run"] for row in found}) == len(found) == 11
    last = found[-1]
    assert (last["arm"], last["lr"], last["seed"], last["steps"], last["tokens_per_step"]) == (
        "muon+bf16",
        1.0,
        0,
        1500,
        512,
    )
    # Two seeds with a standard deviation of 0.00707 and one more: 12.71 × 0.00707 × √(1/2 + 1/1).
    line = "| muon+bf16 | 1.0 | 1 | 2.5000 | +0.4950 | 0.1101 | 2.5000 | +0.4950 | 0.1101 |"
    assert line in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["loss_parity.py", "bf16", *given, "--flags", "--training.steps 9"])
    with pytest.raises(SystemExit, match="2"):
        parity.main()
    assert "--flags has training.steps" in capsys.readouterr().err


@pytest.mark.slow
def test_a_step_is_repeated_and_compared(tmp_path: Path) -> None:
    given = f"--config configs/debug.toml --training.deterministic --training.steps 3 --job.dump_folder {tmp_path}"
    run = [sys.executable, "-m", "torch.distributed.run", "scripts/repeat_step.py", *given.split()]
    done = subprocess.run(run, cwd=BENCH.parents[1], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "3 steps, 0 unlike the first"), done.stderr
