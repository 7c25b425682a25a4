"""Build the receipt's entry of float8: the converted layers, and the reasons why others are not converted."""

from torch import nn

from titanlite.config.recipe_schema import Float8Recipe
from titanlite.config.schema import Config
from titanlite.device import Device
from titanlite.float8.convert import Conversion
from titanlite.float8.scope import odd_sizes
from titanlite.models.experts import Router
from titanlite.receipt import Entry, Skipped


def float8_entry(model: nn.Module, done: Conversion, recipe: Float8Recipe, config: Config, device: Device) -> Entry:
    """Return the receipt's entry of a conversion. Layers that a GPU emulates are listed as missed."""
    cost, missed = emulation_cost(done, device), list[Skipped]()
    applied: dict[str, object] = {"layers": len(done.converted), "lowering": cost or done.lowering.name}
    if cost:
        missed = [Skipped(name, cost) for name in done.converted]
    count = len(done.converted) - len(missed)
    odd = odd_sizes(done.skipped, config.float8.filter_fqns)
    missed += [Skipped(name, why) for name, why in odd.items()]
    if fused := sum(_is_fused(model, name) for name in done.converted):
        applied["one operator with their collectives"] = fused
    if done.joined:
        applied["feed-forwards in float8 throughout"] = len(done.joined)
    if done.maxima:
        applied["maxima reduced over tensor-parallel ranks"] = len(done.maxima)
    applied["each"] = {name: _arithmetic(model, name, done) for name in done.converted}
    return Entry(
        "float8",
        config.float8.recipe,
        {**applied, "fsdp_all_gather": _fsdp_gathers(done, recipe)},
        count=count,
        skipped=tuple(
            Skipped(name, why) for name, why in {**done.skipped, **_routers(model)}.items() if name not in odd
        ),
        missed=tuple(missed),
        key="float8.recipe",
    )


def _routers(model: nn.Module) -> dict[str, str]:
    """Return the reason why each router is not converted, by name."""
    routers = (name for name, module in model.named_modules() if isinstance(module, Router))
    return dict.fromkeys(routers, "a router's logits are of float32")


def emulation_cost(done: Conversion, device: Device) -> str | None:
    """Return a text that a GPU emulates the recipe, with the reason; None on a CPU, or if the GPU has kernels."""
    is_emulated = done.lowering.name == "emulated" and device.is_gpu
    return f"emulated: slower than bf16; {done.lowering.why}" if is_emulated else None


def _fsdp_gathers(done: Conversion, recipe: Float8Recipe) -> str:
    """Describe in which precision FSDP gathers the weights."""
    if recipe.fsdp_all_gather != "float8":
        return recipe.fsdp_all_gather
    if done.lowering.why is not None:
        return f"high_precision: {done.lowering.name} products take no weights in float8"
    gathered, whole = "float8", sum(ranks == 1 for ranks in done.gathered.values())
    if whole and whole == len(done.gathered):
        gathered = "nothing: each rank has its weights whole, and casts them once"
    elif whole:  # experts are split over fewer or more ranks than other layers
        gathered = f"float8 of {len(done.gathered) - whole} layers; {whole} each rank has whole, and casts once"
    if done.tied:
        gathered += f"; high_precision of {', '.join(done.tied)}, whose weight the embedding has too"
    return gathered


def _arithmetic(model: nn.Module, name: str, done: Conversion) -> str:
    """Describe the arithmetic of a converted layer."""
    parts = [done.lowering.name]
    if _is_fused(model, name):
        parts.append("one operator with its collectives")
    if name.rpartition(".")[0] in done.joined:
        parts.append("one function with the rest of its feed-forward")
    if name in done.gathered:
        parts.append("weight cast once" if done.gathered[name] == 1 else "weight gathered in float8")
    return ", ".join(parts)


def _is_fused(model: nn.Module, name: str) -> bool:
    return getattr(model.get_submodule(name), "fused", None) is not None
