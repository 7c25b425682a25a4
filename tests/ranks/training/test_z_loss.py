"""A step with a cap of logits and a z-loss, under several layouts, against the plain formula and torch's gradients.

Bounds as in `test_layouts.py`: sums of 256 float32 terms in another order.
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.ranks import run_ranks
from tests.support.short_run import assemble, batches_of, checked, whole
from titanlite.training.attention import torch_order
from titanlite.training.build import Run
from titanlite.training.step import train_step, validation_loss

CAP, Z_LOSS = 0.5, 0.1  # of logits up to 2, so that the cap bends most of them
KEYS = ["--model.logit_softcap", str(CAP), "--training.z_loss", str(Z_LOSS)]
TP_2 = ["--parallelism.tensor_parallel_degree", "2"]


def gradients(run: Run) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in run.model.named_parameters()}


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Cross-entropy, mean square of lse, gradients and validation loss of one batch by the formula as it is written."""
    folder = tmp_path_factory.mktemp("truth")
    asked = checked(folder, 1, ["--training.local_batch_size", "4"])

    def body() -> None:
        run = assemble(asked)
        (batch,) = batches_of(run).next()
        with torch_order():
            logits = run.model(batch.tokens)
        assert logits.abs().max() > CAP
        capped = CAP * (logits / CAP).tanh()
        loss, z = F.cross_entropy(capped, batch.targets), capped.logsumexp(1).square().mean()
        (loss + Z_LOSS * z).backward()
        torch.save({"loss": loss.item(), "z": z.item(), "gradients": gradients(run)}, folder / "truth.pt")

    run_ranks(body, folder, 1)
    return torch.load(folder / "truth.pt", weights_only=False)


@pytest.mark.parametrize(
    ("world", "flags"),
    [(1, ["--training.local_batch_size", "2"]), (4, TP_2)],
    ids=["gradient accumulation 2", "FSDP 2 × TP 2"],
)
def test_a_step_is_that_of_the_plain_formula(world: int, flags: list[str], truth, tmp_path: Path) -> None:
    asked = checked(tmp_path, world, [*KEYS, *flags])

    def body() -> None:
        run = assemble(asked)
        update, found = run.optimizer.step, {}

        def record_then_update(*args: object) -> None:
            found.update(gradients(run))
            update(*args)

        batches = batches_of(run).next()
        with torch_order():
            held_out = validation_loss(run, batches)
            run.optimizer.step = record_then_update  # type: ignore[method-assign]
            result = train_step(run, batches, 1e-3, False)
        loss, z = result["loss"].item(), result["z_loss"].item()
        assert abs(loss - truth["loss"]) <= 1e-6 * truth["loss"]
        assert abs(z - truth["z"]) <= 1e-6 * truth["z"]
        assert abs((held_out[0] / held_out[1]).item() - truth["loss"]) <= 1e-6 * truth["loss"]  # without a z-loss
        for name, gradient in truth["gradients"].items():
            assert (found[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name

    run_ranks(body, tmp_path, world)
