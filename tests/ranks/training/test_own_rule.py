"""A run with the update rule of the documentation's page against a plain loop on whole weights; its state."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.launched import Desk
from tests.support.needs import slow
from tests.support.own_rule import lion
from tests.support.ranks import run_ranks
from tests.support.short_run import assemble, checked, take_steps, whole
from titanlite.commands import main
from titanlite.training.build import Run
from titanlite.training.state import tensors_of

TP_2 = ["--parallelism.tensor_parallel_degree", "2"]
BF16 = ["--optimizer.state_dtype", "bfloat16"]
SMALL = ["--model.n_layers=1", "--model.dim=64", "--model.n_heads=4", "--model.n_kv_heads=2", "--model.ffn_dim=256"]
EPS = torch.finfo(torch.float32).eps


def lion_on_whole_weights(run: Run) -> Callable[[], tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Watch a run; what is returned gives the matrices, and the momentum, that a plain loop has of its gradients."""
    weights = {name: whole(p) for name, p in run.model.named_parameters() if p.ndim > 1}
    momentum = {name: torch.zeros_like(p) for name, p in weights.items()}
    update = run.optimizer.step

    def watched(grads: dict[str, Tensor], lr: float, divisor: Tensor, *others: object) -> None:
        for name, p in weights.items():
            grad, m, own_lr = whole(run.optimizer.parameters[name].grad) / divisor, momentum[name], 0.3 * lr
            direction = torch.sign(0.9 * m + 0.1 * grad)
            p.copy_(p - own_lr * (direction + 0.1 * p))
            m.copy_(0.98 * m + 0.02 * grad)
        update(grads, lr, divisor, *others)

    run.optimizer.step = watched
    return lambda: (weights, momentum)


@pytest.mark.parametrize("layout", [[], *slow(TP_2)], ids=["FSDP 2", "TP 2"])
def test_equals_a_plain_loop_on_whole_weights(layout: list[str], tmp_path: Path) -> None:
    asked = checked(tmp_path, 2, [*SMALL, *lion(tmp_path), *layout])

    def body() -> None:
        run = assemble(asked)
        truth, steps = lion_on_whole_weights(run), 4
        rates = take_steps(run, steps)
        assert torch.isfinite(rates).all()
        weights, momentum = truth()
        ours = {name: whole(p) for name, p in run.model.named_parameters()}
        kept = {name: whole(t) for name, t in run.optimizer.state().items()}
        for name, p in weights.items():
            # Each step rounds the weight three times and its move by lr twice; a mean of gradients is rounded thrice
            # a step, and where it is that near to zero its sign may be another.
            m = momentum[name]
            bound = 5 * steps * EPS * (p.abs() + 1)
            assert ((ours[name] - p).abs() <= bound).all(), name
            assert ((kept[f"optimizer/momentum/{name}"] - m).abs() <= 3 * steps * EPS * m.abs().max()).all(), name
        vectors = {name for name in ours if name not in weights}
        assert vectors
        assert {name.split("/", 2)[2] for name in kept if "/exp_avg/" in name} == vectors  # AdamW's
        assert {name.split("/", 2)[2] for name in kept if "/momentum/" in name} == {*weights}

    run_ranks(body, tmp_path)


def test_state_has_the_bytes_of_its_dtype_and_a_step_left_out_leaves_every_bit(tmp_path: Path) -> None:
    asked = checked(tmp_path, 1, [*SMALL, *lion(tmp_path), *BF16])

    def body() -> None:
        run = assemble(asked)
        take_steps(run, 2)
        optimizer = run.optimizer
        held = sum(tensor.numel() * tensor.itemsize for tensor in optimizer.state_tensors())
        assert held == run.memory.optimizer.state == run.memory.optimizer.saved - 4 * run.n_elements
        before = {name: tensor.clone() for name, tensor in tensors_of(run).items()}
        assert {t.dtype for n, t in before.items() if "/momentum/" in n} == {torch.bfloat16}
        nan = {name: torch.full_like(p, float("nan")) for name, p in run.optimizer.locals.items()}
        run.optimizer.step(nan, 0.1, torch.tensor(float("nan")), torch.ones(()))
        assert all(torch.equal(tensor, before[name]) for name, tensor in tensors_of(run).items())

    run_ranks(body, tmp_path, 1)


def test_what_it_raises_in_a_step_ends_the_run_by_its_line(desk: Desk, tmp_path: Path) -> None:
    late = "        return direction / (1 if len(gradient) < 100 else self.nothing)"
    flags = lion(tmp_path, ("        return direction", late))
    run = desk.run("late", 1, *flags, "--job.stop_after=1", ends=2)
    said = run.output.partition(f"{tmp_path}/lion.py: 1 problem\n")[2]
    assert said.startswith(f"  line 18  in update: {late.strip()} = AttributeError: "), run.output
    assert "Traceback" not in run.output


def test_a_file_that_has_changed_is_told(desk: Desk, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*lion(tmp_path), "--checkpoint.interval=1"]
    first = desk.run("changed", 1, *flags, "--job.stop_after=1")
    with (tmp_path / "lion.py").open("a") as file:
        file.write("# another\n")
    for start in ([], ["--job.name=branch", f"--checkpoint.initial_load_path={first.folder}"]):
        assert main(["validate", str(first.folder / "config.toml"), "--job.stop_after=2", *start]) == 0
        assert "changed: optimizer.file is not the one of step 1" in capsys.readouterr().out
    second = desk.run("changed", 1, *flags, "--job.stop_after=2")
    assert "optimizer.file" not in first.output
    assert first.steps[0]["update_ratio.matrices"] > 0
    assert "changed: optimizer.file is not the one of step 1" in second.output
    assert second.receipt["optimizer"]["applied"]["of Lion"] == {
        "file": str(tmp_path / "lion.py"),
        "sha256": hashlib.sha256((tmp_path / "lion.py").read_bytes()).hexdigest(),
    }
