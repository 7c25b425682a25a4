"""Score multiple-choice tasks: find the choice that a model finds likeliest, in total and per byte.

The model's answer is the choice with the greatest log-likelihood, summed over its tokens. For `accuracy_norm`, the sum
is divided by the choice's bytes in UTF-8, so that long choices have no disadvantage. lm-eval calls the two accuracies
acc and acc_bytes; its acc_norm divides by characters.

Scores are bitwise equal under any number of data-parallel ranks. Tensor parallelism adds partial sums in another order,
so that log-likelihoods differ by rounding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.errors import DataError
from titanlite.evaluation.requests import EncodedTask, Request, RowBatch, pack
from titanlite.evaluation.tasks import KEY
from titanlite.kernels.cross_entropy import IGNORE_INDEX, local_statistics, over_ranks
from titanlite.models.layers import Sequences
from titanlite.parallel.mesh import Mesh


@dataclass(frozen=True)
class Score:
    """The answers of a model to a task."""

    task: str
    questions: int
    accuracy: float  # share of right answers; NaN if a log-likelihood is not finite
    accuracy_norm: float  # likewise, by log-likelihood per byte
    log_likelihoods: list[list[float]]  # in nats, of each choice of each question
    choices: list[int]  # index of the likeliest choice of each question
    choices_norm: list[int]  # likewise, by log-likelihood per byte

    def standard_error(self, accuracy: float) -> float:
        """Return the standard error of an accuracy over the questions; NaN for a single question."""
        return (accuracy * (1 - accuracy) / (self.questions - 1)) ** 0.5 if self.questions > 1 else float("nan")


class Evaluator:
    """Scores tasks with a model, in batches of as many tokens as a micro-step of training.

    Args:
        tasks: encoded for sequences of `seq_len`.
        seq_len: tokens of a sequence in training (S).
        tokens: tokens of a rank in a micro-step (M).
        whole_rows: make all rows S tokens long, for a model that takes no other length.
        softcap: cap of the model's logits; 0: none.
    """

    def __init__(
        self,
        tasks: Sequence[EncodedTask],
        *,
        seq_len: int,
        tokens: int,
        whole_rows: bool = False,
        softcap: float = 0.0,
    ) -> None:
        self.tasks, self.tokens, self.softcap = tasks, tokens, softcap
        self.requests = [request for task in tasks for request in task.requests]
        self.batches = pack(self.requests, seq_len, tokens, whole_rows)
        self.row_tokens = sum(batch.row_len * len(batch.numbers) for batch in self.batches)  # with padding

    @torch.no_grad()
    def score(self, model: nn.Module, mesh: Mesh, progress: Callable[[], object] = lambda: None) -> list[Score]:
        """Score all tasks. Collective; every rank returns the same scores. `progress` is called before each batch.

        `model` maps [M] tokens and `sequences` to logits [M, V/tp]: the vocabulary is split over tp ranks.
        """
        is_training = model.training
        model.eval()
        found = torch.zeros(len(self.requests), dtype=torch.float64, device=mesh.device)
        with torch.compiler.set_stance("force_eager"):  # each row length would compile the blocks again
            for first in range(0, len(self.batches), mesh.dp_size):
                progress()
                # A rank without a batch computes an empty one: all ranks take part in the all-gathers of weights.
                mine = self.batches[first + mesh.dp_rank :][:1] or [RowBatch(self.batches[first].row_len, [])]
                self._score_batch(mine[0], model, mesh, found)
        model.train(is_training)
        if mesh.tp_group is not None and mesh.tp_group.rank > 0:
            found.zero_()  # so that the sum counts each score once
        dist.all_reduce(found)
        return self._scores(found.cpu().numpy())

    def _score_batch(self, batch: RowBatch, model: nn.Module, mesh: Mesh, found: Tensor) -> None:
        tokens, targets = batch_of(batch, self.requests, self.tokens)
        tokens, targets = tokens.to(mesh.device), targets.to(mesh.device)
        logits = model(tokens, sequences=Sequences(batch.row_len))
        first = mesh.tp_group.rank * logits.shape[1] if mesh.tp_group else 0
        lse, picked = local_statistics(logits, targets, first, self.softcap)
        lse, picked = over_ranks(lse, picked, mesh.tp_group)
        each = torch.where(targets == IGNORE_INDEX, 0.0, (picked - lse).double())
        sums = each.unflatten(0, (-1, batch.row_len)).sum(1)
        found[torch.tensor(batch.numbers, dtype=torch.int64, device=mesh.device)] = sums[: len(batch.numbers)]

    def _scores(self, found: np.ndarray) -> list[Score]:
        scores, place = list[Score](), 0
        for encoded in self.tasks:
            questions = encoded.task.questions
            each, chosen, by_bytes = list[list[float]](), list[int](), list[int]()
            for question in questions:
                of_choices = found[place : place + len(question.choices)]
                place += len(question.choices)
                n_bytes = np.array([len(choice.encode()) for choice in question.choices])
                each.append(of_choices.tolist())
                chosen.append(int(of_choices.argmax()))
                by_bytes.append(int((of_choices / n_bytes).argmax()))
            right, right_norm = (
                sum(choice == q.gold for choice, q in zip(made, questions, strict=True)) for made in (chosen, by_bytes)
            )
            if not np.isfinite(np.concatenate(each)).all():
                right = right_norm = np.nan
            n = len(questions)
            scores.append(Score(encoded.task.name, n, right / n, right_norm / n, each, chosen, by_bytes))
        return scores


def require_same_questions(of_ranks: Sequence[Sequence[str]]) -> None:
    """Raise a DataError if ranks have read different questions. `of_ranks`: fingerprints of the tasks on each rank."""
    if different := [rank for rank, other in enumerate(of_ranks) if other != of_ranks[0]]:
        saw, want = f"other questions on rank {different[0]} than on rank 0", "the same files on every host"
        raise DataError.of("evaluation", KEY, saw, want, "copy them, or name a folder that all hosts share")


def batch_of(batch: RowBatch, requests: Sequence[Request], tokens: int) -> tuple[Tensor, Tensor]:
    """Make the tokens and targets of a batch, [M] int64 each; targets that are not scored are IGNORE_INDEX."""
    given = np.zeros((max(1, tokens // batch.row_len), batch.row_len), np.int64)
    targets = np.full_like(given, IGNORE_INDEX)
    for row, number in enumerate(batch.numbers):
        request = requests[number]
        n = len(request.tokens) - 1
        given[row, :n] = request.tokens[:-1]
        targets[row, n - request.n_scored : n] = request.tokens[-request.n_scored :]
    return torch.from_numpy(given).flatten(), torch.from_numpy(targets).flatten()
