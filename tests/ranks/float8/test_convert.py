"""Float8 on a model: which layers, what FSDP gathers, and the same training as in bfloat16 to float8's accuracy."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.support.count_collectives import CountCollectives
from tests.support.needs import slow
from tests.support.ranks import run_ranks
from tests.support.short_run import assemble, checked, take_steps, train
from titanlite import recipes
from titanlite.config.problems import Origin
from titanlite.config.recipe_schema import ModelDims
from titanlite.config.schema import Config, Float8, Training
from titanlite.device import CPU, Device
from titanlite.errors import RecipeError, StrictError
from titanlite.float8.blocks import BlockScaledFloat8
from titanlite.float8.convert import Conversion, apply_float8
from titanlite.float8.matmul import Lowering
from titanlite.float8.receipt import emulation_cost
from titanlite.float8.scope import require_matches
from titanlite.float8.weight import GatheredWeight, WeightShard, local_data
from titanlite.models.layers import Linear
from titanlite.models.llama3 import Llama3
from titanlite.receipt import Entry, Receipt
from titanlite.sharding.split import split_model
from titanlite.training.build import Run

SIZES = ModelDims("", 1, dim=64, n_heads=4, n_kv_heads=2, ffn_dim=128, vocab_size=64, rope_theta=1e4, norm_eps=1e-5)
BLOCK = ("attention.wqkv", "attention.wo", "feed_forward.w13", "feed_forward.w2")
ALL = tuple(f"layers.0.{layer}" for layer in BLOCK)


def convert(dims: ModelDims = SIZES, filter_fqns: tuple[str, ...] = (), tokens: int = 32) -> Conversion:
    with torch.device("meta"):
        model = Llama3(dims, 16)
    done = apply_float8(model, recipes.load("float8", "rowwise"), filter_fqns, CPU, tokens, shards=2)
    plain = {name for name, module in model.named_modules() if getattr(module, "matmul", None) is nn.functional.linear}
    assert plain == set(done.skipped)
    return done


def test_layers_are_converted_unless_filtered_or_of_odd_size():
    gathered = dict.fromkeys((*ALL, "output"), 2)
    assert convert() == Conversion(
        Lowering("definition", None), (*ALL, "output"), {}, joined=("layers.0.feed_forward",), gathered=gathered
    )
    filtered = convert(filter_fqns=("output", "attention"))
    assert filtered.converted == ALL[2:]
    assert filtered.skipped == {
        **dict.fromkeys(ALL[:2], "float8.filter_fqns has 'attention'"),
        "output": "float8.filter_fqns has 'output'",
    }
    odd = convert(dataclasses.replace(SIZES, vocab_size=72))
    assert odd.converted == ALL
    assert odd.skipped == {"output": "sizes (72, 64), 32 tokens: not all multiples of 16"}
    assert convert(tokens=40).converted == ()


def test_a_filter_that_matches_nothing_is_refused():
    with pytest.raises(RecipeError, match=r'float8.filter_fqns = "outptu"'):
        require_matches(("output", "outptu"), (*ALL, "output"), Origin("config"))


def test_float8_is_gathered_from_equal_shards_alone():
    with torch.device("meta"):
        model = Llama3(SIZES, 16)
    recipe = recipes.load("float8", "tensorwise")
    with pytest.raises(RecipeError, match=r"3 shards of FSDP; attention\.wqkv has 128, and so for 4 layers"):
        apply_float8(model, recipe, ("output",), CPU, tokens=32, shards=3)
    apply_float8(model, dataclasses.replace(recipe, fsdp_all_gather="high_precision"), (), CPU, tokens=32, shards=3)


def test_tied_weights_stay_tied():
    with torch.device("meta"):
        model = Llama3(dataclasses.replace(SIZES, tied_embeddings=True), 16)
    done = apply_float8(model, recipes.load("float8", "tensorwise"), (), CPU, tokens=32, shards=1)
    assert done.converted == (*ALL, "output")
    assert done.tied == ("output",)
    assert model.output.weight is model.tok_embeddings.weight


class _Doubled(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class _Wrapped(Linear):
    @functools.wraps(Linear.forward)
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("name", ["w13", "w2"])
@pytest.mark.parametrize("change", ["a bias", "a hook"])
def test_a_feed_forward_is_not_joined_where_that_would_lose_something(name: str, change: str):
    model = Llama3(dataclasses.replace(SIZES, dim=128, vocab_size=128), 16)
    module = model.layers[0].feed_forward
    layer = getattr(module, name)
    if change == "a bias":
        layer.bias = nn.Parameter(torch.ones(len(layer.weight)))
    else:
        layer.register_forward_hook(lambda layer, x, y: 2 * y)
    x = torch.randn(128, 128)
    with torch.no_grad():
        for other in (module.w13, module.w2):
            other.weight.normal_(std=0.1)
        exact = module(x)
    done = apply_float8(model, recipes.load("float8", "rowwise"), (), CPU, tokens=128, shards=1)
    assert (done.joined, done.skipped) == ((), {})
    assert (module(x) - exact).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize("kind", [_Doubled, _Wrapped, None, "matmul"], ids=str)
def test_a_forward_of_ones_own_is_refused_unless_it_is_left_out(kind: type[Linear] | str | None):
    model, recipe = Llama3(dataclasses.replace(SIZES, dim=128, vocab_size=128), 16), recipes.load("float8", "rowwise")
    layer = model.layers[0].feed_forward.w2
    if kind is None:
        layer.forward = _Doubled.forward.__get__(layer)
    elif isinstance(kind, str):
        layer.matmul = lambda x, weight: 2 * torch.nn.functional.linear(x, weight)
    else:
        layer.__class__ = kind
    with pytest.raises(
        RecipeError, match=r"feed_forward\.w2 has a forward of (.|\n)*= \[\"output\", \"feed_forward\.w2\"\]"
    ):
        apply_float8(model, recipe, ("output",), CPU, tokens=128, shards=1)
    done = apply_float8(model, recipe, ("output", "feed_forward.w2"), CPU, tokens=128, shards=1)
    assert "layers.0.feed_forward.w13" in done.converted
    assert done.joined == ()


@pytest.mark.parametrize(
    ("name", "capability", "lowering", "why"),
    [
        ("rowwise", (9, 0), "fused", None),
        ("rowwise", (8, 9), "emulated", "it needs compute capability 9.0, this GPU has 8.9"),
        ("rowwise", None, "definition", None),
        ("tensorwise", (8, 9), "fused", None),
        ("rowwise_with_gw_hp", (9, 0), "torchao", "has a matmul in high precision, which"),
        ("rowwise_with_gw_hp", (8, 9), "emulated", "it needs compute capability 9.0, this GPU has 8.9"),
        ("rowwise_with_gw_hp", None, "emulated", "it needs compute capability 9.0, this device is no GPU"),
        ("blockwise", (9, 0), "block scaled", "has scales by block, which no fused kernel takes"),
        ("blockwise", None, "emulated", "it needs compute capability 9.0, this device is no GPU"),
        ("blockwise", (10, 0), "emulated", "blocks of 128 need compute capability 9.x, this GPU has 10.0"),
    ],
)
def test_the_lowering_that_a_device_has(name, capability, lowering, why, monkeypatch):
    """Weights are gathered in float8, and feed-forwards are joined, by titanlite's own products alone."""
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    with torch.device("meta"):
        model = Llama3(dataclasses.replace(SIZES, dim=128, vocab_size=128), 16)
    device = Device(CPU.of_tensors, "", capability)
    done = apply_float8(model, recipes.load("float8", name), (), device, tokens=128, shards=1)
    own = lowering in ("fused", "definition")
    assert done.lowering.name == model.output.matmul.lowering.name == lowering
    assert done.lowering.why is None if why is None else str(done.lowering.why).startswith(why)
    assert (done.converted, done.skipped) == ((*ALL, "output"), {})
    assert done.joined == (("layers.0.feed_forward",) if own else ())
    assert isinstance(model.output.weight.data, WeightShard) == own
    assert (model.output.matmul.unfused is None) == own
    by_blocks = lowering == "block scaled" or (capability is None and name == "blockwise")  # there by definition
    assert isinstance(model.output.matmul.function, BlockScaledFloat8) == by_blocks


