"""The config schema: one frozen dataclass per TOML section. This file is the reference of every key.

A field defines its key: the type, the range of a number, the default and the help text. Flags, `--help SECTION`, the
JSON Schema and the reference page of all keys are made from the fields. Types are those that TOML can express: bool,
int, float, str, tuples of str or of tables, tables of numbers, `Literal` choices, and `| None` for "not given".

Most keys have the names of torchtitan's last TOML release, which `config/torchtitan.py` lists.
"""

import functools
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

from titanlite.config.architectures import ARCHITECTURES

if TYPE_CHECKING:  # a type checker cannot evaluate the dict
    ArchitectureName = str
else:
    ArchitectureName = Literal[tuple(ARCHITECTURES)]

FROM_CHECKPOINT = "from_checkpoint"
"""Flavor of a model whose dimensions are those of `checkpoint.initial_load_path`."""

# Ranges of numbers: [ ] include the bound, ( ) exclude it. If a range begins at -1, -1 means all, and 0 is illegal.
PositiveInt = Annotated[int, "[1, inf)"]
NonNegativeInt = Annotated[int, "[0, inf)"]
CountOrAll = Annotated[int, "[-1, inf)"]
Seconds = Annotated[int, "[1, 31536000]"]  # at most a year, since a timedelta cannot hold every int
PositiveFloat = Annotated[float, "(0, inf)"]
NonNegativeFloat = Annotated[float, "[0, inf)"]
Fraction = Annotated[float, "[0, 1]"]
Decay = Annotated[float, "[0, 1)"]


T = TypeVar("T")


def key(default: T, about: str) -> T:
    """Make the field of an optional key from its default and its help text `about`."""
    return field(default=default, metadata={"help": about})


def required(about: str) -> Any:
    """Make the field of a required key from its help text `about`."""
    return field(metadata={"help": about})


# fmt: off
@dataclass(frozen=True)
class Job:
    """The run's name, where its files go, how strict it is."""

    name: str = key("run", "Name of the run. Its files are in `<dump_folder>/<name>/`.")
    dump_folder: str = key("outputs", "Folder that holds the run folders.")
    strict: bool = key(True, "Stop before step 2 if a requested feature was not applied, or only partly.")
    stop_after: NonNegativeInt = key(0, "Save, if `checkpoint.enable`, and exit with code 0 after this step, before `training.steps` is reached. 0: off.")
    stop_with_launcher: bool = key(True, "Save and stop when the launcher (torchrun, srun, mpirun, a script) has ended without ending its ranks. Set it to false for ranks that a script starts and leaves to themselves. A process without a rank has no launcher.")
    recipe_dirs: tuple[str, ...] = key((), "Folders with your own recipes, in subfolders `model`, `float8`, `activation_checkpoint` and `optimizer`. Reusing the name of a shipped recipe is an error.")


@dataclass(frozen=True)
class Model:
    """The architecture. A flavor sets every dimension; any of them can be overridden."""

    name: ArchitectureName = key("llama3", "Architecture.")
    file: str = key("", "Path of a Python file with your own architecture, used instead of `name`. Its recipes are `model/<file without .py>-<flavor>.toml` in `job.recipe_dirs`.")
    flavor: str = key("8B", "Size, looked up as `recipes/model/<name>-<flavor>.toml` (`titanlite recipes model`), or `from_checkpoint`: all dimensions are those of the config.json in `checkpoint.initial_load_path`. Of `llama3`: debug, 1B, 3B (Llama 3.2), 8B, 70B, 405B (Llama 3.1).")
    n_layers: Annotated[int, "[1, 10000]"] | None = key(None, "Transformer blocks.")
    dim: PositiveInt | None = key(None, "Width of the residual stream (D).")
    n_heads: PositiveInt | None = key(None, "Query heads (H).")
    n_kv_heads: PositiveInt | None = key(None, "Key/value heads (K); each serves n_heads / n_kv_heads query heads.")
    ffn_dim: PositiveInt | None = key(None, "Inner width of the feed-forward (F); a multiple of 128. Not of a mixture of experts: its recipe has that of one expert.")
    vocab_size: PositiveInt | None = key(None, "Rows of the embedding (V); at least as many as the tokenizer has ids.")
    rope_theta: PositiveFloat | None = key(None, "Base of the rotary frequencies.")
    logit_softcap: NonNegativeFloat | None = key(None, "Cap logits softly, at `logit_softcap * tanh(logits / logit_softcap)`: in training, validation and evaluation. It is part of the model: of Hugging Face's classes, that of gemma3 alone has it. 0: no cap.")


