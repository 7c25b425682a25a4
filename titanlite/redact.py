"""Keep secrets of the environment out of what a run or a command writes.

The config has no key for a secret, and the environment is never logged. What is left is the text of other people's
exceptions: an HTTP error may carry the URL with its token. Such text goes through `redact` before it is shown.
"""

import os
import re

_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)
_SHORTEST = 8  # shorter values are words, not secrets, and would be cut out of ordinary text


def redact(text: str) -> str:
    """Replace the value of each environment variable that is named like a secret by `***`."""
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST and _SECRET_NAME.search(name):
            text = text.replace(value, "***")
    return text
