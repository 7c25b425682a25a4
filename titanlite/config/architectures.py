"""Describe each shipped architecture without importing its model file: its class, the keys of its recipes, and Hugging
Face's names and layout of its weights and dimensions.

A layer of titanlite that fuses several weights corresponds to several layers of Hugging Face's model. Only GPT-2's
queries, keys and values are fused there, too, but in another order. The keys of config.json are those that the model
code of transformers 5.24 reads, and those that older releases wrote. A `Field` with a dimension gives the recipe its
value. Any other `Field` must have the value listed here. An unknown key is refused, because it may change the model.
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


@dataclass(frozen=True)
class Field:
    """A key of config.json. A key that gives no dimension must have the value `left_out`."""

    left_out: Any = None  # value of a missing key; None for a dimension: required, or derived from other keys
    ours: str = ""  # the dimension that the key gives, as a dotted attribute of a recipe; "": none
    is_written: bool = False  # whether an export writes the key although it gives no dimension


_ANY = {
    "vocab_size": Field(ours="vocab_size"),
    "tie_word_embeddings": Field(False, "tied_embeddings"),
    "quantization_config": Field(),
    "auto_map": Field(),  # Python code in the folder
    "per_layer_config": Field(),
    "pruned_heads": Field(),
    "is_encoder_decoder": Field(False),
    "add_cross_attention": Field(False),
}
_SILU = {"hidden_act": Field("silu", is_written=True)}
_ROTARY_FIELDS = _ANY | {
    "hidden_size": Field(ours="dim"),
    "intermediate_size": Field(ours="ffn_dim"),
    "num_hidden_layers": Field(ours="n_layers"),
    "num_attention_heads": Field(ours="n_heads"),
    "num_key_value_heads": Field(ours="n_kv_heads"),
    "head_dim": Field(ours="head_width"),
    "rms_norm_eps": Field(1e-6, "norm_eps"),
    "rope_theta": Field(10_000.0, "rope_theta"),
    "rope_scaling": Field(),
    "attention_bias": Field(False, is_written=True),
}
_LLAMA3_FIELDS = {
    **_ROTARY_FIELDS,
    **_SILU,
    "mlp_bias": Field(False, is_written=True),
    "rope_scaling": Field(is_written=True),
    "rope_interleaved": Field(False),  # in the config.json of SmolLM2
}
_NO_WINDOW = {"use_sliding_window": Field(False, is_written=True)}
_QWEN3_FIELDS = _ROTARY_FIELDS | _SILU | _NO_WINDOW | {"head_dim": Field(128, "head_width"), "layer_types": Field()}
CAP = "final_logit_softcapping"  # null means no cap; with 0, transformers would divide by 0
_GEMMA3_FIELDS = _ROTARY_FIELDS | {
    "head_dim": Field(256, "head_width"),
    "rope_theta": Field(1_000_000.0, "rope_theta"),
    "rope_local_base_freq": Field(10_000.0, "local_rope_theta"),
    "tie_word_embeddings": Field(True, "tied_embeddings"),
    "hidden_activation": Field("gelu_pytorch_tanh", is_written=True),
    "query_pre_attn_scalar": Field(256, "head_width"),
    "sliding_window": Field(4096, "window"),
    "sliding_window_pattern": Field(6, "global_every"),
    "layer_types": Field(),
    "use_bidirectional_attention": Field(False),
    "attn_logit_softcapping": Field(),
    CAP: Field(ours="logit_softcap"),
}
_GPT2_FIELDS = _ANY | {
    "n_positions": Field(ours="max_seq_len"),
    "n_embd": Field(ours="dim"),
    "n_layer": Field(ours="n_layers"),
    "n_head": Field(ours="n_heads"),
    "n_inner": Field(ours="ffn_dim"),
    "layer_norm_epsilon": Field(1e-5, "norm_eps"),
    "activation_function": Field("gelu_new", is_written=True),
    "tie_word_embeddings": Field(True, "tied_embeddings"),
    "scale_attn_weights": Field(True),
    "scale_attn_by_inverse_layer_idx": Field(False),
    # Dropout. It is ignored when a folder is read, and exported as 0, since the defaults of transformers are not 0.
    "attn_pdrop": Field(0.0, is_written=True),
    "embd_pdrop": Field(0.0, is_written=True),
    "resid_pdrop": Field(0.0, is_written=True),
}
_EXPERTS_FIELDS = {
    **{key: of for key, of in _ROTARY_FIELDS.items() if key != "intermediate_size"},
    **_SILU,
    "num_experts_per_tok": Field(ours="experts.top_k"),
    "router_aux_loss_coef": Field(0.001, "experts.balance_loss"),
}
_QWEN3_MOE_FIELDS = {
    **_EXPERTS_FIELDS,
    **_NO_WINDOW,
    "num_experts": Field(ours="experts.n_experts"),
    "moe_intermediate_size": Field(ours="experts.ffn_dim"),
    "norm_topk_prob": Field(False, "experts.normalised"),
    "decoder_sparse_step": Field(1, is_written=True),
    "mlp_only_layers": Field([], is_written=True),
}
_OLMOE_FIELDS = _EXPERTS_FIELDS | {
    "num_experts": Field(ours="experts.n_experts"),
    "intermediate_size": Field(ours="experts.ffn_dim"),
    "rms_norm_eps": Field(1e-5, "norm_eps"),
    "norm_topk_prob": Field(False, "experts.normalised"),
    "router_aux_loss_coef": Field(0.01, "experts.balance_loss"),
    "clip_qkv": Field(is_written=True),
}
_MIXTRAL_FIELDS = _EXPERTS_FIELDS | {
    "num_local_experts": Field(ours="experts.n_experts"),
    "intermediate_size": Field(ours="experts.ffn_dim"),
    "rms_norm_eps": Field(1e-5, "norm_eps"),
    "rope_theta": Field(1_000_000.0, "rope_theta"),
    "attention_bias": Field(False),
    "sliding_window": Field(is_written=True),
}

# Keys on which no logit of a causal model depends, by reason.
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
        gradient_checkpointing pretraining_tp xla_device",  # pretraining_tp: computes matmuls in slices
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


_OF_SOME = ("ffn_dim", "rope_theta", "window", "local_rope_theta", "global_every", "max_seq_len", "experts")


@dataclass(frozen=True)
class Architecture:
    """One shipped architecture, and how Hugging Face stores its weights and dimensions."""

    class_name: str  # class of the model in `titanlite/models/<name>.py` or, with `module`, `<module>.py`
    hub_class: str  # class of transformers that computes the same
    model_type: str  # value of `model_type` in config.json
    names: Mapping[str, str]  # our layer, unfused → Hugging Face's; layers with the same target are joined by rows
    fields: Mapping[str, Field]  # by key of config.json
    without_effect: str  # further keys of config.json on which no logit depends, separated by blanks
    may_have: tuple[str, ...] = ()  # optional keys of its recipes that not every architecture has
    module: str = ""  # name of the file, without .py, if several architectures share it
    splits: bool = True  # whether tensor parallelism can split it; not if a norm spans several heads
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])  # other name of a key → name in `fields`
    is_transposed: bool = False  # whether Hugging Face stores the matrices of linear layers in blocks as [in, out]
    norm_offset: float = 0.0  # number that Hugging Face's norms add to their weight
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])  # attributes of every recipe, not in config.json

    @property
    def needs(self) -> tuple[str, ...]:
        """Keys that its recipes must give, of those that not every architecture has."""
        has = {of.ours.partition(".")[0] for of in self.fields.values()}
        return tuple(key for key in _OF_SOME if key in has)

    @property
    def ignored(self) -> set[str]:
        """Keys of config.json on which no logit depends."""
        return {*" ".join(_EVERYWHERE.values()).split(), *self.without_effect.split()}


_LENGTH = "max_position_embeddings"  # without effect on rotary positions: their tables are as long as sequences
ARCHITECTURES = {
    "llama3": Architecture("Llama3", "LlamaForCausalLM", "llama", _ROTARY, _LLAMA3_FIELDS, _LENGTH, ("rope_scaling",)),
    "qwen3": Architecture(
        *("Qwen3", "Qwen3ForCausalLM", "qwen3", _ROTARY, _QWEN3_FIELDS),
        f"{_LENGTH} sliding_window max_window_layers",  # no effect, as `use_sliding_window` must be false
        ("head_dim",),
    ),
    "gemma3": Architecture(
        *("Gemma3", "Gemma3ForCausalLM", "gemma3_text", _GEMMA3, _GEMMA3_FIELDS),
        f"{_LENGTH} hidden_act _sliding_window_pattern",
        ("head_dim",),
        norm_offset=1.0,
    ),
    "gpt2": Architecture(
        *("GPT2", "GPT2LMHeadModel", "gpt2", _GPT2, _GPT2_FIELDS),
        # `reorder_and_upcast_attn` changes only the order and dtype of sums.
        "reorder_and_upcast_attn n_ctx output_past predict_special_tokens summary_type \
            summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout",
        aliases={
            "hidden_size": "n_embd",
            _LENGTH: "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        is_transposed=True,
    ),
    "qwen3_moe": Architecture(
        *("Qwen3MoE", "Qwen3MoeForCausalLM", "qwen3_moe", _MOE, _QWEN3_MOE_FIELDS),
        # No layer is dense, so that nothing has the width `intermediate_size`.
        f"{_LENGTH} sliding_window max_window_layers intermediate_size output_router_logits",
        ("head_dim",),
        module="moe",
        aliases={"num_local_experts": "num_experts"},
    ),
    "olmoe": Architecture(
        *("OLMoE", "OlmoeForCausalLM", "olmoe", _MOE, _OLMOE_FIELDS, f"{_LENGTH} output_router_logits"),
        module="moe",
        splits=False,
        aliases={"num_local_experts": "num_experts"},
    ),
    "mixtral": Architecture(
        *("Mixtral", "MixtralForCausalLM", "mixtral", _MIXTRAL, _MIXTRAL_FIELDS, f"{_LENGTH} output_router_logits"),
        module="moe",
        aliases={"num_experts": "num_local_experts"},
        fixed={"experts.score": "softmax_of_chosen"},
    ),
}
