"""List the keys of torchtitan v0.2.2, the last release configured in TOML: key → (torchtitan's default, answer).

An answer begins with "use " and names titanlite's counterpart as `section.key = value`, where `{}` is the given value,
or it says why to remove the key. It is None if only the default differs. A key with the same name and default in
titanlite is left out. Answers that depend on other keys are in `torchtitan_config.py`. A test compares
`docs/coming_from_torchtitan.md` with this file.
"""

import re
from typing import Any

from titanlite.config.problems import show

_CONFIG = "the resolved config is in <dump_folder>/<name>/config.toml"
_PIPELINE = "titanlite has no pipeline parallelism: split the model with parallelism.tensor_parallel_degree"
_CONTEXT = "tokens are shared out by what they attend to, and the keys that they see are gathered"
_EXPERTS = "parallelism.expert_parallel_degree alone says where experts are, and tokens travel by NCCL"
_GROUPED = "experts compute in float8 where float8.recipe has scales by row, but for what float8.filter_fqns names"
_MEMORY = "titanlite has no memory snapshots"
_LOADER = "batches are read ahead from token shards, without workers"
_NO_MX = 'use float8.recipe = "rowwise"; titanlite has no mxfp8'
_RECIPE = "the float8 recipe sets it (fsdp_all_gather)"
_FLIGHT = "set the environment variable"
_TORCHFT = "titanlite has no torchft: restart with torchrun --max-restarts"
_PLAN = "titanlite plan FILE --world N prints the memory of a run, and needs no GPU"
_GARBAGE = "garbage collection is not configurable"

