"""What a config file may say, and what is said about one that is wrong."""

import dataclasses
from pathlib import Path

import pytest

from titanlite.config.problems import Place
from titanlite.config.read import read_config, schema_keys
from titanlite.config.renamed import _REPLACEMENT, replacement
from titanlite.config.schema import Config
from titanlite.config.toml_file import shipped_folder
from titanlite.errors import ConfigError


def write(folder: Path, text: str, name: str = "run.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def message(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    return str(caught.value)


def test_values_have_the_types_of_the_schema(tmp_path: Path) -> None:
    path = write(tmp_path, '[training]\nmax_norm = 1\n[job]\nrecipe_dirs = ["a", "b"]\n[checkpoint]\nresume = 7\n')
    config, origin = read_config(path)
    assert type(config.training.max_norm) is float
    assert config.job.recipe_dirs == ("a", "b")
    assert config.checkpoint.resume == 7
    assert origin.of("training.max_norm") == Place(str(path), 2)
    assert origin.of("training.steps") == Place(str(path), None)
    unsaid = dataclasses.replace(config, training=Config().training, job=Config().job, checkpoint=Config().checkpoint)
    assert unsaid == Config()


def test_all_problems_come_at_once_each_with_its_line(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """# a run
[training]
stepz = 5
lr = 3e-4
steps = "100"
seq_len = 4096.0
deterministic = 1
on_nonfinite = "skipp"

[job]
recipe_dirs = "mine"
strict = "yes"
[trainin]
steps = 1
""",
    )
    assert (
        message(path)
        == f"""{path}: 9 problems
  line 3  training.stepz = 5
      want: one of {", ".join(k.removeprefix("training.") for k in schema_keys() if k.startswith("training."))}
      fix:  did you mean training.steps?
  line 4  training.lr = 0.0003
      want: one of {", ".join(k.removeprefix("training.") for k in schema_keys() if k.startswith("training."))}
      fix:  did you mean optimizer.lr?
  line 5  training.steps = "100"
      want: a whole number
      fix:  steps = 100
  line 6  training.seq_len = 4096.0
      want: a whole number
      fix:  seq_len = 4096
  line 7  training.deterministic = 1
      want: true or false
      fix:  deterministic = true
  line 8  training.on_nonfinite = "skipp"
      want: "stop" or "skip"
      fix:  did you mean "skip"?
  line 11  job.recipe_dirs = "mine"
      want: a list of strings
      fix:  recipe_dirs = ["mine"]
  line 12  job.strict = "yes"
      want: true or false
      fix:  strict = true
  line 13  trainin
      want: one of {", ".join(f.name for f in dataclasses.fields(Config))}
      fix:  did you mean [training]?"""
    )


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("training = 5", ["line 1  training = 5", "want: a table", "fix:  write it as a table: [training]"]),
        ("training_steps = 5", ["line 1  training_steps = 5", "fix:  did you mean training.steps?"]),
        ("steps = 5", ["line 1  steps = 5", "did you mean training.steps or validation.steps or profiling.steps?"]),
        ("[job]\nstrict = 0", ["job.strict = 0", "want: true or false", "fix:  strict = false"]),
        ("[job]\nstrict = 'No'", ["fix:  strict = false"]),
        ("[job]\nstrict = 'maybe'", ["fix:  strict = true (the default)"]),
        ("[training]\nsteps = true", ["training.steps = true", "a whole number"]),
        ("[optimizer]\nlr = true", ["optimizer.lr = true", "want: a number"]),
        ("[data]\nsource = 5", ["data.source = 5", "a string in quotes", 'source = "python_stdlib" (the default)']),
        ("[job]\nrecipe_dirs = [1]", ["line 2  job.recipe_dirs[0] = 1", "a string in quotes"]),
        ("[checkpoint]\nresume = 1.5", ['want: "auto", "never" or a whole number']),
        ("[checkpoint]\nresume = true", ['want: "auto", "never" or a whole number']),
        ('[checkpoint]\nresume = "100"', ["fix:  resume = 100"]),
        ('[training]\nglobal_batch_size = "64"', ["want: a whole number", "fix:  global_batch_size = 64"]),
        ("[metrics]\nenable_wandb = true", ["line 2  metrics.enable_wandb", "use metrics.wandb"]),
        ('[quantize.linear.float8]\nrecipe_name = "rowwise"', ["line 1  quantize", "use float8.recipe"]),
        ('[checkpoint]\nasync_mode = "async_with_pinned_mem"', ['fix:  async_mode = "async"']),
        ('[activation_checkpoint]\nmode = "selective"', ['use activation_checkpoint.recipe = "every_second_matmul"']),
        ('[activation_checkpoint]\nmode = "memory_budget"', ['recipe = "auto" with budget_gib']),
        ('[activation_checkpoint]\nmode = "full"', ['use activation_checkpoint.recipe = "full"']),
        ('[activation_checkpoint]\nmode = ["full"]', ['use activation_checkpoint.recipe ("none", "full" or']),
        ("[zzz]\nx = 1", ["line 1  zzz", "fix:  remove it"]),
    ],
)
def test_one_problem(tmp_path: Path, text: str, parts: list[str]) -> None:
    said = message(write(tmp_path, text))
    assert "1 problem\n" in said
    for part in parts:
        assert part in said


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[job]\nname = debug\n", ["line 2  name = debug", "valid TOML (invalid value, column 8)", "in quotes"]),
        ("[job]\nname = 'x'\nname = 'y'\n", ["line 3", "valid TOML"]),
        ("[job]\nname = ", ["line 2", "valid TOML"]),
        ("[job", ["valid TOML"]),
    ],
)
def test_bad_toml_is_shown_at_its_line(tmp_path: Path, text: str, parts: list[str]) -> None:
    said = message(write(tmp_path, text))
    for part in parts:
        assert part in said


