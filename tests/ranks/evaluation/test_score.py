"""Scores: those of a loop over single choices, and the same under every layout."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.needs import slow
from tests.support.questions import write_questions
from tests.support.ranks import run_ranks
from tests.support.short_run import assemble, checked
from titanlite.data.tokenizer import load_tokenizer
from titanlite.evaluation.requests import encode_task
from titanlite.evaluation.score import Evaluator, Score
from titanlite.evaluation.tasks import load_tasks
from titanlite.models.layers import Sequences
from titanlite.training.build import Run

SEQ_LEN = 256
FLAGS = (f"--training.seq_len={SEQ_LEN}", "--training.local_batch_size=2", "--model.n_layers=2")
# Log-likelihoods are sums of logits' differences, in float32 of magnitude 6: each moves by a few of their last places
# where sums over D = 256 are ordered otherwise, as kernels do for other numbers of rows; a choice has up to 60 tokens.
ROUNDING = 60 * 4 * 2.0**-22


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_questions(tmp_path_factory.mktemp("task") / "lines.jsonl", 12)


def evaluation_of(task: Path, local_batch_size: int = 2) -> Evaluator:
    encoded = [encode_task(t, load_tokenizer("bytes"), SEQ_LEN) for t in load_tasks([str(task)])]
    return Evaluator(encoded, seq_len=SEQ_LEN, tokens=SEQ_LEN * local_batch_size)


def scored(task: Path, folder: Path, world: int, *flags: str) -> Score:
    """What the ranks make of the task with the weights of the seed; all of them say the same."""
    asked = checked(folder, world, (*FLAGS, *flags))

    def body() -> None:
        run, calls = assemble(asked), []
        run.model.register_forward_hook(lambda model, *_: calls.append(model.training))
        (score,) = evaluation_of(task).score(run.model, run.mesh)
        assert calls
        assert not any(calls)
        assert run.model.training
        torch.save(score, folder / f"score-{dist.get_rank()}.pt")

    run_ranks(body, folder, world)
    scores = [torch.load(folder / f"score-{rank}.pt", weights_only=False) for rank in range(world)]
    assert all(score == scores[0] for score in scores)
    return scores[0]


@pytest.mark.slow
def test_a_cap_of_logits_counts(task: Path, tmp_path: Path) -> None:
    """The same choices are scored as if the model itself had capped its logits."""
    asked = checked(tmp_path, 1, FLAGS)

    def body() -> None:
        run = assemble(asked)
        capped, plain = evaluation_of(task), evaluation_of(task)
        capped.softcap = 0.25
        (score,) = capped.score(run.model, run.mesh)
        (without,) = plain.score(run.model, run.mesh)
        run.model.register_forward_hook(lambda model, _, logits: 0.25 * (logits.float() / 0.25).tanh())
        (by_model,) = plain.score(run.model, run.mesh)
        assert score.log_likelihoods == by_model.log_likelihoods != without.log_likelihoods

    run_ranks(body, tmp_path, 1)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_has_no_accuracy(task: Path, number: float) -> None:
    evaluation = evaluation_of(task)
    found = np.zeros(len(evaluation.requests))
    found[5] = number
    (score,) = evaluation._scores(found)
    assert math.isnan(score.accuracy)
    assert math.isnan(score.accuracy_norm)


@pytest.fixture(scope="module")
def single(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Score:
    return scored(task, tmp_path_factory.mktemp("single"), 1)


@torch.no_grad()
def one_by_one(run: Run, task: Path) -> list[float]:
    """Each choice in a call of its own, without padding, its log-likelihood summed in float64."""
    found: list[float] = []
    for request in evaluation_of(task).requests:
        tokens = torch.from_numpy(request.tokens)
        logits = run.model(tokens[:-1], sequences=Sequences(len(tokens) - 1)).double()
        log_p = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        found.append(float(log_p[-request.n_scored :].sum()))
    return found


@pytest.mark.parametrize("model", ["llama3", *slow("qwen3", "gemma3", "gpt2")])
def test_scores_are_those_of_single_choices(task: Path, tmp_path: Path, model: str) -> None:
    flags = () if model == "llama3" else (f"--model.name={model}", "--model.flavor=debug")
    asked = checked(tmp_path, 1, (*FLAGS, *flags))

    def body() -> None:
        run = assemble(asked)
        run.model.eval()
        (score,) = evaluation_of(task).score(run.model, run.mesh)
        assert not run.model.training
        truth = torch.tensor(one_by_one(run, task), dtype=torch.float64).view(-1, 4)
        ours = torch.tensor(score.log_likelihoods, dtype=torch.float64)
        assert (ours - truth).abs().max() < ROUNDING
        questions = load_tasks([str(task)])[0].questions
        n_bytes = torch.tensor([[len(c.encode()) for c in q.choices] for q in questions])
        assert score.choices == truth.argmax(1).tolist()
        assert score.choices_norm == (truth / n_bytes).argmax(1).tolist()
        gold = torch.tensor([q.gold for q in questions])
        assert score.accuracy == (truth.argmax(1) == gold).double().mean()

    run_ranks(body, tmp_path, 1)


@pytest.mark.parametrize("layout", ["FSDP 2", *slow("FSDP 3", "HSDP 2")])
def test_data_parallel_ranks_score_bit_for_bit_as_one(task: Path, single: Score, layout: str, tmp_path: Path) -> None:
    world, flags = {
        "FSDP 2": (2, ()),
        "FSDP 3": (3, ("--training.global_batch_size=6",)),  # whose last turn has nothing for one
        "HSDP 2": (2, ("--parallelism.data_parallel_replicate_degree=2",)),
    }[layout]
    assert scored(task, tmp_path, world, *flags) == single


def test_tensor_parallel_ranks_score_alike(task: Path, single: Score, tmp_path: Path) -> None:
    split = scored(task, tmp_path, 2, "--parallelism.tensor_parallel_degree=2")
    assert split.choices == single.choices
    assert split.choices_norm == single.choices_norm
    ours, theirs = (torch.tensor(score.log_likelihoods, dtype=torch.float64) for score in (split, single))
    print(f"TP 2: at most {(ours - theirs).abs().max():.3g} nats of {theirs.abs().max():.3g} apart")
    assert (ours - theirs).abs().max() < ROUNDING


@pytest.mark.slow
def test_compiled_blocks_are_not_compiled_anew(task: Path, single: Score, tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    asked = checked(tmp_path, 1, (*FLAGS, "--compile.enable=true"))

    def body() -> None:
        run = assemble(asked)
        counters.clear()  # of tests before this one in the same process
        assert evaluation_of(task).score(run.model, run.mesh) == [single]
        assert counters["stats"]["unique_graphs"] == 0

    run_ranks(body, tmp_path, 1)
