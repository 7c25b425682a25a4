"""What the receipt of a real run says, and that a run which does less than it was asked to ends before step 2."""

import json
import os
import platform
import sys
import warnings
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

import titanlite
import titanlite.data.inputs
import titanlite.sharding.split as split
import titanlite.training.assemble as assemble
import titanlite.training.build as build
import titanlite.training.receipt as training_receipt
from tests.support.launched import Desk, Ended
from tests.support.needs import slow
from tests.support.own_model import mine
from titanlite import recipes
from titanlite.activation_checkpoint.receipt import rule_labels
from titanlite.config.recipe_schema import SaveRule
from titanlite.config.schema import Config, Training
from titanlite.data.corpus import Corpus
from titanlite.data.prepare import data_warnings
from titanlite.data.shards import Meta
from titanlite.device import CPU, Device
from titanlite.errors import RecipeError, StrictError
from titanlite.kernels.lowering import Lowered
from titanlite.models.layers import CausalAttention
from titanlite.parallel import tensor
from titanlite.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from titanlite.receipt import Receipt, Skipped
from titanlite.training.build import Run
from titanlite.training.data import data_entry

H100 = Device(CPU.of_tensors, "H100", (9, 0))
BALANCED = ["save attention", "save communication", "save matmul wqkv w1*"]


@pytest.fixture(scope="module")
def everything(desk: Desk) -> Ended:
    """FSDP 2 × TP 2, float8 and a save-list: two steps."""
    return desk.run(
        "everything",
        4,
        "--parallelism.tensor_parallel_degree=2",
        "--float8.recipe=rowwise",
        "--activation_checkpoint.recipe=balanced",
        "--training.mixed_precision_param=bfloat16",
        "--training.local_batch_size=1",
        "--training.steps=2",
        "--lr_scheduler.warmup_steps=1",
    )


def test_layout_and_dtypes_are_those_of_the_run(everything: Ended) -> None:
    receipt = everything.receipt
    layout = {"data_parallel_replicate": 1, "tensor_parallel": 2, "data_parallel_shard": 2}
    assert receipt["parallelism"]["applied"] == layout
    # Two blocks of wqkv, wo, w13 and w2, the embedding and the head.
    assert receipt["tensor_parallel"]["applied"] == {"layers": 10}
    assert receipt["tensor_parallel"]["skipped"] == []
    dtypes = {"parameters": "float32", "compute": "bfloat16", "reduction": "float32", "optimizer_state": "float32"}
    assert receipt["dtypes"]["applied"] == receipt["dtypes"]["requested"] == dtypes
    assert receipt["attention"]["applied"] == "math"  # of documents: their definition
    assert receipt["compile"] == {"feature": "compile", "requested": False, "applied": "off", "skipped": []}


@pytest.mark.slow
def test_a_layer_that_is_whole_on_every_rank_is_not_counted_as_split(desk: Desk) -> None:
    flags = ["--model.name=gpt2", "--model.n_kv_heads=4", "--parallelism.tensor_parallel_degree=2"]
    entry = desk.run("positions", 2, *flags, "--job.stop_after=1").receipt["tensor_parallel"]
    assert entry["applied"] == {"layers": 10}
    assert entry["skipped"] == [{"what": "positions", "why": "annotated to be replicated on every rank"}]


def test_all_bad_records_are_named_if_they_are_few(tmp_path: Path) -> None:
    meta = Meta("x", "bytes", "uint16", (), "", n_bad_records=1, bad_records=("x:2: no",))
    (warning,) = data_warnings("data.source", meta, 256)
    assert warning == "data.source = x: 1 bad record skipped (data.max_bad_records):\n      x:2: no"
    meta.write(tmp_path)
    assert data_entry("data.source", Corpus(tmp_path)).skipped == (Skipped("x:2: no", "a bad record"),)


