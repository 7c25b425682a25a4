"""Describe Hugging Face's layout of the shipped architectures: names of weights and dimensions, and how weights lie.

A layer of ours that fuses several weights is several layers there, but GPT-2's, whose queries, keys and values are one
matrix there too, in another order. GPT-2's matrices lie transposed, and a Gemma norm's weight is the factor less one.
This imports no torch: `config_json.py` holds a given folder against a config; `models/hugging_face.py` moves weights.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

from titanlite.config.problems import show
from titanlite.config.recipe_schema import ModelDims
from titanlite.config.schema import Model
from titanlite.errors import Problem
from titanlite.json_file import read_json

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
_NO_FFN = {ours: theirs for ours, theirs in _ROTARY.items() if ".feed_forward." not in ours}
_MOE = _NO_FFN | {
    "layers.*.experts.router": "model.layers.*.mlp.gate",
    "layers.*.experts.w1": "model.layers.*.mlp.experts.*.gate_proj",
    "layers.*.experts.w3": "model.layers.*.mlp.experts.*.up_proj",
    "layers.*.experts.w2": "model.layers.*.mlp.experts.*.down_proj",
}
_MIXTRAL = _NO_FFN | {
    "layers.*.experts.router": "model.layers.*.block_sparse_moe.gate",
    "layers.*.experts.w1": "model.layers.*.block_sparse_moe.experts.*.w1",
    "layers.*.experts.w3": "model.layers.*.block_sparse_moe.experts.*.w3",
    "layers.*.experts.w2": "model.layers.*.block_sparse_moe.experts.*.w2",
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


# From a key of config.json to the dimension that it is.
_SIZES = {"vocab_size": "vocab_size", "tie_word_embeddings": "tied_embeddings"}
_ROTARY_SIZES = _SIZES | {
    "hidden_size": "dim",
    "intermediate_size": "ffn_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_width",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_theta",
}
_GEMMA3_SIZES = _ROTARY_SIZES | {
    "query_pre_attn_scalar": "head_width",
    "rope_local_base_freq": "local_rope_theta",
    "sliding_window": "window",
    "sliding_window_pattern": "global_every",
}
_EXPERTS_SIZES = {theirs: ours for theirs, ours in _ROTARY_SIZES.items() if theirs != "intermediate_size"} | {
    "num_experts_per_tok": "experts.top_k"
}
_QWEN3_MOE_SIZES = _EXPERTS_SIZES | {
    "num_experts": "experts.n_experts",
    "moe_intermediate_size": "experts.ffn_dim",
    "norm_topk_prob": "experts.normalised",
}
_OLMOE_SIZES = _EXPERTS_SIZES | {
    "num_experts": "experts.n_experts",
    "intermediate_size": "experts.ffn_dim",
    "norm_topk_prob": "experts.normalised",
}
_MIXTRAL_SIZES = _EXPERTS_SIZES | {"num_local_experts": "experts.n_experts", "intermediate_size": "experts.ffn_dim"}
_GPT2_SIZES = _SIZES | {
    "n_embd": "dim",
    "n_inner": "ffn_dim",
    "n_layer": "n_layers",
    "n_head": "n_heads",
    "n_positions": "max_seq_len",
    "layer_norm_epsilon": "norm_eps",
}


@dataclass(frozen=True)
class HubLayout:
    """The layout that Hugging Face has of one architecture.

    Attributes:
        class_name: of transformers.
        model_type: likewise.
        names: from a layer of ours, its weights taken apart, to theirs; what shares a name is joined by rows.
        sizes: from keys of config.json to the dimensions that they are, as dotted attributes of a recipe.
        always: other keys, and what they say of every model of this architecture.
        training: from keys that say how a model is trained to what a recipe says of it.
        fixed: attributes of a recipe that no key has, and what every model of this architecture has there.
        groups_heads: several query heads may share a key/value head.
        is_transposed: linear layers of blocks have their matrices as [K, N].
        norm_offset: what norms add to their weight.
    """

    class_name: str
    model_type: str
    names: Mapping[str, str]
    sizes: Mapping[str, str]
    always: Mapping[str, Any]
    groups_heads: bool = True
    is_transposed: bool = False
    norm_offset: float = 0.0
    training: Mapping[str, str] = field(default_factory=dict[str, str])
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])


_SWIGLU = {"attention_bias": False, "hidden_act": "silu"}
_LLAMA3 = _SWIGLU | {"mlp_bias": False, "rope_scaling": None}
_BALANCE = {"router_aux_loss_coef": "experts.balance_loss"}
CAP = "final_logit_softcapping"  # null is no cap; 0 would be a division by it
_GEGLU = {"attention_bias": False, "hidden_activation": "gelu_pytorch_tanh"}
LAYOUTS = {
    "llama3": HubLayout("LlamaForCausalLM", "llama", _ROTARY, _ROTARY_SIZES, _LLAMA3),
    "qwen3": HubLayout("Qwen3ForCausalLM", "qwen3", _ROTARY, _ROTARY_SIZES, _SWIGLU | {"use_sliding_window": False}),
    "gemma3": HubLayout(
        "Gemma3ForCausalLM", "gemma3_text", _GEMMA3, _GEMMA3_SIZES, _GEGLU | {CAP: None}, norm_offset=1.0
    ),
    "gpt2": HubLayout(
        "GPT2LMHeadModel",
        "gpt2",
        _GPT2,
        _GPT2_SIZES,
        {"activation_function": "gelu_new", "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
        groups_heads=False,
        is_transposed=True,
    ),
    "qwen3_moe": HubLayout(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        _MOE,
        _QWEN3_MOE_SIZES,
        _SWIGLU | {"use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        training=_BALANCE,
    ),
    "olmoe": HubLayout(
        "OlmoeForCausalLM", "olmoe", _MOE, _OLMOE_SIZES, _SWIGLU | {"clip_qkv": None}, training=_BALANCE
    ),
    "mixtral": HubLayout(
        "MixtralForCausalLM",
        "mixtral",
        _MIXTRAL,
        _MIXTRAL_SIZES,
        {"hidden_act": "silu", "sliding_window": None},
        training=_BALANCE,
        fixed={"experts.score": "softmax_of_chosen"},
    ),
}


def config_json(layout: HubLayout, dims: ModelDims, seq_len: int, dtype: str, end: int | None) -> dict[str, Any]:
    """Make the content of config.json.

    Args:
        layout: of the architecture.
        dims: the model's dimensions.
        seq_len: the longest that the model has seen.
        dtype: of the weights, as "bfloat16".
        end: id of the token that follows a document, and so stands before a text; None if it is not known.
    """
    return {
        "architectures": [layout.class_name],
        **model_keys(layout, dims),
        **training_keys(layout, dims),
        **({} if dims.max_seq_len else {"max_position_embeddings": seq_len}),
        "bos_token_id": end,
        "eos_token_id": end,
        "torch_dtype": dtype,
    }


def model_keys(layout: HubLayout, dims: ModelDims) -> dict[str, Any]:
    """Give what config.json says of the model that is computed."""
    keys = {"model_type": layout.model_type, **layout.always}
    keys |= _told(layout.sizes, dims)
    if dims.rope_scaling is not None:
        scaling = asdict(dims.rope_scaling)
        scaling["original_max_position_embeddings"] = scaling.pop("original_seq_len")
        keys["rope_scaling"] = {"rope_type": "llama3", **scaling}
    if dims.global_every:
        keys["layer_types"] = layer_types(dims)
    if CAP in layout.always:
        keys[CAP] = dims.logit_softcap or None
    return keys


def training_keys(layout: HubLayout, dims: ModelDims) -> dict[str, Any]:
    """Give what config.json says of how a model is trained, on which no logit depends."""
    return _told(layout.training, dims)


def _told(keys: Mapping[str, str], dims: ModelDims) -> dict[str, Any]:
    return {theirs: attrgetter(ours)(dims) for theirs, ours in keys.items()}


def without_place(layout: HubLayout, dims: ModelDims, is_start: bool = False) -> list[Problem]:
    """Return what a recipe says of its experts, or of its logits, that transformers does not compute.

    Args:
        layout: of the architecture.
        dims: the model's dimensions.
        is_start: weights come from transformers: a bias, which starts at 0, changes no logit of theirs.
    """
    of, all_have = dims.experts, f"which every {layout.class_name} of transformers has"
    uncapped = [Problem("logit_softcap", show(dims.logit_softcap), f"0, {all_have}", "logit_softcap = 0")]
    uncapped = uncapped if dims.logit_softcap and CAP not in layout.always else []
    if of is None:
        return uncapped
    wanted: dict[str, object] = {"scale": 1.0, "shared": 0, **({} if is_start else {"balance_bias": 0.0})}
    if of.score == "sigmoid":
        wanted["score"] = layout.fixed.get("experts.score", "softmax")
    if "experts.normalised" not in layout.sizes.values():
        wanted["normalised"] = True
    wrong = {key: want for key, want in wanted.items() if getattr(of, key) != want}
    return uncapped + [
        Problem(f"experts.{key}", show(getattr(of, key)), f"{show(want)}, {all_have}", "another recipe")
        for key, want in wrong.items()
    ]


def can_export(model: Model, dims: ModelDims) -> bool:
    """Return whether transformers has a class that computes what a model does: none for a user's own architecture."""
    if model.file:
        return False
    layout = LAYOUTS[model.name]
    return (dims.n_kv_heads == dims.n_heads or layout.groups_heads) and not without_place(layout, dims)


def layer_types(dims: ModelDims) -> list[str]:
    """Name the attention of each layer."""
    return ["sliding_attention" if window else "full_attention" for window in dims.windows]


def weight_files(folder: Path) -> list[Path]:
    """Name the files that have the weights, whether they are there or not.

    Raises:
        ValueError, LookupError, TypeError: their index is damaged, or names a file that is not in the folder itself.
    """
    index = folder / f"{ONE_FILE}.index.json"
    if os.path.isfile(folder / ONE_FILE) or not os.path.isfile(index):  # as transformers chooses if there are both
        return [folder / ONE_FILE]
    named = cast(dict[str, dict[str, str]], read_json(index))["weight_map"]
    files = sorted(set(named.values()))
    if strange := [file for file in files if not re.fullmatch(r"[^/\\\0]+\.safetensors", file)]:
        raise ValueError(f"{index.name} names {', '.join(map(repr, strange))}, which is no safetensors file beside it")
    return [folder / file for file in files]
