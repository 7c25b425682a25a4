"""A mixture of experts under tensor parallelism: each rank sends its own tokens to experts, whatever ranks have those.

FSDP over as many data-parallel ranks is the truth: the same micro-batches, of which the balance loss is. Losses of all
steps and gradients of the first are within 1e-6, for which `tests/ranks/training/test_layouts.py` has the reason; those
of norms of heads, which are sums over heads too, within the root of so many times that; norms of later steps within
1e-5, as the first update of Adam has the sign of a gradient however small that is.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks.parallel.test_expert_parallel import OWN, off_by
from tests.support.needs import slow
from tests.support.ranks import run_ranks
from tests.support.short_run import Trained, checked, require_loads, train
from titanlite.config.schema import Model
from titanlite.errors import ShardingError
from titanlite.kernels.experts import experts
from titanlite.models import moe
from titanlite.models.experts import MixtureOfExperts
from titanlite.models.find import build_model
from titanlite.parallel.expert import experts_to_share
from titanlite.recipes import load
from titanlite.sharding.layers import plan_layers
from titanlite.training.build import Run

RECIPE = """extends = "qwen3_moe-debug"
[experts]
shared = 4
score = "sigmoid"
balance_loss = 0.5
z_loss = 0.05
balance_bias = 0.01
"""
TP, EP = (f"--parallelism.{key}_parallel_degree=" for key in ("tensor", "expert"))
HSDP = "--parallelism.data_parallel_replicate_degree="
BATCH = "--training.local_batch_size=2"


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """Of a small mixture with everything that a recipe can ask for, and micro-batches of two sequences."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "qwen3_moe-all.toml").write_text(RECIPE)
    own = ["--model.name=qwen3_moe", "--model.flavor=all", f"--job.recipe_dirs={tmp_path}"]
    return [*own, "--optimizer.lr=3e-4", BATCH]


def bound(name: str) -> float:
    """Of a loss, a norm of all gradients, or a gradient; a sum over 256 tokens has 1e-6."""
    heads = next((n for part, n in {"q_norm": 8, "k_norm": 4}.items() if part in name), 1)
    return 1e-5 if name == "norm" else 1e-6 * heads**0.5


