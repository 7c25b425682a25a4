"""Configs of torchtitan v0.2.2: every key and choice is converted, and what is written is accepted."""

from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import tomli
import tomli_w
from jsonschema import Draft7Validator
from tokenizers import Tokenizer, models

from titanlite import recipes
from titanlite.commands import main
from titanlite.config.json_schema import config_json_schema
from titanlite.config.recipe_schema import Experts
from titanlite.config.schema import Config, schema_keys
from titanlite.config.torchtitan import (
    ASKED_BY_DEFAULT,
    DATASETS,
    FLAVORS,
    IDLE,
    KEYS,
    SWITCHES,
    UNSAID,
)
from titanlite.config.torchtitan_config import SETS, default_there, stands_for
from titanlite.errors import ConfigError
from titanlite.preflight.checked_run import checked_run

CHOICES: dict[str, list[Any]] = {
    "model.name": ["llama3", "qwen3"],
    "model.flavor": ["debugmodel", "debugmodel_flex_attn", "8B", "8B_flex", "70B", "405B"],
    "model.converters": [[], ["float8"], ["quantize.linear.float8"], ["quantize.linear.mx"], ["my.converter"]],
    "optimizer.name": ["Adam", "AdamW", "Lion"],
    "optimizer.implementation": ["for-loop", "foreach", "fused"],
    "training.global_batch_size": [-1, 16],
    "debug.seed": [7],
    "lr_scheduler.total_steps": [300, 10_000, 20_000],
    "lr_scheduler.decay_ratio": [0.0, 0.5],
    "lr_scheduler.decay_type": ["linear", "sqrt", "cosine"],
    "training.dataset": [*DATASETS],
    "training.dataset_path": ["./tests/assets/c4_test"],
    "validation.dataset": [*DATASETS],
    "validation.dataset_path": ["./tests/assets/c4_test"],
    "training.dtype": ["bfloat16", "float32"],
    "training.mixed_precision_param": ["bfloat16", "float32"],
    "parallelism.fsdp_reshard_after_forward": ["default", "always", "never"],
    "parallelism.context_parallel_rotate_method": ["allgather", "alltoall"],
    "parallelism.expert_parallel_comm_backend": ["standard", "deepep"],
    "checkpoint.export_dtype": ["float16", "bfloat16", "float32"],
    "checkpoint.async_mode": ["disabled", "async", "async_with_pinned_mem"],
    "activation_checkpoint.mode": ["selective", "full", "memory_budget", "none"],
    "activation_checkpoint.selective_ac_option": ["1", "2", "op"],
    "quantize.linear.float8.recipe_name": ["tensorwise", "rowwise", "rowwise_with_gw_hp"],
    "quantize.linear.float8.filter_fqns": [[], ["output"], ["auto_filter_small_kn", "wo"]],
    "quantize.linear.mx.filter_fqns": [["output"]],
    "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice": ["triton", "cuda", "torch"],
    "comm.mode": ["default", "fake_backend", "local_tensor"],
    "model.hf_assets_path": ["./tests/assets/tokenizer"],
    "model.tokenizer_path": ["./tests/assets/tokenizer/tokenizer.json", "./tests/assets/tokenizer/tokenizer.model"],
    "checkpoint.initial_load_path": [""],
    "parallelism.data_parallel_shard_degree": [-1, 2],
    "parallelism.tensor_parallel_degree": [1, 2],
    "lr_scheduler.min_lr_factor": [0.0, 0.1],
    "training.mixed_precision_reduce": ["float32"],
}


def make_tokenizer(folder: Path, *special: str) -> None:
    tokenizer = Tokenizer(models.WordLevel({"one": 0, "text": 1}, unk_token="one"))
    tokenizer.add_special_tokens(["<|end_of_text|>", *special])
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(autouse=True)
def _where_its_assets_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    texts = tmp_path / "tests/assets/c4_test"
    texts.mkdir(parents=True)
    (texts / "data.jsonl").write_text(f'{{"text": "{"one text " * 1000}"}}\n' * 120)  # a mebibyte: it is not counted
    for folder in ("tests/assets/tokenizer", *(f"assets/hf/{size}" for size in HF_FOLDERS)):
        (tmp_path / folder).mkdir(parents=True)
        make_tokenizer(tmp_path / folder)