@dataclass(frozen=True)
class MixtureSource:
    """A source of a mixture."""

    name: str = required("Name of the source, of letters, digits, - and _: in metrics, in `data.stage.weights`, and for its order. Another name is another source.")
    source: str = required("Like `data.source`.")
    weight: NonNegativeFloat = required("Share of the tokens, relative to the sum of all weights, until a stage gives others.")
    max_epochs: PositiveFloat | None = key(None, "Refuse a run that would go through the source more often than this.")


@dataclass(frozen=True)
class Stage:
    """A change of the run from a number of tokens on. What is not given stays as it was."""

    from_tokens: NonNegativeInt = required("Tokens trained on before the stage. It begins with the first step at or after them; 0 is the start of the run.")
    weights: dict[str, float] = field(default_factory=dict[str, float], metadata={"help": "Weight of each source of the mixture, by name, as `{web = 0.5, code = 0.5}`. Sources that are not named have none."})
    seq_len: PositiveInt | None = key(None, "Tokens per sequence (S). The longest of all stages is a multiple of it.")
    global_batch_size: PositiveInt | None = key(None, "Sequences per optimizer step over all ranks.")
    local_batch_size: PositiveInt | None = key(None, "Sequences per data-parallel rank per micro-step.")
    lr_decay_to: Fraction | None = key(None, "Fraction of the peak that the learning rate reaches by the end of the stage, in the shape of `lr_scheduler.decay_type`. If any stage has it, the rate is constant after warm-up in stages without it.")


@dataclass(frozen=True)
class Data:
    """The text to train on. It is tokenized once into token shards, which every run memory-maps."""

    source: str = key("python_stdlib", "`python_stdlib` (the interpreter's own library), a path or glob of .txt, .jsonl (also .gz, .zst), .parquet or token (.bin) files, the same but for token files behind a URL (`s3://`, `gs://`, `https://`), or `hf:<dataset>[:<config>[:<split>]]`.")
    tokenizer: str = key("bytes", "`bytes` (256 ids, NUL separates documents), the path of a tokenizer.json, or `hf:OWNER/MODEL[@REVISION]`: that of a model of the Hugging Face hub.")
    add_bos_token: bool = key(False, "Begin each document with the tokenizer's token for that, as `<|begin_of_text|>`: the `bos_token` of the tokenizer_config.json beside it. Not for token files.")
    text_key: str = key("text", "Field that holds the text of a .jsonl or .parquet record, or of a dataset's row.")
    document_mask: bool = key(True, "Attend within documents alone: attention, positions and targets end where a document does. Without it a sample is read as one text.")
    separator_id: NonNegativeInt | None = key(None, "Id that ends each document in token files. Not given: they have no documents. Not for text, whose tokenizer has one.")
    token_dtype: Literal["auto", "uint16", "uint32"] = key("auto", "Type of the ids in token files, little-endian, where no `meta.json` or Megatron's .idx beside them states it. `auto`: uint32 if `model.vocab_size` exceeds 65,536 and uint16 if not.")
    packing: Literal["concat", "best_fit"] = key("concat", "How documents become samples: `concat` cuts the row of all documents into samples, and documents where they end. `best_fit` keeps each document of at most `training.seq_len` tokens whole in one sample, cuts longer ones once each `training.seq_len` tokens, pads what is left over, and predicts nothing behind a document's end, with and without `document_mask`. Validation is always `concat`.")
    max_tokens: NonNegativeInt = key(0, "Limit on the tokens taken from `source`: reading ends with the document that reaches it. Not for token files. 0: no limit.")
    max_bad_records: NonNegativeInt = key(0, "Maximum number of unusable records to skip. The first ten are named; exceeding the maximum is an error.")
    max_record_mib: Annotated[int, "[1, 1048576]"] = key(64, "Maximum size of a record: a line of a .jsonl file, or a text of a .parquet file or dataset. A larger one is unusable. It also limits a .txt file that the tokenizer takes only whole.")
    shuffle_window: NonNegativeInt = key(0, "Tokens of the source within which its samples are shuffled, window after window: training needs a source's beginning only. In an epoch each sample occurs once. 0: the whole source.")
    prepare: Literal["first", "background"] = key("first", "When sources are tokenized. `first`: all of them before the first step. `background`: by a process on each host, while training reads what is there; it needs a `shuffle_window`, and trains as `first` does, bit for bit.")
    prepare_lead: NonNegativeInt = key(2_000_000_000, 'With `prepare = "background"`: tokens of each source, beyond those that training has come to, at which the process pauses until training has caught up. 0: no limit.')
    cache_dir: str = key("~/.cache/titanlite/data", "Folder for token shards. Hosts may share it; where each has its own, each tokenizes.")
    mixture: tuple[MixtureSource, ...] = key((), "Several sources by weight, in place of `source`.")
    stage: tuple[Stage, ...] = key((), "Stages of the run, by the tokens at which each begins.")


