"""What the host hands to the kernels, in every case that GPUs are tested with; nothing runs, nothing is compiled.

A launch passes addresses to the kernel that it knows by a key. Three things would go unseen then: two kernels under one
key, an operand whose numbers do not lie as the kernel reads them, and one that TMA cannot begin at.
"""

import importlib
import inspect
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise, product
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.support.collective_cases import (
    BF16,
    E4M3,
    E5M2,
    Case,
    Gather,
    Ranks,
    call_of,
    gathers,
    given_of,
    scatters,
)

pytest.importorskip("triton")

import triton

import titanlite.kernels
from tests.support.compile_only import _Driver, fake_channel
from titanlite.kernels import collectives, lowering
from titanlite.kernels.device import (
    aligned_rows,
    block_cast,
    channel,
    cross_entropy,
    expert_gate,
    expert_rows,
    float8_cast,
    gather_plan,
    grouped_gradient,
    grouped_matmul,
    norm_rope,
    rms_norm,
    rope,
    routing,
    specialised_producer,
    swiglu,
    tiles,
)
from titanlite.kernels.device import all_gather_matmul as gather
from titanlite.kernels.device import matmul_reduce_scatter as scatter
from titanlite.kernels.device.launch import Blocks, _Launcher
from titanlite.kernels.products import (
    FSDP_GATHER,
    FSDP_REDUCE,
    NOTHING,
    SLOWER,
    GatherCall,
    ScatterCall,
    out_shapes,
    product_shape,
)
from titanlite.kernels.routing import SCORES
from titanlite.kernels.shapes import split

GATHER = torch.ops.titanlite.all_gather_matmul.default.on_gpus  # type: ignore[attr-defined]
SCATTER = torch.ops.titanlite.matmul_reduce_scatter.default.on_gpus  # type: ignore[attr-defined]
LOADED_FIRST = ["load", "load", "run", "run"]  # rule 4 of the kernels


class Launches:
    """Stands where kernels are launched, and remembers which kernel Triton would have found for each key."""

    def __init__(self) -> None:
        self.by_key: dict[object, str] = {}
        self.arguments: list[dict[str, object]] = []
        self.order: list[str] = []
        self.join(1, 4)

    def join(self, rank: int, ranks: int, capacity: int = 16 << 20) -> None:
        """From now on as this rank of a group of so many."""
        self.channel = fake_channel(rank, ranks, capacity)

    def launch(self, *kernel, **options) -> None:
        self.ready(*kernel, **options)()

    def ready(self, kernel, key, blocks, tensors, arguments, **options) -> Callable[[], None]:
        self.order.append("load")
        *_, bind = kernel.device_caches[0]
        arguments = arguments()
        fixed = [x for x in (*vars(self.channel).values(), *self.channel.peers) if isinstance(x, Tensor)]
        for a in arguments:  # an address that is kept must be one that stays
            memory = a.memory if isinstance(a, Blocks) else a
            if isinstance(memory, Tensor) and not any(memory is x for x in tensors):
                stays = {x.untyped_storage().data_ptr() for x in fixed}
                assert memory.untyped_storage().data_ptr() in stays, f"{kernel.fn.__name__}: not among the tensors"
        blocks = [(a.shape, a.stride, a.box) for a in arguments if isinstance(a, Blocks)]  # kept with the kernel
        numbers = [a for a in arguments if isinstance(a, int | float)]  # kept, too
        arguments = [a.descriptor() if isinstance(a, Blocks) else a for a in arguments]
        named, *specialised = bind(*arguments, **options)
        unaligned = tuple(i for i, a in enumerate(arguments) if isinstance(a, Tensor) and a.data_ptr() % 16)
        specialised = str((blocks, numbers, *specialised))
        known = self.by_key.setdefault((kernel.fn.__name__, key, unaligned), specialised)
        assert known == specialised, f"{kernel.fn.__name__}: two kernels under the key {key}"
        of_rows = {name.replace("_row", "_grad") for name in named if "_row" in name}
        strided = {"x", "logits"} if "stride" in named else of_rows
        for name, argument in named.items():
            if isinstance(argument, Tensor) and name not in strided and "scale_inv" not in name:
                assert argument.is_contiguous(), f"{kernel.fn.__name__}: {name} has strides {argument.stride()}"
            elif hasattr(argument, "block_shape"):
                *rows, column = argument.strides  # type: ignore[attr-defined]
                assert column == 1, name
                itemsize = argument.base.dtype.itemsize  # type: ignore[attr-defined]
                assert all(row > 0 and row * itemsize % 16 == 0 for row in rows), name
                assert argument.base.data_ptr() % 16 == 0, name  # type: ignore[attr-defined]
        if kernel.fn.__name__ == "_matmul_push":  # TMA begins at whole 16 bytes of a row only
            transposed = named["B_K_MAJOR" if named["BY_COLS"] else "A_K_MAJOR"] is False
            itemsize = named["a0"].base.dtype.itemsize  # type: ignore[attr-defined]
            assert not transposed or named["segment"] * itemsize % 16 == named["size"] * itemsize % 16 == 0  # type: ignore[operator]
        self.arguments.append(named)
        return lambda: self.order.append("run")

    def forget(self) -> None:
        self.arguments.clear()  # two gigabytes in all cases
        self.order.clear()


