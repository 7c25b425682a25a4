"""Who orthogonalises which matrix: even work, buckets that fit, and rows that come from near."""

import pytest
import torch

from titanlite.kernels.orthogonalise import orthogonalise_flops
from titanlite.models.matrices import Matrix
from titanlite.optimizers.owners import Rectangle, assign, schedule

MOST = 1 << 26


def of_8b(n_layers: int) -> list[Matrix]:
    """The hidden matrices of an 8B model; all rows are empty views, as shapes alone matter."""
    shapes = {"wq": (4096, 4096), "wk": (1024, 4096), "wv": (1024, 4096), "wo": (4096, 4096)}
    shapes |= {"w1": (14336, 4096), "w3": (14336, 4096), "w2": (4096, 14336)}
    return [
        Matrix(f"layers.{i}.{part}", part, torch.arange(rows), columns)
        for i in range(n_layers)
        for part, (rows, columns) in shapes.items()
    ]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_work_is_even_and_buckets_fit(ranks):
    matrices = of_8b(32)
    buckets = assign(matrices, ranks, steps=5, most=MOST)
    work, found = [0] * ranks, list[tuple[str, int]]()
    for stacks in buckets:
        collected = [0] * ranks
        for stack in stacks:
            n_matrices, rows = stack.rows.shape
            found += [(stack.parameter, rows)] * n_matrices
            collected[stack.owner] += stack.rows.numel() * stack.columns
            work[stack.owner] += n_matrices * orthogonalise_flops(rows, stack.columns, 5)
        assert max(collected) <= MOST
    assert sorted(found) == sorted((m.parameter, len(m.rows)) for m in matrices)
    # The last matrices to be given away are the smallest: ranks differ by one of them, at most.
    assert max(work) - min(work) <= orthogonalise_flops(1024, 4096, 5)


def test_every_rank_has_one_of_matrices_that_are_larger_than_what_it_collects():
    """Or they would be orthogonalised one after the other, while all other ranks wait."""
    matrices = [Matrix(f"{i}", "w", torch.arange(16), 8) for i in range(7)]
    buckets = assign(matrices, 4, steps=5, most=100)
    assert [[stack.owner for stack in stacks] for stacks in buckets] == [[0, 1, 2, 3], [0, 1, 2]]


def test_matrices_of_one_shape_of_one_parameter_are_one_stack():
    experts = [Matrix("w2", f"w2 {i}", torch.arange(4 * i, 4 * i + 4), 8) for i in range(16)]
    (stacks,) = assign(experts, 4, steps=5, most=1000)
    assert [(stack.owner, stack.rows.shape) for stack in stacks] == [(rank, (4, 4)) for rank in range(4)]
    assert stacks[1].rows[:, 0].tolist() == [4, 20, 36, 52]


def test_an_owner_collects_from_its_replica_and_hands_results_to_all():
    """Two replicas of two ranks; rank 3 owns one matrix, rank 0 the other."""
    matrices = [Matrix("a", "a", torch.arange(6), 8), Matrix("b", "b", torch.arange(4), 8)]
    halves = [{"a": Rectangle(3 * i, 0, 3, 8), "b": Rectangle(2 * i, 0, 2, 8)} for i in (0, 1)]
    (stacks,) = assign(matrices, 4, steps=5, most=1000)
    stacks = [stack._replace(owner=owner) for stack, owner in zip(stacks, (3, 0), strict=True)]
    buckets = [schedule(stacks, halves * 2, rank, replicas=2) for rank in range(4)]
    assert [bucket.given.sizes for bucket in buckets] == [[16, 0, 0, 0], [16, 0, 0, 0], [0, 0, 0, 24], [0, 0, 0, 24]]
    assert buckets[0].collected.sizes == [16, 16, 0, 0]
    assert buckets[3].collected.sizes == [0, 0, 24, 24]
    assert buckets[3].returned.sizes == [24] * 4
    assert all(bucket.taken.sizes == [16, 0, 0, 24] for bucket in buckets)
