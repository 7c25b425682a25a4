"""Replace secrets by `***` in everything that a run or a command prints and writes.

Secrets are the values of environment variables that are named like one, the user part of a URL, a token in a URL's
query, the value of a header `Authorization`, and the password, or token in its place, of a URL in the environment. Most
come with exceptions of libraries; so standard output and standard error redact all text, and so do a run's files.

Not redacted: stacks of faulthandler, and text that C++ libraries write to a descriptor.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, cast
from urllib.parse import quote, unquote

STAR = "***"
_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|_PASS|_PAT|CREDENTIALS?)$", re.IGNORECASE)
_SHORTEST = 8  # shorter values are words of ordinary text
_SHORTEST_TOKEN = 20  # of a user without a password; shorter ones are names
# Up to the last @ of the authority. A secret key of S3 may hold slashes as it stands: where no @ comes before the first
# of them, up to the first one behind, unless what looks like a password is a port, which a URL of S3 has not. A quote,
# comma or bracket ends a URL that stands in a text.
_ENDS = r"""\s"'`,<>()\[\]"""
_USER = re.compile(
    rf"""(:(?:\\?/){{2}})(?:[^/?\#{_ENDS}]*@
        | (?!(?<!s3://)(?<!s3[an]://)[^/?\#:{_ENDS}]*:\d+[\\/?\#])[^/?\#:@{_ENDS}]*:(?:(?!://)[^@{_ENDS}])*@)""",
    re.VERBOSE | re.IGNORECASE,
)
_QUOTED_USER = re.compile(rf"(%3A%2F%2F)(?:(?!%2[23789CF]|%3[CEF]|%5[BD])[^/?#&{_ENDS}])*%40", re.IGNORECASE)
_QUERY = re.compile(
    r"""((?:[?&;\#]|%3F|%26)(?:(?:(?:access|api|auth|hf|id|private|refresh|sas|secret|security|session)[_-]?)?token
        | (?:aws[_-]?)?(?:access|account|api|private|secret|secret[_-]?access|signing|subscription)[_-]?key(?:[_-]?id)?
        | (?:(?:app|client)[_-]?)?secret | password | passwd | passphrase | pwd | credentials? | sig | signature
        | x-(?:amz|goog)-(?:credential|signature|security-token))
        (?:=|%3D))[^\s&;\#"'<>]+""",
    re.VERBOSE | re.IGNORECASE,
)
_HEADER = re.compile(
    r"""(authorization\\?["']?\s*[:=]\s*(?:\\?["'])?(?:(?:bearer|basic|token)\s+|(?=[\w.~+/=-]{20})))[^\s"',]+""",
    re.IGNORECASE,
)
_ENVIRONMENT_URL = re.compile(r"\b(\w+)://([^\s/?#:]*)(?::([^\s/?#]*))?@")
_HUB_TOKEN = re.compile(r"hf_[A-Za-z0-9]{30,}")  # may come from a file, and not from the environment
_known: tuple[dict[bytes, bytes], list[str]] = ({}, [])  # an environment, and the secrets in it


def redact(text: str) -> str:
    """Redact every secret in a text."""
    if len(text) < _SHORTEST:
        return text
    for secret in _of_environment():
        text = text.replace(secret, STAR)
    return _HUB_TOKEN.sub(STAR, _HEADER.sub(rf"\1{STAR}", redact_urls(text)))


def redact_urls(text: str) -> str:
    """Redact users and tokens of URLs in a text, in any environment: a text that is read again equals itself."""
    return _QUERY.sub(rf"\1{STAR}", _QUOTED_USER.sub(rf"\1{STAR}%40", _USER.sub(rf"\1{STAR}@", text)))


def redact_tree(value: Any, how: Callable[[str], str] = redact) -> Any:
    """Redact each string in tables and lists that are nested."""
    if isinstance(value, str):
        return how(value)
    if isinstance(value, Mapping):
        return {key: redact_tree(one, how) for key, one in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [redact_tree(one, how) for one in cast("list[Any]", value)]
    return value


def _of_environment() -> list[str]:
    """Return the secrets in environment variables, cached until one changes."""
    global _known
    now = vars(os.environ)["_data"]  # as bytes, which compare a hundred times faster
    if _known[0] != now:
        _known = dict(now), _find_in_environment()
    return _known[1]


def _find_in_environment() -> list[str]:
    """Find the secrets of the environment, also quoted and escaped, the longest first."""
    secrets: set[str] = set()
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and not (value.startswith("/") and os.path.exists(value)):  # a file's path
            secrets.add(value)
        for scheme, user, password in _ENVIRONMENT_URL.findall(value):
            if password:
                secrets.add(password)
            elif scheme.lower() in ("http", "https") and len(user) >= _SHORTEST_TOKEN:
                secrets.add(user)
    spelt = {unquote(secret) for secret in secrets} | secrets
    for secret in [*spelt]:
        spelt |= {quote(secret), quote(secret, safe=""), json.dumps(secret)[1:-1], repr(secret)[1:-1]}
    return sorted((secret for secret in spelt if len(secret) >= _SHORTEST), key=len, reverse=True)
