"""Values of device code by Triton's interpreter, against the definitions and by their tests: no GPU is needed.

    TRITON_INTERPRET=1 python -m tests.support.interpreted {copies,products,routing,rows}

Triton looks at the variable when it is imported. The interpreter cuts what it rounds to bfloat16, and multiplies the
bits of that as integers: float16 stands in its place.
"""

import sys
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tests.support.numbers import normal, rows_of, some_choices
from tests.unit.kernels import test_rows, test_scaled_copy
from titanlite.kernels import routing
from titanlite.kernels.device import expert_rows as of_experts
from titanlite.kernels.device import routing as of_routing
from titanlite.kernels.device import rows as of_rows
from titanlite.kernels.device import scaled_copy as of_copies
from titanlite.kernels.device import symmetric_product as of_products
from titanlite.kernels.device.launch import Blocks
from titanlite.kernels.symmetric_product import symmetric_product

launched = Counter[str]()


def interpret(kernel, key, blocks, tensors, arguments, **options) -> None:
    launched["kernels"] += 1
    grid = blocks if isinstance(blocks, tuple) else (blocks,)
    kernel[grid](*(a.descriptor() if type(a) is Blocks else a for a in arguments()))


def counted(name: str, launch: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **more: Any) -> Any:
        launched[name] += 1
        return launch(*arguments, **more)

    return run


def copies() -> None:
    tests, of_copies.launch = test_scaled_copy, interpret
    tests.scaled_copy = lambda x, out, factor, norm=None, eps=0.0: of_copies.launch_scaled_copy(
        x, out, factor, norm, eps
    )
    tests.BACK = torch.float16
    for shape, transposed in product(tests.SHAPES, tests.TRANSPOSED):
        tests.test_there_and_back(shape, transposed, "cpu")
    tests.test_in_place("cpu")
    tests.test_norms_of_zero_and_of_what_is_no_number("cpu")
    assert launched == {"kernels": 8 * len(tests.SHAPES) * len(tests.TRANSPOSED) + 3}


def rows() -> None:
    tests, move = test_rows, of_rows.launch_move
    tests.take_rows, tests.put_rows = (
        counted(name, lambda *of, out=out: move(*of, out)) for name, out in (("take", True), ("put", False))
    )
    tests.momentum_rows = counted("momentum", of_rows.launch_momentum)
    tests.update_rows = counted("update", of_rows.launch_update)
    tests.NARROW = torch.float16
    for widths in tests.WIDTHS:
        for nesterov, dtype in product((True, False), (torch.float32, torch.bfloat16)):
            tests.test_momentum(nesterov, dtype, widths, "cpu")
        tests.test_update(widths, "cpu")
        tests.test_rows_are_taken_and_put_back(widths, "cpu")
    assert launched == {"momentum": 16, "update": 8, "take": 2, "put": 2}


def products() -> None:
    of_products.launch = interpret
    generator = torch.Generator().manual_seed(0)
    for B, R, C in [(2, 300, 72), (2, 40, 136)]:
        places = torch.arange(R) // of_products.TILE
        mirrored = places[:, None] != places[None, :]  # what numpy multiplies within a tile is symmetric up to rounding
        x = torch.randn(B, R, C, generator=generator).half()
        d = torch.randn(B, R, R, generator=generator)
        d = (d + d.mT).half()
        for added in (None, d):
            ours = of_products.launch_symmetric_product(x, x, added, 1.5, -2.5, 3.0)
            wide = None if added is None else added.double()
            truth = symmetric_product(x.double(), added=wide, alpha=1.5, beta=-2.5, diagonal=3.0)
            # Rounded to half a unit of float16; sums of products to float32, each relative to the sum of their sizes.
            sizes = (
                3 + 1.5 * (x.double().abs() @ x.double().abs().mT) + (0 if added is None else 2.5 * d.double().abs())
            )
            allowed = truth.abs() * 2**-11 + 2**-25 + sizes * (C + 4) * 2**-24
            assert ((ours.double() - truth).abs() <= allowed).all(), (B, R, C, added is None)
            assert torch.equal(ours[:, mirrored], ours.mT[:, mirrored])
        above = torch.where(places[:, None] < places[None, :], torch.nan, d.float()).half()
        ours = of_products.launch_symmetric_product(x, x, above, 1.0, 1.0, 0.0)
        assert ours.isfinite().all()  # tiles of it above the diagonal were not read
    assert launched == {"kernels": 6}


def close(got: Tensor, wanted: Tensor) -> None:
    """Float32 with its exponentials of other libraries, and the last bit of bfloat16."""
    tolerance = 1e-5 if wanted.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


def choices_and_weights(logits: Tensor, biases: list[Tensor | None], top_k: int) -> None:
    grad = normal(len(logits), top_k, seed=1)
    for bias, score, normalised in product(biases, routing.SCORES, (False, True)):
        how = score, normalised, 2.5
        weights, choices = of_routing.launch_route(logits, bias, top_k, *how)
        wanted = routing.route.definition(logits, bias, top_k, *how)
        assert torch.equal(choices, wanted[1]), (logits.shape, how)
        close(weights, wanted[0])
        of_logits = of_routing.launch_route_grad(grad, logits, choices, *how)
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
                found = of_routing.launch_expert_rows(choices, first, count)
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
        found = of_experts.launch_gather_rows(x, slots, K)
        assert torch.equal(found, routing.gather_rows.definition(x, slots, K))
        for given in (None, weights):
            close(of_experts.launch_combine(o, rows, given), routing.combine.definition(o, rows, given))
            spread = of_experts.launch_spread_rows(x, rows, given, M * K)
            close(spread[:n], routing.spread_rows.definition(x, rows, given, M * K)[:n])
        dots = of_experts.launch_row_dots(x, o, rows)
        torch.testing.assert_close(dots, routing.row_dots.definition(x, o, rows), rtol=1e-5, atol=1e-3)


def routes() -> None:
    of_routing.launch = of_experts.launch = interpret
    of_routing.COUNTS = 512  # so that the counts are added up in several steps
    all_choices()
    all_rows()
    all_moves()
    assert launched == {"kernels": 564}


if __name__ == "__main__":
    {"copies": copies, "products": products, "routing": routes, "rows": rows}[sys.argv[1]]()
