"""Encode texts that a model is to continue. No torch here."""

from collections.abc import Sequence

from titanlite.config.build import show
from titanlite.data.tokenizer import EncodingError, Tokenizer
from titanlite.errors import DataError

SAMPLE_KEYS = "validation.samples", "validation.sample_tokens"
_SHOWN = 60  # characters of a text in a message


def encode_prompts(
    prompts: Sequence[str], tokenizer: Tokenizer, limit: int, capacity: int, key: str, limit_key: str
) -> list[list[int]]:
    """Encode prompts as the beginnings of documents.

    Args:
        prompts: texts; an empty one is a document's beginning.
        tokenizer: the model's.
        limit: how many tokens are to be added to each.
        capacity: the most tokens of a prompt and its continuation.
        key: key or flag that gives the prompts, for messages.
        limit_key: key or flag that gives `limit`, for messages.

    Raises:
        DataError: a prompt cannot be encoded, or is too long.
    """
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    encoded = list[list[int]]()
    for prompt in prompts:
        saw = show(prompt if len(prompt) <= _SHOWN else f"{prompt[:_SHOWN]}…")
        try:
            ids = begin + tokenizer.encode_batch([prompt])[0].tolist() or [tokenizer.separator_id]
        except (EncodingError, UnicodeEncodeError) as error:
            want = f"a text in Unicode that the tokenizer has tokens for ({error})"
            raise DataError.of("prompts", key, saw, want, "another text") from error
        if len(ids) + limit > capacity:
            want = f"at most {capacity} tokens with the {limit} that are added; it has {len(ids)}"
            fixes = [f"a text of at most {capacity - limit} tokens"] if limit < capacity else []
            fixes += [f"{limit_key} of at most {capacity - len(ids)}"] if len(ids) < capacity else []
            fix = ", or ".join(fixes) or f"a shorter text and a smaller {limit_key}"
            raise DataError.of("prompts", key, saw, want, fix)
        encoded.append(ids)
    return encoded
