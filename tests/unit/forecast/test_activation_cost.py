"""What the trace of a block says against what a block really holds between forward and backward, and what backward does
again; and that it computes the same.

Compiled blocks go through inductor's partitioner, which decides what is kept, but not through its code generation.
"""

import functools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.support.count_collectives import CountCollectives
from tests.support.fake_ranks import ranks_that_move_nothing
from tests.support.held_for_backward import Held, build, held_compiled, held_eager, stream
from tests.support.needs import SCALES_BY_ROW, slow
from titanlite import recipes
from titanlite.activation_checkpoint.operations import CLASSES, FUSED
from titanlite.config.recipe_schema import Experts, ModelDims, SaveList, SaveRule
from titanlite.config.schema import Compile, Config, Data, Float8, Model, Parallelism, Training
from titanlite.forecast.activation_cost import costs, held_without_checkpointing
from titanlite.forecast.traced_run import TracedRun, traced_run
from titanlite.models.find import model_class

# Every width differs from every other, so that nothing is right by accident; M = 96.
D, H, K, F, S, B = 64, 4, 2, 512, 48, 2
SIZES = ModelDims("", 1, D, H, K, F, vocab_size=32, rope_theta=1e4, norm_eps=1e-5)
LAYERS = "attention.wqkv", "attention.wo", "feed_forward.w13", "feed_forward.w2"
OF_EXPERTS = "experts.w13", "experts.w2"
ONLY_OF_EXPERTS = "rows and products of experts", "routing"
OF_BLOCKS: dict = {"dims": replace(SIZES, dim=128, ffn_dim=640), "batch": 8}
LISTS = recipes.names("activation_checkpoint")
FLOAT8 = [None, "tensorwise", "rowwise"]
MODES = ["eager", "compiled"]
# A compiled case costs a second or two. Where all lists have been compared otherwise, these two stand for them: without
# a list the partitioner decides what is kept, and the other keeps what no rule of a class would.
FEW = ["none", "every_second_matmul"]


def predicted(save_list: SaveList, run: TracedRun) -> Held:
    """Bytes and matmuls of the first block by its trace."""
    block = run.blocks[0]
    own = sum(1 if name in OF_EXPERTS else 2 for name in block.layers)  # of backward
    if save_list.default == "save":
        return Held(held_without_checkpointing(block, run.compiled), own)
    active = frozenset(i for i, rule in enumerate(save_list.rules) if 0 in rule.blocks(1))
    found = costs(block, save_list, active, run.compiled)
    products = (*CLASSES["matmul"], *CLASSES["experts"], *FUSED)
    again = sum(cost.recomputed and cost.activation.op in products for cost in found)
    return Held(block.input_bytes + sum(cost.held for cost in found), own + again)


def measured(
    save_list: SaveList,
    mode: str,
    float8: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    fused: bool = False,
    dims: ModelDims = SIZES,
    batch: int = B,
    architecture: str = "llama3",
) -> tuple[Held, Held]:
    """The first block's bytes and matmuls, and what its trace says."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    tokens, name = batch * S, Model(name=architecture)
    model = build(dims, S, save_list, float8, dtype, tokens, fused, model_class(name))
    found = {"eager": held_eager, "compiled": held_compiled}[mode](model, stream(tokens // world, dims.dim, dtype))
    config = Config(
        model=name,
        data=Data(document_mask=False),
        compile=Compile(mode == "compiled"),
        float8=Float8(filter_fqns=("output",)),
        parallelism=Parallelism(tensor_parallel_degree=world, async_tensor_parallel=fused),
        training=Training(
            seq_len=S, local_batch_size=batch, mixed_precision_param="float32" if dtype.itemsize == 4 else "bfloat16"
        ),
    )
    recipe = recipes.load("float8", float8) if float8 else None
    return found, predicted(save_list, traced_run(config, dims, recipe))


def check(what: object, found: Held, expected: Held) -> None:
    assert found.bytes == pytest.approx(expected.bytes, rel=0.01), what
    assert found.matmuls == expected.matmuls, what


@functools.cache
def without_a_list(mode: str, float8: str | None) -> tuple[Held, Held]:
    return measured(recipes.load("activation_checkpoint", "none"), mode, float8)


@pytest.mark.parametrize(
    ("mode", "float8", "name"),
    [
        *(("eager", float8, name) for float8 in FLOAT8 for name in LISTS),
        ("compiled", None, "full"),
        *(("compiled", None, "none"), ("compiled", None, FEW[1]), ("compiled", "rowwise", "none")),
        *slow(("compiled", "rowwise", FEW[1])),
        *slow(*(("compiled", "tensorwise", name) for name in FEW)),  # rowwise has all operations of it, and more
        *slow(*(("compiled", None, name) for name in LISTS if name not in (*FEW, "full"))),
        *slow(*(("compiled", float8, name) for float8 in FLOAT8[1:] for name in LISTS if name not in FEW)),
    ],
)
def test_shipped_lists(mode, float8, name):
    """Bytes and matmuls are as predicted; and no list changes a bit of what the compiler's graphs compute."""
    chosen, truth = recipes.load("activation_checkpoint", name), without_a_list(mode, float8)
    found, expected = truth if name == "none" else measured(chosen, mode, float8)
    check(name, found, expected)
    assert len(found.results) == 8  # output, input, two norms and four matrices
    if mode == "compiled" and name != "none":
        for got, kept in zip(found.results, truth[0].results, strict=True):
            assert torch.equal(got, kept)


