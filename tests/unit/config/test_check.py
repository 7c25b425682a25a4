"""Every combination that cannot run is refused, and the fix in the message is one that can."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_type_hints

import pytest
import tomli

from tests.support.measured import MEASURED_CONFIGS
from tests.unit.config.test_command_line import parse
from titanlite.config.build import from_table
from titanlite.config.check import check_config, config_problems, last_step
from titanlite.config.held_out import held_out_sources, name_of_source
from titanlite.config.problems import Origin, Problems
from titanlite.config.ranges import range_of
from titanlite.config.recipe_schema import ModelDims
from titanlite.config.schema import Config, Stage, schema_keys, sections
from titanlite.config.stages import sequences_per_step
from titanlite.errors import ConfigError, Problem
from titanlite.recipes import load

LLAMA_8B = load("model", "llama3-8B")
RANGES = {
    f"{section}.{name}": span
    for section, cls in sections().items()
    for name, hint in get_type_hints(cls, include_extras=True).items()
    if (span := range_of(hint))
}


def changed(config: Config, **values: object) -> Config:
    """Return `config` with `section__key=value` set."""
    for path, value in values.items():
        section, _, key = path.partition("__")
        config = replace(config, **{section: replace(getattr(config, section), **{key: value})})
    return config


def message(
    config: Config, model: ModelDims | None = LLAMA_8B, world: int | None = None, origin: Origin | None = None
) -> str:
    with pytest.raises(ConfigError) as caught:
        check_config(config, model, world, origin)
    return str(caught.value)


@pytest.mark.parametrize("world", [None, 1, 2, 3, 8, 1000])
def test_the_defaults_run_on_any_number_of_processes(world: int | None) -> None:
    check_config(Config(), LLAMA_8B, world)


def test_every_number_of_the_schema_has_a_range() -> None:
    numeric = {key for key, hint in schema_keys().items() if re.search(r"\b(int|float)\b", str(hint))}
    assert set(RANGES) == numeric


@pytest.mark.parametrize("key", RANGES)
def test_numbers_out_of_range(key: str) -> None:
    """Just outside each bound is refused, and NaN and infinity wherever a float may stand."""
    path, span = key.replace(".", "__"), RANGES[key]
    low, high = (float(b) for b in span[1:-1].split(","))
    step = 0.001 if "float" in str(schema_keys()[key]) else 1
    bad = [low - step if span[0] == "[" else low]
    if high != float("inf"):
        bad.append(high + step if span[-1] == "]" else high)
    if step != 1:
        bad += [float("nan"), float("inf")]
    for value in bad:
        problem = problems_of(changed(Config(), **{path: value if step != 1 else int(value)}))[0]
        assert problem.where == key
        assert key.partition(".")[2] in problem.fix


TP, CP, EP = (f"parallelism.{kind}_parallel_degree" for kind in ("tensor", "context", "expert"))
SHARD, REPLICATE = "parallelism.data_parallel_shard_degree", "parallelism.data_parallel_replicate_degree"
BATCH, LR = "training.global_batch_size", "lr_scheduler"
ENGINES, VALIDATED = "parallelism.fsdp_copy_engines", "validation.enable = true"
ALWAYS, LONG = f'{ENGINES} = "always"', "ü" * 128


def mixture(a: str = '"a", source = "x", weight = 1.0', b: str = '"b", source = "x", weight = 1.0') -> str:
    return f"data.mixture = [{{name = {a}}}, {{name = {b}}}]"


def stage(*keys: str) -> str:
    return f"data.stage = [{', '.join(f'{{{each}}}' for each in keys)}]"


IMPOSSIBLE = [  # what is given, on how many processes if that is known, the one key that is refused, what its fix has
    (f"{TP} = 3", None, TP, "= 2 (or 4)"),
    (f"{TP} = 16", 16, TP, "= 8 (or 4)"),
    (f"{TP} = 4", 6, TP, "= 2 (or 1), or start 4 processes"),
    (f"{TP} = 4, {REPLICATE} = 4", 8, TP, "= 2 (or 1), or start 16 processes"),
    (f"{TP} = 2, training.seq_len = 63", 2, TP, "= 1"),
    (f"{REPLICATE} = 3", 8, REPLICATE, "= 2 (or 4)"),
    (f"{SHARD} = 4, {TP} = 4", 8, SHARD, "= 2 (or -1: all remaining ranks), or start 16 processes"),
    (f"{SHARD} = 4, {CP} = 2, {TP} = 2", 8, SHARD, "= 2 (or -1: all remaining ranks), or start 16 processes"),
    (f"{SHARD} = 0", None, SHARD, "= -1"),
    (f"{CP} = 2, training.seq_len = 1000", 2, "training.seq_len", "= 1024 (or 896)"),
    (f"{CP} = 3, training.seq_len = 2048", 6, CP, "= 2 (or 1)"),
    (f"{CP} = 4", 6, CP, "= 2 (or 1), or start 4 processes"),
    (f"{BATCH} = 3, {CP} = 4", 8, BATCH, "= 2 (or 4)"),
    (f"{BATCH} = 20, training.local_batch_size = 2", 8, BATCH, "= 16 (or 32)"),
    (f"{BATCH} = 3, training.local_batch_size = 2", None, BATCH, "= 2 (or 4)"),
    (f"{BATCH} = 4, {SHARD} = 8", None, BATCH, "= 8"),
    ("lr_scheduler.decay_ratio = 0.0", None, "lr_scheduler.decay_ratio", "min_lr_factor = 1.0 without decay_ratio"),
    ("training.steps = -5", None, "training.steps", "= 10000"),
    ("job.stop_after = 10001", None, "job.stop_after", "= 0"),
    ("profiling.enable = true, profiling.start_step = 9999", None, "profiling.start_step", "= 9998"),
    (ALWAYS, 16, ENGINES, '= "default"'),
    (f"{ALWAYS}, {SHARD} = 4, {CP} = 4", 16, ENGINES, '= "default"'),
    (f"{ALWAYS}, {SHARD} = 1", None, ENGINES, '= "default"'),
    (f'{ALWAYS}, training.mixed_precision_reduce = "bfloat16"', 8, "training.mixed_precision_reduce", '= "float32"'),
    ("parallelism.async_tensor_parallel = true", None, "parallelism.async_tensor_parallel", "= false"),
    ('activation_checkpoint.recipe = "auto"', None, "activation_checkpoint.recipe", "budget_gib = 60.0"),
    ("checkpoint.enable = false, checkpoint.resume = 5", None, "checkpoint.resume", "checkpoint.enable = true"),
    ('metrics.wandb = "offline", metrics.wandb_project = ""', None, "metrics.wandb_project", '= "titanlite"'),
    ("metrics.float8_numerics_freq = 5", None, "metrics.float8_numerics_freq", "= 0"),
    ('model.file = "nowhere.py"', None, "model.file", "from where you start"),
    ('model.file = "model.txt"', None, "model.file", '= "mine.py"'),
    *((f'job.name = "{name}"', None, "job.name", '= "run"') for name in ("a/b", "..", LONG)),
    ("optimizer.eps = 1e-39", None, "optimizer.eps", "= 1e-08"),
    ("optimizer.lr = 1e39", None, "optimizer.lr", "= 0.0003"),
    ("validation.steps = 0", None, "validation.steps", "= -1"),
    (mixture('"a", source = "x", weight = 0.0', '"b", source = "x", weight = 0.0'), None,
     "data.mixture", "give at least one source a weight"),
    (mixture('"a", source = "x", weight = -1.0'), None, "data.mixture[0].weight", "another weight"),
    (mixture('"b", source = "x", weight = 1.0'), None, "data.mixture[1].name", "give each a name of its own"),
    (mixture('"my notes", source = "x", weight = 1.0'), None, "data.mixture[0].name", '= "my_notes"'),
    (f"{mixture()}, data.max_tokens = 9", None, "data.max_tokens", "= 0"),
    (f"{mixture()}, data.stage = [{{from_tokens = 9, weights = {{'a.b[x]' = 1.0}}}}]", None,
     "data.stage[0].weights.a.b[x]", "a source of the mixture"),
    (f"{mixture()}, {stage('from_tokens = 9, weights = {a = 0.0}')}", None,
     "data.stage[0].weights", "give at least one source a weight"),
    (stage("from_tokens = 9, weights = {a = 1.0}"), None, "data.stage[0].weights", "write the sources as [[data.mix"),
    (stage("from_tokens = 640", "from_tokens = 64"), None, "data.stage[1].from_tokens", "in the order of training"),
    (stage("from_tokens = -5"), None, "data.stage[0].from_tokens", "another from_tokens"),
    (stage("from_tokens = 64, seq_len = 24"), None, "data.stage[0].seq_len", "powers of 2"),
    (f"{stage('from_tokens = 64, seq_len = 16', 'from_tokens = 640, seq_len = 40')}, training.seq_len = 16", None,
     "data.stage[1].seq_len", "powers of 2"),
    (f"{stage('from_tokens = 64, global_batch_size = 3')}, training.local_batch_size = 2", None,
     "data.stage[0].global_batch_size", "= 2 (or 4)"),
    (f"{stage('from_tokens = 64, lr_decay_to = 0.0')}, lr_scheduler.decay_ratio = 0.5", None,
     "lr_scheduler.decay_ratio", "remove it"),
    ("lr_scheduler.warmup_tokens = 5", None, "lr_scheduler.warmup_tokens", "give training.tokens"),
    ("data.shuffle_window = 2047", None, "data.shuffle_window", "= 0"),
]  # fmt: skip
MOE_IMPOSSIBLE = [
    (f"{EP} = 3", None, "= 2 (or 4)"),
    (f"{EP} = 8", 4, "= 4 (or 2)"),
    (f"{EP} = 4, {REPLICATE} = 2", 4, "= 2 (or 1)"),
    (f"{EP} = 8, {TP} = 2", 4, "= 4 (or 2)"),
]


def config_of(text: str) -> Config:
    config = from_table(Config, tomli.loads(re.sub(r", (?=[a-z0-9_]+\.)", "\n", text)), Problems(Origin("run.toml")))
    assert config is not None
    return config


def problems_of(config: Config, model: ModelDims = LLAMA_8B, world: int | None = None) -> Sequence[Problem]:
    return config_problems(config, model, world).found()


@pytest.mark.parametrize(("text", "world", "key", "fix"), IMPOSSIBLE)
def test_impossible_combinations(text: str, world: int | None, key: str, fix: str) -> None:
    (problem,) = problems_of(config_of(text), world=world)
    assert problem.where == key
    assert fix in problem.fix
    if is_set := re.match(r"(\w+) = (\S+?)(?=,| |$)", problem.fix):  # and it is one that can run
        name = f"{key.rpartition('.')[0]}.{is_set[1]}"
        given = [each for each in re.split(r", (?=[a-z0-9_]+\.)", text) if not each.startswith(f"{name} ")]
        if name != "model.file" and "[" not in key:
            check_config(config_of(", ".join([*given, f"{name} = {is_set[2]}"])), LLAMA_8B, world)


@pytest.mark.parametrize(("text", "world", "fix"), MOE_IMPOSSIBLE)
def test_experts_that_ranks_cannot_share_out(text: str, world: int | None, fix: str) -> None:
    (problem,) = problems_of(config_of(text), load("model", "qwen3_moe-debug"), world)
    assert problem.where == EP
    assert fix in problem.fix


def test_mixtures_that_tensor_parallelism_cannot_split() -> None:
    dims, config = load("model", "qwen3_moe-debug"), changed(Config(), parallelism__tensor_parallel_degree=2)
    said = message(changed(config, model__name="olmoe"), load("model", "olmoe-debug"), 2)
    assert "1: olmoe normalises all heads of a token together" in said
    assert dims.experts is not None
    shared = replace(dims, experts=replace(dims.experts, shared=3))
    assert "a divisor of experts.shared × experts.ffn_dim / 128 = 3\n" in message(config, shared, 2)


def test_experts_that_ranks_share_out() -> None:
    config = changed(Config(), parallelism__expert_parallel_degree=4, parallelism__tensor_parallel_degree=4)
    check_config(config, load("model", "qwen3_moe-debug"), 4)
    config = changed(Config(), parallelism__expert_parallel_degree=4, parallelism__data_parallel_replicate_degree=2)
    for world in (None, 8, 16):
        check_config(config, load("model", "qwen3_moe-debug"), world)
    auto = changed(config, activation_checkpoint__recipe="auto", activation_checkpoint__budget_gib=60.0)
    check_config(auto, load("model", "qwen3_moe-debug"), 8)
    assert "1: llama3 has no experts" in message(config)
    own = message(changed(config, model__file=__file__))
    assert f"1: the recipe of {__file__} has no table [experts]" in own
    assert "1 problem\n" in own


@pytest.mark.parametrize(
    "text",
    [
        "lr_scheduler.decay_ratio = 1.0, lr_scheduler.warmup_steps = 0",
        *(f"lr_scheduler.decay_ratio = {ratio}" for ratio in ("0.98", "0.99", "4e-5")),
        *("training.steps = 1", "job.stop_after = 10000", "checkpoint.enable = false, job.stop_after = 5"),
        *("profiling.enable = true, profiling.start_step = 9998", "profiling.start_step = 99999"),
        'checkpoint.enable = false, checkpoint.resume = "never"',
        *('metrics.wandb_project = ""', 'metrics.wandb = "offline"', f'job.name = "{"ü" * 127}"'),
        "optimizer.eps = 1.2e-38, optimizer.lr = 3.4e38, training.max_norm = 0.0",
        'metrics.float8_numerics_freq = 1, float8.recipe = "rowwise"',
        *(f"training.global_batch_size = 16, {TP} = 4", f"{TP} = 8, {SHARD} = 1", f"{REPLICATE} = 2, {TP} = 2"),
        *("data.shuffle_window = 0", "data.shuffle_window = 2048"),
        *(f'optimizer.ema_decay = 0.9, {VALIDATED}, validation.weights = "{of}"' for of in ("ema", "both")),
    ],
)
def test_the_edges_of_what_is_legal(text: str) -> None:
    check_config(config_of(text), LLAMA_8B, 8)


@pytest.mark.parametrize(
    ("values", "key", "fix"),
    [
        ({"n_heads": 48}, "n_heads", "= 32 (or 64)"),
        ({"n_heads": 9, "n_kv_heads": 4}, "n_heads", "= 8 (or 4)"),
        ({"n_kv_heads": 5}, "n_kv_heads", "= 4 (or 2)"),
        ({"dim": 96}, "n_heads", "= 24 (or 16)"),
        ({"dim": 33, "n_heads": 11, "n_kv_heads": 1}, "dim", "= 44"),
        ({"ffn_dim": 700}, "ffn_dim", "= 768"),
        ({"ffn_dim": 700, "n_kv_heads": 1}, "ffn_dim", "= 768"),
    ],
)
def test_impossible_dimensions(values: dict[str, int], key: str, fix: str) -> None:
    (problem,) = problems_of(Config(), replace(LLAMA_8B, **values))
    assert (problem.where, problem.fix) == (f"model.{key}", f"{key} {fix}")
    check_config(Config(), replace(LLAMA_8B, **{**values, key: int(fix.split()[1])}), None)


def test_each_held_out_source_has_a_key() -> None:
    sources = 'validation.source = "a.txt", validation.sources = ["code=b=c.txt", "wiki=hf:wiki::test"]'
    found = held_out_sources(config_of(f"{VALIDATED}, {sources}"))
    assert [name_of_source(key) for key in found] == ["", "code", "wiki"]
    keys = ["validation.source", "validation.sources.code", "validation.sources.wiki"]
    assert found == dict(zip(keys, ["a.txt", "b=c.txt", "hf:wiki::test"], strict=True))
    assert held_out_sources(config_of(sources)) == {}


def test_a_head_may_have_a_width_of_its_own() -> None:
    check_config(Config(), replace(LLAMA_8B, dim=96, head_dim=66), None)


def test_a_sequence_has_no_more_tokens_than_the_model_has_positions() -> None:
    check_config(Config(), replace(LLAMA_8B, max_seq_len=Config().training.seq_len), None)
    said = message(Config(), replace(LLAMA_8B, max_seq_len=Config().training.seq_len - 1))
    assert "training.seq_len = 2048\n      want: at most 2047" in said
    assert "fix:  seq_len = 2047" in said


@pytest.mark.parametrize(
    ("text", "world", "sequences"),
    [
        *(("", None, 3), ("", 8, 24), (f"{TP} = 2", 8, 12), ("training.global_batch_size = 48", 8, 48)),
        (f"{TP} = 8", 4, 3),  # impossible, and reported elsewhere
        *((f"{REPLICATE} = 2", None, 6), (f"{REPLICATE} = 2, {SHARD} = 4", None, 24)),
        (f"{TP} = 0", 8, 24),
    ],
)
def test_sequences_per_step(text: str, world: int | None, sequences: int) -> None:
    config = config_of(f"training.local_batch_size = 3, {text}".removesuffix(", "))
    assert sequences_per_step(config, world) == sequences


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (f'{mixture()}\ndata.source = "x.txt"', "data.source"),
        (
            f"{stage('from_tokens = 64, lr_decay_to = 0.0')}\nlr_scheduler.min_lr_factor = 0.2",
            "lr_scheduler.min_lr_factor",
        ),
        ("training.tokens = 99\nlr_scheduler = {warmup_tokens = 64, warmup_steps = 9}", f"{LR}.warmup_steps"),
    ],
)
def test_a_key_is_not_given_beside_the_one_that_takes_its_place(text: str, key: str, tmp_path: Path) -> None:
    (path := tmp_path / "run.toml").write_text(text)
    config, origin = parse([str(path)], "train.py")
    said = message(config, origin=origin)
    assert f": 1 problem\n  line 2  {key} = " in said
    assert "which takes its place\n      fix:  remove it" in said


def test_all_problems_at_once_with_the_lines_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        "[training]\nsteps = 10\nlocal_batch_size = 2\nmax_norm = -1.0\n"
        "[lr_scheduler]\nmin_lr_factor = 20\n[parallelism]\ntensor_parallel_degree = 3\n"
    )
    config, origin = parse(["--config", str(path), "--optimizer.lr", "-1"], "train.py")
    said = message(config, world=8, origin=origin)
    heads = [line for line in said.splitlines() if not line.startswith("      ")]
    assert heads == [
        f"{path}: 3 problems",
        "  line 4  training.max_norm = -1.0",
        "  line 6  lr_scheduler.min_lr_factor = 20.0",
        "  line 8  parallelism.tensor_parallel_degree = 3",
        "command line: 1 problem",
        "  optimizer.lr = -1.0",
    ]


def test_the_fix_is_a_flag_if_a_flag_made_a_value_of_the_file_impossible(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[job]\nstop_after = 30\n[profiling]\nenable = true\nstart_step = 10\nsteps = 9\n")
    flags = ["--config", str(path), "--training.steps", "6"]
    config, origin = parse(flags, "train.py")
    said = message(config, origin=origin)
    assert "line 2  job.stop_after = 30\n      want: at most training.steps = 6\n" in said
    fixes = [f.split(" (")[0].split() for f in re.findall(r"fix:  (--.*)", said)]
    assert len(fixes) == 3
    pasted = [word for fix in fixes for word in fix]
    check_config(*parse([*flags, *pasted], "train.py")[:1], LLAMA_8B, None)


@pytest.mark.parametrize("flags", [("--training.steps", "3"), ("--job.stop_after", "3")])
@pytest.mark.parametrize("checkpoints", ["true", "false"])
def test_a_look_at_three_steps_of_a_long_run_takes_one_flag(flags: tuple[str, str], checkpoints: str) -> None:
    config = MEASURED_CONFIGS / "llama3_8b.toml"
    asked, origin = parse([str(config), "--checkpoint.enable", checkpoints, *flags], "train.py")
    check_config(asked, LLAMA_8B, None, origin)
    assert last_step(asked) == 3


def test_without_a_model_the_rest_is_checked() -> None:
    values = {"training__steps": 0, "parallelism__tensor_parallel_degree": 3, "training__global_batch_size": 7}
    said = message(changed(Config(), **values), None, 6)
    assert "training.steps = 0" in said
    assert "a divisor of seq_len × local_batch_size = 2048" in said
    assert "model." not in said
    assert "training.global_batch_size" not in said  # its ranks follow from the degrees
    with pytest.raises(ConfigError, match=r"global_batch_size = 7\n +want: a multiple of .* = 1 × 6 = 6\n"):
        check_config(changed(Config(), training__global_batch_size=7), None, 6)
    auto = {"activation_checkpoint__recipe": "auto", "activation_checkpoint__budget_gib": 60.0}
    check_config(changed(Config(), **auto), None, 6)


def test_a_shuffle_window_holds_a_sample_of_the_longest_stage() -> None:
    config = changed(Config(), data__stage=(Stage(1 << 30, seq_len=4096),), data__shuffle_window=4096)
    check_config(config, None, None)
    said = message(changed(config, data__shuffle_window=2048))
    assert "at least the 4096 tokens of a sample (the longest seq_len of data.stage)" in said
    assert said.count("want:") == 1
