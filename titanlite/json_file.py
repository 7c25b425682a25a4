"""Parse JSON that a user wrote or a crash may have damaged, and check its types.

The description of a cache contains a hash, so that a changed number is found, too.
"""

import errno
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, cast, get_args, get_origin, get_type_hints

MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
"""The errors that code may raise when it reads malformed content."""


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text; raise ValueError if it is not JSON, not UTF-8, or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as e:
        raise ValueError("nested too deeply") from e


def read_json(path: Path) -> Any:
    """Parse a JSON file.

    Raises:
        OSError: the file cannot be read, or is a pipe or a device, which might block.
        ValueError: as `parse_json` raises it.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "a pipe or a device", str(path))
    return parse_json(path.read_bytes())


def with_hash(content: Mapping[str, Any], indent: int | None = None) -> str:
    """Return `content` as JSON together with its hash, which `without_hash` checks."""
    return json.dumps({**content, "hash": _digest(content)}, indent=indent)


def without_hash(read: Any) -> dict[str, Any]:
    """Check the hash in `read`, the parsed JSON of `with_hash`, and return the content without it.

    Raises:
        ValueError: the content does not match its hash.
        KeyError: there is no hash.
        TypeError: `read` is no JSON object.
    """
    content = {key: read[key] for key in read if key != "hash"}
    if read["hash"] != _digest(content):
        raise ValueError("another content than that of its hash")
    return content


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=8).hexdigest()


def as_type(hint: Any, value: Any) -> Any:
    """Build a value of the type `hint` from parsed JSON; raise one of `MALFORMED` if it does not fit exactly.

    Args:
        hint: a dataclass, Mapping with str keys, Sequence, tuple, finite float (an int is taken, too), 64-bit int, str
            or bool; or the union of one of these and None.
        value: parsed JSON.
    """
    args, origin = get_args(hint), get_origin(hint)
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        return hint(**{key: as_type(hints[key], each) for key, each in value.items()})  # type: ignore[operator]
    if NoneType in args:
        return None if value is None else as_type(args[0], value)
    if origin is Mapping and isinstance(value, dict):
        return {key: as_type(args[1], each) for key, each in cast("dict[str, Any]", value).items()}
    if origin is Sequence and isinstance(value, list):
        return [as_type(args[0], each) for each in cast("list[Any]", value)]
    if origin is tuple and isinstance(value, list):
        return tuple(as_type(each, one) for each, one in zip(args, cast("list[Any]", value), strict=True))
    is_integer = type(value) is int and abs(value) < 2**63
    if (is_integer and hint in (int, float)) or (type(value) is float is hint and math.isfinite(value)):
        return hint(value)
    if type(value) is hint and hint in (str, bool):
        return value
    raise ValueError(f"{str(value)[:40]} is not of the type {getattr(hint, '__name__', hint)}")