TOKENS_32 = Training(local_batch_size=1, seq_len=32)


def mesh_of(device: Device, shards: int) -> Any:
    fsdp = SimpleNamespace(size=lambda dim: shards)
    return SimpleNamespace(built_for=device, fsdp=fsdp, experts=None, tp_group=None, context=None)


@pytest.mark.parametrize(
    ("ranks", "weight", "gathered"),
    [
        (1, "weight cast once", "nothing: each rank has its weights whole, and casts them once"),
        (2, "weight gathered in float8", "float8"),
    ],
)
def test_the_receipt_says_of_each_layer_what_became_of_it(ranks: int, weight: str, gathered: str):
    with torch.device("meta"):
        model = Llama3(dataclasses.replace(SIZES, tied_embeddings=True), 16)
    config = dataclasses.replace(
        Config(), float8=Float8(recipe="rowwise", filter_fqns=("attention.wo",)), training=TOKENS_32
    )
    mesh = mesh_of(CPU, ranks)
    receipt = Receipt()
    split_model(model, config, recipes.load("float8", "rowwise"), mesh, {}, receipt)
    joined = "one function with the rest of its feed-forward"
    assert receipt.entries[0].applied == {
        "layers": 4,
        "lowering": "definition",
        "feed-forwards in float8 throughout": 1,
        "each": {
            "layers.0.attention.wqkv": f"definition, {weight}",
            "layers.0.feed_forward.w13": f"definition, {joined}, {weight}",
            "layers.0.feed_forward.w2": f"definition, {joined}, {weight}",
            "output": "definition",
        },
        "fsdp_all_gather": f"{gathered}; high_precision of output, whose weight the embedding has too",
    }


