"""Report an exception out of a user's own file as one message: its line, the exception, and what was called."""

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

# Below the user's last line: what they did there is not the user's mistake, though a call of theirs led to it.
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
    """Turn what a user's file raises within a context into one message.

    Args:
        file: the user's; "": there is none, and what is raised is a bug.
        want: what was called, and what it should do.
        fix: the change that makes it do so.
        called: the function that was called.
        kind: of the error.
        key: that names the file, for what none of its lines and functions raises.

    Raises:
        ConfigError: something was raised that is neither an error on purpose nor of the machine.
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
    """Return whether a model is of a user's own file."""
    return not type(model).__module__.startswith("titanlite.")


def forward_refused(model: nn.Module, kind: type[ConfigError] = ConfigError) -> AbstractContextManager[None]:
    """Refuse a model of the user's own that does not run on tensors without values, by which all is predicted.

    Args:
        model: any; what a shipped one raises is a bug.
        kind: as of `refused`.
    """
    called, file = type(model), inspect.getfile(type(model)) if is_own(model) else ""
    want = f"{called.__name__}.forward(tokens) to run, also on tensors without values (the meta device)"
    fix = "change that line; if it looks at what a tensor holds (a branch, item(), numpy()): torch.where chooses"
    return refused(file, want, f"{fix} by value", called.forward, kind)


def looks_at_values(error: BaseException) -> bool:
    """Return whether an exception is torch's, of a tensor of the meta device: that it has no values, or no kernel."""
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
    """Say where in a user's file an exception arose, and what it was.

    Args:
        error: as it was caught.
        file: the user's, as Python names it; what it calls is not looked at.
        want: what should have happened.
        fix: the change that makes it happen.
        called: the user's function that could not be called, if none of the file's lines was running.
        key: that names the file.

    Returns:
        The problem, with the innermost line of the file; without one, if none of its lines was running.
    """
    text = next((line for line in str(error).splitlines() if line), "")
    saw = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename == file:
        return Problem((error.text or "").strip(), saw, want, fix, error.lineno)
    # The compiler tells apart what it was looking at.
    frames = [*traceback.extract_tb(error.__traceback__), *(getattr(error, "real_stack", None) or ())]
    own = [frame for frame in frames if frame.filename == file]
    if own:
        return Problem(f"in {own[-1].name}: {own[-1].line}", saw, want, fix, own[-1].lineno)
    return of_function(called, file, saw, want, fix) if called else Problem(key, saw, want, fix)


def mistake_of_model(error: BaseException, file: str, want: str, fix: str) -> Problem:
    """Say what arose in a model file, with its name and line where a message of no file is to have them.

    Args:
        error, want, fix: as of `mistake`.
        file: `model.file`.
    """
    why = mistake(error, os.path.abspath(file), want, fix)
    return why if why.line is None else why._replace(where=f"line {why.line} of {file}, {why.where}", line=None)


def of_function(function: Callable[..., Any], file: str, saw: str, want: str, fix: str) -> Problem:
    """Make a problem of a user's function or class, with its line if it is in the user's file."""
    line = None
    if getattr(inspect.getmodule(function), "__file__", None) == os.path.abspath(file):
        with suppress(OSError):  # of what was made by `type` or `exec`
            line = inspect.getsourcelines(function)[1]
    return Problem(function.__qualname__, saw, want, fix, line)


def blamed(error: BaseException, file: str, log: object, want: str) -> ConfigError | None:
    """Tell an exception that arose in a user's file while a run called it.

    Args:
        error: as it was caught.
        file: the user's.
        log: where the whole traceback is to be found.
        want: what the file is for.

    Returns:
        The error to end with; None if it is one already, or is of the machine, the other ranks or titanlite's own.
    """
    if not isinstance(error, Exception) or isinstance(error, (TitanliteError, *OF_THE_MACHINE)):
        return None
    found = mistake(error, file, want, f"change that line; the whole traceback is in {log}")
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    below = frames[len(frames) - frames[::-1].index(file) :] if file in frames else []
    if found.line is None or any(part in name for part in _NOT_THEIRS for name in below):
        return None
    return ConfigError(describe(file, [found]))