@dataclass(frozen=True)
class Training:
    """How much, in what batches, at what precision."""

    steps: PositiveInt = key(10_000, "Optimizer steps. With `tokens`, as many as those take, whatever is given here.")
    tokens: NonNegativeInt = key(0, "Tokens to train on: the run ends with the step that reaches them, and the learning rate follows tokens in place of steps. 0: `steps` says how long it is.")
    seq_len: PositiveInt = key(2048, "Tokens per sequence (S): of training, unless a `data.stage` has another, of validation and of evaluation.")
    local_batch_size: PositiveInt = key(1, "Sequences per data-parallel rank per micro-step.")
    global_batch_size: PositiveInt | None = key(None, "Sequences per optimizer step over all ranks; it determines gradient accumulation. Not given: one micro-step.")
    max_norm: NonNegativeFloat = key(1.0, "Maximum global L2 norm of gradients; larger ones are clipped. 0: no clipping.")
    z_loss: NonNegativeFloat = key(0.0, "Coefficient of the z-loss, the mean square of the logits' log-sum-exp over targets, whose gradient is added to that of the loss; often 1e-4 or 1e-5. `loss` in metrics.jsonl stays the cross-entropy, `z_loss` is the mean before its coefficient; validation has none. 0: off.")
    seed: Annotated[int, "[0, 4294967295]"] = key(0, "Seed of the initial weights and of the data order. The same seed gives the same run under any layout.")
    nudge: NonNegativeInt = key(0, "Other than 0: seed by which each initial weight is moved up or down by one rounding of `mixed_precision_param`, or of bfloat16 in a float8 run. A run that differs from another in this alone shows how far rounding drives them apart; `titanlite compare` uses it as its floor.")
    deterministic: bool = key(False, "Use deterministic kernels only; slower.")
    on_nonfinite: Literal["stop", "skip"] = key("stop", "Action when the loss or gradient norm is NaN or Inf. It never reaches the weights. `stop` ends the run; `skip` drops the step, and ends the run after 10 in a row.")
    mixed_precision_param: Literal["bfloat16", "float32"] = key("bfloat16", "Dtype of compute and of gathered parameters; master weights are float32.")
    mixed_precision_reduce: Literal["float32", "bfloat16"] = key("float32", "Dtype of the gradient reduction over data-parallel ranks.")