@pytest.fixture
def launches(monkeypatch) -> Iterator[Launches]:
    found = Launches()
    experts = aligned_rows, expert_gate, expert_rows, grouped_gradient, grouped_matmul
    for module in (*experts, block_cast, cross_entropy, float8_cast, norm_rope, rms_norm, rope, routing, swiglu):
        monkeypatch.setattr(module, "launch", found.launch)
    for module in (gather, scatter):
        monkeypatch.setattr(module, "ready", found.ready)
    for module in (gather, grouped_gradient, grouped_matmul, norm_rope, rms_norm, scatter):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    for stem in (gather, scatter):
        monkeypatch.setattr(stem, "channel", lambda group: found.channel)
    place = lambda name: (found.channel.ranks, found.channel.rank)  # noqa: E731
    monkeypatch.setattr(collectives, "_size_and_rank", place)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_resolve_process_group", place)
    monkeypatch.setattr(lowering, "no_peer_access", lambda group: None)
    monkeypatch.setattr(lowering, "agree", lambda op, group, what, own, reason: reason)
    monkeypatch.setattr(lowering, "implementations", {})
    monkeypatch.setattr(lowering, "lowered", Counter())
    triton.runtime.driver.set_active(_Driver())  # type: ignore[arg-type]
    yield found
    triton.runtime.driver._active = None  # found anew at the next use


def call_case(case: Case, rank: int, ranks: int) -> None:
    """Of a gather with its first product; the others are plain matmuls."""
    if isinstance(case, Gather):
        case = replace(case, others=case.others[:1])
    call = call_of(case, "cuda", given_of(case, "cuda", Ranks("g", tuple(range(ranks)), rank), rank, "zeros"), "g")
    if isinstance(call, GatherCall):
        if gather_plan.gather_unsupported_reason(call, ranks):
            return
        results, (product,) = GATHER(*call), out_shapes(call.whole, call.others, call.form)
        shapes = [call.whole, product, *[[*call.whole[:-1], 1]] * call.moves_scale]
    else:
        if scatter.scatter_unsupported_reason(call, ranks):
            return
        own = product_shape(call.lefts[0].shape, call.rights[0].shape)
        own[call.dim] = split(own, call.dim, own[call.dim], ranks).length(rank)
        results, shapes = [SCATTER(*call)], [own]
    for result, shape in zip(results, shapes, strict=True):
        assert (list(result.shape), result.stride()) == (shape, torch.empty(shape, device="meta").stride())


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_cases(ranks: int, launches: Launches):
    for rank in (0, ranks - 1):
        launches.join(rank, ranks)
        for case in (*(case for case in gathers("cuda") if case.others), *scatters("cuda")):
            call_case(case, rank, ranks)
            assert launches.order in ([], LOADED_FIRST), case.id
            launches.forget()
    kernels = {name for name, *_ in launches.by_key}  # type: ignore[misc]
    general = {"meet", "_publish", "_gather_matmul", "_matmul_push", "_reduce"}
    assert kernels == general | {"gather_matmul", "matmul_push"}


