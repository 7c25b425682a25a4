"""What a save-list says is recomputed is what is recomputed: matmuls and attention are counted in backward."""

import contextlib
import functools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch._ops import HigherOrderOperator
from torch.nn.functional import dropout
from torch.utils._python_dispatch import TorchDispatchMode

import titanlite.models.moe  # noqa: F401  # whose operators are there then
from tests.support.needs import slow
from titanlite import recipes
from titanlite.activation_checkpoint.apply import SaveListUse, apply_activation_checkpoint, check_names
from titanlite.activation_checkpoint.operations import (
    CLASSES,
    EXCHANGES,
    FUSED,
    GATHER_ROWS,
    GRADIENTS_OF_EXPERTS,
    GROUPED_MATMUL,
)
from titanlite.activation_checkpoint.rules import BlockRules, kernels
from titanlite.config.architectures import ARCHITECTURES
from titanlite.config.recipe_schema import ModelDims, SaveList, SaveRule
from titanlite.config.schema import Config, Float8, Model
from titanlite.errors import RecipeError
from titanlite.forecast.activation_cost import check_matches, rule_costs
from titanlite.forecast.traced_run import traced_run
from titanlite.models.find import model_class
from titanlite.models.layers import Sequences
from titanlite.models.llama3 import Llama3
from titanlite.parallel.initialise import initialise

