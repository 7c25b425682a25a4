"""Check each number against the range of its field in the schema, such as `Annotated[int, "[1, inf)"]`."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, cast, get_origin, get_type_hints

from titanlite.config.build import describe_type, options_of
from titanlite.config.problems import Problems, show
from titanlite.config.torchtitan import answer_to_value

# Beyond these bounds a number becomes 0 or infinity on a device. An eps of 0 makes NaN where gradients are zero.
_FLOAT32_NORMAL = 2.0**-126, (2 - 2.0**-23) * 2.0**127


def range_of(hint: Any) -> str:
    """Return the range of a type, such as "[0, inf)"; "" if it has none."""
    return next((str(o.__metadata__[0]) for o in options_of(hint) if get_origin(o) is Annotated), "")


def check_ranges(table: object, problems: Problems, where: str = "", fix: str = "", unsaid: str = "") -> None:
    """Refuse numbers outside of their range, NaN included, and numbers that float32 cannot hold.

    Args:
        table: a dataclass; dataclasses in its fields are checked as well.
        problems: errors are added to it.
        where: prefix of the table's keys, as "training.".
        fix: advice for a key without a default, with `{}` for its name.
        unsaid: text added to the advice to leave a key out; it says where the value then comes from.
    """
    hints = get_type_hints(type(table), include_extras=True)
    for field in dataclasses.fields(cast("Any", table)):
        value, key, span = getattr(table, field.name), f"{where}{field.name}", range_of(hints[field.name])
        for name, inner in _tables_in(value):
            check_ranges(inner, problems, f"{key}{name}.", fix, unsaid)
        if not span or not isinstance(value, int | float):
            continue
        if want := out_of_range(value, span):
            given = field.default
            own = f"leave {field.name} out{unsaid}" if given is None else f"{field.name} = {show(given)} (the default)"
            own = (fix or "another {}").format(field.name) if given is dataclasses.MISSING else own
            problems.add(key, show(value), want, answer_to_value(key, value) or own)
        elif value == 0 and span.startswith("[-1"):
            problems.add(key, "0", "-1 (all) or at least 1", f"{field.name} = -1")


def _tables_in(value: object) -> Iterator[tuple[str, object]]:
    """Yield (suffix of the key, as "[0]", dataclass) for each dataclass: the value itself, or in a tuple or dict."""
    if dataclasses.is_dataclass(value):
        yield "", value
    elif isinstance(value, tuple):
        items = enumerate(cast("tuple[object, ...]", value))
        yield from ((f"[{n}]", item) for n, item in items if dataclasses.is_dataclass(item))
    elif isinstance(value, Mapping):
        tables = cast("Mapping[str, object]", value).items()
        yield from ((f".{name}", item) for name, item in tables if dataclasses.is_dataclass(item))


def out_of_range(value: float, span: str) -> str | None:
    """Return None if `value` is in the range and float32 can hold it, otherwise a text that gives the legal numbers."""
    least, most = _FLOAT32_NORMAL
    words = f"{'a whole number' if isinstance(value, int) else 'a number'}, {range_in_words(span)}"
    low, high = (float(bound) for bound in span[1:-1].split(","))
    is_above = value >= low if span[0] == "[" else value > low
    is_inside = is_above and (value <= high if span[-1] == "]" else value < high)
    if is_inside and isinstance(value, float) and value and not least <= value <= most:
        return f"{words}, that float32 can hold: {least:.3g} to {most:.3g}"
    return None if is_inside else words


def values_in_words(hint: Any) -> str:
    """Describe the legal values of a type in words, such as "a whole number, at least 1"."""
    span = range_of(hint)
    return f"{describe_type(hint)}, {range_in_words(span)}" if span else describe_type(hint)


def range_in_words(span: str) -> str:
    """Describe a range in words, such as "at least 1"."""
    low, high = span[1:-1].split(", ")
    above = "" if high == "inf" else f" and {'at most' if span[-1] == ']' else 'below'} {high}"
    return f"{'at least' if span[0] == '[' else 'above'} {low}{above}"
