import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.safetensors_header import header_of, write_header
from titanlite.config.architectures import ARCHITECTURES
from titanlite.config.config_json import _meaning, check_initial_load_path, recipe_of
from titanlite.config.hugging_face import can_export, config_json, weight_files
from titanlite.config.problems import Origin, Problems
from titanlite.config.recipe_schema import Experts, ModelDims
from titanlite.config.schema import Checkpoint, Config, Model
from titanlite.errors import ConfigError
from titanlite.recipes import load


def check(folder: Path | str, size: str = "llama3-8B", **over: Any) -> None:
    name, _, flavor = size.partition("-")
    config = Config(model=Model(name=name, flavor=flavor, **over), checkpoint=Checkpoint(initial_load_path=str(folder)))
    check_initial_load_path(config, load("model", size), Origin("config"))


def refusal(folder: Path | str, size: str = "llama3-8B") -> str:
    with pytest.raises(ConfigError) as caught:
        check(folder, size)
    return str(caught.value)


def make_folder(folder: Path, size: str = "llama3-8B", **over: object) -> Path:
    """Of a published size, with keys changed, or left out by an ellipsis."""
    name, dims = size.partition("-")[0], load("model", size)
    said = config_json(ARCHITECTURES[name], dims, 8192, "bfloat16", 0) | over
    (folder / "config.json").write_text(json.dumps({key: value for key, value in said.items() if value is not ...}))
    write_header(folder / "model.safetensors", header_of(name, dims))
    return folder


def recipe(folder: Path) -> ModelDims:
    """Of a folder, but for where it is."""
    problems = Problems(Origin("config"))
    found = recipe_of(str(folder), problems, "--from")
    problems.raise_all()
    assert found is not None
    return replace(found[1], help="", refs=())


SPARSE = ["qwen3_moe-30B-A3B", "olmoe-1B-7B", "mixtral-8x7B"]
PUBLISHED = ["llama3-8B", "qwen3-0.6B", "gemma3-1B", "gpt2-124M", *SPARSE]


def published_recipe(size: str) -> ModelDims:
    """Return what a config.json can say of it."""
    dims = replace(load("model", size), help="", refs=())
    return replace(dims, experts=replace(dims.experts, z_loss=0.0)) if dims.experts else dims


def made_of(folder: Path) -> ModelDims | str:
    try:
        return recipe(folder)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("size", ["llama3-1B", *PUBLISHED])
def test_what_is_exported_is_accepted_and_is_the_recipe(size: str, tmp_path: Path) -> None:
    check(make_folder(tmp_path, size), size)
    assert recipe(tmp_path) == published_recipe(size)
    layout = ARCHITECTURES[size.partition("-")[0]]
    assert not layout.ignored & {name for name, of in layout.fields.items() if of.ours}


# What would be computed otherwise there; where transformers is, each field of its classes is tried
# (tests/ranks/models/test_architectures.py).
OF_ALL = {
    "is_encoder_decoder": True, "quantization_config": {"quant_method": "fp8"}, "per_layer_config": {"0": {}},
    "auto_map": {"AutoModelForCausalLM": "mine.Model"}, "pruned_heads": {"0": [1]}, "add_cross_attention": True,
    "nobody_knows": 1, "model_type": "mistral", "vocab_size": ...,
}  # fmt: skip
OF_ROTARY = {
    "attention_bias": True, "partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0},
}  # fmt: skip
OF_ONE = {
    "llama3": {
        "hidden_act": "gelu", "mlp_bias": True, "head_dim": 64, "layer_types": ["sliding_attention"] * 32,
        "rope_interleaved": True,
    },
    "qwen3": {"hidden_act": "gelu", "use_sliding_window": True, "layer_types": ["sliding_attention"] * 28},
    "gemma3": {
        "query_pre_attn_scalar": 128, "hidden_activation": "silu", "attn_logit_softcapping": 50.0,
        "use_bidirectional_attention": True, "sliding_window": None,
        "layer_types": (["full_attention"] + ["sliding_attention"] * 12) * 2,
    },
    "gpt2": {
        "activation_function": "relu", "scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True,
    },
    "qwen3_moe": {"hidden_act": "gelu", "use_sliding_window": True, "decoder_sparse_step": 2, "mlp_only_layers": [0]},
    "olmoe": {"hidden_act": "gelu", "clip_qkv": 8.0, "head_dim": 64},
    "mixtral": {"hidden_act": "gelu", "sliding_window": 4096, "head_dim": 64, "norm_topk_prob": True},
}  # fmt: skip


