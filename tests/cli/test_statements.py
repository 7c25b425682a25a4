"""What the documentation states with a number or a formula is what the code has.

Each page has phrases whose numbers are taken from the code; the page must have them, wherever its lines break. Commands
that pages show are run by `test_shown_commands.py`, and measured figures are held by `test_performance_page.py`.
"""

import io
import math
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import tomli
import torch

from benchmarks import tables
from tests.support.measured import MEASURED_CONFIGS
from titanlite import recipes
from titanlite.byte_size import GIB
from titanlite.commands import main
from titanlite.config.build import show
from titanlite.config.recipe_schema import Experts
from titanlite.config.schema import Config, Model, Optimizer, help_texts
from titanlite.forecast.update_time import computed_flops
from titanlite.models.experts import count_parameters
from titanlite.models.find import build_model
from titanlite.optimizers import weight_average
from titanlite.optimizers.muon import MuonRule
from titanlite.optimizers.sharded import shipped_rule

ROOT = Path(__file__).parents[2]
WORDS = {3: "three", 4: "four", 5: "five", 10: "ten", 20: "twenty"}
EMA, CONFIG = weight_average.COST, Config()
PAGES: dict[str, Callable[[], Iterator[str]]] = {}


def page(path: str) -> Callable[[Callable[[], Iterator[str]]], None]:
    """Take a function as what yields the phrases of a page."""
    return lambda phrases: PAGES.update({path: phrases})


def text_of(path: str) -> str:
    return " ".join((ROOT / path).read_text().split())


def of(name: str) -> Any:
    """Return what a module of titanlite defines."""
    return resolve_name(f"titanlite.{name}")


def percent(share: float) -> str:
    return f"{100 * share:g} %"


