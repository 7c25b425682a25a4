"""The JSON Schema of a config, with which editors complete and check a TOML file (taplo, Even Better TOML).

It follows draft 7, the newest that taplo reads, and has the help text, type, choices, range and default of each key.
`titanlite validate` is stricter: the schema accepts a whole number written as 1e4, and does not compare keys.
"""

import dataclasses
import inspect
import json
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from titanlite.config.build import is_required, options_of
from titanlite.config.schema import Config, help_texts
from titanlite.config.toml_file import shipped_folder

_TYPES: dict[Any, dict[str, Any]] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
}
_BOUNDS = {"[": "minimum", "(": "exclusiveMinimum", "]": "maximum", ")": "exclusiveMaximum"}


def config_json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a config file."""
    extends = {
        "description": "Files that come first, in order; this one is merged over them. Relative to this file.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    top = _object(Config, "")
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "titanlite",
        **top,
        "properties": {"extends": extends, **top["properties"]},
    }


def _object(cls: type, prefix: str) -> dict[str, Any]:
    """Return the schema of a table whose keys are the fields of a dataclass, and no others."""
    hints, docs = get_type_hints(cls, include_extras=True), help_texts(cls)
    properties = dict[str, Any]()
    for f in dataclasses.fields(cls):
        about = {"description": docs[f.name]} if f.name in docs else {}
        properties[f.name] = {**about, **_value(f"{prefix}{f.name}", hints[f.name]), **_default(f)}
    required = [f.name for f in dataclasses.fields(cls) if is_required(f)]
    return {
        "description": inspect.getdoc(cls),
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        **({"required": required} if required else {}),
    }


def _value(key: str, hint: Any) -> dict[str, Any]:
    """Return the schema of the value of a key, with `anyOf` if several types are legal."""
    found = [_option(key, option) for option in options_of(hint)]
    if words := _known_words(key):  # first, because editors offer listed words
        found.insert(0, {"enum": words})
    return found[0] if len(found) == 1 else {"anyOf": found}


def _option(key: str, option: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(option):
        return _object(option if isinstance(option, type) else type(option), f"{key}.")
    if get_origin(option) is Annotated:
        return {**_TYPES[option.__origin__], **_range(option.__metadata__[0])}
    if get_origin(option) is Literal:
        return {"enum": list(get_args(option))}
    if get_origin(option) is tuple:
        return {"type": "array", "items": _option(f"{key}[]", get_args(option)[0])}
    if get_origin(option) is dict:
        return {"type": "object", "additionalProperties": _option(f"{key}{{}}", get_args(option)[1])}
    return _TYPES[option]


def _range(span: str) -> dict[str, Any]:
    """Return the JSON Schema bounds of a range in the notation of `schema.py`, such as "[0, inf)"."""
    low, high = span[1:-1].split(", ")
    bounds: dict[str, Any] = {_BOUNDS[span[0]]: json.loads(low)}
    if high != "inf":
        bounds[_BOUNDS[span[-1]]] = json.loads(high)
    return {**bounds, **({"not": {"const": 0}} if low == "-1" else {})}  # -1 stands for all; 0 is illegal


def _known_words(key: str) -> list[str]:
    """Return the usual values of a key that also takes any other text."""

    def names(kind: str) -> list[str]:
        return sorted(path.stem for path in (shipped_folder("recipes") / kind).glob("*.toml"))

    sources = ["python_stdlib", "python_stdlib_held_out"]
    return {
        "model.flavor": [*sorted({name.partition("-")[2] for name in names("model")}), "from_checkpoint"],
        "activation_checkpoint.recipe": [*names("activation_checkpoint"), "auto"],
        "float8.recipe": ["none", *names("float8")],
        "data.source": sources,
        "validation.source": sources,
        "data.tokenizer": ["bytes"],
    }.get(key, [])


def _default(f: "dataclasses.Field[Any]") -> dict[str, Any]:
    """Return `{"default": value}` for a key; {} for a section, or if the key is required or its default is None."""
    default: Any = f.default
    if default in (dataclasses.MISSING, None) or dataclasses.is_dataclass(default):
        return {}
    return {"default": [*default] if isinstance(default, tuple) else default}
