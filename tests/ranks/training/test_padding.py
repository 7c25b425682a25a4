"""Tokens that pad samples take part in no mean over tokens; a step or micro-batch without a target changes nothing."""

import math
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.support.needs import slow
from tests.support.ranks import run_ranks
from tests.support.short_run import assemble, batches_of, checked, compute_in_float64, whole
from titanlite.commands import main
from titanlite.data.batches import Batch, TrainBatches
from titanlite.models.experts import MixtureOfExperts
from titanlite.observe.peak_flops import windows_of
from titanlite.preflight.checked_run import CheckedRun
from titanlite.training import routers as routers_file
from titanlite.training.attention import torch_order
from titanlite.training.build import Run
from titanlite.training.data import open_batches, open_data
from titanlite.training.state import tensors_of
from titanlite.training.step import train_step

if TYPE_CHECKING:
    from tests.support.launched import Desk

S, SEPARATOR = 256, 255
LENGTHS = [100, 120, 200, 150, 90, 7, 130, 256, 110, 230, 3, 180] * 2  # 1,576 of 2,048 tokens in each half
BALANCE, Z, RATE = 0.05, 0.01, 0.01
RECIPE = f"""extends = "qwen3_moe-debug"
[experts]
score = "sigmoid"
balance_loss = {BALANCE}
z_loss = {Z}
balance_bias = {RATE}
"""
TP, EP, CP = (f"--parallelism.{kind}_parallel_degree=" for kind in ("tensor", "expert", "context"))
HSDP = "--parallelism.data_parallel_replicate_degree="
MIXTURE = "--model.name=qwen3_moe"


@pytest.fixture
def packed(tmp_path: Path) -> list[str]:
    """Flags of whole documents in samples, a sixth of which is padding, for a mixture with all that trains routers."""
    random, ids = np.random.default_rng(0), list[int]()
    for length in LENGTHS:
        ids += [*random.integers(0, 200, length - 1).tolist(), SEPARATOR]
    np.array(ids, "<u2").tofile(tmp_path / "ids.bin")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "qwen3_moe-all.toml").write_text(RECIPE)
    own = [MIXTURE, "--model.flavor=all", f"--job.recipe_dirs={tmp_path}", f"--training.seq_len={S}"]
    source = [f"--data.source={tmp_path / 'ids.bin'}", f"--data.separator_id={SEPARATOR}", "--data.packing=best_fit"]
    return [*own, *source, "--training.local_batch_size=2"]


def packed_batches(asked: CheckedRun, run: Run) -> TrainBatches:
    return open_batches(open_data(asked, False), asked, run.mesh, asked.table, 0, windows_of(run.model))[0]


