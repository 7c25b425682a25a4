"""The grouped products, compiled for sm_90 without a GPU."""

import platform
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

if sys.platform != "linux" or platform.machine() != "x86_64":
    pytest.skip("Triton's assembler is there on Linux x86-64 only", allow_module_level=True)

from tests.support.compile_only import check_resources, compiling, require_products_in_flight
from tests.support.needs import slow
from titanlite.kernels.device import grouped_gradient, grouped_matmul

R, G, N, K = 64, 2, 256, 384
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def multiply(transposed: bool) -> None:
    weight = torch.zeros(G, K, N, dtype=BF16).mT if transposed else torch.zeros(G, N, K, dtype=BF16)
    grouped_matmul.launch_grouped_matmul(torch.zeros(R, K, dtype=BF16), weight, offsets())


def multiply_scaled(fast: bool, beside: bool) -> None:
    a, weight, scales = torch.zeros(R, K).to(E4M3), torch.zeros(G, N, K).to(E4M3), torch.ones(G, N)
    if beside:
        weight, scales = torch.zeros(N, G, K).to(E4M3).transpose(0, 1), scales[:1]
    grouped_matmul.launch_scaled_grouped_matmul(a, weight, torch.ones(R, 1), scales, offsets(), BF16, fast)


def gradient() -> None:
    grad, x = (torch.zeros(R, n, dtype=BF16) for n in (N, K))
    grouped_gradient.launch_grouped_gradient(grad, x, offsets())


def gradient_scaled(fast: bool, of_rows: bool, of_columns: bool) -> None:
    grad, x = (torch.zeros(n, R).to(E4M3) for n in (N, K))
    scales = torch.ones(N, 1) if of_rows else None, torch.ones(K, 1) if of_columns else None
    grouped_gradient.launch_scaled_grouped_gradient(grad, x, *scales, offsets(), BF16, fast)


def offsets() -> Tensor:
    return torch.zeros(G + 1, dtype=torch.int32)


CALLS: dict[str, Callable[[], None]] = {
    "float8, fast": partial(multiply_scaled, True, False),
    "gradient, float8, split": partial(gradient_scaled, False, False, True),
    "bfloat16": partial(multiply, False),
    "bfloat16, transposed": partial(multiply, True),
    "float8, fast, weights beside each other": partial(multiply_scaled, True, True),
    "float8, split": partial(multiply_scaled, False, False),
    "float8, split, weights beside each other": partial(multiply_scaled, False, True),
    "gradient, bfloat16": gradient,
    "gradient, float8, fast": partial(gradient_scaled, True, False, True),
    "gradient, float8, fast, all scales": partial(gradient_scaled, True, True, True),
    "gradient, float8, split, all scales": partial(gradient_scaled, False, True, True),
    "gradient, float8, split, scales of rows": partial(gradient_scaled, False, True, False),
}


@pytest.mark.parametrize("call", [*list(CALLS)[:2], *slow(*list(CALLS)[2:])])
def test_sums_stay_in_registers(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (grouped_gradient, grouped_matmul):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    with compiling() as compiled:
        CALLS[call]()
    ((name, kernel),) = compiled.items()
    check_resources(compiled, tmp_path)
    require_products_in_flight(name, kernel.asm["ptx"], tmp_path)
