"""The range of every number of the config.

Their types were checked when they were read; what they are held against besides, each other and the model's dimensions,
is in `check.py`.
"""

from operator import attrgetter

from titanlite.config.build import show
from titanlite.config.problems import Problems
from titanlite.config.renamed import replacement
from titanlite.config.schema import Config

RANGES = {  # of every numeric key: [ ] include the bound, ( ) exclude it; -1 stands for all, and 0 is none
    "job.stop_after": "[0, inf)",
    "model.n_layers": "[1, 10000]",  # each is looked at by name
    "model.dim": "[1, inf)",
    "model.n_heads": "[1, inf)",
    "model.n_kv_heads": "[1, inf)",
    "model.ffn_dim": "[1, inf)",
    "model.vocab_size": "[1, inf)",
    "model.rope_theta": "(0, inf)",
    "model.logit_softcap": "[0, inf)",
    "data.separator_id": "[0, inf)",
    "data.max_tokens": "[0, inf)",
    "data.max_bad_records": "[0, inf)",
    "data.max_record_mib": "[1, 1048576]",  # a tebibyte; what is larger by far cannot be asked for from a file
    "data.shuffle_window": "[0, inf)",
    "data.prepare_lead": "[0, inf)",
    "training.steps": "[1, inf)",
    "training.tokens": "[0, inf)",
    "training.seq_len": "[1, inf)",
    "training.local_batch_size": "[1, inf)",
    "training.global_batch_size": "[1, inf)",
    "training.max_norm": "[0, inf)",
    "training.z_loss": "[0, inf)",
    "training.seed": "[0, 4294967295]",
    "training.nudge": "[0, inf)",
    "optimizer.lr": "(0, inf)",
    "optimizer.beta1": "[0, 1)",
    "optimizer.beta2": "[0, 1)",
    "optimizer.eps": "(0, inf)",
    "optimizer.weight_decay": "[0, inf)",
    "optimizer.ema_decay": "[0, 1)",
    "lr_scheduler.warmup_steps": "[0, inf)",
    "lr_scheduler.warmup_tokens": "[0, inf)",
    "lr_scheduler.decay_ratio": "(0, 1]",
    "lr_scheduler.min_lr_factor": "[0, 1]",
    "parallelism.data_parallel_replicate_degree": "[1, inf)",
    "parallelism.data_parallel_shard_degree": "[-1, inf)",
    "parallelism.tensor_parallel_degree": "[1, inf)",
    "parallelism.context_parallel_degree": "[1, inf)",
    "parallelism.expert_parallel_degree": "[1, inf)",
    "comm.init_timeout_seconds": "[1, 31536000]",  # a year; a timedelta does not hold every number
    "comm.train_timeout_seconds": "[1, 31536000]",
    "activation_checkpoint.budget_gib": "(0, inf)",
    "validation.freq": "[1, inf)",
    "validation.steps": "[-1, inf)",
    "evaluation.freq": "[1, inf)",
    "checkpoint.interval": "[1, inf)",
    "checkpoint.keep_latest_k": "[0, inf)",
    "checkpoint.resume": "[1, inf)",
    "metrics.log_freq": "[1, inf)",
    "metrics.float8_numerics_freq": "[0, inf)",
    "profiling.start_step": "[1, inf)",
    "profiling.steps": "[1, inf)",
}

LIST_RANGES = {  # of the numbers in lists of tables
    "data.mixture[].weight": "[0, inf)",
    "data.mixture[].max_epochs": "(0, inf)",
    "data.stage[].from_tokens": "[0, inf)",
    "data.stage[].seq_len": "[1, inf)",
    "data.stage[].global_batch_size": "[1, inf)",
    "data.stage[].local_batch_size": "[1, inf)",
    "data.stage[].lr_decay_to": "[0, 1]",
}

GROUP_RANGES = {  # of the numbers of an optimizer recipe's groups
    "lr_factor": "(0, inf)",
    "weight_decay": "[0, inf)",
    "beta1": "[0, 1)",
    "beta2": "[0, 1)",
    "eps": "(0, inf)",
    "momentum": "[0, 1)",
}

# Past these a device has 0 or infinity for a number that is neither: an eps of 0 makes NaN where gradients are zero.
_FLOAT32_NORMAL = 2.0**-126, (2 - 2.0**-23) * 2.0**127


def check_ranges(config: Config, problems: Problems) -> None:
    """Refuse numbers out of their range, as NaN always is, and those that float32 does not hold."""
    for key, span in RANGES.items():
        value, default, name = attrgetter(key)(config), attrgetter(key)(Config()), key.partition(".")[2]
        fix = f"{name} = {show(default)} (the default)" if default is not None else f"leave {name} out"
        fix = replacement(key, value) or fix
        if isinstance(value, int | float) and (want := out_of_range(value, span)):
            problems.add(key, show(value), want, fix)
        elif value == 0 and span.startswith("[-1"):
            problems.add(key, "0", "-1 (all) or at least 1", f"{name} = -1")
    for key, span in LIST_RANGES.items():
        tables, _, name = key.partition("[].")
        for n, table in enumerate(attrgetter(tables)(config)):
            value = getattr(table, name)
            if value is not None and not _inside(value, span):
                problems.add(f"{tables}[{n}].{name}", show(value), _range_in_words(span, value), f"another {name}")


def out_of_range(value: float, span: str) -> str | None:
    """Say which numbers are in a range if `value` is not, or if float32 does not hold it; else None."""
    least, most = _FLOAT32_NORMAL
    if not _inside(value, span):
        return _range_in_words(span, value)
    if isinstance(value, float) and value and not least <= value <= most:
        return f"{_range_in_words(span, value)}, that float32 can hold: {least:.3g} to {most:.3g}"
    return None


def _inside(value: float, span: str) -> bool:
    low, high = (float(bound) for bound in span[1:-1].split(","))
    return (value >= low if span[0] == "[" else value > low) and (value <= high if span[-1] == "]" else value < high)


def _range_in_words(span: str, value: float) -> str:
    """Say which numbers a range holds, as "a whole number, at least 1"."""
    low, high = span[1:-1].split(", ")
    bounds = [f"{'at least' if span[0] == '[' else 'above'} {low}"]
    if high != "inf":
        bounds.append(f"{'at most' if span[-1] == ']' else 'below'} {high}")
    return f"{'a whole number' if isinstance(value, int) else 'a number'}, {' and '.join(bounds)}"