def test_token_files_with_few_ids_of_the_model(desk: Desk) -> None:
    source = desk.folder / "ids.bin"
    source.write_bytes(bytes(range(50)) * 160)  # as uint16, the largest is 49 · 256 + 48
    flags = [f"--data.source={source}", "--model.vocab_size=16384", "--job.stop_after=1"]
    said = f"warning: data.source = {source} has 12,593 ids and model.vocab_size is 16,384: 76.9% of"
    output = desk.run("few ids", 2, *flags).output
    assert output.count(said) == 1
    assert "\nexport  " in output
    assert "\ngenerate  " not in output  # no tokenizer is known


def test_many_epochs_are_told_where_the_length_is_known_after_preparation(desk: Desk) -> None:
    (source := desk.folder / "short.txt").write_text("words " * 100)

    def read_nothing_before() -> None:
        titanlite.data.inputs._SMALL_BYTES = 0

    flags = (f"--data.source={source}", "--job.stop_after=1")
    run = desk.run("many epochs", 2, *flags, plant=read_nothing_before)
    steps, before = run.output.index("step  1/20"), run.output.index(f'warning: data.source = "{source}": 8.89 epochs')
    assert before < steps
    assert run.output.count(" epochs in 20 steps; ") == 1


def test_bad_records_are_counted_and_the_first_ones_named(desk: Desk) -> None:
    source = desk.folder / "records.jsonl"
    source.write_text(json.dumps({"text": "words " * 400}) + "\n" + "no JSON\n" * 12)
    run = desk.run("bad", 2, f"--data.source={source}", "--data.max_bad_records=12", "--job.stop_after=1")
    assert run.output.count(f"warning: data.source = {source}: 12 bad records skipped") == 1
    assert run.output.count("not JSON: ") == 10
    assert "and 2 more\n" in run.output
    entry = run.receipt["data.source"]
    assert entry["requested"] == str(source)
    assert entry["applied"] == {"tokens": 2401, "bad_records": 12, "skipped_files": 0, "documents": 1}
    assert entry["skipped"][0]["what"].startswith(f"{source}:2: not JSON")
    assert entry["skipped"][10:] == [{"what": "and 2 more", "why": "a bad record"}]


def test_what_max_tokens_leaves_out_is_in_the_receipt(desk: Desk) -> None:
    source = desk.folder / "more.jsonl"
    source.write_text((json.dumps({"text": "words " * 400}) + "\n") * 2)
    flags = (f"--data.source={source}", "--data.max_tokens=2400")
    run = desk.run("cut", 2, *flags, "--job.stop_after=1")
    entry = run.receipt["data.source"]
    applied = {"tokens": 2401, "bad_records": 0, "skipped_files": 0, "max_tokens": 2400, "documents": 1}
    assert entry["applied"] == applied
    assert entry["skipped"] == [{"what": "the rest of the source", "why": "data.max_tokens = 2400"}]
    assert "\ndata.source: tokens 2,401, documents 1, max_tokens 2,400\n" in run.output
    resumed = desk.run("cut", 2, flags[0], "--job.stop_after=2")
    assert "data.max_tokens" in resumed.output  # as other changes are told
    assert "warning: data.source holds different text than before (fingerprint " in resumed.output
    assert resumed.receipt["data.source"]["applied"]["tokens"] == 2 * 2401
    assert resumed.receipt["data.source"]["skipped"] == []


def test_kernels_of_attention_are_those_of_the_shapes_that_layers_give_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def choice(q: Tensor, k: Tensor, v: Tensor, **_: bool) -> int:
        assert q.requires_grad
        assert k.requires_grad
        asked.append((tuple(q.shape), tuple(k.shape)))
        return SDPBackend.CUDNN_ATTENTION.value

    monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
    run = SimpleNamespace(
        dims=recipes.load("model", "gemma3-debug"),  # H = 8, K = 4, E = 32
        config=Config(training=Training(seq_len=96, local_batch_size=2)),
        mesh=SimpleNamespace(device=torch.device("cpu"), tp_size=2, context=None),
        model=torch.nn.ModuleList([CausalAttention(window) for window in (32, 32, 0, 32)]),
    )
    assert training_receipt._attention_backend(cast(Run, run), False) == "cudnn_attention, math"
    assert asked == [((2, 4, 96, 32), (2, 2, 96, 32))]  # those with a window have a kernel of their own, on GPUs


