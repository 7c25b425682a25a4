"""scripts/bench/float8_layers.py: which sizes are timed, what a timed step is, and what is said of the times."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.cli.test_bench import script
from titanlite import recipes
from titanlite.config.toml_file import shipped_folder
from titanlite.device import CPU
from titanlite.models.layers import Linear
from titanlite.models.llama3 import Llama3
from titanlite.preflight.checked_run import CheckedRun, checked_run

bench = script("float8_layers")
Layer, Timed, layers, report, slower, time_all = (
    getattr(bench, name) for name in ("Layer", "Timed", "layers", "report", "slower", "time_all")
)
DEBUG = ["--config", str(shipped_folder("configs") / "debug.toml")]


def debug(*flags: str) -> CheckedRun:
    small = ["--training.seq_len", "128", "--training.local_batch_size", "2", "--training.global_batch_size", "8"]
    return checked_run([*DEBUG, *small, *flags])


def test_each_layer_once_in_the_sizes_of_one_rank() -> None:
    whole = [
        Layer("attention.wqkv", 256, 512, 256),
        Layer("attention.wo", 256, 256, 256),
        Layer("feed_forward.w13", 256, 1536, 256),
        Layer("feed_forward.w2", 256, 256, 768),
        Layer("output", 256, 256, 256),
    ]
    assert layers(debug()) == whole
    split = layers(debug("--parallelism.tensor_parallel_degree", "2"))
    by_rows = {"attention.wo", "feed_forward.w2"}  # whose sum is split
    assert split == [
        replace(layer, K=layer.K // 2) if layer.name in by_rows else replace(layer, N=layer.N // 2) for layer in whole
    ]


def test_the_names_are_those_that_filters_match() -> None:
    with torch.device("meta"):
        model = Llama3(debug().dims, 128)
    found = {name for name, module in model.named_modules() if isinstance(module, Linear)}
    for layer in layers(debug()):
        assert any(layer.name in name for name in found)
        found = {name for name in found if layer.name not in name}
    assert not found


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.usefixtures("without_machine_code")
def test_a_step_is_three_matmuls(compile: bool) -> None:
    sizes = [Layer("a", 128, 256, 384), Layer("odd", 128, 256, 96)]
    float8 = {name: recipes.load("float8", name) for name in ("rowwise", "blockwise")}
    flops: list[int] = []

    def clock(step: Callable[[], object]) -> float:
        with nullcontext() if compile else FlopCounterMode(display=False) as counter:  # which compiled code refuses
            d_x, d_w = step()  # type: ignore[misc]
        assert d_x.isfinite().all()
        assert d_w.shape[1] == d_x.shape[1]
        flops.append(counter.get_total_flops() if counter else 0)
        return float(len(flops))

    timed = time_all(sizes, float8, torch.bfloat16, CPU, compile, clock)
    assert [(t.layer, t.plain, dict(t.float8)) for t in timed] == [
        (sizes[0], 1.0, {"rowwise": 2.0, "blockwise": 3.0}),
        (sizes[1], 4.0, {"rowwise": 5.0}),  # 96 is not whole blocks
    ]
    if not compile:
        assert flops == [
            3 * 2 * layer.M * layer.N * layer.K for layer, n in zip(sizes, (3, 2), strict=True) for _ in range(n)
        ]


def test_layers_that_gain_nothing_are_to_be_filtered() -> None:
    timed = [
        Timed(Layer("attention.wo", 16384, 4096, 4096), 2.0, {"rowwise": 1.0, "tensorwise": 2.5}),
        Timed(Layer("output", 16384, 8, 4096), 0.5, {"rowwise": 0.5}),
    ]
    assert slower(timed, "rowwise") == ["output"]
    assert slower(timed, "tensorwise") == ["attention.wo"]
    why = "it needs compute capability 10.0, this GPU has 9.0"
    said = report(timed, "H200", "float32", {"blockwise": why}).splitlines()
    assert said[0] == "H200; each layer's three matmuls with their casts, milliseconds and gain over float32:"
    assert said[2].split() == ["layer", "M", "N", "K", "float32", "rowwise", "tensorwise"]
    assert said[3].split() == ["attention.wo", "16,384", "4,096", "4,096", "2.000", "1.000", "2.00x", "2.500", "0.80x"]
    assert said[4].split() == ["output", "16,384", "8", "4,096", "0.500", "0.500", "1.00x", "not", "convertible"]
    assert '  rowwise     float8.filter_fqns = ["output"]' in said
    assert '  tensorwise  float8.filter_fqns = ["attention.wo"]' in said
    assert said[-1] == f"not timed: blockwise is emulated here; {why}"


def test_recipes_that_are_all_emulated(capsys: pytest.CaptureFixture[str]) -> None:
    timed = time_all([Layer("a", 16, 16, 16)], {}, torch.bfloat16, CPU, compile=False, milliseconds=lambda step: 1.0)
    said = report(timed, "A100", "bfloat16", {"rowwise": "it needs compute capability 9.0, this GPU has 8.0"})
    assert "filter_fqns" not in said
    assert "not timed: rowwise" in said


@pytest.mark.parametrize(
    ("has_gpu", "flags", "part"),
    [(False, [], "needs a GPU"), (True, ["--training.stepz", "5"], "did you mean training.steps?")],
)
def test_mistakes(
    has_gpu: bool, flags: list[str], part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr("sys.argv", ["float8_layers.py", *DEBUG, *flags])
    assert bench.main() == 2
    assert part in capsys.readouterr().out


@pytest.mark.gpu
def test_every_recipe_is_timed_on_this_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["float8_layers.py", *DEBUG, "--training.mixed_precision_param", "bfloat16"])
    assert bench.main() == 0
    said = capsys.readouterr().out
    for name in recipes.names("float8"):
        assert name in said
    assert said.count("x") >= 5
