"""List what is known of each architecture before its file is imported: its class, the keys of its recipes, and how
Hugging Face writes it: names of weights and of dimensions, and how weights lie.

This imports no torch, so that a config can be checked within a second. The file of an architecture is
`titanlite/models/<name>.py`; a user's own is given by `model.file`, and nothing is known of it here.

A layer of ours that fuses several weights is several layers there, except for GPT-2's, whose queries, keys and values
are one matrix there too, in another order. GPT-2's matrices lie transposed, and a Gemma norm's weight is the factor
less one. Keys of config.json are those that the model code of transformers 5.24 reads, and that older releases wrote: a
key that is a dimension is used, any other of `left_out` must say what stands there, and a key that is nowhere is
refused, because it may change the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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

# What a config.json means that leaves a key out. A key that is no dimension cannot say anything else.
_ANY: dict[str, Any] = {
    "tie_word_embeddings": False,
    "quantization_config": None,
    "auto_map": None,  # code of the folder's own
    "per_layer_config": None,
    "pruned_heads": None,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
}
_ROTARY_LEFT_OUT = _ANY | {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "hidden_size": 4096,
    "head_dim": None,
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
}

# What no logit of a causal model depends on, by why.
_EVERYWHERE = {
    "notes": "architectures transformers_version _name_or_path name_or_path _commit_hash task_specific_params \
        unsloth_fixed unsloth_version is_llama_config transformers.js_config",
    "lengths, which are the run's": "max_sequence_length model_max_length",
    "ids, which the run's tokenizer has": "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id \
        tokenizer_class prefix",
    "each tensor has a dtype, and is read as float32": "dtype torch_dtype use_bfloat16",
    "all weights are loaded": "initializer_range",
    "what is returned beside logits": "return_dict output_hidden_states output_attentions tie_last_hidden_states \
        use_cache cache_implementation torchscript tf_legacy_loss",
    "how the same is computed": "attn_implementation _attn_implementation _attn_implementation_autoset \
        _attn_implementation_internal _flash_attn_2_enabled experts_implementation chunk_size_feed_forward \
        gradient_checkpointing pretraining_tp xla_device",  # slices of a matmul, one for each of tp, are added up
    "of encoder-decoders": "is_decoder tie_encoder_decoder cross_attention_hidden_size",
    "of classifiers, whose heads are tensors that no run has": "id2label label2id num_labels _num_labels problem_type \
        finetuning_task classifier_dropout",
    "noise of training, of which there is none": "attention_dropout attn_pdrop embd_pdrop resid_pdrop \
        router_jitter_noise",
    "of generation": "assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens \
        diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty \
        epsilon_cutoff eta_cutoff exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id \
        length_penalty max_length min_length no_repeat_ngram_size num_assistant_tokens \
        num_assistant_tokens_schedule num_beam_groups num_beams num_return_sequences output_scores \
        remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens target_lookbehind \
        temperature top_k top_p typical_p",
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
        left_out: what a config.json means that leaves a key out. A key that is no dimension cannot say anything else.
        without_effect: further keys that no logit depends on; tables of positions are as long as sequences.
        aliases: from other names of keys, which transformers reads too, or writes, to those here.
    """

    class_name: str
    model_type: str
    names: Mapping[str, str]
    sizes: Mapping[str, str]
    always: Mapping[str, Any]
    left_out: Mapping[str, Any]
    without_effect: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    groups_heads: bool = True
    is_transposed: bool = False
    norm_offset: float = 0.0
    training: Mapping[str, str] = field(default_factory=dict[str, str])
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def ignored(self) -> set[str]:
        """Keys that no logit depends on."""
        return {*" ".join(_EVERYWHERE.values()).split(), *self.without_effect.split()}


@dataclass(frozen=True)
class Architecture:
    """The facts of one architecture.

    Attributes:
        class_name: in `titanlite/models/<name>.py`, or in `module` there.
        needs: of the keys that only some architectures have, those that its recipes must give.
        may_have: those that they may.
        hub: the layout that Hugging Face has of it.
        module: the file, if several architectures share it.
        splits: whether tensor parallelism has a layout for it: what it computes of heads is of each by itself.
    """

    class_name: str
    needs: tuple[str, ...]
    may_have: tuple[str, ...]
    hub: HubLayout
    module: str = ""
    splits: bool = True


