"""Build a config's model: a shipped architecture, or the class of a user's file."""

import functools
import importlib
import importlib.util
import inspect
import os
import sys
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from titanlite.config.architectures import ARCHITECTURES
from titanlite.config.problems import show
from titanlite.config.recipe_schema import ModelDims
from titanlite.config.schema import Model
from titanlite.errors import ConfigError, Problem, describe
from titanlite.models.experts import MixtureOfExperts
from titanlite.models.layers import RMSNorm
from titanlite.models.mistakes import of_function, refused
from titanlite.models.own_model import require_trainable


def model_class(model: Model) -> type[Any]:
    """Import the class of a config's model.

    Returns:
        The class. It is called with (dimensions, seq_len), and has `tok_embeddings`, `layers`, `norm`, `output`,
        `sharding` and `fill_buffers`. A model maps token ids [M] int64 to logits [M, V], V: size of the vocabulary.

    Raises:
        ConfigError: the user's file cannot be imported, or has no class of a model, or several.
    """
    if not model.file:
        known = ARCHITECTURES[model.name]
        shipped = importlib.import_module(f"titanlite.models.{known.module or model.name}")
        return getattr(shipped, known.class_name)
    module = imported(model.file)
    classes = [c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__]
    found = [c for c in classes if issubclass(c, nn.Module) and hasattr(c, "fill_buffers")]
    found = [c for c in found if c.forward is not nn.Module.forward and not issubclass(c, MixtureOfExperts)]
    if len(found) != 1:
        saw = f"{show(model.file)}, with {', '.join(c.__name__ for c in found) or 'no such class'}"
        want = "one class with `forward` and `fill_buffers`, which is the model, as in titanlite/models/llama3.py"
        fix = "leave one in the file" if found else "def fill_buffers(self) -> None, empty if there are no buffers"
        raise ConfigError(describe(model.file, [Problem("model.file", saw, want, fix)]))
    return found[0]


def imported(file: str, key: str = "model.file") -> ModuleType:
    """Import a user's file once per process, because it may register operators. Raise ConfigError if that fails.

    Args:
        file: path of the file.
        key: the config key that names the file: `model.file` or `optimizer.file`.
    """
    fix = f"run `python {file}` until it has nothing to say"
    with refused(file, "a Python file that can be imported", fix, key=key):
        return _module_of(os.path.abspath(file))


@functools.cache
def _module_of(path: str) -> ModuleType:
    # A unique module name: the file may be called torch.py, and a file of rules may have the model file's name.
    name = f"titanlite_file_{Path(path).stem}_{zlib.crc32(path.encode()):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # noqa: S101  # `config/check.py` has checked that it is a Python file
    assert spec.loader is not None  # noqa: S101
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # for dataclasses and the compiler
    spec.loader.exec_module(module)
    return module


def build_model(model: Model, dims: ModelDims, seq_len: int) -> Any:
    """Build the model of a config on the meta device.

    Raises:
        ConfigError: see `model_class` and `require_trainable`; or the user's class raises an exception. A call of a
            user's model raises it, too, if the model returns no logits or would attend across documents.
    """
    made_by = model_class(model)
    want = f"{made_by.__name__}(sizes, seq_len) to build the model, on the meta device: of shapes, without values"
    fix = "change that line; what depends on values belongs in fill_buffers"
    with refused(model.file, want, fix, made_by.__init__), torch.device("meta"):
        made = made_by(dims, seq_len)
        mixtures = [module for module in made.modules() if isinstance(module, MixtureOfExperts)]
    for mixture in mixtures:
        mixture.n_layers = len(mixtures)
    if model.file:
        require_trainable(made, model.file)
        made.register_forward_hook(functools.partial(_require_logits, model.file, made_by))  # checks plans, too
        if "sequences" not in inspect.signature(made_by.forward).parameters:
            made.register_forward_pre_hook(functools.partial(_drop_sequences, model.file, made_by), with_kwargs=True)
        if isinstance(made.norm, RMSNorm) and made.output.weight is not made.tok_embeddings.weight:
            made.norm.fork = functools.partial(_require_call, model.file)
    return made


def _drop_sequences(
    file: str, made_by: type[nn.Module], _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Drop `sequences` from a call of a model that takes only tokens. Refuse documents: it would attend across them."""
    sequences = kwargs.pop("sequences", None)
    if sequences is not None and sequences.starts is not None:
        saw = "takes no `sequences`, and samples hold several documents"
        want = "def forward(self, tokens, sequences=None), and attention that uses `sequences.starts`"
        fix = "pass them to each block; or data.document_mask = false, for attention across documents"
        if sequences.group:
            saw = "takes no `sequences`, and context-parallel ranks have a part of each"
            want = "def forward(self, tokens, sequences=None), and attention that takes them"
            fix = "pass them to self.attend of each block; or parallelism.context_parallel_degree = 1"
        raise ConfigError(describe(file, [of_function(made_by.forward, file, saw, want, fix)]))
    return args, kwargs


def _require_logits(file: str, made_by: type[nn.Module], _: nn.Module, given: object, returned: object) -> None:
    """Raise ConfigError if a model returns anything but logits with a gradient; a forward hook."""
    if isinstance(returned, Tensor) and returned.ndim == 2:
        if returned.requires_grad or not torch.is_grad_enabled():
            return
        saw, want = "returned a tensor without a gradient", "logits that depend on weights, for backward"
        fix = "no detach, no_grad or argmax on the way to them"
    else:
        parts = returned if isinstance(returned, tuple | list) else [returned]
        saw = ", ".join(f"a tensor {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__ for x in parts)
        saw = "returned " + (f"{type(returned).__name__} of {saw}" if parts is returned else saw)
        want, fix = "logits, one tensor [M, V]: the loss is the trainer's", "return the logits alone"
    raise ConfigError(describe(file, [of_function(made_by.forward, file, saw, want, fix)]))


def _require_call(file: str, x: Tensor) -> NoReturn:
    """Refuse `fork` of the last norm: FSDP gathers the norm's weight, with the head's, only if the module is called."""
    want, fix = "the last norm called as a module: its weight is not there before", "normed = self.norm(x)"
    raise ConfigError(describe(file, [Problem("norm", "fork or add called", want, fix)]))