@pytest.mark.parametrize("size", PUBLISHED)
def test_what_no_dimension_of_ours_says_is_refused(size: str, tmp_path: Path) -> None:
    name = size.partition("-")[0]
    for key, value in (OF_ALL | OF_ONE[name] | ({} if name == "gpt2" else OF_ROTARY)).items():
        made = made_of(make_folder(tmp_path, size, **{key: value}))
        assert isinstance(made, str), f"{key} = {value} is taken"
        assert any(word in made for word in (key, "head_dim =", "query_pre_attn_scalar ="))


_LEFT_OUT = dict.fromkeys(
    ("rope_theta", "rms_norm_eps", "tie_word_embeddings", "sliding_window", "layer_norm_epsilon", "rope_scaling"), ...
)
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_FORMER = {"rope_scaling": {"rope_type": "llama3", "type": "llama3", **SCALING}}


def of_all(**over: object) -> dict[str, object]:
    """Rotary positions of Llama 3 as transformers writes them now."""
    now = {"rope_type": "llama3", "rope_theta": 500000.0, **SCALING, **over}
    return {"rope_theta": ..., "rope_scaling": ..., "rope_parameters": now}


def of_two_kinds(full: dict[str, object], local: dict[str, object]) -> dict[str, object]:
    """Likewise of Gemma 3, whose layers are of two kinds."""
    now = {"full_attention": {"rope_theta": 1e6} | full, "sliding_attention": {"rope_theta": 1e4} | local}
    return {"rope_theta": ..., "rope_local_base_freq": ..., "rope_parameters": now}


# What published folders say beside dimensions.
_LLAMA = {
    "_name_or_path": "x", "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 1,
    "hidden_act": "silu", "initializer_range": 0.02, "mlp_bias": False, "model_type": "llama", "pretraining_tp": 1,
    "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": True,
}  # fmt: skip
_OLD = {"gradient_checkpointing": False, "line_by_line": False, "pruned_heads": {}, "xla_device": None}
_SUMMARY = {
    "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True, "n_ctx": 1024,
}  # fmt: skip


@pytest.mark.parametrize(
    ("size", "over"),
    [
        ("llama3-8B", {**_LLAMA, "attention_dropout": 0.0, "eos_token_id": [128001, 128008], "head_dim": 128,
                       "is_llama_config": True, "rope_interleaved": False, "max_sequence_length": 2048,
                       "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "pad_token_id": 0,
                       "unsloth_fixed": True, "unsloth_version": "2024.9", "quantization": None,
                       "quantization_config": None, "_flash_attn_2_enabled": True, "sliding_window": None,
                       "use_sliding_window": False, "qkv_bias": False, "extra": ""}),
        ("llama3-8B", {**_LLAMA, "head_dim": ..., "mlp_bias": None}),
        ("qwen3-0.6B", {"max_window_layers": 28, "rope_scaling": None, "sliding_window": None, "pretraining_tp": 1,
                        "use_sliding_window": False, "eos_token_id": 151645, "_attn_implementation_autoset": True,
                        "unsloth_version": "2025.4", "model_max_length": 4096}),
        ("gemma3-1B", {"attn_logit_softcapping": None, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
                       "final_logit_softcapping": None, "rope_scaling": None, "sliding_window_pattern": 6,
                       "_sliding_window_pattern": 6, "use_bidirectional_attention": False,
                       "hidden_act": "gelu_pytorch_tanh", "pretraining_tp": 1}),
        ("qwen3_moe-30B-A3B", {"eos_token_id": 151643, "max_window_layers": 48, "mlp_only_layers": [],
                               "output_router_logits": False, "rope_scaling": None, "sliding_window": None}),
        ("olmoe-1B-7B", {"clip_qkv": None, "rope_scaling": None, "eos_token_id": 50279, "pad_token_id": 1}),
        ("mixtral-8x7B", {"sliding_window": None, "output_router_logits": False, "bos_token_id": 1}),
        ("gpt2-124M", {**_SUMMARY, **_OLD, "task_specific_params": {"text-generation": {"max_length": 50}},
                       "_num_labels": 1, "id2label": {"0": "LABEL_0"}, "output_past": True, "n_inner": None,
                       "reorder_and_upcast_attn": False, "tokenizer_class": "BertTokenizerFast",
                       "finetuning_task": None, "torchscript": False}),
        ("llama3-8B", of_all()), ("llama3-8B", _FORMER), ("qwen3-0.6B", {"rope_scaling": {"rope_type": "default"}}),
        ("gemma3-1B", of_two_kinds({}, {})), ("gemma3-1B", {"sliding_window_pattern": ...}),
        ("gemma3-1B", {"layer_types": ...}), ("gemma3-1B", {"layer_types": ..., "sliding_window_pattern": ...}),
        ("olmoe-1B-7B", _LEFT_OUT), ("mixtral-8x7B", _LEFT_OUT), ("gpt2-124M", _LEFT_OUT),
    ],
)  # fmt: skip
def test_what_published_folders_say_is_taken(size: str, over: dict[str, object], tmp_path: Path) -> None:
    check(make_folder(tmp_path, size, **over), size)


