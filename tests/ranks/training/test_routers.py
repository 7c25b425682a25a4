"""A mixture of experts trains, alike under FSDP; its bias follows the use of experts, and is in checkpoints."""

import math
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from tests.support.short_run import assemble, batches_of, checked, take_steps
from titanlite.checkpoint.publish import step_folder
from titanlite.checkpoint.saved_state import SavedState
from titanlite.checkpoint.state import Checkpoints
from titanlite.evaluation.load import load_model
from titanlite.models.experts import MixtureOfExperts
from titanlite.observe.metrics import read_metrics
from titanlite.parallel.kept_state import state_of, written
from titanlite.training.attention import torch_order
from titanlite.training.build import Run
from titanlite.training.state import tensors_of
from titanlite.training.step import train_step

if TYPE_CHECKING:
    from tests.support.launched import Desk

MIXTURE = ("--model.name=qwen3_moe",)
RATE = 0.01
BIASED = f'extends = "qwen3_moe-debug"\n[experts]\nscore = "sigmoid"\nbalance_loss = 0.0\nbalance_bias = {RATE}\n'


def biased(folder: Path) -> tuple[str, ...]:
    """Flags of a recipe whose balance is a bias's."""
    (folder / "recipes" / "model").mkdir(parents=True, exist_ok=True)
    (folder / "recipes" / "model" / "qwen3_moe-biased.toml").write_text(BIASED)
    return (*MIXTURE, "--model.flavor=biased", f"--job.recipe_dirs={folder / 'recipes'}")


def layers_of(run: Run) -> list[MixtureOfExperts]:
    return [module for module in run.model.modules() if isinstance(module, MixtureOfExperts)]


@pytest.mark.slow
def test_a_bias_is_saved_and_loaded_under_another_number_of_ranks(tmp_path: Path) -> None:
    flags, folder = biased(tmp_path), tmp_path / "checkpoints"
    asked = {world: checked(tmp_path, world, flags) for world in (1, 2)}

    def save() -> None:
        run = assemble(asked[2])
        take_steps(run, 2)
        Checkpoints(folder, keep=0).save(2, tensors_of(run), SavedState())
        if dist.get_rank() == 0:
            torch.save([layer.bias for layer in layers_of(run)], tmp_path / "bias.pt")

    def load() -> None:
        run = assemble(asked[1])
        assert not any(layer.bias.any() for layer in layers_of(run))  # type: ignore[union-attr]
        Checkpoints(folder, keep=0).load(2, tensors_of(run))
        saved = torch.load(tmp_path / "bias.pt")
        assert all(bias.abs().max() > 0 for bias in saved)
        of = asked[1]
        evaluated, _ = load_model(of.config, of.dims, run.mesh.built_for, step_folder(folder, 2))
        for layers in (layers_of(run), [m for m in evaluated.modules() if isinstance(m, MixtureOfExperts)]):
            for layer, bias in zip(layers, saved, strict=True):
                torch.testing.assert_close(layer.bias, bias, rtol=0, atol=0)

    run_ranks(save, tmp_path, 2)
    run_ranks(load, tmp_path, 1)


