"""Encode the choices of tasks as requests, and pack the requests into batches of one shape. Does not import torch.

A request is a question's context and one of its choices; its score is the log-likelihood of the choice's tokens. A
batch has M tokens, as a micro-step of training, so that kernels get the shape they were made for. A longer request is a
batch alone. Few requests have S tokens, the length of sequences in training. So a batch consists of rows of L tokens,
the shortest of S, S/2, S/4, … into which its requests fit. Each row has one request, since attention would see others.

Batches do not depend on the number of ranks: of dp data-parallel ranks, each takes every dp-th batch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from titanlite.config.build import show
from titanlite.data.tokenizer import EncodingError, Tokenizer
from titanlite.errors import DataError, Problem, describe
from titanlite.evaluation.tasks import KEY, Task

_SHORTEST_ROW = 32  # tokens


class Request(NamedTuple):
    """The context of a question and one of its choices, as tokens."""

    tokens: np.ndarray  # [n + 1] int64; the first n are the input, the last `n_scored` are predicted and scored
    n_scored: int


class EncodedTask(NamedTuple):
    """A task encoded as requests."""

    task: Task
    requests: list[Request]  # one per choice: all of the first question, then all of the next
    n_cut: int  # number of requests longer than a sequence, whose context was cut at the beginning


class RowBatch(NamedTuple):
    """A batch of requests, each in a row."""

    row_len: int  # tokens of a row (L)
    numbers: list[int]  # indices of its requests in the list of all requests; at most M / L


def encode_task(task: Task, tokenizer: Tokenizer, seq_len: int) -> EncodedTask:
    """Encode a task as lm-eval does.

    Context and choice, joined by a blank, are encoded as one text. The choice is all tokens after the first n, where n
    is the length of the encoded context without the blanks at its end. The tokenizer's `bos_id`, if it has one,
    precedes each text; an empty context becomes `bos_id` or the separator. A text longer than `seq_len` is cut at the
    beginning.

    Raises:
        DataError: the tokenizer cannot encode a text, or a choice has no tokens or more than `seq_len`.
    """
    contexts, wholes = list[str](), list[str]()
    for question in task.questions:
        contexts.append(question.context.rstrip())
        wholes += [f"{question.context} {choice}" for choice in question.choices]
    try:
        context_ids, whole_ids = tokenizer.encode_batch(contexts), tokenizer.encode_batch(wholes)
    except EncodingError as error:
        fix = "take the questions out, or use a tokenizer that has tokens for all text"
        raise DataError.of("evaluation", KEY, show(task.source), f"texts that can be encoded ({error})", fix) from error
    first = tokenizer.separator_id if tokenizer.bos_id is None else tokenizer.bos_id
    requests, problems, n_cut, place = list[Request](), list[Problem](), 0, 0
    for number, question in enumerate(task.questions, start=1):
        context = context_ids[number - 1]
        begins = tokenizer.bos_id is not None or not len(context)
        for choice, ids in zip(question.choices, whole_ids[place : place + len(question.choices)], strict=True):
            n_scored = len(ids) - len(context)
            if not 0 < n_scored <= seq_len:
                want = f"1 to {seq_len} tokens, as many as a sequence has; it has {max(0, n_scored)}"
                problems.append(Problem(f"question {number}", show(choice), want, "take it out, or correct it"))
            tokens = np.concatenate(([first] * begins, ids)).astype(np.int64)
            n_cut += len(tokens) > seq_len + 1
            requests.append(Request(tokens[-seq_len - 1 :], n_scored))
        place += len(question.choices)
    if problems:
        raise DataError(describe(task.source, problems))
    return EncodedTask(task, requests, n_cut)


def pack(requests: Sequence[Request], seq_len: int, tokens: int, whole_rows: bool = False) -> list[RowBatch]:
    """Pack requests that fit in the same row length into batches of M tokens, or of one row if a row is longer.

    Args:
        requests: the requests of all tasks.
        seq_len: length of the longest row (S).
        tokens: tokens of a batch (M).
        whole_rows: make all rows S tokens long, for a model that takes no other length.
    """
    by_row: dict[int, list[int]] = {}
    for number, request in enumerate(requests):
        row = seq_len
        while not whole_rows and row % 2 == 0 and row // 2 >= max(_SHORTEST_ROW, len(request.tokens) - 1):
            row //= 2
        by_row.setdefault(row, []).append(number)
    batches: list[RowBatch] = []
    for row, numbers in sorted(by_row.items()):
        n = max(1, tokens // row)
        batches += [RowBatch(row, numbers[i : i + n]) for i in range(0, len(numbers), n)]
    return batches
