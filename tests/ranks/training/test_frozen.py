"""A group with `lr_factor = 0.0`: its weights keep their bits under every layout, and the others train."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.launched import Desk
from tests.support.needs import slow
from tests.support.own_rule import lion
from tests.support.ranks import run_ranks
from tests.support.short_run import assemble, batches_of, checked, whole, whole_model
from titanlite.commands import main
from titanlite.training.attention import torch_order
from titanlite.training.state import tensors_of
from titanlite.training.step import train_step

# Whole blocks behind a frozen embedding, whose input then needs no gradient, and parts of a block that is trained.
DENSE = ("tok_embeddings.weight", "layers.0.*", "layers.1.*norm.weight", "layers.1.*.w2.weight", "output.weight")
MIXED = ("tok_embeddings.weight", "layers.*.router.weight", "layers.0.*.w2.weight", "layers.1.*.w13.weight")
TP, EP = (("--parallelism." + key, "2") for key in ("tensor_parallel_degree", "expert_parallel_degree"))
ASYNC, KEEP = ("--parallelism.async_tensor_parallel", "true"), ("--activation_checkpoint.recipe", "full")
MIXTURE = ("--model.name", "qwen3_moe")
STEPS = 3


def frozen(folder: Path, patterns: tuple[str, ...], base: str = "adamw") -> str:
    """Write a recipe that freezes what matches, and return its path."""
    groups = f'[groups.kept]\nrule = "adamw"\npattern = {[*patterns]}\nlr_factor = 0.0\n'
    (mine := folder / "frozen.toml").write_text(f'extends = "{base}"\nhelp = "Mine."\n{groups}')
    return str(mine)


def gradients_of_all(folder: Path, flags: list[str]) -> dict[str, Tensor]:
    """Return the gradients of the first step on one process that freezes nothing."""
    asked = checked(folder, 1, flags)

    def body() -> None:
        run = assemble(asked)
        run.optimizer.step = lambda *_: torch.save(  # type: ignore[method-assign]
            {name: whole(p.grad) for name, p in run.model.named_parameters() if p.grad is not None}, folder / "all.pt"
        )
        with closing(batches_of(run)) as batches, torch_order():
            train_step(run, batches.next(), 1e-3, False)

    run_ranks(body, folder, 1)
    return torch.load(folder / "all.pt")


def trained(folder: Path, world: int, flags: list[str]) -> dict[str, Any]:
    """Train, and check that all of a group's parameters are frozen, and no other one."""
    asked = checked(folder, world, [*flags, "--optimizer.ema_decay", "0.5"])

    def body() -> None:
        run = assemble(asked)
        optimizer, named = run.optimizer, dict(run.model.named_parameters())
        before, update = {name: whole(p) for name, p in named.items()}, optimizer.step
        kept = {name for name, own in optimizer.settings.items() if own.group == "kept"}
        result: dict[str, Any] = {"gradients": {}, "steps": []}
        assert kept

        def look_then_update(*given: Any) -> None:
            assert {name for name, p in named.items() if p.grad is None} == kept
            result["gradients"] = result["gradients"] or {
                n: whole(p.grad) for n, p in named.items() if p.grad is not None
            }
            update(*given)

        optimizer.step = look_then_update  # type: ignore[method-assign]
        with closing(batches_of(run)) as batches, torch_order():
            for n in range(STEPS):
                found = train_step(run, batches.next(), 1e-3, False, logged=n == 0)
                result["steps"].append(torch.stack((found["loss"], found["grad_norm"])))
                if n == 0:
                    measured = {key.partition(".")[2] for key in found if key.startswith("update_ratio.")}
                    assert measured == {own.group for own in optimizer.settings.values()} - {"kept"}
        saved = {name: whole(t) for name, t in tensors_of(run).items() if not name.startswith("rng/")}
        for name in named:
            assert torch.equal(saved[f"model/{name}"], before[name]) == (name in kept), name
            assert torch.equal(saved[f"ema/{name}"], before[name]) == (name in kept), name
            assert any(key.startswith("optimizer/") and key.endswith(f"/{name}") for key in saved) != (name in kept)
        (entry,) = (each for each in run.receipt.entries if each.feature == "optimizer")
        elements = sum(before[name].numel() for name in kept)
        assert entry.applied["kept"] == f"frozen, {elements:,} elements"  # type: ignore[index,call-overload]
        if dist.get_rank() == 0:
            torch.save(result, folder / "result.pt")

    run_ranks(body, folder, world)
    return torch.load(folder / "result.pt")