def test_a_missing_file_names_the_one_that_was_meant(tmp_path: Path) -> None:
    meant = write(tmp_path, "", "debug.toml")
    said = message(tmp_path / "debgu.toml")
    assert said.startswith(f"{tmp_path / 'debgu.toml'}: 1 problem\n  no such file or directory\n")
    assert f"did you mean {meant}?" in said
    assert "llama3_8b.toml" in message(tmp_path / "elsewhere" / "mine.toml")  # no neighbour: the shipped ones are named


def test_a_folder_and_a_binary_file_are_no_config(tmp_path: Path) -> None:
    assert "is a directory" in message(tmp_path)
    (tmp_path / "x.toml").write_bytes(b"[job]\n\xff")
    assert "byte 6" in message(tmp_path / "x.toml")
    assert "UTF-8" in message(tmp_path / "x.toml")
    (tmp_path / "x.toml").write_bytes(b"\xef\xbb\xbf[job]\nnam = 'x'\n")  # as editors of Windows begin a file
    assert "line 2  job.nam" in message(tmp_path / "x.toml")


def test_the_place_of_a_file_that_is_extended_has_no_detour(tmp_path: Path) -> None:
    for folder in ("mine", "configs", "elsewhere/deep"):
        (tmp_path / folder).mkdir(parents=True)
    write(tmp_path, "[training]\nseed = 1\n", "configs/base.toml")
    path = write(tmp_path, 'extends = ["../configs/base.toml"]\n', "mine/run.toml")
    assert read_config(path)[1].of("training.seed") == Place(str(tmp_path / "configs/base.toml"), 2)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere/deep")  # whose `..` is elsewhere
    write(tmp_path, "[training]\nseed = 2\n", "elsewhere/base.toml")
    write(tmp_path, "[training]\nseed = 3\n", "base.toml")
    path = write(tmp_path, 'extends = ["link/../base.toml"]\n')
    config, origin = read_config(path)
    assert config.training.seed == 2
    assert origin.of("training.seed") == Place(str(tmp_path / "link/../base.toml"), 2)


