"""Decide on every key of a given config.json: it is used, refused, or provably without effect.

Made from the classes of transformers 5.24, what its model code reads, and what older releases wrote. `LEFT_OUT` has the
keys that logits depend on. A key that is a dimension in `hugging_face.py` is used; any other must say what stands here,
or is refused. `WITHOUT_EFFECT` has the rest. A key of neither is refused, because it may change the model.
"""

from typing import Any

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
_ROTARY = _ANY | {
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
LEFT_OUT: dict[str, dict[str, Any]] = {
    "llama3": _ROTARY
    | {"vocab_size": 32_000, "intermediate_size": 11_008, "hidden_act": "silu", "mlp_bias": False}
    | {"rope_interleaved": False},  # of SmolLM2
    "qwen3": _ROTARY
    | {
        "vocab_size": 151_936,
        "intermediate_size": 22_016,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "hidden_act": "silu",
        "use_sliding_window": False,
        "layer_types": None,
    },
    "gemma3": _ROTARY
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
    "qwen3_moe": _ROTARY
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
    "olmoe": _ROTARY
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
    "mixtral": {key: value for key, value in _ROTARY.items() if key != "attention_bias"}
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
    "gpt2": _ANY
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
}
# Other names of keys, which transformers reads too, or writes.
ALIASES = {
    "gpt2": {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    "qwen3_moe": {"num_local_experts": "num_experts"},
    "olmoe": {"num_local_experts": "num_experts"},
    "mixtral": {"num_experts": "num_local_experts"},
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
    "dropout, which titanlite has not": "attention_dropout attn_pdrop embd_pdrop resid_pdrop router_jitter_noise",
    "of generation": "assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens \
        diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty \
        epsilon_cutoff eta_cutoff exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id \
        length_penalty max_length min_length no_repeat_ngram_size num_assistant_tokens \
        num_assistant_tokens_schedule num_beam_groups num_beams num_return_sequences output_scores \
        remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens target_lookbehind \
        temperature top_k top_p typical_p",
}
_OF_ONE = {
    # Tables of positions are as long as sequences.
    "llama3": "max_position_embeddings",
    "qwen3": "max_position_embeddings sliding_window max_window_layers",  # as `use_sliding_window` is false
    "gemma3": "max_position_embeddings hidden_act _sliding_window_pattern",
    # No layer is dense, so that nothing has the width of `intermediate_size`.
    "qwen3_moe": "max_position_embeddings sliding_window max_window_layers intermediate_size output_router_logits",
    "olmoe": "max_position_embeddings output_router_logits",
    "mixtral": "max_position_embeddings output_router_logits",
    # `reorder_and_upcast_attn` is about the order and dtype of the same sums.
    "gpt2": "reorder_and_upcast_attn n_ctx output_past predict_special_tokens summary_type summary_use_proj \
        summary_activation summary_proj_to_labels summary_first_dropout",
}
WITHOUT_EFFECT = {name: {*" ".join(_EVERYWHERE.values()).split(), *own.split()} for name, own in _OF_ONE.items()}
