"""Continue texts: encode prompts, decode what a model adds, and end where a document or a stop text says so."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from titanlite.data.tokenizer import EncodingError, Tokenizer
from titanlite.errors import DataError
from titanlite.generation.decode import Decoder, Sampling

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # the end of a text whose last character lacks bytes


@dataclass
class Continuation:
    """A prompt, and the text that the model has added so far.

    Attributes:
        prompt: ids.
        text: what was added, without an end of document and without the stop text.
        is_done: the document has ended, or the stop text has come.
    """

    prompt: list[int]
    text: str = ""
    is_done: bool = False
    _new: list[int] = field(default_factory=list[int])

    def add(self, token: int, tokenizer: Tokenizer, stop: str) -> None:
        """Add a token, unless it is done."""
        if self.is_done:
            return
        if token == tokenizer.separator_id:
            self.is_done = True
            return
        self._new.append(token)
        # A tokenizer may write a token otherwise at a text's beginning, so that the prompt is decoded with it.
        before, whole = (tokenizer.decode(np.array(ids)) for ids in (self.prompt, self.prompt + self._new))
        self.text = whole[len(before) :]
        if stop and stop in self.text:
            self.text, self.is_done = self.text.partition(stop)[0], True

    def finished_part(self, stop: str, is_last: bool) -> str:
        """Return the text that more tokens will not change: whole characters, and nothing that may begin the stop."""
        if is_last or self.is_done:
            return self.text
        held = next((n for n in range(min(len(stop), len(self.text)), 0, -1) if self.text.endswith(stop[:n])), 0)
        return self.text[: len(self.text) - held].rstrip(_INCOMPLETE)


def encode_prompts(prompts: Sequence[str], tokenizer: Tokenizer, limit: int, capacity: int) -> list[list[int]]:
    """Encode prompts as the beginnings of documents.

    Args:
        prompts: texts; an empty one is a document's beginning.
        tokenizer: the model's.
        limit: how many tokens are to be added to each.
        capacity: the most tokens of a prompt and its continuation.

    Raises:
        DataError: a prompt cannot be encoded, or is too long.
    """
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    encoded = list[list[int]]()
    for prompt in prompts:
        try:
            ids = begin + tokenizer.encode_batch([prompt])[0].tolist() or [tokenizer.separator_id]
        except EncodingError as error:
            want = f"a text that the tokenizer has tokens for ({error})"
            raise DataError.of("generate", "prompt", repr(prompt), want, "another prompt") from error
        if len(ids) + limit > capacity:
            want = f"at most {capacity} tokens with the {limit} that are added; it has {len(ids)}"
            raise DataError.of("generate", "prompt", repr(prompt[:40]), want, "a shorter prompt, or fewer new tokens")
        encoded.append(ids)
    return encoded


def continue_texts(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    limit: int,
    sampling: Sampling,
    stop: str = "",
    show: Callable[[str], object] | None = None,
    ends_early: bool = True,
) -> list[str]:
    """Return the text that a model adds to each prompt; collective.

    Args:
        decoder: the model.
        tokenizer: its tokenizer.
        prompts: ids, from `encode_prompts`.
        limit: the most tokens that are added.
        sampling: how a token is chosen.
        stop: a text that ends a continuation and is not returned; "": none.
        show: called with each new part of the first prompt's text.
        ends_early: end when all continuations have ended; else after `limit` tokens, on every rank.
    """
    rows, shown = [Continuation([*prompt]) for prompt in prompts], 0
    all_done = lambda: ends_early and all(row.is_done for row in rows)  # noqa: E731
    for n, tokens in enumerate(decoder.continue_prompts(prompts, limit, sampling, all_done), start=1):
        for row, token in zip(rows, tokens, strict=True):
            row.add(token, tokenizer, stop)
        if show is not None:
            part = rows[0].finished_part(stop, is_last=n == limit)
            show(part[shown:])
            shown = max(shown, len(part))
    return [row.text for row in rows]
