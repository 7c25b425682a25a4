"""Values of routing's device code by Triton's interpreter, against the definitions: no GPU is needed.

Run as a module with TRITON_INTERPRET=1, which Triton looks at when it is imported.
"""

from itertools import product

import torch
from torch import Tensor

from tests.support.numbers import normal, rows_of, some_choices
from titanlite.kernels import routing
from titanlite.kernels.device import expert_rows as device_rows
from titanlite.kernels.device import routing as device_routing

launched = 0


def interpret(kernel, key, blocks, tensors, arguments, **options) -> None:
    global launched
    launched += 1
    kernel[blocks if isinstance(blocks, tuple) else (blocks,)](*arguments())


def close(got: Tensor, wanted: Tensor) -> None:
    """Float32 with its exponentials of other libraries, and the last bit of bfloat16."""
    tolerance = 1e-5 if wanted.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


def choices_and_weights(logits: Tensor, biases: list[Tensor | None], top_k: int) -> None:
    grad = normal(len(logits), top_k, seed=1)
    for bias, score, normalised in product(biases, routing.SCORES, (False, True)):
        how = score, normalised, 2.5
        weights, choices = device_routing.launch_route(logits, bias, top_k, *how)
        wanted = routing.route.definition(logits, bias, top_k, *how)
        assert torch.equal(choices, wanted[1]), (logits.shape, how)
        close(weights, wanted[0])
        of_logits = device_routing.launch_route_grad(grad, logits, choices, *how)
        close(of_logits, routing.route_grad.definition(grad, logits, choices, *how))


def all_choices() -> None:
    for M, E, K in [(5, 1, 1), (40, 8, 2), (37, 20, 3), (33, 128, 8), (9, 512, 16), (3, 130, 5)]:
        logits = 3 * normal(M, E)
        logits[0], logits[1, : E // 2] = 0, 5  # ties
        logits[0, E // 2 :] *= -1  # minus zero
        choices_and_weights(logits, [None, 0.3 * normal(E, seed=2)], K)
    inf, nan = torch.inf, torch.nan
    odd = [[3e38, -3e38, 0, 1], [-200.0, -200, -300, -300], [0, nan, 1, nan], [inf, 0, 0, 1], [-inf] * 4]
    choices_and_weights(torch.tensor(odd), [None], 2)


def all_rows() -> None:
    for M, E, K in [(1, 1, 1), (50, 8, 2), (700, 20, 4), (333, 5, 5), (1100, 128, 8), (20, 300, 8), (1000, 2, 1)]:
        drawn = some_choices(M, E, K)
        for choices in (drawn, torch.full_like(drawn, E - 1), torch.full_like(drawn, 0)):
            for first, count in {(0, E), (0, max(1, E // 2)), (E // 2, max(1, E // 4)), (E - 1, 1)}:
                found = device_routing.launch_expert_rows(choices, first, count)
                wanted = routing.expert_rows.definition(choices, first, count)
                assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), (M, E, K, first, count)


def all_moves() -> None:
    for case, D, dtype in product(
        [(37, 8, 2, 0, 8), (37, 8, 2, 2, 3), (11, 12, 8, 0, 12), (9, 4, 1, 3, 1)],
        (48, 129, 2048, 2560),
        (torch.float32, torch.bfloat16),
    ):
        rows, slots, n = rows_of(*case)
        M, K = rows.shape
        x, o, weights = normal(M, D, dtype=dtype), normal(M * K, D, seed=1, dtype=dtype), normal(M, K, seed=2)
        o[n:] = torch.nan
        found = device_rows.launch_gather_rows(x, slots, K)
        assert torch.equal(found, routing.gather_rows.definition(x, slots, K))
        for given in (None, weights):
            close(device_rows.launch_combine(o, rows, given), routing.combine.definition(o, rows, given))
            spread = device_rows.launch_spread_rows(x, rows, given, M * K)
            close(spread[:n], routing.spread_rows.definition(x, rows, given, M * K)[:n])
        dots = device_rows.launch_row_dots(x, o, rows)
        torch.testing.assert_close(dots, routing.row_dots.definition(x, o, rows), rtol=1e-5, atol=1e-3)


if __name__ == "__main__":
    device_routing.launch = device_rows.launch = interpret
    device_routing.COUNTS = 512  # so that the counts are added up in several steps
    all_choices()
    all_rows()
    all_moves()
    print(f"{launched} kernels")
