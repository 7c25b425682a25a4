"""Products with scales by block: the bits of their definition, and bytes kept where the definition keeps the input."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite import recipes
from titanlite.config.recipe_schema import Float8Recipe
from titanlite.float8.blocks import BlockScaledFloat8
from titanlite.float8.emulated import EmulatedFloat8
from titanlite.kernels.linear import Matmul

M, N, K = 384, 256, 128

VARIANTS = {
    "as shipped": "",
    "powers of two": 'scale_rounding = "pow2_floor"\n',
    "gradients in e5m2": '[grad_output]\ndtype = "e5m2"\n',
    "weights by row": '[weight]\noutput = "1x128"\ngrad_input = "1x128"\n',
    "square blocks of the input, turned": '[input]\ngrad_weight = "128x128"\n',
    "weight gradient in high precision": '[input]\ngrad_weight = "none"\n[grad_output]\ngrad_weight = "none"\n',
    "output alone": '[input]\ngrad_weight = "none"\n[weight]\ngrad_input = "none"\n'
    '[grad_output]\ngrad_input = "none"\ngrad_weight = "none"\n',
}


@pytest.fixture(params=VARIANTS)
def recipe(request, tmp_path) -> Float8Recipe:
    (tmp_path / "mine.toml").write_text(f'extends = "blockwise"\n{VARIANTS[request.param]}')
    return recipes.load("float8", str(tmp_path / "mine.toml"))


def operands() -> tuple[Tensor, Tensor, Tensor]:
    """Input, weight and the output's gradient, with loud rows and columns."""
    rng = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(shape, generator=rng) for shape in ((M, K), (N, K), (M, N)))
    x[::7] *= 300
    x[:, 5] *= 50
    grad[:, ::9] *= 1e-3
    return x.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_(), grad.bfloat16()


def run(matmul: Matmul) -> tuple[list[Tensor], list[Tensor]]:
    """The output and both gradients; and what was kept between forward and backward."""
    x, weight, grad = operands()
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = matmul(x, weight)
    return [out, *torch.autograd.grad(out, (x, weight), grad)], kept


def test_the_bits_are_the_definitions(recipe):
    (got, kept), (wanted, _) = run(BlockScaledFloat8(recipe)), run(EmulatedFloat8(recipe))
    for mine, its in zip(got, wanted, strict=True):
        assert torch.equal(mine, its)
    held = {t.dtype for t in kept if t.shape != (N, K)}  # beside the weight
    assert held == ({torch.bfloat16} if recipe.input.grad_weight == "none" else {torch.float8_e4m3fn, torch.float32})


class Calls(TorchDispatchMode):
    """Counts titanlite's operators, and what they cast: rows, and rows of the transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.products, self.casts = 0, list[tuple[int, int]]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.products += func is torch.ops.titanlite.block_scaled_matmul.default
        if func is torch.ops.titanlite.cast_blocks.default:
            self.casts.append(args[1:3])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("frozen", "casts"), [("input", [(0, 1)]), ("weight", [(1, 0), (0, 128)]), (None, [(1, 1), (0, 128)])]
)
def test_a_gradient_that_nobody_wants_is_not_computed(frozen, casts):
    x, weight, grad = operands()
    wanted = [t for name, t in (("input", x), ("weight", weight)) if name != frozen]
    for t in (x, weight):
        t.requires_grad_(any(t is each for each in wanted))
    out = BlockScaledFloat8(recipes.load("float8", "blockwise"))(x, weight)
    with Calls() as calls:
        torch.autograd.grad(out, wanted, grad)
    assert calls.products == len(wanted)
    assert calls.casts == casts
