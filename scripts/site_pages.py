"""What the documentation's site has beside the files in docs: hooks that mkdocs calls (mkdocs.yml).

The page of every key is made of the config's schema, ranges, shipped recipes and configs, and that of the commands of
their help, so that they cannot say anything else. A key that a page names becomes a link to its paragraph. Comments in
a page are replaced: `<!-- bars: TABLE, COLUMN -->` by a chart of a table of docs/performance.md,
`<!-- recipes: KEY -->` by a table of the recipes that a key names, and `<!-- plan: FLAGS -->` by what `titanlite plan`
says of memory and time.
"""

import dataclasses
import html
import importlib
import inspect
import io
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, get_type_hints

import tomli
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from titanlite.commands import COMMANDS, main, module_of  # noqa: E402
from titanlite.config.build import show  # noqa: E402
from titanlite.config.explain import table_keys, table_of  # noqa: E402
from titanlite.config.ranges import values_in_words  # noqa: E402
from titanlite.config.schema import help_texts, schema_keys, sections  # noqa: E402

KEYS, COMMAND_PAGE = "reference/keys.md", "reference/commands.md"
# Which kind of recipe says what a key means.
KINDS = {
    "model.flavor": "model",
    "optimizer.recipe": "optimizer",
    "float8.recipe": "float8",
    "activation_checkpoint.recipe": "activation_checkpoint",
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the pages of docs that stand nowhere else in the navigation, at the end of what goes in depth."""
    listed = str(config.nav)
    rest = [page.name for page in sorted((ROOT / "docs").glob("*.md")) if f"'{page.name}'" not in listed]
    reference = next(part["Reference"] for part in config.nav or [] if "Reference" in part)
    next(part["In depth"] for part in reference if "In depth" in part).extend(rest)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of every key and of the commands."""
    files.append(File.generated(config, KEYS, content=keys_page()))
    files.append(File.generated(config, COMMAND_PAGE, content=commands_page()))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Put charts, tables of recipes and plans in the place of their comments."""
    made: dict[str, Callable[[str], str]] = {
        "bars": lambda asked: bars(*asked.split(", ")),
        "recipes": lambda key: "\n".join(recipes_of(key)),
        "plan": planned,
    }
    comment = rf"(?m)^<!-- ({'|'.join(made)}): (.+) -->$"
    return re.sub(comment, lambda found: made[found[1]](found[2]), markdown)


def on_page_content(content: str, page: Page, **_: object) -> str:
    """Link each key that the page names to its paragraph, and keep the words of code together, which have hyphens."""
    to = os.path.relpath(KEYS, Path(page.file.src_uri).parent).replace(".md", ".html")
    if page.file.src_uri != KEYS:
        content = re.sub(
            r"<code>(?:--)?([a-z0-9_]+\.[a-z0-9_]+)((?: [^<]*)?)</code>(?!</a>)",
            lambda code: f'<a href="{to}#{code[1]}">{code[0]}</a>' if code[1] in schema_keys() else code[0],
            content,
        )
    inline = r"(?<!<pre>)(?<!</span>)<code>[^<]+</code>"
    return re.sub(inline, lambda code: re.sub("[^ <>]*-[^ <>]+", r"<span>\g<0></span>", code[0]), content)


def bars(table: str, column: str) -> str:
    """Return a chart of a column of a table of docs/performance.md: a bar for each row, named by its first cells."""
    page = (ROOT / "docs" / "performance.md").read_text()
    text = page.partition(f"<!-- table: {table} -->\n")[2].partition("<!-- end -->")[0].replace("`", "")
    head, _, *rows = ([cell.strip() for cell in line.strip("| ").split(" | ")] for line in text.splitlines())
    at = head.index(column)
    first = next(i for i, cell in enumerate(rows[0]) if re.fullmatch(r"[\d,.]+", cell))
    values = [float(row[at].replace(",", "")) for row in rows]
    lines = [
        f"<div>{' · '.join(row[:first])}<span><b style='width:{value / max(values):.1%}'></b>{row[at]}</span></div>"
        for row, value in zip(rows, values, strict=True)
    ]
    return f"<div class='bars'><em>{' · '.join(head[:first])}: {column}</em>\n{chr(10).join(lines)}\n</div>\n"


def planned(flags: str) -> str:
    """Return what `titanlite plan` prints with these flags, from the memory of a rank on."""
    with redirect_stdout(io.StringIO()) as said, redirect_stderr(io.StringIO()) as other:
        code = main(["plan", *flags.split()])
    if code:
        raise ValueError(f"titanlite plan {flags}: {other.getvalue()}")
    _, start, rest = said.getvalue().partition("peak memory of a rank")
    return f"```text\n{start}{rest}```\n"


def commands_page() -> str:
    """Return the page of the commands: of each its usage, its text and its flags."""
    lines = ["# Commands", "", "If `titanlite` is not on your path, `python -m titanlite` is the same.", ""]
    for name in COMMANDS:
        command = importlib.import_module(f"titanlite.commands.{module_of(name)}").COMMAND
        lines += [f"## titanlite {name}", "", "```text", command.usage(80), "```", ""]
        for paragraph in command.about.strip().split("\n\n"):
            is_code = paragraph.lstrip().startswith(("titanlite ", "torchrun "))
            lines += [textwrap.indent(textwrap.dedent(paragraph), "    ") if is_code else escape(paragraph), ""]
        if command.rows:
            rows = (f"| <code>{escape(flag)}</code> | {escape(text)} |" for flag, text in command.rows.items())
            lines += ["| flag | |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def escape(text: str) -> str:
    """Return a plain text as Markdown that shows it."""
    return html.escape(text, quote=False).replace("|", "&#124;").replace("*", "&#42;")


def keys_page() -> str:
    """Return the page of every key: of each its type, range, default and text, and who sets it."""
    configs = shipped_configs()
    lines = [
        "# Every key",
        "",
        "A key is written in a TOML file under its section, or as a flag: `--training.steps 100`. Flags win.",
        "`train.py --help SECTION` prints the same, and [`titanlite schema`](commands.md) gives it to editors.",
    ]
    for section, cls in sections().items():
        hints = get_type_hints(cls, include_extras=True)
        lines += ["", f"## {section}", "", inspect.getdoc(cls) or ""]
        for field in dataclasses.fields(cls):
            key = f"{section}.{field.name}"
            about = head(hints[field.name], field.default)
            lines += ["", f"### `{key}` {{ #{key} }}", "", f"*{about}*", ""]
            lines += [help_texts(cls)[field.name], "", *recipes_of(key)]
            if table := table_of(hints[field.name]):
                lines += ["", "| key | type | meaning |", "|---|---|---|"]
                lines += [f"| `{name}` | {kind} | {text} |" for name, kind, text in table_keys(table)]
            used = [f"{name}: `{show(table[key])}`" for name, table in configs.items() if key in table]
            if used and key != "job.name":
                lines += ["", f"In shipped configs: {'; '.join(used)}."]
    return "\n".join(lines) + "\n"


def head(hint: Any, default: object) -> str:
    """Return the line under a key's name: its type, range and default."""
    kind = values_in_words(hint).replace("[", r"\[").replace("*", r"\*")
    return f"{kind[0].upper()}{kind[1:]}. Default: {'not given' if default is None else f'`{show(default)}`'}."


def shipped_configs() -> dict[str, dict[str, Any]]:
    """Return the keys that each shipped config sets, with their values."""
    files = sorted((ROOT / "configs").glob("*.toml"))
    return {file.stem: dict(flat(tomli.loads(file.read_text()))) for file in files}


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of nested tables by their dotted names."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def recipes_of(key: str) -> list[str]:
    """Return a table of the shipped recipes that a key names, or of the values that recipes give it."""
    section, _, name = key.partition(".")
    kind = KINDS.get(key, "model" if section == "model" else "")
    if not kind:
        return []
    tables = {file.stem: tomli.loads(file.read_text()) for file in sorted((ROOT / "recipes" / kind).glob("*.toml"))}
    if key in KINDS:
        return ["| recipe | what it is |", "|---|---|", *(f"| `{n}` | {t['help']} |" for n, t in tables.items())]
    values = dict[str, list[str]]()
    for recipe, table in tables.items():
        if name in table and not recipe.endswith("-debug"):
            values.setdefault(f"{table[name]:,}", []).append(recipe)
    return ["Recipes: " + "; ".join(f"{value} in {', '.join(of)}" for value, of in values.items()) + "."] * bool(values)
