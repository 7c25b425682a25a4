"""A continuation ends where the document or the stop text does, and is shown as whole characters."""

from collections.abc import Callable, Iterator

import pytest

from titanlite.data.tokenizer import ByteTokenizer
from titanlite.errors import DataError
from titanlite.evaluation.prompts import encode_prompts
from titanlite.generation.decode import Sampling
from titanlite.generation.text import continue_texts


class Says:
    """In the place of a decoder: says a given text for each prompt."""

    def __init__(self, *texts: bytes) -> None:
        self.texts, self.n = texts, 0

    def continue_prompts(
        self, prompts: object, limit: int, sampling: object, is_done: Callable[[], bool]
    ) -> Iterator[list[int]]:
        for self.n in range(1, limit + 1):
            yield [text[self.n - 1] if self.n <= len(text) else 0 for text in self.texts]
            if is_done():
                return


def said(*texts: bytes, stop: str = "", ends_early: bool = True, limit: int = 20) -> tuple[list[str], list[str], int]:
    says, shown = Says(*texts), list[str]()
    prompts = [[ord("a")]] * len(texts)
    found = continue_texts(says, ByteTokenizer(), prompts, limit, Sampling(), stop, shown.append, ends_early)  # type: ignore[arg-type]
    return found, shown, says.n


def test_a_text_ends_with_its_document_and_the_loop_with_the_last_text() -> None:
    found, shown, n = said(b"one\0x", b"three")
    assert found == ["one", "three"]
    assert "".join(shown) == "one"
    assert n == 6
    assert said(b"one\0x", ends_early=False)[0::2] == (["one"], 20)


def test_the_stop_text_and_its_beginning_are_not_shown() -> None:
    found, shown, n = said(b"a END b ENTER END", stop=" EN")
    assert (found, "".join(shown), n) == (["a"], "a", 4)
    found, shown, _ = said(b"x E y\0", stop=" EN")
    assert found == ["x E y"] == ["".join(shown)]
    assert "".join(said(b"x E", stop=" EN", limit=3)[1]) == "x E"


def test_a_character_is_shown_when_it_is_whole() -> None:
    found, shown, _ = said("é→".encode() + b"\0")
    assert found == ["é→"]
    assert [part for part in shown if part] == ["é", "→"]
    found, shown, _ = said("xa→b\0".encode(), stop="a→")
    assert found == ["x"] == ["".join(shown)]
    assert "".join(said("é".encode()[:1], limit=1)[1]) == "\N{REPLACEMENT CHARACTER}"


def test_a_prompt_that_is_too_long_is_refused() -> None:
    assert encode_prompts(["", "ab"], ByteTokenizer(), 6, 8, "--prompt", "--tokens") == [[0], [97, 98]]
    with pytest.raises(DataError, match="at most 8 tokens with the 6 that are added; it has 3"):
        encode_prompts(["abc"], ByteTokenizer(), 6, 8, "--prompt", "--tokens")


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(DataError, match="a text in Unicode"):
        encode_prompts(["caf\udcff"], ByteTokenizer(), 6, 80, "--prompt", "--tokens")


@pytest.mark.parametrize(
    ("prompt", "limit", "fix"),
    [
        ("abc", 6, "a text of at most 2 tokens, or --tokens of at most 5"),
        ("a", 8, "--tokens of at most 7"),
        ("a" * 8, 6, "a text of at most 2 tokens"),
        ("a" * 8, 8, "a shorter text and a smaller --tokens"),
    ],
)
def test_the_fix_of_a_prompt_that_is_too_long_is_possible(prompt: str, limit: int, fix: str) -> None:
    with pytest.raises(DataError, match=rf"fix:  {fix}$"):
        encode_prompts([prompt], ByteTokenizer(), limit, 8, "--prompt", "--tokens")
