"""A model file of one's own trains as a shipped one does; a config that cannot be is refused."""

import os
from pathlib import Path

import pytest
import torch

from tests.support import own_model
from tests.support.needs import slow
from tests.support.short_run import Trained, checked, train
from titanlite import recipes
from titanlite.commands.plan import run as plan
from titanlite.commands.validate import summary
from titanlite.errors import ConfigError
from titanlite.models import gpt2
from titanlite.models.find import imported
from titanlite.models.mistakes import of_function
from titanlite.train import main as train_main
from titanlite.training.assemble import try_assembly

BATCH, TP_2 = "--training.local_batch_size", ["--parallelism.tensor_parallel_degree", "2"]
AUTO = ["--activation_checkpoint.recipe", "auto", "--activation_checkpoint.budget_gib", "0.7"]
DEBUG = str(Path(__file__).parents[3] / "configs" / "debug.toml")


@pytest.fixture
def mine(tmp_path: Path) -> list[str]:
    """Flags for a copy of GPT-2's file, to which tests add code that uses torch."""
    return own_model.mine(tmp_path, ("import torch.nn", "import torch\nimport torch.nn"), of=gpt2)


def assert_same(got: Trained, truth: Trained, allowed: float) -> None:
    assert got.gradients.keys() == truth.gradients.keys()
    assert all(torch.equal(got.weights[name], weight) for name, weight in truth.weights.items())
    for name, gradient in truth.gradients.items():
        assert (got.gradients[name] - gradient).abs().max() <= allowed * gradient.abs().max(), name
    assert ((got.losses - truth.losses) / truth.losses).abs().max() <= allowed


def test_a_file_of_ones_own_trains_as_a_shipped_one(mine: list[str], tmp_path: Path) -> None:
    shipped = train(tmp_path, 1, ["--model.name", "gpt2", BATCH, "4"], steps=2)
    assert_same(train(tmp_path, 1, [*mine, BATCH, "4"], steps=2), shipped, 0.0)
    assert_same(train(tmp_path, 2, [*mine, BATCH, "4", *TP_2], steps=2), shipped, 1e-5)


@pytest.mark.parametrize("name", slow("qwen3", "gemma3"))  # which gathers under FSDP × TP in test_fsdp.py
def test_debug_sizes_train_under_tensor_parallelism(name: str, tmp_path: Path) -> None:
    """The bounds are those of tests/ranks/training/test_layouts.py."""
    flags = ["--model.name", name, BATCH, "4"]
    assert_same(train(tmp_path, 2, [*flags, *TP_2], steps=2), train(tmp_path, 1, flags, steps=2), 1e-5)


def test_commands_know_it(mine: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = checked(tmp_path, 2, mine)
    assert f"{tmp_path}/mine.py small, " in summary(asked, try_assembly(asked, 2), "debug.toml", 2, None)
    checked(tmp_path, 4, [*mine, "--parallelism.tensor_parallel_degree", "4", "--model.ffn_dim", "264"])  # its affair
    assert plan([DEBUG, *mine, *TP_2]) == 0
    assert "positions.weight" in capsys.readouterr().out


def test_a_model_that_branches_on_values_trains_without_a_forecast(mine: list[str], tmp_path: Path) -> None:
    file, block = tmp_path / "mine.py", "            x = block(x, sequences)\n"
    branch = "            if x.abs().max().item() > 1e9:\n                x = x / 2\n"
    lines = file.read_text().replace(block, block + branch)
    file.write_text(lines)
    number = lines[: lines.index(branch)].count("\n") + 1
    said = try_assembly(checked(tmp_path, 2, mine), 2).warning
    assert said is not None
    assert f"trains without a forecast: line {number} of {file}, in forward: if x.abs().max().item() > 1e9: Run" in said
    assert plan([DEBUG, *mine, "--world", "2"]) == 0
    assert len(train(tmp_path, 1, [*mine, BATCH, "4"], steps=2).losses) == 2
    fewer = tmp_path / "other" / "mine.py"  # of which the loss would take the targets beyond for other ranks'
    fewer.parent.mkdir()
    logits = "self.output(self.norm(x))"
    fewer.write_text(lines.replace(f"return {logits}", f"return {logits}[:, :200] * 1"))
    with pytest.raises(AssertionError, match=r"Mine.forward = logits of shape \[\d+, 200\]\n +want: \[\d+, 256\]"):
        train(tmp_path, 1, [*mine, "--model.file", str(fewer), BATCH, "4"], steps=1)


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("sequences: Sequences | None = None) -> Tensor:", "sequences: Sequences) -> Tensor:"),
        ("self.dims, self.seq_len =", "self.lock = __import__('threading').Lock(); self.dims, self.seq_len ="),
    ],
)
def test_what_a_run_can_call_is_not_refused(line: str, instead: str, mine: list[str], tmp_path: Path) -> None:
    text = (tmp_path / "mine.py").read_text()
    assert line in text
    (tmp_path / "mine.py").write_text(instead.join(text.rsplit(line, 1)))
    try_assembly(checked(tmp_path, 1, mine), 1)
    assert len(train(tmp_path, 1, [*mine, BATCH, "4"], steps=1).losses) == 1


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.py").write_text(f"def which():\n    return {folder!r}\n")
    a, b = (imported(str(tmp_path / folder / "x.py")) for folder in ("a", "b"))
    assert (a.which(), b.which()) == ("a", "b")
    assert of_function(a.which, str(tmp_path / "a" / "x.py"), "", "", "").line == 1
    assert imported(os.path.relpath(tmp_path / "a" / "x.py")) is a  # by its whole path


