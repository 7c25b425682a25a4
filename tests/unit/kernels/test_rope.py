"""RoPE against complex multiplication, and the frequency scaling against the rule in words of wavelengths."""

import math

import pytest
import torch
from torch import Tensor

from tests.support.compile_only import accesses, compiling
from tests.support.needs import DEVICES
from tests.support.numbers import F32, normal, within
from titanlite.config.recipe_schema import RopeScaling
from titanlite.kernels.device.rope import launch_rotated_heads_grad
from titanlite.kernels.rope import rope, rope_table, rotated_heads

THETA = 500_000.0
SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_seq_len=8192)


def rotated(x: Tensor, theta: float) -> Tensor:
    """Each pair (x_i, x_{i+E/2}) of head [S, H, E] as a complex number, times e^{i·position·theta^(-2i/E)}."""
    S, _, E = x.shape
    pairs = torch.complex(x[..., : E // 2].double(), x[..., E // 2 :].double())
    angles = torch.tensor([[p * theta ** (-2 * i / E) for i in range(E // 2)] for p in range(S)], dtype=torch.float64)
    turned = pairs * torch.polar(torch.ones_like(angles), angles).to(x.device)[:, None, :]
    return torch.cat((turned.real, turned.imag), dim=-1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_complex_multiplication(dtype, device):
    S, H, E = 33, 3, 16
    x = normal(2 * S, H, E, dtype=dtype, device=device)
    cos, sin = (t.to(device) for t in rope_table(S, E, 1e4, None))
    truth = torch.cat([rotated(sequence, 1e4) for sequence in x.split(S)])  # each sequence starts at position 0
    # One rounding to dtype; before it two float32 products of rounded table entries, and their sum.
    assert within(rope(x, cos, sin), truth, 2 * F32 * torch.hypot(*x.double().chunk(2, -1)).repeat(1, 1, 2))


# Tokens, tokens of a sequence, key/value heads, queries of each, width of a head: that of no power of two, too.
SIZES = [(18, 9, 2, 3, 16), (5, 5, 1, 1, 24), (70, 35, 3, 2, 128), (12, 4, 1, 4, 256), (0, 8, 2, 2, 64)]


def upstream_of(sizes: tuple[int, ...], dtype: torch.dtype, device: str) -> list[Tensor]:
    """Gradients of queries, keys and values."""
    M, _, K, R, E = sizes
    return [normal(M, n, E, seed=i, dtype=dtype, device=device) for i, n in enumerate((K * R, K, K))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_heads_of_a_projection(sizes, dtype, device):
    """Column by column: each head is its part of the projection, rotated or not, and so is its gradient."""
    M, S, K, R, E = sizes
    qkv = normal(M, K * (R + 2) * E, dtype=dtype, device=device)
    cos, sin = (t.to(device) for t in rope_table(S, E, 1e4, None))
    q, k, v = rotated_heads(qkv.requires_grad_(), cos, sin, R)
    upstream = upstream_of(sizes, dtype, device)
    torch.autograd.backward((q, k, v), upstream)
    left = [list(t.unbind(1)) for t in (q, k, v)]
    of = [list(t.unbind(1)) for t in upstream]
    for n, (head, grad) in enumerate(zip(qkv.split(E, dim=1), qkv.grad.split(E, dim=1), strict=True)):
        which = max(n % (R + 2) - R + 1, 0)
        got, back = left[which].pop(0), of[which].pop(0)
        if which < 2:
            head = rope(head[:, None], cos, sin)[:, 0]
            back = rope(back.double()[:, None], cos, -sin)[:, 0]
        assert torch.equal(got, head)
        assert within(grad, back, 4 * F32 * torch.hypot(*back.chunk(2, 1)).repeat(1, 2))
    assert left == of == [[], [], []]


@pytest.mark.parametrize("E", [64, 128])
def test_code_for_sm_90_moves_16_bytes_of_a_head_at_once(E):
    with compiling() as compiled:
        launch_rotated_heads_grad(*upstream_of((8, 4, 2, 2, E), torch.bfloat16, "cpu"), *rope_table(4, E, 1e4, None))
    assert accesses(compiled["_rotated_heads_grad"])["st", 4] == 2 * 3  # halves of a query, a key and a value


def test_late_positions_are_exact():
    S, E = 131_072, 128
    cos, sin = rope_table(S, E, THETA, None)
    for position, i in ((S - 1, 0), (S - 1, 1), (100_003, 7)):
        angle = position * THETA ** (-2 * i / E)
        assert cos[position, i].item() == pytest.approx(math.cos(angle), abs=6e-8)
        assert sin[position, i].item() == pytest.approx(math.sin(angle), abs=6e-8)


def test_the_table_is_made_on_the_cpu():
    """Also while a model is built on the meta device."""
    with torch.device("meta"):
        made = rope_table(4, 8, THETA, None)
    for table, of_cpu in zip(made, rope_table(4, 8, THETA, None), strict=True):
        assert torch.equal(table, of_cpu)


def scaled_frequency(frequency: float, scaling: RopeScaling) -> float:
    """Llama 3.1's rule: by wavelength, long ones slowed, short ones kept, those between interpolated."""
    wavelength = 2 * math.pi / frequency
    longest_kept = scaling.original_seq_len / scaling.high_freq_factor
    shortest_slowed = scaling.original_seq_len / scaling.low_freq_factor
    if wavelength < longest_kept:
        return frequency
    if wavelength > shortest_slowed:
        return frequency / scaling.factor
    smooth = scaling.original_seq_len / wavelength - scaling.low_freq_factor
    smooth /= scaling.high_freq_factor - scaling.low_freq_factor
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_frequency_scaling(factor):
    E = 128
    scaling = RopeScaling(factor, SCALING.low_freq_factor, SCALING.high_freq_factor, SCALING.original_seq_len)
    plain = [THETA ** (-2 * i / E) for i in range(E // 2)]
    wanted = [scaled_frequency(f, scaling) for f in plain]
    kept = sum(w == f for w, f in zip(wanted, plain, strict=True))
    slowed = sum(w == f / factor for w, f in zip(wanted, plain, strict=True))
    assert kept > 10
    assert slowed > 10
    assert kept + slowed < E // 2 - 3  # each branch of the rule is under test
    cos, sin = rope_table(2, E, THETA, scaling)
    angles = torch.tensor(wanted, dtype=torch.float64)  # at position 1
    assert torch.equal(cos[0], torch.ones(E // 2))
    assert cos.dtype == sin.dtype == torch.float32
    torch.testing.assert_close(cos[1].double(), angles.cos(), rtol=1e-7, atol=0)
    torch.testing.assert_close(sin[1].double(), angles.sin(), rtol=1e-7, atol=0)