D, H, K, F, S, LAYERS = 64, 4, 2, 384, 16, 2
SIZES = ModelDims("", LAYERS, D, H, K, F, vocab_size=32, rope_theta=1e4, norm_eps=1e-5)
NAMES = ["attention.wqkv", "attention.wo", "feed_forward.w13", "feed_forward.w2"]
FORWARD_SHAPES = {
    "wqkv": ([S, D], [D, D * (H + 2 * K) // H]),
    "wo": ([S, D], [D, D]),
    "w13": ([S, D], [D, 2 * F]),
    "w2": ([S, F], [F, D]),
}
NONE = SaveList("", "save")


class CountForwardOps(TorchDispatchMode):
    """Counts attention, and the products that forward consists of."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            shapes = tuple(list(x.shape) for x in args)
            self.counts.update(name for name, forward in FORWARD_SHAPES.items() if shapes == forward)
        # The compiler recomputes attention, which may have dropout, as run_with_rng_state(state, attention, …).
        op = args[1] if isinstance(func, HigherOrderOperator) else func
        self.counts["attention"] += op is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return func(*args, **(kwargs or {}))


def save_list(*rules: SaveRule, default: str = "recompute") -> SaveList:
    return SaveList("", default, rules)  # type: ignore[arg-type]


def backward_ops(
    saved: SaveList, compiled: bool, dims: ModelDims = SIZES, model_type: type[Llama3] = Llama3
) -> tuple[Counter[str], SaveListUse, list[torch.Tensor]]:
    """Forward products and attention in backward, how the rules matched, and the gradients."""
    torch._dynamo.reset()
    model = model_type(dims, S)
    model.fill_buffers()
    initialise(model, seed=0)
    use = apply_activation_checkpoint(model, saved)
    if compiled:
        for block in model.layers:  # inductor's partitioner, without its code generation
            block.compile(fullgraph=True, backend="aot_eager_decomp_partition")
    tokens = torch.arange(S) % SIZES.vocab_size
    loss = model(tokens).float().square().mean()
    with CountForwardOps() as ops:
        loss.backward()
    ops.counts["wo"] -= dims.n_layers  # its gradient has the same shapes
    return +ops.counts, use, [p.grad for p in model.parameters() if p.grad is not None]


@functools.cache
def without_a_list() -> list[torch.Tensor]:
    """The gradients of a model that keeps everything."""
    return backward_ops(NONE, compiled=False)[2]


def matmul(*modules: str, action: str = "save", **options) -> SaveRule:
    return SaveRule("matmul", action, module=modules, **options)  # type: ignore[arg-type]


ATTENTION = SaveRule("attention", "save")
CPU_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"
# What backward needs of a block is the input of w2, at most; so w2 itself is never recomputed.
CASES = {
    "none": (NONE, []),
    "everything": (save_list(), ["wqkv", "attention", "wo", "w13"]),
    "attention": (save_list(ATTENTION, matmul("wqkv")), ["wo", "w13"]),
    "some layers": (save_list(ATTENTION, matmul("wqkv", "w13")), ["wo"]),
    "a layer by more of its name": (save_list(ATTENTION, matmul("attention.wqkv")), ["wo", "w13"]),
    "a module by a pattern": (save_list(ATTENTION, matmul("attention.*")), ["w13"]),
    "every matmul": (save_list(ATTENTION, matmul()), []),
    "whole blocks": (save_list(SaveRule("block", "save")), []),
    "every second matmul": (save_list(ATTENTION, matmul(every=2)), ["wo"]),
    "one op": (save_list(ATTENTION, SaveRule("aten.mm.default", "save")), []),
    "all but one layer": (save_list(matmul("w13", action="recompute"), default="save"), ["w13"]),
    "the first rule decides": (save_list(matmul("w*o", "wqkv"), matmul(action="recompute"), default="save"), ["w13"]),
    "attention can be recomputed beside its input": (save_list(matmul("w13")), ["wqkv", "attention", "wo"]),
}


# A rule finds its operations in the same way whether they are compiled or not: these show it.
QUICK = ["everything", "whole blocks", "every second matmul"]


@pytest.mark.parametrize(
    ("case", "compiled"),
    [
        *((case, False) for case in CASES),
        *((case, True) for case in QUICK),
        *slow(*((case, True) for case in CASES if case not in QUICK)),
    ],
)
def test_what_is_recomputed(case, compiled):
    saved, expected = CASES[case]
    ops, use, gradients = backward_ops(saved, compiled)
    assert ops == Counter(dict.fromkeys(expected, LAYERS))
    assert use.unmatched() == []
    for got, truth in zip(gradients, without_a_list(), strict=True):
        if compiled:  # it may sum in another order
            assert (got - truth).abs().max() <= 1e-5 * truth.abs().max()
        else:
            assert torch.equal(got, truth)


@pytest.mark.parametrize("compiled", [False, *slow(True)], ids=["eager", "compiled"])
def test_what_each_rule_did_is_counted(compiled):
    """A compiler traces a kind of block once for all of it."""
    saved = save_list(ATTENTION, matmul("wqkv"), matmul("w13", layers="1:"), SaveRule("statistics", "save"))
    _, use, _ = backward_ops(saved, compiled, replace(SIZES, n_layers=3))
    assert use.matches == {0: 3, 1: 3, 2: 2, 3: 6}


class ByKeyword(Llama3):
    """Calls its blocks as a model of one's own may."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for block in self.layers:
            x = block(x, sequences=Sequences(self.seq_len), sin=self.sin, cos=self.cos)
        return self.output(self.norm(x))


@pytest.mark.parametrize("compiled", [False, *slow(True)])
def test_blocks_may_be_called_by_keyword(compiled):
    (ops, _, truth), (same, _, got) = (backward_ops(save_list(), compiled, SIZES, m) for m in (Llama3, ByKeyword))
    assert same == ops
    assert all(torch.equal(g, t) for g, t in zip(got, truth, strict=True))


def test_layers_are_chosen_by_number():
    ops, _, _ = backward_ops(save_list(ATTENTION, matmul("wqkv"), matmul("w13", layers="1:")), compiled=False)
    assert ops == {"wo": LAYERS, "w13": 1}


@pytest.mark.parametrize("compiled", [False, *slow(True)], ids=["eager", "compiled"])
def test_whole_blocks_are_left_alone(compiled):
    """The other block computes all again; what is left alone is counted."""
    ops, use, gradients = backward_ops(save_list(SaveRule("block", "save", layers="1:")), compiled)
    assert ops == {"wqkv": 1, "attention": 1, "wo": 1, "w13": 1}
    assert use.checkpointed == [0]
    assert use.matches == {0: 1}
    for got, truth in zip(gradients, without_a_list(), strict=True):
        assert (got - truth).abs().max() <= 1e-5 * truth.abs().max()


@pytest.mark.parametrize("name", recipes.names("activation_checkpoint"))
def test_each_rule_of_a_shipped_list_is_used(name):
    shipped = recipes.load("activation_checkpoint", name)
    _, use, _ = backward_ops(shipped, compiled=False, dims=replace(SIZES, n_layers=8))
    local = {i for i, rule in enumerate(shipped.rules) if rule.op != "communication"}  # there is none of one process
    assert {i for i in range(len(shipped.rules)) if use.matches[i]} == local


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", recipes.names("activation_checkpoint"))
def test_a_shipped_list_goes_with_every_architecture(name, architecture):
    """Each rule matches something of its blocks, and where it names matmuls, the same as in Llama 3: w1 is w13, and so
    is the w13 of experts."""
    shipped = recipes.load("activation_checkpoint", name)
    config = Config(model=Model(name=architecture, flavor="debug"))
    dims = replace(recipes.model_dims(config), n_layers=6)
    run = traced_run(config, dims, None)
    check_names(shipped, run.layers, 6)
    check_matches(shipped, run, strict=True)
    with torch.device("meta"):
        use = apply_activation_checkpoint(model_class(config.model)(dims, S), shipped)
    assert len(use.checkpointed) == (0 if name == "none" else 6)
    llama = recipes.model_dims(Config(model=Model(flavor="debug")))
    of_llama = traced_run(replace(config, model=Model()), replace(llama, n_layers=6), None)
    kept = [[p.matches for p in rule_costs(of, shipped) if p.rule.op == "matmul"] for of in (run, of_llama)]
    assert kept[0] == kept[1]


def test_a_rule_that_matched_nothing_is_reported():
    unused, forgiven = SaveRule("communication", "save"), SaveRule("aten.bmm.default", "save", optional=True)
    _, use, _ = backward_ops(save_list(unused, ATTENTION, matmul("wqkv"), forgiven), compiled=False)
    assert use.unmatched() == [0]


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        *(
            ([SaveRule("aten.mmm.default", action)], ['rules[0].op = "aten.mmm.default"', 'mean "aten.mm.default"'])
            for action in ("save", "recompute")
        ),
        ([SaveRule("aten.silu.default", "save"), matmul("w1")], ["2 problems", 'rules[1].module = "w1"', "less to"]),
        *(
            ([ATTENTION, SaveRule(op, "save", optional=True)], [f'rules[1].op = "{op}"', "less to recompute"])
            for op in ("aten._to_copy.default", "aten.abs.default")
        ),
    ],
)
def test_rules_that_name_no_operation_or_save_elementwise_work_are_refused(rules, says):
    with pytest.raises(RecipeError) as error:
        check_names(save_list(*rules), NAMES)
    assert all(each in str(error.value) for each in says)