@pytest.mark.parametrize(
    ("backend", "device", "dtype", "skipped", "refused"),
    [
        ("flash_attention", H100, "bfloat16", 0, False),
        ("cudnn_attention, math", H100, "bfloat16", 0, True),
        ("math", H100, "float32", 1, False),
        ("math", CPU, "float32", 0, False),
        ("", H100, "bfloat16", 1, False),  # a model file's own
    ],
)
def test_attention_without_a_kernel_ends_a_run_on_gpus(
    backend: str, device: Device, dtype: str, skipped: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_receipt, "_attention_backend", lambda run, is_masked: backend)
    config = Config(training=Training(mixed_precision_param=dtype))
    run, receipt = SimpleNamespace(config=config, mesh=SimpleNamespace(built_for=device)), Receipt()
    run.model = SimpleNamespace(layers=range(2))
    entry = training_receipt._attention_entry(cast(Run, run), False)
    receipt.add(entry)
    assert (len(entry.skipped), entry.applied) == (skipped, backend or "not known")
    with pytest.raises(StrictError, match="never applied") if refused else nullcontext():
        receipt.enforce(True, print)


@pytest.mark.slow
def test_gradients_may_be_reduced_in_the_dtype_of_compute(desk: Desk) -> None:
    both = [f"--training.mixed_precision_{what}=bfloat16" for what in ("param", "reduce")]
    assert desk.run("narrow", 1, *both, "--training.steps=5").receipt["dtypes"]["applied"]["reduction"] == "bfloat16"


def test_what_the_run_computed_with_is_named_first(everything: Ended) -> None:
    name, entry = next(iter(everything.receipt.items()))
    assert name == "environment"
    assert entry["applied"]["torch"] == torch.__version__
    assert entry["applied"]["device"] == platform.machine()
    rules = "all adamw, 360,448 elements, all without weight decay adamw, 640 elements"  # of all ranks
    log = (everything.folder / "logs" / "rank0.log").read_text()
    for line in (f"environment: titanlite {titanlite.__version__}, torch", f"optimizer: recipe adamw, {rules}"):
        assert line in log
        assert line not in everything.output


def test_what_a_run_asked_for_is_printed_and_with_verbose_all(desk: Desk, everything: Ended) -> None:
    def printed(run: Ended) -> list[str]:
        block = run.output.partition("step 1/2  ")[2].partition("step 2/2  ")[0]
        return [line.partition(": ")[0] for line in block.splitlines()[1:]]

    asked = ["data.source", "parallelism", "tensor_parallel", "float8", "activation_checkpoint"]
    receipt = "receipt, with each layer, rule and shape"
    assert sorted(printed(everything)) == sorted(["memory", *asked, receipt])
    flags = ("--training.steps=2", "--lr_scheduler.warmup_steps=1")
    plain = desk.run("plain", 1, *flags)
    assert printed(plain) == ["memory", "data.source", "dtypes", receipt]

    def plant() -> None:
        sys.argv.append("--verbose")
        os.chdir(desk.folder)

    verbose = desk.run("verbose", 1, *flags, plant=plant)
    assert printed(verbose) == [*verbose.receipt, receipt]
    assert verbose.losses() == plain.losses()
    saved, log = "checkpoints/step-00000002\n", (verbose.folder / "logs" / "rank0.log").read_text()
    for before, after in (("folder    ", "\n"), (f"{receipt}: ", "/receipt.json\n"), ("saved ", f"/{saved}")):
        assert f"{before}runs/verbose{after}" in verbose.output
        assert f"{before}{verbose.folder}{after}" in log
    for name, more in (("compare", ""), ("export", ""), ("generate", " --prompt 'Once upon a time'")):
        assert f"\n{name:8}  titanlite {name} runs/verbose{more}\n" in verbose.output


