"""Parse JSON that a user wrote, or that a crash may have damaged: whatever is wrong with it is a ValueError.

What a cache says of itself has a hash, so that a number that has changed is damage, too.
"""

import hashlib
import json
from collections.abc import Mapping
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


def with_hash(content: Mapping[str, Any], indent: int | None = None) -> str:
    """Return JSON that `without_hash` can hold against its hash."""
    return json.dumps({**content, "hash": _digest(content)}, indent=indent)


def without_hash(read: Any, *, is_required: bool = True) -> dict[str, Any]:
    """Return the content that `with_hash` was given.

    Raises:
        ValueError: it has changed.
        KeyError: it has no hash, as files of before it was written, and that `is_required`.
        TypeError: it is no object.
    """
    content = {key: read[key] for key in read if key != "hash"}
    if (is_required or "hash" in read) and read["hash"] != _digest(content):
        raise ValueError("another content than that of its hash")
    return content


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=8).hexdigest()