@pytest.mark.parametrize(
    ("float8", "name", "mode"),
    [
        *(("blockwise", name, "eager") for name in FEW),
        *slow(("blockwise", FEW[1], "compiled"), ("blockwise", FEW[0], "compiled")),
    ],
)
def test_shipped_lists_with_scales_by_block(name, float8, mode):
    check(name, *measured(recipes.load("activation_checkpoint", name), mode, float8, **OF_BLOCKS))


@pytest.mark.parametrize(
    ("float8", "fused", "compiled"),
    [
        (None, False, []),
        ("rowwise", False, []),
        ("rowwise", True, []),
        # Compiled, what is fused differs from what is not by the same products and casts in every precision.
        *slow((None, False, LISTS), ("rowwise", False, LISTS), ("rowwise", True, FEW), (None, True, [])),
        *slow(("tensorwise", False, LISTS), ("tensorwise", True, [])),
    ],
)
def test_shipped_lists_under_tensor_parallelism(float8, fused, compiled):
    with ranks_that_move_nothing(2):
        for name in LISTS:
            for mode in MODES if name in compiled else ["eager"]:
                chosen = recipes.load("activation_checkpoint", name)
                check((name, mode), *measured(chosen, mode, float8, fused=fused))


# Heads are wider than D / H, or have no groups; the window does not divide the sequence.
_GEMMA = replace(SIZES, head_dim=24, local_rope_theta=1e3, window=20, global_every=2)
OTHERS = {
    "qwen3": ("qwen3", replace(SIZES, head_dim=24)),
    "gpt2": ("gpt2", replace(SIZES, n_kv_heads=H, rope_theta=0.0, max_seq_len=S)),
    "gemma3 local": ("gemma3", _GEMMA),
    "gemma3 global": ("gemma3", replace(_GEMMA, global_every=1)),
}
SOME = {name: recipes.load("activation_checkpoint", name) for name in FEW}


@pytest.mark.parametrize(
    ("own", "float8"),
    [("every_second_matmul", None), ("statistics and casts", None), *slow(("none", None), ("none", "rowwise"))],
)
@pytest.mark.parametrize("other", OTHERS)
def test_other_architectures(other, float8, own):
    """In float8 only without a list, where that differs most."""
    name, dims = OTHERS[other]
    # Compiled, gemma3 without a window is gemma3 with one, but for the operator of attention, which the others have.
    # Only gpt2 has other statistics than llama3.
    compiled = other != "gemma3 global" and (own != "statistics and casts" or other == "gpt2")
    for mode in MODES if compiled else ["eager"]:
        check(mode, *measured((SOME | OWN)[own], mode, float8, dims=dims, architecture=name))


LISTS_OF_EXPERTS = (*LISTS, *ONLY_OF_EXPERTS)
EXPERTS: dict = {
    "dims": replace(SIZES, ffn_dim=0, experts=Experts(n_experts=4, top_k=3, ffn_dim=128, balance_loss=0.01)),
    "architecture": "qwen3_moe",
}


@functools.cache
def experts_without_a_list(mode: str, float8: str | None) -> tuple[Held, Held]:
    return measured(SOME["none"], mode, float8, **EXPERTS)