def assert_alike(got: Trained, truth: Trained) -> None:
    assert truth.gradients.keys() == got.gradients.keys() == got.weights.keys()
    assert all(torch.equal(got.weights[name], weight) for name, weight in truth.weights.items())
    errors = off_by(got, truth)
    print({name: f"{error:.1e}" for name, error in sorted(errors.items(), key=lambda item: -item[1])[:4]})
    wrong = {name: error for name, error in errors.items() if not error <= bound(name)}
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("world", "layout", "steps"),
    [
        (2, [f"{TP}2", f"{EP}2"], 2),
        *slow((2, [f"{TP}2"], 10), (4, [f"{TP}2"], 10), (4, [f"{TP}2", f"{EP}2"], 10), (4, [f"{TP}2", f"{EP}4"], 10)),
        *slow((4, [f"{TP}4", f"{EP}2"], 10), (4, [f"{TP}2", f"{EP}2", f"{HSDP}2"], 10)),
        *slow((2, [f"{TP}2", f"{EP}2", "--parallelism.async_tensor_parallel"], 3)),
        *slow((2, [f"{TP}2", f"{EP}2", "--compile.enable"], 3)),
    ],
)
def test_it_trains_as_fsdp_alone(world: int, layout: list[str], steps: int, flags: list[str], tmp_path: Path) -> None:
    """And every router's bias, and what is told of routing, is the same."""
    seen: dict[str, torch.Tensor] = {}
    noted = {}

    def note(run: Run) -> None:
        assert run.routers is not None
        balance, routers = run.routers.balance, run.routers

        def noting(skip: torch.Tensor) -> None:
            balance(skip)
            rows = torch.cat((routers.seen(), *(bias.flatten() for bias in routers.state().values())))
            if dist.get_rank() == 0:
                torch.save(rows, tmp_path / "seen.pt")

        run.routers.balance = noting  # type: ignore[method-assign]

    for name, ranks, more in (("truth", 2 if world == 4 and f"{TP}4" not in layout else 1, []), ("got", world, layout)):
        noted[name] = train(tmp_path, ranks, [*flags, *more], steps=steps, change=note, timeout_s=300)
        seen[name] = torch.load(tmp_path / "seen.pt")
    assert_alike(noted["got"], noted["truth"])
    torch.testing.assert_close(seen["got"], seen["truth"], rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("save_list", ["full", "balanced", "matmuls"])
def test_a_save_list_changes_no_bit(save_list: str, flags: list[str], tmp_path: Path) -> None:
    flags = [*flags, f"{TP}2", f"{EP}2"]
    truth = train(tmp_path, 2, flags, steps=3)
    got = train(tmp_path, 2, [*flags, f"--activation_checkpoint.recipe={save_list}"], steps=3)
    assert max(off_by(got, truth).values()) == 0


@pytest.mark.slow
def test_float8_is_as_near_to_float32_as_under_fsdp(tmp_path: Path) -> None:
    """Of gradients in other roundings: a token near a tie may go to another expert, so that they are not compared one
    by one. What expert parallelism changes is a scale of columns alone."""
    flags = ["--model.name=qwen3_moe", "--optimizer.lr=3e-4", BATCH]
    float8 = [*flags, "--training.mixed_precision_param=bfloat16", "--float8.recipe=rowwise"]
    truth, whole, split, shared_out = (
        train(tmp_path, world, layout, steps=1)
        for world, layout in [(2, flags), (2, float8), (4, [*float8, f"{TP}2"]), (4, [*float8, f"{TP}2", f"{EP}2"])]
    )
    ours, theirs = distances(split, truth), distances(whole, truth)
    assert 0.05 < sum(theirs) / len(theirs) < 0.15
    assert sum(ours) <= 1.1 * sum(theirs)
    assert max(ours) <= 1.25 * max(theirs)
    assert max(distances(shared_out, split)) <= 1e-2


def distances(got: Trained, truth: Trained) -> list[float]:
    """Of each gradient, relative to its norm."""
    pairs = ((got.gradients[name].double(), gradient.double()) for name, gradient in truth.gradients.items())
    return [((own - exact).norm() / exact.norm()).item() for own, exact in pairs]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "world", "both", "layout"),
    [
        (2, 4, [BATCH], [f"{TP}2", f"{EP}2"]),
        (2, 4, [BATCH], [f"{TP}2"]),
        *((n, n, more, [f"{EP}2"]) for n in (2, 4) for more in ([], ["--compile.enable"])),
    ],
)
def test_a_model_file_and_mixtral_train_alike(
    ranks: int, world: int, both: list[str], layout: list[str], tmp_path: Path
) -> None:
    """The file has two layers of experts in a block, none in the next, and some outside of blocks."""
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine-odd.toml").write_text(RECIPE.replace("shared = 4\n", ""))
    own = [f"--model.file={tmp_path / 'mine.py'}", "--model.flavor=odd", f"--job.recipe_dirs={tmp_path}"]
    for model in (own, ["--model.name=mixtral"]) if len(layout) > 1 else (own,):
        flags = [*model, "--optimizer.lr=3e-4", *both]
        truth = train(tmp_path, ranks, flags, steps=3, timeout_s=300)
        got = train(tmp_path, world, [*flags, *layout], steps=3, timeout_s=300)
        assert_alike(got, truth)
        if layout == [f"{EP}2"]:  # no weight is split
            assert off_by(got, truth)["norm"] <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        *(([f"{TP}2", f"{EP}2"], []), ([f"{EP}2"], [f"{TP}2"]), ([f"{TP}2"], [f"{TP}4", f"{EP}2"])),
        *(([f"{EP}2"], [f"{EP}4"]), ([f"{EP}4"], []), ([], [f"{EP}2"])),
    ],
)
def test_a_checkpoint_loads_under_another_layout(
    before: list[str], after: list[str], flags: list[str], tmp_path: Path
) -> None:
    flags += ["--training.local_batch_size=1", "--optimizer.ema_decay=0.5"]
    asked = [checked(tmp_path, 4, [*flags, *layout]) for layout in (before, after)]
    run_ranks(lambda: require_loads(*asked, tmp_path / "checkpoint"), tmp_path, 4)


def test_what_cannot_be_split_is_refused() -> None:
    dims = load("model", "qwen3_moe-debug")
    model = build_model(Model(name="qwen3_moe"), dims, 64)
    assert len(experts_to_share(model, 4)) == dims.n_layers
    with pytest.raises(ShardingError, match=r"layers\.0\.experts = 8 experts\n +want: a multiple of .* = 3"):
        experts_to_share(model, 3)
    with pytest.raises(ShardingError, match="the model has no experts"):
        experts_to_share(model.layers[0].attention, 2)  # type: ignore[index]
    first: MixtureOfExperts = model.layers[0].experts  # type: ignore[index,union-attr,assignment]
    first.compute = lambda *operands: experts(*operands)
    assert len(experts_to_share(model, 1)) == dims.n_layers
    first.__class__ = type("Own", (MixtureOfExperts,), {"forward": lambda self, x: x})
    with pytest.raises(ShardingError, match=r"layers\.0\.experts\.forward = one of the model's own"):
        experts_to_share(model, 1)
    model = build_model(Model(name="qwen3_moe"), dims, 64)
    model.layers[1].experts.forward = lambda x: x  # type: ignore[index,union-attr,assignment]  # of this object alone
    with pytest.raises(ShardingError, match=r"layers\.1\.experts\.forward = one of the model's own"):
        experts_to_share(model, 2)
    model = build_model(Model(name="qwen3_moe"), dims, 64)
    model.sharding = {**moe.Qwen3MoE.sharding, "layers.*.experts.w2.weight": "tp:1"}  # type: ignore[assignment]
    with pytest.raises(ShardingError, match=r"experts\.w2\.weight = split by an annotation\n +want: no annotation"):
        plan_layers(model, 64, 2)