def test_a_command_imports_it_once(mine: list[str], tmp_path: Path) -> None:
    """What registers operators cannot be imported a second time."""
    with (tmp_path / "mine.py").open("a") as file:
        file.write('\nOPERATORS = torch.library.Library("of_my_own", "DEF")\n')
    assert plan([DEBUG, *mine, *TP_2, "--diff", BATCH, "4"]) == 0


def test_a_pattern_that_matches_none_of_its_parameters_is_found_by_its_line(
    mine: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f'extends = ["{DEBUG}"]\n[optimizer]\nweight_decay_exclude = ["*nrom.weight"]\n')
    flags = [*mine, "--job.dump_folder", str(tmp_path / "runs")]
    monkeypatch.setattr("sys.argv", ["train.py", "--config", str(config), *flags])
    for command in (lambda: plan([str(config), *flags, *TP_2]), train_main):
        with pytest.raises(ConfigError) as refused:
            command()
        assert f'{config}: 1 problem\n  line 3  optimizer.weight_decay_exclude = "*nrom.weight"' in str(refused.value)
    assert not (tmp_path / "runs").exists()  # before a run takes its folder


def test_it_is_imported_on_the_gpu_of_its_process(
    mine: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = [0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append(device.index))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda settings: None)
    monkeypatch.setenv("LOCAL_RANK", "3")
    with (tmp_path / "mine.py").open("a") as file:
        file.write('\nraise RuntimeError(f"imported on GPU {torch.cuda.current_device()}")\n')
    monkeypatch.setattr("sys.argv", ["train.py", "--config", DEBUG, *mine, "--job.dump_folder", str(tmp_path / "runs")])
    with pytest.raises(ConfigError, match="imported on GPU 3"):
        train_main()


