"""`titanlite plan`: the table, the chain of one tensor, the file for programs, and mistakes."""

import json
from pathlib import Path

import pytest

from titanlite.commands import main
from titanlite.config.toml_file import shipped_folder

DEBUG = str(shipped_folder("configs") / "debug.toml")
TWO = ["--parallelism.tensor_parallel_degree", "2"]


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--training.seq_len", "64", "--training.local_batch_size", "4", "--training.global_batch_size", "24"]
    flags += ["--training.mixed_precision_param", "bfloat16"]
    assert main(["plan", DEBUG, *TWO, *flags, "--world", "4"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    weights = {line[0]: line[1:] for line in lines if len(line) == 4}
    assert weights["layers.0-3.attention.wqkv.weight"] == ["512×256", "S(0)", "annotation"]
    assert weights["layers.0-3.attention.wo.weight"] == ["256×256", "S(1)", "inferred"]
    assert weights["norm.weight"] == ["256", "R", "default"]
    # 4 layers, 3 micro-steps of 256 tokens of width 256 in bfloat16, of which each of 2 ranks sends half.
    sent = ["12", "0.062", "0.8"]
    rows = [line for line in lines if line[:1] in (["all_gather"], ["reduce_scatter"])]
    assert ["all_gather", "forward", "layers.0-3.attention.wqkv", "256×256", "S(0)", "→", "R", *sent] in rows
    assert ["reduce_scatter", "backward", "layers.0-3.attention.wqkv", "256×256", "P", "→", "S(0)", *sent] in rows
    assert ["reduce_scatter", "forward", "layers.0-3.attention.wo", "256×256", "P", "→", "S(0)", *sent] in rows
    assert ["all_gather", "backward", "layers.0-3.attention.wo", "256×256", "S(0)", "→", "R", *sent] in rows
    assert len(rows) == 12
    total = 3 * (2 * 18) * (256 * 256 * 2 / 2) + 9 * 256 * 2  # 18 of each pass and kind; norms once a step
    assert f"each rank sends {total / 2**20:,.1f} MiB a step of 3 micro-steps" in [" ".join(line) for line in lines]


def test_why_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    assert main(["plan", DEBUG, *TWO, "--why", "layers.1.feed_forward.w2.weight", f"--json={file}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "layers.1.feed_forward.w2.weight: S(1)"
    assert lines[-2] == "  <- layers.1.feed_forward.w13.weight: S(0)"
    assert lines[-1] == '  <- annotation "layers.*.feed_forward.w13.weight = tp:0"'
    plan = json.loads(file.read_text())
    assert plan["axes"] == {"tp": 2}
    weights = {t["name"]: t["placements"]["tp"] for t in plan["tensors"] if t["name"].endswith("w2.weight")}
    assert set(weights.values()) == {"S(1)"}
    assert sum(c["kind"] == "all_gather" for c in plan["collectives"]) == 18
    assert main(["plan", DEBUG, *TWO, "--why", "layers.1.feed_forward"]) == 0
    assert capsys.readouterr().out.startswith("flatten")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "titanlite plan configs/llama3_8b.toml"),
        ([DEBUG], "parallelism.tensor_parallel_degree = 1"),
        ([DEBUG, *TWO, "--world", "x"], "a number of processes, at least 1"),
        ([DEBUG, *TWO, "--why"], "--why"),
        ([DEBUG, *TWO, "--why", "layers.1.attention.w0.weight"], "--why layers.1.attention.wo.weight"),
        ([DEBUG, "--parallelism.tensor_parallel_degree", "3"], "a divisor of model.n_heads = 8"),
    ],
)
def test_mistakes(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *argv]) == 2
    assert words in capsys.readouterr().err
