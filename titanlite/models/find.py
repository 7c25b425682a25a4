"""The class of a config's model: of a shipped architecture, or of a file of the user's own."""

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

from torch import nn

from titanlite.config.architectures import architecture
from titanlite.config.schema import Model
from titanlite.errors import ConfigError, Problem, describe


def model_class(model: Model) -> type[Any]:
    """Import the architecture of a config.

    Args:
        model: `[model]`; `file` exists if it is given.

    Returns:
        The class: made of (dimensions, seq_len), it has `tok_embeddings`, `layers`, `norm`, `output`, `sharding` and
        `fill_buffers`, and takes [M] int64 token ids to logits [M, V].

    Raises:
        ConfigError: the user's file has no such class, or several.
    """
    known = architecture(model)
    if known is not None:
        return getattr(importlib.import_module(f"titanlite.models.{model.name}"), known.class_name)
    name = f"titanlite_model_{Path(model.file).stem}"  # a name of its own: it may be called torch.py
    spec = importlib.util.spec_from_file_location(name, model.file)
    assert spec is not None  # noqa: S101  # `config/check.py` has seen that it is a Python file
    assert spec.loader is not None  # noqa: S101
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # where dataclasses and the compiler look
    spec.loader.exec_module(module)
    own = [
        c for _, c in inspect.getmembers(module, inspect.isclass) if c.__module__ == name and issubclass(c, nn.Module)
    ]
    found = [c for c in own if hasattr(c, "fill_buffers")]
    if len(found) != 1:
        names = ", ".join(c.__name__ for c in found) or "no such class"
        want = "one class with a method `fill_buffers`, which is the model, as in titanlite/models/llama3.py"
        fix = "leave one in the file" if found else "def fill_buffers(self) -> None, empty if there are no buffers"
        raise ConfigError(describe(model.file, [Problem("model.file", names, want, fix)]))
    return found[0]