KEYS: dict[str, tuple[Any, str | None]] = {
    "job.config_file": (None, "the file is named on the command line, as --config FILE"),
    "job.description": ("default job", "it is shown nowhere. job.name names the run and its folder"),
    "job.print_config": (False, _CONFIG),
    "job.save_config_file": (None, _CONFIG),
    "job.custom_config_module": ("", "titanlite has no custom config module"),
    "profiling.enable_profiling": (False, "use profiling.enable = {}"),
    "profiling.save_traces_folder": ("profile_traces", "traces are in <dump_folder>/<name>/profile"),
    "profiling.profile_freq": (10, "use profiling.start_step = {}; there is one trace"),
    "profiling.profiler_active": (1, "use profiling.steps = {}"),
    "profiling.profiler_warmup": (3, "the trace needs no warm-up"),
    "profiling.enable_memory_snapshot": (False, _MEMORY),
    "profiling.save_memory_snapshot_folder": ("memory_snapshot", _MEMORY),
    "metrics.log_freq": (10, None),
    "metrics.enable_tensorboard": (False, "use metrics.tensorboard = {}"),
    "metrics.disable_color_printing": (False, "set the environment variable NO_COLOR=1"),
    "metrics.save_tb_folder": ("tb", "the files are in <dump_folder>/<name>/tensorboard"),
    "metrics.save_for_all_ranks": (False, "metrics are global"),
    "metrics.enable_wandb": (False, 'use metrics.wandb = "online"'),
    "model.flavor": ("debugmodel", None),
    "model.hf_assets_path": ("./tests/assets/tokenizer", "use data.tokenizer = {}"),
    "model.tokenizer_path": (None, "use data.tokenizer = {}"),
    "model.converters": ([], "titanlite has no converters but the recipes of float8.recipe"),
    "model.print_after_conversion": (False, "receipt.json says what was converted"),
    "optimizer.name": ("AdamW", 'use optimizer.recipe = "adamw"'),
    "optimizer.lr": (8e-4, None),
    "optimizer.implementation": ("fused", "AdamW is always fused"),
    "optimizer.early_step_in_backward": (False, "titanlite has no optimizer step inside backward"),
    "lr_scheduler.total_steps": (None, "use training.steps = {}"),
    "lr_scheduler.decay_type": ("linear", None),
    "lr_scheduler.min_lr_factor": (0.0, None),
    "training.dataset": ("c4_test", "use data.source (a path, or hf:<dataset>)"),
    "training.dataset_path": (None, "use data.source = {}"),
    "training.local_batch_size": (8, None),
    "training.global_batch_size": (-1, None),
    "training.enable_cpu_offload": (False, "titanlite has no CPU offload"),
    "training.dtype": ("float32", "master weights are float32. Compute is training.mixed_precision_param"),
    "parallelism.disable_loss_parallel": (False, "the loss is always parallel over the vocabulary"),
    "parallelism.enable_async_tensor_parallel": (False, "use parallelism.async_tensor_parallel = {}"),
    "parallelism.pipeline_parallel_degree": (1, _PIPELINE),
    "parallelism.module_fqns_per_model_part": (None, _PIPELINE),
    "parallelism.context_parallel_load_balancer": ("headtail", _CONTEXT),
    "parallelism.context_parallel_rotate_method": ("allgather", _CONTEXT),
    "parallelism.expert_tensor_parallel_degree": (1, _EXPERTS),
    "parallelism.expert_parallel_comm_backend": ("standard", _EXPERTS),
    "checkpoint.enable": (False, None),
    "checkpoint.enable_ft_dataloader_checkpoints": (True, "every checkpoint has the position in the data"),
    "checkpoint.folder": ("checkpoint", "checkpoints are in <dump_folder>/<name>/checkpoints"),
    "checkpoint.initial_load_model_only": (True, "only weights are loaded, without optimizer and schedule"),
    "checkpoint.initial_load_in_hf": (
        False,
        "checkpoint.initial_load_path is always in Hugging Face's layout, which torchtitan's "
        "scripts/checkpoint_conversion/convert_to_hf.py makes",
    ),
    "checkpoint.initial_load_in_hf_quantized": (False, "titanlite has no start from quantized weights"),
    "checkpoint.last_save_model_only": (True, "every checkpoint is complete, including the last"),
    "checkpoint.last_save_in_hf": (False, "titanlite export RUN writes a checkpoint in Hugging Face's layout"),
    "checkpoint.export_dtype": ("float32", "checkpoints are in float32. titanlite export RUN --dtype converts them"),
    "checkpoint.keep_latest_k": (10, None),
    "checkpoint.load_step": (-1, "use checkpoint.resume = {}"),
    "checkpoint.exclude_from_loading": ([], "a checkpoint is loaded whole"),
    "checkpoint.enable_first_step_checkpoint": (False, "to try saving, start once with --job.stop_after 1"),
    "checkpoint.create_seed_checkpoint": (False, "the same seed gives the same weights under any layout"),
    "checkpoint.load_only": (False, "a run that resumes also saves"),
    "activation_checkpoint.mode": ("selective", "use activation_checkpoint.recipe = {}"),
    "activation_checkpoint.selective_ac_option": ("2", "use activation_checkpoint.recipe"),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": (
        ["moe.router.gate"],
        "the rules of a save-list name modules (docs/activation_checkpoint.md)",
    ),
    "activation_checkpoint.early_stop": (False, "recomputation always stops early"),
    "activation_checkpoint.memory_budget": (0.5, "the budget is activation_checkpoint.budget_gib, in GiB"),
    "activation_checkpoint.visualize_memory_budget_pareto": (
        False,
        "titanlite plan FILE --activation-checkpoint --world N prints what each save-list holds",
    ),
    "activation_checkpoint.preserve_rng_state": (True, "recomputation always restores the RNG state"),
    "activation_checkpoint.determinism_check": ("default", "titanlite has no choice of determinism checks"),
    "activation_checkpoint.debug": (False, "titanlite has no debug mode of checkpointing"),
    "compile.enable": (False, None),
    "compile.components": (["model", "loss"], "compile.enable compiles the blocks; the loss has kernels of its own"),
    "compile.backend": ("inductor", "the back end is inductor"),
    "quantize.linear.float8.enable_fsdp_float8_all_gather": (False, _RECIPE),
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": (False, _RECIPE),
    "quantize.linear.float8.recipe_name": (None, "use float8.recipe = {}"),
    "quantize.linear.float8.filter_fqns": ([], "use float8.filter_fqns = {}"),
    "quantize.linear.float8.emulate": (False, "a device without float8 emulates it, as receipt.json says"),
    "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice": ("triton", "titanlite has no mxfp8"),
    "quantize.linear.mx.recipe_name": ("mxfp8_cublas", _NO_MX),
    "quantize.linear.mx.filter_fqns": (["output"], "use float8.filter_fqns = {}"),
    "comm.init_timeout_seconds": (300, None),
    "comm.train_timeout_seconds": (100, None),
    "comm.trace_buf_size": (20_000, f"{_FLIGHT} TORCH_FR_BUFFER_SIZE"),
    "comm.mode": ("default", _PLAN),
    "memory_estimation.enable": (False, _PLAN),
    "fault_tolerance.enable": (False, _TORCHFT),
    "experimental.custom_import": ("", "model.file takes an architecture of your own"),
    "experimental.custom_args_module": ("", "titanlite has no custom config module"),
    "validation.dataset": ("c4_validation", "use validation.source (a path, or hf:<dataset>)"),
    "validation.dataset_path": (None, "use validation.source = {}"),
    "validation.local_batch_size": (8, "validation uses training.local_batch_size"),
    "validation.seq_len": (2048, "validation uses training.seq_len"),
    "validation.freq": (10, None),
    "debug.seed": (None, "use training.seed = {}"),
    "debug.deterministic": (False, "use training.deterministic = {}"),
    "debug.deterministic_warn_only": (False, "a kernel that is not deterministic is an error"),
    "debug.moe_force_load_balance": (False, "tokens go where the router sends them"),
    # Prefixes that several keys share, and keys of earlier releases.
    "training.gc_": (None, _GARBAGE),
    "parallelism.pipeline_parallel_": (None, _PIPELINE),
    "quantize.grouped_mm": (None, _GROUPED),
    "comm.save_traces_": (None, f"{_FLIGHT} TORCH_FR_DUMP_TEMP_FILE"),
    "fault_tolerance": (None, _TORCHFT),
    "memory_estimation": (None, _PLAN),
    "job.print_args": (None, _CONFIG),
    "lr_scheduler.lr_min": (None, "use lr_scheduler.min_lr_factor (a share of the peak)"),
    "training.dataloader": (None, _LOADER),
    "training.batch_size": (None, "use training.local_batch_size = {}"),
    "training.tensor_parallel_degree": (None, "use parallelism.tensor_parallel_degree = {}"),
    "training.data_parallel_degree": (None, "use parallelism.data_parallel_shard_degree = {}"),
    "training.compile": (None, "use compile.enable = {}"),
    "training.warmup_steps": (None, "use lr_scheduler.warmup_steps = {}"),
    "debug": (None, "use training.seed and training.deterministic"),
    "parallelism.enable_compiled_autograd": (None, "titanlite has no compiled autograd"),
    "parallelism.pipeline_parallel_split_points": (None, "titanlite has no pipeline parallelism"),
    "float8.recipe_name": (None, "use float8.recipe = {}"),
    "float8.enable_fsdp_float8_all_gather": (None, _RECIPE),
    "float8.precompute_float8_dynamic_scale_for_fsdp": (None, _RECIPE),
    "float8.force_recompute_fp8_weight_in_bwd": (None, "titanlite has no recomputation of float8 weights"),
    "float8.moe_fqns_prototype": (None, "experts compute in float8 where float8.recipe has scales by row"),
    "float8.emulate": (None, "a device without float8 emulates it, and receipt.json says so"),
    "quantize": (None, "use float8.recipe and float8.filter_fqns"),
    "mx": (None, _NO_MX),
    "checkpoint.enable_checkpoint": (None, "use checkpoint.enable = {}"),
    "checkpoint.interval_type": (None, "checkpoint.interval counts steps"),
    "experimental": (None, "titanlite has no experimental section"),
    "validation.enabled": (None, "use validation.enable = {}"),
    "validation.dataloader": (None, _LOADER),
}