def test_extends_merges_in_order_and_the_file_itself_wins(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    first = write(tmp_path, "[training]\nsteps = 1\nseed = 1\nseq_len = 64\n", "base/first.toml")
    write(tmp_path, '[training]\nseed = 2\n[job]\nrecipe_dirs = ["a", "b"]\n', "base/second.toml")
    write(tmp_path, 'extends = ["second.toml"]\n', "base/third.toml")
    path = write(
        tmp_path,
        'extends = ["base/first.toml", "base/third.toml"]\n[training]\nsteps = 3\n[job]\nrecipe_dirs = ["c"]\n',
    )
    config, origin = read_config(path)
    assert (config.training.steps, config.training.seed, config.training.seq_len) == (3, 2, 64)
    assert config.job.recipe_dirs == ("c",)  # a list is replaced, not continued
    assert origin.of("training.steps") == Place(str(path), 3)
    assert origin.of("training.seq_len") == Place(str(first), 4)
    assert "job.recipe_dirs[1]" not in origin.places


def test_problems_of_a_base_file_are_under_its_name(tmp_path: Path) -> None:
    base = write(tmp_path, "\n[training]\nstepz = 1\n", "base.toml")
    path = write(tmp_path, 'extends = ["base.toml"]\n[optimizer]\nlr = "x"\n')
    said = message(path)
    assert f"{base}: 1 problem\n  line 3  training.stepz" in said
    assert f"{path}: 1 problem\n  line 3  optimizer.lr" in said


def test_a_circle_of_extends_is_shown(tmp_path: Path) -> None:
    a = write(tmp_path, 'extends = ["b.toml"]', "a.toml")
    b = write(tmp_path, '\nextends = ["a.toml"]', "b.toml")
    said = message(a)
    assert f"{b}: 1 problem\n  line 2  extends" in said
    assert f"{a} → {b} → {a}" in said
    itself = write(tmp_path, 'extends = ["c.toml"]', "c.toml")
    assert f"{itself} → {itself}" in message(itself)


@pytest.mark.parametrize("text", ["extends = [1]", "extends = 5", 'extends = ["nowhere.toml"]'])
def test_a_malformed_extends_is_an_error_at_its_line(tmp_path: Path, text: str) -> None:
    assert "line 1  extends" in message(write(tmp_path, text))


def test_a_shipped_config_or_one_that_is_near_may_have_been_meant(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").touch()
    assert f"did you mean {shipped_folder('configs') / 'debug.toml'}?" in message(tmp_path / "debug.toml")
    assert f"did you mean {tmp_path / 'mine.toml'}?" in message(tmp_path / "mime.toml")
    assert "did you mean" not in message(tmp_path / "other.toml")


@pytest.mark.parametrize("name", [".", "loop.toml", "x" * 300, "a\\u0000b.toml"])
def test_what_extends_names_must_be_a_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    said = message(write(tmp_path, f'extends = "{name}"'))
    assert f'line 1  extends = "{name}"\n      want: the path of an existing TOML file; ' in said
    assert "did you mean loop.toml?" not in said


def test_a_file_that_cannot_be_read_is_not_proposed_instead_of_itself(tmp_path: Path) -> None:
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    said = message(tmp_path / "loop.toml")
    assert "too many levels of symbolic links" in said
    assert "did you mean" not in said


def test_no_key_of_the_schema_is_called_renamed() -> None:
    """A key that is added here later must leave the table of torchtitan's other keys."""
    sections = {f.name for f in dataclasses.fields(Config)}
    assert not set(_REPLACEMENT) & (set(schema_keys()) | sections)
    for fix in _REPLACEMENT.values():  # and what the table recommends exists
        if fix.startswith("use "):
            assert any(key in fix for key in schema_keys()), fix


TORCHTITAN = """
job: config_file description dump_folder print_config save_config_file custom_config_module
profiling: enable_profiling save_traces_folder profile_freq profiler_active profiler_warmup enable_memory_snapshot
profiling: save_memory_snapshot_folder
metrics: log_freq enable_tensorboard disable_color_printing save_tb_folder save_for_all_ranks enable_wandb
model: name flavor hf_assets_path tokenizer_path converters print_after_conversion
optimizer: name lr beta1 beta2 eps weight_decay implementation early_step_in_backward
lr_scheduler: warmup_steps total_steps decay_ratio decay_type min_lr_factor
training: dataset dataset_path local_batch_size global_batch_size seq_len max_norm steps enable_cpu_offload dtype
training: mixed_precision_param mixed_precision_reduce gc_freq gc_debug
training.dataloader: num_workers persistent_workers pin_memory prefetch_factor
parallelism: data_parallel_replicate_degree data_parallel_shard_degree fsdp_reshard_after_forward
parallelism: tensor_parallel_degree disable_loss_parallel enable_async_tensor_parallel pipeline_parallel_degree
parallelism: module_fqns_per_model_part pipeline_parallel_first_stage_less_layers
parallelism: pipeline_parallel_last_stage_less_layers pipeline_parallel_layers_per_stage pipeline_parallel_schedule
parallelism: pipeline_parallel_schedule_csv pipeline_parallel_microbatch_size
parallelism: pipeline_parallel_expert_parallel_overlap context_parallel_degree context_parallel_load_balancer
parallelism: context_parallel_rotate_method expert_parallel_degree expert_tensor_parallel_degree
parallelism: expert_parallel_comm_backend
checkpoint: enable enable_ft_dataloader_checkpoints folder interval initial_load_path initial_load_model_only
checkpoint: initial_load_in_hf initial_load_in_hf_quantized last_save_model_only last_save_in_hf export_dtype
checkpoint: async_mode keep_latest_k load_step exclude_from_loading enable_first_step_checkpoint
checkpoint: create_seed_checkpoint load_only
activation_checkpoint: mode selective_ac_option per_op_sac_force_recompute_mm_shapes_by_fqns early_stop memory_budget
activation_checkpoint: visualize_memory_budget_pareto preserve_rng_state determinism_check debug
compile: enable components backend
quantize.linear.float8: enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp recipe_name filter_fqns
quantize.linear.float8: emulate
quantize.linear.mx: mxfp8_dim1_cast_kernel_choice recipe_name filter_fqns
quantize.grouped_mm.float8: fqns
quantize.grouped_mm.mx: recipe_name fqns
comm: init_timeout_seconds train_timeout_seconds trace_buf_size save_traces_folder save_traces_file_prefix mode
memory_estimation: enable disable_fake_mode
fault_tolerance: enable process_group process_group_timeout_ms replica_id group_size min_replica_size semi_sync_method
experimental: custom_import custom_args_module
validation: enable dataset dataset_path local_batch_size seq_len freq steps
validation.dataloader: num_workers persistent_workers pin_memory prefetch_factor
debug: seed deterministic deterministic_warn_only moe_force_load_balance
"""


def test_every_key_of_torchtitan_is_one_here_or_has_a_replacement() -> None:
    """Of `torchtitan/config/job_config.py` in v0.2.2, the last release with files in TOML."""
    sections = (line.split(": ") for line in TORCHTITAN.split("\n") if line)
    keys = [f"{section}.{name}" for section, names in sections for name in names.split()]
    assert [key for key in keys if key not in schema_keys() and replacement(key) is None] == []


@pytest.mark.parametrize(
    ("key", "fix"),
    [
        ("activation_checkpoint.memory_budget", 'recipe = "auto" with budget_gib'),
        ("memory_estimation.enable", "titanlite plan FILE --world N"),
    ],
)
def test_what_memory_is_asked_with_now(key: str, fix: str) -> None:
    assert fix in (replacement(key) or "")