def test_float8_layers_are_counted_and_each_skip_has_its_reason(everything: Ended) -> None:
    entry = everything.receipt["float8"]
    assert entry["requested"] == "rowwise"
    assert entry["applied"]["layers"] == 8
    assert entry["applied"]["lowering"] == "definition"
    assert entry["applied"]["fsdp_all_gather"] == "float8"
    each = entry["applied"]["each"]
    assert len(each) == 8
    assert set(each.values()) == {"definition, weight gathered in float8"}
    assert "layers.1.feed_forward.w13" in each
    assert "one operator with their collectives" not in entry["applied"]
    assert entry["skipped"] == [{"what": "output", "why": "float8.filter_fqns has 'output'"}]


def test_rules_of_the_save_list_are_counted(everything: Ended) -> None:
    entry = everything.receipt["activation_checkpoint"]
    assert entry["requested"] == "balanced"
    assert entry["applied"]["blocks"] == 2
    matches = entry["applied"]["matches"]
    assert list(matches) == BALANCED
    # In a micro-step of 2 blocks: attention once each, 2 gathers and 2 scatters, wqkv and w13.
    assert list(matches.values()) == [2, 8, 4]
    # Of 64 tokens, 2 bytes each: 64 wide and 2 statistics of 4 bytes; 2 gathered, 2 scattered, 128 wide; 128 and 256.
    kib = (64 * 2 + 2 * 4) / 16, 2 * 16 + 2 * 8, 16 + 32
    of_rules = entry["applied"]["predicted_mib_per_layer"]
    assert list(of_rules.items()) == [(rule, round(n / 1024, 3)) for rule, n in zip(BALANCED, kib, strict=True)]
    assert entry["skipped"] == []


def test_no_two_rules_have_one_name() -> None:
    twice = SaveRule("matmul", "save", module=("wo",))
    names = rule_labels([twice, replace(twice, layers="::2"), twice, replace(twice, every=2), twice])
    first = "save matmul wo"
    assert names == [first, f"{first}, blocks ::2", f"{first} (rule 3)", f"{first}, every 2", f"{first} (rule 5)"]


def test_a_rule_that_matches_nothing_ends_the_run_before_step_2(desk: Desk, tmp_path: Path) -> None:
    recipe = tmp_path / "unmatched.toml"
    recipe.write_text('help = "x"\ndefault = "recompute"\n[[rules]]\nop = "aten.bmm.default"\naction = "save"\n')
    flags = [f"--activation_checkpoint.recipe={recipe}"]
    run = desk.run("unmatched", 1, *flags, ends=2)
    assert len(run.steps) == 1
    assert run.checkpoints() == []
    assert run.status["state"] == "failed"
    assert run.status["error"]["type"] == "StrictError"
    assert "activation_checkpoint.recipe" in run.output
    assert f"save aten.bmm.default: matched no operation ({recipe}, line 4)" in run.output
    assert "Traceback" not in run.output
    assert run.receipt["activation_checkpoint"]["skipped"] == [
        {"what": "save aten.bmm.default", "why": f"matched no operation ({recipe}, line 4)"}
    ]
    lenient = desk.run("unmatched lenient", 1, *flags, "--job.strict=false", "--job.stop_after=2")
    assert len(lenient.steps) == 2
    assert "warning: a requested feature was not fully applied" in lenient.output


@pytest.mark.parametrize(
    ("default", "rules"),
    [("save", ""), ("recompute", '[[rules]]\nop = "communication"\naction = "save"\noptional = true\n')],
    ids=["a copy of none", "optional alone"],
)
def test_a_list_of_which_the_default_alone_says_what_is_kept_is_applied(desk: Desk, tmp_path: Path, default, rules):
    recipe = tmp_path / "default.toml"
    recipe.write_text(f'help = "x"\ndefault = "{default}"\n{rules}')
    run = desk.run(f"default {default}", 1, f"--activation_checkpoint.recipe={recipe}", "--job.stop_after=2")
    assert len(run.steps) == 2
    assert run.receipt["activation_checkpoint"]["applied"]["blocks"] == (2 if default == "recompute" else 0)


