"""The drop-ins have torch's signatures, and give what torch's own definitions of its fused operators give.

Operands are -1, 0 and 1 and scales powers of two, so few and so small that every sum is an integer or a half that
bfloat16 holds: each number has one right value, whatever is accumulated and rounded where, and equality is asked for.
"""

import inspect
import subprocess
import sys
from collections.abc import Sequence
from itertools import product

import pytest
import torch
import torch._dynamo  # the first call of an operator imports it: once here, not in every forked rank
import torch.distributed as dist
import torch.distributed._symmetric_memory as upstream
from torch import Tensor

from tests.support.ranks import run_ranks
from titanlite import async_tp
from titanlite.async_tp import drop_in

NAMES = (
    "fused_all_gather_matmul",
    "fused_all_gather_scaled_matmul",
    "fused_matmul_reduce_scatter",
    "fused_scaled_matmul_reduce_scatter",
)
WORLD = 2
E4M3, E5M2, BF16, F16, F32, F64 = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
)


TYPES = {  # of a schema; a dtype is an int in it
    "Tensor": Tensor,
    "Optional[Tensor]": Tensor | None,
    "List[Tensor]": list[Tensor],
    "List[Optional[Tensor]]": list[Tensor | None],
    "int": int,
    "str": str,
    "bool": bool,
    "List[bool]": list[bool],
    "Optional[List[int]]": Sequence[int] | None,
    "Optional[int]": torch.dtype | None,
    "List[Optional[int]]": list[torch.dtype | None],
}


@pytest.mark.parametrize("name", NAMES)
def test_signature(name: str) -> None:
    schema = getattr(torch.ops.symm_mem, name).default._schema
    theirs = [
        (
            a.name,
            TYPES[str(a.type)],
            a.kwarg_only,
            a.default_value if a.has_default_value() else inspect.Parameter.empty,
        )
        for a in schema.arguments
    ]
    signature = inspect.signature(getattr(drop_in, name))
    ours = [(p.name, p.annotation, p.kind is p.KEYWORD_ONLY, p.default) for p in signature.parameters.values()]
    assert ours == theirs
    results = [TYPES[str(r.type)] for r in schema.returns]
    assert signature.return_annotation == (results[0] if len(results) == 1 else tuple[*results])