DEFAULTS: dict[str, Any] = {
    "training.gc_debug": False,
    "parallelism.pipeline_parallel_first_stage_less_layers": 1,
    "parallelism.pipeline_parallel_last_stage_less_layers": 1,
    "parallelism.pipeline_parallel_schedule": "1F1B",
    "parallelism.pipeline_parallel_schedule_csv": "",
    "parallelism.pipeline_parallel_microbatch_size": 1,
    "parallelism.pipeline_parallel_expert_parallel_overlap": True,
    "quantize.grouped_mm.float8.fqns": [],
    "quantize.grouped_mm.mx.recipe_name": "mxfp8",
    "quantize.grouped_mm.mx.fqns": [],
    "comm.save_traces_folder": "comm_traces",
    "comm.save_traces_file_prefix": "rank_",
    "memory_estimation.disable_fake_mode": False,
    "fault_tolerance.process_group": "gloo",
    "fault_tolerance.process_group_timeout_ms": 10_000,
    "fault_tolerance.replica_id": 0,
    "fault_tolerance.group_size": 0,
    "fault_tolerance.min_replica_size": 1,
}
"""torchtitan's defaults of keys of which `KEYS` lists only a prefix."""

SWITCHES = {
    "profiling.enable_profiling": ("profiling.save_traces_", "profiling.profile_", "profiling.profiler_"),
    "profiling.enable_memory_snapshot": ("profiling.save_memory_",),
    "metrics.enable_tensorboard": ("metrics.save_tb_",),
    "parallelism.tensor_parallel_degree": ("parallelism.enable_async_", "parallelism.disable_loss_"),
    "parallelism.pipeline_parallel_degree": ("parallelism.pipeline_", "parallelism.module_"),
    "parallelism.context_parallel_degree": ("parallelism.context_",),
    "parallelism.expert_parallel_degree": ("parallelism.expert_tensor_", "parallelism.expert_parallel_comm_"),
    "checkpoint.enable": ("checkpoint.",),
    "checkpoint.initial_load_path": ("checkpoint.initial_load_",),
    "compile.enable": ("compile.",),
    "memory_estimation.enable": ("memory_estimation.",),
    "fault_tolerance.enable": ("fault_tolerance.",),
    "validation.enable": ("validation.",),
}
"""Switch → prefixes of the keys that have no effect while the switch has its default."""