_SWIGLU = {"attention_bias": False, "hidden_act": "silu"}
_LLAMA3 = _SWIGLU | {"mlp_bias": False, "rope_scaling": None}
_BALANCE = {"router_aux_loss_coef": "experts.balance_loss"}
CAP = "final_logit_softcapping"  # null is no cap; 0 would be a division by it
_GEGLU = {"attention_bias": False, "hidden_activation": "gelu_pytorch_tanh"}
ARCHITECTURES = {
    "llama3": Architecture(
        "Llama3",
        ("ffn_dim", "rope_theta"),
        ("rope_scaling",),
        hub=HubLayout(
            "LlamaForCausalLM",
            "llama",
            _ROTARY,
            _ROTARY_SIZES,
            _LLAMA3,
            left_out=_ROTARY_LEFT_OUT
            | {"vocab_size": 32_000, "intermediate_size": 11_008, "hidden_act": "silu", "mlp_bias": False}
            | {"rope_interleaved": False},  # of SmolLM2
            without_effect="max_position_embeddings",
        ),
    ),
    "qwen3": Architecture(
        "Qwen3",
        ("ffn_dim", "rope_theta"),
        ("head_dim",),
        hub=HubLayout(
            "Qwen3ForCausalLM",
            "qwen3",
            _ROTARY,
            _ROTARY_SIZES,
            _SWIGLU | {"use_sliding_window": False},
            left_out=_ROTARY_LEFT_OUT
            | {
                "vocab_size": 151_936,
                "intermediate_size": 22_016,
                "num_key_value_heads": 32,
                "head_dim": 128,
                "hidden_act": "silu",
                "use_sliding_window": False,
                "layer_types": None,
            },
            # As `use_sliding_window` is false.
            without_effect="max_position_embeddings sliding_window max_window_layers",
        ),
    ),
    "gemma3": Architecture(
        "Gemma3",
        ("ffn_dim", "rope_theta", "window", "local_rope_theta", "global_every"),
        ("head_dim",),
        hub=HubLayout(
            "Gemma3ForCausalLM",
            "gemma3_text",
            _GEMMA3,
            _GEMMA3_SIZES,
            _GEGLU | {CAP: None},
            left_out=_ROTARY_LEFT_OUT
            | {
                "vocab_size": 262_208,
                "hidden_size": 2304,
                "intermediate_size": 9216,
                "num_hidden_layers": 26,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "rope_theta": 1_000_000.0,
                "rope_local_base_freq": 10_000.0,
                "tie_word_embeddings": True,
                "hidden_activation": "gelu_pytorch_tanh",
                "query_pre_attn_scalar": 256,
                "sliding_window": 4096,
                "sliding_window_pattern": 6,
                "layer_types": None,
                "use_bidirectional_attention": False,
                "attn_logit_softcapping": None,
                "final_logit_softcapping": None,
            },
            without_effect="max_position_embeddings hidden_act _sliding_window_pattern",
            norm_offset=1.0,
        ),
    ),
    "gpt2": Architecture(
        "GPT2",
        ("ffn_dim", "max_seq_len"),
        (),
        hub=HubLayout(
            "GPT2LMHeadModel",
            "gpt2",
            _GPT2,
            _GPT2_SIZES,
            {"activation_function": "gelu_new", "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
            left_out=_ANY
            | {
                "vocab_size": 50_257,
                "n_positions": 1024,
                "n_embd": 768,
                "n_layer": 12,
                "n_head": 12,
                "n_inner": None,
                "layer_norm_epsilon": 1e-5,
                "activation_function": "gelu_new",
                "tie_word_embeddings": True,
                "scale_attn_weights": True,
                "scale_attn_by_inverse_layer_idx": False,
            },
            # `reorder_and_upcast_attn` is about the order and dtype of the same sums.
            without_effect="reorder_and_upcast_attn n_ctx output_past predict_special_tokens summary_type \
                summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout",
            aliases={
                "hidden_size": "n_embd",
                "max_position_embeddings": "n_positions",
                "num_attention_heads": "n_head",
                "num_hidden_layers": "n_layer",
            },
            groups_heads=False,
            is_transposed=True,
        ),
    ),
    "qwen3_moe": Architecture(
        "Qwen3MoE",
        ("rope_theta", "experts"),
        ("head_dim",),
        hub=HubLayout(
            "Qwen3MoeForCausalLM",
            "qwen3_moe",
            _MOE,
            _QWEN3_MOE_SIZES,
            _SWIGLU | {"use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
            left_out=_ROTARY_LEFT_OUT
            | {
                "vocab_size": 151_936,
                "hidden_size": 2048,
                "num_hidden_layers": 24,
                "num_key_value_heads": 4,
                "hidden_act": "silu",
                "use_sliding_window": False,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 768,
                "norm_topk_prob": False,
                "router_aux_loss_coef": 0.001,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            },
            # No layer is dense, so that nothing has the width of `intermediate_size`.
            without_effect="max_position_embeddings sliding_window max_window_layers intermediate_size \
                output_router_logits",
            aliases={"num_local_experts": "num_experts"},
            training=_BALANCE,
        ),
        module="moe",
    ),
    "olmoe": Architecture(
        "OLMoE",
        ("rope_theta", "experts"),
        (),
        hub=HubLayout(
            "OlmoeForCausalLM",
            "olmoe",
            _MOE,
            _OLMOE_SIZES,
            _SWIGLU | {"clip_qkv": None},
            left_out=_ROTARY_LEFT_OUT
            | {
                "vocab_size": 50_304,
                "hidden_size": 2048,
                "intermediate_size": 2048,
                "num_hidden_layers": 16,
                "num_attention_heads": 16,
                "rms_norm_eps": 1e-5,
                "hidden_act": "silu",
                "clip_qkv": None,
                "num_experts": 64,
                "num_experts_per_tok": 8,
                "norm_topk_prob": False,
                "router_aux_loss_coef": 0.01,
            },
            without_effect="max_position_embeddings output_router_logits",
            aliases={"num_local_experts": "num_experts"},
            training=_BALANCE,
        ),
        module="moe",
        splits=False,
    ),
    "mixtral": Architecture(
        "Mixtral",
        ("rope_theta", "experts"),
        (),
        hub=HubLayout(
            "MixtralForCausalLM",
            "mixtral",
            _MIXTRAL,
            _MIXTRAL_SIZES,
            {"hidden_act": "silu", "sliding_window": None},
            left_out={key: value for key, value in _ROTARY_LEFT_OUT.items() if key != "attention_bias"}
            | {
                "vocab_size": 32_000,
                "intermediate_size": 14_336,
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-5,
                "rope_theta": 1_000_000.0,
                "hidden_act": "silu",
                "sliding_window": None,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
                "router_aux_loss_coef": 0.001,
            },
            without_effect="max_position_embeddings output_router_logits",
            aliases={"num_experts": "num_local_experts"},
            training=_BALANCE,
            fixed={"experts.score": "softmax_of_chosen"},
        ),
        module="moe",
    ),
}
