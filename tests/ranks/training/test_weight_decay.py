"""Weight decay over a run: without gradients, weights shrink by the learning rate times weight decay, and no more."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.needs import slow
from tests.support.own_rule import lion
from tests.support.ranks import run_ranks
from tests.support.short_run import assemble, checked

EPS = torch.finfo(torch.float32).eps
PEAK, WEIGHT_DECAY = 0.5, 0.25


@pytest.mark.parametrize(
    ("recipe", "rules"),
    [("muon", {"adamw", "muon"}), *slow(("normuon", {"adamw", "normuon"}), ("lion", {"adamw", "Lion"}))],
)
def test_weight_decay_follows_the_schedule(recipe: str, rules: set[str], tmp_path: Path) -> None:
    """By every rule: with the rate, half of it at half the peak; and with `"lr"` a quarter."""
    asked = checked(tmp_path, 1, lion(tmp_path) if recipe == "lion" else ["--optimizer.recipe", recipe])

    def shrunk(schedule: str, share: float) -> None:
        own = replace(asked.config.optimizer, lr=PEAK, weight_decay=WEIGHT_DECAY, weight_decay_schedule=schedule)
        run = assemble(replace(asked, config=replace(asked.config, optimizer=own)))
        optimizer = run.optimizer
        assert {own.rule for own in optimizer.settings.values()} == rules
        for lr in (PEAK, PEAK / 2):
            before = {name: p.clone() for name, p in optimizer.locals.items()}
            zeros = {name: torch.zeros_like(p) for name, p in before.items()}
            optimizer.step(zeros, lr, torch.ones(()), torch.zeros(()))
            for name, p in optimizer.locals.items():
                decays = 0.0 if name.endswith("norm.weight") else WEIGHT_DECAY
                factor = 1 - lr * optimizer.settings[name].lr_factor * decays * (1 if lr == PEAK else share)
                assert ((p - factor * before[name]).abs() <= 2 * EPS * p.abs()).all(), (name, lr)
                assert p.any()

    def body() -> None:
        shrunk("constant", 1.0)
        shrunk("lr", 0.5)

    run_ranks(body, tmp_path, 1)
