"""The first tensor in which two runs part: none where a layout differs, the changed one where a change was planted."""

from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.needs import slow
from tests.support.pairs import CHANGED, EQUAL, Change, nothing
from tests.support.ranks import run_ranks
from tests.support.short_run import assemble, batches_of, checked
from titanlite.comparison.layers import Sketches, first_parting
from titanlite.training.attention import torch_order
from titanlite.training.sketch_steps import sketch_steps

STEPS = 2


class Sketched:
    """Sketches of runs, each taken once."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._taken = folder, dict[tuple[int, str, Change], Sketches]()

    def of(self, world: int, flags: str, change: Change = nothing) -> Sketches:
        if (world, flags, change) not in self._taken:
            self._taken[world, flags, change] = self._take(world, flags, change)
        return self._taken[world, flags, change]

    def _take(self, world: int, flags: str, change: Change) -> Sketches:
        folder = self._folder / str(len(self._taken))
        folder.mkdir()
        asked = checked(folder, world, flags.split())

        def body() -> None:
            run = assemble(asked)
            change(run)
            with closing(batches_of(run)) as batches, torch_order():
                sketches = sketch_steps(run, batches, STEPS)
            if dist.get_rank() == 0:
                torch.save(sketches, folder / "sketches.pt")

        run_ranks(body, folder, world)
        return {name: x.numpy() for name, x in torch.load(folder / "sketches.pt").items()}


@pytest.fixture(scope="module")
def sketched(tmp_path_factory: pytest.TempPathFactory) -> Sketched:
    return Sketched(tmp_path_factory.mktemp("sketches"))


@pytest.mark.parametrize("name", ["micro-batches of two", *slow("fsdp 2 x tp 2", "bfloat16, tp 2")])
def test_a_layout_alone_parts_nowhere(name: str, sketched: Sketched) -> None:
    pair = EQUAL[name]
    first, nudged = (sketched.of(1, f"{pair.arithmetic}{nudge}") for nudge in ("", " --training.nudge 1"))
    other = sketched.of(pair.world, f"{pair.arithmetic} {pair.flags}")
    logits = {f"{step} output of output" for step in (1, 2)}  # under TP a rank has those of a part of the vocabulary
    assert set(first) - set(other) <= logits
    assert first_parting(first, other, nudged) is None


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("sign of feed-forward 0", "output of layers.0.feed_forward"),
        ("RoPE base of llama3", "output of layers.0.attention"),
        ("shifted label", "gradient of output.weight"),
        ("missing reduction", "gradient of norm.weight"),
        ("weight decay on norms", "layers.0.attention_norm.weight after the update"),
        *slow(("bfloat16, sign of feed-forward 1", "output of layers.1.feed_forward")),
        *slow(("sign of attention 1", "output of layers.1.attention")),
        *slow(("bfloat16, missing reduction", "gradient of norm.weight")),
    ],
)
def test_a_planted_change_is_found_where_it_was_planted(name: str, tensor: str, sketched: Sketched) -> None:
    pair = CHANGED[name]
    first, nudged = (sketched.of(1, f"{pair.arithmetic}{nudge}") for nudge in ("", " --training.nudge 1"))
    found = first_parting(first, sketched.of(pair.world, f"{pair.arithmetic} {pair.flags}", pair.change), nudged)
    assert found is not None
    assert (found.step, found.tensor) == (1, tensor)
