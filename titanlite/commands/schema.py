"""Print the JSON Schema of a config, for editors to complete and check TOML.

titanlite schema --out titanlite.schema.json

A config names the file in its first line, as `#:schema ./titanlite.schema.json`, which taplo and Even Better TOML
(VS Code) read. A checkout of titanlite has the same schema in docs/titanlite.schema.json.
"""

import json
import sys
from pathlib import Path

from titanlite.commands.arguments import Command
from titanlite.errors import ConfigError
from titanlite.preflight.output_file import require_new, writable

_OUT = {"--out FILE": "file to write, which must not exist; without it, the schema goes to standard output"}
COMMAND = Command("schema", __doc__ or "", _OUT, "")


def run(argv: list[str]) -> int:
    """Print the schema, or write it to a file."""
    words, given = COMMAND.read_words(argv)
    if words:
        want = "no arguments but --out"
        raise ConfigError.of("command line", words[0], "", want, f"titanlite schema --out {words[0]}")
    out = Path(given["--out"]) if "--out" in given else None
    if out is not None:
        require_new("--out", out)
    from titanlite.config.json_schema import config_json_schema

    text = json.dumps(config_json_schema(), indent=2, ensure_ascii=False) + "\n"
    if out is None:
        sys.stdout.write(text)
        return 0
    with writable("titanlite schema", "--out", out):
        out.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{out}\n")
    return 0
