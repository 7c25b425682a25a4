"""What the documentation's site has beside the files in docs: hooks that mkdocs calls (mkdocs.yml).

The page of every key is made of the config's schema, ranges, shipped recipes and configs, so that it cannot say
anything else. A key that a page names becomes a link to its paragraph. A page that is a single link to a part of
README.md has that part in its place: on a code host it is a link, on the site the text itself. A comment
`<!-- bars: TABLE, COLUMN -->` becomes a chart of a table of docs/performance.md.
"""

import dataclasses
import inspect
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import tomli
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from titanlite.config.build import show  # noqa: E402
from titanlite.config.explain import table_keys, table_of  # noqa: E402
from titanlite.config.ranges import values_in_words  # noqa: E402
from titanlite.config.schema import help_texts, schema_keys, sections  # noqa: E402

KEYS = "reference/keys.md"
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
    """Add the page of every key."""
    files.append(File.generated(config, KEYS, content=keys_page()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Put charts in the place of their comments, and parts of README.md in that of links that are a paragraph."""
    here = Path(page.file.src_uri).parent
    markdown = re.sub(r"(?m)^<!-- bars: (\w+), (.+) -->$", lambda asked: bars(asked[1], asked[2]), markdown)
    return re.sub(r"(?m)^\[(.+)\]\((?:\.\./)+README\.md#[\w-]+\)$", lambda link: readme_part(link[1], here), markdown)


def on_page_content(html: str, page: Page, **_: object) -> str:
    """Link each key that the page names to its paragraph."""
    if page.file.src_uri == KEYS:
        return html
    to = os.path.relpath(KEYS, Path(page.file.src_uri).parent).replace(".md", ".html")
    return re.sub(
        r"<code>(?:--)?([a-z0-9_]+\.[a-z0-9_]+)((?: [^<]*)?)</code>(?!</a>)",
        lambda code: f'<a href="{to}#{code[1]}">{code[0]}</a>' if code[1] in schema_keys() else code[0],
        html,
    )


def readme_part(heading: str, here: Path) -> str:
    """Return what stands under a heading of README.md, with links as they are right in a page of the folder `here`."""
    part = re.search(rf"(?ms)^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", (ROOT / "README.md").read_text())
    if part is None:
        raise ValueError(f"README.md has no heading {heading!r}")

    def moved(link: re.Match[str]) -> str:
        if not link[2].startswith("docs/"):  # a file of the checkout, which the site does not have
            return link[1]
        return f"[{link[1]}]({os.path.relpath(link[2].removeprefix('docs/'), here)})"

    return re.sub(r"\[([^\]]+)\]\((?!https?:)([^)]+)\)", moved, part[1])


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
