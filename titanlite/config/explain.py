"""The help pages: one screen that lists the sections, and one page for each section.

The texts are those of `schema.py`, so that a key is explained in one place.
"""

import dataclasses
import inspect
import textwrap
from typing import Any, get_args, get_origin, get_type_hints

from titanlite.config.build import is_required
from titanlite.config.problems import show
from titanlite.config.ranges import values_in_words
from titanlite.config.schema import help_texts, sections

_WIDTH = 80


def overview(usage: str) -> str:
    """Return the page of `--help`, 24 lines of 80 columns: `usage`, such as "train.py FILE", and the sections."""
    width = max(len(name) for name in sections())
    lines = [f"usage: {usage}", ""]
    for name, cls in sections().items():
        first_sentence = (inspect.getdoc(cls) or "").partition(". ")[0].rstrip(".")
        lines.append(f"  {name:{width}}  {first_sentence}.")
    lines += [
        "",
        "A flag is the dotted path of a TOML key and wins over the file. Booleans take",
        "--x, --x=false and --x true; lists take several values.",
        "--help SECTION explains the keys of a section.",
    ]
    return "\n".join(lines) + "\n"


def section_page(name: str) -> str:
    """Return the page of `--help SECTION`: each key with its type, range, default and meaning."""
    cls = sections()[name]
    hints, docs = get_type_hints(cls, include_extras=True), help_texts(cls)
    lines = [f"[{name}]  {inspect.getdoc(cls)}"]
    for field in dataclasses.fields(cls):
        default = "not given" if field.default is None else show(field.default)
        table = table_of(hints[field.name])
        named = f"[[{name}.{field.name}]]" if table else f"--{name}.{field.name}"
        head = f"{named}  {values_in_words(hints[field.name])}; default: {default}"
        lines += ["", *textwrap.wrap(head, _WIDTH, subsequent_indent="    ", break_long_words=False)]
        lines += textwrap.wrap(docs[field.name], _WIDTH, initial_indent="    ", subsequent_indent="    ")
        for key, kind, about in table_keys(table) if table else ():
            lines += textwrap.wrap(f"{key}  {kind}", _WIDTH, initial_indent="    ", subsequent_indent="        ")
            lines += textwrap.wrap(about, _WIDTH, initial_indent="        ", subsequent_indent="        ")
    return "\n".join(lines) + "\n"


def table_of(hint: Any) -> type | None:
    """Return the dataclass of the tables if a key is a list of tables; None for any other type."""
    item = get_args(hint)[0] if get_origin(hint) is tuple else None
    return item if dataclasses.is_dataclass(item) and isinstance(item, type) else None


def table_keys(table: type) -> list[tuple[str, str, str]]:
    """Return each key of a table as (name, type with range and whether the key is required, help text)."""
    hints, docs = get_type_hints(table, include_extras=True), help_texts(table)
    return [
        (f.name, values_in_words(hints[f.name]) + "; must be given" * is_required(f), docs[f.name])
        for f in dataclasses.fields(table)
    ]
