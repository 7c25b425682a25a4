"""Tokenizers: text to token ids, and the id that separates documents.

`bytes` needs no file and no download: 256 ids, the UTF-8 bytes themselves; NUL, which text does not hold, separates.
Everything else is a `tokenizer.json` as Hugging Face writes it, read by the `tokenizers` library. Text is text: special
tokens that occur in it as words are encoded as words, so that a web page about <|endoftext|> does not end a document.
What the file says of truncation, padding and added special tokens is switched off, as it would change the corpus.
"""

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from titanlite.errors import DataError, Problem, describe

_LISTED = 10  # special tokens that a message names
SEPARATORS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>")


class EncodingError(DataError):
    """A text that a tokenizer has no ids for, or fails on; says so in one line."""


class Tokenizer(Protocol):
    """What the rest of titanlite needs of a tokenizer."""

    name: str  # as the user wrote it
    vocab_size: int  # largest id + 1
    separator_id: int  # follows every document
    unknown_id: int | None  # stands for text that there is no token for; None if there is one for all
    fingerprint: str  # equal for equal encodings

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Encode documents, without separators.

        Args:
            texts: valid Unicode, that is without halves of surrogate pairs.

        Returns:
            One array of ids per text, unsigned, of any width.

        Raises:
            EncodingError: one of them cannot be encoded; which one is not known.
        """
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids."""

    name = fingerprint = "bytes"
    vocab_size = 256
    separator_id = 0
    unknown_id: int | None = None

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Encode documents as their UTF-8 bytes, uint8."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]


class FileTokenizer:
    """A tokenizer.json."""

    def __init__(self, name: str, path: Path) -> None:
        import tokenizers

        try:
            content = path.read_bytes()
            with _panics_raised():
                self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as e:  # the library raises plain Exception
            raise _unusable(name, f"which is no tokenizer: {e}") from e
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.name = name
        self.vocab_size = max(ids.values(), default=-1) + 1
        special = [str(token.content) for token in self._tokenizer.get_added_tokens_decoder().values() if token.special]
        self.separator_id = _separator(name, path, ids, special)
        if isinstance(self._tokenizer.model, tokenizers.models.Unigram):  # which does not tell
            self.unknown_id = json.loads(content)["model"].get("unk_id")
        else:
            self.unknown_id = ids.get(self._tokenizer.model.unk_token or "")
        self.fingerprint = hashlib.blake2b(content + b"%d" % self.separator_id, digest_size=16).hexdigest()

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Encode documents on all cores, uint32.

        Raises:
            EncodingError: the tokenizer has no token for a word of one of them, or the library fails on it.
        """
        try:
            with _panics_raised():
                encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as e:  # the library raises plain Exception
            raise EncodingError(f"data.tokenizer = {self.name!r} cannot encode it: {e}") from e
        return [np.array(e.ids, np.uint32) for e in encoded]


def is_panic(error: BaseException) -> bool:
    """Return whether it is the panic of a library in Rust, which is no Exception and has no class here."""
    return type(error).__name__ == "PanicException"


@contextmanager
def _panics_raised() -> Iterator[None]:
    """Raise a panic as an error, and keep the report from stderr that the library prints before."""
    stderr = os.dup(2) if sys.__stderr__ else None  # a process may be started without one
    with tempfile.TemporaryFile() as said:
        if stderr is not None:
            os.dup2(said.fileno(), 2)
        try:
            yield
        except BaseException as e:
            if not is_panic(e):
                raise
            said.truncate(0)
            raise RuntimeError(str(e)) from e
        finally:
            if stderr is not None:
                os.dup2(stderr, 2)
                os.close(stderr)
                said.seek(0)
                if others := said.read():  # as of the thread that draws a bar
                    with suppress(OSError):
                        os.write(2, others)


def load(tokenizer: str) -> Tokenizer:
    """Load the tokenizer that `data.tokenizer` names.

    Args:
        tokenizer: `bytes`, or the path of a tokenizer.json.

    Returns:
        The tokenizer.

    Raises:
        DataError: no such file, it is not a tokenizer, or no token of it separates documents.
    """
    if tokenizer == "bytes":
        return ByteTokenizer()
    path = Path(os.path.expanduser(tokenizer))
    if os.path.isfile(path / "tokenizer.json"):
        raise _unusable(tokenizer, "which is a folder", f"data.tokenizer = {str(path / 'tokenizer.json')!r}")
    if not os.path.isfile(path):
        fix = "correct the path"
        if tokenizer.count("/") == 1 and not tokenizer.startswith((".", "/", "~")) and path.suffix != ".json":
            fix += f"; or fetch it: hf download {tokenizer} tokenizer.json tokenizer_config.json --local-dir FOLDER"
        raise _unusable(tokenizer, f"and there is no such file (working directory: {Path.cwd()})", fix)
    return FileTokenizer(tokenizer, path)


def _separator(name: str, path: Path, ids: dict[str, int], special: list[str]) -> int:
    """The id of the end-of-text token: the one that tokenizer_config.json names, else the first known one."""
    config = path.parent / "tokenizer_config.json"
    if config.is_file():
        try:
            eos: Any = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
        except (ValueError, AttributeError) as e:
            raise _unusable(name, f"beside which {config} is not a JSON object: {e}", "correct that file") from e
        eos = eos.get("content") if isinstance(eos, dict) else eos
        if eos is not None:
            if not isinstance(eos, str) or eos not in ids:
                saw = f"which has no token {eos!r}, though {config} names it as eos_token"
                raise _unusable(name, saw, "correct eos_token")
            return ids[eos]
    found = [s for s in SEPARATORS if s in ids]
    if not found:
        saw = f"{name!r}, whose special tokens are {', '.join(special[:_LISTED])}{', …' * (len(special) > _LISTED)}"
        want = f"a token that separates documents, one of {', '.join(SEPARATORS)}"
        fix = f'name the token in {config}: {{"eos_token": "…"}}'
        raise DataError(describe("data", [Problem("data.tokenizer", saw if special else repr(name), want, fix)]))
    return ids[found[0]]


def _unusable(name: str, saw: str, fix: str = "name a tokenizer.json as Hugging Face writes it, or bytes") -> DataError:
    problem = Problem("data.tokenizer", f"{name!r}, {saw}", "`bytes`, or the path of a tokenizer.json", fix)
    return DataError(describe("data", [problem]))