def test_recomputing_elementwise_work_is_not():
    rule = SaveRule("aten.silu.default", "recompute")
    ops, use, _ = backward_ops(save_list(rule, default="save"), compiled=False)
    assert not ops
    assert use.matches[0] == LAYERS


@pytest.mark.parametrize(
    ("saved", "seen"),
    [
        (save_list(ATTENTION), r'rules\[0\].op = "attention"'),
        (save_list(ATTENTION, matmul("wqkv", layers="1:")), r'rules\[0\].op = "attention"'),
        (save_list(matmul("wqkv", action="recompute"), default="save"), r'default = "save"'),
        (save_list(SaveRule(CPU_ATTENTION, "save")), CPU_ATTENTION),
        # That the device at hand has another kernel is no reason to let it pass.
        (save_list(SaveRule(CLASSES["attention"][1], "save", optional=True)), CLASSES["attention"][1]),
    ],
)
@pytest.mark.parametrize("compiled", [False, *slow(True)], ids=["eager", "compiled"])
def test_kept_statistics_need_the_q_k_v_that_they_are_of(saved, seen, compiled):
    """Refused by the trace before a start; where there is none, after the first pass, in which it is recomputed."""
    with pytest.raises(RecipeError, match=seen) as error:
        check_matches(saved, traced_run(Config(), SIZES, None), strict=False)
    assert 'module = ["wqkv"]' in str(error.value)
    ops, use, _ = backward_ops(saved, compiled)
    assert str(use.refused) == str(error.value)
    assert ops["attention"] > 0