def gather_of(shard: Tensor, other: Tensor, dim: int = 0, **changed) -> GatherCall:
    """Of four ranks."""
    how = "left", [], None, "tensor", [], None, False
    return GatherCall(shard, [other], dim, 4 * shard.shape[dim], "g", *how)._replace(**changed)


def scatter_of(lefts: list[Tensor], rights: list[Tensor], **changed) -> ScatterCall:
    return ScatterCall(lefts, rights, 0, "g", None, [], [], None, False)._replace(**changed)


def gather_rows(*given, **changed) -> list[Tensor]:
    return GATHER(*gather_of(*given, **changed))


def scatter_rows(*given, **changed) -> list[Tensor]:
    return SCATTER(*scatter_of(*given, **changed))


def test_biases_of_two_dtypes(launches: Launches):
    for bias in (torch.zeros(256, dtype=BF16), torch.zeros(256), torch.zeros(512)[::2], torch.zeros(1).expand(256)):
        gather_rows(torch.zeros(128, 64, dtype=BF16), torch.zeros(64, 256, dtype=BF16), biases=[bias])
        scatter_rows([torch.zeros(512, 64, dtype=BF16)], [torch.zeros(64, 256, dtype=BF16)], bias=bias)


def test_scales_of_two_kinds(launches: Launches):
    x, w, xs = torch.zeros(128, 64).to(E4M3), torch.zeros(256, 64).to(E4M3).t(), torch.zeros(512, 64).to(E4M3)
    one, rows, columns = torch.ones(()), torch.ones(512, 1), torch.ones(1, 256)
    for other in (one, columns, torch.ones(1, 1).expand(1, 256), torch.ones(1, 512)[:, ::2]):
        gather_rows(x, w, scale=one, other_scales=[other])
        gather_rows(x, w, scale=torch.ones(1, 1).expand(128, 1), scale_of="row", other_scales=[other])
        scatter_rows([xs], [w], left_scales=[rows], right_scales=[other])
    scatter_rows([xs, xs], [w, w], left_scales=[one, rows], right_scales=[columns, 2 * one])
    push = next(named for named in reversed(launches.arguments) if "ls0" in named)
    assert (push["L_SCALE"], push["R_SCALE"]) == (2, 2)
    for name, numbers, value in (("ls0", 512, 1), ("ls1", 512, 1), ("rs0", 256, 1), ("rs1", 256, 2)):
        assert push[name].flatten().tolist() == [value] * numbers  # type: ignore[attr-defined]


