"""Report an exception out of a user's own model file as one message with the user's line."""

import inspect
import os
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from titanlite.errors import ConfigError, Problem, TitanliteError, describe, nearest

# Below the user's last line: what they did there is not the user's mistake, though a call of theirs led to it.
_NOT_THEIRS = ("/torch/distributed/", "/torch/_inductor/", "/titanlite/parallel/")
OF_THE_MACHINE = (dist.DistError, torch.OutOfMemoryError, getattr(torch, "AcceleratorError", dist.DistError))


def mistake(error: BaseException, file: str, want: str, fix: str, called: Callable[..., Any] | None = None) -> Problem:
    """Say where in a user's file an exception arose, and what it was.

    Args:
        error: as it was caught.
        file: the user's; what it calls is not looked at.
        want: what should have happened.
        fix: the change that makes it happen.
        called: the user's function that could not be called, if none of the file's lines was running.

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
    return of_function(called, file, saw, want, fix) if called else Problem("model.file", saw, want, fix)


def mistake_of_model(error: BaseException, file: str, want: str, fix: str) -> Problem:
    """Say what arose in a model file, with its name and line where a message of no file is to have them.

    Args:
        error, want, fix: as of `mistake`.
        file: `model.file`.
    """
    why = mistake(error, os.path.abspath(file), want, fix)
    return why if why.line is None else why._replace(where=f"line {why.line} of {file}, {why.where}", line=None)


def of_function(function: Callable[..., Any], file: str, saw: str, want: str, fix: str) -> Problem:
    """Make a problem of a user's function, with its line if it is in the user's file."""
    code = getattr(function, "__code__", None)
    line = code.co_firstlineno if code and code.co_filename == file else None
    return Problem(function.__qualname__, saw, want, fix, line)


def nearest_method(kind: type, name: str) -> Callable[..., Any] | None:
    """Return the method of a user's class that was probably meant by a name that it lacks; None if none is near."""
    methods = {own: method for own, method in vars(kind).items() if inspect.isfunction(method)}
    near = nearest(name, methods)
    return methods[near] if near else None


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
