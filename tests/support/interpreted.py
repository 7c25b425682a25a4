"""Values of device code by Triton's interpreter, against the definitions and by their tests: no GPU is needed.

    TRITON_INTERPRET=1 python -m tests.support.interpreted {copies,losses,products,routing,rows}

Triton looks at the variable when it is imported. The interpreter cuts what it rounds to bfloat16, and multiplies the
bits of that as integers: float16 stands in its place.
"""

import sys
from collections import Counter
from collections.abc import Callable
from itertools import product
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.ranks.kernels import test_cross_entropy
from tests.unit.kernels import test_expert_rows, test_routing, test_rows, test_scaled_copy
from titanlite.kernels.device import cross_entropy as of_losses
from titanlite.kernels.device import expert_rows as of_experts
from titanlite.kernels.device import routing as of_routing
from titanlite.kernels.device import rows as of_rows
from titanlite.kernels.device import scaled_copy as of_copies
from titanlite.kernels.device import symmetric_product as of_products
from titanlite.kernels.device.launch import Blocks
from titanlite.kernels.routing import route
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


def losses() -> None:
    of_losses.launch, of_losses.LANES, of_losses.AT_ONCE, of_losses.BLOCK = interpret, 8, 2, 16
    on_cpus(of_losses, "cross_entropy_statistics", "cross_entropy_gradient")
    tests = test_cross_entropy
    for columns, transposed in product((1, 7, 40), (False, True)):
        tests.test_columns_of_a_part(columns, transposed, "cpu")
    tests.test_a_head_whose_gradient_reads_its_logits_is_refused("cpu")
    for keys, dtype in product(tests.KEYS, (torch.float32, torch.float16)):
        tests.test_matches_float64(keys, dtype, "cpu")
    for tokens in (tests.M, 0):
        tests.test_nothing_to_predict(tokens)
    tests.test_large_logits_do_not_overflow()
    for bad in (torch.nan, torch.inf):
        tests.test_nonfinite_logits_are_not_hidden(bad)
    assert launched == {"kernels": 36}


def rows() -> None:
    tests, move = test_rows, of_rows.launch_move
    tests.take_rows, tests.put_rows = (
        counted(name, lambda *of, out=out: move(*of, out)) for name, out in (("take", True), ("put", False))
    )
    tests.momentum_rows = counted("momentum", of_rows.launch_momentum)
    tests.update_rows = counted("update", of_rows.launch_update)
    tests.NARROW = torch.float16
    for widths in tests.WIDTHS:
        for kind, dtype in product(((True, True), (False, True), (False, False)), (torch.float32, torch.bfloat16)):
            tests.test_momentum(*kind, dtype, widths, "cpu")
        tests.test_update(widths, "cpu")
        tests.test_momentum_decays_where_an_update_is_not_zero(torch.float32, widths, "cpu")
        tests.test_rows_are_taken_and_put_back(widths, "cpu")
    assert launched == {"momentum": 24, "update": 12, "take": 2, "put": 2}


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


def on_cpus(module: ModuleType, *names: str) -> None:
    """Let device code serve CPUs' tensors, too, but those of float64."""
    for name in names:
        definition, launch = getattr(torch.ops.titanlite, name).default.definition, getattr(module, f"launch_{name}")

        def run(first: Tensor, *others: Any, definition=definition, launch=launch) -> Any:
            return (definition if first.dtype == torch.float64 else launch)(first, *others)

        torch.library.impl(f"titanlite::{name}", "cpu")(run)


def routes() -> None:
    of_routing.launch = of_experts.launch = interpret
    of_routing.COUNTS = 64  # so that the counts are added up in several steps
    on_cpus(of_routing, "route", "route_grad", "expert_rows", "count_choices")
    on_cpus(of_experts, "gather_rows", "combine", "spread_rows", "row_dots")
    both, tests = (False, True), test_routing
    for sizes, way, with_bias in product(
        [(7, 8, 2), (3, 9, 8), (13, 20, 3), (4, 130, 8), (33, 128, 8)], tests.WAYS, both
    ):
        tests.test_weights_choices_and_gradient(*sizes, *way, with_bias, "cpu")
    for with_bias in both:
        tests.test_ties_go_to_the_lower_expert(with_bias, "cpu")
    odd = torch.tensor([[torch.inf, 0, 0, 1], [-torch.inf] * 4])
    for way in tests.WAYS:
        tests.test_extreme_and_missing_numbers(*way, "cpu")
        for got, want in zip(*(run(odd, None, 2, *way, 1.0) for run in (route, route.definition)), strict=True):
            torch.testing.assert_close(got, want, equal_nan=True)
    for case in tests.CHOICES:
        tests.test_choices_of_counted_tokens_are_counted(case, "cpu")
    for case, part in product(tests.CHOICES, (None, (0, 1), (1, 2), (3, 1))):
        tests.test_rows_lie_by_expert_token_and_slot(case, part, "cpu")
    for rows in test_expert_rows.ROWS:
        test_expert_rows.test_each_row_is_given_its_token(rows, torch.float32, "cpu")
        for D, is_weighted in product((48, 129, 2560), both):
            test_expert_rows.test_combine(rows, D, is_weighted, torch.float32, "cpu")
    assert launched == {"kernels": 385}, launched


if __name__ == "__main__":
    {"copies": copies, "losses": losses, "products": products, "routing": routes, "rows": rows}[sys.argv[1]]()
