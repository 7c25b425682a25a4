"""The line of every key of a TOML text.

tomli parses TOML but keeps no positions. This is not a second parser: it runs on text that tomli has accepted, so it
only walks the brackets, strings and keys, and reads no value.
"""

import re

_TOKEN = re.compile(
    r"""\"{3}(?:\\.|[^\\])*?\"{3}(?!\") | '{3}.*?'{3}(?!') | "(?:\\.|[^"\\])*" | '[^']*'   # strings, long first
    | \#[^\n]* | [\[\]{},=.\n] | [^\s\[\]{},=.\#"']+                                  # comments, marks, bare words
    """,
    re.DOTALL | re.VERBOSE,
)


def key_lines(text: str) -> dict[str, int]:
    """Return the line of each key and table of valid TOML, from 1; elements of arrays are `key[0]`, `key[1]`, …"""
    return _KeyWalk(text).lines


class _KeyWalk:
    """One pass over the tokens of a TOML text."""

    def __init__(self, text: str) -> None:
        self.lines: dict[str, int] = {}
        self.tokens: list[tuple[str, int]] = []
        line, seen = 1, 0
        for match in _TOKEN.finditer(text):
            line += text.count("\n", seen, match.start())
            seen = match.start()
            if not match[0].startswith("#"):
                self.tokens.append((match[0], line))
        self.at = 0
        table, n_tables = "", dict[str, int]()
        while self.at < len(self.tokens):
            if self._skip("\n"):
                continue
            line = self.tokens[self.at][1]
            if not self._skip("["):
                self._pair(table)
                continue
            is_array = self._skip("[")
            table = self._key()
            if is_array:
                self.lines.setdefault(table, line)
                n_tables[table] = n_tables.get(table, -1) + 1
                table = f"{table}[{n_tables[table]}]"
            self._record(table, line)
            while self._skip("]"):
                pass

    def _skip(self, mark: str) -> bool:
        if self.at < len(self.tokens) and self.tokens[self.at][0] == mark:
            self.at += 1
            return True
        return False

    def _record(self, path: str, line: int) -> None:
        """Record a key, and those that a dotted key implies."""
        while path:
            self.lines.setdefault(path, line)
            path = path.rpartition(".")[0]

    def _key(self) -> str:
        parts = [self.tokens[self.at][0].strip("\"'")]
        self.at += 1
        while self._skip("."):
            parts.append(self.tokens[self.at][0].strip("\"'"))
            self.at += 1
        return ".".join(parts)

    def _pair(self, table: str) -> None:
        line = self.tokens[self.at][1]
        key = self._key()
        path = f"{table}.{key}" if table else key
        self._record(path, line)
        self._skip("=")
        self._value(path)

    def _value(self, path: str) -> None:
        if self._skip("["):
            n = 0
            while not self._skip("]"):
                if self._skip(","):
                    n += 1
                elif not self._skip("\n"):
                    self.lines.setdefault(f"{path}[{n}]", self.tokens[self.at][1])
                    self._value(f"{path}[{n}]")
        elif self._skip("{"):
            while not self._skip("}"):
                if not self._skip(",") and not self._skip("\n"):
                    self._pair(path)
        else:  # a scalar: a date or a float is several tokens
            while self.at < len(self.tokens) and self.tokens[self.at][0] not in ("\n", ",", "]", "}"):
                self.at += 1
