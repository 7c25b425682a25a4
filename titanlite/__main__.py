"""The `titanlite` command for an environment where it is not on PATH: `python -m titanlite COMMAND ...`."""

import sys

from titanlite.commands import main

if __name__ == "__main__":
    sys.exit(main())
