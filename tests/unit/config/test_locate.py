"""Every key of a TOML text is found at its line, whatever stands between them."""

import tomli

from titanlite.config.locate import key_lines
from titanlite.config.toml_file import shipped_folder

TEXT = '''# comment with a "quote and a [bracket
top = 1
[a]
plain = "x # no comment [not a table]"
long = """
fake = 1
[fake]
"""
raw = \'\'\'
it's # fake = 2\'\'\' # after
list = [
  "one", # a, b
  "two = 2",
]
inner = { x = 1.5, "y" = [1, 2] }
dotted.key = 1979-05-27 07:32:00
[a.b]
deep = """"quoted""""

[[rules]]
op = "first"
[[rules]]
op = "second"
empty = ""
last = \'\'
'''


def test_keys_are_at_their_lines() -> None:
    tomli.loads(TEXT)  # else it would be no test of TOML
    assert key_lines(TEXT) == {
        "top": 2,
        "a": 3,
        "a.plain": 4,
        "a.long": 5,
        "a.raw": 9,
        "a.list": 11,
        "a.list[0]": 12,
        "a.list[1]": 13,
        "a.inner": 15,
        "a.inner.x": 15,
        "a.inner.y": 15,
        "a.inner.y[0]": 15,
        "a.inner.y[1]": 15,
        "a.dotted": 16,
        "a.dotted.key": 16,
        "a.b": 17,
        "a.b.deep": 18,
        "rules": 20,
        "rules[0]": 20,
        "rules[0].op": 21,
        "rules[1]": 22,
        "rules[1].op": 23,
        "rules[1].empty": 24,
        "rules[1].last": 25,
    }


def test_every_key_of_the_shipped_files_is_found_where_it_is_written() -> None:
    for path in [*shipped_folder("configs").glob("*.toml"), *shipped_folder("recipes").glob("*/*.toml")]:
        text = path.read_text()
        lines = text.splitlines()
        found = key_lines(text)
        for key, line in found.items():
            name = key.rpartition(".")[2].partition("[")[0]
            assert name in lines[line - 1], (path, key, line)
        for section, table in tomli.loads(text).items():
            keys = [f"{section}.{k}" for k in table] if isinstance(table, dict) else [section]
            assert not [k for k in keys if k not in found], path