def test_a_float8_filter_that_leaves_nothing_ends_every_rank(desk: Desk) -> None:
    def plant() -> None:  # in the config such a filter is refused at once
        apply = split.apply_float8
        split.apply_float8 = lambda model, recipe, filter_fqns, *rest: apply(model, recipe, ("o",), *rest)

    run = desk.run("filtered", 2, "--float8.recipe=tensorwise", plant=plant, ends=2)
    said = run.output.partition("--- rank 1")[0]
    assert 'float8.recipe = "tensorwise"' in said
    assert "all are skipped, e.g. layers.0.attention.wqkv (float8.filter_fqns has 'o')" in said
    assert run.steps == []


def test_attention_that_turns_out_to_be_recomputed_without_its_inputs_ends_the_run(desk: Desk) -> None:
    def plant() -> None:
        apply = assemble.apply_activation_checkpoint

        def refused(*given):
            use = apply(*given)
            use.refused = RecipeError("attention without its q, k and v")
            return use

        assemble.apply_activation_checkpoint = refused

    run = desk.run("refused", 1, plant=plant, ends=2)
    assert "attention without its q, k and v" in run.output
    assert len(run.steps) == 1


RETURNED, FEED_FORWARD = "return h + self.feed_forward(normed)", "self.feed_forward = "
FORK = "normed, x = self.attention_norm.fork(x)"
COUNTS = (FORK, f"self.seen += 1; x = x * (1 + 0.1 * self.seen)\n        {FORK}")
BUFFER = 'self.register_buffer("seen", torch.empty(1), persistent=False)'
EMPTY = "dims = self.dims\n        for block in self.layers: block.seen.zero_()\n"
LIST = [
    (
        "def forward(self, x: Tensor, cos: Tensor, sin: Tensor, sequences: Sequences) -> Tensor:\n",
        "def forward(self, x, cos, sin, sequences, seen=()):\n",
    ),
    ("x = block(x, cos, sin, sequences)", "x = block(x, cos, sin, sequences, seen)"),
    ("x = self.tok_embeddings(tokens)", "x = self.tok_embeddings(tokens); seen = [x]"),
    (FORK, f"seen.append(x); x = x + 0.1 * sum(seen)\n        {FORK}"),
]
CHANGING = {
    "buffer": (
        [COUNTS, (FEED_FORWARD, f"{BUFFER}\n        {FEED_FORWARD}"), ("dims = self.dims\n", EMPTY)],
        "written",
    ),
    "number": ([COUNTS, (FEED_FORWARD, f"self.seen = 0\n        {FEED_FORWARD}")], "written"),
    "unread": (
        [
            (RETURNED, f"self.seen += 1\n        {RETURNED}"),
            (FEED_FORWARD, f"self.seen = 0\n        {FEED_FORWARD}"),
        ],
        "mine.py: 1 problem\n  layers.0.seen and 1 more = written in forward of a block\n",
    ),
    "list": (LIST, "Block.forward = changes an argument"),
}


@pytest.mark.parametrize("kind", ["list", *slow("unread", "buffer", "number")])
def test_what_a_block_changes_and_recomputation_reads(kind: str, desk: Desk, tmp_path: Path) -> None:
    """Gradients were those of what recomputation began from."""
    changes, said = CHANGING[kind]
    flags = [*mine(tmp_path, *changes), "--job.stop_after=2"]
    assert len(desk.run(f"{kind} kept", 1, *flags, "--activation_checkpoint.recipe=none").steps) == 2
    run = desk.run(f"{kind} again", 1, *flags, "--activation_checkpoint.recipe=full", ends=2)
    assert said in run.output
    assert len(run.steps) == (0 if kind == "list" else 1)


