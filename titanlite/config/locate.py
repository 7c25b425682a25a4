"""Find the line of every key in a TOML text, since tomli keeps no positions.

The text must be valid: tomli has parsed it before. So only brackets, strings and keys are followed, and no value is
parsed.
"""

import re
from collections import deque

_TOKEN = re.compile(
    r"""\"{3}(?:\\.|[^\\])*?\"{3}(?!\") | '{3}.*?'{3}(?!') | "(?:\\.|[^"\\])*" | '[^']*'   # strings, long first
    | \#[^\n]* | [\[\]{},=.\n] | [^\s\[\]{},=.\#"']+                                  # comments, marks, bare words
    """,
    re.DOTALL | re.VERBOSE,
)


def key_lines(text: str) -> dict[str, int]:
    """Return the line number, from 1, of each key and table of valid TOML. Array elements are `key[0]`, `key[1]`, …"""
    lines, tokens, line, seen = dict[str, int](), deque[tuple[str, int]](), 1, 0
    for match in _TOKEN.finditer(text):
        line += text.count("\n", seen, match.start())
        seen = match.start()
        if not match[0].startswith("#"):
            tokens.append((match[0], line))

    def skip(mark: str) -> bool:
        found = bool(tokens) and tokens[0][0] == mark
        if found:
            tokens.popleft()
        return found

    def record(path: str, line: int) -> None:
        """Record the line of a dotted key, and of the tables that it implies."""
        while path:
            lines.setdefault(path, line)
            path = path.rpartition(".")[0]

    def read_key() -> str:
        parts = [tokens.popleft()[0].strip("\"'")]
        while skip("."):
            parts.append(tokens.popleft()[0].strip("\"'"))
        return ".".join(parts)

    def read_pair(prefix: str) -> None:
        line = tokens[0][1]
        path = f"{prefix}{read_key()}"
        record(path, line)
        skip("=")
        read_value(path)

    def read_value(path: str) -> None:
        n = 0
        if skip("["):
            while not skip("]"):
                if skip(","):
                    n += 1
                elif not skip("\n"):
                    lines.setdefault(f"{path}[{n}]", tokens[0][1])
                    read_value(f"{path}[{n}]")
        elif skip("{"):
            while not skip("}"):
                if not skip(",") and not skip("\n"):
                    read_pair(f"{path}.")
        else:  # a scalar; a date or a float consists of several tokens
            while tokens and tokens[0][0] not in ("\n", ",", "]", "}"):
                tokens.popleft()

    prefix, n_tables = "", dict[str, int]()
    while tokens:
        line = tokens[0][1]
        if skip("["):
            is_array, table = skip("["), read_key()
            if is_array:
                lines.setdefault(table, line)
                n_tables[table] = n_tables.get(table, -1) + 1
                table = f"{table}[{n_tables[table]}]"
            record(table, line)
            prefix = f"{table}."
            while skip("]"):
                pass
        elif not skip("\n"):
            read_pair(prefix)
    return lines