IDLE = (
    *("job.description", "optimizer.implementation", "training.gc_freq", "training.dataloader."),
    *("validation.dataloader.", "profiling.profiler_warmup", "checkpoint.enable_ft_dataloader_checkpoints"),
    *("activation_checkpoint.early_stop", "activation_checkpoint.preserve_rng_state", "quantize.linear.mx.mxfp8_"),
    *("activation_checkpoint.determinism_check", "checkpoint.last_save_model_only"),
    *("quantize.linear.float8.enable_", "quantize.linear.float8.precompute_"),
)
"""Keys, or prefixes of keys, that change neither training nor files, whatever their value."""

ASKED_BY_DEFAULT = (
    *("model.flavor", "model.hf_assets_path", "training.dataset", "checkpoint.initial_load_in_hf"),
    *("activation_checkpoint.mode", "activation_checkpoint.selective_ac_option", "profiling.profiler_active"),
    *("quantize.linear.float8.filter_fqns", "quantize.linear.mx.filter_fqns"),
    *("validation.dataset", "validation.local_batch_size", "validation.seq_len"),
)
"""Keys whose default needs a line in a config of titanlite. All other keys need none at their default."""

MODELS = {
    **dict.fromkeys(("deepseek_v3", "flux", "gpt_oss", "llama4", "vlm", "transformers_modeling_backend"), ""),
    **dict.fromkeys(("simple_fsdp.deepseek_v3", "compiler_toolkit.deepseek_v3", "autoparallel.deepseek_v3"), ""),
    "autoparallel.local_map_deepseek_v3": "",
    **dict.fromkeys(("llama3_ft", "simple_fsdp.llama3", "compiler_toolkit.llama3", "autoparallel.llama3"), "llama3"),
}
"""Value of torchtitan's `model.name` that titanlite lacks → titanlite's name of the model; "" if it has none."""

