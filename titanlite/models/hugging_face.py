"""What the shipped architectures' weights and dimensions are called in Hugging Face's layout, and how they lie there.

A layer of ours that fuses several weights is several layers there, but GPT-2's, whose queries, keys and values are one
matrix there too, in another order. GPT-2's matrices lie transposed, and a Gemma norm's weight is the factor less one.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from titanlite.config.recipe_schema import ModelRecipe
from titanlite.models.layers import Linear

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


def _rotary(sizes: ModelRecipe, seq_len: int) -> dict[str, Any]:
    return {
        "hidden_size": sizes.dim,
        "intermediate_size": sizes.ffn_dim,
        "num_hidden_layers": sizes.n_layers,
        "num_attention_heads": sizes.n_heads,
        "num_key_value_heads": sizes.n_kv_heads,
        "head_dim": sizes.head_width,
        "max_position_embeddings": seq_len,
        "rms_norm_eps": sizes.norm_eps,
        "rope_theta": sizes.rope_theta,
        "attention_bias": False,
    }


def _llama3(sizes: ModelRecipe, seq_len: int) -> dict[str, Any]:
    scaling: dict[str, Any] | None = None
    if sizes.rope_scaling is not None:
        scaling = {"rope_type": "llama3", **asdict(sizes.rope_scaling)}
        scaling["original_max_position_embeddings"] = scaling.pop("original_seq_len")
    return {**_rotary(sizes, seq_len), "hidden_act": "silu", "mlp_bias": False, "rope_scaling": scaling}


def _qwen3(sizes: ModelRecipe, seq_len: int) -> dict[str, Any]:
    return {**_rotary(sizes, seq_len), "hidden_act": "silu", "use_sliding_window": False}


def _gemma3(sizes: ModelRecipe, seq_len: int) -> dict[str, Any]:
    return {
        **_rotary(sizes, seq_len),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": sizes.head_width,
        "rope_local_base_freq": sizes.local_rope_theta,
        "sliding_window": sizes.window,
        "sliding_window_pattern": sizes.global_every,
        "layer_types": ["sliding_attention" if window else "full_attention" for window in sizes.windows],
    }


def _gpt2(sizes: ModelRecipe, seq_len: int) -> dict[str, Any]:
    return {
        "n_embd": sizes.dim,
        "n_inner": sizes.ffn_dim,
        "n_layer": sizes.n_layers,
        "n_head": sizes.n_heads,
        "n_positions": sizes.max_seq_len,
        "layer_norm_epsilon": sizes.norm_eps,
        "activation_function": "gelu_new",
    }


@dataclass(frozen=True)
class Layout:
    """How one architecture lies there.

    Attributes:
        class_name: of transformers.
        model_type: likewise.
        names: from a layer of ours, its weights taken apart, to theirs; what shares a name is joined by rows.
        dimensions: from (the model's dimensions, tokens of a sequence) to its own keys of config.json.
        groups_heads: several query heads may share a key/value head.
        is_transposed: linear layers of blocks have their matrices as [K, N].
        norm_offset: what norms add to their weight.
    """

    class_name: str
    model_type: str
    names: Mapping[str, str]
    dimensions: Callable[[ModelRecipe, int], dict[str, Any]]
    groups_heads: bool = True
    is_transposed: bool = False
    norm_offset: float = 0.0


LAYOUTS = {
    "llama3": Layout("LlamaForCausalLM", "llama", _ROTARY, _llama3),
    "qwen3": Layout("Qwen3ForCausalLM", "qwen3", _ROTARY, _qwen3),
    "gemma3": Layout("Gemma3ForCausalLM", "gemma3_text", _GEMMA3, _gemma3, norm_offset=1.0),
    "gpt2": Layout("GPT2LMHeadModel", "gpt2", _GPT2, _gpt2, groups_heads=False, is_transposed=True),
}


def config_json(
    layout: Layout, sizes: ModelRecipe, seq_len: int, dtype: torch.dtype, end: int | None
) -> dict[str, Any]:
    """Make the content of config.json.

    Args:
        layout: of the architecture.
        sizes: the model's dimensions.
        seq_len: tokens of a sequence, the longest that the model has seen.
        dtype: of the weights.
        end: id of the token that follows a document, and so stands before a text; None if it is not known.
    """
    return {
        "architectures": [layout.class_name],
        "model_type": layout.model_type,
        "vocab_size": sizes.vocab_size,
        **layout.dimensions(sizes, seq_len),
        "tie_word_embeddings": sizes.tied_embeddings,
        "bos_token_id": end,
        "eos_token_id": end,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def their_weights(layout: Layout, model: nn.Module, name: str, weight: Tensor) -> dict[str, Tensor]:
    """Take one parameter of ours apart, into those that it is there.

    Args:
        layout: of the architecture.
        model: ours; its weights are not read.
        name: of the parameter.
        weight: its value, whole.

    Returns:
        Their names, and tensors of the same dtype, contiguous.
    """
    place, _, own = name.rpartition(".")
    layer, parts = model.get_submodule(place), {place: weight}
    if isinstance(layer, Linear):
        beside = place.rpartition(".")[0]
        parts = {f"{beside}.{part}".lstrip("."): rows for part, rows in layer.split(weight).items()}
    elif weight.ndim == 1 and own == "weight":
        parts = {place: weight - layout.norm_offset}
    joined: dict[str, list[Tensor]] = {}
    for part, rows in parts.items():
        number = re.search(r"\.\d+\.", part)
        theirs = layout.names[re.sub(r"\.\d+\.", ".*.", part)].replace(".*.", number[0] if number else "")
        joined.setdefault(f"{theirs}.{own}", []).append(rows)
    whole = {theirs: torch.cat(rows) for theirs, rows in joined.items()}
    if layout.is_transposed and isinstance(layer, Linear) and place != "output":
        whole = {theirs: rows.T if rows.ndim == 2 else rows for theirs, rows in whole.items()}
    return {theirs: rows.contiguous() for theirs, rows in whole.items()}
