"""Choose the config that `titanlite new` writes for a machine.

Batch and learning rate follow from the compute of the whole run, by the power laws of DeepSeek LLM (arXiv 2401.02954,
section 3.1): B = 0.2920·C^0.3271 tokens and η = 0.3118·C^−0.1250, with C the FLOPs of forward and backward over all
tokens, rounded as a person would round them. The laws were fitted to runs of at least 1e17 FLOPs. A smaller run takes
the learning rate of 1e17 FLOPs, as no higher one was tried. Its batch follows from its own C: the batch of 1e17 FLOPs
would leave hardly a step. A mixture of experts takes at most `MIXTURE_LR`, because a router can spike at a learning
rate that suits a dense model. Layout, micro-batch and save-list are chosen by `forecast/search.py`.
"""

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from titanlite import recipes
from titanlite.commands.new_wishes import Wishes, wished_inputs, wished_model
from titanlite.config.recipe_schema import ModelDims
from titanlite.config.schema import Config
from titanlite.data.inputs import Inputs, check_inputs
from titanlite.data.stages import stage_table
from titanlite.data.tokenizer import few_ids, rows_for
from titanlite.errors import ConfigError, TitanliteError
from titanlite.forecast.attended import AttendedShare, attended_share
from titanlite.forecast.memory import GPUS_OF_A_HOST, MemoryModel, usable
from titanlite.forecast.outlook import Outlook, outlook, token_flops
from titanlite.forecast.search import (
    LEAST,
    RESERVE_GIB,
    Candidate,
    Setting,
    best,
    candidates_of_layout,
    cpu_candidates,
    gpu_candidates,
    optimizer_rules,
    processes_that_fit,
)
from titanlite.models.experts import count_parameters
from titanlite.models.find import build_model
from titanlite.observe.peak_flops import dense_bf16_flops, peak_flops
from titanlite.preflight.machine import Machine

TOKENS_A_PARAMETER = 20
"""Tokens per parameter that make the best use of a compute budget for a dense model (Hoffmann et al., arXiv
2203.15556). For a mixture of experts only parameters that a token uses count, since compute depends on these."""

FITTED_FROM = 1e17
"""FLOPs of the smallest runs that the power laws of batch and learning rate were fitted to."""

MIXTURE_LR = 4e-4
"""Highest peak learning rate of a mixture of experts; docs/how_to/mixture_of_experts.md recommends to begin with it."""

MOST_TOKENS_A_STEP = 2**23
"""Largest global batch in tokens: Llama 3 405B's for its first 2.87 trillion tokens (arXiv 2407.21783)."""

CPU_MFU = 0.2
"""Share of a matmul's speed that training on a CPU is assumed to reach. configs/debug.toml reaches 0.18 to 0.32."""

_LARGE = 5 * 10**8  # least number of parameters of a model that is trained on long sequences
_CPU_VALIDATION = 8  # global batches per validation on a CPU
_SAVES_EVERY_S = 3600.0


@dataclass(frozen=True)
class Choices:
    """The run that was chosen for a machine, and the numbers that explain the choice.

    Attributes:
        parameters: number of parameters of the model; a token uses `active` of them.
        tokens: number of tokens that the run is meant to train on.
        chosen: the chosen layout, batch and save-list; `candidates` are all that were tried.
        compute: FLOPs of the run.
        float8: how many times as fast the chosen layout would be with float8; None: not possible, or not known.
    """

    config: Config
    dims: ModelDims
    inputs: Inputs
    machine: Machine
    parameters: int
    active: int
    tokens: int
    chosen: Candidate
    candidates: Sequence[Candidate]
    compute: float
    outlook: Outlook
    float8: float | None

    @property
    def trained_on(self) -> int:
        """Return the number of tokens that the chosen steps train on."""
        training = self.config.training
        return training.steps * (training.global_batch_size or 1) * training.seq_len


class UnfitError(ConfigError):
    """A model does not fit the machine. `short` has the reason in few words."""

    short = ""


