"""Replace secrets by `***` in everything that a run or a command prints and writes.

Secrets are: values of environment variables with names such as API_KEY, the user part of a URL, a token in a URL's
query, the value of an `Authorization` header, and the password, or token in its place, of a URL in the environment.
Most secrets appear in exceptions of libraries. So all text on standard output, on standard error and in a run's files
is redacted.

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
_SHORTEST = 8  # characters; a shorter value may be an ordinary word, and is not redacted
_SHORTEST_TOKEN = 20  # characters; a URL's user without a password is a token from this length on
# Matches up to the last @ of a URL's authority. A secret key of S3 may contain slashes: without an @ before the first
# slash, the match ends at the next @ after it, unless the apparent password is a port (URLs of S3 have none). A quote,
# comma or bracket ends a URL within a text.
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
_HUB_TOKEN = re.compile(r"hf_[A-Za-z0-9]{30,}")  # of Hugging Face; it may come from a file
_known: tuple[dict[bytes, bytes], list[str]] = ({}, [])  # the last environment seen, and its secrets


def redact(text: str) -> str:
    """Return a text with every secret replaced by `***`."""
    if len(text) < _SHORTEST:
        return text
    for secret in _of_environment():
        text = text.replace(secret, STAR)
    return _HUB_TOKEN.sub(STAR, _HEADER.sub(rf"\1{STAR}", redact_urls(text)))


def redact_urls(text: str) -> str:
    """Redact users and tokens of URLs in a text. Unlike `redact`, the result does not depend on the environment."""
    return _QUERY.sub(rf"\1{STAR}", _QUOTED_USER.sub(rf"\1{STAR}%40", _USER.sub(rf"\1{STAR}@", text)))


def redact_tree(value: Any, how: Callable[[str], str] = redact) -> Any:
    """Return a copy of nested tables and lists in which `how` has redacted each string value."""
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
    now = vars(os.environ)["_data"]  # bytes compare a hundred times faster than text
    if _known[0] != now:
        _known = dict(now), _find_in_environment()
    return _known[1]


def _find_in_environment() -> list[str]:
    """Return the secrets in environment variables, each also quoted for URLs and escaped, the longest first."""
    secrets: set[str] = set()
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and not (value.startswith("/") and os.path.exists(value)):  # not a file's path
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