HF_FOLDERS = ("Llama-3.1-405B", "Qwen3-1.7B")


def nested(keys: dict[str, Any]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in keys.items():
        *sections, name = key.split(".")
        inside = table
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[name] = value
    return table


def converted(keys: dict[str, Any], world: int | None = None) -> Config:
    """What titanlite convert makes of them, which titanlite accepts, under the name that a run has by itself."""
    Path("theirs.toml").write_text(tomli_w.dumps(nested(keys)))
    Path("ours.toml").unlink(missing_ok=True)
    assert main(["convert", "theirs.toml", "--out", "ours.toml"]) == 0
    config = checked_run(["ours.toml"], world).config
    return replace(config, job=replace(config.job, name=Config().job.name))


def values_of(key: str) -> list[Any]:
    default = default_there(key)
    if key in CHOICES:
        return CHOICES[key]
    if isinstance(default, bool):
        return [True, False]
    if isinstance(default, int):
        return [default, max(default, 1) * 2]
    if isinstance(default, float):
        return [default, default / 2]
    return [*([] if default is None else [default]), [["a"]] if key.endswith("model_part") else "other"]


@pytest.mark.parametrize("key", {**CHOICES, **{key: 0 for key, (default, _) in KEYS.items() if default is not None}})
def test_every_choice_of_every_key_is_converted_to_what_is_accepted(key: str) -> None:
    on = {
        switch: True if default_there(switch) is False else 2
        for switch, keys in SWITCHES.items()
        if key.startswith(keys) and switch not in (key, "checkpoint.initial_load_path")
    }
    if key.startswith("parallelism.expert_"):  # more than one rank can share out experts alone
        on |= {"model.name": "qwen3_moe", "model.flavor": "debug"}
    if key.startswith("quantize."):
        on["model.converters"] = [".".join(key.split(".")[:3])]
    for value in values_of(key):
        converted({"model.print_after_conversion": False, **on, key: value})  # the first says where it is from


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"metrics.enable_wandb": True}, {"metrics.wandb": "online"}),
        ({"training.dataset": "c4"}, {"data.source": "hf:allenai/c4:en", "data.max_tokens": 100_000_000}),
        (  # 1,000 steps of 16 sequences of 2,048 tokens are 32,768,000
            {"training.dataset": "c4", "training.global_batch_size": 16, "training.steps": 1000},
            {"data.max_tokens": 40_000_000},
        ),
        (
            {"training.dataset": "c4", "training.steps": 10, "parallelism.data_parallel_shard_degree": 2},
            {"data.max_tokens": 400_000},  # 16 sequences a step are 327,680
        ),
        ({"training.dataset": "c4", "data.max_tokens": 5_000_000}, {"data.max_tokens": 5_000_000}),
        ({"training.dataset": "c4", "training.dataset_path": "./tests"}, {"data.source": "hf:./tests:en"}),
        ({"model.hf_assets_path": "assets/hf/Qwen3-1.7B"}, {"data.tokenizer": "assets/hf/Qwen3-1.7B/tokenizer.json"}),
        ({"debug.seed": 7, "debug.deterministic": True}, {"training.seed": 7, "training.deterministic": True}),
        ({"activation_checkpoint.mode": "none"}, {"activation_checkpoint.recipe": "none"}),
        ({"activation_checkpoint.mode": "selective"}, {"activation_checkpoint.recipe": "full"}),
        ({"activation_checkpoint.selective_ac_option": "2"}, {"activation_checkpoint.recipe": "full"}),
        (
            {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"},
            {"activation_checkpoint.recipe": "every_second_matmul"},
        ),
        ({"model.converters": ["float8"]}, {"float8.recipe": "tensorwise", "float8.filter_fqns": ()}),
        (
            {"model.converters": ["quantize.linear.float8"], "quantize.linear.float8.recipe_name": "rowwise"},
            {"float8.recipe": "rowwise", "float8.filter_fqns": ()},
        ),
        ({"quantize.linear.float8.filter_fqns": ["wo"]}, {"float8.recipe": "none", "float8.filter_fqns": ("output",)}),
        ({"model.converters": ["quantize.linear.mx"]}, {"float8.recipe": "rowwise", "float8.filter_fqns": ("output",)}),
        ({"lr_scheduler.decay_ratio": 0.0}, {"lr_scheduler.min_lr_factor": 1.0, "lr_scheduler.decay_ratio": None}),
        ({"lr_scheduler.total_steps": 20_000}, {"training.steps": 20_000, "job.stop_after": 10_000}),
        ({"training.steps": 50}, {"lr_scheduler.warmup_steps": 50}),  # as it shortens the 200 that are its default
        ({"training.steps": 50, "lr_scheduler.warmup_steps": 100}, {"lr_scheduler.warmup_steps": 50}),
        (
            {"optimizer.name": "Adam", "optimizer.weight_decay": 0.1},
            {"optimizer.recipe": "adamw", "optimizer.weight_decay": 0.0},
        ),
        ({"model.flavor": "debugmodel"}, {"model.n_layers": 6, "model.vocab_size": 2048, "model.flavor": "8B"}),
        ({"model.name": "llama3_ft"}, {"model.name": "llama3"}),
        ({"training.global_batch_size": -1}, {"training.global_batch_size": None}),
        (
            {"profiling.enable_profiling": True, "profiling.profile_freq": 100},
            {"profiling.enable": True, "profiling.start_step": 100, "profiling.steps": 1},
        ),
        ({"validation.enable": True}, {"validation.source": "hf:allenai/c4:en:validation", "validation.freq": 10}),
        ({"checkpoint.enable": True}, {"checkpoint.keep_latest_k": 10}),
        (
            {},
            {
                "training.local_batch_size": 8,
                "optimizer.lr": 8e-4,
                "optimizer.weight_decay_exclude": (),
                "lr_scheduler.decay_type": "linear",
                "lr_scheduler.min_lr_factor": 0.0,
                "compile.enable": False,
                "checkpoint.enable": False,
                "activation_checkpoint.recipe": "full",
                "data.source": "hf:./tests/assets/c4_test",
                "data.tokenizer": "./tests/assets/tokenizer/tokenizer.json",
                "model.n_layers": 6,
                "metrics.log_freq": 10,
                "comm.init_timeout_seconds": 300,
                "comm.train_timeout_seconds": 100,
            },
        ),
        (
            {"model.name": "qwen3", "model.flavor": "30B-A3B"},
            {"model.name": "qwen3_moe", "model.flavor": "30B-A3B"},
        ),
    ],
)
def test_what_is_converted_is_what_was_asked(keys: dict[str, Any], expected: dict[str, Any]) -> None:
    config = converted({"job.description": "mine", **keys})
    assert {key: attrgetter(key)(config) for key in expected} == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[training]\nenable_cpu_offload = true",
            ["line 2  training.enable_cpu_offload = true", "remove it, a key of torchtitan"],
        ),
        ("[job]\nprint_config = false", ["line 2  job.print_config = false", "; the resolved config"]),
        ("[training]\nbatch_size = 4", ["titanlite convert FILE writes training.local_batch_size"]),
        ("[metrics]\nenable_wandb = true", ['titanlite convert FILE writes metrics.wandb = "online"']),
        ("[memory_estimation]\nenable = true", ["line 1  memory_estimation", "titanlite plan FILE --world N"]),
        (
            "[debug]\nmoe_force_load_balance = true",
            ["line 1  debug", "writes training.seed and training.deterministic"],
        ),
        ('[model]\nname = "llama4"', ["choose one of these: titanlite has no such model"]),
        ('[model]\nname = "qwen3"\nflavor = "32B"', ['use model.flavor = "8B", model.n_layers = 64, model.dim = 5120']),
    ],
)
def test_a_key_or_value_of_torchtitan_is_told_what_convert_writes(text: str, said: list[str]) -> None:
    Path("run.toml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        checked_run(["run.toml"])
    for part in said:
        assert part in str(refused.value)


def test_its_small_mixture_has_the_same_dimensions_and_is_balanced_as_there() -> None:
    """As its models/qwen3/__init__.py has it, and models/moe/moe.py the rate of the bias."""
    m = recipes.load("model", "qwen3_moe-torchtitan-debug")
    sizes = (m.n_layers, m.dim, m.n_heads, m.n_kv_heads, m.head_dim, m.vocab_size, m.rope_theta, m.norm_eps)
    assert (*sizes, m.tied_embeddings) == (8, 256, 16, 8, 128, 2048, 1e6, 1e-6, False)
    assert m.experts == Experts(n_experts=64, top_k=8, ffn_dim=768, balance_loss=0.0, balance_bias=0.001)


def test_one_recipe_of_ones_own_is_not_overruled(tmp_path: Path) -> None:
    (tmp_path / "mine/model").mkdir(parents=True)
    (tmp_path / "mine/model/llama3-debugmodel.toml").write_text(
        'help = "Mine."\nextends = "llama3-debug"\nn_layers = 3\n'
    )
    (tmp_path / "run.toml").write_text('model.flavor = "debugmodel"\njob.recipe_dirs = ["mine"]')
    assert checked_run(["run.toml"]).dims.n_layers == 3


@pytest.mark.parametrize(
    ("architecture", "bos", "is_offered"),
    [
        ("llama3", "<|begin_of_text|>", True),
        ("llama3", "", False),  # it would be refused
        ("llama3", None, True),  # there is no tokenizer yet
        ("qwen3", None, False),  # whose tokenizers have none
    ],
)
def test_documents_begin_with_bos_where_the_tokenizer_has_one(
    architecture: str, bos: str | None, is_offered: bool
) -> None:
    Path("mine").mkdir()
    if bos is not None:
        make_tokenizer(Path("mine"), *filter(None, [bos]))
    keys = {"model.name": architecture, "model.flavor": "debugmodel", "model.hf_assets_path": "mine"}
    Path("theirs.toml").write_text(tomli_w.dumps(nested(keys)))
    assert main(["convert", "theirs.toml", "--out", "ours.toml"]) == 0
    assert (
        "\nadd_bos_token = true  # torchtitan's default; false here\n" in Path("ours.toml").read_text()
    ) == is_offered
    if bos is not None:
        assert checked_run(["ours.toml"]).config.data.add_bos_token == is_offered


def test_the_keys_are_those_of_both_schemas() -> None:
    """A key that is added to titanlite must leave what is torchtitan's own."""
    assert {key for key, (_, answer) in KEYS.items() if answer is None} == set(KEYS) & set(schema_keys())
    for key, (_, answer) in KEYS.items():  # what is recommended exists
        assert {*stands_for(key), *(key for key, _ in SETS.findall(answer or ""))} <= set(schema_keys()), key
    assert set(UNSAID) <= set(schema_keys())
    prefixes = (*ASKED_BY_DEFAULT, *IDLE, *SWITCHES, *(p for keys in SWITCHES.values() for p in keys))
    for prefix in prefixes:
        assert any(key.startswith(prefix) or prefix.startswith(key) for key in {*KEYS, *schema_keys()}), prefix


LARGEST: dict[str, Any] = {
    "job.dump_folder": "./outputs",
    "job.description": "Llama 3 405B training",
    "profiling.enable_profiling": True,
    "profiling.save_traces_folder": "profile_trace",
    "profiling.profile_freq": 100,
    "metrics.log_freq": 10,
    "metrics.enable_tensorboard": True,
    "metrics.save_tb_folder": "tb",
    "model.name": "llama3",
    "model.flavor": "405B",
    "model.hf_assets_path": "./assets/hf/Llama-3.1-405B",
    "model.converters": ["float8"],
    "optimizer.name": "AdamW",
    "optimizer.lr": 8e-5,
    "optimizer.eps": 1e-8,
    "lr_scheduler.warmup_steps": 600,
    "training.local_batch_size": 2,
    "training.seq_len": 8192,
    "training.max_norm": 1.0,
    "training.steps": 3000,
    "training.dataset": "c4",
    "parallelism.data_parallel_replicate_degree": 1,
    "parallelism.data_parallel_shard_degree": -1,
    "parallelism.tensor_parallel_degree": 8,
    "parallelism.enable_async_tensor_parallel": True,
    "parallelism.pipeline_parallel_degree": 1,
    "parallelism.context_parallel_degree": 1,
    "checkpoint.enable": False,
    "checkpoint.folder": "checkpoint",
    "checkpoint.interval": 500,
    "checkpoint.last_save_model_only": True,
    "checkpoint.export_dtype": "float32",
    "checkpoint.async_mode": "disabled",
    "activation_checkpoint.mode": "full",
    "compile.enable": True,
    "compile.components": ["model", "loss"],
    "quantize.linear.float8.enable_fsdp_float8_all_gather": True,
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": True,
    "quantize.linear.float8.filter_fqns": ["output"],
    "validation.enable": False,
    "validation.dataset": "c4_validation",
    "validation.freq": 500,
    "validation.steps": 1200,
}
"""Its models/llama3/train_configs/llama3_405b.toml."""
ELSEWHERE: dict[str, Any] = {
    "profiling.enable": True,
    "parallelism.async_tensor_parallel": True,
    "optimizer.weight_decay_exclude": (),
    "data.source": "hf:allenai/c4:en",
    "data.tokenizer": "./assets/hf/Llama-3.1-405B/tokenizer.json",
    "float8.recipe": "tensorwise",
    "activation_checkpoint.recipe": "full",
}


def test_its_largest_file_is_converted_to_the_same_values() -> None:
    config = converted(LARGEST, world=64)
    Draft7Validator(config_json_schema()).validate(tomli.loads(Path("ours.toml").read_text()))
    for key in {**KEYS, **LARGEST}:
        off = {s for s, under in SWITCHES.items() if key != s and key.startswith(under)}
        is_left = key in ("training.global_batch_size", "model.flavor") or any(not LARGEST.get(s) for s in off)
        if key in schema_keys() and not is_left:
            assert attrgetter(key)(config) == LARGEST.get(key, default_there(key)), key
    assert {key: attrgetter(key)(config) for key in ELSEWHERE} == ELSEWHERE


def test_sizes_that_are_called_otherwise_have_the_same_dimensions() -> None:
    """As its `models/*/__init__.py` say them: layers, width, heads, feed-forward, vocabulary, rope, tied embeddings."""
    there = {
        ("llama3", "debugmodel"): (6, 256, 16, 16, 0, 768, 2048, 500_000.0, 1e-5, False, 8.0),
        ("qwen3", "debugmodel"): (8, 256, 16, 8, 128, 3072, 2048, 1e6, 1e-6, True, None),
        ("qwen3", "14B"): (40, 5120, 40, 8, 128, 17408, 151936, 1e6, 1e-6, False, None),
        ("qwen3", "32B"): (64, 5120, 64, 8, 128, 25600, 151936, 1e6, 1e-6, False, None),
    }
    assert {size for size, here in FLAVORS.items() if "name" not in here} == set(there)
    for (name, flavor), expected in there.items():
        keys = {"model.name": name, "model.flavor": flavor, "data.tokenizer": "bytes"}
        converted(keys)
        m = checked_run(["ours.toml"]).dims
        scaling = m.rope_scaling and m.rope_scaling.factor
        sizes = (m.n_layers, m.dim, m.n_heads, m.n_kv_heads, m.head_dim, m.ffn_dim, m.vocab_size, m.rope_theta)
        assert (*sizes, m.norm_eps, m.tied_embeddings, scaling) == expected