@pytest.mark.parametrize("flags", [TP_2, AUTO, ["--activation-checkpoint"]])
def test_it_is_predicted_and_priced_as_a_shipped_one(
    flags: list[str], mine: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = [DEBUG, "--world", "2", "--training.mixed_precision_param", "bfloat16", "--compile.enable", *flags]
    said = []
    for model, name in ((mine, f"{tmp_path}/mine.py small"), (["--model.name", "gpt2"], "gpt2 debug")):
        assert plan([*both, *model]) == 0
        said.append(capsys.readouterr().out.replace(name, "it"))
    assert said[0] == said[1]
    for words in ("memory of a rank", "predicted step time"):
        assert words in said[0] or flags == ["--activation-checkpoint"]


def test_a_module_that_is_not_made_by_torch_is_refused(mine: list[str], tmp_path: Path) -> None:
    """Which is seen where the model is walked, behind the line that made it."""
    with (tmp_path / "mine.py").open("a") as file:
        file.write("\nclass Bare(torch.nn.Module):\n    def __init__(self):\n        pass\n")
    text = (tmp_path / "mine.py").read_text()
    line = next(line for line in text.splitlines() if "self.layers = nn.ModuleList(" in line)
    indented = line[: len(line) - len(line.lstrip())]
    (tmp_path / "mine.py").write_text(text.replace(line, f"{line}\n{indented}self.layers[0].bare = Bare()"))
    with pytest.raises(ConfigError) as refused:
        plan([DEBUG, *mine, *TP_2])
    assert "'Bare' object has no attribute '_modules'" in str(refused.value)


def test_a_key_of_a_recipe_that_its_architecture_makes_nothing_of(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    shipped = (Path(__file__).parents[3] / "recipes" / "model" / "llama3-debug.toml").read_text()
    (tmp_path / "model" / "llama3-wide.toml").write_text(f"{shipped}\nhead_dim = 64\n")
    with pytest.raises(ConfigError, match=r"\n  head_dim = 64\n +want: no such key in the recipe llama3-wide: llama3"):
        checked(tmp_path, 1, ["--model.flavor", "wide", "--job.recipe_dirs", str(tmp_path)])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model.file", "nowhere.py"], 'model.file = "nowhere.py"'),
        (["--model.file", "nowhere"], "want: a Python file"),
        (["--model.name", "gpt2", "--model.rope_theta", "1e4"], "no such key: gpt2 does not use it"),
        (
            ["--model.name", "gpt2", "--training.seq_len", "1024"],
            "at most 512, the number of position embeddings of the model",
        ),
        (["--model.name", "qwen3", "--model.flavor", "70B"], "want: one of 0.6B, 1.7B, 4B, 8B, debug"),
        (["--model.name", "gemma3", "--model.flavor", "1B", *TP_2], "of model.n_kv_heads = 1"),
    ],
)
def test_what_cannot_be_is_refused(flags: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        checked(tmp_path, 2, flags)
    assert message in str(refused.value)


def test_a_recipe_lacks_what_its_architecture_needs(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    shipped = (Path(__file__).parents[3] / "recipes" / "model" / "gemma3-debug.toml").read_text()
    (tmp_path / "model" / "gemma3-less.toml").write_text(shipped.replace("window = 32\n", ""))
    with pytest.raises(ConfigError, match=r"model\.window\n +want: a value: gemma3 needs it"):
        checked(tmp_path, 1, ["--model.name", "gemma3", "--model.flavor", "less", "--job.recipe_dirs", str(tmp_path)])
    assert recipes.load("model", "gemma3-debug").window == 32


@pytest.mark.parametrize(
    ("line", "instead", "message"),
    [
        (
            "class Mine(nn.Module):",
            "class Mine(nn.Module):\n    __new__ = lambda cls: 0\n",
            r"line \d+  Mine.__init__ = TypeError: ",
        ),
        (
            "h = x + ",
            "h = x * x.sum().item() + ",
            r"line \d+  layers.0: h = x .* = aten.item.default\n +want: operators whose results",
        ),
        (
            "h = x + ",
            "with torch.no_grad():\n            s = x.abs()\n        h = x * s + ",
            r"line \d+  layers.0: s = x.abs\(\) = wrap_with_set_grad_enabled\n +want: operators alone.*\n.*x.detach",
        ),
        *slow(
            (
                "h = x + ",
                "with torch.autocast('cpu', enabled=False):\n            s = x.abs()\n        h = x * s + ",
                r"line \d+  layers.0: s = x.abs\(\) = wrap_with_autocast\n +want: operators alone.*\n.*x.to\(dtype\) ",
            )
        ),
    ],
)
def test_what_none_of_its_lines_raises(line: str, instead: str, message: str, mine: list[str], tmp_path: Path) -> None:
    text = (tmp_path / "mine.py").read_text()
    assert line in text
    (tmp_path / "mine.py").write_text(text.replace(line, instead))
    with pytest.raises(ConfigError, match=message):
        plan([DEBUG, *mine, *TP_2])
