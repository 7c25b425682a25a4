"""Hugging Face's layout of the shipped architectures: what weights and dimensions are called there, and how they lie.

A layer of ours that fuses several weights is several layers there, but GPT-2's, whose queries, keys and values are one
matrix there too, in another order. GPT-2's matrices lie transposed, and a Gemma norm's weight is the factor less one.
This imports no torch, so that a folder is held against a config in no time; `models/hugging_face.py` moves weights.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from titanlite.config.build import show
from titanlite.config.problems import Origin, Problems
from titanlite.config.recipe_schema import ModelRecipe
from titanlite.config.schema import Config

ONE_FILE = "model.safetensors"  # several are listed in an index, which has this name and more

_ROTARY = {
    "tok_embeddings": "model.embed_tokens",
    "layers.*.attention.wq": "model.layers.*.self_attn.q_proj",
    "layers.*.attention.wk": "model.layers.*.self_attn.k_proj",
    "layers.*.attention.wv": "model.layers.*.self_attn.v_proj",
    "layers.*.attention.q_norm": "model.layers.*.self_attn.q_norm",
    "layers.*.attention.k_norm": "model.layers.*.self_attn.k_norm",
    "layers.*.attention.wo": "model.layers.*.self_attn.o_proj",
    "layers.*.attention_norm": "model.layers.*.input_layernorm",
    "layers.*.feed_forward.w1": "model.layers.*.mlp.gate_proj",
    "layers.*.feed_forward.w3": "model.layers.*.mlp.up_proj",
    "layers.*.feed_forward.w2": "model.layers.*.mlp.down_proj",
    "layers.*.ffn_norm": "model.layers.*.post_attention_layernorm",
    "norm": "model.norm",
    "output": "lm_head",
}
_GEMMA3 = _ROTARY | {
    "layers.*.post_attention_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.ffn_norm": "model.layers.*.pre_feedforward_layernorm",
    "layers.*.post_ffn_norm": "model.layers.*.post_feedforward_layernorm",
}
_GPT2 = {
    "tok_embeddings": "transformer.wte",
    "positions": "transformer.wpe",
    "layers.*.attention.wq": "transformer.h.*.attn.c_attn",
    "layers.*.attention.wk": "transformer.h.*.attn.c_attn",
    "layers.*.attention.wv": "transformer.h.*.attn.c_attn",
    "layers.*.attention.wo": "transformer.h.*.attn.c_proj",
    "layers.*.attention_norm": "transformer.h.*.ln_1",
    "layers.*.feed_forward.w1": "transformer.h.*.mlp.c_fc",
    "layers.*.feed_forward.w2": "transformer.h.*.mlp.c_proj",
    "layers.*.ffn_norm": "transformer.h.*.ln_2",
    "norm": "transformer.ln_f",
    "output": "lm_head",
}


def _rotary(sizes: ModelRecipe) -> dict[str, Any]:
    return {
        "hidden_size": sizes.dim,
        "intermediate_size": sizes.ffn_dim,
        "num_hidden_layers": sizes.n_layers,
        "num_attention_heads": sizes.n_heads,
        "num_key_value_heads": sizes.n_kv_heads,
        "head_dim": sizes.head_width,
        "rms_norm_eps": sizes.norm_eps,
        "rope_theta": sizes.rope_theta,
        "attention_bias": False,
    }


def _llama3(sizes: ModelRecipe) -> dict[str, Any]:
    scaling: dict[str, Any] | None = None
    if sizes.rope_scaling is not None:
        scaling = {"rope_type": "llama3", **asdict(sizes.rope_scaling)}
        scaling["original_max_position_embeddings"] = scaling.pop("original_seq_len")
    return {**_rotary(sizes), "hidden_act": "silu", "mlp_bias": False, "rope_scaling": scaling}


def _qwen3(sizes: ModelRecipe) -> dict[str, Any]:
    return {**_rotary(sizes), "hidden_act": "silu", "use_sliding_window": False}


def _gemma3(sizes: ModelRecipe) -> dict[str, Any]:
    return {
        **_rotary(sizes),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": sizes.head_width,
        "rope_local_base_freq": sizes.local_rope_theta,
        "sliding_window": sizes.window,
        "sliding_window_pattern": sizes.global_every,
        "layer_types": ["sliding_attention" if window else "full_attention" for window in sizes.windows],
    }


def _gpt2(sizes: ModelRecipe) -> dict[str, Any]:
    return {
        "n_embd": sizes.dim,
        "n_inner": sizes.ffn_dim,
        "n_layer": sizes.n_layers,
        "n_head": sizes.n_heads,
        "n_positions": sizes.max_seq_len,
        "layer_norm_epsilon": sizes.norm_eps,
        "activation_function": "gelu_new",
    }


# What a config.json means that leaves a key out, where no weight's shape tells.
_UNSAID = {
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "quantization_config": None,
}
_LLAMA3_UNSAID = _UNSAID | {"hidden_act": "silu", "mlp_bias": False, "num_attention_heads": 32}
_QWEN3_UNSAID = _UNSAID | {"hidden_act": "silu", "use_sliding_window": False}
_GEMMA3_UNSAID = _UNSAID | {
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "use_bidirectional_attention": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
_GPT2_UNSAID = {
    "n_head": 12,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
    "tie_word_embeddings": True,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "quantization_config": None,
}


@dataclass(frozen=True)
class Layout:
    """How one architecture lies there.

    Attributes:
        class_name: of transformers.
        model_type: likewise.
        names: from a layer of ours, its weights taken apart, to theirs; what shares a name is joined by rows.
        dimensions: from the model's to its own keys of config.json.
        unsaid: what a config.json means that leaves keys out. What is not of `dimensions` cannot be otherwise here.
        groups_heads: several query heads may share a key/value head.
        is_transposed: linear layers of blocks have their matrices as [K, N].
        norm_offset: what norms add to their weight.
    """

    class_name: str
    model_type: str
    names: Mapping[str, str]
    dimensions: Callable[[ModelRecipe], dict[str, Any]]
    unsaid: Mapping[str, Any]
    groups_heads: bool = True
    is_transposed: bool = False
    norm_offset: float = 0.0


LAYOUTS = {
    "llama3": Layout("LlamaForCausalLM", "llama", _ROTARY, _llama3, _LLAMA3_UNSAID),
    "qwen3": Layout("Qwen3ForCausalLM", "qwen3", _ROTARY, _qwen3, _QWEN3_UNSAID),
    "gemma3": Layout("Gemma3ForCausalLM", "gemma3_text", _GEMMA3, _gemma3, _GEMMA3_UNSAID, norm_offset=1.0),
    "gpt2": Layout("GPT2LMHeadModel", "gpt2", _GPT2, _gpt2, _GPT2_UNSAID, groups_heads=False, is_transposed=True),
}


def config_json(layout: Layout, sizes: ModelRecipe, seq_len: int, dtype: str, end: int | None) -> dict[str, Any]:
    """Make the content of config.json.

    Args:
        layout: of the architecture.
        sizes: the model's dimensions.
        seq_len: tokens of a sequence, the longest that the model has seen.
        dtype: of the weights, as "bfloat16".
        end: id of the token that follows a document, and so stands before a text; None if it is not known.
    """
    return {
        "architectures": [layout.class_name],
        **_said(layout, sizes),
        **({} if sizes.max_seq_len else {"max_position_embeddings": seq_len}),
        "bos_token_id": end,
        "eos_token_id": end,
        "torch_dtype": dtype,
    }


def _said(layout: Layout, sizes: ModelRecipe) -> dict[str, Any]:
    """What config.json says of the model that is computed."""
    said = {"model_type": layout.model_type, "vocab_size": sizes.vocab_size, **layout.dimensions(sizes)}
    return {**said, "tie_word_embeddings": sizes.tied_embeddings}


def check_initial_load_path(config: Config, sizes: ModelRecipe, origin: Origin) -> None:
    """Hold the folder whose weights a run is to start from against the config.

    Args:
        config: its `checkpoint.initial_load_path` is given.
        sizes: the model's dimensions.
        origin: where each key was given.

    Raises:
        ConfigError: it is no such folder, or of another model; all that differs is listed.
    """
    key, path, problems = "checkpoint.initial_load_path", config.checkpoint.initial_load_path, Problems(origin)
    if config.model.file:
        want = "a shipped architecture: what the weights of others are called there is not known"
        problems.add("model.file", show(config.model.file), want, f"remove it, or {key}")
        problems.raise_all()
    layout, folder = LAYOUTS[config.model.name], Path(path).expanduser()
    ours = {**layout.unsaid, **_said(layout, sizes)}
    try:
        theirs, files = {**layout.unsaid, **_dimensions_of(folder / "config.json")}, weight_files(folder)
    except (OSError, ValueError, TypeError, AttributeError, LookupError) as error:
        want = f"a folder in Hugging Face's layout, with config.json and safetensors ({error})"
        is_name = path.count("/") == 1 and not path.startswith((".", "/", "~")) and not folder.parent.is_dir()
        fix = f"correct the path{f'; or fetch it: hf download {path} --local-dir FOLDER' if is_name else ''}"
        above = [folder, *folder.parents][:3]  # of a run, of its checkpoints, or one of these
        run = next((f for f in above if (f / "checkpoints").is_dir() and (f / "status.json").exists()), None)
        if folder.is_dir() and run is not None:
            fix = f"export the run first, and name what is written: titanlite export {run}"
        problems.add(key, show(path), want, fix)
        problems.raise_all()
        raise
    if missing := [file.name for file in files if not file.is_file()]:
        problems.add(key, show(path), f"{', '.join(missing)} in it", "fetch the folder again, with its safetensors")
    differ = [f"{n} = {v} (it says {theirs[n]})" for n, v in ours.items() if theirs.get(n, v) != v]
    if differ:
        want = f"a config.json of this config's model: {', '.join(differ)}"
        problems.add(key, show(path), want, "choose the model.name, flavor and dimensions of that folder")
    problems.raise_all()


def weight_files(folder: Path) -> list[Path]:
    """Name the files that have the weights, whether they are there or not.

    Args:
        folder: in Hugging Face's layout.

    Raises:
        ValueError, LookupError, TypeError: their index is damaged.
    """
    index = folder / f"{ONE_FILE}.index.json"
    if (folder / ONE_FILE).is_file() or not index.is_file():  # as transformers chooses if there are both
        return [folder / ONE_FILE]
    named = cast(dict[str, dict[str, str]], json.loads(index.read_bytes()))["weight_map"]
    return [folder / file for file in sorted(set(named.values()))]


def _dimensions_of(file: Path) -> dict[str, Any]:
    """What a config.json says: without what is null, and in one of the forms that transformers has had."""
    said = cast(dict[str, Any], json.loads(file.read_bytes()))
    theirs = {name: value for name, value in said.items() if value is not None}
    rope = cast(dict[str, Any], theirs.pop("rope_parameters", {}))
    kinds = [rope]
    if "full_attention" in rope:  # those of each kind of layer
        kinds = cast(list[dict[str, Any]], [rope["full_attention"], rope["sliding_attention"]])
    for key, kind in zip(("rope_theta", "rope_local_base_freq"), kinds, strict=False):
        if "rope_theta" in kind:
            theirs[key] = kind["rope_theta"]
    scalings = map(_scaling, (cast(dict[str, Any], theirs.get("rope_scaling", {})), *kinds))
    theirs["rope_scaling"] = next(filter(None, scalings), None)
    if "layer_types" in theirs:
        theirs.pop("sliding_window_pattern", None)
    else:
        theirs.setdefault("sliding_window_pattern", 6)
    return theirs


def _scaling(said: Mapping[str, Any]) -> dict[str, Any] | None:
    """How rotary positions are scaled; None if they are not."""
    kind = said.get("rope_type", said.get("type", "default"))
    scaling = {name: value for name, value in said.items() if name not in ("rope_theta", "type")}
    return None if kind == "default" else {**scaling, "rope_type": kind}