def test_what_is_seen_is_of_the_steps_since_it_was_last_and_of_all_ranks(tmp_path: Path) -> None:
    """Against sums over the ranks' own counters: what `seen` says of two steps, and then of a third alone. A step that
    brought no numbers is in its own line, and in none behind it."""
    asked = checked(tmp_path, 2, MIXTURE)

    def body() -> None:
        run, before = assemble(asked), []
        assert run.routers is not None
        with closing(batches_of(run)) as batches, torch_order():
            for steps in (2, 1):
                for _ in range(steps):
                    train_step(run, batches.next(), 1e-3, False)
                totals = [torch.cat((layer.counts.double(), layer.sums)) for layer in layers_of(run)]
                routing = run.routers.read(run.routers.seen().tolist())
                seen = routing.numbers
                for total in totals:
                    dist.all_reduce(total)
                since = [total - (before[n] if before else 0) for n, total in enumerate(totals)]
                before = [torch.cat((total[:-4], torch.zeros(4))) for total in totals]
                for n, (*counts, entropy, balance, z, shares) in enumerate(x.tolist() for x in since):
                    tokens = steps * 4 * 64
                    assert sum(counts) == 2 * tokens
                    assert shares == pytest.approx(steps, rel=1e-6)
                    assert routing.tokens[f"layers.{n}"] == counts
                    wanted = {
                        "fullest": max(counts) * 8 / sum(counts),
                        "emptiest": min(counts) * 8 / sum(counts),
                        "entropy": entropy / tokens,
                        "balance_loss": balance / steps,
                        "z_loss": z / steps,
                    }
                    for what, number in wanted.items():
                        assert seen[f"experts_{what}.layers.{n}"] == pytest.approx(number, rel=1e-6)
                    assert wanted["fullest"] > 1 > wanted["emptiest"]
                assert len(seen) == 5 * len(totals)
            for is_broken in (True, False):
                train_step(run, batches.next(), 1e-3, False)
                if is_broken:
                    layers_of(run)[0].sums.fill_(torch.nan)
                assert run.routers.seen().isnan().any() == is_broken

    run_ranks(body, tmp_path, 2)