@dataclass(frozen=True)
class Optimizer:
    """The optimizer."""

    recipe: str = key("adamw", "Optimizer recipe: groups of parameters, and the rule by which each is updated. What a group leaves out of learning rate, betas, eps and weight decay is what the other keys say; `titanlite recipes optimizer` lists them.")
    file: str = key("", "Python file with update rules of your own: classes that groups of the recipe name as their `rule`.")
    lr: PositiveFloat = key(3e-4, "Peak learning rate; that of a group is a factor of it.")
    beta1: Decay = key(0.9, "Decay of the first moment.")
    beta2: Decay = key(0.95, "Decay of the second moment.")
    eps: PositiveFloat = key(1e-8, "Added to the square root of the second moment.")
    weight_decay: NonNegativeFloat = key(0.1, "Decoupled weight decay.")
    weight_decay_schedule: Literal["constant", "lr"] = key("constant", "How weight decay goes in a run. In each step weights shrink by the learning rate times weight decay, and so with the schedule already. `lr`: weight decay itself is multiplied by the learning rate over its peak, too.")
    weight_decay_exclude: tuple[str, ...] = key(("*norm.weight",), "Parameters without weight decay, as shell patterns of their names. A pattern that matches nothing is an error.")
    state_dtype: Literal["float32", "bfloat16"] = key("float32", "Dtype of the stored moments.")
    ema_decay: Decay = key(0.0, "Decay of an exponential moving average of the weights, kept beside them in float32 and moved after each update; as 0.999, over about the last 1000 updates. At first it is shorter. `validation.weights` and `titanlite export --ema` use it. 0: none.")
    fresh_state: bool = key(False, "Go on from a checkpoint of another optimizer, whose parameters had other rules or whose state another dtype: with its weights and place in the data, and fresh state of the optimizer. A checkpoint of the same optimizer is resumed as ever.")


@dataclass(frozen=True)
class LRScheduler:
    """Learning rate: linear warm-up, constant, decay."""

    warmup_steps: NonNegativeInt = key(200, "Steps of linear warm-up.")
    warmup_tokens: NonNegativeInt | None = key(None, "Tokens of linear warm-up, in place of `warmup_steps`; with `training.tokens` alone.")
    decay_ratio: Annotated[float, "(0, 1]"] | None = key(None, "Fraction of `training.steps` or `training.tokens`, at the end, over which the rate decays (warm-up, stable, decay). Not given: decay starts when warm-up ends, as it does where there is less room.")
    decay_type: Literal["cosine", "linear", "sqrt"] = key("cosine", "Shape of the decay.")
    min_lr_factor: Fraction = key(0.1, "Learning rate that the decay ends at, one step after the last, as a fraction of the peak.")


@dataclass(frozen=True)
class Parallelism:
    """The mesh. The product of the degrees is the number of processes."""

    data_parallel_replicate_degree: PositiveInt = key(1, "Replicas of the sharded model (HSDP).")
    data_parallel_shard_degree: CountOrAll = key(-1, "Ranks over which FSDP shards parameters, gradients and optimizer state. -1: all remaining ranks.")
    tensor_parallel_degree: PositiveInt = key(1, "Ranks over which each layer is split; includes sequence parallelism and a vocabulary-parallel loss.")
    context_parallel_degree: PositiveInt = key(1, "Ranks over which the tokens of each sequence are split, each token attending to those of the others, too. FSDP shards parameters over these as well. 1: each rank has whole sequences.")
    expert_parallel_degree: PositiveInt = key(1, "Ranks, of those that shard each parameter, that the experts of a layer are shared out over: tokens travel to them. 1: each rank computes with all experts, gathered as all other weights.")
    async_tensor_parallel: bool = key(False, "Overlap the collectives of tensor parallelism with their matmuls, in kernels that do both at once.")
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = key("default", "Free gathered parameters after forward. `default`: in the embedding and every block but not in the head, which backward needs first.")
    fsdp_copy_engines: Literal["default", "always", "never"] = key("default", "Gather weights and reduce gradients by the GPUs' copy engines instead of NCCL, which takes multiprocessors from matmuls. `default`: where 2 to 8 GPUs of one host, which is taken to have 8, share each parameter, have compute capability 9.0, and `training.mixed_precision_reduce` is float32.")


@dataclass(frozen=True)
class Comm:
    """Time limits. When one is exceeded, the run ends with a message instead of hanging; after half of it the log says where each rank is. Time in which a job is suspended does not count."""

    init_timeout_seconds: Seconds = key(600, "Limit where the compiler or the disk is at work: start-up, the first step, validation, saving.")
    train_timeout_seconds: Seconds = key(180, "Limit for every other step.")


