"""Convert a TOML file of torchtitan v0.2 to a config of titanlite.

Each key becomes its counterpart in titanlite. A key without a counterpart becomes a comment with the reason, and is
listed. A key that the file leaves out is written with torchtitan's default where titanlite's default differs. Values
that titanlite refuses are written all the same, and listed with a fix. Data, tokenizer and the number of processes are
not checked: titanlite validate does that. The run is named after the file that is written.
"""

import sys
from pathlib import Path

from titanlite.commands.arguments import Command
from titanlite.config.check import config_problems
from titanlite.config.convert_torchtitan import convert_torchtitan
from titanlite.data.tokenizer import has_bos
from titanlite.preflight.output_file import require_new, writable
from titanlite.recipes import model_dims

COMMAND = Command(
    "convert",
    __doc__ or "",
    {
        "TORCHTITAN.toml": "a config of torchtitan v0.2",
        "--out FILE": "file to write, which must not exist; without it, the config goes to standard output",
    },
    "TORCHTITAN.toml",
)


def run(argv: list[str]) -> int:
    """Write the converted config, and print a summary of what became of the keys."""
    file, own = COMMAND.read_word(argv, "one config of torchtitan", "llama3_8b.toml --out mine.toml")
    out = Path(own["--out"]) if "--out" in own else None
    if out is not None:
        require_new("--out", out)
    made = convert_torchtitan(Path(file), (out or Path(file)).stem, has_bos)
    config = made.config()
    dims = model_dims(config, made.origin)  # raises if titanlite does not have the model
    refused = config_problems(config, dims, None).found()
    to_change = [f"  to change: {p.where} = {p.saw}; want {p.want}; fix: {p.fix}" for p in refused]
    summary = "\n".join([made.summary(), *to_change])
    if out is None:
        sys.stdout.write(made.to_toml())
        sys.stderr.write(f"{summary}\n")
        return 0
    with writable("titanlite convert", "--out", out):
        out.write_text(made.to_toml(), encoding="utf-8")
    sys.stdout.write(f"{summary}\nnext: titanlite validate {out} --world N\n")
    return 0
