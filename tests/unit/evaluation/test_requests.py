"""Requests: which tokens are read and which are scored, and how they lie in batches."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.data.test_tokenizer import make_tokenizer
from titanlite.config.schema import Config, Evaluation, Training
from titanlite.data.tokenizer import ByteTokenizer, load_tokenizer
from titanlite.errors import DataError
from titanlite.evaluation.inputs import interval
from titanlite.evaluation.requests import Request, encode_task, pack
from titanlite.evaluation.score import batch_of
from titanlite.evaluation.tasks import Question, Task
from titanlite.kernels.cross_entropy import IGNORE_INDEX


def task(*questions: tuple[str, tuple[str, ...]]) -> Task:
    return Task("t", "t.jsonl", tuple(Question(context, choices, 0) for context, choices in questions))


def read_and_scored(request: Request) -> tuple[bytes, bytes]:
    return bytes(request.tokens[: -request.n_scored].tolist()), bytes(request.tokens[-request.n_scored :].tolist())


def test_a_choice_is_behind_one_blank() -> None:
    encoded = encode_task(task(("one", ("two", "2"))), ByteTokenizer(), 32)
    assert [read_and_scored(r) for r in encoded.requests] == [(b"one", b" two"), (b"one", b" 2")]
    assert encoded.n_cut == 0


@pytest.mark.parametrize(("context", "read", "scored"), [
    ("one ", b"one", b"  two"),  # blanks behind a context belong to the choice
    ("", b"\0", b" two"),  # nothing is the separator, behind which documents begin
    (" \n", b"\0", b" \n two"),
])  # fmt: skip
def test_where_a_context_ends(context: str, read: bytes, scored: bytes) -> None:
    (request,) = encode_task(task((context, ("two",))), ByteTokenizer(), 32).requests
    assert read_and_scored(request) == (read, scored)


def test_what_begins_documents_begins_a_context(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(make_tokenizer(tmp_path / "tokenizer.json", ("<|endoftext|>", "<s>"))), add_bos=True)
    for context in ("hello", ""):
        (request,) = encode_task(task((context, ("world",))), tokenizer, 32).requests
        assert request.tokens[0] == tokenizer.bos_id
        assert (request.tokens == tokenizer.bos_id).sum() == 1
        assert len(request.tokens) > request.n_scored


def test_a_long_context_loses_its_beginning() -> None:
    encoded = encode_task(task(("x" * 40 + "end", ("two", "long"))), ByteTokenizer(), 8)
    assert [read_and_scored(r) for r in encoded.requests] == [(b"xxend", b" two"), (b"xend", b" long")]
    assert encoded.n_cut == 2


def test_a_choice_longer_than_a_sequence_is_refused() -> None:
    with pytest.raises(DataError) as caught:
        encode_task(task(("a", ("b", "c")), ("a", ("b", "x" * 9))), ByteTokenizer(), 8)
    assert 't.jsonl: 1 problem\n  question 2 = "xxxxxxxxx"' in str(caught.value)
    assert "want: 1 to 8 tokens, as many as a sequence has; it has 10" in str(caught.value)


@given(st.lists(st.integers(1, 256), min_size=1, max_size=80), st.integers(1, 3), st.booleans())
def test_every_request_has_a_row_that_holds_it(lengths: list[int], local_batch_size: int, whole_rows: bool) -> None:
    requests = [Request(np.arange(n + 1) % 7, min(n, 3)) for n in lengths]
    batches = pack(requests, 256, 256 * local_batch_size, whole_rows)
    assert Counter(number for batch in batches for number in batch.numbers) == Counter(range(len(lengths)))
    for batch in batches:
        n_rows = local_batch_size * 256 // batch.row_len
        assert 256 % batch.row_len == 0
        assert 0 < len(batch.numbers) <= n_rows
        assert whole_rows <= (batch.row_len == 256)
        assert max(lengths[number] for number in batch.numbers) <= batch.row_len
        assert whole_rows or min(lengths[number] for number in batch.numbers) * 2 > batch.row_len or batch.row_len == 32
        tokens, targets = (x.view(n_rows, batch.row_len) for x in batch_of(batch, requests, local_batch_size * 256))
        for row, number in enumerate(batch.numbers):
            n, (given_tokens, n_scored) = lengths[number], requests[number]
            assert tokens[row, :n].tolist() == given_tokens[:-1].tolist()
            assert targets[row, n - n_scored : n].tolist() == given_tokens[-n_scored:].tolist()
        scored = sum(requests[number].n_scored for number in batch.numbers)
        assert (targets != IGNORE_INDEX).sum() == scored


@pytest.mark.parametrize(("tokens", "freq"), [(1, 1000), (1_000_000, 1000), (20_000_000, 6500)])
def test_the_interval_keeps_the_tokens_below_their_share(tokens: int, freq: int) -> None:
    config = Config(training=Training(seq_len=2048, global_batch_size=78))
    assert interval(config, 2, tokens) == freq
    assert tokens <= 0.02 * freq * 2048 * 78


def test_an_interval_that_is_given_stays() -> None:
    assert interval(Config(evaluation=Evaluation(freq=7)), 1, 10**9) == 7