@pytest.mark.parametrize(
    ("world", "base", "patterns", "flags"),
    [
        (2, "muon", DENSE, KEEP),  # two micro-steps
        (2, "adamw", DENSE, (*TP, *ASYNC)),
        (2, "muon", MIXED, (*MIXTURE, *EP)),
        *slow(
            (4, "normuon", DENSE, TP),
            (2, "dion2", DENSE, ()),
            (2, "lion", DENSE, ()),
            (2, "muon", MIXED, (*MIXTURE, *TP)),
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_frozen_weights_keep_their_bits_and_others_train_as_on_one_process(
    world: int, base: str, patterns: tuple[str, ...], flags: tuple[str, ...], tmp_path: Path
) -> None:
    """Losses and gradients differ by the order of sums: 1e-5 of the largest. One process computes the gradients of the
    first step as if nothing was frozen, bit for bit.
    """
    model = flags[:2] if flags[:2] == MIXTURE else ()
    own = [flag for flag in lion(tmp_path) if "recipe=" not in flag] if base == "lion" else []
    recipe = [*own, "--optimizer.recipe", frozen(tmp_path, patterns, base)]
    alone, split = (trained(tmp_path, n, [*recipe, *own]) for n, own in ((1, model), (world, flags)))
    for ours, truth in zip(split["steps"], alone["steps"], strict=True):
        assert ((ours - truth).abs() <= 1e-5 * truth).all()
    for name, truth in alone["gradients"].items():
        assert (split["gradients"][name] - truth).abs().max() <= 1e-5 * truth.abs().max(), name
    every = gradients_of_all(tmp_path, [*model])
    assert all(torch.equal(gradient, every[name]) for name, gradient in alone["gradients"].items())


def test_one_process_equals_a_model_frozen_by_hand(tmp_path: Path) -> None:
    """The norm, by which gradients are clipped, is of the trained parameters. Bounds as in `test_optimizer.py`."""
    flags = ["--optimizer.recipe", frozen(tmp_path, DENSE), "--training.local_batch_size", "4"]
    ours = trained(tmp_path, 1, flags)["steps"]
    asked = checked(tmp_path, 1, flags)

    def body() -> None:
        run = assemble(asked)
        model = whole_model(run)
        for name, p in model.named_parameters():
            p.requires_grad_(run.optimizer.settings[name].rule != "frozen")
        left = [p for p in model.parameters() if p.requires_grad]
        groups = [{"params": [p for p in left if p.ndim == n], "weight_decay": d} for n, d in ((1, 0.0), (2, 0.1))]
        adamw = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
        with closing(batches_of(run)) as batches:
            for loss, norm in ours:
                (batch,) = batches.next()
                truth = F.cross_entropy(model(batch.tokens), batch.targets)
                truth.backward()
                true_norm = nn.utils.clip_grad_norm_(left, 1.0)
                adamw.step()
                adamw.zero_grad()
                assert abs(loss - truth) <= 1e-6 * truth
                assert abs(norm - true_norm) <= 1e-5 * true_norm

    run_ranks(body, tmp_path, 1)


@pytest.mark.parametrize(
    ("name", "pattern", "reduction"),
    [("first", "layers.0.*", "float32"), ("every", "layers.*", "none: blocks are frozen")],
)
def test_the_receipt_has_the_reduction_of_blocks_that_are_trained(
    name: str, pattern: str, reduction: str, desk: Desk
) -> None:
    run = desk.run(name, 2, f"--optimizer.recipe={frozen(desk.folder, (pattern,))}", "--job.stop_after=1")
    assert run.receipt["dtypes"]["applied"]["reduction"] == reduction


def test_a_resume_that_freezes_or_unfreezes_is_refused_or_begins_with_fresh_state(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, fresh = f"--optimizer.recipe={frozen(desk.folder, DENSE)}", "--optimizer.fresh_state=true"
    desk.run("run", 1, "--job.stop_after=1")
    refused = desk.run("run", 1, recipe, "--job.stop_after=2", ends=2)
    assert '"adamw" for tok_embeddings.weight' in refused.output
    name, moment = "model/tok_embeddings.weight", "optimizer/exp_avg/tok_embeddings.weight"
    desk.run("run", 1, recipe, fresh, "--job.stop_after=2")
    on = desk.run("run", 1, recipe, "--job.stop_after=3")  # of the same recipe: its state goes on
    first, second, third = ({k.partition(" ")[0]: v for k, v in on.content(n).items()} for n in (1, 2, 3))
    assert [step["step"] for step in on.steps] == [1, 2, 3]
    assert (moment in first, moment in second) == (True, False)
    assert first[name] == second[name] == third[name]
    assert third["model/norm.weight"] != second["model/norm.weight"]
    again = desk.run("run", 1, "--job.stop_after=4", ends=2)
    assert '"frozen" for tok_embeddings.weight' in again.output
    assert "optimizer.fresh_state = true" in again.output
    assert main(["validate", str(on.folder / "config.toml"), "--optimizer.recipe=adamw"]) == 2
    assert '"frozen" for tok_embeddings.weight' in capsys.readouterr().err
    last = desk.run("run", 1, fresh, "--job.stop_after=4")
    assert last.content(4)[f"{name} (0, 0)"] != third[name]