@dataclass(frozen=True)
class ActivationCheckpoint:
    """Activations that are kept; the rest are recomputed."""

    recipe: str = key("none", "Name of a save-list (`titanlite recipes activation_checkpoint`), the path of one, or `auto`: the fastest within `budget_gib`.")
    budget_gib: PositiveFloat | None = key(None, "Peak memory, in GiB, that the run may reserve on each GPU (`memory_gib` in metrics.jsonl). `auto` keeps to it; another list that is predicted to need more is refused. CUDA, NCCL and copy engines need a few GiB more.")


@dataclass(frozen=True)
class Float8:
    """Float8 arithmetic of linear layers."""

    recipe: str = key("none", "`none`, the name of a float8 recipe (`titanlite recipes float8`), or the path of one.")
    filter_fqns: tuple[str, ...] = key(("output",), "Layers to exclude: a linear layer is skipped if its name contains one of these.")


@dataclass(frozen=True)
class Compile:
    """torch.compile."""

    enable: bool = key(True, "Compile each block.")


@dataclass(frozen=True)
class Validation:
    """Loss on held-out text. Bits per byte of it compare models with different tokenizers."""

    enable: bool = key(False, "Validate every `freq` steps and after the last one.")
    source: str = key("python_stdlib_held_out", "Like `data.source`. `python_stdlib_held_out` is the part that `python_stdlib` leaves out.")
    sources: tuple[str, ...] = key((), "More held-out sources, each written `NAME=SOURCE`. Each has numbers of its own in metrics.jsonl: `validation_loss.NAME` and `validation_bits_per_byte.NAME`.")
    freq: PositiveInt = key(500, "Steps between validations.")
    steps: CountOrAll = key(-1, "Global batches per validation. -1: the whole source once.")
    weights: Literal["model", "ema", "both"] = key("model", "Weights to validate: those that are trained (`model`), their average (`ema`, with `optimizer.ema_decay`), or one after the other. Losses of the average are `validation_loss_ema` and `validation_bits_per_byte_ema` in metrics.jsonl.")
    samples: tuple[str, ...] = key((), "Texts that the model continues at each validation, by its likeliest tokens: on the console, in samples.jsonl, TensorBoard and wandb, and in the report of `titanlite compare`.")
    sample_tokens: PositiveInt = key(64, "Tokens that are added to each of `samples`.")


@dataclass(frozen=True)
class Evaluation:
    """Multiple-choice tasks, answered by log-likelihood."""

    tasks: tuple[str, ...] = key((), "Each `hellaswag`, `arc_easy`, `arc_challenge` or `piqa`, from the hub or the cache of `datasets`; the path of a .jsonl file of your own, one `{\"query\": …, \"choices\": […], \"gold\": 0}` a line; or `NAME=PATH`. It logs `accuracy.NAME` and, by the choices' bytes, `accuracy_norm.NAME`.")
    freq: PositiveInt | None = key(None, "Steps between evaluations; there is one after the last step, too. Not given: 1000, or more where a step has few tokens, so that at most 2 % as many tokens are evaluated as are trained on: below 1 % of the time.")


