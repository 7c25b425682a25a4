"""Answer a single key or value that torchtitan's TOML releases, or other trainers, name otherwise.

`torchtitan.py` has the keys of its last one, and `port.py` what depends on a whole file. Here are keys of earlier
releases besides, the commonest names of other trainers, and values that are none here. What is set in the environment
is reported, too.
"""

import os

from titanlite.config.port import TorchtitanConfig, answer_to_value
from titanlite.config.problems import show
from titanlite.config.schema import Config
from titanlite.config.torchtitan import KEYS

_OLDER: dict[str, str] = {
    "job.print_args": "remove it; the resolved config is in <dump_folder>/<name>/config.toml",
    "lr_scheduler.lr_min": "use lr_scheduler.min_lr_factor (a share of the peak)",
    "training.dataloader": "remove it; batches are read ahead from token shards, without workers",
    "training.batch_size": "use training.local_batch_size = {}",
    "training.tensor_parallel_degree": "use parallelism.tensor_parallel_degree = {}",
    "training.data_parallel_degree": "use parallelism.data_parallel_shard_degree = {}",
    "training.compile": "use compile.enable = {}",
    "training.warmup_steps": "use lr_scheduler.warmup_steps = {}",
    "debug": "use training.seed and training.deterministic",
    "parallelism.enable_compiled_autograd": "remove it; titanlite has no compiled autograd",
    "parallelism.pipeline_parallel_split_points": "remove it; titanlite has no pipeline parallelism",
    "float8.recipe_name": "use float8.recipe = {}",
    "float8.enable_fsdp_float8_all_gather": "remove it; the float8 recipe sets it (fsdp_all_gather)",
    "float8.precompute_float8_dynamic_scale_for_fsdp": "remove it; fsdp_all_gather in the float8 recipe includes it",
    "float8.force_recompute_fp8_weight_in_bwd": "remove it; titanlite has no recomputation of float8 weights",
    "float8.moe_fqns_prototype": "remove it; experts compute in float8 where float8.recipe has scales by row",
    "float8.emulate": "remove it; a device without float8 emulates it, and receipt.json says so",
    "quantize": "use float8.recipe and float8.filter_fqns",
    "mx": 'use float8.recipe = "mxfp8", which is emulated',
    "checkpoint.enable_checkpoint": "use checkpoint.enable = {}",
    "checkpoint.interval_type": "remove it; checkpoint.interval counts steps",
    "experimental": "remove it; titanlite has no experimental section",
    "fault_tolerance": "remove it; titanlite has no torchft: restart with torchrun --max-restarts",
    "memory_estimation": "remove it; titanlite plan FILE --world N prints the memory of a run",
    "validation.enabled": "use validation.enable = {}",
    "validation.dataloader": "remove it; batches are read from token shards, without workers",
}
"""Keys of earlier releases, and sections that have others."""

_ELSEWHERE = {
    "optimizer.lr": "learning_rate max_lr peak_lr base_lr",
    "optimizer.beta1": "adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer.eps": "adam_eps adam_epsilon epsilon",
    "optimizer.weight_decay": "wd",
    "lr_scheduler.warmup_steps": "warmup warmup_iters num_warmup_steps lr_warmup_steps lr_warmup_iters warmup_ratio",
    "lr_scheduler.decay_type": "lr_scheduler_type lr_decay_style",
    "lr_scheduler.min_lr_factor (a share of the peak)": "min_lr lr_min",
    "training.steps": "max_steps max_iters train_iters train_steps num_steps num_train_steps num_iterations",
    "training.steps or training.tokens": "epochs num_epochs num_train_epochs max_epochs",
    "training.seq_len": "seq_length sequence_length max_seq_length max_length block_size context_length",
    "training.local_batch_size": "micro_batch_size device_batch_size per_device_train_batch_size",
    "training.local_batch_size or training.global_batch_size": "batch_size",
    "training.global_batch_size": "train_batch_size total_batch_size gradient_accumulation_steps grad_accum_steps",
    "training.max_norm": "grad_clip clip_grad max_grad_norm clip_grad_norm gradient_clipping gradient_clip_val",
    "training.mixed_precision_param": "dtype precision mixed_precision bf16",
    "model.n_layers": "num_layers n_layer num_hidden_layers",
    "model.dim": "hidden_size d_model n_embd",
    "model.n_heads": "num_heads n_head num_attention_heads",
    "model.n_kv_heads": "num_kv_heads num_key_value_heads num_query_groups",
    "model.ffn_dim": "intermediate_size ffn_hidden_size d_ff",
    "data.source": "dataset dataset_name data_path train_data",
    "data.tokenizer": "tokenizer_name tokenizer_path",
    "parallelism.tensor_parallel_degree": "tensor_parallel_size tensor_model_parallel_size",
    "checkpoint.interval": "save_steps save_interval save_every",
    "checkpoint.keep_latest_k": "save_total_limit",
    "validation.freq": "eval_steps eval_interval eval_every",
    "metrics.log_freq": "log_interval logging_steps log_every",
    "job.dump_folder": "output_dir out_dir",
    "job.name": "run_name",
    "activation_checkpoint.recipe": "gradient_checkpointing",
}
SYNONYMS = {name: ours for ours, names in _ELSEWHERE.items() for name in names.split()}
"""Keys of other trainers, whatever their section, and what they are here."""

OLD_FLOAT8_RECIPES = {
    "all_tensorwise": "tensorwise",
    "all_axiswise": "rowwise",
    "lw_axiswise_with_gw_hp": "rowwise_with_gw_hp",
}
"""Names that torchao and torchtitan gave recipes of the same arithmetic in earlier releases."""


def replacement(key: str, value: object = None) -> str | None:
    """Say what to write instead of a dotted key of torchtitan, or of a value of it, or None if it is none of them."""
    if of_value := answer_to_value(key, value):
        return of_value
    _, text = KEYS.get(key, (None, None))
    if text and value is not None:
        return TorchtitanConfig(
            {key: [value] if key == "model.converters" and isinstance(value, str) else value}
        ).answer(key)
    while key and not text:
        text, key = _OLDER.get(key), key.rpartition(".")[0]
    return text and text.replace(" = {}", "" if value is None else f" = {show(value)}")


def unread_environment(config: Config) -> tuple[str, ...]:
    """Name variables that torchtitan or wandb would read, where the config, which counts, says another value."""
    says = {
        "WANDB_PROJECT": ("metrics.wandb_project", config.metrics.wandb_project),
        "WANDB_MODE": ("metrics.wandb", config.metrics.wandb),
        "WANDB_NAME": ("job.name", config.job.name),
        "WANDB_RUN_NAME": ("job.name", config.job.name),
    }
    if config.metrics.wandb == "off":
        return ()
    return tuple(
        f'{name}={given} of the environment is not used; {key} = "{value}" is'
        for name, (key, value) in says.items()
        if (given := os.environ.get(name, value)) != value
    )
