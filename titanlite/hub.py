"""Fetch models and tokenizers that are named `hf:OWNER/MODEL[@REVISION]`, and push folders to the Hugging Face hub.

A revision is resolved to a commit once. From then on the name with the commit stands for a folder of the hub's own
cache (`HF_HOME`), into which only the files that are needed are fetched, by one process of a host while the others
wait. What the cache has is not asked for again, so that a run starts without a network, too.

`huggingface_hub` downloads, retries, resumes and knows the user's token. No message has the text of its errors, which
may have the token. It is imported where it is used: most runs need none of it.
"""

import errno
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from titanlite.config.hugging_face import INDEX, ONE_FILE, weight_files
from titanlite.durable import disk_space_in
from titanlite.errors import HubError

HUB = "hf:"
_WANT = "hf:OWNER/MODEL, or hf:OWNER/MODEL@REVISION with a branch, tag or commit, as in hf:Qwen/Qwen3-0.6B-Base"
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]|\.(?!\.))*(?<![.-])"
_REPO = re.compile(rf"{_PART}/{_PART}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_OF_TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json")  # beside tokenizer.json; a model may lack them
_LOGIN = "log in with `hf auth login`, or set HF_TOKEN"


class HubName(NamedTuple):
    """A model of the hub: `OWNER/MODEL`, and a branch, tag or commit, "" for the default branch."""

    repo: str
    revision: str

    @property
    def is_resolved(self) -> bool:
        """Return whether the revision is a commit."""
        return _COMMIT.fullmatch(self.revision) is not None


def is_hub_name(text: str) -> bool:
    """Return whether a text names a model of the hub. A local folder of such a name is written `./hf:…`."""
    return text.startswith(HUB)


def read_name(text: str, key: str) -> HubName:
    """Parse a text that `is_hub_name`; `key` is the config key or flag of the text. No network is needed.

    Raises:
        HubError: the text is no name of a model.
    """
    if wrong := wrong_name(text):
        raise HubError.of("Hugging Face hub", key, repr(text), *wrong)
    repo, _, revision = text.removeprefix(HUB).partition("@")
    return HubName(repo, revision)


def wrong_name(text: str) -> tuple[str, str] | None:
    """Return (what is wanted, the fix) if a text that `is_hub_name` is not the name of a model, else None."""
    repo, at, revision = text.removeprefix(HUB).partition("@")
    if _is_repo(repo) and bool(at) == bool(re.fullmatch(r"[^\s@:?*\[\\^~]+", revision)) and ".." not in revision:
        return None
    bare, fix = repo.strip("/"), "write the model's name on the hub"
    if repo.startswith(("/", ".", "~")) and not repo.startswith("//"):
        fix = f"leave {HUB} out for a folder or file of this host"
    elif _is_repo(bare):
        fix = f"{HUB}{bare}" + f"@{revision}" * bool(revision)
    return _WANT, fix


def _is_repo(name: str) -> bool:
    return _REPO.fullmatch(name) is not None and "--" not in name and len(name) <= 96 and not name.endswith(".git")


def folder_of(text: str) -> Path:
    """Return the folder that a path, or a name with a commit, stands for. Nothing is fetched."""
    if not is_hub_name(text):
        return Path(os.path.expanduser(text))
    from huggingface_hub import constants

    name = read_name(text, "")
    return Path(constants.HF_HUB_CACHE) / f"models--{name.repo.replace('/', '--')}" / "snapshots" / name.revision


def resolve_name(text: str, key: str) -> tuple[str, bool]:
    """Return the name with its revision's commit, and whether the hub said so: else it is what the cache has.

    Raises:
        HubError: there is no such model or revision; or the hub cannot be asked, and the cache does not know it.
    """
    name = read_name(text, key)
    if name.is_resolved:
        return text, True
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RevisionResolutionError

    api, has_answered = HfApi(), True
    with _explained(text, key):
        asked: dict[str, Any] = {"repo_id": name.repo, "revision": name.revision or None}
        try:
            api.model_info(**asked)
        except Exception as error:
            if not _is_unreachable(error):
                raise
            has_answered = False
            try:
                commit = api.resolve_revision(**asked, local_files_only=True).resolved
            except RevisionResolutionError:
                raise error from None
        else:
            commit = api.resolve_revision(**asked).resolved  # also remembers it in the cache
    return f"{HUB}{name.repo}@{commit}", has_answered


