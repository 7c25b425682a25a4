"""Continue texts: decode the tokens that a model adds, and end where the document or a stop text ends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from titanlite.data.tokenizer import Tokenizer
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
        # A tokenizer may write a token otherwise at a text's beginning, so that the prompt's text is decoded with it.
        prompt = [] if self.prompt in ([tokenizer.bos_id], [tokenizer.separator_id]) else self.prompt
        before, whole = (tokenizer.decode(np.array(ids, np.int64)) for ids in (prompt, prompt + self._new))
        self.text = whole[len(before) :]
        if stop and stop in self.text:
            self.text, self.is_done = self.text.partition(stop)[0], True

    def finished_part(self, stop: str, is_last: bool) -> str:
        """Return the text that more tokens will not change: whole characters, and nothing that may begin the stop."""
        if is_last or self.is_done:
            return self.text
        text = self.text.rstrip(_INCOMPLETE)
        held = next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)
        return text[: len(text) - held]


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