def test_emulation_on_a_gpu_ends_a_strict_run():
    with torch.device("meta"):
        model = Llama3(SIZES, 16)
    config = dataclasses.replace(Config(), float8=Float8(recipe="rowwise"), training=TOKENS_32)
    old = Device(CPU.of_tensors, "A100", (8, 0))
    receipt, recipe = Receipt(), recipes.load("float8", "rowwise")
    done = split_model(model, config, recipe, mesh_of(old, 1), {}, receipt)
    assert done is not None
    said = emulation_cost(done, old)
    assert said is not None
    assert said.startswith("emulated: slower than bf16; it needs compute capability")
    assert receipt.entries[0].applied["lowering"] in said
    gathered = "high_precision: emulated products take no weights in float8"
    assert receipt.entries[0].applied["fsdp_all_gather"] == gathered
    assert receipt.entries[0].applied["each"] == dict.fromkeys(ALL, "emulated")
    with pytest.raises(StrictError, match=r"never applied\n.*layers\.0\.attention\.wqkv: emulated: slower than"):
        receipt.enforce(strict=True, warn=pytest.fail)


FLOAT8 = ["--training.mixed_precision_param", "bfloat16", "--optimizer.lr", "3e-4", "--float8.recipe"]
BOTH = "FSDP 2 × TP 2"
LAYOUTS = {
    "one process": (1, ["--training.local_batch_size", "4"]),
    "FSDP 2": (2, ["--training.local_batch_size", "2"]),
    BOTH: (4, ["--training.local_batch_size", "2", "--parallelism.tensor_parallel_degree", "2"]),
}


@pytest.fixture(scope="module")
def in_bfloat16(tmp_path_factory):
    world, flags = LAYOUTS["one process"]
    return train(tmp_path_factory.mktemp("bfloat16"), world, [*FLOAT8, "none", *flags], steps=5)


def of_float8(run: Run) -> Entry:
    (entry,) = (entry for entry in run.receipt.entries if entry.feature == "float8")
    return entry


def all_converted(run: Run) -> None:
    """Else it would be bfloat16 that trains as bfloat16 does."""
    entry = of_float8(run)
    assert entry.count == len(BLOCK) * run.dims.n_layers, entry.skipped


