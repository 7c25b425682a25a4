"""Read and encode the evaluation tasks of a run on every rank, and add them to the receipt."""

import torch.distributed as dist

from titanlite.checkpoint.collective import on_all_ranks
from titanlite.config.check_mesh import tokens_of_rank
from titanlite.evaluation.inputs import interval, tokenizer_of
from titanlite.evaluation.requests import EncodedTask, encode_task
from titanlite.evaluation.score import Evaluator, require_same_questions
from titanlite.evaluation.tasks import KEY, load_tasks
from titanlite.preflight.checked_run import CheckedRun
from titanlite.receipt import Entry, Skipped
from titanlite.training.build import Run


def open_evaluation(asked: CheckedRun, run: Run) -> tuple[Evaluator, int] | None:
    """Return the evaluator of a run's tasks and the steps between two evaluations, None without tasks; collective.

    Raises:
        DataError: on every rank: a task cannot be read on a rank, or differs between ranks.
    """
    config = asked.config
    if not config.evaluation.tasks:
        return None
    read: list[EncodedTask] = []

    def read_here() -> list[str]:
        tokenizer = tokenizer_of(config, asked.inputs)
        for task in load_tasks(config.evaluation.tasks):
            read.append(encode_task(task, tokenizer, config.training.seq_len))
        return [encoded.task.fingerprint for encoded in read]

    require_same_questions(on_all_ranks(read_here))
    # No question is split over ranks, even under context parallelism.
    shape = {"seq_len": config.training.seq_len, "tokens": tokens_of_rank(config)}
    # A user's model may compute positions from the sequence length alone.
    of_model = {"whole_rows": bool(config.model.file), "softcap": run.dims.logit_softcap}
    evaluation = Evaluator(read, **shape, **of_model)
    freq = interval(config, dist.get_world_size(), evaluation.row_tokens)
    n_questions = {encoded.task.name: len(encoded.task.questions) for encoded in read}
    applied = {"questions": sum(n_questions.values()), "of_tasks": n_questions, "freq": freq}
    applied |= {"batches": len(evaluation.batches), "tokens": evaluation.row_tokens}
    why = f"longer than training.seq_len = {config.training.seq_len}: they lose their beginning"
    cut = tuple(
        Skipped(f"{encoded.task.name}: {encoded.n_cut:,} choices with their context", why)
        for encoded in read
        if encoded.n_cut
    )
    tasks = list(config.evaluation.tasks)
    run.receipt.add(Entry(KEY, tasks, applied, count=len(read), skipped=cut))
    return evaluation, freq
