"""`titanlite plan`: the tables, the chain of a tensor, the file for programs, what differs, what fits, and mistakes."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from tests.cli.commands.conftest import Call
from tests.support.fake_ranks import ranks_that_move_nothing
from tests.support.measured import MEASURED_CONFIGS
from tests.support.needs import slow
from tests.support.own_model import mine
from titanlite.commands import main, planned_run
from titanlite.commands.plan_tables import collective_rows
from titanlite.commands.planned_run import plan_run
from titanlite.commands.sharding_table import sharding_table, weight_rows, why
from titanlite.config.toml_file import shipped_folder
from titanlite.device import CPU
from titanlite.errors import TitanliteError
from titanlite.preflight.checked_run import checked_run
from titanlite.receipt import Entry
from titanlite.sharding import layers, split
from titanlite.training.build import build

DEBUG = str(shipped_folder("configs") / "debug.toml")
TWO = ["--parallelism.tensor_parallel_degree", "2", "--model.n_layers", "4"]  # two blocks stand for all
LARGE = str(MEASURED_CONFIGS / "llama3_8b.toml")
MIXTURE = [str(shipped_folder("configs") / "qwen3_moe_debug.toml")]
OLMOE = [*MIXTURE, "--model.name", "olmoe"]
SMALL, FOUR = [DEBUG, "--world", "2"], [LARGE, "--world", "4"]
ASYNC = ["--parallelism.async_tensor_parallel", "--training.mixed_precision_param", "bfloat16"]


NORMS = (
    "not listed: in a step that metrics.log_freq = {} logs, sums of norms by group of the optimizer and of numbers of"
    " routers"
)
UNKNOWN = (
    "the lengths of documents are not known before titanlite prepare: time and MFU are of plain causal attention, and a"
    " run, which ends it with each document, takes less"
)


@pytest.fixture(autouse=True)
def _nothing_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans count the documents of prepared data; what whoever runs this has prepared makes no difference."""
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def unrecorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record no step: of a test that looks at no collective."""
    monkeypatch.setattr(planned_run, "_recorded", lambda *_: ({}, {}, ()))


def pairs(argv: list[str], call: Call) -> dict[tuple[str, ...], str]:
    """Of a plan, (collective, pass, layer) → what becomes of it and its matmul."""
    one_micro_step = "--training.global_batch_size", "2"
    table = call("plan", DEBUG, *ASYNC, *one_micro_step, *argv).partition("with its matmul")[2].strip().splitlines()
    return {tuple(words[:3]): words[4] for words in (line.split(maxsplit=4) for line in table)}


def test_table(call: Call) -> None:
    flags = ["--training.seq_len", "64", "--training.local_batch_size", "4", "--training.global_batch_size", "24"]
    flags += ["--training.mixed_precision_param", "bfloat16"]
    out = call("plan", DEBUG, *TWO, *flags, "--parallelism.data_parallel_shard_degree", "2")
    lines = [line.split() for line in out.splitlines()]
    weights = {line[0]: line[1:] for line in lines if len(line) == 4}
    assert weights["layers.0-3.attention.wqkv.weight"] == ["512×256", "S(0)", "annotation"]
    assert weights["layers.0-3.attention.wo.weight"] == ["256×256", "S(1)", "inferred"]
    assert weights["norm.weight"] == ["256", "R", "default"]
    # 4 layers, 3 micro-steps of 256 tokens of width 256 in bfloat16, of which each of 2 ranks sends half.
    sent = ["2", "12", "0.062", "0.8"]
    assert ["all_gather", "forward", "layers.*.attention.wqkv", *sent] in lines
    assert ["reduce_scatter", "backward", "layers.*.attention.wqkv", *sent] in lines
    assert ["reduce_scatter", "forward", "layers.*.attention.wo", *sent] in lines
    assert ["all_gather", "backward", "layers.*.attention.wo", *sent] in lines
    assert not any("recomputation" in line for line in lines)  # all that is communicated is kept
    assert ["all_gather", "forward", "2", "3", "0.002", "0.0"] in lines  # of the loss, outside of all modules
    listed = "what a rank sends is not known; what is listed is"  # without --world
    assert f"{listed} 20.7 MiB a step of 3 micro-steps" in [" ".join(line) for line in lines]


def test_why_and_json(tmp_path: Path, call: Call) -> None:
    file = tmp_path / "plan.json"
    lines = call("plan", DEBUG, *TWO, "--why", "layers.1.feed_forward.w2.weight", f"--json={file}").splitlines()
    assert lines[0] == "layers.1.feed_forward.w2.weight: S(1)"
    assert lines[-2] == "  <- layers.1.feed_forward.w13.weight: S(0)"
    assert lines[-1] == '  <- annotation "layers.*.feed_forward.w13.weight = tp:0"'
    plan = json.loads(file.read_text())
    assert plan["axes"] == {"tp": 2}
    weights = {t["name"]: t["placements"]["tp"] for t in plan["tensors"] if t["name"].endswith("w2.weight")}
    assert set(weights.values()) == {"S(1)"}
    assert plan["stand_for"] == [[0], [1, 2, 3]]
    for module in ("layers.1.feed_forward", "@layers.1.feed_forward"):  # what it returns
        lines = call("plan", DEBUG, *TWO, "--why", module).splitlines()
        assert lines[0].endswith(" of layers.1.feed_forward.w2: S(0)")
        assert lines[-1] == '  <- annotation "@tok_embeddings = tp:0"'
    lines = call("plan", DEBUG, *TWO, "--why", "layers.3.feed_forward.w2.weight").splitlines()
    assert lines[0] == "layers.1.feed_forward.w2.weight: S(1)"
    assert lines[-1] == "layers.1 was planned for this block too: they are alike"


def test_why_says_where_experts_are_without_tensor_parallelism(call: Call) -> None:
    said = call("plan", *OLMOE, "--world", "2", "--why", "layers.0.experts.w13.weight")
    assert said.splitlines()[-2].startswith(
        "layers.0.experts.w13.weight: each of parallelism.expert_parallel_degree ranks"
    )


def test_why_takes_every_name_of_the_tables() -> None:
    planned = plan_run(checked_run(["--config", DEBUG, *TWO], world_size=4), DEBUG, 4)
    plan = planned.sharding
    assert plan is not None
    names = {row[0] for row in weight_rows(plan)} | {row[2] for row in collective_rows(planned.collectives)} - {""}
    assert {"layers.*", "layers.0-3.ffn_norm.weight", "layers.*.attention.wqkv"} < names
    names = {name.replace("*", "0") for name in names}
    for name in [*names, "loss", "layers.1,3", "layers.1-3.attention.wo"]:
        first = re.sub(r"(layers\.\d+)[-,\d]*", r"\1", name)
        assert why(plan, name) == why(plan, first)
        assert why(plan, name).splitlines()[0].endswith(f"{first}: R" if "norm.weight" in name else ")"), name
    assert why(plan, "layers.*.attention.wo.weight") == why(plan, "layers.0.attention.wo.weight")
    chains = why(plan, "layers.0-3.attention.wqkv").split("all_gather of ")  # what it returns, and what it gathers
    assert [chain.splitlines()[-1] for chain in chains] == [
        '  <- annotation "layers.*.attention.wqkv.weight = tp:0"',
        '  <- annotation "@tok_embeddings = tp:0"',
    ]
    assert why(plan, "loss").splitlines()[0].endswith("of output: S(1)")


@pytest.mark.parametrize("flags", [[], ["--model.name", "gemma3"]], ids=["llama3", "gemma3"])
def test_blocks_that_stand_for_others_say_what_all_of_them_say(
    flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = checked_run(["--config", DEBUG, *TWO, *flags])
    few = split.sharding_plan(run.config, run.dims)
    split._derived_plan.cache_clear()
    monkeypatch.setattr(layers, "representative_blocks", lambda model: (model, [[n] for n in range(len(model.layers))]))
    all_of_them = split.sharding_plan(run.config, run.dims)
    split._derived_plan.cache_clear()
    assert len(few.stand_for) < len(all_of_them.stand_for) == run.dims.n_layers
    assert sorted(n for numbers in few.stand_for for n in numbers) == list(range(run.dims.n_layers))

    def lines(text: str) -> list[list[str]]:
        return sorted(line.split() for line in text.splitlines())

    assert lines(sharding_table(few)) == lines(sharding_table(all_of_them))


BAD = {
    "an embedding of parts of rows": ('"tok_embeddings.weight": "tp:0"', '"tok_embeddings.weight": "tp:1"'),
    "a linear layer of torch's": ('Linear(dims.ffn_dim, {"w2": dims.dim}, std=residual_std)',
                                  "nn.Linear(dims.ffn_dim, dims.dim, bias=False)"),
    "a parameter of the model's own": ("        self.norm = RMSNorm(dims.dim, dims.norm_eps)\n",
                                       "        self.norm = RMSNorm(dims.dim, dims.norm_eps)\n"
                                       "        self.scale = nn.Parameter(torch.ones(dims.dim))\n"),
    "a norm of the user's own": ("self.norm = RMSNorm(", "self.norm = type('Norm', (RMSNorm,), {})("),
    "a head that is whole": ('"output.weight": "tp:0"', '"output.weight": "replicate"'),
    "a stream that is whole": ('        "@tok_embeddings": "tp:0",\n', '        "@tok_embeddings": "replicate",\n'),
    "a filter without a layer": ("", ""),
    "an operation that torch has not": ("", ""),
}  # fmt: skip
WHOLE = ("a head that is whole", "a stream that is whole")


@pytest.mark.parametrize("bad", [*(name for name in BAD if name not in WHOLE), *slow(*WHOLE)])
def test_what_the_trainer_refuses_is_refused_in_its_words(
    bad: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Which needs ranks that exchange something.
    monkeypatch.setattr("titanlite.sharding.split.require_parity", lambda *_: Entry("parity", False, {}, count=0))
    changes = [BAD[bad]]
    if bad == "a parameter of the model's own":
        changes.append(("self.output(self.norm(x))", "self.output(self.norm(x) * self.scale)"))
    flags = [*mine(tmp_path, *changes), *TWO[:2], "--model.n_layers", "1", *ASYNC[1:]]
    if bad == "a filter without a layer":
        flags += ["--float8.recipe", "rowwise", "--float8.filter_fqns", "wq_and_wk"]
    if bad == "an operation that torch has not":
        rules = 'help = "x"\ndefault = "recompute"\n[[rules]]\nop = "aten.mmm.default"\naction = "save"\n'
        (tmp_path / "odd.toml").write_text(rules)
        flags += ["--activation_checkpoint.recipe", str(tmp_path / "odd.toml")]
    asked = checked_run(["--config", DEBUG, *flags], world_size=2)
    with ranks_that_move_nothing(2), pytest.raises(TitanliteError) as refused:
        build(asked, CPU)
    assert main(["plan", DEBUG, *flags, "--world", "2"]) == 2
    assert str(refused.value) in capsys.readouterr().err


def test_a_block_that_is_split_otherwise_stands_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    from titanlite.models.llama3 import Llama3

    first_whole = {**Llama3.sharding, "layers.0.feed_forward.w13.weight": "tp:0"}
    monkeypatch.setattr(Llama3, "sharding", first_whole)
    monkeypatch.setattr(split, "_plans", {})  # other plans of this model, before and after, are not of this one
    split._derived_plan.cache_clear()
    run = checked_run(["--config", DEBUG, *TWO])
    stand_for = split.sharding_plan(run.config, run.dims).stand_for
    split._derived_plan.cache_clear()
    assert stand_for == [[0], [1], [2], [3]]


def test_pairs_that_are_fused(call: Call) -> None:
    pytest.importorskip("triton")
    names = [("attention.wqkv", True), ("attention.wo", False), ("feed_forward.w13", True), ("feed_forward.w2", False)]
    expected: dict[tuple[str, ...], str] = {}
    for name, gathers in [*((f"layers.*.{name}", gathers) for name, gathers in names), ("output", True)]:
        kinds = ("all_gather", "reduce_scatter") if gathers else ("reduce_scatter", "all_gather")
        expected |= {(kinds[0], "forward", name): "fused", (kinds[1], "backward", name): "fused"}
    assert pairs(TWO, call) == expected
    in_float8 = pairs([*TWO, "--float8.recipe", "rowwise"], call)  # whose feed-forward is one function
    joined = {(*key[:2], re.sub(r"\.w\w+$", "", key[2]) if "feed" in key[2] else key[2]) for key in expected}
    assert in_float8 == dict.fromkeys(joined, "fused")


def test_pairs_that_are_not(call: Call) -> None:
    pytest.importorskip("triton")
    wide = ["--model.n_heads", "16", "--model.n_kv_heads", "16", "--model.ffn_dim", "2048"]
    wide += ["--parallelism.tensor_parallel_degree", "16"]
    found = pairs(wide, call)
    assert set(found.values()) == {"not fused: ranks on several hosts"}
    found = pairs([*TWO, "--training.mixed_precision_param", "float32"], call)
    operands = "not fused: torch.float32 operands; the kernels take bfloat16, float16 and float8"
    assert set(found.values()) == {operands}
    # Of one recipe for all layers but those that a filter names.
    partly = [*TWO, "--float8.recipe", "rowwise_with_gw_hp", "--float8.filter_fqns", '["output", "wo"]']
    found = pairs(partly, call)
    assert set(found.values()) == {"fused"}
    assert {name for _, _, name in found} == {"output", "layers.*.attention.wo"}
    said = " ".join(call("plan", DEBUG, *ASYNC, *partly).split())
    names = "layers.*.attention.wqkv, layers.*.feed_forward.w13, layers.*.feed_forward.w2"
    assert f"not fused with its collectives: {names}, which has a matmul in high precision" in said


def test_without_triton_what_is_fused_is_not_known(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else found(name))
    out = call("plan", DEBUG, *TWO, *ASYNC, "--training.global_batch_size", "2")
    assert out.count("not known: this machine has no Triton (pip install triton)\n") == 10
    assert "not fused" not in out


def test_memory_and_time(tmp_path: Path, call: Call) -> None:
    """A row of runs.jsonl: 80.6 GiB, 7.5 of gradients apart, 0.4 of the last norm, 2.6 of weights
    that are in symmetric memory now."""
    file = tmp_path / "plan.json"
    rows = [line.split() for line in call("plan", *FOUR, "--json", str(file)).splitlines()]
    assert ["activations", "42.1", "GiB"] in rows
    assert ["logits", "3.9", "GiB"] in rows
    total = rows.index(["total", "70.2", "GiB"])
    assert " ".join(rows[total + 1]) == "symmetric memory, on top 3.3 GiB"
    said = json.loads(file.read_text())
    # A block and the embedding take turns; then the head, and its gradients.
    assert said["symmetric_memory_bytes"] == 2 * (218_112_000 + 3 * 128_256 * 4096 + 2 * 4096)
    assert said["memory_bytes"]["activations"] == 32 * (130 + 1088 + 128) * 2**20
    assert sum(said["memory_bytes"].values()) == 2 * said["memory_bytes"]["total"]
    assert said["tokens_per_second_per_gpu"] == pytest.approx(2 * 8192e3 / said["step_ms"]["total"])
    assert sum(said["step_ms"].values()) == pytest.approx(2 * said["step_ms"]["total"])
    assert ["tok/s/GPU", f"{said['tokens_per_second_per_gpu']:,.0f}"] in rows
    flops = 6 * (8_030_261_248 - 128_256 * 4096 - 65 * 4096) + 6 * 32 * 4096 * 8192  # of a token: matmuls, attention
    assert said["mfu"] == pytest.approx(said["tokens_per_second_per_gpu"] * flops / 989e12)
    assert ["MFU", f"{said['mfu']:.1%}"] in rows
    assert said["days"] == pytest.approx(50_000 * said["step_ms"]["total"] / 86.4e6)
    assert said["days"] * said["tokens_per_day"] == pytest.approx(50_000 * 4 * 2 * 8192)
    assert ["50,000", "steps", f"{24 * said['days']:.1f}", "hours"] in rows
    assert "NVIDIA H200" in said["rates_of"]
    step = said["step"]
    assert step["tokens"] == 4 * 2 * 8192
    weights = 218_112_000  # of a block, in bf16 both ways; a rank sends 3 of 4 parts
    blocks = [c for c in step["collectives"] if c["sent_bytes"] == 2 * weights * 3 / 4]
    assert [(c["kind"], c["direction"], c["module"], c["times"]) for c in blocks] == [
        ("all_gather", "forward", "layers.*", 32),
        ("all_gather", "backward", "output", 1),  # of the last block, ahead
        ("all_gather", "backward", "layers.*", 31),
        ("reduce_scatter", "backward", "layers.*", 32),
    ]
    assert step["sent_bytes"] == sum(c["times"] * c["sent_bytes"] for c in step["collectives"])
    assert ["all_gather", "backward", "layers.*", "4", "31"] in [row[:5] for row in rows]


def test_a_plan_folds_into_the_columns_of_a_terminal(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("plan", DEBUG, *TWO, *ASYNC, "--training.global_batch_size", "2")
    whole = call(*flags)
    assert max(map(len, whole.splitlines())) > 100
    monkeypatch.setenv("COLUMNS", "80")
    narrow = call(*flags)
    assert max(map(len, narrow.splitlines())) <= 80
    assert narrow.split() == whole.split()  # nothing is lost, and a row's second line follows its first
    price = call("plan", DEBUG, "--activation-checkpoint")
    assert max(map(len, price.splitlines())) <= 80


@pytest.mark.usefixtures("unrecorded")
def test_logits_that_are_not_at_the_peak(call: Call) -> None:
    assert "the logits (" not in call("plan", *FOUR)
    out = call("plan", *FOUR, "--activation_checkpoint.recipe", "full", "--model.vocab_size", "8192")
    assert ["logits", "0.0", "GiB"] in [line.split() for line in out.splitlines()]
    assert "the logits (256.0 MiB) are not part of the peak: it is later in backward, after they are freed" in out


def test_memory_of_a_small_model_is_in_mib(call: Call) -> None:
    rows = [line.split() for line in call("plan", *SMALL).splitlines()]
    assert ["parameters", "3.3", "MiB"] in rows  # 1,705,216 in float32, on two ranks
    assert "fits NVIDIA H200 (the default of --device): 457.4 MiB of 139.8 GiB" in map(" ".join, rows)
    (updates,) = (" ".join(row) for row in rows if row[:2] == ["all_reduce", "update"])
    assert updates == "all_reduce update norm, loss and the like 2 3 0.000 0.0"


@pytest.mark.usefixtures("unrecorded")
def test_a_run_that_does_not_fit(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    assert "\nfits the device: 73.5 GiB of 75 GiB\n" in call("plan", *FOUR, "--device-gib", "75")
    assert main(["plan", *FOUR, "--device-gib", "74"]) == 2
    out, err = capsys.readouterr()
    assert "fits" not in out
    assert ["total", "70.2", "GiB"] in [line.split() for line in out.splitlines()]
    assert (
        "--device-gib = 74\n      want: at least 74.6 GiB: the predicted peak and 3.3 GiB of symmetric memory (copy"
        in err
    )
    first = err.partition("the cheapest first\n")[2].split()[:4]
    assert first == ["--activation_checkpoint.recipe", "auto", "--activation_checkpoint.budget_gib", "69.5"]
    call("plan", *FOUR, "--device-gib", "74", *first)
    assert "--device = NVIDIA H200 (the default of --device), 139.8 GiB\n" in call(
        "plan", *FOUR, "--training.local_batch_size", "8", ends=2
    )
    assert main(["plan", LARGE, "--world", "2", "--device", "H100"]) == 2
    out, err = capsys.readouterr()
    assert "from rates measured on NVIDIA H100 of 80 GB" in out
    assert "--device = NVIDIA H100 of 80 GB, 79.1 GiB\n" in err
    assert "\nfits NVIDIA H100 of 80 GB: " in call("plan", *FOUR, "--device", "h100")
    said = call("plan", *FOUR)
    assert "\nfits NVIDIA H200 (the default of --device): " in said
    assert " from rates measured on NVIDIA H200 (the default of --device), up to eight " in said


@pytest.mark.slow
def test_where_no_flag_alone_makes_it_fit_two_do_or_more_processes(call: Call) -> None:
    two = (
        call("plan", LARGE, "--world", "8", "--device-gib", "24", ends=2)
        .partition("the cheapest first\n")[2]
        .partition("  frees")[0]
        .split()
    )
    assert two[::2] == [
        f"--{key}"
        for key in ("parallelism.tensor_parallel_degree", "training.global_batch_size", "activation_checkpoint.recipe")
    ]
    assert two[1::2] == ["2", "16", "full"]
    call("plan", LARGE, "--world", "8", "--device-gib", "24", *two)
    huge = [str(Path(LARGE).with_name("llama3_405b.toml")), "--device-gib", "80", "--world"]
    said = call("plan", *huge, "64", ends=2)
    assert "--world 128: no other save-list, layout and batch would make it fit" in said
    call("plan", *huge, "128")


@pytest.mark.usefixtures("unrecorded")
def test_long_sequences_fit_eight_gpus(call: Call) -> None:
    long = [str(Path(LARGE).with_name("llama3_8b_128k.toml")), "--data.document_mask", "false", "--world", "8"]
    said = " ".join(call("plan", *long, "--device", "h100").split())
    assert re.search(r"fits NVIDIA H100.*: 6\d\.\d GiB of 79", said)
    assert re.search(r"exchanges of keys and values take \d+ ms of a step", said)


@pytest.mark.usefixtures("unrecorded")
def test_ranks_that_share_a_sequence_out_are_proposed_where_it_does_not_fit(call: Call) -> None:
    long = [LARGE, "--world", "8", "--training.local_batch_size", "1", "--training.seq_len", "131072"]
    said = call("plan", *long, "--device", "h100", ends=2)
    proposed = said.partition("the cheapest first\n")[2].partition("  frees")[0].split()
    assert proposed == ["--parallelism.context_parallel_degree", "8", "--training.global_batch_size", "8"]
    call("plan", *long, "--device", "h100", *proposed)
    said = call("plan", *long, "--device", "h200", ends=2)
    assert said.partition("the cheapest first\n")[2].split()[:2] == ["--parallelism.context_parallel_degree", "4"]


@pytest.mark.usefixtures("unrecorded")
def test_collectives_between_hosts_are_shown_and_may_be_by_another_network(tmp_path: Path, call: Call) -> None:
    file = tmp_path / "plan.json"
    several = LARGE, "--world", "16", "--training.local_batch_size", "1"
    said = call("plan", *several, "--json", str(file))
    assert "between hosts of 8 GPUs in a step, by 400 Gb/s InfiniBand (NDR) with one NIC for each GPU\n" in said
    plan = json.loads(file.read_text())
    assert plan["network"] == "ib400"
    for name, ms in plan["between_hosts_ms"].items():
        assert re.search(rf"{name} +{ms:,.1f} ms\n", said)
    assert [*plan["between_hosts_ms"]] == ["gathers of weights over 16 ranks", "reductions of gradients over 16 ranks"]
    differs = call("plan", *several, "--diff", "--network", "ETH100")
    assert "between hosts: gathers of weights over 16 ranks" in differs
    assert "step: tok/s/GPU" in differs
    assert "between hosts" not in call("plan", LARGE, "--world", "8", "--json", str(file))
    assert json.loads(file.read_text())["network"] is None


@pytest.mark.usefixtures("unrecorded")
def test_what_is_not_predicted(tmp_path: Path, call: Call) -> None:
    out = call("plan", *SMALL)
    assert "memory of a rank" in out
    assert "time of a step" not in out
    assert "no time: training.mixed_precision_param = float32" in out
    odd = tmp_path / "odd.toml"
    odd.write_text('help = "x"\ndefault = "recompute"\n[[rules]]\nop = "aten.cat.default"\naction = "save"\n')
    out = call("plan", *SMALL, "--activation_checkpoint.recipe", str(odd))
    assert f'no memory and no time: save-list {odd}, rules[0].op = "aten.cat.default"; want a class' in out
    own = mine(tmp_path)
    out = call("plan", *SMALL, *own)
    assert out.strip().splitlines()[-1].startswith("no time: training.mixed_precision_param = float32")
    assert "memory of a rank" in out  # of a model file there is nothing to be said
    out = call("plan", DEBUG, *own, *TWO[:2])
    assert "collectives that backward repeats are not listed" not in out
    assert "--world N adds the collectives of data-parallel ranks" in out
    call("plan", *SMALL, *own, "--device-gib", "80")


@pytest.mark.usefixtures("unrecorded")
def test_other_architectures_are_predicted(tmp_path: Path, call: Call) -> None:
    gpt2 = ["--model.name", "gpt2", "--model.flavor", "1.5B", "--training.seq_len", "1024"]
    assert "no time: model.vocab_size = 50257; want a multiple of 8" in call("plan", *FOUR, *gpt2)
    assert "predicted step time" in call("plan", *FOUR, *gpt2, "--model.vocab_size", "50304")
    out = call("plan", *FOUR, "--model.name", "qwen3")
    assert "predicted step time" in out
    assert "timed as" not in out
    gemma3 = ["--model.name", "gemma3", "--model.flavor", "1B"]
    assert "timed as" not in call("plan", *FOUR, *gemma3)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/gemma3-wide.toml").write_text('extends = "gemma3-1B"\nhead_dim = 512\n')
    wide = ["--model.name", "gemma3", "--model.flavor", "wide", "--job.recipe_dirs", str(tmp_path)]
    out = call("plan", *FOUR, *wide)
    assert (
        "attention with head width 512 is timed as the next wider one measured, or else the widest (measured: 64" in out
    )
    assert "windowed attention" not in out
    narrow = tmp_path / "model/gemma3-narrow.toml"
    narrow.write_text('extends = "gemma3-1B"\nwindow = 256\n')
    assert "windowed attention was measured with 512 tokens and head width 256" in call(
        "plan", *FOUR, *wide, "--model.flavor", "narrow"
    )


@pytest.mark.usefixtures("unrecorded")
def test_auto_is_planned_as_these_rates_choose(call: Call) -> None:
    flags = ["--activation_checkpoint.recipe", "auto", "--activation_checkpoint.budget_gib", "65"]
    assert "with these rates auto keeps matmul attention.wqkv, attention" in call("plan", *FOUR, *flags)
    assert "no memory: the save-list is chosen when the run starts" in call(
        "plan", LARGE, "--world", "8", *flags, "--compile.enable", "false"
    )


@pytest.mark.usefixtures("unrecorded")
def test_documents_of_prepared_data_are_counted(tmp_path: Path, call: Call) -> None:
    """Of 1,024 tokens each: an eighth of the attention in sequences of 8,192 is left."""
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({"text": "x" * 1023}) for _ in range(3000)))
    own = ["--data.source", str(tmp_path / "t.jsonl"), "--data.cache_dir", str(tmp_path / "cache")]
    own += ["--model.n_layers", "4"]
    unknown = " ".join(call("plan", *FOUR, *own).split())
    assert UNKNOWN in unknown
    call("prepare", FOUR[0], *own)
    out = call("plan", *FOUR, *own, "--json", str(tmp_path / "plan.json"))
    said = "attention within documents is 12.5% of plain causal in 256 samples of its data, whose documents have 1,024"
    assert said in " ".join(out.split())
    assert json.loads((tmp_path / "plan.json").read_text())["attended_share"] == pytest.approx(1 / 8)
    assert "attention within" not in call("plan", *FOUR, *own, "--data.document_mask", "false")


@pytest.mark.usefixtures("unrecorded")
def test_the_stage_that_is_priced_is_named_and_the_run_takes_its_tokens(tmp_path: Path, call: Call) -> None:
    """Of 16 steps of 32 sequences, then four of 64 that are twice as long."""
    path = tmp_path / "stages.toml"
    stage = f"from_tokens = {16 * 32 * 8192}\nseq_len = 16384\nglobal_batch_size = 64\nlocal_batch_size = 1\n"
    path.write_text(f'extends = "{FOUR[0]}"\n[[data.stage]]\n{stage}')
    asked = ["--training.steps=20", "--training.global_batch_size=32", "--lr_scheduler.warmup_steps=1"]
    asked += ["--training.local_batch_size=1", "--training.seq_len=8192", "--model.n_layers=4"]
    out = call("plan", str(path), *FOUR[1:], *asked, "--json", str(tmp_path / "plan.json"))
    assert "\npeak memory of a rank in the largest stage, 64 × 16,384 tokens (" in out
    assert "\npredicted step time of the largest stage, 64 × 16,384 tokens, from rates" in out
    said = json.loads((tmp_path / "plan.json").read_text())
    assert said["days"] * said["tokens_per_day"] == pytest.approx(16 * 32 * 8192 + 4 * 64 * 16384)


@pytest.mark.usefixtures("unrecorded")
def test_diff(call: Call) -> None:
    assert call("plan", *FOUR, "--diff", "--training.seed", "3") == "nothing differs\n"
    table, *notes = call("plan", *FOUR, "--diff", "--activation_checkpoint.recipe", "none").split("\n\n")
    assert notes == [
        NORMS.format(1),
        "of 7.5 GiB of gradients 0.0 GiB exist at the peak; the rest are made later, in memory that activations leave",
        f"{UNKNOWN}\n",
    ]
    rows = [line.rsplit(maxsplit=2) for line in table.splitlines()]
    assert rows[0] == ["before", "after"]
    assert table.splitlines()[1].split() == ["memory:", "activations", "42.1", "GiB", "73.1", "GiB"]
    assert not any("matmul" in row[0] or "parameters" in row[0] for row in rows)
    out = call("plan", DEBUG, *TWO, "--diff", LARGE, *TWO[:2])
    assert out.split()[:2] == [DEBUG, LARGE]
    assert "weight layers.0-31.attention.wqkv.weight" in out
    assert call("plan", DEBUG, *TWO, f"--diff={LARGE}", *TWO[:2]) == out


def test_diff_of_what_is_fused(call: Call) -> None:
    flags = ["--parallelism.async_tensor_parallel", "--training.mixed_precision_param", "bfloat16"]
    run = [DEBUG, *TWO, "--training.mixed_precision_param=bfloat16", "--training.global_batch_size=2"]
    table, *notes = call("plan", *run, "--diff", *flags).split("\n\n")
    assert notes == ["--world N adds the collectives of data-parallel ranks and the reductions over all ranks\n"]
    rows = [line.split() for line in table.splitlines()[1:]]
    fused = [row for row in rows if "matmul" in row]
    assert {row[-2] for row in fused} == {"none"}
    assert len(fused) == 10
    assert not any(row[0] == "weight" for row in rows)  # placements stay as they are


def test_an_optimizer_of_several_rules(tmp_path: Path, call: Call) -> None:
    muon, file = ["--optimizer.recipe", "muon"], str(tmp_path / "plan.json")
    table = call("plan", *FOUR, *muon, "--json", file).split("\noptimizer\n")[1]
    assert [line.split() for line in table.splitlines()[1:3]] == [
        ["rest", "adamw", "1,050,939,392", "2.0", "GiB"],
        ["hidden", "muon", "6,979,321,856", "6.5", "GiB"],
    ]
    said = json.loads(Path(file).read_text())
    update = said["optimizer"]["update_ms"]
    assert list(update) == [
        *("adamw over memory", "muon over memory", "orthogonalisation", "exchanges that nothing hides", "total")
    ]
    assert sum(update.values()) == pytest.approx(2 * update["total"])
    assert update["total"] == said["step_ms"]["optimizer"]
    assert f"the update takes {update['total'] / said['step_ms']['total']:.1%} of the step, ms: " in table
    (both,) = (row for row in said["step"]["collectives"] if row["kind"] == "all_to_all")  # to owners, and back
    assert both["sent_bytes"] * both["times"] == pytest.approx(2 * 2 * 6_979_321_856 * 3 / 16, rel=1e-6)
    rows = [re.split(r"  +", line.strip()) for line in call("plan", *FOUR, "--diff", *muon).splitlines()]
    assert ["memory: optimizer", "15.0 GiB", "8.5 GiB"] in rows
    assert ["optimizer: all", "adamw, 8,030,261,248 elements, 15.0 GiB", "none"] in rows
    assert ["optimizer: hidden", "none", "muon, 6,979,321,856 elements, 6.5 GiB"] in rows
    (taken,) = (row for row in rows if row[0] == "step: optimizer")
    assert taken[1:] == ["15.7 ms", f"{update['total']:,.1f} ms"]
    assert "\noptimizer\n" not in call("plan", *SMALL)
    out = " ".join(call("plan", *MIXTURE, "--world", "2", *muon, "--metrics.log_freq", "7").split())
    assert NORMS.format(7) in out


def test_a_collective_of_other_ranks_is_one_row_of_what_differs(tmp_path: Path, call: Call) -> None:
    recipe = tmp_path / "amax.toml"
    recipe.write_text('extends = "tensorwise"\nhelp = "as tensorwise"\nreduce_amax = true\n')
    run = [LARGE, *TWO[:2], "--float8.recipe", str(recipe), "--training.mixed_precision_param", "bfloat16"]
    run += ["--parallelism.fsdp_copy_engines", "never"]
    table = call("plan", *run, "--world", "8", "--diff", "--world", "16").partition("\n\n")[0]
    rows = [re.split(r"\s{2,}", line.strip()) for line in table.splitlines()]
    assert not any("none" in row for row in rows)
    sent = "32 of 78.012 MiB over 4 ranks", "32 of 91.014 MiB over 8 ranks"
    assert ["all_gather forward layers.*", *sent] in rows
    reduced = next(
        row[1:] for row in rows if row[0] == "all_reduce update"
    )  # maxima over two groups, one of which grows
    assert [sorted(set(re.findall(r"over (\d+) ranks", cell)), key=int) for cell in reduced] == [
        ["2", "4", "8"],
        ["2", "8", "16"],
    ]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([LARGE, "--activation-checkpoint", "--why", "x"], "no --why together with --activation-checkpoint"),
        ([*OLMOE, "--world", "2", "--why", "output"], "or leave --why out: FSDP splits each weight by rows"),
        ([DEBUG, *TWO, "--device-gib", "80"], "--world N as well"),
        (
            [DEBUG, "--device", "a100"],
            "there are no rates of another\n      fix:  --device h200 --world 8,",
        ),
        ([*SMALL, "--device-gib", "none"], "the GiB of a device"),
        ([DEBUG, *TWO, "--device", "h100"], "--world N as well"),
        ([*SMALL, "--device", "a100"], "h100 or h200"),
        ([LARGE, "--world", "16", "--network", "ib200"], "ib400, eth200, eth100: of others no bandwidth is known"),
        ([*SMALL, "--network", "ib400"], "the GPUs of one host need no network"),
        ([DEBUG, *TWO, "--network", "ib400"], "--world of more than 8 as well"),
        ([*SMALL, "--diff"], "one other config, or flags that change this run"),
        ([*SMALL, "--diff="], "one config, as the first argument or behind --config"),
        ([*SMALL, "--diff", "--training.seed", "3", "--why", "norm"], "no --why together with --diff"),
        ([DEBUG, *TWO, "--why", "wo"], "--why layers.0.attention.wo or --why layers.0.attention.wo.weight\n"),
        ([DEBUG, *TWO, "--why", "@norm.weight"], "--why norm.weight"),
        ([DEBUG, *TWO, "--why", "layers.4"], "--why layers.0"),
        ([DEBUG, *TWO, "--why", "w2.wieght"], "fix:  --why layers.0.feed_forward.w2.weight or "),
        ([DEBUG, "--parallelism.tensor_parallel_degree", "3"], "a divisor of model.n_heads = 8"),
    ],
)
def test_mistakes(argv: list[str], words: str, call: Call) -> None:
    assert words in call("plan", *argv, ends=2)


@pytest.mark.parametrize(
    "argv", [["--help", "--diff", "--compile.enable", "false"], ["--diff", "--help"], [DEBUG, "--diff", "-h"]]
)
def test_help_beside_diff(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", *argv])
    assert caught.value.code == 0
    assert "usage: titanlite plan FILE" in capsys.readouterr().out


def test_gradients_that_are_not_at_the_peak(call: Call) -> None:
    smaller = "plan", str(Path(LARGE).with_name("llama3_3b.toml")), "--world", "1"
    out = call(*smaller, "--activation_checkpoint.recipe", "full")
    assert "of 12.0 GiB of gradients 10.1 GiB exist at the peak" in out
    assert "exist at the peak" not in call(*smaller, "--training.global_batch_size", "8")
    assert "of 6.0 GiB of gradients 0.0 GiB exist at the peak" in call("plan", smaller[1], "--world", "2")


STAGES = """
[[data.stage]]
from_tokens = 40960
seq_len = 512
global_batch_size = 16
[[data.stage]]
from_tokens = 163840
seq_len = 256
local_batch_size = 4
global_batch_size = 8
"""


def test_the_collectives_of_stages_are_those_of_the_largest(tmp_path: Path, call: Call) -> None:
    """Four sequences of 256 on each of two ranks, which are one micro-step."""
    own = tmp_path / "stages.toml"
    batch = "[training]\nseq_len = 256\nlocal_batch_size = 1\nglobal_batch_size = 8\n"
    own.write_text(f'extends = ["{DEBUG}"]\n{batch}{STAGES}')
    said = call("plan", str(own), "--world", "2")
    (sent,) = re.findall(r"the first rank sends ([\d.]+) MiB a step of 1 micro-step\n", said)
    one = call("plan", DEBUG, "--world", "2", "--training.local_batch_size", "4", "--training.global_batch_size", "8")
    assert f"sends {sent} MiB a step of 1 micro-step\n" in one
    auto = ["--activation_checkpoint.recipe=auto", "--activation_checkpoint.budget_gib=0.1"]
    told = call("plan", str(own), "--world", "2", *auto, ends=2)
    assert "activation_checkpoint.budget_gib = 0.1" in told
    assert "data.stage" not in told


def test_what_compiled_backward_has_no_use_for_is_not_repeated_in_one_kernel_either(call: Call) -> None:
    flags = [LARGE, "--world", "2", *TWO, "--activation_checkpoint.recipe", "full"]
    sums = [
        re.findall(r"sends ([\d,.]+) MiB a step", call("plan", *flags, *how))
        for how in ([], ["--parallelism.async_tensor_parallel"])
    ]
    assert sums[0] == sums[1] == ["3,072.3"]


def test_a_sum_is_known_where_nothing_is_repeated(call: Call) -> None:
    auto = ["--activation_checkpoint.recipe=auto", "--activation_checkpoint.budget_gib=10"]
    said = call("plan", *SMALL, *auto)
    assert "the first rank sends 19.0 MiB a step" in said
    assert "backward repeats" not in said
