"""Parse JSON that a user wrote, or that a crash may have damaged: whatever is wrong with it is a ValueError."""

import json
from pathlib import Path
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Return what a text says.

    Raises:
        ValueError: it is not JSON, not UTF-8, or so deeply nested that only damage or intent can have written it.
    """
    try:
        return json.loads(text)
    except RecursionError as e:
        raise ValueError("nested too deeply") from e


def read_json(path: Path) -> Any:
    """Return what a file says.

    Raises:
        OSError: it cannot be read.
        ValueError: as `parse_json` says.
    """
    return parse_json(path.read_bytes())