class Dropping(Llama3):
    """With dropout behind the products of each block."""

    def __init__(self, dims: ModelDims, seq_len: int) -> None:
        super().__init__(dims, seq_len)
        for block in self.layers:
            for layer in (block.attention.wo, block.feed_forward.w2):
                layer.register_forward_hook(lambda module, inputs, output: dropout(output, 0.5))


@pytest.mark.parametrize(
    ("case", "compiled"),
    [
        *((case, False) for case in ("everything", "attention", "every matmul")),
        *slow(("everything", True), ("attention", True), ("every matmul", True)),
    ],
)
def test_random_numbers_are_drawn_again_alike(case, compiled):
    torch.manual_seed(0)
    _, _, truth = backward_ops(NONE, compiled, model_type=Dropping)
    torch.manual_seed(0)
    _, use, gradients = backward_ops(CASES[case][0], compiled, model_type=Dropping)
    assert use.refused is None
    assert all(torch.equal(got, kept) for got, kept in zip(gradients, truth, strict=True))


class DroppingOnceMore(Dropping):
    """With a second kind of dropout, of another name."""

    def __init__(self, dims: ModelDims, seq_len: int) -> None:
        super().__init__(dims, seq_len)
        for block in self.layers:
            block.feed_forward.w13.register_forward_hook(lambda module, x, y: torch.native_dropout(y, 0.5, True)[0])


def test_random_numbers_of_which_some_are_kept_are_refused():
    """Recomputation would draw those of the others from where forward drew what is kept."""
    kept = SaveRule("aten.native_dropout.default", "save")
    _, use, _ = backward_ops(save_list(kept), compiled=False, model_type=DroppingOnceMore)
    assert 'put first a rule with op = "aten.native_dropout.default", action = "recompute"' in str(use.refused)
    _, use, _ = backward_ops(save_list(), compiled=False, model_type=DroppingOnceMore)
    assert use.refused is None


@pytest.mark.parametrize(
    ("recipe", "runs"),
    [
        ("none", "aten.mm.default"),
        ("rowwise", "titanlite.scaled_matmul.default"),
        ("blockwise", "titanlite.block_scaled_matmul.default"),
    ],
)
def test_an_operator_by_its_name_keeps_q_k_v_where_it_is_what_runs(recipe, runs):
    float8 = None if recipe == "none" else recipes.load("float8", recipe)
    run = traced_run(Config(float8=Float8(recipe, filter_fqns=("output",))), replace(SIZES, dim=128), float8)
    for op in ("aten.mm.default", "titanlite.scaled_matmul.default", "titanlite.block_scaled_matmul.default"):
        refused = (
            contextlib.nullcontext() if op == runs else pytest.raises(RecipeError, match="wqkv would be recomputed")
        )
        with refused:
            check_matches(save_list(ATTENTION, SaveRule(op, "save")), run, strict=False)


def decisions(saved: SaveList, ops: list[str]) -> str:
    """One letter per operation: saved or recomputed. A cast to float8 is written "cast"."""
    rules = BlockRules(saved, frozenset(range(len(saved.rules))), ("a.wqkv", "a.wo", "f.w13", "f.w2"))
    return "".join(
        rules.decide("aten._to_copy.default" if op == "cast" else op, to_float8=op == "cast").action[0] for op in ops
    )


MM, MEAN, AMAX = "aten.mm.default", "aten.mean.dim", "aten.amax.default"
GATHER, SCATTER = (CLASSES["communication"][i] for i in (0, 1))
ALL_REDUCE = "_c10d_functional.all_reduce.default"
FLOAT8_LAYER = [AMAX, "cast", AMAX, "cast", MM]  # the activation's, then the weight's
GATE_AND_CAST = "titanlite.swiglu_cast.default"


