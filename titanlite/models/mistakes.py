"""Report an exception raised in a user's own file as one message: the line, the exception, and the called function."""

import inspect
import os
import re
import traceback
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from titanlite.errors import ConfigError, Problem, TitanliteError, describe

# An exception raised in one of these folders, in a call from the user's last line, is not the user's mistake.
_NOT_THEIRS = ("/torch/distributed/", "/torch/_inductor/", "/titanlite/parallel/")
OF_THE_MACHINE = (dist.DistError, torch.OutOfMemoryError, getattr(torch, "AcceleratorError", dist.DistError))


@contextmanager
def refused(
    file: str,
    want: str,
    fix: str,
    called: Callable[..., Any] | None = None,
    kind: type[ConfigError] = ConfigError,
    key: str = "model.file",
) -> Generator[None]:
    """Turn an exception within the context into a ConfigError about a user's file; but let TitanliteError and
    `OF_THE_MACHINE` pass.

    Args:
        file: path of the user's file; "": there is none, and every exception passes.
        want: the function that is called, and what it should do.
        fix: the change that makes it do so.
        called: the function that is called.
        kind: class of the error to raise.
        key: the config key that names the file; shown if no line or function of the file is at fault.
    """
    try:
        yield
    except (TitanliteError, *OF_THE_MACHINE):
        raise
    except (Exception, SystemExit) as error:
        if not file:
            raise
        raise kind(describe(file, [mistake(error, os.path.abspath(file), want, fix, called, key)])) from error


def is_own(model: nn.Module) -> bool:
    """Return whether a model's class is defined in a user's file."""
    return not type(model).__module__.startswith("titanlite.")


def forward_refused(model: nn.Module, kind: type[ConfigError] = ConfigError) -> AbstractContextManager[None]:
    """Within the context, raise `kind` if a user's model fails on the meta device, where memory is computed."""
    called, file = type(model), inspect.getfile(type(model)) if is_own(model) else ""
    want = f"{called.__name__}.forward(tokens) to run, also on tensors without values (the meta device)"
    fix = "change that line; if it looks at what a tensor holds (a branch, item(), numpy()): torch.where chooses"
    return refused(file, want, f"{fix} by value", called.forward, kind)


def looks_at_values(error: BaseException) -> bool:
    """Return whether torch raised `error` because a meta tensor has no values, or an operator has no meta kernel."""
    is_torchs = isinstance(error, RuntimeError | TypeError)
    return is_torchs and re.search(r"\bmeta\b|Tensor\.__format__", str(error), re.IGNORECASE) is not None


def mistake(
    error: BaseException,
    file: str,
    want: str,
    fix: str,
    called: Callable[..., Any] | None = None,
    key: str = "model.file",
) -> Problem:
    """Return a `Problem` for an exception, with the innermost running line of the user's file, an absolute path.

    If no line of the file was running, the problem names the function `called`; without `called`, the config key `key`.
    """
    text = next((line for line in str(error).splitlines() if line), "")
    saw = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename == file:
        return Problem((error.text or "").strip(), saw, want, fix, error.lineno)
    # torch's compiler keeps the frames that it was tracing in a separate attribute.
    frames = [*traceback.extract_tb(error.__traceback__), *(getattr(error, "real_stack", None) or ())]
    own = [frame for frame in frames if frame.filename == file]
    if own:
        return Problem(f"in {own[-1].name}: {own[-1].line}", saw, want, fix, own[-1].lineno)
    return of_function(called, file, saw, want, fix) if called else Problem(key, saw, want, fix)


def mistake_of_model(error: BaseException, file: str, want: str, fix: str) -> Problem:
    """Return `mistake` for a model file, with file and line in `where`, for a message that is not about the file."""
    why = mistake(error, os.path.abspath(file), want, fix)
    return why if why.line is None else why._replace(where=f"line {why.line} of {file}, {why.where}", line=None)


def of_function(function: Callable[..., Any], file: str, saw: str, want: str, fix: str) -> Problem:
    """Return a `Problem` that names a function or class, with its line if the user's file defines it."""
    return Problem(function.__qualname__, saw, want, fix, line_of(function, file))


def line_of(function: Callable[..., Any], file: str) -> int | None:
    """Return the line at which a user's file defines a function or class; None if it is elsewhere or has no source."""
    if getattr(inspect.getmodule(function), "__file__", None) == os.path.abspath(file):
        with suppress(OSError, TypeError):
            return inspect.getsourcelines(function)[1]
    return None


def blamed(error: BaseException, file: str, log: object, want: str) -> ConfigError | None:
    """Return the ConfigError for an exception in training that is the fault of a user's file, else None.

    `file` is the absolute path of the file. `log` names the log with the whole traceback. `want` is as in `Problem`.
    """
    if not isinstance(error, Exception) or isinstance(error, (TitanliteError, *OF_THE_MACHINE)):
        return None
    found = mistake(error, file, want, f"change that line; the whole traceback is in {log}")
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    below = frames[len(frames) - frames[::-1].index(file) :] if file in frames else []
    if found.line is None or any(part in name for part in _NOT_THEIRS for name in below):
        return None
    return ConfigError(describe(file, [found]))