@pytest.mark.parametrize("value", ["32", -1, None])
def test_a_dimension_that_is_no_number_is_told_by_its_name(value: object, tmp_path: Path) -> None:
    made = made_of(make_folder(tmp_path, "gemma3-1B", sliding_window=value))
    assert "want: a config.json with another value as sliding_window (it says " in str(made)
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "rope_parameters": ' + "[" * 100_000 + "]" * 100_000 + "}"
    )
    assert "in Hugging Face's layout" in str(made_of(tmp_path))


def test_a_key_of_positions_counts_in_each_of_its_forms(tmp_path: Path) -> None:
    def theta(**over: object) -> float:
        return recipe(make_folder(tmp_path, "qwen3-0.6B", **over)).rope_theta

    assert theta(rope_theta=...) == 1e4
    assert theta(rope_theta=5.0) == 5.0
    assert theta(rope_theta=5.0, rope_scaling={"rope_type": "default", "rope_theta": 7.0}) == 7.0
    assert theta(rope_theta=5.0, rope_parameters={"rope_theta": 7.0}) == 7.0
    assert theta(rope_theta=5.0, rope_parameters={"rope_type": "default"}) == 5.0
    assert theta(rope_theta=..., rope_parameters={"full_attention": {"rope_theta": 7.0}}) == 7.0
    # The former key has the word.
    assert theta(rope_scaling={"rope_theta": 7.0}, rope_parameters={"rope_theta": 9.0}) == 7.0
    for over in (
        {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"rope_parameters": {"rope_type": "default"}, "partial_rotary_factor": 0.5},
        {"rope_parameters": {"full_attention": {}, "sliding_attention": {}, "rope_theta": 7.0}},
    ):
        with pytest.raises(ConfigError, match=r"partial_rotary_factor|without rope_parameters"):
            theta(**over)
    theta(partial_rotary_factor=1.0)
    with pytest.raises(ConfigError, match="without rope_parameters"):  # Gemma's layers are of two kinds
        recipe(make_folder(tmp_path, "gemma3-1B", rope_parameters={"rope_type": "default", "rope_theta": 5.0}))


