"""Weights that FSDP gathers in float8 are those that one process would cast for itself, however they are sharded.

The truth has no FSDP in it: one process casts each master before each of its uses, and adds up the gradients of all
ranks' batches. Equality is to the bit, and by argument:

    weights     a maximum over shards is that over the whole, and a row is never cut: casts are the same
    losses      each rank's, of its own batch: the same products of the same bytes; their sum over ranks is not compared
    gradients   summed in float32 over 2 shards, then over 2 replicas: sums of two terms, which no order changes
    updates     elementwise, of shards without remainders; nothing is clipped, as a norm is a sum over all ranks
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.support.needs import slow
from tests.support.ranks import run_ranks
from titanlite import recipes
from titanlite.config.parameter_groups import update_settings
from titanlite.config.problems import Origin
from titanlite.config.recipe_schema import Float8Recipe, ModelDims
from titanlite.config.schema import Compile, Config, Float8, Optimizer, Parallelism, Training
from titanlite.data.batches import Batch
from titanlite.device import CPU
from titanlite.float8.cast import cast
from titanlite.float8.convert import apply_float8
from titanlite.float8.weight import GatheredWeight, WeightShard, local_data
from titanlite.kernels.cross_entropy import CrossEntropy
from titanlite.models.layers import Sequences
from titanlite.models.llama3 import Llama3
from titanlite.optimizers.sharded import ShardedOptimizer
from titanlite.parallel.initialise import initialise, local_slice
from titanlite.preflight.checked_run import CheckedRun
from titanlite.training.attention import torch_order
from titanlite.training.build import build
from titanlite.training.step import train_step, validation_loss

S, V, LR = 32, 64, 1e-2
SIZES = ModelDims("", 2, dim=64, n_heads=4, n_kv_heads=2, ffn_dim=128, vocab_size=V, rope_theta=1e4, norm_eps=1e-5)
LEFT_ALONE = ("layers.0.attention.wo",)  # in bfloat16, in one unit with weights in float8; the head is in float8
OPTIMIZER = Optimizer(lr=LR)
# Right after an update, and after another pass that trains nothing.
SCHEDULE = ("train", "validate", "train", "train", "validate", "validate", "train")
LAYOUTS = {"one process": (1, 1), "FSDP 2": (2, 1), "HSDP 2 × 2": (4, 2)}  # ranks, replicas


def batch(number: int, rank: int) -> Batch:
    """What a rank sees in a pass."""
    tokens = torch.randint(V, (S + 1,), generator=torch.Generator().manual_seed(100 * number + rank))
    return Batch(tokens[:-1], tokens[1:], Sequences(S))


@dataclass
class Truth:
    """What training did: of each pass, each rank's loss, and the gradients if there were any; weights at the end."""

    losses: list[list[Tensor]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def alone(float8: Float8Recipe, ranks: int) -> Truth:
    """Train in this process, on the batches of all ranks."""
    with torch.device("meta"):
        model = Llama3(SIZES, S)
    done = apply_float8(model, float8, LEFT_ALONE, CPU, S, shards=1)
    assert len(done.converted) == 4 * SIZES.n_layers
    model.to_empty(device="cpu")
    model.fill_buffers()
    initialise(model, seed=0)
    masters = {name: nn.Parameter(local_data(p)) for name, p in model.named_parameters()}
    loss, truth = CrossEntropy(), Truth(weights={name: local_data(p) for name, p in masters.items()})
    mesh: Any = SimpleNamespace(device=CPU.of_tensors, tp_size=1)
    recipe = recipes.load("optimizer", "adamw")
    settings = update_settings(recipe, OPTIMIZER, {name: p.shape for name, p in masters.items()})
    optimizer = ShardedOptimizer(masters, OPTIMIZER, recipe, settings, mesh, {})

    def used(name: str) -> Tensor:
        master, how = local_data(masters[name]), float8.weight
        if name.removesuffix(".weight") not in done.converted:
            return master.bfloat16().requires_grad_()
        qdata, scale_inv = cast(master, how.output, how.dtype, float8.scale_rounding)
        return GatheredWeight(qdata, scale_inv, torch.bfloat16).requires_grad_()

    def of_rank(number: int, rank: int) -> tuple[Tensor, list[Tensor]]:
        weights, seen = {name: used(name) for name in masters}, batch(number, rank)
        summed = loss(torch.func.functional_call(model, weights, (seen.tokens,)), seen.targets)
        gradients = torch.autograd.grad(summed / float(S * ranks), list(weights.values()))
        return summed.detach(), [gradient.float() for gradient in gradients]

    for number, what in enumerate(SCHEDULE):
        losses, gradients = zip(*(of_rank(number, rank) for rank in range(ranks)), strict=True)
        truth.losses.append(list(losses))
        if what == "train":
            while len(gradients) > 1:  # over shards, then over replicas
                pairs = zip(gradients[::2], gradients[1::2], strict=True)
                gradients = [[a + b for a, b in zip(one, other, strict=True)] for one, other in pairs]
            truth.gradients.append(dict(zip(masters, gradients[0], strict=True)))
            given = {name: gradient.clone() for name, gradient in truth.gradients[-1].items()}
            optimizer.step(given, LR, torch.ones(()), torch.zeros(()))
    return truth


def differences(truth: Truth, float8: str, replicas: int, reshard: str) -> list[str]:
    """Train as the trainer does, and say where this rank's numbers are not those of one process."""
    config = Config(
        training=Training(seq_len=S, local_batch_size=1, max_norm=0.0),
        optimizer=OPTIMIZER,
        parallelism=Parallelism(data_parallel_replicate_degree=replicas, fsdp_reshard_after_forward=reshard),  # type: ignore[arg-type]
        float8=Float8(float8, filter_fqns=LEFT_ALONE),
        compile=Compile(enable=False),
    )
    save_list = recipes.load("activation_checkpoint", "none")
    loaded, optimizer = recipes.load("float8", float8), recipes.load("optimizer", "adamw")
    nothing: Any = None
    asked = CheckedRun(config, SIZES, save_list, loaded, optimizer, Origin("test"), nothing, nothing, nothing)
    run = build(asked, CPU)
    shards = [p._local_tensor for p in run.parameters if isinstance(p, DTensor)]
    assert sum(isinstance(shard, WeightShard) for shard in shards) == 4 * SIZES.n_layers
    found, losses, gradients = [], [], []
    loss, update = run.loss, run.optimizer.step

    def note_loss(logits: Tensor, targets: Tensor, **more: Any) -> Tensor:
        losses.append((summed := loss(logits, targets, **more)).detach())
        return summed

    def note_gradients(given: dict[str, Tensor], *others: object) -> None:
        gradients.append({name: gradient.clone() for name, gradient in given.items()})
        update(given, *others)  # type: ignore[arg-type]

    run.loss, run.optimizer.step = note_loss, note_gradients
    rank = dist.get_rank()
    with torch_order():
        for number, what in enumerate(SCHEDULE):
            if what == "train":
                train_step(run, [batch(number, rank)], LR, False)
            else:
                validation_loss(run, [batch(number, rank)])
    own = [of_all[rank] for of_all in truth.losses]
    found += [f"loss {n}" for n, pair in enumerate(zip(losses, own, strict=True)) if not torch.equal(*pair)]
    named = run.optimizer.parameters
    weights = {name: local_data(p) for name, p in named.items()}
    steps = zip((*gradients, weights), (*truth.gradients, truth.weights), strict=True)
    for step, (got, want) in enumerate(steps):
        assert got.keys() == want.keys()
        found += [f"{n} {step}" for n, part in got.items() if not torch.equal(part, local_slice(want[n], named[n]))]
    return found


PAIRS = [("tensorwise", "never"), ("rowwise", "always")]
OTHERS = [("tensorwise", "always"), ("rowwise", "never")]


@pytest.mark.parametrize(
    ("layout", "pairs"),
    [
        ("FSDP 2", PAIRS),
        *slow(("one process", PAIRS + OTHERS), ("HSDP 2 × 2", PAIRS + OTHERS), ("FSDP 2", OTHERS)),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(reshard for _, reshard in x),
)
def test_every_layout_trains_with_the_weights_of_one_process(
    layout: str, pairs: list[tuple[str, str]], tmp_path
) -> None:
    world, replicas = LAYOUTS[layout]
    truths = {name: alone(recipes.load("float8", name), world) for name, _ in pairs}

    def body() -> None:
        for name, reshard in pairs:
            assert differences(truths[name], name, replicas, reshard) == [], (name, reshard)

    run_ranks(body, tmp_path, world)


def test_a_weight_that_came_in_float8_is_for_float8_layers_alone() -> None:
    """What stands for it, as it is, may be passed on; to compute with it, or with a part, is refused."""
    weight = GatheredWeight(torch.zeros(4, 2, dtype=torch.float8_e4m3fn), torch.ones(4, 1), torch.bfloat16)
    for same in (weight.detach(), weight.view(4, 2), torch.ops.aten.alias(weight)):
        assert isinstance(same, GatheredWeight)
        assert same.qdata is weight.qdata
        assert same.scale_inv is weight.scale_inv
    for use in (
        lambda: weight + 1,
        lambda: weight.t(),
        lambda: weight.view(8),
        lambda: weight.as_strided((2, 2), (2, 1)),
    ):
        with pytest.raises(NotImplementedError, match="only a float8 layer can use it"):
            use()