@pytest.mark.parametrize(
    ("own", "mode", "float8"),
    [
        *((own, "eager", None) for own in LISTS_OF_EXPERTS),
        ("none", "compiled", None),
        *slow(*((own, "compiled", None) for own in LISTS_OF_EXPERTS if own != "none")),
        *slow(*((own, "eager", "rowwise") for own in LISTS_OF_EXPERTS)),
        # Not without a list: here weights are cast in the block, and the compiler keeps their casts.
        *slow(*((own, "compiled", "rowwise") for own in LISTS_OF_EXPERTS if own != "none")),
    ],
)
def test_a_mixture_of_experts(own, mode, float8):
    """And no list changes a bit: recomputation takes the routes that forward took."""
    listed = OWN.get(own) or recipes.load("activation_checkpoint", own)
    truth = experts_without_a_list(mode, float8)
    found, expected = truth if own == "none" else measured(listed, mode, float8, **EXPERTS)
    check((own, mode), found, expected)
    assert len(found.results) == 11  # output, input, four norms and five matrices
    for got, kept in zip(found.results, truth[0].results, strict=True):
        assert torch.equal(got, kept)


@pytest.mark.parametrize("other", ["gpt2", *slow("qwen3", "gemma3 local")])
def test_other_architectures_under_tensor_parallelism(other):
    name, dims = OTHERS[other]
    with ranks_that_move_nothing(2):
        for own, fused in (("none", False), ("none", True), ("every_second_matmul", False)):
            for mode in MODES if own == "none" and not fused else ["eager"]:
                found = measured(SOME[own], mode, fused=fused, dims=dims, architecture=name)
                check((own, mode, fused), *found)


@pytest.mark.parametrize(("name", "mode"), [("none", "eager"), ("matmuls", "compiled"), *slow(("none", "compiled"))])
def test_float32(name, mode):
    check(name, *measured(recipes.load("activation_checkpoint", name), mode, dtype=torch.float32))


@pytest.mark.parametrize(
    ("float8", "mode"),
    [("tensorwise", "eager"), ("rowwise", "eager"), *slow(("tensorwise", "compiled"), ("rowwise", "compiled"))],
)
def test_bytes_do_not_depend_on_the_width_of_weights(float8, mode):
    """What is kept has a row for every token: twice the tokens, twice the bytes, and nothing for what has no tokens.

    A scalar for each operand of a tensorwise layer is let through. The list that keeps maxima and casts stands for all.
    """
    one, two = (measured(OWN["statistics and casts"], mode, float8, batch=batch) for batch in (1, B))
    check("statistics and casts", *two)
    assert abs(two[0].bytes - B * one[0].bytes) <= B * len(LAYERS) * torch.float32.itemsize


def save_list(*rules: SaveRule) -> SaveList:
    return SaveList("", "recompute", rules)


OWN = {
    "statistics and casts": save_list(SaveRule("statistics", "save"), SaveRule("cast", "save")),
    "casts of one layer": save_list(SaveRule("cast", "save", module=("w2",)), SaveRule("matmul", "save")),
    "rows and products of experts": save_list(SaveRule("dispatch", "save"), SaveRule("experts", "save")),
    "routing": save_list(SaveRule("route", "save")),
    "one op": save_list(SaveRule("aten.mm.default", "save")),
    "one op of float8": save_list(SaveRule("titanlite.scaled_matmul.default", "save")),
    "one op of blocks": save_list(SaveRule("titanlite.block_scaled_matmul.default", "save")),
    "attention's operator": save_list(
        SaveRule("aten._scaled_dot_product_flash_attention_for_cpu.default", "save"),
        SaveRule("matmul", "save", module=("wqkv",)),
    ),
    "maxima by name": save_list(SaveRule("aten.amax.default", "save")),
    "casts by name": save_list(SaveRule("titanlite.cast_blocks.default", "save"), SaveRule("aten.mean.dim", "save")),
    "casts and what is multiplied": save_list(
        SaveRule("cast", "save"),
        SaveRule("communication", "save"),
        SaveRule("matmul", "save", module=("wqkv", "wo", "w13")),
    ),
}


BY_TORCHAO, BY_BLOCKS = "rowwise_with_gw_hp", "blockwise"
ONE_OP = ("one op", "one op of float8", "one op of blocks", "attention's operator", "maxima by name", "casts by name")
# Operators that no rule but one by their name keeps alone; a weight's maxima and bytes are never kept.
BY_NAME = [("attention's operator", None), ("maxima by name", "rowwise"), ("casts by name", BY_BLOCKS)]
# Every list and every recipe at least once; `test_bytes_do_not_depend_on_the_width_of_weights` has two more. Compiled,
# these stand for all lists, which are in each run of the tests without.
QUICK = [("attention's operator", None)]
COMPILED = [
    ("statistics and casts", BY_TORCHAO),
    ("casts of one layer", "rowwise"),
    ("casts and what is multiplied", BY_BLOCKS),
    ("one op", BY_TORCHAO),
    ("one op of float8", "rowwise"),
    ("one op of blocks", BY_BLOCKS),
    ("statistics and casts", BY_BLOCKS),
    ("casts and what is multiplied", "tensorwise"),
]


