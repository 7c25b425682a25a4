"""Load tokenizers, which turn text into token ids, and find the id that separates documents.

The tokenizer `bytes` needs no file: its 256 ids are the UTF-8 bytes, and NUL separates documents. All others are a
`tokenizer.json` of Hugging Face, read by the `tokenizers` library; `hf:OWNER/MODEL` is that of a model of the hub.
Special tokens inside a text are encoded as ordinary text, so that a web page about <|endoftext|> does not end a
document. Truncation, padding, dropout and the tokens that the file's post_processor adds would change the corpus and
are switched off, which the attribute `unused` reports. `as_used` returns the file without these settings.
`data.add_bos_token` adds the token that begins documents.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.durable import require_reachable
from titanlite.errors import DataError
from titanlite.hub import HUB, fetch_tokenizer, folder_of, is_hub_name, wrong_name
from titanlite.json_file import read_json

_LISTED = 10  # special tokens that a message names
_LEAST_SHARE = 0.9  # least share of a model's vocabulary that a tokenizer uses; published models have 0.99 and more
SEPARATORS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>")
_BEGINNINGS = ("<|begin_of_text|>", "<|startoftext|>", "<s>", "<bos>")


class EncodingError(DataError):
    """A tokenizer has no ids for a text, or fails on it; the message is one line."""


class ByteTokenizer:
    """Uses UTF-8 bytes as ids. Its attributes and methods are the interface of all tokenizers."""

    name = "bytes"  # as the user wrote it
    fingerprint = "bytes"  # equal for equal encodings
    vocab_size = 256  # largest id + 1
    separator_id = 0  # follows every document
    bos_id: int | None = None  # precedes every document; None: nothing does
    unknown_id: int | None = None  # id for text without a token; None: every text has tokens
    unused = ""  # notice of settings in its file that are not used, or ""

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return the UTF-8 bytes of each document, [N] uint8, without separators; texts must be valid Unicode."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of ids, separators included; incomplete characters become U+FFFD."""
        return ids.astype(np.uint8).tobytes().decode(errors="replace")


class FileTokenizer:
    """A tokenizer from a tokenizer.json of Hugging Face."""

    def __init__(self, name: str, path: Path, add_bos: bool = False) -> None:
        import tokenizers

        try:
            self._content = path.read_bytes()
            with panics_raised():
                self._tokenizer = tokenizers.Tokenizer.from_str(self._content.decode())
        except Exception as e:  # the library raises plain Exception
            raise _unusable(name, f"which is no tokenizer: {e}") from e
        ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.name, self.path = name, path
        self.vocab_size = max(ids.values(), default=-1) + 1
        special = [str(token.content) for token in self._tokenizer.get_added_tokens_decoder().values() if token.special]
        ends = "a token that separates documents"
        self.separator_id = _special_token(name, path, ids, special, "eos_token", SEPARATORS, ends)
        self.bos_id = None
        if add_bos:
            begins = "a token that begins documents, as data.add_bos_token asks for"
            self.bos_id = _special_token(name, path, ids, special, "bos_token", _BEGINNINGS, begins)
            if self.bos_id == self.separator_id:
                of = f"a tokenizer whose bos_token is its eos_token, as {name!r}"
                want = f"false with {of}: documents follow it anyway"
                raise DataError.of("data", "data.add_bos_token", "true", want, "add_bos_token = false")
        model = self._tokenizer.model
        if isinstance(model, tokenizers.models.Unigram):  # its class does not expose the unknown token
            self.unknown_id = json.loads(self._content)["model"].get("unk_id")
        else:
            self.unknown_id = ids.get(model.unk_token or "")
        dropout: float | None = getattr(model, "dropout", None)
        self.unused = self._switch_off(dropout)
        decides = self._content + b"%d" % self.separator_id
        decides += b"" if self.bos_id is None else b" after %d" % self.bos_id
        decides += b" without dropout" if dropout else b""
        self.fingerprint = hashlib.blake2b(decides, digest_size=16).hexdigest()

    def _switch_off(self, dropout: float | None) -> str:
        """Switch off truncation, padding, dropout and special tokens in text; return the notice for `unused`."""
        unused: list[str] = []
        if (truncation := self._tokenizer.truncation) is not None:
            unused.append(f"its truncation to {truncation['max_length']} tokens is switched off")
            self._tokenizer.no_truncation()
        if self._tokenizer.padding is not None:
            unused.append("its padding is switched off")
            self._tokenizer.no_padding()
        if dropout:
            unused.append(f"its dropout of {dropout:g} is switched off")
            self._tokenizer.model.dropout = None
        self._tokenizer.encode_special_tokens = True
        try:
            with panics_raised():
                whole = self._tokenizer.encode("a")
        except Exception:  # the tokenizer has no token for "a"
            whole = self._tokenizer.encode("")
        begin = [] if self.bos_id is None else [self.bos_id]
        of_text = [n for n, is_added in zip(whole.ids, whole.special_tokens_mask, strict=True) if not is_added]
        self._is_as_processed = whole.ids == begin + of_text
        if len(of_text) < len(whole.ids) and not self._is_as_processed:
            added = [t for t, is_added in zip(whole.tokens, whole.special_tokens_mask, strict=True) if is_added]
            instead = "" if begin else "; data.add_bos_token = true begins documents with the tokenizer's bos_token"
            unused.append(f"its post_processor, which adds {' and '.join(added)}, is not used{instead}")
        self._is_as_written = self._is_as_processed and not unused
        return ", ".join(unused) and f"data.tokenizer = {self.name!r}: {', '.join(unused)}"

    def token(self, number: int) -> str:
        """Return the token, as text, of an id of the vocabulary."""
        return str(self._tokenizer.id_to_token(number))

    def as_used(self) -> str:
        """Return the content of a tokenizer.json that encodes text as in training, except for the separator."""
        if self._is_as_written:
            return self._content.decode()
        from tokenizers import Tokenizer, processors

        used = Tokenizer.from_str(self._tokenizer.to_str())
        if not self._is_as_processed:
            used.post_processor = None
        if not self._is_as_processed and self.bos_id is not None:
            bos = self.token(self.bos_id)
            pair = [bos, "$A", "$B:1"]
            used.post_processor = processors.TemplateProcessing([bos, "$A"], pair, [(bos, self.bos_id)])
        return used.to_str(pretty=True)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each document, [N] uint32, without separators; raise an EncodingError if one has no ids."""
        try:
            with panics_raised():
                encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as e:  # the library raises plain Exception
            raise EncodingError(f"data.tokenizer = {self.name!r} cannot encode it: {e}") from e
        return [np.array(e.ids, np.uint32) for e in encoded]

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of ids, special tokens included."""
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False))