@dataclass(frozen=True)
class Checkpoint:
    """Saving and resuming."""

    enable: bool = key(True, "Save checkpoints, and resume from them.")
    interval: PositiveInt = key(500, "Steps between checkpoints; the last step is always saved.")
    keep_latest_k: NonNegativeInt = key(3, "Complete checkpoints to keep. 0: all.")
    keep_best: str = key("", "A loss of the validation, such as `validation_loss`, by its key in metrics.jsonl. The complete checkpoint with the lowest one, measured at its own step, is kept beside the newest `keep_latest_k`. Empty: none is.")
    mirror: str = key("", "URL of a store that gets a copy of each complete checkpoint while training goes on: `s3://bucket/run`, or of any other protocol of fsspec. A run whose folder has no checkpoint loads the newest one of the mirror. Keys and endpoint come from fsspec's configuration and the environment. Empty: none.")
    mirror_keep_latest_k: NonNegativeInt | None = key(None, "Complete checkpoints to keep in the mirror, and the best one. 0: all. Not given: as `keep_latest_k`.")
    mirror_wait_seconds: Seconds = key(600, "Longest wait for the mirror after the last step. A stop by a signal waits 20 seconds at most; the next start copies what is lacking.")
    async_mode: Literal["disabled", "async"] = key("disabled", "`disabled`: training waits until the checkpoint is written. `async`: training waits only until the tensors are copied to host memory; a thread then writes them.")
    resume: Literal["auto", "never"] | PositiveInt = key("auto", "`auto`: the newest complete checkpoint, or a fresh start if there is none. `never`: the run folder must be new. A number: the checkpoint of that step.")
    initial_load_path: str = key("", "Folder that a fresh run begins from; ignored when resuming. In Hugging Face's layout (config.json, safetensors): its weights. A run of titanlite, or one of its checkpoints: weights, optimizer and place in the data, to go on from as a branch. `hf:OWNER/MODEL[@REVISION]`: the weights of a model of the Hugging Face hub. Empty: random weights from `training.seed`.")


@dataclass(frozen=True)
class Metrics:
    """Metrics that are logged, and where."""

    log_freq: PositiveInt = key(1, "Steps between log lines. In between, the host does not wait for the device.")
    float8_numerics_freq: NonNegativeInt = key(0, "Steps between measurements of float8 error in each converted layer. Each takes one more forward pass, without the compiler, on the step's first micro-batch. It logs to metrics.jsonl, per layer, `float8_input_saturated.<layer>` and `float8_weight_saturated.<layer>` (fraction of values beyond the range), `float8_input_flushed.<layer>` and `float8_weight_flushed.<layer>` (fraction that became zero), and `float8_output_sqnr_db.<layer>` (signal-to-noise ratio of the output against that in `training.mixed_precision_param`). 0: off.")
    wandb: Literal["off", "offline", "online"] = key("off", "Weights & Biases. It never ends a run: what it cannot send stays in metrics.jsonl. `offline` writes `wandb/` in the run's folder, for `wandb sync`. It needs the extra `wandb`.")
    wandb_project: str = key("titanlite", "Project in Weights & Biases.")
    wandb_group: str = key("", "Group in Weights & Biases; runs of one group are plotted together.")
    tensorboard: bool = key(False, "Write `tensorboard/` in the run's folder as well, under the same names: `tensorboard --logdir <dump_folder>`. It needs the extra `tensorboard`, and never ends a run.")


@dataclass(frozen=True)
class Profiling:
    """A profile of a few steps, for `titanlite explain`."""

    enable: bool = key(False, "Write to `profile/` a summary of each rank, which `titanlite explain` reads, a trace of rank 0, `rank0.json.gz` (open it in Perfetto), and a table of its longest kernels.")
    start_step: PositiveInt = key(10, "First step of the profile.")
    steps: PositiveInt = key(3, "Steps in the profile.")


# fmt: on
@dataclass(frozen=True)
class Config:
    """A whole run."""

    job: Job = Job()
    model: Model = Model()
    data: Data = Data()
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LRScheduler = LRScheduler()
    parallelism: Parallelism = Parallelism()
    comm: Comm = Comm()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    float8: Float8 = Float8()
    compile: Compile = Compile()
    validation: Validation = Validation()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    metrics: Metrics = Metrics()
    profiling: Profiling = Profiling()


@functools.cache
def sections() -> dict[str, type]:
    """Return the sections of the schema and their dataclasses, in order."""
    hints = get_type_hints(Config)
    return {f.name: hints[f.name] for f in fields(Config)}


@functools.cache
def schema_keys() -> dict[str, Any]:
    """Return every dotted key of the schema and its type, in order."""
    return {
        f"{section}.{name}": hint for section, cls in sections().items() for name, hint in get_type_hints(cls).items()
    }


def help_texts(table: type) -> dict[str, str]:
    """Return the help text of each key of a table of the schema."""
    return {f.name: f.metadata["help"] for f in fields(table) if "help" in f.metadata}