def fetch_tokenizer(text: str, key: str) -> Path:
    """Return the path of a model's tokenizer.json in the cache, with the files of its settings beside it.

    Raises:
        HubError: as `resolve_name`, or a file cannot be fetched.
    """
    return _fetch_small(resolve_name(text, key)[0], key, ["tokenizer.json"], _OF_TOKENIZER) / "tokenizer.json"


def fetch_description(text: str, key: str) -> None:
    """Fetch what describes the weights of a name with a commit: config.json, their index, and tokenizer.json.

    Raises:
        HubError: a file is missing, there are no safetensors, or the hub cannot be asked.
    """
    folder = _fetch_small(text, key, ["config.json"], ["tokenizer.json"])
    if (folder / ONE_FILE).is_file():
        return
    _fetch_small(text, key, [], [INDEX])
    if (folder / INDEX).is_file():
        return
    from huggingface_hub import HfApi

    name = read_name(text, key)
    with _explained(text, key):
        is_there = HfApi().file_exists(name.repo, ONE_FILE, revision=name.revision)
    if not is_there:
        fix = "name another model, or another revision of it, that has safetensors"
        raise HubError.of("Hugging Face hub", key, f"{text!r}, which has no {ONE_FILE}", "safetensors", fix)


def knows_dataset(name: str) -> bool:
    """Return whether the hub can be asked, once and without a retry, and gives a dataset to this host."""
    from huggingface_hub import HfApi

    try:
        HfApi().dataset_info(name)
    except Exception:  # of the network, of the hub, or of a name that is none
        return False
    return True


def missing_weights(text: str) -> list[str]:
    """Return the files of weights that the cache lacks, of a name that `fetch_description` has seen; [] for a path."""
    return [file.name for file in weight_files(folder_of(text)) if not file.is_file()] if is_hub_name(text) else []


def fetch_weights(text: str, key: str) -> None:
    """Fetch the files of weights that the cache lacks, of a name that `fetch_description` has seen.

    Raises:
        HubError: the hub cannot be asked, or the transfer breaks off; complete files are kept for the next start.
    """
    if not missing_weights(text):
        return
    from huggingface_hub import hf_hub_download, snapshot_download

    name = read_name(text, key)
    with _explained(text, key), _download_lock(text):
        if missing := missing_weights(text):
            sys.stderr.write(f"fetching {len(missing)} file{'s' * (len(missing) > 1)} of weights of {text}\n")
            sys.stderr.flush()
            snapshot_download(name.repo, revision=name.revision, allow_patterns=missing)
            for file in missing_weights(text):  # without the hub, what is there was returned; this says why
                hf_hub_download(name.repo, file, revision=name.revision)


def require_login(repo: str, key: str) -> None:
    """Refuse a name to push to that is none, or a host without a token that the hub knows.

    Raises:
        HubError: as said, or the hub cannot be asked.
    """
    if not _is_repo(repo):
        raise HubError.of("Hugging Face hub", key, repr(repo), "OWNER/MODEL", "the name of a model, as me/my-model")
    from huggingface_hub import HfApi

    with _explained(repo, key):
        HfApi().whoami()


def push(folder: Path, repo: str, message: str, key: str) -> str:
    """Upload a folder in one commit, to a new private model if there is none. Return the URL of the commit.

    Raises:
        HubError: the hub cannot be asked or refuses it. The folder stays as it is.
    """
    from huggingface_hub import HfApi

    again = f"then push again: hf upload {repo} {folder} --private"
    with _explained(repo, key, again):
        api = HfApi()
        api.create_repo(repo, private=True, exist_ok=True)
        return api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message).commit_url


