"""The state of an optimizer goes on under any layout to the same bits, and is left by another one when told to."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.launched import Desk
from tests.support.needs import slow
from tests.support.own_rule import lion
from tests.support.ranks import run_ranks
from tests.support.short_run import assemble, checked, whole
from titanlite.checkpoint import store
from titanlite.commands import main
from titanlite.parallel.initialise import local_slice
from titanlite.training.build import Run
from titanlite.training.state import tensors_of

TP, EP, REPLICAS = (
    (f"--parallelism.{key}", "2")
    for key in ("tensor_parallel_degree", "expert_parallel_degree", "data_parallel_replicate_degree")
)
# Of the embedding and the head a tensor-parallel rank has 131 rows, which FSDP cannot halve.
SIZES = {"n_layers": 2, "dim": 64, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 256, "vocab_size": 262}
DENSE = [word for key, value in SIZES.items() for word in (f"--model.{key}", str(value))]
NORMUON, DION2 = (["--optimizer.recipe", name] for name in ("normuon", "dion2"))
FRESH = "--optimizer.fresh_state=true"
MIXTURE = ["--model.name", "qwen3_moe", "--model.n_layers", "1"]


def update(run: Run, first: int, last: int) -> None:
    """Apply updates by gradients that have the same bits under every layout, as sums over ranks have not."""
    for step in range(first, last + 1):
        grads: dict[str, Tensor] = {}
        for n, (name, p) in enumerate(run.optimizer.parameters.items()):
            drawn = torch.randn(p.shape, generator=torch.Generator().manual_seed(1000 * step + n))
            grads[name] = local_slice(drawn, p).clone()
        run.optimizer.step(grads, 1e-3 * step, torch.full((), 1.5), torch.zeros(()))


def content(run: Run) -> dict[str, Tensor]:
    """Weights and state, whole."""
    return {name: whole(t) for name, t in tensors_of(run).items() if not name.startswith("rng/")}


@pytest.mark.parametrize(
    ("world", "flags", "layouts"),
    [
        (4, [*DENSE, *NORMUON], [(), TP, ()]),
        (4, [*DENSE, *DION2], [TP, (), REPLICAS]),
        (2, [*DENSE, "lion"], [(), TP]),
        *slow(
            (2, DENSE, [(), TP]),
            (4, DENSE, [(), TP, REPLICAS]),
            (4, [*DENSE, *NORMUON, "--optimizer.state_dtype", "bfloat16"], [(), TP, REPLICAS]),
            (4, [*MIXTURE, *NORMUON], [EP, (*EP, *TP), ()]),
            (4, [*MIXTURE, *DION2, "--optimizer.state_dtype", "bfloat16"], [EP, (*EP, *TP), ()]),
            (4, DENSE, [(*TP, *REPLICAS), (), TP]),
            (4, [*DENSE, "--optimizer.state_dtype", "bfloat16"], [TP, REPLICAS]),
            (4, MIXTURE, [(), EP, (*EP, *REPLICAS), (*EP, *TP)]),
        ),
    ],
)
def test_twenty_updates_under_changing_layouts_are_those_under_one(
    world: int, flags: list[str], layouts: Sequence[tuple[str, ...]], tmp_path: Path
) -> None:
    own = [*flags[:-1], *lion(tmp_path)] if flags[-1] == "lion" else ["--optimizer.recipe", "muon", *flags]
    asked = [checked(tmp_path, world, ["--training.deterministic", "true", *own, *layout]) for layout in layouts]

    def body() -> None:
        one, former = assemble(asked[0]), assemble(asked[0])
        update(one, 1, 20)
        update(former, 1, 10)
        ends = [10 + 10 * n // (len(asked) - 1) for n in range(len(asked))]
        for n, (begin, end) in enumerate(pairwise(ends), 1):
            (folder := tmp_path / str(n)).mkdir(exist_ok=True)
            store.write(folder, tensors_of(former))
            store.read(folder, tensors_of(now := assemble(asked[n])))
            update(former := now, begin + 1, end)
        truth, ours = content(one), content(former)
        assert truth.keys() == ours.keys()
        kinds = {name.split("/")[1] for name in truth if name.startswith("optimizer/")}
        whole_rows = {"second_moment"} if "normuon" in flags else set[str]()
        assert kinds == {"updates", "momentum", "exp_avg", "exp_avg_sq"} | whole_rows
        assert all(truth[name].any() for name in truth if name.startswith("optimizer/"))
        different = [name for name in truth if not torch.equal(truth[name], ours[name])]
        assert not different, different

    run_ranks(body, tmp_path, world)


def test_a_branch_with_another_optimizer_is_refused_before_it_has_a_folder_or_begins_with_fresh_state(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    trunk = desk.run("trunk", 1, "--job.stop_after=2")
    muon = "--optimizer.recipe=muon", f"--checkpoint.initial_load_path={trunk.folder}", "--job.stop_after=3"
    refused = desk.run("branch", 1, *muon, "--job.strict=false", ends=2)
    assert "step-00000002: 1 problem\n" in refused.output
    assert 'optimizer.recipe = "muon"\n' in refused.output
    assert not refused.folder.exists()
    assert main(["validate", str(trunk.folder / "config.toml"), "--job.name=branch", *muon, FRESH]) == 0
    told = desk.run("branch", 1, *muon, FRESH)
    for said in (capsys.readouterr().out, told.output):
        assert "step-00000002: weights and place in the data" in said
        assert "the optimizer's state starts afresh: that of step-00000002 is of another optimizer" in said
    assert [row["step"] for row in told.steps] == [3]


def test_another_optimizer_begins_with_fresh_state_and_only_when_told_to(desk: Desk) -> None:
    recipe = "--optimizer.recipe=muon"
    desk.run("other", 1, "--job.stop_after=2")
    refused = desk.run("other", 1, recipe, "--job.stop_after=4", ends=2)
    assert 'optimizer.recipe = "muon"\n' in refused.output
    assert '"adamw" for layers.*.attention.wqkv.weight, layers.*.attention.wo.weight, ' in refused.output
    assert "optimizer.fresh_state = true" in refused.output
    told = desk.run("other", 1, recipe, "--job.stop_after=3", FRESH)
    assert told.receipt["optimizer.fresh_state"]["applied"] == "state starts afresh"
    assert [row["step"] for row in told.steps] == [1, 2, 3]
    again = desk.run("other", 1, recipe, "--job.stop_after=4", FRESH)
    assert again.receipt["optimizer.fresh_state"]["applied"] == (
        "not needed: step-00000003 is of the same optimizer, whose state goes on"
    )
    of_muon = again.receipt["optimizer"]["applied"]["of muon"]
    assert of_muon["matrices"] == 2 * 7
    assert of_muon["owners"] == of_muon["buckets"] == 1