@pytest.mark.parametrize(
    ("layout", "recipe"),
    [
        *(("one process", "blockwise"), *slow(("one process", "tensorwise"))),
        *((BOTH, "rowwise"), *slow(("one process", "rowwise_with_gw_hp"))),
        *slow(("one process", "rowwise"), (BOTH, "tensorwise"), (BOTH, "ones_own"), ("one process", "ones_own")),
    ],
)
def test_trains_as_bfloat16_does(layout, recipe, in_bfloat16, tmp_path):
    world, flags = LAYOUTS[layout]
    (tmp_path / "float8").mkdir()
    (tmp_path / "float8" / "ones_own.toml").write_text('extends = "blockwise"\nscale_rounding = "pow2_floor"\n')
    flags = [*FLOAT8, recipe, *flags, "--job.recipe_dirs", str(tmp_path)]
    got = train(tmp_path, world, flags, steps=5, change=all_converted)
    difference = (got.losses - in_bfloat16.losses).abs() / in_bfloat16.losses
    assert difference.max() <= 5e-3
    assert difference.max() > 1e-6  # else it was not float8
    # Gradients have the noise of a few products at 24 dB each, 6 %; one that is wrong has 100 % or more.
    for name, gradient in in_bfloat16.gradients.items():
        noise = (got.gradients[name] - gradient).norm() / gradient.norm()
        assert noise <= 0.3, f"{name}: {noise:.2f}"


@pytest.mark.parametrize("layout", ["FSDP 2", *slow("one process", BOTH)])
def test_scales_gathered_weights_and_collectives(layout, tmp_path):
    world, flags = LAYOUTS[layout]
    with_float8 = checked(tmp_path, world, [*FLOAT8, "tensorwise", *flags])
    without = checked(tmp_path, world, [*FLOAT8, "none", *flags])
    (tmp_path / "reduced.toml").write_text('extends = "tensorwise"\nreduce_amax = true\n')
    reduced = checked(tmp_path, world, [*FLOAT8, str(tmp_path / "reduced.toml"), *flags])
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_utils import tensor_to_scale

    def body() -> None:
        counts, applied, gathered = [], [], set[str]()

        def note(block: nn.Module, name: str) -> None:
            for layer in BLOCK:
                weight = block.get_parameter(f"{layer}.weight")
                if isinstance(weight.to_local() if isinstance(weight, DTensor) else weight, GatheredWeight):
                    gathered.add(f"{name}.{layer}")

        for asked in (without, reduced, with_float8):
            run = assemble(asked)
            for n, block in enumerate(run.model.layers):
                # Of a part of the block, which runs once FSDP has gathered all of it.
                block.attention.register_forward_pre_hook(lambda *_, b=block, n=n: note(b, f"layers.{n}"))
            with CountCollectives() as seen:
                take_steps(run, 2)
            counts.append(seen.counts)
            applied.append(of_float8(run).applied if asked is not without else {})
        # What float8 adds is one reduction of maxima after each of two updates, and none within forward or backward.
        assert counts[2] - counts[0] == {"allreduce_": 2}
        assert not counts[0] - counts[2]
        # `reduce_amax` adds what the receipt declares, one for each layer and step; and one more for all weights.
        n = len(BLOCK) * run.dims.n_layers if "TP" in layout else 0
        assert [said.get("maxima reduced over tensor-parallel ranks") for said in applied] == [None, n or None, None]
        assert counts[1] - counts[2] == ({"all_reduce": 2 * (n + 1)} if n else {})
        assert not counts[2] - counts[1]

        layers = {f"layers.{n}.{layer}" for n in range(run.dims.n_layers) for layer in BLOCK}
        assert gathered == layers
        for name in layers:
            parameter = run.model.get_parameter(f"{name}.weight")
            weight = parameter._local_tensor
            assert isinstance(weight, WeightShard)
            assert local_data(parameter).dtype == torch.float32
            options = {"scaling_granularity": ScalingGranularity.TENSORWISE, "device_mesh": run.mesh.fsdp}
            wanted = tensor_to_scale(weight.master, weight.how.dtype, reduce_amax=True, **options)
            assert torch.equal(weight.scale, wanted), name
            assert weight.scale_inv.data_ptr() % 16 == 0, name  # as cuBLAS wants it

    run_ranks(body, tmp_path, world)
