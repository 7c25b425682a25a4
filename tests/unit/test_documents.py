"""Every file, function, heading and key that the documents name exists."""

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from tests.unit.test_import_order import ROWS
from titanlite.config.schema import schema_keys, sections

ROOT = Path(__file__).parents[2]
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md")), *sorted((ROOT / "docs").rglob("*.md"))]
NOT_OURS = {
    "scripts/checkpoint_conversion/convert_to_hf.py",
    "recipes/model/mine-small.toml",
}  # torchtitan's, and a user's
TOPS = "titanlite", "tests", "scripts", "benchmarks", "configs", "recipes", "docs"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_named_files_exist(page: Path) -> None:
    named = set(re.findall(rf"(?<![\w/.-])(?:{'|'.join(TOPS)})/[\w./*{{}},-]*\w(?:::\w+)?", page.read_text()))
    missing = []
    for path, _, name in (found.partition("::") for found in sorted(named - NOT_OURS)):
        files = [file for file in ROOT.glob(path) if file.exists()]
        defined = [file for file in files if re.search(rf"\b(def|class) {name}\b", file.read_text())] if name else files
        if not defined:
            missing.append(f"{path}::{name}" if name else path)
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_a_heading(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        if target.endswith(("reference/keys.md", "reference/commands.md")):
            continue  # made when the site is built, which checks such links: test_site.py
        file = page.parent / target if target else page
        assert file.exists(), target
        headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE) if anchor else []
        slugs = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert not anchor or anchor in slugs, (target, anchor)


@pytest.mark.parametrize("page", [page for page in PAGES if "torchtitan" not in page.name], ids=lambda page: page.stem)
def test_named_keys_are_keys_of_the_config(page: Path) -> None:
    named = set(re.findall(rf"(?:--|`)((?:{'|'.join(sections())})\.[a-z0-9_]+)", page.read_text()))
    files = {key for key in named if key.endswith((".json", ".jsonl", ".toml", ".earlier"))}
    assert named - files <= set(schema_keys())


def test_the_order_of_imports_is_the_one_that_is_held() -> None:
    """By tests/unit/test_import_order.py."""
    listed = (
        (ROOT / "CONTRIBUTING.md").read_text().partition("imports run downward")[2].partition("\n\nA model file")[0]
    )
    rows = [re.split(r" {2,}", line.strip())[0] for line in listed.splitlines() if line.startswith("    ")]
    assert [set(row.split(", ")) for row in rows] == list(ROWS)


def test_a_page_stands_once_in_the_navigation() -> None:
    pages = Counter(re.findall(r"\S+\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert len(pages) > 20
    assert [page for page, times in pages.items() if times > 1] == []


def test_what_is_shown_of_a_sample_is_of_the_one_asked_for() -> None:
    shown = [
        found
        for page in PAGES
        for found in re.findall(r"--sample (\d+)[^\n]*\n```\n\s+sample (\d+),", page.read_text())
    ]
    assert shown
    assert [pair for pair in shown if pair[0] != pair[1]] == []


def test_extras_are_installed_from_the_checkout() -> None:
    """There is no release that pip would find by name."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    files = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "mkdocs.yml", *(ROOT / "titanlite").rglob("*.py")]
    shown = [
        found for file in files for found in re.findall(r"pip install[^\n]*?'?([.\w]*)\[(\w+)\]", file.read_text())
    ]
    assert len(shown) > 5
    assert {name for name, _ in shown} == {"."}
    assert {extra for _, extra in shown} <= set(extras)


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("architecture", "gemma3"),
        ("architecture", "gpt2"),
        ("architecture", "mixtral"),
        ("optimizer", "normuon"),
        ("optimizer", "dion2"),
    ],
)
def test_the_files_that_name_what_is_added_are_those_that_contributing_says(what: str, name: str) -> None:
    row = re.findall(rf"^\| How do I add an {what}\? .*", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    files = [*(ROOT / "titanlite").rglob("*.py"), *(ROOT / "docs").glob("*.json")]
    touched = [str(file.relative_to(ROOT)) for file in files if f'"{name}"' in file.read_text()]
    assert touched
    assert [file for file in touched if f"`{file}`" not in row[0]] == []