def test_the_tokens_of_experts_go_on_where_a_run_was_stopped(desk: "Desk", monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each step those of all ranks: 4 sequences of 64, two experts each. No step is missing, and none is twice.

    The checkpoint is of step 3, which is not logged.
    """
    from tests.support.launched import SMALL

    monkeypatch.delitem(SMALL, "model.ffn_dim")
    flags = (*MIXTURE, "--model.flavor=debug", "--training.steps=5", "--metrics.log_freq=2")
    desk.run("mixture", 2, *flags, "--job.stop_after=3")
    path = desk.run("mixture", 2, *flags).folder / "experts.jsonl"
    rows = read_metrics(path)
    assert [(row["step"], row["tokens"]) for row in rows] == [(step, 4 * 64 * step) for step in (2, 3, 4, 5)]
    for row, steps in zip(rows, (2, 1, 1, 1), strict=True):
        assert list(row["experts"]) == ["layers.0", "layers.1"]
        assert [sum(tokens) for tokens in row["experts"].values()] == [steps * 2 * 4 * 64] * 2


def test_the_receipt_says_that_float8_leaves_routers_alone(tmp_path: Path) -> None:
    asked = checked(tmp_path, 1, (*MIXTURE, "--float8.recipe=rowwise"))

    def body() -> None:
        run = assemble(asked)
        (entry,) = [entry for entry in run.receipt.entries if entry.feature == "float8"]
        why = {skipped.what: skipped.why for skipped in entry.skipped}
        assert why["layers.0.experts.router"] == "a router's logits are of float32"
        assert not any("w13" in name or "w2" in name for name in why)

    run_ranks(body, tmp_path, 1)


MIXED = """
from dataclasses import replace
from titanlite.models import llama3
from titanlite.models.experts import MixtureOfExperts

class Mine(MixtureOfExperts):
    calls = 0

    def forward(self, x):
        return super().forward(x)

class Mixed(llama3.Llama3):
    def __init__(self, dims, seq_len):
        super().__init__(dims, seq_len)
        for layer, change in zip(self.layers[1:], ({"n_experts": 4}, {"top_k": 1, "balance_bias": 0.01}), strict=True):
            of = replace(dims, experts=replace(dims.experts, **change))
            layer.feed_forward = Mine(of, 0.02, 0.01)

    def fill_buffers(self):
        super().fill_buffers()
        for layer in self.layers[1:]:
            layer.feed_forward.fill_buffers()
"""


def mixed(folder: Path, forward: str = "return super().forward(x)") -> tuple[str, ...]:
    """Flags of a model file with a dense block, one of four experts and one of eight, of which a token has one."""
    (folder / "mixed.py").write_text(MIXED.replace("return super().forward(x)", forward))
    (folder / "model").mkdir()
    experts = "n_layers = 3\n[experts]\nn_experts = 8\ntop_k = 2\nffn_dim = 128\nbalance_loss = 0.01\n"
    (folder / "model" / "mixed-small.toml").write_text(f'extends = "llama3-debug"\n{experts}')
    file = f"--model.file={folder / 'mixed.py'}", "--model.flavor=small", f"--job.recipe_dirs={folder}"
    return (*file, "--activation_checkpoint.recipe=balanced", "--job.strict=false")


def test_mixtures_of_a_model_may_differ(tmp_path: Path) -> None:
    asked = checked(tmp_path, 2, mixed(tmp_path))

    def body() -> None:
        run = assemble(asked)
        take_steps(run, 2)
        kept = state_of(run.model, run.save_list_use.checkpointed)
        assert written(run.kept_state, kept, "mixed.py") is None
        assert run.routers is not None
        assert [layer.n_layers for layer in layers_of(run)] == [2, 2]  # a dense block has no loss of a router
        routing = run.routers.read(run.routers.seen().tolist())
        seen = routing.numbers
        for n, (layer, E, K) in enumerate(zip(layers_of(run), (4, 8), (2, 1), strict=True), 1):
            counts = layer.counts.clone()
            dist.all_reduce(counts)
            name = f"layers.{n}.feed_forward"
            assert counts.sum() == K * 2 * 4 * 64
            assert routing.tokens[name] == counts.tolist()
            assert seen[f"experts_fullest.{name}"] == pytest.approx(counts.max().item() * E / counts.sum().item())
            assert seen[f"experts_emptiest.{name}"] == pytest.approx(counts.min().item() * E / counts.sum().item())
            assert 0.5 * math.log(E) < seen[f"experts_entropy.{name}"] <= math.log(E) + 1e-6
            assert 0.9 * K < seen[f"experts_balance_loss.{name}"] < E + 1e-6
        unbiased, biased = layers_of(run)
        assert unbiased.bias is None
        assert biased.bias is not None
        assert {*biased.bias.mul(100).round().int().tolist()} <= {-2, -1, 0, 1, 2}
        assert biased.bias.any()
        widths = {key: number for key, number in seen.items() if "bias_range" in key}
        assert widths == {"experts_bias_range.layers.2.feed_forward": (biased.bias.max() - biased.bias.min()).item()}

    run_ranks(body, tmp_path, 2)


@pytest.mark.slow
def test_the_receipt_names_the_experts_of_all_that_differ(tmp_path: Path) -> None:
    flags = mixed(tmp_path)
    file = tmp_path / "mixed.py"
    file.write_text(file.read_text().replace("= Mine(of", "= MixtureOfExperts(of"))  # which ranks can share
    asked = checked(tmp_path, 2, (*flags, "--parallelism.expert_parallel_degree=2"))

    def body() -> None:
        (entry,) = [entry for entry in assemble(asked).receipt.entries if entry.feature == "expert_parallel"]
        assert entry.applied["experts of a rank"] == [2, 4]  # type: ignore[index]
        assert entry.applied["rows of a window"] == 3 * 128 * 2 // 4  # type: ignore[index]

    run_ranks(body, tmp_path, 2)


def test_a_mixture_of_ones_own_that_counts_its_calls_is_found(tmp_path: Path) -> None:
    """A save-list would count them twice."""
    asked = checked(tmp_path, 1, mixed(tmp_path, "self.calls += 1; return super().forward(x)"))

    def body() -> None:
        run = assemble(asked)
        take_steps(run, 1)
        found = written(run.kept_state, state_of(run.model, run.save_list_use.checkpointed), "mixed.py")
        assert "layers.1.feed_forward.calls and 1 more" in str(found)

    run_ranks(body, tmp_path, 1)
