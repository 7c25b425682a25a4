"""The tables of docs/coming_from_torchtitan.md, made from both schemas."""

from operator import attrgetter
from pathlib import Path

from titanlite.config.problems import show
from titanlite.config.schema import Config
from titanlite.config.torchtitan import ASKED_BY_DEFAULT, KEYS, SWITCHES
from titanlite.config.torchtitan_config import TorchtitanConfig, default_there

DOCS = Path(__file__).parents[3] / "docs" / "coming_from_torchtitan.md"
ALL_ON = {switch: True if default_there(switch) is False else 2 for switch in SWITCHES}


def cell(text: object) -> str:
    return f"`{text}`" if text != "" else ""


def table(*rows: tuple[str, ...]) -> str:
    head, *rest = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *rest])


def other_defaults() -> str:
    """Whatever `titanlite convert` may add: all features are on, for the keys that only matter then."""
    found = TorchtitanConfig({"model.converters": ["float8"], **ALL_ON}).left_out(())
    found |= {key: show(False) for key in ALL_ON if default_there(key) is False and key in list_of_keys()}
    rows: list[tuple[str, ...]] = []
    for key in sorted(found, key=list_of_keys().index):
        here = attrgetter(key)(Config())
        if found[key] != show(here):
            rows.append((cell(key), cell(found[key]), "not given" if here is None else cell(show(here))))
    return table(("key", "torchtitan v0.2.2", "titanlite"), *rows)


def list_of_keys() -> list[str]:
    return [f"{section}.{key}" for section, part in vars(Config()).items() for key in vars(part)]


def other_names() -> str:
    rows: list[tuple[str, ...]] = []
    for key, (default, answer) in KEYS.items():
        if answer is not None:
            text = TorchtitanConfig({**ALL_ON, key: default}).answer(key) if key in ASKED_BY_DEFAULT else answer
            text = text if text.startswith("use ") else f"remove it; {text}"
            rows.append(
                (
                    cell(key),
                    cell(show(default)) if default is not None else "",
                    text.replace(" = {}", "").replace("<", "&lt;"),
                )
            )
    return table(("key of torchtitan", "its default", "what titanlite answers"), *rows)


def test_the_tables_are_those_of_both_schemas() -> None:
    text = DOCS.read_text()
    for made in (other_defaults(), other_names()):
        assert made in text, made