def test_scaling_takes_the_length_that_transformers_takes(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

    def length(own: dict[str, object], **over: object) -> int:
        found = recipe(make_folder(tmp_path, rope_scaling=scaling | own, max_position_embeddings=4096, **over))
        assert found.rope_scaling is not None
        return found.rope_scaling.original_seq_len

    assert length({}) == 4096
    assert length({"original_max_position_embeddings": 1024}) == 1024
    assert length({"original_max_position_embeddings": 1024}, original_max_position_embeddings=512) == 512
    for wrong in ({"beta_fast": 32.0}, {"attention_factor": 2.0}, {"partial_rotary_factor": 0.5}, {"factor": ...}):
        given = {key: value for key, value in (scaling | wrong).items() if value is not ...}
        with pytest.raises(ConfigError, match="rope_scaling = None"):
            recipe(make_folder(tmp_path, rope_scaling=given))


_LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
DIFFERS = [  # from the recipe of its size, in the recipe's words
    ("llama3-8B", of_all(factor=32.0), "'factor': 32.0"),
    ("llama3-8B", of_all(rope_theta=1e4), "rope_theta = 500000.0 (the folder has 10000.0)"),
    ("llama3-8B", {"rope_scaling": ...}, "(the folder has None)"),
    ("llama3-8B", {"rope_scaling": {"rope_type": "default"}}, "(the folder has None)"),
    ("llama3-8B", _LEFT_OUT, "norm_eps = 1e-05 (the folder has 1e-06), rope_theta = 500000.0 (the folder has 10000.0)"),
    ("llama3-8B", {"num_hidden_layers": 16, "rms_norm_eps": 1e-6}, "n_layers = 32 (the folder has 16), norm_eps = "),
    ("qwen3-0.6B", _LEFT_OUT, "tied_embeddings = true (the folder has false)"),
    ("gemma3-1B", of_two_kinds({"rope_theta": 2e6}, {}), "rope_theta = 1000000.0 (the folder has 2000000.0)"),
    ("gemma3-1B", of_two_kinds({}, {"rope_theta": 1e5}), "local_rope_theta = 10000.0 (the folder has 100000.0)"),
    ("gemma3-1B", of_two_kinds(_LINEAR, {}), "rope_scaling = None (it says {'rope_type': 'linear'"),
    ("gemma3-1B", of_two_kinds({}, _LINEAR), "rope_scaling = None (it says {'rope_type': 'linear'"),
    ("gemma3-1B", {"layer_types": ..., "sliding_window_pattern": 3}, "global_every = 6 (the folder has 3)"),
    ("gemma3-1B", {"layer_types": ["full_attention"] * 26}, "global_every = 6 (the folder has 1)"),
    ("gemma3-1B", {"final_logit_softcapping": 30.0}, "logit_softcap = 0.0 (the folder has 30.0)"),
    ("gemma3-1B", _LEFT_OUT, "window = 512 (the folder has 4096)"),
    ("qwen3_moe-30B-A3B", _LEFT_OUT, "rope_theta = 1000000.0 (the folder has 10000.0)"),
    ("qwen3_moe-30B-A3B", {"num_experts_per_tok": 4}, "experts.top_k = 8 (the folder has 4)"),
]


@pytest.mark.parametrize(("size", "over", "said"), DIFFERS)
def test_a_folder_of_other_dimensions_is_refused(size: str, over: dict[str, object], said: str, tmp_path: Path) -> None:
    assert said in refusal(make_folder(tmp_path, size, **over), size)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.filterwarnings("default")  # transformers' own
def test_these_are_the_values_that_transformers_has(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    layout = ARCHITECTURES[name]
    transformers.AutoConfig.for_model(layout.model_type).to_json_file(tmp_path / "config.json", use_diff=False)
    content = json.loads((tmp_path / "config.json").read_text())
    less = {key: of for key, of in content.items() if key not in layout.fields or layout.fields[key].left_out is None}
    assert _meaning(name, content) == _meaning(name, less)


def test_a_cap_of_logits_is_that_of_the_folder(tmp_path: Path) -> None:
    folder, dims = make_folder(tmp_path, "gemma3-1B", final_logit_softcapping=30.0), load("model", "gemma3-1B")
    assert recipe(folder).logit_softcap == 30.0
    config = Config(model=Model(name="gemma3", flavor="1B"), checkpoint=Checkpoint(initial_load_path=str(folder)))
    check_initial_load_path(config, replace(dims, logit_softcap=30.0), Origin("config"))
    for name, flavor in (("gemma3", "1B"), ("llama3", "8B")):
        folder, dims = make_folder(tmp_path, f"{name}-{flavor}"), load("model", f"{name}-{flavor}")
        config = Config(model=Model(name=name), checkpoint=Checkpoint(initial_load_path=str(folder)))
        with pytest.raises(ConfigError, match=r"logit_softcap = 30\.0 \(the folder has 0"):
            check_initial_load_path(config, replace(dims, logit_softcap=30.0), Origin("config"))


def test_another_architecture_is_told_by_its_name(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    with pytest.raises(ConfigError, match=r'model.name = "qwen3"\n +want: "llama3".*\n +fix:  name = "llama3"'):
        check(folder, "qwen3-8B")


def test_a_folder_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("checkpoints/Qwen3").mkdir(parents=True)
    for path in ("checkpoints/Qwen3", "checkpoints/nosuch", tmp_path):
        assert refusal(path).endswith("fix:  correct the path")
    for name in ("Qwen/Qwen3-0.6B", "meta-llama/Llama-3.1-8B"):
        assert f'or, for the model of the hub, "hf:{name}"' in refusal(name)
    (tmp_path / "config.json").write_text("[]")
    assert "in Hugging Face's layout" in refusal(tmp_path)
    with pytest.raises(ConfigError, match=r"model.file"):
        check(make_folder(tmp_path), file="mine.py")


def test_files_of_weights(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    assert weight_files(folder) == [folder / "model.safetensors"]
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model.safetensors in it"):
        check(folder)
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "2.safetensors", "b": "1.safetensors", "c": "2.safetensors"}}'
    )
    assert weight_files(folder) == [folder / "1.safetensors", folder / "2.safetensors"]
    (folder / "1.safetensors").touch()
    with pytest.raises(ConfigError, match=r"want: 2.safetensors in it"):
        check(folder)
    (folder / "model.safetensors").touch()
    assert weight_files(folder) == [folder / "model.safetensors"]
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match="in Hugging Face's layout"):
        check(folder)


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors", "/x.safetensors", "", "x\0.safetensors", "..\\x.safetensors", "pytorch_model.bin", 7,
    ],
)  # fmt: skip
def test_an_index_names_no_file_elsewhere(name: object, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    make_folder(folder)
    (folder / "model.safetensors").unlink()
    (tmp_path / "x.safetensors").touch()  # it could be read
    index = {"weight_map": {"lm_head.weight": name, "a": "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="in Hugging Face's layout"):
        check(folder)


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"moe_intermediate_size": 48}, "moe_intermediate_size (it says 48, which is not a multiple of 128)"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok (it says 0, which is not a whole number, at least 1)"),
        ({"router_aux_loss_coef": -1}, "router_aux_loss_coef (it says -1, which is not a number, at least 0)"),
        ({"norm_topk_prob": "yes"}, 'norm_topk_prob (it says "yes", which is not true or false)'),
        ({"head_dim": 127}, "head_dim (it says 127, which is not an even width, for rotary pairs)"),
        ({"rope_scaling": "llama3"}, "a config.json of qwen3_moe as transformers writes it"),
        ({"final_logit_softcapping": -1}, "final_logit_softcapping (it says -1, which is not a number, at least 0)"),
    ],
)
def test_a_value_that_cannot_be_is_told_with_what_is_wanted(over: dict[str, object], said: str, tmp_path: Path) -> None:
    size = "gemma3-1B" if "final_logit_softcapping" in over else "qwen3_moe-30B-A3B"
    assert said in refusal(make_folder(tmp_path, size, **over), size)


