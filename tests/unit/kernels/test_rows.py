"""Rows of many tensors, in a table: the definition, and on a GPU the device code, against loops over rows."""

import pytest
import torch
from torch import Tensor

from tests.support.needs import DEVICES
from titanlite.kernels.row_table import NOWHERE, RowTable, table, tensor_table
from titanlite.kernels.rows import momentum_rows, put_rows, take_rows, update_rows

NARROW = torch.bfloat16  # of what travels
ONE, ZERO, TWO = torch.ones(()), torch.zeros(()), torch.full((), 2.0)
WIDTHS = [{"a": 24, "b": 4104, "c": 8}, {"a": 7, "b": 2049, "c": 3}]  # multiples of 16 bytes, and not


class Case:
    """Three tensors of 5 rows, of which some travel, in another order, with gaps."""

    def __init__(self, widths: dict[str, int], device: str) -> None:
        numbers = torch.Generator().manual_seed(0)
        self.tensors = [torch.randn(5, width, generator=numbers).to(device) for width in widths.values()]
        self.gradients = [torch.randn(t.shape, generator=numbers).to(device) for t in self.tensors]
        self.momenta = [torch.randn(t.shape, generator=numbers).to(device) for t in self.tensors]
        rows = {0: [4, 0, 1], 1: [2, 3], 2: [0, 1, 2, 3]}
        self.places: dict[tuple[int, int], int] = {}
        runs, first = [], 16
        for number, chosen in rows.items():
            width = self.tensors[number].shape[1]
            place = NOWHERE if number == 2 else first
            runs.append((number, torch.tensor(chosen) * width, width, place))
            for i, row in enumerate(chosen):
                self.places[number, row] = NOWHERE if number == 2 else first + i * width
            first += 0 if number == 2 else len(chosen) * width + 8
        self.rows = table(runs).on(torch.device(device))
        self.flat = torch.full((first,), 7.0, device=device)

    def flat_row(self, flat: Tensor, number: int, row: int) -> Tensor:
        place = self.places[number, row]
        return flat[place : place + self.tensors[number].shape[1]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("widths", WIDTHS, ids=["aligned", "odd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("nesterov", "decays"), [(True, True), (False, True), (False, False)])
def test_momentum(nesterov: bool, decays: bool, dtype: torch.dtype, widths: dict[str, int], device: str) -> None:
    case = Case(widths, device)
    momenta = [m.to(dtype) for m in case.momenta]
    before, flat = [m.clone() for m in momenta], case.flat.to(NARROW)
    tensors = tensor_table("gradient", case.gradients), tensor_table("momentum", momenta)
    divisor, skip, leave = (t.to(device) for t in (TWO, ZERO, ONE))
    momentum_rows(case.rows, *tensors, flat, divisor, leave, 0.75, nesterov, decays)
    assert all(torch.equal(m, old) for m, old in zip(momenta, before, strict=True))
    momentum_rows(case.rows, *tensors, flat, divisor, skip, 0.75, nesterov, decays)
    touched = torch.zeros_like(flat, dtype=torch.bool)
    for number, (gradient, momentum, old) in enumerate(zip(case.gradients, momenta, before, strict=True)):
        for row in range(5):
            if (number, row) not in case.places:
                assert torch.equal(momentum[row], old[row])
                continue
            g, m = gradient[row].double() / 2, old[row].double()
            new = (0.75 if decays else 1) * m + 0.25 * g
            torch.testing.assert_close(momentum[row].double(), new, rtol=torch.finfo(dtype).eps, atol=1e-6)
            if case.places[number, row] != NOWHERE:
                u = 0.75 * new + 0.25 * g if nesterov else new
                torch.testing.assert_close(case.flat_row(flat, number, row).double(), u, rtol=2**-8, atol=1e-6)
                case.flat_row(touched, number, row).fill_(True)
    assert (flat[~touched] == 7).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("widths", WIDTHS, ids=["aligned", "odd"])
def test_update(widths: dict[str, int], device: str) -> None:
    case = Case(widths, device)
    takes = table((n, torch.arange(5) * t.shape[1], t.shape[1], 5 * 8 * n * 600) for n, t in enumerate(case.tensors))
    flat = torch.randn(100_000, generator=torch.Generator().manual_seed(1)).to(device, NARROW)
    scales, decays = (torch.linspace(a, b, 15, dtype=torch.float64).to(device) for a, b in ((0.5, 2), (0, 0.1)))
    old, parameters = [t.clone() for t in case.tensors], tensor_table("parameter", case.tensors)
    for skip in (ONE, ZERO):
        given = takes.on(flat.device), parameters, flat, scales, decays, 0.1, skip.to(device)
        squares = update_rows(*given, measure=True, decay_factor=0.5)
        assert squares is not None
        changes = torch.stack([(a - b).square().sum(1) for a, b in zip(case.tensors, old, strict=True)]).flatten()
        weights = torch.stack([t.square().sum(1) for t in old]).flatten()
        torch.testing.assert_close(squares, torch.stack((weights, changes)), rtol=1e-5, atol=0)
        assert changes.any() != skip
        measured = [t.clone() for t in case.tensors]
        for tensor, before in zip(case.tensors, old, strict=True):
            tensor.copy_(before)
        assert update_rows(*given, measure=False, decay_factor=0.5) is None
        assert all(torch.equal(a, b) for a, b in zip(measured, case.tensors, strict=True))
        for number, tensor in enumerate(case.tensors):
            for row in range(5):
                n, first = 5 * number + row, 5 * 8 * number * 600 + row * tensor.shape[1]
                u = flat[first : first + tensor.shape[1]].double()
                new = old[number][row].double() * (1 - 0.1 * 0.5 * decays[n]) - 0.1 * scales[n] * u
                wanted = old[number][row].double() if skip else new
                torch.testing.assert_close(tensor[row].double(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("widths", WIDTHS, ids=["aligned", "odd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_momentum_decays_where_an_update_is_not_zero(dtype: torch.dtype, widths: dict[str, int], device: str) -> None:
    case = Case(widths, device)
    runs = [(n, torch.arange(5) * t.shape[1], t.shape[1], 5 * 8 * n * 600) for n, t in enumerate(case.tensors)]
    flat = torch.randn(100_000, generator=torch.Generator().manual_seed(1)).to(device, NARROW)
    flat[::3] = 0
    numbers = (torch.ones(15, dtype=torch.float64, device=device) for _ in range(2))
    momenta = [m.to(dtype) for m in case.momenta]
    tables = tensor_table("parameter", case.tensors), flat, *numbers
    for skip in (ONE, ZERO):
        old = [m.clone() for m in momenta]
        given = table(runs).on(flat.device), *tables, 0.1, skip.to(device)
        kept = tensor_table("momentum", momenta)
        update_rows(*given, measure=False, decay_factor=1.0, momenta=kept, momentum=0.75)
        for number, (momentum, before) in enumerate(zip(momenta, old, strict=True)):
            u = flat[5 * 8 * number * 600 :][: before.numel()].view(before.shape)
            wanted = torch.where((u != 0) & (skip == 0).to(device), (0.75 * before.float()).to(dtype), before)
            assert torch.equal(momentum, wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("widths", WIDTHS, ids=["aligned", "odd"])
def test_rows_are_taken_and_put_back(widths: dict[str, int], device: str) -> None:
    case = Case(widths, device)
    width = case.tensors[1].shape[1]
    rows = table([(0, torch.tensor([3, 1]) * width, width - 1, 8)]).on(torch.device(device))
    flat = torch.zeros(2 * width + 16, device=device)
    take_rows(rows, case.tensors[1], flat)
    wanted = torch.cat((case.tensors[1][3, :-1], case.tensors[1][1, :-1]))
    assert torch.equal(flat[8 : 8 + len(wanted)], wanted)
    assert flat.count_nonzero() == wanted.count_nonzero()
    back = torch.zeros_like(case.tensors[1])
    put_rows(rows, back, flat)
    assert torch.equal(back[[3, 1], :-1], case.tensors[1][[3, 1], :-1])
    assert back.count_nonzero() == wanted.count_nonzero()


@pytest.mark.parametrize("wrong", [torch.zeros(2, 4, dtype=torch.bfloat16), torch.zeros(4, 2).T])
def test_tensors_that_no_kernel_could_read_are_an_error(wrong: Tensor) -> None:
    with pytest.raises(ValueError, match=r"rows: gradient 1 is .* it must be torch\.float32 and contiguous"):
        tensor_table("gradient", [torch.zeros(2, 4), wrong])


def test_no_rows() -> None:
    none: RowTable = table([(0, torch.empty(0, dtype=torch.int64), 4, 0)])
    assert len(none) == 0
    take_rows(none, torch.zeros(4), torch.zeros(4))
