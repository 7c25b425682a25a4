"""Open the file system behind a URL by fsspec, with limits of time, and explain what it refuses.

`s3://`, `gs://`, `https://` and all other protocols of fsspec, which takes endpoints, keys and further options from its
own configuration and from environment variables. fsspec and its back ends are imported only if a URL is used.
"""

import errno
import importlib
import re
from typing import Any

from titanlite.errors import DataError, TitanliteError
from titanlite.extras import missing_packages
from titanlite.redact import redact, redact_urls

# Time limits of a request over http, and of each of the 5 or 6 tries that s3fs and gcsfs make. A try with its pause
# must be shorter than the watchdog's limit (comm.train_timeout_seconds = 180).
_REQUEST_S, _TRY_S = 90, 20
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; of a public bucket, FSSPEC_S3_ANON=true",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`; "
    "of a public bucket, FSSPEC_GS_TOKEN=anon",
}
MIRROR = "checkpoint.mirror"
COPY = "copy the file to a disk or a bucket"
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "http": "aiohttp", "https": "aiohttp"}
_CHAINED = re.compile(r"::[\w+.-]+://|^[\w+.-]+://.*::/")
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError", "ProfileNotFound")
_IS_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ImportError, TitanliteError)
_IS_FINAL += (MemoryError, TypeError, AttributeError, NameError, AssertionError)  # never caused by a network


def is_url(source: str) -> bool:
    """Return whether a source is given as a URL."""
    scheme, is_there, _ = source.partition("://")
    return bool(is_there) and scheme.replace("+", "").isalnum()


def filesystem(url: str, key: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path of the URL in this file system.

    Raises:
        DataError: the protocol is unknown, its package is not installed, or the URL is not just a protocol and a path.
    """
    import fsspec.core

    scheme = url.partition("://")[0]
    if scheme in _PACKAGES and (missing := missing_packages(_PACKAGES[scheme])):
        raise url_error(url, key, "", *missing)
    try:
        options = _time_limits(scheme)
        more = {} if key == MIRROR else fsspec.get_filesystem_class(scheme)._get_kwargs_from_urls(url)
        if more:  # a file of a source is opened by protocol and path
            want = "a URL of a protocol and a path, as those of s3://, gs:// and https:// are"
            raise url_error(url, key, f", whose {', '.join(more)} is no part of the path there", want)
        return fsspec.core.url_to_fs(url, **options)
    except DataError:
        raise
    except ImportError as e:
        want = f"the package that reads {scheme}://, not installed here"
        raise url_error(url, key, "", want, f"install what it names: {e}") from e
    except ValueError as e:
        want = "a protocol that fsspec knows, as s3://, gs:// or https://"
        raise url_error(url, key, f": {e}", want, "correct the URL") from e
    except Exception as e:
        raise refused_request(e, url, key) from e


def _time_limits(scheme: str) -> dict[str, Any]:
    """Return the fsspec options that limit the time of requests for the protocol `scheme`."""
    if scheme in ("http", "https"):
        aiohttp: Any = importlib.import_module("aiohttp")
        silence = aiohttp.ClientTimeout(total=_REQUEST_S, sock_connect=30, sock_read=60)
        return {"client_kwargs": {"trust_env": True, "timeout": silence}}
    if scheme in ("s3", "s3a"):
        limits = {"connect_timeout": _TRY_S, "read_timeout": _TRY_S, "retries": {"max_attempts": 0}}
        return {"config_kwargs": limits}
    return {"requests_timeout": _TRY_S} if scheme in ("gs", "gcs") else {}


def is_chained(url: str) -> bool:
    """Return whether a URL is one of fsspec's chained ones, such as `zip://*.txt::https://host/a.zip`."""
    return _CHAINED.search(url) is not None


def refuse_chained(source: str, key: str) -> None:
    """Refuse fsspec's chained URLs."""
    if is_chained(source):
        fix = "unpack or copy what is behind it to a disk or a bucket"
        raise url_error(source, key, ", several in one", "one URL", fix)


def url_error(url: str, key: str, what: str, want: str, fix: str = "") -> DataError:
    """Return the error for the URL of a config key. `what`: what is wrong, behind the URL without its secrets."""
    section, copy = ("checkpoint", "name another store") if key == MIRROR else ("data", COPY)
    return DataError.of(section, key, f"{redact_urls(url)!r}{what}", want, fix or copy)


def is_final(e: Exception) -> bool:
    """Return whether another try cannot mend a failed request."""
    status = getattr(e, "status", None) or getattr(e, "code", None)
    is_refusal = isinstance(status, int) and 400 <= status < 500 and status not in (408, 425, 429)
    is_full = isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT)
    return isinstance(e, _IS_FINAL) or is_refusal or is_full or lacks_credentials(e)


def lacks_credentials(e: BaseException | None) -> bool:
    """Return whether a request was refused for want of credentials or rights."""
    if e is None:
        return False
    status = getattr(e, "status", None) or getattr(e, "code", None)
    is_so = isinstance(e, PermissionError) or type(e).__name__ in _NO_CREDENTIALS or status in (401, 403)
    return is_so or lacks_credentials(e.__cause__)


def refused_request(e: Exception, url: str, key: str) -> DataError:
    """Return the error for a request that has failed for good."""
    scheme, does = url.partition("://")[0], "read and written" if key == MIRROR else "read"
    want, fix = f"files that can be {does}", "see whether the network and the server are there, and start again"
    if lacks_credentials(e):
        want = f"files that may be {does}, with the credentials that this process has"
        scheme = {"s3a": "s3", "gcs": "gs"}.get(scheme, scheme)
        of_others = "give user and password, as https://USER:PASSWORD@HOST/, or a URL that is signed anew"
        fix = _CREDENTIALS.get(scheme, of_others)
    return url_error(url, key, f": {in_one_line(e)}", want, fix)


def in_one_line(e: Exception) -> str:
    """Return the type and the first line of an error, without secrets."""
    return redact(f"{type(e).__name__}: {str(e) or 'no more is known'}".splitlines()[0])