CASES = [
    *(
        (own, float8, "eager")
        for own in OWN
        if own not in (*ONE_OP, *ONLY_OF_EXPERTS)
        for float8 in (*FLOAT8[1:], BY_TORCHAO, BY_BLOCKS)
    ),
    *((own, float8, "eager") for own in ONE_OP[:2] for float8 in (*FLOAT8[1:], BY_TORCHAO)),
    ("one op of blocks", BY_BLOCKS, "eager"),
    *((own, float8, mode) for own, float8 in BY_NAME for mode in MODES),
    *((own, float8, "compiled") for own, float8 in COMPILED),
]


def marks_of(own: str, float8: str | None, mode: str) -> list[pytest.MarkDecorator]:
    again = mode == "compiled" and (own, float8) not in QUICK
    return [*([pytest.mark.slow] if again else []), *([SCALES_BY_ROW] if float8 == BY_TORCHAO else [])]


@pytest.mark.parametrize(("own", "float8", "mode"), [pytest.param(*case, marks=marks_of(*case)) for case in CASES])
def test_lists_of_ones_own(own, float8, mode):
    check(own, *measured(OWN[own], mode, float8, **(OF_BLOCKS if float8 == "blockwise" else {})))


@pytest.mark.parametrize(
    ("matmul", "mode"), [("output", "eager"), *slow(("output", "compiled"), ("grad_weight", "compiled"))]
)
def test_scales_by_block_beside_a_product_in_high_precision(matmul, mode, tmp_path):
    of = {"output": ("input", "weight"), "grad_weight": ("input", "grad_output")}[matmul]
    mine = tmp_path / "mine.toml"
    mine.write_text('extends = "blockwise"\n' + "".join(f'[{name}]\n{matmul} = "none"\n' for name in of))
    for own in (SOME["none"], OWN["statistics and casts"], OWN["one op of blocks"]):
        check(own, *measured(own, mode, str(mine), **OF_BLOCKS))


@pytest.mark.parametrize(
    ("float8", "fused"), [("tensorwise", True), *slow(("tensorwise", False), ("rowwise", False), ("rowwise", True))]
)
def test_casts_under_tensor_parallelism(float8, fused):
    with ranks_that_move_nothing(2):
        for mode in MODES if not fused else ["eager"]:
            check(mode, *measured(OWN["casts and what is multiplied"], mode, float8, fused=fused))


@pytest.mark.parametrize("fused", [True, *slow(False)])
def test_maxima_of_all_ranks(fused, tmp_path):
    """Gathered bytes have one scale, which no rank sends; a reduced maximum is kept where maxima are."""
    mine = tmp_path / "mine.toml"
    mine.write_text('extends = "tensorwise"\nreduce_amax = true\n')
    none = recipes.load("activation_checkpoint", "none")
    with ranks_that_move_nothing(2):
        for mode in MODES:
            check(mode, *measured(none, mode, str(mine), fused=fused))
        for chosen, again in ((OWN["statistics and casts"], 0), (recipes.load("activation_checkpoint", "full"), 1)):
            with CountCollectives() as seen:
                check(again, *measured(chosen, "eager", str(mine), fused=fused))
            n = len(LAYERS) if fused else len(LAYERS) // 2  # of inputs, and as many of gradients
            assert seen.counts["all_reduce"] == (2 + again) * n


@SCALES_BY_ROW
@pytest.mark.parametrize("mode", ["eager", *slow("compiled")])
def test_a_recipe_that_is_torchaos(mode, tmp_path):
    """No shipped one casts an activation once more for the gradient of its weight."""
    mine = tmp_path / "mine.toml"
    mine.write_text('extends = "rowwise"\nscale_rounding = "exact"\nfsdp_all_gather = "high_precision"\n')
    check(mode, *measured(recipes.load("activation_checkpoint", "none"), mode, str(mine)))


@pytest.mark.parametrize("mode", ["eager", *slow("compiled")])
def test_a_magnitude_too_many_is_seen(mode):
    bad = recipes.load("activation_checkpoint", "attention")
    bad = replace(bad, rules=(SaveRule("aten.abs.default", "save"), *bad.rules))
    found, expected = measured(bad, mode, "rowwise")
    assert found.bytes > 1.2 * expected.bytes
