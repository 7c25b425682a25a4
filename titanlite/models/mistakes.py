"""An exception out of a model file of a user's own, as one message with the user's line."""

import traceback

from titanlite.errors import Problem


def mistake(error: Exception, file: str, want: str, fix: str) -> Problem:
    """Say where in a user's file an exception arose, and what it was.

    Args:
        error: as it was caught.
        file: the user's; what it calls is not looked at.
        want: what should have happened.
        fix: the change that makes it happen.

    Returns:
        The problem, with the innermost line of the file; without one, if none of its lines was running.
    """
    said = next((line for line in str(error).splitlines() if line), "")
    saw = f"{type(error).__name__}: {said}" if said else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename == file:
        return Problem((error.text or "").strip(), saw, want, fix, error.lineno)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if not frames:
        return Problem("model.file", saw, want, fix)
    return Problem(f"in {frames[-1].name}: {frames[-1].line}", saw, want, fix, frames[-1].lineno)
