"""Find a config's model: of a shipped architecture, or of a file of the user's own."""

import functools
import importlib
import importlib.util
import inspect
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from titanlite.config.architectures import ARCHITECTURES
from titanlite.config.problems import show
from titanlite.config.recipe_schema import ModelDims
from titanlite.config.schema import Model
from titanlite.errors import ConfigError, Problem, describe
from titanlite.models.experts import MixtureOfExperts
from titanlite.models.mistakes import of_function, refused
from titanlite.models.own_model import require_logits, require_trainable


def model_class(model: Model) -> type[Any]:
    """Import the architecture of a config.

    Args:
        model: `[model]`; `file` exists if it is given.

    Returns:
        The class: made of (dimensions, seq_len), it has `tok_embeddings`, `layers`, `norm`, `output`, `sharding` and
        `fill_buffers`, and takes [M] int64 token ids to logits [M, V].

    Raises:
        ConfigError: the user's file cannot be imported, or has no such class, or several.
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


def imported(file: str) -> ModuleType:
    """Import a user's file once in a process: it may register operators, which a second import could not.

    Args:
        file: `model.file` or `optimizer.file`.

    Raises:
        ConfigError: it cannot be imported.
    """
    with refused(file, "a Python file that can be imported", f"run `python {file}` until it has nothing to say"):
        return _module_of(os.path.abspath(file))


@functools.cache
def _module_of(path: str) -> ModuleType:
    name = f"titanlite_file_{Path(path).stem}"  # a name of its own: it may be called torch.py
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # noqa: S101  # `config/check.py` has seen that it is a Python file
    assert spec.loader is not None  # noqa: S101
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # where dataclasses and the compiler look
    spec.loader.exec_module(module)
    return module


def build_model(model: Model, dims: ModelDims, seq_len: int) -> Any:
    """Build the model of a config on the meta device.

    Args:
        model: `[model]`; `file` exists if it is given.
        dims: its dimensions.
        seq_len: tokens of a sequence.

    Raises:
        ConfigError: the user's file has no model class, or several; its model cannot be built, lacks a part, holds what
            no run can train, or returns no logits on tensors without values.
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
        require_logits(made, model.file, seq_len, dims.vocab_size)
        if "sequences" not in inspect.signature(made_by.forward).parameters:
            made.register_forward_pre_hook(functools.partial(_drop_sequences, model.file, made_by), with_kwargs=True)
    return made


def _drop_sequences(
    file: str, made_by: type[nn.Module], _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call a model that takes tokens alone, unless they are documents: its attention would cross them."""
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
