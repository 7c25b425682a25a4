import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from titanlite import recipes
from titanlite.config.recipe_schema import ModelDims
from titanlite.models.gemma3 import Gemma3
from titanlite.models.llama3 import Llama3
from titanlite.observe.memory import memory_gib
from titanlite.observe.peak_flops import (
    dense_bf16_flops,
    mean_attended,
    peak_flops,
    token_flops_of,
    windows_of,
)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H800", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 4090", 165),
        ("AMD Instinct MI300X", 1307),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA RTX A1000 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Quadro RTX 8000", None),
        ("CPU", None),
    ],
)
def test_table_of_data_sheets(name, tflops):
    assert dense_bf16_flops(name) == (None if tflops is None else tflops * 1e12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_unknown_device_is_measured_within_a_moment(dtype):
    start = time.process_time()
    flops, how = peak_flops(torch.device("cpu"), dtype)
    assert time.process_time() - start < 2.0  # 0.3 s is usual
    assert 1e8 < flops < 1e14  # any CPU is faster than a microcontroller and slower than an H200
    assert how.startswith("measured with a ")
    assert str(dtype).removeprefix("torch.") in how


def flops_of_samples(model: nn.Module, dims: ModelDims, seq_len: int) -> float:
    """Of a token where each sample is one document."""
    return token_flops_of(model, dims).total(mean_attended(windows_of(model), np.array([seq_len] * 3)))


@pytest.mark.parametrize("seq_len", [16, 32, 64])
def test_layers_with_a_window_count_what_they_see(seq_len):
    dims = recipes.load("model", "gemma3-debug")  # four layers, the third of which is global; windows of 32
    with torch.device("meta"):
        model = Gemma3(dims, seq_len)
    seen = [min(i + 1, window) for window in (32, 32, seq_len, 32) for i in range(seq_len)]
    matmul = 256 * dims.vocab_size + 4 * (256 * 32 * (8 + 4 + 4 + 8) + 3 * 256 * 512)
    expected = 6 * matmul + 12 * sum(seen) / seq_len * 8 * 32
    # MFU takes half of S for (S + 1) / 2 and leaves out the diagonal's half, in a window as in the whole.
    diagonal = sum(0.5 * min(window, seq_len) / seq_len for window in (32, 32, seq_len, 32))
    assert flops_of_samples(model, dims, seq_len) == expected - 12 * diagonal * 8 * 32


def test_documents_count_what_they_see():
    """Against a count of each token's, in documents below, at and above a window."""
    lengths, windows = [1, 5, 32, 100, 33], [32, 32, 0, 32]
    seen = [
        min(i + 1, window or n) - min(window or n, n) / n / 2 for window in windows for n in lengths for i in range(n)
    ]
    assert mean_attended(windows, np.array(lengths)) == pytest.approx(2 * sum(seen) / sum(lengths), rel=1e-12)


def test_llama_8b_by_hand():
    # 8.03e9 parameters less the embedding (128256·4096) and the norms (65·4096), by Meta's count of 8,030,261,248.
    matmul = 8_030_261_248 - 128_256 * 4096 - 65 * 4096
    dims = recipes.load("model", "llama3-8B")
    with torch.device("meta"):
        assert flops_of_samples(Llama3(dims, 8192), dims, 8192) == 6 * matmul + 32 * 6 * 8192 * 4096


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel's own figures are Linux's")
def test_memory_of_a_cpu_process_is_what_the_kernel_says():
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    said = [int(status[name].split()[0]) / 2**20 for name in ("VmHWM", "VmRSS")]  # in kB
    assert memory_gib(torch.device("cpu")) == pytest.approx(said, rel=0.02)


def test_memory_of_a_gpu_is_what_its_allocator_has_had(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2 * 2**30)
    assert memory_gib(torch.device("cuda")) == (3.0, 2.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_known_gpu_cannot_be_faster_than_its_data_sheet():
    from titanlite.observe import peak_flops as module

    device = torch.device("cuda")
    flops, how = peak_flops(device)
    assert "data sheet" in how
    measured, _ = module._measured_flops(device, torch.bfloat16)
    assert 0.3 * flops < measured <= 1.05 * flops
    reserved, allocated = memory_gib(device)
    assert reserved >= allocated > 0