def test_only_activations_are_cast_and_measured_for_a_class():
    ops = [MEAN, "aten._to_copy.default", *FLOAT8_LAYER, *FLOAT8_LAYER]
    assert decisions(save_list(SaveRule("cast", "save")), ops) == "rr" + "rsrrr" * 2
    assert decisions(save_list(SaveRule("statistics", "save")), ops) == "sr" + "srrrr" * 2
    assert decisions(save_list(SaveRule(AMAX, "save")), ops) == "rr" + "srrrr" * 2  # by its own name, too
    assert decisions(save_list(SaveRule(AMAX, "recompute"), default="save"), ops) == "ss" + "rsrss" * 2
    assert decisions(save_list(SaveRule(AMAX, "save"), default="save"), ops) == "ss" + "sssss" * 2
    reduced = [AMAX, ALL_REDUCE, "cast"]  # over the ranks that hold the other parts
    assert decisions(save_list(SaveRule("statistics", "save")), [*reduced, *reduced, MM]) == "ssr" + "rrr" + "r"


def test_a_view_is_not_kept_and_nor_is_what_it_views():
    rules = BlockRules(save_list(default="save"), frozenset(), ("a.wqkv",))
    assert rules.decide("aten.view.default", is_view=True).action == "recompute"
    assert rules.decide("aten.silu.default").action == "save"


def test_a_gate_with_its_cast_is_the_activations_of_both() -> None:
    """The maximum and the cast that follow it are the weight's, whatever operation makes them."""
    ops = [GATE_AND_CAST, AMAX, "cast", MM]
    assert decisions(save_list(SaveRule("cast", "save")), ops) == "srrr"
    assert decisions(save_list(SaveRule("statistics", "save")), ops) == "rrrr"
    mixed = [AMAX, "cast", "aten.max.default", "cast", MM]  # rows of the one, the whole of the other
    assert decisions(save_list(SaveRule("statistics", "save")), mixed) == "srrrr"


def test_what_surrounds_a_matmul_belongs_to_its_layer():
    ops = [MEAN, GATHER, "cast", MM, MM, SCATTER, MEAN, GATHER, "cast", MM, MM, SCATTER]
    for name, layer, expected in [
        ("communication", "wqkv", "rsrrrrrrrrrr"),
        ("communication", "wo", "rrrrrsrrrrrr"),
        ("communication", "f.*", "rrrrrrrsrrrs"),
        ("statistics", "w13", "rrrrrrsrrrrr"),
        ("cast", "w13", "rrrrrrrrsrrr"),
        ("matmul", "w13", "rrrrrrrrrsrr"),
    ]:
        assert decisions(save_list(SaveRule(name, "save", module=(layer,))), ops) == expected


def test_an_operation_that_is_two_in_one_is_kept_for_either():
    fused = list(FUSED)
    ops = [fused[0], fused[1], fused[0], fused[1]]
    assert decisions(save_list(matmul("w13")), ops) == "rrsr"
    assert decisions(save_list(matmul("w2")), ops) == "rrrs"
    assert decisions(save_list(SaveRule("communication", "save", module=("wo",))), ops) == "rsrr"
    assert decisions(save_list(matmul(action="recompute"), SaveRule("communication", "save")), ops) == "rsrs"
    assert decisions(save_list(SaveRule(fused[1], "save")), ops) == "rsrs"
    assert decisions(save_list(matmul(every=2)), ops) == decisions(save_list(matmul(every=2)), [MM] * 4) == "srsr"


def decisions_of_experts(*rules: SaveRule, default: str = "recompute") -> str:
    """One letter each for router, routing, rows, dispatch, w13, w2 and, of the shared expert, w13."""
    saved = save_list(*rules, default=default)
    of_block = BlockRules(saved, frozenset(range(len(rules))), ("experts.w13", "experts.w2", "experts.shared.w13"))
    ran = [*CLASSES["route"][:3], GATHER_ROWS, GROUPED_MATMUL, GROUPED_MATMUL, MM]
    return "".join(of_block.decide(op).action[0] for op in ran)