def by_loop(run: Run, batches: Sequence[Batch]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return gradients, and numbers of routers, of one process that counts tokens one by one."""
    layers = {name: m for name, m in run.model.named_modules() if isinstance(m, MixtureOfExperts)}
    logits: dict[str, Tensor] = {}
    for name, layer in layers.items():
        layer.router.register_forward_hook(lambda _m, _x, y, name=name: logits.update({name: y}))
    run.model.eval()  # so that routers have no losses of their own
    targets = sum(int((batch.targets >= 0).sum()) for batch in batches)
    tokens, entropy, losses = {n: [0] * 8 for n in layers}, dict.fromkeys(layers, 0.0), {n: [0.0, 0.0] for n in layers}
    for batch in batches:
        y = run.model(batch.tokens, sequences=batch.sequences)
        loss = F.cross_entropy(y, batch.targets, ignore_index=-100, reduction="sum") / targets
        share = int((batch.targets >= 0).sum()) / targets
        # No document has one token: a separator behind another pads.
        ids = batch.tokens.tolist()
        text = [m for m in range(len(ids)) if not (m % S and ids[m - 1] == ids[m] == SEPARATOR)]
        for name, layer in layers.items():
            counts, probability, square = [0] * 8, torch.zeros(8), torch.zeros(())
            for m in text:
                row = logits[name][m]
                for expert in row.topk(layer.of.top_k).indices.tolist():  # the bias is zero in the first step
                    counts[expert] += 1
                    tokens[name][expert] += 1
                p = row.softmax(0)
                probability, square = probability + p, square + row.logsumexp(0).square()
                entropy[name] -= float((p * p.log()).sum().detach())
            balance = 8 * sum(n / len(text) * p / len(text) for n, p in zip(counts, probability, strict=True))
            z = square / len(text)
            loss = loss + share * (BALANCE * balance + Z * z) / len(layers)
            losses[name] = [a + share * b.item() for a, b in zip(losses[name], (balance, z), strict=True)]
        loss.backward()
    numbers = {}
    for name, own in tokens.items():
        short, mean, each = name.removesuffix(".experts"), sum(own) / 8, sum(own) / layers[name].of.top_k
        of = (max(own) / mean, min(own) / mean, entropy[name] / each, *losses[name])
        numbers |= {f"experts_{what}.{short}": n for what, n in zip(routers_file.SEEN, of, strict=True)}
        numbers |= {f"bias.{name}.{e}": RATE * float(np.sign(mean - n)) for e, n in enumerate(own)}
    return {name: whole(p.grad) for name, p in run.model.named_parameters()}, numbers  # type: ignore[arg-type]


LAYOUTS = {
    "one rank, two micro-batches": (1, []),
    "one rank, without a mask": (1, ["--data.document_mask=false"]),
    "EP 2": (2, [f"{EP}2"]),
    "CP 2": (2, [f"{CP}2"]),
    "TP 2": (2, [f"{TP}2"]),
    "TP 2 × EP 2": (2, [f"{TP}2", f"{EP}2"]),
    "TP 2 × CP 2": (4, [f"{TP}2", f"{CP}2"]),
    "a save-list": (2, [f"{CP}2", "--activation_checkpoint.recipe=full"]),
}
QUICK = ("one rank, two micro-batches", "EP 2")


@pytest.mark.parametrize("layout", [*QUICK, *slow(*(each for each in LAYOUTS if each not in QUICK))])
def test_routers_are_trained_by_tokens_that_pad_no_sample(layout: str, packed: list[str], tmp_path: Path) -> None:
    """In float64, against a loop over tokens: gradients, logged numbers and biases of a step."""
    world, flags = LAYOUTS[layout]
    given = [*packed, "--data.document_mask=true", *flags]
    asked, alone = checked(tmp_path, world, given), checked(tmp_path, 1, [f for f in given if "parallelism" not in f])

    def truth() -> None:
        compute_in_float64()
        run = assemble(alone)
        with closing(packed_batches(alone, run)) as batches, torch_order():
            step = batches.next()
            padded = sum(int((batch.is_counted == 0).sum()) for batch in step)  # type: ignore[union-attr]
            assert padded > 4 * S / 10
            torch.save(by_loop(run, step), tmp_path / "truth.pt")

    def body() -> None:
        compute_in_float64()
        run, found = assemble(asked), {}
        update = run.optimizer.step
        run.optimizer.step = lambda *given: (  # type: ignore[method-assign]
            found.update({name: whole(p.grad) for name, p in run.model.named_parameters()}),  # type: ignore[arg-type]
            update(*given),
        )
        with closing(packed_batches(asked, run)) as batches, torch_order():
            train_step(run, batches.next(), 1e-3, False)
        assert run.routers is not None
        seen = dict(run.routers.read(run.routers.seen().tolist()).numbers)
        for name, bias in run.routers.state().items():
            seen |= {f"bias.{name.removesuffix('.bias')}.{e}": number for e, number in enumerate(bias.tolist())}
        if dist.get_rank() == 0:
            torch.save((found, seen), tmp_path / "found.pt")

    run_ranks(truth, tmp_path, 1)
    run_ranks(body, tmp_path, world)
    (wanted, numbers), (found, seen) = (torch.load(tmp_path / f"{name}.pt") for name in ("truth", "found"))
    assert wanted.keys() == found.keys()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).abs().max() <= 1e-12 * gradient.abs().max(), name
    assert numbers.keys() == {key for key in seen if "bias_range" not in key}
    for key, number in numbers.items():
        assert seen[key] == pytest.approx(number, rel=1e-12 if "bias" not in key else 1e-6), key


STEPS = {
    "one rank": (1, []),
    "FSDP 2": (2, []),
    "HSDP 2": (2, [f"{HSDP}2"]),
    "TP 2": (2, [f"{TP}2"]),
    "TP 2, async": (2, [f"{TP}2", "--parallelism.async_tensor_parallel", "--job.strict=false"]),
    "CP 2": (2, [f"{CP}2", f"--training.seq_len={S}"]),
    "a mixture, EP 2": (2, [MIXTURE, f"{EP}2"]),
    "a mixture, TP 2": (2, [MIXTURE, f"{TP}2"]),
    "a mixture, CP 2": (2, [MIXTURE, f"{CP}2", f"--training.seq_len={S}"]),
    "Muon, FSDP 2": (2, ["--optimizer.recipe=muon"]),
    "NorMuon": (1, ["--optimizer.recipe=normuon"]),
    "Dion2, FSDP 2": (2, ["--optimizer.recipe=dion2"]),
    "tensorwise, FSDP 2": (2, ["--float8.recipe=tensorwise"]),
}
FEW = ("a mixture, CP 2",)


@pytest.mark.parametrize("layout", [*FEW, *slow(*(each for each in STEPS if each not in FEW))])
def test_a_step_without_a_target_changes_nothing(layout: str, tmp_path: Path) -> None:
    """No weight, moment, average or bias. The step after it is that of a run whose update was left out there; and a
    micro-batch without a target among others adds nothing. All to the bit."""
    world, flags = STEPS[layout]
    mixture = ()
    if MIXTURE in flags:
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "qwen3_moe-all.toml").write_text(RECIPE)
        mixture = ("--model.flavor=all", f"--job.recipe_dirs={tmp_path}")
    ema = "--optimizer.ema_decay=0.9"
    asked = checked(tmp_path, world, [*flags, *mixture, ema, "--training.global_batch_size=2"])

    def state(run: Run) -> list[Tensor]:
        return [whole(x) for name, x in tensors_of(run).items() if not name.startswith("rng/")]

    def body() -> None:
        run, other = assemble(asked), assemble(asked)
        with closing(batches_of(run)) as batches, torch_order():
            first, second, third = (batches.next() for _ in range(3))
            empty = batches.padding(2)
            for each in (run, other):
                train_step(each, first, 1e-3, False)
            before = state(run)
            result = train_step(run, empty, 1e-3, False, logged=True)
            assert result["skipped"] == 1  # the update was left out
            assert result["targets"] == 0  # as there was no target
            assert not [i for i, (a, b) in enumerate(zip(before, state(run), strict=True)) if not a.equal(b)]
            if run.routers is not None:
                seen = run.routers.read(run.routers.seen().tolist())
                assert all(map(math.isfinite, seen.numbers.values()))
                again = run.routers.read(run.routers.seen().tolist())  # of no step at all
                assert not [key for key in again.numbers if "bias_range" not in key]
            _leave_out(other)
            train_step(other, second, 1e-3, False)
            _take_again(other)
            if other.routers is not None:
                other.routers.seen()
            results = train_step(run, [*third, *empty], 1e-3, False), train_step(other, third, 1e-3, False)
            assert results[0] == results[1]
            assert results[0]["skipped"] == 0
            assert not [i for i, (a, b) in enumerate(zip(state(run), state(other), strict=True)) if not a.equal(b)]
            assert any(not a.equal(b) for a, b in zip(before, state(run), strict=True))
            if run.routers is not None and other.routers is not None:
                assert run.routers.seen().equal(other.routers.seen())

    run_ranks(body, tmp_path, world)


def _leave_out(run: Run) -> None:
    """Let a run take no update."""
    step, one = run.optimizer.step, torch.ones(())
    run.optimizer.step = lambda grads, lr, divisor, skip, norms=None: step(grads, lr, divisor, one, norms)  # type: ignore[method-assign,assignment]
    if (average := run.average) is not None:
        update = average.update
        average.update = lambda skip: update(one)  # type: ignore[method-assign]
    if (routers := run.routers) is not None:
        balance = routers.balance
        routers.balance = lambda skip: balance(one)  # type: ignore[method-assign]


def _take_again(run: Run) -> None:
    """Let it take updates as before."""
    for part, name in ((run.optimizer, "step"), (run.average, "update"), (run.routers, "balance")):
        if part is not None:
            vars(part).pop(name)


def test_a_run_on_separators_alone_says_so_and_stays_as_it_is(
    desk: "Desk", tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows have `targets = 0` and no loss; to validate on such a file is refused."""
    from tests.support.launched import SMALL

    monkeypatch.delitem(SMALL, "model.ffn_dim")  # a mixture has none
    np.zeros(20_000, "<u2").tofile(tmp_path / "zeros.bin")
    source = f"--data.source={tmp_path / 'zeros.bin'}", "--data.separator_id=0", "--data.document_mask=true"
    flags = (*source, MIXTURE, "--training.steps=6", "--checkpoint.interval=2", "--training.on_nonfinite=skip")
    run = desk.run("zeros", 2, *flags)
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["targets"] == 0 and not {"loss", "grad_norm"} & row.keys() for row in run.rows)
    assert [row["tokens"] for row in run.rows] == [4 * 64 * step for step in range(1, 7)]
    assert run.rows[0]["lr"] != run.rows[1]["lr"]
    assert run.content(2) == run.content(6)
    assert run.output.count("no token of it has a target") == 1
    # A file that begins with separators is one of separators only as far as validation reads it.
    np.array([*[0] * 192, *range(1, 250)] * 3, "<u2").tofile(tmp_path / "begins.bin")
    held_out = ("--validation.enable=true", f"--validation.source={tmp_path / 'begins.bin'}")
    few = ("--training.global_batch_size=1", "--training.local_batch_size=1", "--validation.steps=3")
    assert main(["validate", *desk.flags("few", *source, *held_out, *few), "--world", "1"]) == 2
    assert "validation.source" in capsys.readouterr().err
    assert main(["validate", *desk.flags("few", *source, *held_out)]) == 0
