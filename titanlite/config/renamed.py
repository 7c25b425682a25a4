"""Keys and values of torchtitan's last TOML release (v0.2) that are none here, and what to write instead.

Its users come with files full of these, so the error names the replacement. A section stands for all its keys. What
they set in the environment is told, too.
"""

import os

from titanlite.config.schema import Config

_NEVER = "remove it; titanlite has no"

_REPLACEMENT: dict[str, str] = {
    "job.config_file": "name the file with --config FILE",
    "job.description": "use job.name",
    "job.print_config": "remove it; the resolved config is in <dump_folder>/<name>/config.toml",
    "job.save_config_file": "remove it; the resolved config is in <dump_folder>/<name>/config.toml",
    "job.print_args": "remove it; the resolved config is in <dump_folder>/<name>/config.toml",
    "job.custom_config_module": f"{_NEVER} custom config module",
    "model.tokenizer_path": "use data.tokenizer",
    "model.hf_assets_path": "use data.tokenizer (the path of a tokenizer.json)",
    "model.converters": "set float8.recipe; there is no list of converters",
    "model.print_after_conversion": "remove it; receipt.json says what was converted",
    "optimizer.implementation": "remove it; AdamW is always fused",
    "optimizer.early_step_in_backward": f"{_NEVER} optimizer step inside backward",
    "lr_scheduler.lr_min": "use lr_scheduler.min_lr_factor (a share of the peak)",
    "lr_scheduler.total_steps": "use training.steps, and job.stop_after for the step to end at",
    "training.dataloader": "remove it; batches are read ahead from memory-mapped token shards, without workers",
    "training.dataset": "use data.source (hf:<dataset>, a path, or python_stdlib)",
    "training.dataset_path": "use data.source",
    "training.batch_size": "use training.local_batch_size",
    "training.tensor_parallel_degree": "use parallelism.tensor_parallel_degree",
    "training.data_parallel_degree": "use parallelism.data_parallel_shard_degree",
    "training.compile": "use compile.enable",
    "training.dtype": "remove it; master weights are float32. Compute is training.mixed_precision_param",
    "training.gc_freq": "remove it; garbage collection is not configurable",
    "training.gc_debug": "remove it; garbage collection is not configurable",
    "training.enable_cpu_offload": f"{_NEVER} CPU offload",
    "training.warmup_steps": "use lr_scheduler.warmup_steps",
    "debug": "use training.seed and training.deterministic",
    "parallelism.enable_async_tensor_parallel": "use parallelism.async_tensor_parallel",
    "parallelism.disable_loss_parallel": "remove it; the loss is always parallel over the vocabulary",
    "parallelism.enable_compiled_autograd": f"{_NEVER} compiled autograd",
    "parallelism.context_parallel_degree": f"{_NEVER} context parallelism",
    "parallelism.context_parallel_load_balancer": f"{_NEVER} context parallelism",
    "parallelism.context_parallel_rotate_method": f"{_NEVER} context parallelism",
    "parallelism.pipeline_parallel_degree": f"{_NEVER} pipeline parallelism",
    "parallelism.pipeline_parallel_split_points": f"{_NEVER} pipeline parallelism",
    "parallelism.pipeline_parallel_layers_per_stage": f"{_NEVER} pipeline parallelism",
    "parallelism.pipeline_parallel_first_stage_less_layers": f"{_NEVER} pipeline parallelism",
    "parallelism.pipeline_parallel_last_stage_less_layers": f"{_NEVER} pipeline parallelism",
    "parallelism.pipeline_parallel_schedule": f"{_NEVER} pipeline parallelism",
    "parallelism.pipeline_parallel_schedule_csv": f"{_NEVER} pipeline parallelism",
    "parallelism.pipeline_parallel_microbatch_size": f"{_NEVER} pipeline parallelism",
    "parallelism.pipeline_parallel_expert_parallel_overlap": f"{_NEVER} pipeline parallelism",
    "parallelism.module_fqns_per_model_part": f"{_NEVER} pipeline parallelism",
    "parallelism.expert_parallel_degree": f"{_NEVER} mixture of experts",
    "parallelism.expert_tensor_parallel_degree": f"{_NEVER} mixture of experts",
    "parallelism.expert_parallel_comm_backend": f"{_NEVER} mixture of experts",
    "activation_checkpoint.mode": 'use activation_checkpoint.recipe ("none", "full" or the name of a save-list)',
    "activation_checkpoint.selective_ac_option": 'use activation_checkpoint.recipe (for "op": "every_second_matmul")',
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": "write a save-list whose rules name modules",
    "activation_checkpoint.memory_budget": 'use activation_checkpoint.recipe = "auto" with budget_gib (in GiB)',
    "activation_checkpoint.visualize_memory_budget_pareto": "remove it; titanlite plan FILE --activation-checkpoint "
    "--world N prints what each save-list holds and recomputes",
    "activation_checkpoint.determinism_check": f"{_NEVER} choice of determinism checks",
    "activation_checkpoint.debug": f"{_NEVER} debug mode of checkpointing",
    "activation_checkpoint.early_stop": "remove it; recomputation always stops early",
    "activation_checkpoint.preserve_rng_state": "remove it; recomputation always restores the RNG state",
    "float8.recipe_name": "use float8.recipe",
    "float8.enable_fsdp_float8_all_gather": "remove it; the float8 recipe sets it (fsdp_all_gather)",
    "float8.precompute_float8_dynamic_scale_for_fsdp": "remove it; fsdp_all_gather in the float8 recipe includes it",
    "float8.force_recompute_fp8_weight_in_bwd": f"{_NEVER} recomputation of float8 weights",
    "float8.moe_fqns_prototype": f"{_NEVER} mixture of experts",
    "float8.emulate": "remove it; a device without float8 emulates it, and receipt.json says so",
    "quantize": "use float8.recipe and float8.filter_fqns",
    "mx": 'use float8.recipe = "mxfp8", which is emulated',
    "compile.components": "remove it; compile.enable compiles the blocks and the loss",
    "compile.backend": "remove it; the back end is inductor",
    "checkpoint.enable_checkpoint": "use checkpoint.enable",
    "checkpoint.enable_ft_dataloader_checkpoints": "remove it; every checkpoint has the position in the data",
    "checkpoint.folder": "remove it; checkpoints are in <job.dump_folder>/<job.name>/checkpoints",
    "checkpoint.load_step": "use checkpoint.resume (auto, never, or a step)",
    "checkpoint.create_seed_checkpoint": "remove it; the same seed gives the same weights under any layout",
    "checkpoint.interval_type": "remove it; checkpoint.interval counts steps",
    "checkpoint.initial_load_model_only": "remove it; only weights are loaded from checkpoint.initial_load_path",
    "checkpoint.initial_load_in_hf": "remove it; checkpoint.initial_load_path is always in Hugging Face's layout",
    "checkpoint.initial_load_in_hf_quantized": f"{_NEVER} start from quantized weights",
    "checkpoint.exclude_from_loading": "remove it; a checkpoint is loaded whole",
    "checkpoint.load_only": "remove it; a run that resumes also saves",
    "checkpoint.enable_first_step_checkpoint": "remove it; to try saving, set job.stop_after = 1",
    "checkpoint.last_save_model_only": "remove it; every checkpoint is complete, including the last",
    "checkpoint.last_save_in_hf": "remove it; titanlite export RUN writes a checkpoint in Hugging Face's layout",
    "checkpoint.export_dtype": "remove it; checkpoints are in float32. titanlite export RUN --dtype converts them",
    "metrics.enable_wandb": 'use metrics.wandb ("off", "offline" or "online")',
    "metrics.enable_tensorboard": "remove it; use metrics.wandb, or metrics.jsonl of the run folder",
    "metrics.disable_color_printing": "set the environment variable NO_COLOR=1",
    "metrics.save_tb_folder": "remove it; metrics are in <dump_folder>/<name>/metrics.jsonl",
    "metrics.save_for_all_ranks": "remove it; metrics are global",
    "profiling.enable_profiling": "use profiling.enable",
    "profiling.save_traces_folder": "remove it; traces are in <dump_folder>/<name>/profile",
    "profiling.profile_freq": "use profiling.start_step and profiling.steps",
    "profiling.enable_memory_snapshot": f"{_NEVER} memory snapshots",
    "profiling.save_memory_snapshot_folder": f"{_NEVER} memory snapshots",
    "profiling.profiler_active": "use profiling.steps",
    "profiling.profiler_warmup": "use profiling.start_step",
    "validation.enabled": "use validation.enable",
    "validation.dataset": "use validation.source",
    "validation.dataset_path": "use validation.source",
    "validation.local_batch_size": "remove it; validation uses training.local_batch_size",
    "validation.dataloader": "remove it; batches are read from memory-mapped token shards, without workers",
    "validation.seq_len": "remove it; validation uses training.seq_len",
    "comm.trace_buf_size": "set the environment variable TORCH_FR_BUFFER_SIZE",
    "comm.save_traces_folder": "set the environment variable TORCH_FR_DUMP_TEMP_FILE",
    "comm.save_traces_file_prefix": "set the environment variable TORCH_FR_DUMP_TEMP_FILE",
    "comm.mode": "remove it; titanlite plan FILE --world N needs no GPUs",
    "experimental": f"{_NEVER} experimental section",
    "fault_tolerance": f"{_NEVER} torchft; restart with torchrun --max-restarts",
    "memory_estimation": "remove it; titanlite plan FILE --world N prints the memory of a run",
}


_VALUE: dict[str, dict[object, str]] = {
    "activation_checkpoint.mode": {
        "none": 'use activation_checkpoint.recipe = "none"',
        "full": 'use activation_checkpoint.recipe = "full"',
        "selective": 'use activation_checkpoint.recipe = "every_second_matmul"',
        "memory_budget": 'use activation_checkpoint.recipe = "auto" with budget_gib (in GiB)',
    },
    "checkpoint.async_mode": {"async_with_pinned_mem": 'async_mode = "async"'},
}


OLD_FLOAT8_RECIPES = {
    "all_tensorwise": "tensorwise",
    "all_axiswise": "rowwise",
    "lw_axiswise_with_gw_hp": "rowwise_with_gw_hp",
}
"""What torchao and torchtitan called recipes of the same arithmetic in earlier releases."""


def replacement(key: str, value: object = None) -> str | None:
    """Say what to write instead of a dotted key of torchtitan, or of a value of it, or None if it is none of them."""
    if isinstance(value, str) and value in _VALUE.get(key, {}):
        return _VALUE[key][value]
    while key:
        if key in _REPLACEMENT:
            return _REPLACEMENT[key]
        key = key.rpartition(".")[0]
    return None


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
