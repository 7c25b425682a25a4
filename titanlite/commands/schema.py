"""Print the JSON Schema of a config, for editors to complete and check TOML.

Written to a file, it is named in the first line of a config, as `#:schema ./titanlite.schema.json`, which taplo and
Even Better TOML (VS Code) read. docs/titanlite.schema.json of a checkout is the same.
"""

import json
import sys

from titanlite.commands.arguments import Command
from titanlite.errors import ConfigError

_COMMAND = Command("schema", __doc__ or "", {}, "> titanlite.schema.json")


def run(argv: list[str]) -> int:
    """Print the schema."""
    words, _ = _COMMAND.read_words(argv)
    if words:
        raise ConfigError.of("command line", words[0], "", "no arguments", "titanlite schema > titanlite.schema.json")
    from titanlite.config.json_schema import config_json_schema

    sys.stdout.write(json.dumps(config_json_schema(), indent=2, ensure_ascii=False) + "\n")
    return 0
