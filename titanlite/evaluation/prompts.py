"""Encode texts that a model is to continue. No torch here."""

from collections.abc import Sequence

from titanlite.config.build import show
from titanlite.data.tokenizer import EncodingError, Tokenizer
from titanlite.errors import DataError


def encode_prompts(
    key: str, prompts: Sequence[str], tokenizer: Tokenizer, limit: int, capacity: int
) -> list[list[int]]:
    """Encode prompts as the beginnings of documents.

    Args:
        key: of the config, or the flag, that gives them; for messages.
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
            raise DataError.of("prompts", key, show(prompt), want, "another text") from error
        if len(ids) + limit > capacity:
            want = f"at most {capacity} tokens with the {limit} that are added; it has {len(ids)}"
            raise DataError.of("prompts", key, show(prompt), want, "a shorter text, or fewer tokens to add")
        encoded.append(ids)
    return encoded