@pytest.mark.parametrize(
    ("size", "over", "is_exported"),
    [
        ("qwen3_moe-debug", {}, True),
        ("qwen3_moe-debug", {"experts": Experts(8, 2, 128, balance_bias=1e-3)}, False),
        ("gemma3-1B", {"logit_softcap": 30.0}, True),
        ("llama3-8B", {"logit_softcap": 30.0}, False),
        ("gpt2-debug", {"n_kv_heads": 1}, False),
    ],
)
def test_what_transformers_computes_is_exported(size: str, over: dict[str, Any], is_exported: bool) -> None:
    dims, name = replace(load("model", size), **over), size.partition("-")[0]
    assert can_export(Model(name=name), dims) == is_exported
    assert not can_export(Model(name=name, file="mine.py"), dims)


def test_a_bias_for_balance_starts_with_weights_that_have_none(tmp_path: Path) -> None:
    """It is 0 then, and changes no logit; what does is refused, by the recipe that has it."""
    folder = make_folder(tmp_path, "qwen3_moe-30B-A3B")
    dims = load("model", "qwen3_moe-30B-A3B")
    assert dims.experts is not None
    config = Config(model=Model(name="qwen3_moe", flavor="mine"), checkpoint=Checkpoint(initial_load_path=str(folder)))
    biased = replace(dims.experts, balance_bias=1e-3, balance_loss=0.0, z_loss=1e-4)
    check_initial_load_path(config, replace(dims, experts=biased), Origin("config"))
    with pytest.raises(ConfigError, match=r"model: experts\.shared = 1 \(the folder has 0\)\n"):
        check_initial_load_path(config, replace(dims, experts=replace(biased, shared=1)), Origin("config"))
