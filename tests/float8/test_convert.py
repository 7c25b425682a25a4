"""Float8 on a model: which layers, what FSDP gathers, and the same training as in bfloat16 to float8's accuracy."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.parallel.count_collectives import CountCollectives
from tests.ranks import run_ranks
from tests.training.short_run import assemble, checked, take_steps, train
from titanlite import recipes
from titanlite.config.recipe_schema import ModelRecipe
from titanlite.errors import RecipeError
from titanlite.float8.convert import Conversion, apply_float8
from titanlite.float8.weight import Float8Weight, WeightShard
from titanlite.models.llama3 import Llama3
from titanlite.parallel.initialise import local_data

CPU = torch.device("cpu")
SIZES = ModelRecipe("", 1, dim=64, n_heads=4, n_kv_heads=2, ffn_dim=128, vocab_size=64, rope_theta=1e4, norm_eps=1e-5)
BLOCK = ("attention.wqkv", "attention.wo", "feed_forward.w13", "feed_forward.w2")
ALL = tuple(f"layers.0.{layer}" for layer in BLOCK)


def convert(sizes: ModelRecipe = SIZES, filter_fqns: tuple[str, ...] = (), tokens: int = 32) -> Conversion:
    with torch.device("meta"):
        model = Llama3(sizes, 16)
    done = apply_float8(model, recipes.load("float8", "rowwise"), filter_fqns, CPU, tokens, shards=2)
    plain = {name for name, module in model.named_modules() if getattr(module, "matmul", None) is nn.functional.linear}
    assert plain == set(done.skipped)
    return done


def test_every_layer_is_converted():
    assert convert() == Conversion("definition", (*ALL, "output"), {}, ("layers.0.feed_forward",))


def test_filtered_layers_are_left_alone():
    done = convert(filter_fqns=("output", "attention"))
    assert done.converted == ALL[2:]
    assert done.skipped == {
        ALL[0]: "float8.filter_fqns has 'attention'",
        ALL[1]: "float8.filter_fqns has 'attention'",
        "output": "float8.filter_fqns has 'output'",
    }


def test_a_filter_that_matches_nothing_is_refused():
    with pytest.raises(RecipeError, match=r'float8.filter_fqns = "outptu"'):
        convert(filter_fqns=("output", "outptu"))


def test_layers_of_odd_size_are_left_alone():
    done = convert(dataclasses.replace(SIZES, vocab_size=72))
    assert done.converted == ALL
    assert done.skipped == {"output": "sizes (72, 64), 32 tokens: not all multiples of 16"}
    assert convert(tokens=40).converted == ()


def test_float8_is_gathered_from_equal_shards_alone():
    with torch.device("meta"):
        model = Llama3(SIZES, 16)
    recipe = recipes.load("float8", "tensorwise")
    with pytest.raises(RecipeError, match=r"3 shards of FSDP; layers\.0\.attention\.wqkv has 128, and so for 4 layers"):
        apply_float8(model, recipe, ("output",), CPU, tokens=32, shards=3)
    apply_float8(model, dataclasses.replace(recipe, fsdp_all_gather="high_precision"), (), CPU, tokens=32, shards=3)


def test_tied_weights_stay_tied():
    with torch.device("meta"):
        model = Llama3(dataclasses.replace(SIZES, tied_embeddings=True), 16)
    done = apply_float8(model, recipes.load("float8", "tensorwise"), (), CPU, tokens=32, shards=1)
    assert done.converted == (*ALL, "output")
    assert model.output.weight is model.tok_embeddings.weight


FLOAT8 = ["--training.mixed_precision_param", "bfloat16", "--optimizer.lr", "3e-4", "--float8.recipe"]
LAYOUTS = {
    "one process": (1, ["--training.local_batch_size", "4"]),
    "FSDP 2": (2, ["--training.local_batch_size", "2"]),
    "FSDP 2 × TP 2": (4, ["--training.local_batch_size", "2", "--parallelism.tensor_parallel_degree", "2"]),
}


@pytest.fixture(scope="module")
def in_bfloat16(tmp_path_factory):
    world, flags = LAYOUTS["one process"]
    return train(tmp_path_factory.mktemp("bfloat16"), world, [*FLOAT8, "none", *flags], steps=8)


@pytest.mark.parametrize(
    ("layout", "recipe"),
    [
        ("one process", "rowwise_with_gw_hp"),
        *((layout, recipe) for layout in LAYOUTS for recipe in ("tensorwise", "rowwise")),
    ],
)
def test_trains_as_bfloat16_does(layout, recipe, in_bfloat16, tmp_path):
    world, flags = LAYOUTS[layout]
    got = train(tmp_path, world, [*FLOAT8, recipe, *flags], steps=8)
    difference = (got.losses - in_bfloat16.losses).abs() / in_bfloat16.losses
    assert difference.max() <= 5e-3
    assert difference.max() > 1e-6  # else it was not float8
    # Gradients have the noise of a few products at 24 dB each, 6 %; one that is wrong has 100 % or more.
    for name, gradient in in_bfloat16.gradients.items():
        noise = (got.gradients[name] - gradient).norm() / gradient.norm()
        assert noise <= 0.3, f"{name}: {noise:.2f}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales_gathered_weights_and_collectives(layout, tmp_path):
    world, flags = LAYOUTS[layout]
    with_float8 = checked(tmp_path, world, [*FLOAT8, "tensorwise", *flags])
    without = checked(tmp_path, world, [*FLOAT8, "none", *flags])
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_utils import tensor_to_scale

    def body() -> None:
        counts, gathered = [], set[str]()

        def note(block: nn.Module, name: str) -> None:
            for layer in BLOCK:
                weight = block.get_parameter(f"{layer}.weight")
                if isinstance(weight.to_local() if isinstance(weight, DTensor) else weight, Float8Weight):
                    gathered.add(f"{name}.{layer}")

        for asked in (without, with_float8):
            run = assemble(asked)
            for n, block in enumerate(run.model.layers):
                # Of a part of the block, which runs once FSDP has gathered all of it.
                block.attention.register_forward_pre_hook(lambda *_, b=block, n=n: note(b, f"layers.{n}"))
            with CountCollectives() as seen:
                take_steps(run, 2)
            counts.append(seen.counts)
        # What float8 adds is one reduction of maxima after each of two updates, and none within forward or backward.
        assert counts[1] - counts[0] == {"allreduce_": 2}
        assert not counts[0] - counts[1]

        layers = {f"layers.{n}.{layer}" for n in range(run.sizes.n_layers) for layer in BLOCK}
        assert gathered == layers
        for name in layers:
            parameter = run.model.get_parameter(f"{name}.weight")
            weight = parameter._local_tensor
            assert isinstance(weight, WeightShard)
            assert local_data(parameter).dtype == torch.float32
            options = {"scaling_granularity": ScalingGranularity.TENSORWISE, "device_mesh": run.mesh.fsdp}
            wanted = tensor_to_scale(weight.master, weight.how.dtype, reduce_amax=True, **options)
            assert torch.equal(weight.scale, wanted), name

    run_ranks(body, tmp_path, world)
