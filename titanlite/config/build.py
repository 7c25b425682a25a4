"""Build a frozen dataclass from a TOML table. Configs and recipes are both read in this way.

Every key must be a field, and every value must have the field's type: `true` is not 1, `"5"` is not 5. A whole number
is converted for a float field, and a list for a tuple field.
"""

import dataclasses
import re
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from titanlite.config.problems import Problems, show
from titanlite.config.synonyms import SYNONYMS
from titanlite.config.torchtitan import answer_to_value
from titanlite.errors import nearest

T = TypeVar("T")


def from_table(
    schema: type[T],
    table: Mapping[str, object],
    problems: Problems,
    where: str = "",
    suggest: Callable[[str, object], str | None] = lambda path, value: None,
) -> T | None:
    """Build `schema` from the valid keys of a table; return None if a key without a default is missing or wrong.

    Args:
        schema: a frozen dataclass. Types of fields are bool, int, float, str, `Literal`, dataclasses, tuples of one of
            these, dicts from names to one of these, and unions of these with each other or None.
        table: keys and values of the file.
        problems: errors are added to it.
        where: dotted key of this table; "" at the top.
        suggest: returns the advice for an unknown dotted key and its value; None: name the nearest field.
    """
    hints, values, is_complete = get_type_hints(schema), dict[str, Any](), True
    prefix = f"{where}." if where else ""
    known = {f.name: f for f in dataclasses.fields(cast("Any", schema))}
    for key, value in table.items():
        path = f"{prefix}{key}"
        if key in known:
            converted = _convert(hints[key], value, path, problems, suggest, known[key].default)
            if converted is not None:  # None is an error, as TOML has no null
                values[key] = converted
        else:
            meant = SYNONYMS.get(key, "").rpartition(".")[2]
            near = meant if meant in known else nearest(key, known)
            fix = suggest(path, value) or (f"did you mean {prefix}{near}?" if near else "remove it")
            fix = "move it above the first table" if key == "extends" else fix
            problems.add(path, show(value), f"one of {', '.join(known)}", fix)
    for name, f in known.items():
        is_complete &= name in values or not is_required(f)
        if is_required(f) and name not in table:
            at = problems.origin.of(where)  # the line of the table that lacks the key
            want = f"{describe_type(hints[name])}; it is missing"
            problems.add(f"{prefix}{name}", "", want, f"add {name} = …", at=at)
    return schema(**values) if is_complete else None


def is_required(f: "dataclasses.Field[Any]") -> bool:
    """Return whether the key of a field must be given."""
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _convert(
    hint: Any,
    value: object,
    path: str,
    problems: Problems,
    suggest: Callable[[str, object], str | None],
    default: object,
) -> object:
    """Convert `value` to the type `hint`. On an error add a problem and return None, or the valid part of a table."""
    options = options_of(hint)
    nested = [o for o in options if dataclasses.is_dataclass(o)]
    if nested and isinstance(value, dict):
        return from_table(cast("type[object]", nested[0]), cast("Mapping[str, object]", value), problems, path, suggest)
    tuples = [o for o in options if get_origin(o) is tuple and not _lacks_lists(o, value)]
    if tuples and isinstance(value, list):
        item, items = get_args(tuples[0])[0], cast("list[object]", value)
        converted = [_convert(item, v, f"{path}[{n}]", problems, suggest, None) for n, v in enumerate(items)]
        return None if None in converted else tuple(converted)
    tables = [o for o in options if get_origin(o) is dict]
    if tables and isinstance(value, dict):
        item, given = get_args(tables[0])[1], cast("dict[str, object]", value)
        named = {k: _convert(item, v, f"{path}.{k}", problems, suggest, None) for k, v in given.items()}
        return None if None in named.values() else named
    if any(_fits(o, value) for o in options):
        widen = float in options and int not in options and type(value) is int
        return float(cast("int", value)) if widen else value
    want = describe_type(hint) + (" in quotes" if options == [str] else "")
    problems.add(path, show(value), want, repair(hint, value, path, default))
    return None