def test_a_kernel_is_imported_without_them() -> None:
    code = (
        "import sys, titanlite.kernels.layer_norm\n"
        "loaded = {m for m in sys.modules if m.startswith('titanlite')}\n"
        "assert loaded == {'titanlite', 'titanlite.kernels', 'titanlite.kernels.layer_norm'}, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert set(async_tp.__all__) == set(NAMES)


def small(seed: int, *shape: int, dtype: torch.dtype = F64) -> Tensor:
    """-1, 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=generator).to(dtype)


def scales(seed: int, *shape: int) -> Tensor:
    """1/2, 1 and 2."""
    generator = torch.Generator().manual_seed(seed)
    return torch.exp2(torch.randint(-1, 2, shape, generator=generator).float())


def same(got: Tensor | None, wanted: Tensor | None) -> None:
    assert (got is None) == (wanted is None)
    if got is not None and wanted is not None:
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        assert got.is_contiguous()
        assert torch.equal(got.double(), wanted.double())


def group() -> str:
    return dist.group.WORLD.group_name


@pytest.mark.parametrize("ranks", [1, 2])
def test_results_are_memory_of_their_own(ranks: int, tmp_path) -> None:
    def body() -> None:
        A, B, one = small(0, 16, 32, dtype=BF16), small(1, 16, 32, dtype=BF16).t(), torch.ones(())
        A8, B8, biases = A.to(E4M3), B.to(E4M3), [None, torch.zeros(16)]
        output_shape = [16, 16]
        gathered, products = async_tp.fused_all_gather_matmul(A, [B, B], 0, group())
        gathered8, products8 = async_tp.fused_all_gather_scaled_matmul(
            A8, [B8, B8], one, [one, one], 0, group(), biases, [None, None], [F32, BF16], [True, True]
        )
        outs = [gathered, *products, gathered8, *products8]
        for op in ("sum", "avg"):
            outs.append(async_tp.fused_matmul_reduce_scatter(A, B, op, 0, group()))
            outs.append(
                async_tp.fused_scaled_matmul_reduce_scatter(
                    A8, B8, one, one, op, 0, 0, group(), output_shape, bias=biases[1], out_dtype=F32
                )
            )
        memory = [t.untyped_storage().data_ptr() for t in (A, B, A8, B8, one, biases[1], *outs)]
        assert len(set(memory)) == len(memory)

    run_ranks(body, tmp_path, ranks)


def test_gather(tmp_path) -> None:
    shapes = [((6, 8), 0), ((6, 8), 1), ((3, 4, 8), 1), ((3, 4, 8), 0), ((2, 3, 8), -1), ((2, 2, 3, 8), 2)]

    def body() -> None:
        rank = dist.get_rank()
        for dtype, (shape, dim) in product((F64, BF16), shapes):
            K = 8 * WORLD if dim in (-1, len(shape) - 1) else 8
            A, Bs = small(rank, *shape, dtype=dtype), [small(9 + N, K, N, dtype=dtype) for N in (5, 16)]
            for return_A in (True, False):
                got = async_tp.fused_all_gather_matmul(A, Bs, dim, group(), return_A=return_A)
                if dim == len(shape) - 1 or dim == -1:  # torch's definition gathers along dim 0 first
                    every = [small(r, *shape, dtype=dtype) for r in range(WORLD)]
                    G = torch.cat(every, -1)
                    wanted = (G if return_A else None), [G @ B for B in Bs]
                else:
                    wanted = upstream._fused_all_gather_matmul_fallback(A, Bs, dim, group(), return_A=return_A)
                assert isinstance(got, tuple)
                assert isinstance(got[1], list)
                same(got[0], wanted[0])
                for ours, theirs in zip(got[1], wanted[1], strict=True):
                    same(ours, theirs)

    run_ranks(body, tmp_path, WORLD)


def test_scatter(tmp_path) -> None:
    shapes = [((6, 8), 0), ((6, 8), 1), ((3, 4, 8), 1), ((2, 4, 8), 0), ((3, 4, 8), 2), ((2, 2, 4, 8), 2)]

    def body() -> None:
        rank = dist.get_rank()
        for dtype, (shape, dim) in product((F64, BF16, F16), shapes):
            A, B = small(rank, *shape, dtype=dtype), small(7 + rank, 8, 16, dtype=dtype)
            wanted = upstream._fused_matmul_reduce_scatter_fallback(A, B, "sum", dim, group())
            same(async_tp.fused_matmul_reduce_scatter(A, B, "sum", dim, group()), wanted)
            # gloo has no average; that of two ranks is half the sum.
            same(async_tp.fused_matmul_reduce_scatter(A, B, "avg", dim, group()), wanted / WORLD)

    run_ranks(body, tmp_path, WORLD)


def test_average_is_rounded_once_and_does_not_overflow(tmp_path) -> None:
    def body() -> None:
        large = torch.full((WORLD * 3, 1), 40000.0, dtype=F16)  # the sum of two is more than float16 holds
        one = torch.ones(1, 1, dtype=F16)
        dim = 0
        out = async_tp.fused_matmul_reduce_scatter(large, one, "avg", dim, group())
        assert torch.equal(out, large[: out.shape[0]])
        third = torch.full((WORLD * 3, 1), 1.0, dtype=BF16)
        thirds = async_tp.fused_matmul_reduce_scatter(third * (dist.get_rank() == 0), third[:1], "avg", 0, group())
        assert (thirds == torch.tensor(1 / dist.get_world_size(), dtype=BF16)).all()

    run_ranks(body, tmp_path / "2", 2)
    run_ranks(body, tmp_path / "3", 3)


def float8_product(A: Tensor, B: Tensor, A_scale: Tensor, B_scale: Tensor, bias: Tensor | None) -> Tensor:
    """In float64."""
    out = (A.double() * A_scale.double()) @ (B.double() * B_scale.double())
    return out if bias is None else out + bias.double()


def test_scaled_gather(tmp_path) -> None:
    shapes = [((16, 32), 0), ((3, 8, 32), 1), ((2, 8, 32), 0), ((2, 3, 8, 32), 2)]

    def body() -> None:
        rank = dist.get_rank()
        for scaled, (shape, dim) in product(("tensor", "row", "replicated"), shapes):
            by_row = scaled != "tensor"
            every = [small(r, *shape, dtype=E4M3) for r in range(WORLD)]
            rows = [scales(r, *shape[:-1], 1) if by_row else torch.tensor(0.5) for r in range(WORLD)]
            G, whole = torch.cat(every, dim), torch.cat(rows, dim) if by_row else rows[0]
            Bs = [small(20 + N, N, 32, dtype=E5M2 if N == 48 else E4M3).t() for N in (16, 48)]
            B_scales = [scales(N, 1, N) if by_row else torch.tensor(2.0) for N in (16, 48)]
            A_scale = {"tensor": rows[rank], "row": rows[rank], "replicated": whole}[scaled]
            fine = small(5, 48, dtype=F32) + 2**-12  # bfloat16 would round it away
            for biases, dtypes in [([None, None], [BF16, BF16]), ([None, fine], [BF16, F32])]:
                given = (every[rank], Bs, A_scale, B_scales, dim, group(), biases, [None] * 2, dtypes, [True, False])
                A, products = async_tp.fused_all_gather_scaled_matmul(*given)
                same(A, G)
                for i, got in enumerate(products):
                    truth = float8_product(G, Bs[i], whole, B_scales[i], biases[i])
                    same(got, truth.to(dtypes[i]))

    run_ranks(body, tmp_path, WORLD)


def test_scaled_scatter(tmp_path) -> None:
    cases = [
        *(((16,), 0, False), ((3, 8), 1, False), ((2, 8), 2, False)),
        *(((3, 8), 1, True), ((4, 6), 0, True), ((2, 2, 8), 2, True)),  # of the first torch's GPU code has other rows
    ]

    def body() -> None:
        rank = dist.get_rank()
        for by_row, (rows, dim, flat) in product((False, True), cases):
            As = [small(r, *rows, 32, dtype=E4M3) for r in range(WORLD)]
            Bs = [small(30 + r, 16, 32, dtype=E4M3).t() for r in range(WORLD)]
            A_scales = [scales(r, *rows, 1) if by_row else torch.tensor(0.5) for r in range(WORLD)]
            B_scales = [scales(5 + r, 1, 16) if by_row else torch.tensor(2.0) for r in range(WORLD)]
            for with_bias in (False, True):
                biases = [small(40 + r, 16, dtype=BF16) if with_bias else None for r in range(WORLD)]
                whole = sum(map(float8_product, As, Bs, A_scales, B_scales, biases))
                truth = whole.chunk(WORLD, dim)[rank].contiguous().to(BF16)
                A, A_scale = As[rank], A_scales[rank]
                if flat:
                    A, A_scale = A.flatten(0, -2), A_scale.flatten(0, -2) if by_row else A_scale
                after = 0 if flat else min(dim, A.ndim - 1)
                operands = (A, Bs[rank], A_scale, B_scales[rank])
                shape = [*rows, 16]
                options = {"bias": biases[rank], "out_dtype": BF16}
                out = async_tp.fused_scaled_matmul_reduce_scatter(
                    *operands, "sum", dim, after, group(), shape, **options
                )
                same(out, truth)
                assert shape == [*rows, 16]  # torch's GPU code changes its argument
                average = async_tp.fused_scaled_matmul_reduce_scatter(
                    *operands, "avg", dim, after, group(), shape if flat else None, **options
                )
                same(average, (truth / WORLD).to(BF16))
                if not by_row and not with_bias:
                    theirs = upstream._fused_scaled_matmul_reduce_scatter_fallback(
                        *operands, "sum", dim, after, group(), list(shape), **options
                    )
                    same(out, theirs)

    run_ranks(body, tmp_path, WORLD)


def test_gradients(tmp_path) -> None:
    def body() -> None:
        rank = dist.get_rank()
        A, B = small(rank, 3, 4, 8).requires_grad_(), small(9, 8, 5).requires_grad_()
        _, (product,) = async_tp.fused_all_gather_matmul(A, [B], 1, group())
        async_tp.fused_matmul_reduce_scatter(product, small(rank, 5, 4), "avg", 1, group()).sum().backward()
        weights = sum(small(r, 5, 4).sum(1) for r in range(WORLD)) / WORLD
        assert torch.equal(A.grad, (B.detach() @ weights).expand(3, 4, 8))

    run_ranks(body, tmp_path, WORLD)


REFUSED = {
    "result scale": ({"result_scale": torch.ones(())}, "result_scale = a tensor", "None"),
    "float8 result": ({"out_dtype": E4M3}, "out_dtype = torch.float8_e4m3fn", "bfloat16"),
    "torch's default result": ({"out_dtype": None}, "out_dtype = None, which torch reads as A's float8", "bfloat16"),
    "reduction": ({"reduce_op": "max"}, "reduce_op = 'max'", "sum or avg"),
    "dim": ({"orig_scatter_dim": 3}, "orig_scatter_dim = 3", "0 to 2"),
    "uneven": ({"output_shape": [8, 3, 16]}, "orig_scatter_dim = 1", "multiple of 2 ranks"),
    "shape": ({"output_shape": [3, 8, 8]}, r"output_shape = \[3, 8, 8\]", "24 rows in all, and 16 columns"),
    "dim after": ({"scatter_dim_after_maybe_reshape": 2}, "maybe_reshape = 2", "0 to 1"),
    "scale": ({"A_scale": torch.ones(24)}, r"A_scale = shape \[24\]", r"\[24, 1\]"),
    "dtype": ({"A": torch.ones(24, 32)}, "A, B = torch.float32", "float8_e4m3fn"),
}


def test_what_cannot_be_done_is_said(tmp_path) -> None:
    def body() -> None:
        for changed, saw, want in REFUSED.values():
            given = {
                "A": small(0, 24, 32, dtype=E4M3),
                "B": small(1, 16, 32, dtype=E4M3).t(),
                "A_scale": torch.ones(()),
                "B_scale": torch.ones(()),
                "reduce_op": "sum",
                "orig_scatter_dim": 1,
                "scatter_dim_after_maybe_reshape": 0,
                "group_name": group(),
                "output_shape": [3, 8, 16],
                "out_dtype": BF16,
            }
            with pytest.raises(
                ValueError, match=rf"(?s)^fused_scaled_matmul_reduce_scatter: .*{saw}.*want: .*{want}.*fix: "
            ):
                async_tp.fused_scaled_matmul_reduce_scatter(**(given | changed))
        A, B, one = small(0, 8, 32, dtype=E4M3), small(1, 16, 32, dtype=E4M3).t(), torch.ones(())
        with pytest.raises(ValueError, match=r"(?s)A_scale = shape \[3, 1\].*want: .*\[8, 1\].*\[16, 1\].*fix: "):
            async_tp.fused_all_gather_scaled_matmul(
                A, [B], torch.ones(3, 1), [one], 0, group(), [None], [None], [BF16], [True]
            )
        with pytest.raises(ValueError, match=r"(?s)biases = 0 entries.*want: 1, one for each of Bs.*fix: "):
            async_tp.fused_all_gather_scaled_matmul(A, [B], one, [one], 0, group(), [], [None], [BF16], [True])
        with pytest.raises(ValueError, match=r"dim 5 of a shard with 2 dims"):
            async_tp.fused_all_gather_matmul(A, [B], 5, group())

    run_ranks(body, tmp_path, WORLD)


def test_compiled_in_one_graph(tmp_path):
    def body() -> None:
        group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        torch.manual_seed(dist.get_rank())
        a, b, one = torch.randn(4, 8), torch.randn(8, 6), torch.ones(())
        a8, b8, bf16 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), torch.bfloat16
        for call in (
            lambda: async_tp.fused_all_gather_matmul(a, [b], 0, group),
            lambda: async_tp.fused_matmul_reduce_scatter(a, b, "avg", 1, group),
            lambda: async_tp.fused_all_gather_scaled_matmul(
                a8, [b8], one, [one], 0, group, [None], [None], [bf16], [False]
            ),
            lambda: async_tp.fused_scaled_matmul_reduce_scatter(
                a8, b8, one, one, "sum", 0, 0, group, None, None, None, bf16
            ),
        ):
            torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="aot_eager")(), call())

    run_ranks(body, tmp_path)