def test_compute_in_another_dtype_than_asked_for_ends_the_run(desk: Desk) -> None:
    def plant() -> None:
        apply = build.apply_fsdp
        full = replace(Config(), training=Training(mixed_precision_param="float32"))
        build.apply_fsdp = lambda model, config, mesh, *how: apply(model, full, mesh, *how)

    run = desk.run("dtype", 1, "--training.mixed_precision_param=bfloat16", plant=plant, ends=2)
    assert "all 4 eligible cases; it missed 1" in run.output
    assert "training.mixed_precision_param: compute in float32, not in bfloat16" in run.output


def test_a_compiler_that_is_off_ends_the_run(desk: Desk) -> None:
    def plant() -> None:
        from torch._dynamo.utils import counters

        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        counters.clear()  # a rank is forked from the tests' process, and others of these may have compiled something

    run = desk.run("not compiled", 1, "--compile.enable=true", plant=plant, ends=2)
    assert "compile.enable = true\n    want: applied at least once" in run.output.replace("\n  ", "\n")
    assert run.receipt["compile"]["applied"] == {"blocks": 2, "graphs": 0}


def test_fused_layers_and_operators_are_counted_and_what_was_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Lowered("all_gather_matmul", "8×6, 6×3", "no peer access between the GPUs of rank 0")
    fused, slower = Lowered("matmul_reduce_scatter", "8×6, 6×3"), plain._replace(reason="slower", expected=True)
    model = torch.nn.ModuleList([kind(6, {"w": 3}, std=1.0) for kind in (ColumnParallelLinear, RowParallelLinear)])
    for ran, asynchronous, applied, problem in (
        ({fused: 4}, True, {"layers": 2, "fused": 4, "plain": 0}, None),
        ({fused: 4, slower: 2}, True, {"layers": 2, "fused": 4, "plain": 2}, None),  # for a declared reason
        ({fused: 4, plain: 2}, True, {"layers": 2, "fused": 4, "plain": 2}, "all 2 eligible cases; it missed 1"),
        ({plain: 2}, True, {"layers": 2, "fused": 0, "plain": 2}, "it was never applied"),
        ({fused: 4}, False, {"layers": 1, "fused": 4, "plain": 0}, "1: its collectives were not fused with its matmul"),
    ):
        model[0].asynchronous, model[1].asynchronous = True, asynchronous
        monkeypatch.setattr(tensor, "lowered", Counter(ran))
        receipt = Receipt()
        receipt.add(tensor.fused_layers_entry(model, H100))
        each = {"matmul_reduce_scatter 8×6, 6×3": 4} if fused in ran else {}
        assert receipt.entries[0].applied == applied | {"lowering": "fused kernels", "each": each}
        assert [case.why for case in receipt.entries[0].skipped] == ["slower"] * (slower in ran)
        with pytest.raises(StrictError, match=problem) if problem else nullcontext():
            receipt.enforce(True, print)


ASYNC = ["--parallelism.tensor_parallel_degree=2", "--parallelism.async_tensor_parallel=true"]
LINEARS = [
    *(f"layers.{n}.{name}" for n in range(2) for name in ("attention.wqkv", "attention.wo", "feed_forward.w13")),
    *(f"layers.{n}.feed_forward.w2" for n in range(2)),
]
LOOKED_UP = {"what": "tok_embeddings", "why": "no matmul: an embedding looks tokens up"}