def choose_run(name: str, wishes: Wishes, machine: Machine) -> Choices:
    """Choose the config of a run called `name`; raise an `UnfitError` if the model does not fit the machine."""
    config, inputs = wished_inputs(_with(Config(model=wished_model(wishes.model)), job={"name": name}), wishes)
    config = _with(config, model={"vocab_size": _vocabulary(inputs, recipes.model_dims(config))})
    dims = recipes.model_dims(config)
    parameters, active = count_parameters(build_model(config.model, dims, 1))
    tokens = wishes.tokens or TOKENS_A_PARAMETER * active
    is_cpu = machine.rates is None
    usual = 256 if is_cpu else 8192 if parameters >= _LARGE else 2048
    S = wishes.seq_len or min(usual, dims.max_seq_len or usual)
    config = _with(config, training={"seq_len": S})
    if config.data.source != Config().data.source and inputs.sources["data.source"].kind != "tokens":
        config = _with(config, data={"max_tokens": tokens})  # the shipped source is never cut
    attended = None if is_cpu else _attended(config, dims)
    flops = token_flops(config, dims)
    compute = float(flops) * tokens
    config = _with(
        config,
        training={"global_batch_size": fitted_batch(compute, S)},
        parallelism={"async_tensor_parallel": machine.rates is not None and machine.is_measured},
    )
    if is_cpu:
        config = _with(config, training={"mixed_precision_param": "float32"}, compile={"enable": False})
    host = GPUS_OF_A_HOST if machine.rates is None else machine.rates.host
    setting = Setting(dims, None, optimizer_rules(config), machine.rates, attended, host)
    base = Candidate(setting, machine.world, config)
    candidates = cpu_candidates(base, machine.gib) if is_cpu else gpu_candidates(base)
    chosen = best(candidates)
    if chosen is None:
        raise _does_not_fit(candidates, machine, wishes)
    lr = fitted_learning_rate(compute)
    lr = lr if dims.experts is None else min(lr, MIXTURE_LR)
    config = _with_length(chosen.config, tokens, lr)
    check_inputs(config, dims.vocab_size, config.training.global_batch_size)
    expected = _outlook(chosen, config, machine, token_flops(config, dims, attended))
    interval = max(1, min(expected.steps, _rounded(expected.steps * _SAVES_EVERY_S / (86_400 * expected.days))))
    return Choices(
        config=_with(config, checkpoint={"interval": interval}, data={"tokenizer": wishes.tokenizer}),
        dims=dims,
        inputs=inputs,
        machine=machine,
        parameters=parameters,
        active=active,
        tokens=tokens,
        chosen=chosen,
        candidates=candidates,
        compute=compute,
        outlook=expected,
        float8=_float8_gain(chosen, machine),
    )


def parameters_of(name: str) -> int:
    """Return the number of parameters of a named model with its own vocabulary."""
    model = wished_model(name)
    return count_parameters(build_model(model, recipes.model_dims(Config(model=model)), 1))[0]


def default_model(machine: Machine) -> str:
    """Return the largest Llama 3 whose weights, gradients and moments take less than half of a machine's memory."""
    if machine.rates is None:
        return "llama3-debug"
    sizes = {name: parameters_of(name) for name in recipes.names("model") if name.startswith("llama3-")}
    room = machine.gib * machine.world * 2**30 / 2 / 16
    return max(sizes, key=lambda name: (sizes[name] <= room, sizes[name] if sizes[name] <= room else -sizes[name]))


def _vocabulary(inputs: Inputs, dims: ModelDims) -> int | None:
    """Return the number of rows that the embedding needs for the tokenizer; None: the recipe's number is kept."""
    n_ids = inputs.tokenizer.vocab_size if inputs.tokenizer else 0
    is_other = n_ids and (n_ids > dims.vocab_size or few_ids(n_ids, "", dims.vocab_size, ""))
    if is_other:
        return rows_for(n_ids)
    return rows_for(dims.vocab_size) if dims.vocab_size % 64 else None


def fitted_learning_rate(compute: float) -> float:
    """Return the peak learning rate for a run of `compute` FLOPs by the power law, rounded to one digit."""
    return float(f"{0.3118 * max(compute, FITTED_FROM) ** -0.1250:.0e}")


def fitted_batch(compute: float, seq_len: int) -> int:
    """Return the sequences of a step for a run of `compute` FLOPs by the power law: the nearest power of two."""
    return 2 ** max(0, round(math.log2(min(0.2920 * compute**0.3271, MOST_TOKENS_A_STEP) / seq_len)))