Tokenizer = ByteTokenizer | FileTokenizer


def is_panic(error: BaseException) -> bool:
    """Return whether an error is a panic of a Rust library, which is no `Exception` and whose class is not exported."""
    return type(error).__name__ == "PanicException"


@contextmanager
def panics_raised() -> Iterator[None]:
    """Turn a panic of a Rust library in the block into a RuntimeError."""
    try:
        yield
    except BaseException as e:
        if not is_panic(e):
            raise
        raise RuntimeError(str(e)) from e


def load_tokenizer(tokenizer: str, add_bos: bool = False) -> Tokenizer:
    """Load the tokenizer that `data.tokenizer` names: `bytes`, a tokenizer.json, or that of a model of the hub.

    Raises:
        DataError: the file is missing, cannot be fetched or is no tokenizer, or has no token that ends (`add_bos`:
            begins) documents.
    """
    if tokenizer == "bytes":
        if add_bos:
            want, fix = "false with tokenizer `bytes`, which has no such token", "false, or name a tokenizer.json"
            raise DataError.of("data", "data.add_bos_token", "true", want, fix)
        return ByteTokenizer()
    path = tokenizer_file(tokenizer)
    require_reachable(path)
    if os.path.isfile(path / "tokenizer.json"):
        raise _unusable(tokenizer, "which is a folder", f"data.tokenizer = {str(path / 'tokenizer.json')!r}")
    if not os.path.isfile(path):
        fix = "correct the path"
        if path.suffix != ".json" and wrong_name(f"{HUB}{tokenizer}") is None:
            fix += f"; or, for the tokenizer of a model of the hub, {HUB}{tokenizer}"
        raise _unusable(tokenizer, f"and there is no such file (working directory: {Path.cwd()})", fix)
    return FileTokenizer(tokenizer, path, add_bos)


def tokenizer_file(tokenizer: str) -> Path:
    """Return the path of the tokenizer.json that a text other than `bytes` names; fetch it if it is of the hub."""
    return fetch_tokenizer(tokenizer, "data.tokenizer") if is_hub_name(tokenizer) else folder_of(tokenizer)


def has_bos(tokenizer: str) -> bool:
    """Return whether `data.add_bos_token` can be true with a tokenizer; True if the tokenizer does not load."""
    for add_bos in (True, False):
        try:
            load_tokenizer(tokenizer, add_bos)
        except DataError:
            continue
        return add_bos
    return True


def rows_for(n_ids: int) -> int:
    """Return the vocabulary size of a model for `n_ids` ids: the next multiple of 128, for aligned matmul kernels."""
    return -(-n_ids // 128) * 128


def few_ids(n_ids: int, whose: str, vocab_size: int, fix: str) -> str | None:
    """Return a warning if `n_ids`, the largest id + 1, is far below the model's vocabulary.

    `whose`: the config entry that has these ids, as `key = value`.
    """
    if n_ids >= _LEAST_SHARE * vocab_size or vocab_size <= rows_for(n_ids):
        return None
    share = f"{n_ids / vocab_size:.1%} of the model's ids can occur"
    return f"{whose} has {n_ids:,} ids and model.vocab_size is {vocab_size:,}: {share}; {fix}"


def _special_token(
    name: str, path: Path, ids: dict[str, int], special: list[str], key: str, usual: tuple[str, ...], wanted: str
) -> int:
    """Return the id of the token that tokenizer_config.json has as `key`, else of the first in `usual` that exists."""
    config = path.parent / "tokenizer_config.json"
    if config.is_file():
        try:
            token: Any = read_json(config).get(key)
        except (ValueError, AttributeError) as e:
            raise _unusable(name, f"beside which {config} is not a JSON object: {e}", "correct that file") from e
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None:
            if not isinstance(token, str) or token not in ids:
                saw = f"which has no token {token!r}, though {config} names it as {key}"
                how = "tokenizers.Tokenizer.add_special_tokens, then save"
                raise _unusable(name, saw, f"add it to {path.name} ({how}), or make {key} one of its tokens")
            return ids[token]
    found = [s for s in usual if s in ids]
    if not found:
        saw = f"{name!r}, whose special tokens are {', '.join(special[:_LISTED])}{', …' * (len(special) > _LISTED)}"
        want = f"{wanted}, one of {', '.join(usual)}"
        fix = f'name the token in {config}: {{"{key}": "…"}}'
        raise DataError.of("data", "data.tokenizer", saw if special else repr(name), want, fix)
    return ids[found[0]]


def _unusable(name: str, saw: str, fix: str = "name a tokenizer.json as Hugging Face writes it, or bytes") -> DataError:
    want = f"`bytes`, the path of a tokenizer.json, or {HUB}OWNER/MODEL"
    return DataError.of("data", "data.tokenizer", f"{name!r}, {saw}", want, fix)