def test_routing_is_kept_whatever_a_list_says():
    for rules in ((), (matmul(),), (SaveRule(CLASSES["route"][1], "recompute"),)):
        assert decisions_of_experts(*rules)[:3] == "sss"
    for op in ("route", *CLASSES["route"]):
        check_names(save_list(SaveRule(op, "save")), [], 1)
        with pytest.raises(RecipeError, match='"save": where tokens go is always kept'):
            check_names(save_list(SaveRule(op, "recompute")), [], 1)


def test_products_of_experts_are_matmuls_too():
    assert decisions_of_experts(matmul()) == "sssrsss"
    assert decisions_of_experts(matmul("experts.w13", "experts.w2")) == "sssrssr"
    assert decisions_of_experts(matmul("w13")) == "sssrsrs"
    assert decisions_of_experts(SaveRule("experts", "save")) == "sssrssr"
    assert decisions_of_experts(SaveRule("experts", "save", module=("w2",))) == "sssrrsr"
    assert decisions_of_experts(SaveRule("experts", "recompute"), matmul()) == "sssrrrs"  # the first decides
    assert decisions_of_experts(matmul(every=2)) == "sssrsrs"
    assert decisions_of_experts(SaveRule("dispatch", "save")) == "ssssrrr"
    assert decisions_of_experts(SaveRule("dispatch", "save", module=("w2",))) == "sssrrrr"


def test_the_rule_that_decided_is_the_one_that_keeps():
    both = save_list(matmul(action="recompute"), SaveRule("communication", "save"))
    rules = BlockRules(both, frozenset({0, 1}), ("a.wqkv", "a.wo"))
    gathered, scattered = (rules.decide(op) for op in FUSED)
    assert (gathered.action, gathered.by) == ("recompute", 0)
    assert (scattered.action, scattered.by) == ("save", 1)
    assert set(gathered.rules) == set(scattered.rules) == {0, 1}


def test_kernels_of_attention_that_a_list_names():
    first, second, *_, own, split = CLASSES["attention"]
    assert kernels(save_list(ATTENTION)) == [first]
    assert kernels(save_list(SaveRule(second, "save"), SaveRule(split, "save"))) == [second]
    assert kernels(save_list(SaveRule(own, "save"))) == [own]  # attends to whole samples where torch's kernels do not
    assert kernels(save_list(SaveRule(split, "save"))) == [first]


def test_every_operator_of_titanlite_has_a_class():
    in_classes = {op for ops in CLASSES.values() for op in ops if op.startswith("titanlite.")}
    # In backward, of weights before FSDP gathers them, and what is as cheap as elementwise work: there no rule applies.
    gradients = ["swiglu_grad", "swiglu_grad_cast", "attention_grad"]
    gradients += ["context_attention_grad"]
    gradients += ["norm_rope_grad", "rms_norm_grad", "rotated_heads_grad"]
    gradients += [
        "route_grad",
        "router_logits_grad",
        "expert_gate_grad",
        "expert_gate_grad_cast",
        "row_dots",
        "aligned_rows",
    ]
    of_weights = ("transpose", "cast_transpose", "cast_rows", "cast_into")
    elsewhere = {f"titanlite.{op}.default" for op in (*gradients, *of_weights, "norm_rope", "expert_gate", "combine")}
    spelled = {op for op in torch._C._dispatch_get_all_op_names() if op.startswith("titanlite::")}
    spelled.discard("titanlite::planned_mixture")  # of a sharding plan, not of a run
    spelled -= {f"titanlite::cross_entropy_{op}" for op in ("statistics", "gradient")}  # of the loss, in no block
    assert {f"{op.replace('::', '.')}.default" for op in spelled} == {
        *FUSED,
        *in_classes,
        *elsewhere,
        *GRADIENTS_OF_EXPERTS,
        *EXCHANGES,
    }
