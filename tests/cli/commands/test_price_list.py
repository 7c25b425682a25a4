"""`titanlite plan --activation-checkpoint`: prices that agree with each other and with MFU, at once, without torch."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.cli.commands.conftest import Call
from tests.support.measured import MEASURED_CONFIGS
from tests.support.own_model import mine
from titanlite.activation_checkpoint.operations import CLASSES, OWN_ATTENTION
from titanlite.commands.price_list import Totals, totals
from titanlite.config.recipe_schema import ModelDims, SaveList, SaveRule
from titanlite.config.schema import Model
from titanlite.config.toml_file import shipped_folder
from titanlite.errors import RecipeError
from titanlite.forecast.activation_cost import RuleCost, activations, rule_costs
from titanlite.forecast.traced_run import TracedRun, traced_run
from titanlite.models.find import model_class
from titanlite.models.llama3 import Llama3
from titanlite.observe.peak_flops import mean_attended, token_flops_of, windows_of
from titanlite.preflight.checked_run import CheckedRun, checked_run
from titanlite.recipes import load, names

CONFIG = str(MEASURED_CONFIGS / "llama3_8b.toml")
LISTS = names("activation_checkpoint")


def checked(*flags: str) -> CheckedRun:
    return checked_run(["--config", CONFIG, *flags])


def traced(run: CheckedRun) -> TracedRun:
    return traced_run(run.config, run.dims, run.float8)


def totals_of(run: CheckedRun, name: str | None = None) -> Totals:
    save_list = run.save_list if name is None else load("activation_checkpoint", name)
    assert save_list is not None
    return totals(traced(run), save_list)


def prices(run: CheckedRun) -> list[RuleCost]:
    assert run.save_list is not None
    return rule_costs(traced(run), run.save_list)


def said(call: Call, *flags: str) -> str:
    return call("plan", CONFIG, "--activation-checkpoint", *flags)


def test_the_price_list_of_8b(call: Call) -> None:
    """MiB per layer: attention 2 x 16384 x 4096 bytes and 4 a head and token, wqkv 6144 wide, w13 28672 wide."""
    lines = said(call).splitlines()
    assert "32 layers, 16,384 tokens a micro-step, tensor parallel 1, bfloat16, compiled" in lines[0]
    cells = {line[:29].strip(): line[29:].split() for line in lines}
    assert cells["save attention"] == ["32", "of", "32", "130.0", "1,099.5", "322.2"]
    assert cells["save communication"] == ["32", "of", "32", "nothing", "here"]
    assert cells["save matmul wqkv w1*"][3] == "1,088.0"
    assert cells["the block's input, always"][3] == "128.0"
    rows = {
        line.split()[0]: float(line.split()[1])
        for line in lines[lines.index("") :]
        if line.split()[:1] != [] and line.split()[0] in LISTS
    }
    assert list(rows) == ["balanced", *(name for name in LISTS if name != "balanced")]
    assert rows["balanced"] == pytest.approx(32 * (130 + 1088 + 128) / 1024, abs=0.01)
    # Measured on four H200 (benchmarks/results/runs.jsonl): the peaks of `none` and `balanced` are 111.6 and 80.6 GiB.
    assert rows["none"] - rows["balanced"] == pytest.approx(111.6 - 80.6, rel=0.01)


@pytest.mark.parametrize("flags", [[], ["--parallelism.tensor_parallel_degree", "2"], ["--float8.recipe", "rowwise"]])
@pytest.mark.parametrize("compiled", ["true", "false"])
@pytest.mark.parametrize("name", [name for name in LISTS if name != "none"])
def test_rules_and_inputs_add_up_to_the_total(name: str, flags: list[str], compiled: str) -> None:
    run = checked("--activation_checkpoint.recipe", name, "--compile.enable", compiled, *flags)
    blocks_of = traced(run)
    kept = sum(p.held * p.blocks for p in prices(run))
    inputs = run.dims.n_layers * 2 * blocks_of.tokens * run.dims.dim // blocks_of.tensor_parallel
    assert totals_of(run).held == pytest.approx(kept + inputs)


def flops_of(model: nn.Module, dims: ModelDims, seq_len: int) -> float:
    return token_flops_of(model, dims).total(mean_attended(windows_of(model), np.array([seq_len])))


def test_all_matmuls_and_attention_are_what_mfu_counts() -> None:
    """Forward is a third of a step; the head, 6·D·V a token, is not in a block. t ranks share the work evenly."""
    for degree in ("1", "2", "4"):
        run = checked("--parallelism.tensor_parallel_degree", degree)
        dims, blocks_of = run.dims, traced(run)
        dear = [a for a in activations(blocks_of.blocks[0]) if "mm" in a.op or "attention" in a.op]
        with torch.device("meta"):
            flops = flops_of(Llama3(dims, 8), dims, blocks_of.seq_len)
        step = (flops - 6 * dims.dim * dims.vocab_size) * blocks_of.tokens
        assert 3 * dims.n_layers * sum(a.flops for a in dear) * int(degree) == step


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt2"])
def test_other_architectures_have_one(name: str) -> None:
    """Rules and inputs add up, and so do FLOPs: those that MFU counts."""
    flags = ["--model.name", name, "--model.flavor", "debug", "--training.seq_len", "256"]
    run = checked(*flags, "--activation_checkpoint.recipe", "attention")
    dims, blocks_of = run.dims, traced(run)
    kept = sum(p.held * p.blocks for p in prices(run))
    assert totals_of(run).held == pytest.approx(kept + dims.n_layers * 2 * blocks_of.tokens * dims.dim)
    listed = [a for block in blocks_of.blocks for a in activations(block)]
    dear = [a for a in listed if "mm" in a.op or "attention" in a.op]
    with torch.device("meta"):
        model = model_class(Model(name=name))(dims, 256)
    step = (flops_of(model, dims, 256) - 6 * dims.dim * dims.vocab_size) * blocks_of.tokens
    assert 3 * sum(a.flops for a in dear) == step


def test_a_model_of_ones_own_has_prices(tmp_path: Path, call: Call) -> None:
    """Without a word about its blocks: those of the shipped file that it is a copy of."""
    short = ["--training.seq_len", "64"]
    shipped = said(call, "--model.flavor", "debug", *short)
    assert said(call, *short, *mine(tmp_path)).splitlines()[1:] == shipped.splitlines()[1:]


def test_matmuls_computes_nothing_dear_again() -> None:
    """No more than 5 FLOPs an element of the stream: the mean squares of norms."""
    for degree in ("1", "2"):
        run = checked("--activation_checkpoint.recipe", "matmuls", "--parallelism.tensor_parallel_degree", degree)
        blocks_of, dims = traced(run), run.dims
        assert totals_of(run).flops <= 5 * dims.n_layers * blocks_of.tokens * dims.dim


RULE = '[[rules]]\nop = "{}"\naction = "save"\n{}'


@pytest.mark.parametrize("kernel", [op for op in CLASSES["attention"] if op not in OWN_ATTENTION])
def test_attention_by_the_name_of_a_kernel_costs_what_its_class_does(kernel: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    wqkv = RULE.format("matmul", 'module = ["wqkv"]\n')
    mine.write_text(f'help = "mine"\ndefault = "recompute"\n{RULE.format(kernel, "")}{wqkv}')
    across = "--data.document_mask=false"  # with it, torch has no choice
    named, by_class = (checked("--activation_checkpoint.recipe", name, across) for name in (str(mine), "attention"))
    assert totals_of(named) == totals_of(by_class)
    both = [[replace(p, rule=None) for p in prices(run)] for run in (named, by_class)]  # type: ignore[arg-type]
    assert both[0] == both[1]


def test_all_that_has_no_price_is_said_at_once() -> None:
    run = checked()
    with pytest.raises(RecipeError) as caught:
        totals(traced(run), SaveList("", "save", (SaveRule("matmul", "save", module=("w9",)),)))
    for part in ("2 problems", 'fix:  default = "recompute"', 'rules[0].module = "w9"'):
        assert part in str(caught.value)


def test_the_peak_of_the_run_where_the_number_of_processes_is_known(call: Call) -> None:
    """Measured on four H200: 80.6 and 111.6 GiB, 7.5 of them gradients apart, 0.4 in the last norm and
    0.4 a block that is in symmetric memory now."""
    lines = said(call, "--world", "4").splitlines()
    assert lines[-8].endswith("peak of the run")
    assert all(line.endswith(" GiB") for line in lines[-7:])
    peaks = {line.split()[0]: line.split()[-2] for line in lines[-7:]}
    assert list(peaks) == ["balanced", *(name for name in LISTS if name != "balanced")]
    assert (peaks["balanced"], peaks["none"]) == ("70.2", "101.2")


def test_what_a_small_model_keeps_is_said_in_mib(call: Call) -> None:
    small = str(shipped_folder("configs") / "debug.toml")
    heading, *lists = call("plan", small, "--activation-checkpoint", "--world", "2").splitlines()[-8:]
    assert heading.endswith("  MiB  TFLOP  MiB moved  peak of the run")
    held = {line.split()[0]: line.split()[1] for line in lists}
    assert held["full"] == "1.00"  # the input of two blocks: 512 tokens of 256 in float32 each


def test_a_list_that_will_be_chosen_has_no_rules_yet(call: Call) -> None:
    auto = ("--activation_checkpoint.recipe", "auto", "--activation_checkpoint.budget_gib", "90")
    lines = said(call, *auto, "--world", "4").splitlines()
    assert lines[2] == ("save-list auto: chosen when the run starts, as the fastest whose peak is at most 90 GiB")
    assert [line.split()[0] for line in lines[-7:]] == LISTS
    assert "want: at least 35.3" in call(
        "plan", CONFIG, "--activation-checkpoint", *auto[:3], "30", "--world", "4", ends=2
    )


def test_whole_blocks_have_a_price(tmp_path: Path, call: Call) -> None:
    """Half of them whole: half of what `none` keeps, half of what `full` keeps."""
    mine = tmp_path / "mine.toml"
    mine.write_text('help = "mine"\ndefault = "recompute"\n' + RULE.format("block", 'layers = "16:"\n'))
    run = checked("--activation_checkpoint.recipe", str(mine))
    none, full = (totals_of(run, name) for name in ("none", "full"))
    assert totals_of(run).held == (none.held + full.held) / 2
    assert totals_of(run).flops == full.flops / 2
    (whole,) = prices(run)
    assert (whole.blocks, whole.matches, whole.flops) == (16, 16, 0)
    assert 16 * whole.held == (none.held - full.held) / 2
    rows = [line.split() for line in said(call, "--activation_checkpoint.recipe", str(mine)).splitlines()]
    assert ["save", "block", "16", "of", "32", f"{whole.held / 2**20:,.1f}", "0.0", "0.0"] in rows


@pytest.mark.parametrize("text", ['help = "mine"\n', "help = "])
def test_a_broken_list_beside_others(text: str, tmp_path: Path, call: Call) -> None:
    (tmp_path / "activation_checkpoint").mkdir()
    (tmp_path / "activation_checkpoint/mine.toml").write_text(text)
    rows = said(call, "--job.recipe_dirs", str(tmp_path)).splitlines()[-len(LISTS) - 1 :]
    assert [line.split() for line in rows if "mine" in line] == [["mine", "no", "price"]]
    assert sum("no price" not in line for line in rows) == len(LISTS)
