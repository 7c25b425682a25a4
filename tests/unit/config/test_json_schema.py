"""The JSON Schema of the config: it accepts what titanlite accepts, key by key, and says what its help pages say."""

import copy
import json
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import tomli
from jsonschema import Draft7Validator

from tests.unit.config.test_check import RANGES
from titanlite.commands import main
from titanlite.config.build import from_table, options_of
from titanlite.config.json_schema import config_json_schema
from titanlite.config.problems import Origin, Problems
from titanlite.config.ranges import check_ranges
from titanlite.config.schema import Config, help_texts, schema_keys, sections
from titanlite.config.toml_file import shipped_folder
from titanlite.config.write import to_toml

PUBLISHED = Path(__file__).parents[3] / "docs" / "titanlite.schema.json"
SCHEMA = config_json_schema()
VALIDATOR = Draft7Validator(SCHEMA)
NUMBERS = [-2, -1, 0, 1, 2, 1e-9, 0.5, 1.0, 1e9, 10_000, 10_001, 31_536_001, 2**31, 2**32, 2**40]
VALUES: list[Any] = [*NUMBERS, True, "", "x", "auto", [], ["x"], [1], {}]


def accepts(table: dict[str, Any]) -> bool:
    return VALIDATOR.is_valid(table)


def titanlite_accepts(table: dict[str, Any]) -> bool:
    problems = Problems(Origin("test"))
    config = from_table(Config, table, problems)
    if config is not None and not problems:
        check_ranges(config, problems)
    return not problems


def test_it_is_a_schema_and_is_published() -> None:
    Draft7Validator.check_schema(SCHEMA)
    made = "made anew by: titanlite schema > docs/titanlite.schema.json"
    assert json.loads(PUBLISHED.read_text()) == SCHEMA, made


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert capsys.readouterr().out == PUBLISHED.read_text()
    assert main(["schema", "debug"]) == 2


def test_it_is_written_to_a_new_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "schema.json"
    assert main(["schema", "--out", str(out)]) == 0
    assert out.read_text() == PUBLISHED.read_text()
    assert main(["schema", "--out", str(out)]) == 2
    assert f"--out = {out}\n      want: a file that does not exist\n" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(shipped_folder("configs").glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_config_is_accepted(path: Path) -> None:
    VALIDATOR.validate(tomli.loads(path.read_text()))


def test_all_defaults_are_accepted_and_are_those_of_a_run() -> None:
    VALIDATOR.validate(tomli.loads(to_toml(Config())))
    VALIDATOR.validate({"extends": ["a.toml"]})
    VALIDATOR.validate({"extends": "a.toml"})
    for section, table in SCHEMA["properties"].items():
        for name, said in table.get("properties", {}).items():
            default = attrgetter(f"{section}.{name}")(Config())
            assert said.get("default") == (list(default) if isinstance(default, tuple) else default)


def test_every_key_has_its_help_text_and_section() -> None:
    assert [name for name in SCHEMA["properties"] if name != "extends"] == [f.name for f in fields(Config)]
    for section, cls in sections().items():
        assert SCHEMA["properties"][section]["description"] == cls.__doc__
        said = {name: key["description"] for name, key in SCHEMA["properties"][section]["properties"].items()}
        assert said == help_texts(cls)


@pytest.mark.parametrize("table", [{"training": {"stepz": 5}}, {"trainin": {}}, {"steps": 5}, {"training": 5}])
def test_a_misspelt_key_is_refused(table: dict[str, Any]) -> None:
    assert not accepts(table)


@pytest.mark.parametrize("key", schema_keys())
def test_it_accepts_what_titanlite_accepts(key: str) -> None:
    section, name = key.split(".")
    choices = [c for o in options_of(schema_keys()[key]) if get_origin(o) is Literal for c in get_args(o)]
    bounds = [json.loads(b) for b in RANGES.get(key, "[0, inf)")[1:-1].split(", ") if b != "inf"]
    near = [number + step for number in bounds for step in (-1, 0, 1)]
    for value in [*VALUES, *choices, *near]:
        table = {section: {name: value}}
        if isinstance(value, float) and value.is_integer() and int in options_of(schema_keys()[key]):
            continue  # a whole number to JSON, and none to TOML
        assert accepts(table) == titanlite_accepts(copy.deepcopy(table)), f"{key} = {value!r}"