def _rounded(number: float, digits: int = 1) -> int:
    return round(float(f"{number:.{digits - 1}e}"))


def _with(config: Config, **sections: Mapping[str, object]) -> Config:
    """Return a copy of `config` with new values for some keys of each section."""
    changed = {name: replace(getattr(config, name), **keys) for name, keys in sections.items()}
    return replace(config, **changed)


def _attended(config: Config, dims: ModelDims) -> AttendedShare | None:
    """Return the lengths of documents in the data. None if documents are not masked, or the data is not prepared."""
    if not config.data.document_mask:
        return None
    return attended_share(config, stage_table(config, None), check_inputs(config, dims.vocab_size, 1).shards)


def _does_not_fit(candidates: Sequence[Candidate], machine: Machine, wishes: Wishes) -> UnfitError:
    """Return the error for a model that does not fit the machine, with the number of GPUs on which it would fit."""
    least = min(candidates, key=lambda candidate: candidate.on_device, default=None)
    if least is None:
        want = f"a number that {wishes.model} can be split over: no layout of it divides its heads and batch"
        error = UnfitError.of("command line", "--world", str(machine.world), want, "--world 8")
        error.short = "no layout divides its heads and batch"
        return error
    need = least.on_device / usable(1)
    want = f"a model that fits {machine}: the least that it takes on each are {need:.1f} GiB"
    config = _with(least.config, training={"global_batch_size": None})
    limit = usable(machine.gib - RESERVE_GIB)
    memory = MemoryModel(config, least.setting.dims, None, least.setting.rules, machine.world)
    more = machine.rates and processes_that_fit(memory, LEAST, limit)
    fix = f"{more}, or a smaller model" if more else "a smaller model"
    error = UnfitError.of("command line", "--model", wishes.model, want, f"{fix}: titanlite recipes model")
    error.short = f"at least {need:.1f} GiB on each" + (f"; it fits with {more}" if more else "")
    return error


def _outlook(chosen: Candidate, config: Config, machine: Machine, flops: float) -> Outlook:
    """Predict a run's speed and length: by the forecast, or on a CPU by the speed of a matmul. `flops`: per token."""
    if machine.rates is None:
        peak = _peak_of_a_process() * min(1.0, (os.cpu_count() or 1) / machine.world)
        return outlook(config, flops, machine.world, CPU_MFU * peak / flops, peak)
    peak = dense_bf16_flops(machine.rates.device) or 0.0
    return outlook(config, flops, machine.world, chosen.tokens_per_second, peak)


def _peak_of_a_process() -> float:
    """Return the matmul FLOPs per second of one process on this CPU: of one thread, which is what training gives each.

    Where other programs run, several threads wait for each other: one alone may then be fifty times as fast.
    """
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        return peak_flops(torch.device("cpu"), torch.float32)[0]
    finally:
        torch.set_num_threads(threads)


def _with_length(config: Config, tokens: int, lr: float) -> Config:
    """Set the learning rate, the steps that train on `tokens`, the warmup, and validation on the shipped source."""
    training = config.training
    steps = max(1, _rounded(tokens / ((training.global_batch_size or 1) * training.seq_len), 3))
    warmup = {"warmup_steps": min(2000, max(1, _rounded(steps / 50)))}
    config = _with(config, training={"steps": steps}, optimizer={"lr": lr}, lr_scheduler=warmup)
    if config.data.source != Config().data.source:
        return config
    n_batches = _CPU_VALIDATION if training.mixed_precision_param == "float32" else -1
    return _with(config, validation={"enable": True, "freq": max(1, min(500, steps // 10)), "steps": n_batches})


def _float8_gain(chosen: Candidate, machine: Machine) -> float | None:
    """Return how many times as fast `chosen` is with the float8 recipe rowwise; None: not possible, or not known."""
    if machine.rates is None or not machine.is_measured:
        return None
    setting = replace(chosen.setting, float8=recipes.load("float8", "rowwise"))
    with suppress(TitanliteError):  # raised if float8 does not suit the model's layers
        faster = best(candidates_of_layout(replace(chosen, setting=setting).changed("float8", "recipe", "rowwise")))
        return faster.tokens_per_second / chosen.tokens_per_second if faster else None
    return None