def _fetch_small(text: str, key: str, files: Sequence[str], optional: Sequence[str]) -> Path:
    """Fetch the small files of a name with a commit that the cache lacks; return their folder."""
    name, folder = read_name(text, key), folder_of(text)
    known_absent = folder.parents[1] / ".no_exist" / name.revision

    def lacking() -> list[str]:
        needed = [*files, *(file for file in optional if not (known_absent / file).exists())]
        return [file for file in needed if not (folder / file).is_file()]

    if not lacking():
        return folder
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    with _explained(text, key), _download_lock(text):
        for file in lacking():
            try:
                hf_hub_download(name.repo, file, revision=name.revision)
            except RemoteEntryNotFoundError:
                if file not in optional:
                    raise
    return folder


@contextmanager
def without_retries_told() -> Iterator[None]:
    """Keep what `huggingface_hub` says of its retries off the terminal: the error that follows them has the reason."""
    from huggingface_hub.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


@contextmanager
def _download_lock(text: str) -> Iterator[None]:
    """Let one process of a host fetch from a commit, while the others wait."""
    from huggingface_hub.utils import WeakFileLock

    folder = folder_of(text)
    path = folder.parents[2] / ".locks" / folder.parents[1].name / f"{folder.name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(path):
        yield


@contextmanager
def _explained(text: str, key: str, again: str = "") -> Iterator[None]:
    """Turn each error of `huggingface_hub` into a message of ours."""
    try:
        yield
    except Exception as error:
        saw, want, fix = _said_of(error, text.removeprefix(HUB).partition("@")[0])
        fix = "; ".join(filter(None, [fix, again]))
        raise HubError.of("Hugging Face hub", key, f"{text!r}: {saw}", want, fix) from None


def _is_unreachable(error: Exception) -> bool:
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= 500
    return isinstance(error, HTTPError | OfflineModeIsEnabled)


def _said_of(error: Exception, repo: str) -> tuple[str, str, str]:
    """Return (what was seen, what is wanted, the fix) for an error of `huggingface_hub`."""
    from huggingface_hub import constants, errors

    wraps = errors.LocalEntryNotFoundError | RuntimeError  # the latter around the error of an upload
    while isinstance(error, wraps) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    status = getattr(getattr(error, "response", None), "status_code", 0)
    cache = f"what is needed in this host's cache, {constants.HF_HUB_CACHE}, or a hub that can be asked"
    if isinstance(error, errors.OfflineModeIsEnabled):
        fix = f"unset HF_HUB_OFFLINE; or `hf download {repo}` where there is a network, into the HF_HOME of this host"
        return "the cache does not have it, and HF_HUB_OFFLINE is set", cache, fix
    if isinstance(error, errors.GatedRepoError):
        fix = f"accept its licence at {constants.ENDPOINT}/{repo}, and {_LOGIN}"
        return f"a gated model ({status})", "a model that this account may read", fix
    if isinstance(error, errors.RevisionNotFoundError):
        want = "a branch, tag or commit of this model"
        return f"the model has no such revision ({status})", want, f"one of {constants.ENDPOINT}/{repo}/commits"
    if isinstance(error, errors.RemoteEntryNotFoundError):
        file = str(error.response.request.url).rpartition("/")[2].partition("?")[0]
        return f"the model has no {file} ({status})", f"a model with {file}", "name another model or revision"
    if isinstance(error, errors.LocalTokenNotFoundError):
        return "this host has no token of the hub", "an account that may write there", _LOGIN
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403):
        want = "a model that is there, and that this account may read or, to push, write"
        return f"the hub refuses it ({status})", want, f"correct the name; or, of a private one, {_LOGIN}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        free, make_room = disk_space_in(Path(constants.HF_HUB_CACHE))
        want = f"room for the model in {constants.HF_HUB_CACHE}"
        return f"the disk is full: {free}", want, f"{make_room}, or set HF_HOME to a folder of another disk"
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        want = "a cache that can be written; HF_HOME names it"
        return f"{error.filename or constants.HF_HUB_CACHE}: {error.strerror}", want, "make it writable, or set HF_HOME"
    if status:
        return f"the hub answered {status}", "a hub that answers", "start again later; complete files are kept"
    name = type(error).__name__
    if not (_is_unreachable(error) or isinstance(error, OSError)):
        return f"huggingface_hub failed with {name}", "its success", "see what its command `hf` says of the same"
    fix = "see whether the network is there, and start again: complete files are kept"
    return f"the hub cannot be asked, or the transfer broke off ({name})", cache, fix