def _lacks_lists(hint: Any, value: object) -> bool:
    """Return whether `hint` is a tuple of tuples but `value` a list without lists, such as [1, 2] for [[1, 2]]."""
    items = cast("list[object]", value) if isinstance(value, list) else []
    return get_origin(get_args(hint)[0]) is tuple and bool(items) and not any(isinstance(v, list) for v in items)


def options_of(hint: Any) -> list[Any]:
    """Return the members of a union without None, which TOML lacks. For any other type return a list with that type."""
    if get_origin(hint) in (Union, types.UnionType):
        return [o for o in get_args(hint) if o is not type(None)]
    return [hint]


def _fits(option: Any, value: object) -> bool:
    if get_origin(option) is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(option))
    if option is float:
        return type(value) in (int, float)
    return type(value) is option  # not isinstance, for which a bool is an int


def describe_type(hint: Any) -> str:
    """Say in words which values a type allows, as "a whole number" or `"stop" or "skip"`."""
    names: dict[Any, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
    words: list[str] = []
    for option in options_of(hint):
        option = get_args(option)[0] if get_origin(option) is Annotated else option
        if get_origin(option) is Literal:
            words += [show(choice) for choice in get_args(option)]
        elif get_origin(option) is tuple:
            words.append(f"a list of {_plural(get_args(option)[0])}")
        elif get_origin(option) is dict:
            words.append(f"a table of {_plural(get_args(option)[1])}")
        else:
            words.append("a table" if dataclasses.is_dataclass(option) else names[option])
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _plural(item: Any) -> str:
    if get_origin(item) is tuple:
        return f"lists of {_plural(get_args(item)[0])}"
    return "tables" if dataclasses.is_dataclass(item) else {float: "numbers"}.get(item, "strings")


def repair(hint: Any, value: object, path: str, default: object) -> str:
    """Return advice that makes `value` legal: the value that was probably meant, the nearest choice, or the default."""
    key, options, choices = path.rpartition(".")[2], options_of(hint), list[str]()
    meant = _TRUTH.get(str(value).strip().lower()) if bool in options else _meant(value)
    if meant != "" and any(_fits(o, meant) for o in options):
        return f"{key} = {show(meant)}"
    if fix := answer_to_value(path, value):
        return fix
    if re.fullmatch(r"rules\[\d+\]\.layers", path):
        return repair_slice(value)
    for option in options:
        item = get_args(option)[0] if get_origin(option) is tuple else None
        if (item is str and isinstance(value, str)) or (get_origin(item) is tuple and isinstance(value, list)):
            return f"{key} = [{show(cast('object', value))}]"
        if dataclasses.is_dataclass(option):
            return f"write it as a table: [{path}]"
        if dataclasses.is_dataclass(item):
            return f"write each as a table of a list: [[{path}]]"
        if get_origin(option) is dict and dataclasses.is_dataclass(get_args(option)[1]):
            return f"write each as a table: [{path}.NAME]"
        choices += map(str, get_args(option) if get_origin(option) is Literal else ())
    if near := nearest(str(value), choices):
        return f'did you mean "{near}"?'
    if isinstance(default, bool | int | float | str):
        legal = f"{key} = {show(default)} (the default)"
        return f"choose one of these; {show(default)} is the default" if choices else legal
    return f"give {describe_type(hint)}"


def repair_slice(value: object) -> str:
    """Return advice on `layers` of a rule that is no slice: that of the block or the blocks that it names."""
    numbers = re.fullmatch(r"(\d+)(?:\s*(?:-|\.\.)\s*(\d+))?", str(value).strip())
    if not numbers:
        return 'layers = "0:2", which is the first two blocks'
    first, last = int(numbers[1]), int(numbers[2] or numbers[1])
    return f'layers = "{first}:{last + 1}"'


_TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def _meant(value: object) -> object:
    """Convert a number in quotes, or a whole number written as 1e4, to the number that was probably meant."""
    if isinstance(value, str):
        for reading in (int, float):
            try:
                return _meant(reading(value))
            except ValueError:
                continue
    return int(value) if isinstance(value, float) and value.is_integer() else value