def ticked(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def dims(model: str) -> Any:
    return recipes.load("model", model)


def plan(*flags: str, masked: bool = False) -> str:
    """Return what `titanlite plan` prints; without the document mask it looks at no data."""
    out, flags = io.StringIO(), (f"--data.document_mask={str(masked).lower()}", *flags)
    with redirect_stdout(out), redirect_stderr(out):
        main(["plan", str(MEASURED_CONFIGS / "llama3_8b.toml"), *flags])
    return out.getvalue()


def memory_of(planned: str) -> dict[str, str]:
    """Return GiB by category."""
    return dict(re.findall(r"^  (\w[\w ]*?) +([\d.]+) GiB$", planned, re.MULTILINE))


def step_ms(planned: str) -> tuple[float, float]:
    """Return the milliseconds of a step, and those of orthogonalisation."""
    (total,), computing = re.findall(r"total +([\d.,]+) ms", planned), re.findall(r"([\d.]+) orthogonal", planned)
    return float(total.replace(",", "")), float(computing[0]) if computing else 0.0


def longer(ms: float, than: float) -> float:
    """Return the percent by which a step is longer than another one."""
    return 100 * (ms / than - 1)


def measured_with(optimizer: str) -> dict[str, Any]:
    """Return the last row of 12 layers of 8B with this optimizer."""
    return [row for row in tables.rows("runs", table="optimizers") if f"recipe {optimizer}" in row["flags"]][-1]


@page("README.md")
def _() -> Iterator[str]:
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest, before = re.findall(r"[\d.]+", next(each for each in project["dependencies"] if each.startswith("torch>")))
    newest = f"2.{int(before.partition('.')[2]) - 1}"
    yield f"Python {project['requires-python'].removeprefix('>=')} or later and PyTorch {oldest} to {newest}"


@page("docs/how_to/start_and_stop.md")
def _() -> Iterator[str]:
    comm = CONFIG.comm
    yield f"after {of('observe.watchdog:STALL_REPORT_SHARE') * comm.train_timeout_seconds:g} seconds where each rank is"
    yield f"is seen; after {comm.train_timeout_seconds} the run ends"
    yield f"{128 + signal.SIGINT} for Ctrl-C, {128 + signal.SIGTERM} for SIGTERM"


@page("docs/reference/run_folder.md")
def _() -> Iterator[str]:
    yield f"in about {of('observe.experts_file:ROWS')} rows"


@page("docs/reference/recipes.md")
def _() -> Iterator[str]:
    tensor, row, other = (
        recipes.load("float8", name).min_compute_capability for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
    )
    assert row == other
    yield f"`tensorwise` compute capability {tensor}, both by row {row}, `blockwise` 9.x"


@page("docs/activation_checkpoint.md")
def _() -> Iterator[str]:
    def symmetric_gib(flavor: str) -> float:
        model = build_model(Model(flavor=flavor), dims(f"llama3-{flavor}"), 1)
        block = sum(parameter.numel() for parameter in model.layers[0].parameters())
        return 2 * (block + 3 * model.output.weight.numel()) / 2**30

    yield f"less {percent(of('forecast.memory:MARGIN'))} as a margin"
    yield f"leave {percent(round(1 - of('training.out_of_memory:_MARGIN'), 6))} more room"
    yield f"{symmetric_gib('8B'):.1f} GiB for 8B, {symmetric_gib('70B'):.1f} for 70B"
    prices = plan("--activation-checkpoint", "--parallelism.tensor_parallel_degree=2", masked=True)
    yield from prices[prices.index("save-list balanced") :].splitlines()
    balanced = memory_of(plan("--world=4"))
    yield f"| **{balanced.pop('total')}** |"
    yield from (f"| {name} | {size if size > '0.0' else 0} |" for name, size in balanced.items())
    nccl = "--parallelism.fsdp_copy_engines=never", "--activation_checkpoint.recipe=none"
    full = plan("--world=2", "--device-gib=78.9", *nccl)
    by_name = memory_of(full)
    yield f"want: {by_name.pop('total')} GiB, as predicted; of these"
    yield from (f"{size} {name}" for name, size in by_name.items() if size > "0.0")
    flags = re.findall(r"(--activation_checkpoint\.recipe .*), [\d,]+ tok/s/GPU", full)
    assert len(flags) == 3
    yield from flags


@page("docs/async_tensor_parallel.md")
def _() -> Iterator[str]:
    yield f"groups of 2 to {of('kernels.products:MAX_RANKS')} ranks"
    yield f"sums of more than {WORDS[of('kernels.products:MAX_PAIRS')]} products"
    yield f"Scales of gradients below about {of('kernels.float8_scales:EPS'):g} are clamped"


@page("docs/checkpoint.md")
def _() -> Iterator[str]:
    adamw, muon = (4 + shipped_rule(rule).cost(Optimizer()).state for rule in ("adamw", "muon"))
    yield f"{adamw} bytes with AdamW, {muon} with Muon, and {EMA.state} more with an average"
    most = of("checkpoint.store:_FILE_BYTES") // GIB
    yield f"{WORDS[of('checkpoint.publish:THREADS')]} files of each rank, or more of about {most} GiB"
    yield f"at most {of('checkpoint.hugging_face:_FILE_BYTES') / 1e9:g} GB"
    yield f"unless {of('checkpoint.disk_space:SPARE')} times its size is free"
    model, *keys, last = of("preflight.same_run:_IDENTITY")
    assert model == "model."
    yield f"the keys of `[model]`, {ticked(keys)} and `{last}` must be equal"


@page("docs/names_and_mirrors.md")
def _() -> Iterator[str]:
    yield f"`checkpoint.mirror_wait_seconds`, by default {CONFIG.checkpoint.mirror_wait_seconds}"
    yield f"until {of('checkpoint.mirror:STOP_S'):g} seconds after a signal"
    first, *_, last = of("checkpoint.mirror:_PAUSES_S")
    yield f"tries are {first:g} seconds to {last / 60:g} minutes apart"


@page("docs/compare.md")
def _() -> Iterator[str]:
    yield f"more than {WORDS[of('comparison.judge:BEYOND')]} times as far"
    yield f"takes {of('comparison.judge:_FEWEST') / of('comparison.judge:_LAST'):g} logged steps"
    yield f"A curve of {of('comparison.picture:_LONG')} steps or more"
    yield f"A line of more than {of('comparison.curves:LONGEST'):,} rows"
    yield f"leaves out the first {percent(of('comparison.axis:_START'))} of the run"


@page("docs/data.md")
def _() -> Iterator[str]:
    names = [f"{i}.py" for i in range(20_000)]
    yield f"one in {WORDS[round(len(names) / sum(map(of('data.sources:_is_held_out'), names)))]} of these files"
    yield f"looks at {of('forecast.attended:_SAMPLES')} samples of prepared data"
    span, offset = (of(f"data.{name}").itemsize for name in ("best_fit:SPAN", "packing:_OFFSET"))
    yield f"the plan lies beside the shards, {span} bytes a document and {offset} a sample"
    yield f"name the first {WORDS[of('data.tally:_LISTED')]}"
    yield f"more than {2 * of('data.encode:_PIECE_CHARACTERS') // 10_000},0000 characters".replace(",0000", "0,000")
    yield f"{of('data.encode:_AROUND_CHARACTERS')} characters on both sides"
    yield f"goes on at the block of {of('data.remote:_BLOCK_BYTES') >> 20} MiB in which it broke"
    yield f"tried again for {WORDS[round(sum(of('data.remote:_PAUSES_S')) / 60)]} minutes"
    yield f"`bytes` has {of('data.tokenizer:ByteTokenizer').vocab_size} ids"
    yield f"or the first of {ticked(of('data.tokenizer:SEPARATORS'))} that the tokenizer"
    yield f"or the first of {ticked(of('data.tokenizer:_BEGINNINGS'))}. Special"
    yield f"of every {of('data.shards:BLOCK_BYTES') >> 10} KiB of each shard"
    yield f"says so after {of('training.data_wait:_TELL_SECONDS'):g} s"
    yield f"only after more than {of('data.mixture:LONGEST_PERIOD'):,} samples"


@page("docs/evaluation.md")
def _() -> Iterator[str]:
    least, share = of("evaluation.inputs:_LEAST"), percent(of("evaluation.inputs:_SHARE"))
    yield f"it is {least} steps, or as many more as keep the tokens that are evaluated below {share}"


@page("docs/explain.md")
def _() -> Iterator[str]:
    asked, axes = CONFIG.profiling, of("observe.step_profile:AXES")[:-1]
    yield f"Steps {asked.start_step} to {asked.start_step + asked.steps - 1} are recorded"
    yield f"at least {percent(of('explain.causes:NOTABLE'))} of the step"
    yield f"| communication {', '.join(axes)} |"
    yield from (f"| communication {axis} |" for axis in axes)


@page("docs/first_run.md")
def _() -> Iterator[str]:
    n = of("data.tokenizer:ByteTokenizer").vocab_size
    yield f"{math.log(n):.2f} is what a guess among {n} bytes costs"


@page("docs/float8.md")
def _() -> Iterator[str]:
    e4m3, e5m2 = torch.finfo(torch.float8_e4m3fn), torch.finfo(torch.float8_e5m2)
    bits = [1 - round(math.log2(info.eps)) for info in (e4m3, e5m2)]
    yield f"`e4m3` ({bits[0]} bits of significand, up to {e4m3.max:g}) or `e5m2` ({bits[1]} bits, up to {e5m2.max:g})"
    rowwise = "--world=4", "--float8.recipe=rowwise"
    head, without = (float(memory_of(plan(*rowwise, *of))["total"]) for of in (["--float8.filter_fqns=[]"], []))
    yield f"predicted for 8B and 16,384 tokens in `rowwise`, {head - without:.0f} GiB more"


@page("docs/how_to/long_sequences.md")
def _() -> Iterator[str]:
    llama, fewest, most = (
        dims("llama3-8B"),
        of("data.context_split:_FEWEST_CHUNKS"),
        of("data.context_split:_MOST_CHUNKS"),
    )
    yield f"is a multiple of {of('config.check_mesh:RUN')}, and the degree"
    yield f"differ by at most {percent(of('data.context_split:_EVEN'))}"
    yield f"a rank has {fewest} to {most} of them"
    yield f"no more than {dims('gpt2-124M').max_seq_len:,}."
    yield f"{131_072 * 2 * 2 * llama.n_kv_heads * llama.head_width / 2**30} GiB for 131,072 tokens of Llama 3 8B"
    yield f"for 131,072 tokens from {llama.rope_scaling.original_seq_len:,}"


@page("docs/how_to/mixture_of_experts.md")
def _() -> Iterator[str]:
    model, of_model, new = Model(name="qwen3_moe", flavor="30B-A3B"), dims("qwen3_moe-30B-A3B"), "commands.new_choices"
    billions = [count / 1e9 for count in count_parameters(build_model(model, of_model, 1))]
    yield f"has {billions[0]:.1f} billion, of which a token uses {billions[1]:.2f}"
    yield f"Begin with {of(f'{new}:MIXTURE_LR'):.0e}".replace("e-0", "e-")
    yield f"`titanlite new` takes {of(f'{new}:TOKENS_A_PARAMETER')} for each parameter that a token uses"


@page("docs/how_to/own_optimizer.md")
def _() -> Iterator[str]:
    yield f"on at most {of('optimizers.rule_of_file:_PIECE'):,} numbers at a time"


@page("docs/how_to/train_with_muon.md")
def _() -> Iterator[str]:
    rows = re.findall(r"([\d,.]+) ms \| ([\d,.]+) ms \| ([\d.]+) %", text_of("docs/how_to/train_with_muon.md"))
    (adamw, muon, _), (of_many, muon_of_many, longer) = ([float(n.replace(",", "")) for n in row] for row in rows)
    below = f"steps 24 % longer below {100 * adamw / muon:.1f} % of the tokens, with {longer} % below"
    yield f"{below} {100 * of_many / muon_of_many:.1f} %"


@page("docs/models.md")
def _() -> Iterator[str]:
    attention = "kernels.attention"
    cpu, gpu = (round(math.log10(of("parallel.parity:_bound")(eps, 4096))) for eps in (2**-23, 2**-10))
    yield from (f"| `{f.name}` | `{show(f.default)}` |" for f in fields(Experts)[3:])
    yield f"up to {of(f'{attention}:_LEAST_ROWS')} queries, or a {of(f'{attention}:_MOST_BLOCKS')}nd of the document"
    yield f"about 1e{cpu} of a tensor on a CPU, 1e{gpu} on a GPU"
    yield f"GPT-2's vocabulary of {dims('gpt2-124M').vocab_size:,} is odd"


@page("docs/optimizers.md")
def _() -> Iterator[str]:
    settings, rule = of("config.recipe_schema:MuonGroup"), MuonRule()
    yield f"| `momentum` | of Muon, NorMuon and Dion2 | `{settings.momentum}` |"
    yield f"| `nesterov` | of Muon and NorMuon | `{show(settings.nesterov)}` |"
    share, q = of("config.recipe_schema:Dion2Group").share, (4096, 4096)
    yield f"those that a step updates | `{share}` |"
    shapes = [q, q, (1024, 4096), (1024, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]  # of a block of 8B
    whole, some = (
        sum(computed_flops(*of("parallel.share_matrices:part_of")(shape, part), 5) for shape in shapes)
        for part in (None, share)
    )
    yield f"A `share` of {share} takes {100 * some / whole:.0f} % of Muon's operations"
    yield f"{EMA.state} bytes a parameter in memory and in each checkpoint; {EMA.moved} are read and written in a step"
    yield f"multiplied by {rule.scale} · √max(R, C), which"
    yield f"the root mean square that AdamW's have, {rule.scale}."
    yield "9 s² l + 11 s³ operations, by five polynomials"
    assert all(computed_flops(s, n, 5) == 9 * s * s * n + 11 * s**3 for s, n in ((64, 64), (64, 1024), (4096, 14336)))
    runs = [(2, "adamw"), (2, "muon"), (2, "dion2"), (8, "adamw"), (8, "muon")]
    steps = {run: step_ms(plan(f"--world={run[0]}", f"--optimizer.recipe={run[1]}")) for run in runs}
    for n in (2, 8):
        (adamw, _), (muon, computing) = steps[n, "adamw"], steps[n, "muon"]
        yield f"| {n} | {adamw:,.0f} ms | {muon:,.0f} ms | {computing:.0f} ms | {longer(muon, adamw):.1f} % |"
    (adamw, _), (dion2, computing) = steps[2, "adamw"], steps[2, "dion2"]
    predicted = f"{dion2:,.0f} ms on two, {longer(dion2, adamw):.1f} % longer than with AdamW"
    yield f"For `dion2` it predicts {predicted}, of it {computing:.0f} ms orthogonalisation."
    rows, keys = [measured_with(name) for name in ("adamw", "dion2", "muon")], ("ms_per_step", "predicted_ms_per_step")
    took, predicted = ([f"{longer(row[key], rows[0][key]):.1f}" for row in rows[1:]] for key in keys)
    measured = f"{took[0]} % longer with `dion2` and {took[1]} % longer with `muon`"
    yield f"{measured}, where {' and '.join(predicted)} are predicted."


@page("docs/performance.md")
def _() -> Iterator[str]:
    adamw, dion2 = (measured_with(recipe) for recipe in ("adamw", "dion2"))
    took, predicted = (dion2[key] - adamw[key] for key in ("ms_per_step", "predicted_ms_per_step"))
    yield f"Dion2's steps take {took:.1f} ms longer than AdamW's, where {predicted:.1f} are predicted."
    yield f"against {of('observe.peak_flops:dense_bf16_flops')('NVIDIA H200') / 1e12:g} TFLOP/s"


@page("docs/sharding_plan.md")
def _() -> Iterator[str]:
    yield f"counts; {percent(of('forecast.memory:MARGIN'))} stay free"


@page("docs/tracking.md")
def _() -> Iterator[str]:
    table = (ROOT / "docs/tracking.md").read_text()
    for row in re.findall(r"^\| (`.*) \| (`.*) \|$", table, re.MULTILINE):
        keys, names = (re.findall("`([^`]+)`", cell) for cell in row)
        assert names == [of("observe.metric_table:shown_name")(key) for key in keys]
        yield row[0]


@page("docs/when_it_fails.md")
def _() -> Iterator[str]:
    yield f"no step for {of('observe.watchdog:STALL_REPORT_SHARE') * CONFIG.comm.train_timeout_seconds:g} seconds"


@page("titanlite/config/schema.py")
def _() -> Iterator[str]:
    least, share = of("evaluation.inputs:_LEAST"), percent(of("evaluation.inputs:_SHARE"))
    peers, host = of("config.check:_MOST_PEERS"), of("forecast.network:GPUS_OF_A_HOST")
    yield f"ends the run after {of('training.report:MAX_SKIPPED_IN_A_ROW')} in a row"
    yield f"`bytes` ({of('data.tokenizer:ByteTokenizer').vocab_size} ids"
    yield f"where 2 to {peers} GPUs of one host, which is taken to have {host},"
    yield f"Not given: {least}, or more where a step has few tokens, so that at most {share} as many"
    yield f"feed-forward (F); a multiple of {of('kernels.swiglu:BLOCK')}"
    yield f"The first {WORDS[of('data.tally:_LISTED')]} are named"


@pytest.mark.parametrize("path", PAGES)
def test_a_page_states_what_the_code_has(path: str) -> None:
    text = text_of(path)
    assert not [phrase for phrase in PAGES[path]() if " ".join(phrase.split()) not in text]


def test_trust_names_the_keys_that_name_code() -> None:
    trust = text_of("docs/checkpoint.md").partition("## Trust")[2]
    of_section = ((f.name, help_texts(type(getattr(CONFIG, f.name)))) for f in fields(CONFIG))
    keys = [f"`{name}.{key}`" for name, of in of_section for key, text in of.items() if "Python file" in text]
    assert len(keys) >= 2
    assert not [key for key in keys if key not in trust]