@pytest.mark.slow
def test_a_head_that_was_to_be_in_float8_and_is_not(desk: Desk) -> None:
    """The user's own filters leave it to float8, and its 257 rows do not."""
    own = ["--float8.recipe=rowwise", "--model.vocab_size=257", "--float8.filter_fqns=[]"]
    strict = desk.run("head strict", 1, *own, ends=2)
    assert "  float8.filter_fqns = []\n      want: filters that name what" in strict.output
    assert 'fix:  --float8.filter_fqns ["output"]; job.strict = false' in strict.output
    why = "sizes (257, 128), 128 tokens: not all multiples of 16"
    lenient = desk.run("head lenient", 1, *own, "--job.strict=false", "--job.stop_after=2")
    assert f"\n            output: {why}\n" in lenient.output
    assert "applied to all 9 eligible cases; it missed 1" in lenient.output
    assert f"; except output ({why})\n" in lenient.output
    unsaid = desk.run("head by default", 1, *own[:2], "--job.stop_after=2")  # nobody asked for it
    assert "; except output (float8.filter_fqns has 'output')\n" in unsaid.output


def test_fused_layers_are_counted(desk: Desk, everything: Ended) -> None:
    assert "async_tensor_parallel" not in everything.receipt
    entry = desk.run("fused", 2, *ASYNC, "--job.stop_after=2").receipt["async_tensor_parallel"]
    # Two blocks of wqkv, wo, w13 and w2, and the head.
    assert entry["applied"] == {"layers": 9, "lowering": "definition"}
    assert entry["skipped"] == [LOOKED_UP]


def test_copy_engines_that_are_not_there_end_the_run(desk: Desk) -> None:
    run = desk.run("no copy engines", 2, "--parallelism.fsdp_copy_engines=always", ends=2)
    assert 'parallelism.fsdp_copy_engines = "always"' in run.output
    assert "blocks: there are none without GPUs" in run.output
    assert run.receipt["fsdp_copy_engines"]["applied"] == {
        "blocks": 0,
        "by NCCL, because": "there are none without GPUs",
    }


@pytest.mark.slow
def test_float8_is_looked_at_every_so_many_steps(desk: Desk) -> None:
    flags = ["--float8.recipe=rowwise", "--training.steps=5", "--lr_scheduler.warmup_steps=1"]
    plain, looked = (desk.run(f"looked {freq}", 2, *flags, f"--metrics.float8_numerics_freq={freq}") for freq in (0, 2))
    assert looked.losses() == plain.losses()
    assert "float8_numerics" not in plain.receipt
    assert looked.receipt["float8_numerics"]["applied"] == {"layers": len(LINEARS)}
    found = [row for row in looked.rows if "loss" not in row and "validation_loss" not in row]
    assert [row["step"] for row in found] == [2, 4]
    whats = "input_saturated", "input_flushed", "weight_saturated", "weight_flushed", "output_sqnr_db"
    names = {f"float8_{what}.{layer}" for what in whats for layer in LINEARS}
    assert all(row.keys() == {"step", "tokens", *names} for row in found)
    assert "float8 at least" in looked.output
    assert not [row for row in plain.rows if "loss" not in row and "validation_loss" not in row]


@pytest.mark.slow
def test_layers_partly_in_float8_are_declared_not_to_be_fused(desk: Desk) -> None:
    run = desk.run("partly float8", 2, *ASYNC, "--float8.recipe=rowwise_with_gw_hp", "--job.stop_after=2")
    entry = run.receipt["async_tensor_parallel"]
    assert entry["applied"]["layers"] == 1
    embedding, *linears = entry["skipped"]
    assert embedding == LOOKED_UP
    assert sorted(case["what"] for case in linears) == sorted(LINEARS)
    (why,) = {case["why"] for case in linears}
    assert why.startswith("has a matmul in high precision")


def test_nothing_fused_ends_the_run(desk: Desk) -> None:
    def plant() -> None:
        # A head in float8 returns a view, whatever is fused.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        apply = split.apply_float8
        split.apply_float8 = lambda model, recipe, filter_fqns, *rest: apply(model, recipe, (), *rest)

    run = desk.run("none fused", 2, *ASYNC, "--float8.recipe=rowwise_with_gw_hp", plant=plant, ends=2)
    said = run.output.replace("\n  ", "\n")
    assert "parallelism.async_tensor_parallel = true\n    want: false where all linear layers are in float8" in said
