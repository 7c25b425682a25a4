"""The `titanlite` command where it is not on the path: `python -m titanlite COMMAND ...`."""

import sys

from titanlite.commands import main

if __name__ == "__main__":
    sys.exit(main())
