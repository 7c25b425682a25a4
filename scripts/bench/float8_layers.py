"""Time every float8 recipe on the linear layers of a config, on this GPU.

    python scripts/bench/float8_layers.py --config FILE [--section.key VALUE ...]

A layer is its three matmuls, forward and backward, with all casts, compiled if the config compiles. Collectives are not
part of it, and weights are cast in the layer, also where FSDP would gather them in float8. A layer on which a recipe
gains nothing over the compute dtype is better left alone: which those are is printed as `float8.filter_fqns` of each
recipe.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate

from titanlite import recipes
from titanlite.config.build import show
from titanlite.config.check_mesh import tokens_of_rank
from titanlite.config.recipe_schema import Float8Recipe
from titanlite.device import Device, device_of
from titanlite.errors import TitanliteError
from titanlite.float8.matmul import Float8Matmul, lowering_of
from titanlite.kernels.linear import Matmul
from titanlite.models.find import build_model
from titanlite.models.layers import Linear
from titanlite.preflight.checked_run import CheckedRun, checked_run
from titanlite.sharding.layers import plan_layers
from titanlite.text_table import columns

_WARM_UP, _REPEATS = 5, 20
_CYCLES_PER_SECOND = 2e9  # of a GPU's clock, about

Timer = Callable[[Callable[[], object]], float]
"""Milliseconds of a call, as a median."""


@dataclass(frozen=True)
class Layer:
    """A linear layer as one rank runs it, [M, K] @ [N, K].T; `name` is equal in all blocks."""

    name: str
    M: int
    N: int
    K: int


@dataclass(frozen=True)
class Timed:
    """Milliseconds of one layer, forward and backward: in the compute dtype, and by each recipe that can convert it."""

    layer: Layer
    plain: float
    float8: Mapping[str, float]


def main() -> int:
    """Print the times; return 2 where there is nothing to time."""
    if not torch.cuda.is_available():
        print("float8_layers.py needs a GPU like those that will train: the times of another device say nothing")
        return 2
    try:
        print(measured(checked_run(sys.argv[1:])), end="")
    except TitanliteError as error:
        print(error)
        return 2
    return 0


def measured(checked: CheckedRun) -> str:
    """Time all recipes on this GPU and format the times.

    Args:
        checked: the run; its model, tensor-parallel degree and micro-batch decide the sizes.
    """
    device, config = device_of(torch.device("cuda")), checked.config
    names = dict.fromkeys(recipes.names("float8", config.job.recipe_dirs))
    if checked.float8 is not None:  # it may be a path
        names[config.float8.recipe] = None
    loaded = {name: recipes.load("float8", name, config.job.recipe_dirs) for name in names}
    lowerings = {name: lowering_of(recipe, device) for name, recipe in loaded.items()}
    emulated = {name: how.why for name, how in lowerings.items() if how.name == "emulated" and how.why}
    timed = time_all(
        layers(checked),
        {name: recipe for name, recipe in loaded.items() if name not in emulated},
        getattr(torch, config.training.mixed_precision_param),
        device,
        config.compile.enable,
    )
    return report(timed, device.name, config.training.mixed_precision_param, emulated)


def layers(checked: CheckedRun) -> list[Layer]:
    """Return the linear layers of a block, and the head, as one rank of a run has them."""
    config = checked.config
    model = build_model(config.model, replace(checked.dims, n_layers=1), config.training.seq_len)
    tokens = tokens_of_rank(config)
    ranks = config.parallelism.tensor_parallel_degree
    whole = config.training.local_batch_size * config.training.seq_len
    plan = plan_layers(model, whole, ranks).layers if ranks > 1 else {}
    found = []
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            placement = plan[name].placements["weight"] if plan else Replicate()
            N, K = (n // ranks if placement.is_shard(dim) else n for dim, n in enumerate(module.weight.shape))
            found.append(Layer(name.removeprefix("layers.0."), tokens, N, K))
    return found


def time_all(
    sizes: list[Layer],
    float8: Mapping[str, Float8Recipe],
    dtype: torch.dtype,
    device: Device,
    compile: bool,
    milliseconds: Timer | None = None,
) -> list[Timed]:
    """Time layers by themselves.

    Args:
        sizes: the layers.
        float8: the recipes, by name; the device can multiply as they say.
        dtype: of what is not float8.
        device: to run on.
        compile: compile each layer, as `compile.enable` does.
        milliseconds: the clock; that of the GPU if not given.
    """
    clock, on = milliseconds or median_milliseconds, device.of_tensors
    timed = []
    for layer in sizes:
        convertible = {
            name: Float8Matmul(recipe, device)
            for name, recipe in float8.items()
            if not any(n % recipe.dim_multiple for n in (layer.M, layer.N, layer.K))
        }
        plain = clock(_layer_call(layer, F.linear, dtype, on, compile))
        times = {name: clock(_layer_call(layer, matmul, dtype, on, compile)) for name, matmul in convertible.items()}
        timed.append(Timed(layer, plain, times))
    return timed


def _layer_call(
    layer: Layer, matmul: Matmul, dtype: torch.dtype, device: torch.device, compile: bool
) -> Callable[[], object]:
    """Return a call of forward and backward of one layer on random numbers."""
    rng = torch.Generator(device).manual_seed(0)
    x, w, grad = (
        torch.randn(shape, generator=rng, device=device).to(dtype)
        for shape in ((layer.M, layer.K), (layer.N, layer.K), (layer.M, layer.N))
    )
    x.requires_grad_()
    w.requires_grad_()

    def multiply(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return matmul(x, w)

    if compile:
        torch._dynamo.reset()  # each layer is a graph of its own, and there is a limit to those of one function
        multiply = torch.compile(multiply, fullgraph=True, dynamic=False)

    def step() -> object:
        with torch.autograd.set_multithreading_enabled(False):  # else a new thread warns that it has no context
            return torch.autograd.grad(multiply(x, w), (x, w), grad)

    return step


def median_milliseconds(step: Callable[[], object]) -> float:
    """Time a call on the GPU, after a few to warm up.

    The host is ahead of the GPU in training. Here the GPU sleeps before each call, until all of it has been launched.
    """
    for _ in range(_WARM_UP):
        step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    asleep = int(2 * (time.perf_counter() - began) * _CYCLES_PER_SECOND)
    times = []
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(asleep)
        begin.record()
        step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def slower(timed: list[Timed], recipe: str) -> list[str]:
    """Return the layers on which a recipe takes as long as the compute dtype, or longer."""
    return [t.layer.name for t in timed if recipe in t.float8 and t.float8[recipe] >= t.plain]


def report(timed: list[Timed], device: str, dtype: str, emulated: Mapping[str, str]) -> str:
    """Format times and what follows from them."""
    names = list(dict.fromkeys(name for t in timed for name in t.float8))
    rows = []
    for t in timed:
        cells = [
            f"{t.float8[name]:.3f} {t.plain / t.float8[name]:5.2f}x" if name in t.float8 else "not convertible"
            for name in names
        ]
        sizes = (t.layer.M, t.layer.N, t.layer.K)
        rows.append((t.layer.name, *(f"{n:,}" for n in sizes), f"{t.plain:.3f}", *cells))
    out = [f"{device}; each layer's three matmuls with their casts, milliseconds and gain over {dtype}:\n\n"]
    out.append(columns(("layer", "M", "N", "K", dtype, *names), *rows))
    out += ["\nlayers on which a recipe gains nothing:\n\n"]
    out += [f"  {name:{max(map(len, names))}}  float8.filter_fqns = {show(slower(timed, name))}\n" for name in names]
    out += [f"\nnot timed: {name} is emulated here; {why}" for name, why in emulated.items()]
    return "".join(out).rstrip("\n") + "\n"


if __name__ == "__main__":
    sys.exit(main())