_DEBUG = {"n_layers": 6, "dim": 256, "n_heads": 16, "n_kv_heads": 16, "ffn_dim": 768, "vocab_size": 2048}
FLAVORS: dict[tuple[str, str], dict[str, Any]] = {
    ("llama3", "debugmodel"): {"flavor": "8B", **_DEBUG},
    ("qwen3", "debugmodel"): {"flavor": "0.6B", "n_layers": 8, "dim": 256, "vocab_size": 2048},
    ("qwen3", "14B"): {"flavor": "8B", "n_layers": 40, "dim": 5120, "n_heads": 40, "ffn_dim": 17408},
    ("qwen3", "32B"): {"flavor": "8B", "n_layers": 64, "dim": 5120, "n_heads": 64, "ffn_dim": 25600},
    ("qwen3", "debugmodel_moe"): {"name": "qwen3_moe", "flavor": "torchtitan-debug"},
    ("qwen3", "30B-A3B"): {"name": "qwen3_moe", "flavor": "30B-A3B"},
    ("qwen3", "235B-A22B"): {"name": "qwen3_moe", "rope_theta": 5e6, "flavor": "235B-A22B"},
}
"""(Model, flavor) of torchtitan → keys of `[model]` in titanlite, where model or flavor have another name."""

BALANCED = (
    "balanced by a loss, as it was published, and there by a bias: for that, extend its recipe by a table [experts] "
    "with balance_loss = 0.0, balance_bias = 0.001"
)
"""Remark on published mixtures of experts, which torchtitan balances differently; not on `torchtitan-debug`."""

DATASETS = {
    "c4": "hf:allenai/c4:en",
    "c4_test": "hf:./tests/assets/c4_test",
    "c4_validation": "hf:allenai/c4:en:validation",
}
"""Name of a dataset in torchtitan → `data.source` that loads it."""

UNSAID: dict[str, Any] = {
    "optimizer.weight_decay_exclude": [],
    "data.add_bos_token": True,
    "data.document_mask": False,
}
"""Key of titanlite → the fixed value in torchtitan, which has no such key."""

VALUES: dict[str, dict[object, str]] = {
    "activation_checkpoint.recipe": {
        "selective": 'use activation_checkpoint.recipe = "full", or "none" where memory allows',
        "memory_budget": 'use activation_checkpoint.recipe = "auto" with activation_checkpoint.budget_gib = 60.0, '
        "or whatever peak in GiB a GPU may reserve",
    },
    "float8.recipe": {
        "mxfp8": 'use "rowwise", or "blockwise"',
        "all_tensorwise": 'recipe = "tensorwise"',
        "all_axiswise": 'recipe = "rowwise"',
        "lw_axiswise_with_gw_hp": 'recipe = "rowwise_with_gw_hp"',
    },
    "checkpoint.async_mode": {"async_with_pinned_mem": 'async_mode = "async"'},
    "lr_scheduler.decay_ratio": {0.0: "use lr_scheduler.min_lr_factor = 1.0 without decay_ratio, for no decay"},
    "model.name": {
        name: f'name = "{ours}", which is its model'
        if ours
        else "choose one of these: titanlite has no such model; model.file takes a file of your own"
        for name, ours in MODELS.items()
    },
}
"""Key of titanlite → value of torchtitan, or former name of a recipe → what to write instead."""

MASKS = re.compile(r"(.+?)_(flex|varlen)(_attn)?")
"""Matches a flavor of torchtitan with document masks; group 1 is the flavor without them."""


def answer_to_key(key: str) -> str | None:
    """Return the answer in `KEYS` for a dotted key or a section of torchtitan; None if it is unknown."""
    if key in KEYS:
        return KEYS[key][1]
    begun = [name for name in KEYS if f"{key}.".startswith(name if name.endswith("_") else f"{name}.")]
    return KEYS[max(begun, key=len)][1] if begun else None


def answer_to_value(key: str, value: object) -> str | None:
    """Return what to write instead of torchtitan's `value` of a key; None if titanlite's key takes the same value."""
    return VALUES[key].get(value) if key in VALUES and isinstance(value, str | int | float) else None


def flavor(architecture: str, name: str) -> str | None:
    """Return how titanlite's config names a flavor of torchtitan; None if the name is the same or unknown."""
    if here := FLAVORS.get((architecture, name)):
        answer = f"use {', '.join(f'model.{key} = {show(value)}' for key, value in here.items())}"
        return f"{answer}; {BALANCED}" if here["flavor"] == name else answer
    if mask := MASKS.fullmatch(name):
        plain = flavor(architecture, mask[1]) or f"use model.flavor = {show(mask[1])}"
        return f"{plain}; documents are masked where data.document_mask is true, which it is by default"
    return None