def test_a_group_of_another_size_under_the_name_of_one_that_ended(launches: Launches):
    x, w = torch.zeros(128, 64, dtype=BF16), torch.zeros(64, 256, dtype=BF16)
    for rank, ranks in ((1, 4), (0, 2)):
        launches.join(rank, ranks)
        launches.arguments.clear()
        gather_rows(x, w, size=128 * ranks)
        out = scatter_rows([torch.zeros(512, 64, dtype=BF16)], [w])
        assert out.shape == (512 // ranks, 256)
        assert all(named["RANKS"] == ranks for named in launches.arguments if "RANKS" in named)


def test_operands_that_begin_anywhere_and_rows_that_are_one(launches: Launches):
    def shifted(*shape: int) -> Tensor:
        n = torch.Size(shape).numel()
        return torch.zeros(n + 1, dtype=BF16)[1:].view(shape)

    for w in (shifted(64, 256), shifted(256, 64).t(), torch.zeros(64, 1, dtype=BF16).expand(64, 256)):
        gather_rows(shifted(128, 64), w)
        scatter_rows([shifted(512, 64)], [w])
        scatter_rows([torch.zeros(1, 64, dtype=BF16).expand(512, 64)], [w])


@pytest.mark.parametrize(("rows", "wide"), [(1 << 16, False), (1 << 17, True)])
def test_sums_of_more_elements_than_32_bits_count(rows: int, wide: bool, launches: Launches):
    # Nothing writes to the result, so that it takes no memory.
    scatter_rows([torch.zeros(1, 8, dtype=BF16).expand(rows, 8)], [torch.zeros(8, 1 << 14, dtype=BF16)])
    assert launches.arguments[-1]["WIDE"] is wide


@pytest.mark.parametrize(
    ("shard", "dim", "other", "form"),
    [
        ([0, 64], 0, [64, 32], "left"),
        ([128, 0], 0, [0, 32], "left"),
        ([128, 64], 0, [64, 0], "left"),
        ([0, 128, 64], 1, [64, 32], "left"),
        ([128, 0], 0, [32, 512], "right"),
    ],
)
def test_nothing_to_move_or_multiply(shard: list[int], dim: int, other: list[int], form: str):
    left, right = torch.zeros(shard, dtype=BF16), torch.zeros(other, dtype=BF16)
    assert gather_plan.gather_unsupported_reason(gather_of(left, right, dim, form=form), 4) == NOTHING
    if form == "left":
        assert scatter.scatter_unsupported_reason(scatter_of([left], [right]), 4) == NOTHING


def test_device_code_takes_the_arguments_of_its_operator():
    for module in pkgutil.iter_modules(titanlite.kernels.__path__, "titanlite.kernels."):
        importlib.import_module(module.name)
    launched = 0
    for name in torch._C._dispatch_get_all_op_names():
        library, _, short = name.partition("::")
        op = getattr(torch.ops.titanlite, short).default if library == "titanlite" else None
        launch = op and inspect.getclosurevars(op.on_gpus).nonlocals.get("launch", op.on_gpus)  # without `unless`
        if op and (found := inspect.getclosurevars(launch).nonlocals.get("found")):
            wanted, given = (
                [(p.name, p.default) for p in inspect.signature(f).parameters.values()]
                for f in (op.definition, found())
            )
            assert given[: len(wanted)] == wanted, name
            assert all(default is None for _, default in given[len(wanted) :]), name
            launched += 1
    assert launched == 33


def test_casts(launches: Launches):
    for M, F, dtype, other, pow2 in product(
        (128, 384), (256, 1280), (BF16, torch.float32), (E4M3, E5M2), (False, True)
    ):
        x, grad = torch.zeros(M, 2 * F, dtype=dtype), torch.zeros(M, F, dtype=dtype)
        float8_cast.launch_cast_rows(x, other)
        float8_cast.launch_cast_into(x, torch.ones(()), x.to(other))
        float8_cast.launch_transpose(x.to(other))
        for by_row in (False, True):
            for strided in (x, grad, x[:, :F]):
                float8_cast.launch_cast_transpose(strided, torch.ones(M, 1), by_row, other, pow2)
            named = torch.zeros(5).int()
            float8_cast.launch_cast_transpose(x, torch.ones(5, 1), by_row, other, pow2, None, named)
            float8_cast.launch_transpose(x.to(other), None, named)
            swiglu.launch_swiglu_cast(x, by_row, other, pow2)
            for result in (E4M3, E5M2):
                swiglu.launch_swiglu_grad_cast(grad, x, by_row, other, result, pow2)
        swiglu.launch_swiglu_grad(grad, x)
        swiglu.launch_swiglu_grad(grad.to(BF16), x)
        for rows, rows_transposed in ((1, 1), (128, 0), (0, 128)):
            for strided in (x, grad, x[:, :F]):
                block_cast.launch_cast_blocks(strided, rows, rows_transposed, other, pow2)
    kernels = {name for name, *_ in launches.by_key}  # type: ignore[misc]
    of_float8 = {"_cast_amax", "_cast_transpose", "_transpose", "_cast_rows", "_cast_blocks"}
    assert kernels == of_float8 | {f"_swiglu_{name}" for name in ("grad", "amax", "rows", "by", "grad_rows", "grad_by")}


def test_cross_entropy(launches: Launches):
    for M, V, dtype, first, softcap in product((4, 8), (64, 96), (BF16, torch.float32), (0, 64), (0.0, 30.0)):
        logits, targets = torch.zeros(M, V + 32, dtype=dtype), torch.zeros(M, dtype=torch.int64)
        for rows in (logits, logits[:, :V]):
            lse, _ = cross_entropy.launch_cross_entropy_statistics(rows, targets, first, softcap)
            for z_loss in (0.0, 0.1):
                cross_entropy.launch_cross_entropy_gradient(rows, targets, first, lse, torch.ones(()), softcap, z_loss)
    assert {name for name, *_ in launches.by_key} == {  # type: ignore[misc]
        f"_cross_entropy_{name}" for name in ("statistics", "gradient")
    }


def test_routing(launches: Launches):
    for M, E, K, scale, (score, normalised) in product(
        (12, 24), (16, 20), (1, 3), (1.0, 2.5), product(SCORES, (False, True))
    ):
        logits, grad = torch.zeros(M, E), torch.zeros(M, K)
        for bias in (None, torch.zeros(E)):
            routing.launch_route(logits, bias, K, score, normalised, scale)
        choices = torch.zeros(M, K, dtype=torch.int32)
        routing.launch_route_grad(grad, logits, choices, score, normalised, scale)
        routing.launch_count_choices(choices, torch.zeros(M, dtype=torch.bool), E)
        for first, count in ((0, E), (4, 4), (4, 1)):
            routing.launch_expert_rows(choices, first, count)
    names = "_route", "_route_grad", "_count_choices", "_expert_counts", "_expert_begins", "_expert_places"
    assert {name for name, *_ in launches.by_key} == {*names}  # type: ignore[misc]


def test_rows_of_experts(launches: Launches):
    for M, K, D, dtype in product((12, 24), (1, 3), (16, 48, 2560), (BF16, torch.float32)):
        x, o, rows = torch.zeros(M, D, dtype=dtype), torch.zeros(M * K, D, dtype=dtype), torch.zeros(M, K).int()
        for slots in (torch.zeros(M * K).int(), torch.zeros(7).int()):
            expert_rows.launch_gather_rows(x, slots, K)
            expert_rows.launch_gather_rows(x.to(E4M3), slots, K)
        for weights in (None, torch.zeros(M, K)):
            expert_rows.launch_combine(o, rows, weights)
            expert_rows.launch_spread_rows(x, rows, weights, M * K)
        expert_rows.launch_spread_rows(x.to(E4M3), rows, None, M * K)
        for other in (o, torch.zeros(M * K, D)):
            expert_rows.launch_row_dots(x, other, rows)
    kernels = {"_gather_rows", "_combine_rows", "_spread_rows", "_row_dots"}
    assert {name for name, *_ in launches.by_key} == kernels  # type: ignore[misc]


def test_gates_and_places_of_experts(launches: Launches):
    for M, K, blocks, dtype in product((12, 24), (1, 3), (1, 6), (BF16, torch.float32)):
        a, grad = torch.zeros(M * K, 256 * blocks, dtype=dtype), torch.zeros(M * K, 128 * blocks, dtype=dtype)
        slots, weights = torch.zeros(M * K).int(), torch.zeros(M, K)
        expert_gate.launch_expert_gate(a, slots)
        expert_gate.launch_expert_gate_grad(grad, a, weights, slots)
        expert_gate.launch_expert_gate_cast(a, slots, E4M3)
        expert_gate.launch_expert_gate_grad_cast(grad, a, weights, slots, E4M3)
        for groups in (1, 5):
            aligned_rows.launch_aligned_rows(slots, torch.zeros(groups + 1).int(), K)
    kernels = {"_expert_gate", "_expert_gate_grad", "_expert_gate_cast", "_expert_gate_grad_cast", "_aligned_rows"}
    assert {name for name, *_ in launches.by_key} == kernels  # type: ignore[misc]


def test_products_of_experts(launches: Launches):
    for R, G, N, K in product((32, 48), (1, 3), (128, 256), (128, 384)):
        offsets, columns = torch.zeros(G + 1).int(), torch.ones(K, 1)
        for dtype in (BF16, torch.float16):
            a, grad = torch.zeros(R, K, dtype=dtype), torch.zeros(R, N, dtype=dtype)
            for weight in (torch.zeros(G, N, K, dtype=dtype), torch.zeros(G, K, N, dtype=dtype).mT):
                grouped_matmul.launch_grouped_matmul(a, weight, offsets)
            grouped_gradient.launch_grouped_gradient(grad, a, offsets)
        a, weight = torch.zeros(R, K).to(E4M3), torch.zeros(G, N, K).to(E4M3)
        grad, x = torch.zeros(N, R).to(E4M3), torch.zeros(K, R).to(E4M3)
        for fast in (False, True):
            for scales, of in ((torch.ones(G, N), weight), (torch.ones(1, N), weight.transpose(0, 1).contiguous())):
                of = of if of is weight else of.transpose(0, 1)
                grouped_matmul.launch_scaled_grouped_matmul(a, of, torch.ones(R, 1), scales, offsets, BF16, fast)
            for scales in ((None, columns), (torch.ones(N, 1), None)):
                grouped_gradient.launch_scaled_grouped_gradient(grad, x, *scales, offsets, BF16, fast)
    assert {name for name, *_ in launches.by_key} == {"_grouped_matmul", "_grouped_weight_gradient"}  # type: ignore[misc]


def test_heads(launches: Launches):
    for S, K, R, E, eps, dtype in product((12, 24), (1, 2), (1, 3), (16, 48), (1e-5, 1e-6), (BF16, torch.float32)):
        qkv, weight = torch.zeros(24, K * (R + 2) * E, dtype=dtype), torch.ones(E, dtype=dtype)
        given = qkv, weight, weight, torch.ones(S, E // 2), torch.zeros(S, E // 2), R, eps
        q, k = norm_rope.launch_norm_rope(*given)
        for of_q in (q, q.transpose(0, 1).contiguous().transpose(0, 1)):
            norm_rope.launch_norm_rope_grad(of_q, k, k.clone(), *given)
            rope.launch_rotated_heads_grad(of_q, k, k.clone(), *given[3:5])
    kernels = {"_norm_rope", "_norm_rope_grad", "_rotated_heads_grad"}
    assert {name for name, *_ in launches.by_key} == kernels  # type: ignore[misc]


def test_norms(launches: Launches):
    for M, D, eps, dtype in product((12, 24), (16, 48), (1e-5, 1e-6), (BF16, torch.float32)):
        x, mean = torch.zeros(M, D, dtype=dtype), torch.ones(M, 1)
        for weight in (torch.ones(D, dtype=dtype), torch.ones(D)):
            for rest in (None, x.clone(), torch.zeros(M, D)):
                rms_norm.launch_rms_norm_grad(x.clone(), x, weight, mean, rest, eps)
                rms_norm.launch_rms_norm_grad(torch.zeros(M, D), x, weight, mean, rest, eps)
    assert {name for name, *_ in launches.by_key} == {"_rms_norm_grad", "_add_parts"}  # type: ignore[misc]


@pytest.mark.parametrize(("ranks", "reason"), [(4, SLOWER), (2, None)])
def test_the_table_may_have_the_plain_path_as_faster(monkeypatch: pytest.MonkeyPatch, ranks: int, reason: str | None):
    table = {("matmul_reduce_scatter", 2, 4, 16384, 8192, 14336): tiles.Tiles(plain=True)}
    monkeypatch.setattr(tiles, "measured_tiles", lambda: table)
    for module in (scatter, gather_plan):
        monkeypatch.setattr(module, "tiles", tiles.tiles.__wrapped__)  # nothing is kept of this table
    left, right = (torch.empty(shape, dtype=BF16, device="meta") for shape in ((16384, 14336), (14336, 8192)))
    assert scatter.scatter_unsupported_reason(scatter_of([left], [right]), ranks) == reason
    gathers = gather_of(left[: 16384 // ranks], right, size=16384)
    assert gather_plan.gather_unsupported_reason(gathers, ranks) is None


@pytest.mark.parametrize(
    ("itemsize", "N", "fast", "out_itemsize", "columns"),
    [
        (1, 14336, False, 2, 192),
        (1, 568, False, 2, 192),
        (1, 1024, False, 2, 128),  # an eighth more columns than there are
        (1, 14336, False, 4, 128),
        (1, 14336, True, 2, 256),
        (2, 14336, False, 2, 256),
    ],
)
def test_tiles_that_are_added_up_in_steps_are_as_wide_as_registers_allow(
    itemsize: int, N: int, fast: bool, out_itemsize: int, columns: int
):
    pick = tiles.tiles("all_gather_matmul", itemsize, 2, 16384, N, 4096, fast, out_itemsize)
    assert pick.n == columns
    assert pick.narrow().n == (128 if columns == 192 else columns)


@pytest.mark.parametrize("x_tiles", [1, 15, 16, 40])
@pytest.mark.parametrize("y_tiles", [1, 6, 28])
@pytest.mark.parametrize("group", [1, 4, 16])
def test_tiles_are_drawn_once_each_and_a_group_of_rows_at_a_time(x_tiles: int, y_tiles: int, group: int):
    drawn = [specialised_producer.tile_position.fn(n, x_tiles, y_tiles, group) for n in range(x_tiles * y_tiles)]
    assert sorted(drawn) == [(x, y) for x in range(x_tiles) for y in range(y_tiles)]
    assert [x // group for x, _ in drawn] == sorted(x // group for x, _ in drawn)
    assert all(y <= later for (x, y), (other, later) in pairwise(drawn) if x // group == other // group)


class Stream:
    """A CUDA stream's handle, the capture that it takes part in, and what was waited for."""

    def __init__(self, number: int) -> None:
        self.cuda_stream, self.capture, self.waits_for = number, 0, list[int]()

    def wait_stream(self, other: "Stream") -> None:
        self.waits_for.append(other.cuda_stream)
        assert self.capture in (0, other.capture), "CUDA lets a capture wait for nothing outside of it"
        self.capture = other.capture  # it joins, as CUDA has it


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Begin an operator on a stream, and return which streams' work it waits for."""
    streams: dict[int, Stream] = {}

    def begin_on(stream: Stream, of: int = 0, operator: int | None = None) -> list[int]:
        streams[stream.cuda_stream] = stream
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: stream.cuda_stream, raising=False)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: stream.capture > 0)
        stream.waits_for.clear()
        group = channel.Channel.__new__(channel.Channel)
        group.name, group.device, group.capacity, group.operator = f"g{of}", torch.device("cpu"), 1, operator
        group.number, group.peers, group._kept = of, [], []
        assert group.begin(1) == 1
        return list(stream.waits_for)

    monkeypatch.setattr(channel, "_capture", lambda handle: streams[handle].capture)
    monkeypatch.setattr(channel, "_last", {})
    return begin_on


def test_operators_of_two_groups_on_two_streams_come_one_behind_the_other(begin: Callable[..., list[int]]):
    # On two ranks that start them in different orders, each would fill its GPU and wait for the other's.
    first, second = Stream(1), Stream(2)
    assert begin(first, of=0) == []
    assert begin(second, of=1) == [1]
    assert begin(second, of=0) == []
    assert begin(first, of=0) == [2]


def test_operators_of_one_capture_come_one_behind_the_other(begin: Callable[..., list[int]]):
    eager, origin, forked = Stream(1), Stream(2), Stream(3)
    assert begin(eager) == []
    for capture in (7, 8):
        origin.capture = forked.capture = capture
        assert begin(origin) == []  # neither for those outside of the capture, nor for those of the one before
        assert begin(forked) == [2]
        assert begin(forked, of=1) == []
        assert begin(origin, of=1) == [3]
        origin.capture = forked.capture = 0
    assert begin(origin) == [1]  # what was captured did not run
    assert begin(eager) == [2]
    assert {capture for capture, _ in channel._last} == {0, 8}  # captures that have ended are forgotten


def test_captures_of_two_threads_have_an_order_each(begin: Callable[..., list[int]]):
    streams = [Stream(n) for n in range(1, 5)]
    for stream, capture in zip(streams, (7, 8, 7, 8), strict=True):
        stream.capture = capture
    assert [begin(stream) for stream in streams] == [[], [], [1], [2]]
    assert [begin(stream) for stream in streams] == [[3], [4], [1], [2]]


def test_an_operator_does_not_join_a_capture_of_the_stream_that_it_comes_behind(begin: Callable[..., list[int]]):
    warm, other = Stream(1), Stream(2)
    begin(warm)
    warm.capture = 7
    with pytest.raises(RuntimeError, match=r"(?s)group g0: .*being captured\n  want: .*\n  fix: "):
        begin(other)
    assert other.capture == 0
    warm.capture = 0
    assert begin(other) == [1]


def test_each_of_fsdps_collectives_has_an_order_of_its_own(begin: Callable[..., list[int]]):
    gather, reduce = {"of": 1, "operator": FSDP_GATHER}, {"of": 2, "operator": FSDP_REDUCE}
    streams = [Stream(n) for n in range(1, 4)]
    for capture in (0, 7):
        for stream in streams:
            stream.capture = capture
        assert begin(streams[0]) == []
        assert begin(streams[1], **gather) == []  # beside the matmul
        assert begin(streams[2], **reduce) == []
        assert begin(streams[0], **gather) == [2]
        assert begin(streams[0]) == []


def test_slots_that_have_grown_are_another_launch(launches: Launches):
    # Rows of 4 MiB: the two slots lie as far apart, in rows, in a buffer of 15 MiB as in one of 16.
    wide = 1 << 21
    for call, capacity in product((0, 1), (15 << 20, 16 << 20)):
        launches.join(1, 4, capacity)
        if call == 0:
            gather_rows(torch.zeros(1, wide, dtype=BF16), torch.zeros(1, 1, dtype=BF16).expand(wide, 8))
        else:
            scatter_rows([torch.zeros(4, 8, dtype=BF16)], [torch.zeros(8, wide, dtype=BF16)])
    names = [name for name, *_ in launches.by_key]  # type: ignore[misc]
    assert {names.count(name) for name in names} == {2}


def test_a_matrix_is_encoded_as_the_installed_triton_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its function has a third argument since Triton 3.8; the one that it calls has another name since 3.7."""
    asked: list[tuple] = []

    def encode(*args: object) -> str:
        asked.append(args)
        return "map"

    utils = SimpleNamespace(fill_tma_descriptor_tiled=encode, fill_tma_descriptor=encode)
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=utils))
    launcher = object.__new__(_Launcher)
    launcher.metas = [{"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 64], "fp4_padded": False}]
    memory = torch.empty(128, 256, dtype=torch.bfloat16)
    assert launcher._encode(0, Blocks(memory, (128, 256), 256, (64, 64))) == ["map", 128, 256, 256, 1]
    assert asked[0][0] == memory.data_ptr()
