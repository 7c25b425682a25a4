"""Gradients as a reduce-scatter takes them: each rank's parts, behind one another, rounded once; so bit for bit."""

import pytest
import torch
from torch import Tensor

from tests.support.compile_only import accesses, compiling
from tests.support.needs import DEVICES
from titanlite.kernels.chunk_cat import chunk_cat
from titanlite.kernels.device.chunk_cat import BLOCK, launch_chunk_cat
from titanlite.parallel import fsdp  # noqa: F401  takes the place of torch's operator

BF16, F32 = torch.bfloat16, torch.float32
SHAPES = {
    "equal parts": [(16, 96), (8, 1024), (48,), (24, 3, 5)],
    "unequal, or none": [(17, 96), (5, 1024), (3,), (1, 7)],  # 1, 3 and 5 rows leave some of eight ranks without any
}


def truth(tensors: list[Tensor], n_chunks: int, dtype: torch.dtype) -> Tensor:
    rows = [[] for _ in range(n_chunks)]
    for t in tensors:
        length = -(-len(t) // n_chunks)
        whole = torch.cat([t, t.new_zeros(n_chunks * length - len(t), *t.shape[1:])])
        for row, part in zip(rows, whole.split(length), strict=True):
            row.append(part.flatten())
    return torch.stack([torch.cat(row) for row in rows]).to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtypes", [(BF16, F32), (F32, BF16), (BF16, BF16), (F32, F32)])
@pytest.mark.parametrize("n_chunks", [1, 2, 8])
@pytest.mark.parametrize("shapes", SHAPES)
def test_parts(shapes, n_chunks, dtypes, device):
    given, wanted = dtypes
    for seed in range(4):  # a kernel is compiled, made known, and launched by that
        generator = torch.Generator().manual_seed(seed)
        tensors = [torch.randn(shape, generator=generator).to(device, given) for shape in SHAPES[shapes]]
        tensors.append(tensors[0].t())  # strides of a transpose
        want = truth(tensors, n_chunks, wanted)
        out = torch.full_like(want, torch.nan)
        chunk_cat(tensors, n_chunks, out)
        assert torch.equal(out, want)
        as_fsdp_does = torch.full_like(want, torch.nan)
        torch.ops.fsdp.chunk_cat(tensors, dim=0, num_chunks=n_chunks, out=as_fsdp_does)
        assert torch.equal(as_fsdp_does, want)


@pytest.mark.parametrize(("rows", "at_once"), [(4096, True), (4095, False)])
def test_code_for_sm_90_moves_16_bytes_at_once_where_it_may(rows, at_once):
    with compiling() as compiled:
        launch_chunk_cat([torch.zeros(rows, 7, dtype=torch.bfloat16)], 8, torch.zeros(8, 7 * -(-rows // 8)))
    found = accesses(compiled["_chunk_cat"])
    assert bool(found["ld", 4]) == at_once
    assert found["st", 4] == BLOCK // (32 * 4) // 4  # parts are whole either way
