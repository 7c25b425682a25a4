"""Weights that FSDP gathers in float8: whole compiled blocks keep copies of some, which the predicted peak counts."""

from dataclasses import replace

import torch
import torchao.float8.float8_linear  # noqa: F401  # every rank would import it for itself
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from tests.parallel.held_for_backward import Compiled, stream
from tests.ranks import run_ranks
from titanlite import recipes
from titanlite.config.recipe_schema import Float8Recipe, ModelRecipe
from titanlite.config.schema import Config, Float8, Training
from titanlite.float8.convert import apply_float8, precompute_scales
from titanlite.models.llama3 import Llama3
from titanlite.parallel.activation_bytes import block_prices
from titanlite.parallel.activation_checkpoint import apply_activation_checkpoint
from titanlite.parallel.fsdp import apply_fsdp
from titanlite.parallel.initialise import initialise
from titanlite.parallel.memory import MemoryModel
from titanlite.parallel.mesh import build_mesh

D, H, K, F, S = 64, 4, 2, 512, 48
SIZES = ModelRecipe("", 1, D, H, K, F, vocab_size=32, rope_theta=1e4, norm_eps=1e-5)
CPU = torch.device("cpu")


def copied_bytes(name: str, float8: Float8Recipe) -> int:
    """What forward hands to backward in float8 that is not an input: by the real partitioner, under real FSDP."""
    torch._dynamo.reset()
    with torch.device("meta"):
        model = Llama3(SIZES, S)
    apply_float8(model, replace(float8, min_compute_capability=0), ("output",), CPU, S, shards=1)
    apply_activation_checkpoint(model, recipes.load("activation_checkpoint", name))
    graphs = Compiled(model.layers[0])
    apply_fsdp(model, Config(), build_mesh(Config().parallelism, CPU))
    model.to_empty(device=CPU)
    model.fill_buffers()
    initialise(model, seed=0)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            module.reshard()
    precompute_scales(list(model.parameters()), build_mesh(Config().parallelism, CPU).fsdp)
    block = model.layers[0]
    block(stream(S, D, torch.bfloat16), model.cos, model.sin).sum().backward()
    assert graphs.forward is not None
    _, *held = next(node for node in graphs.forward.graph.nodes if node.op == "output").args[0]
    values = [node.meta["val"] for node in held if node.op != "placeholder"]
    return sum(v.nbytes for v in values if isinstance(v, Tensor) and v.dtype == torch.float8_e4m3fn)


def predicted_bytes(name: str, float8: Float8Recipe) -> int:
    """Gathered weights of a list, less those of a list that keeps no copies."""
    config = replace(Config(), training=Training(seq_len=S), float8=Float8("tensorwise"))
    memory = MemoryModel(config, SIZES, float8, 1)
    listed, least = (
        memory.peak(block_prices(SIZES, memory.layout, recipes.load("activation_checkpoint", of)))
        for of in (name, "full")
    )
    return listed.gathered_weights - least.gathered_weights


def test_copies_of_weights_gathered_in_float8(tmp_path) -> None:
    float8 = recipes.load("float8", "tensorwise")

    def body() -> None:
        for name, kept in (("none", 3 * F * D), ("balanced", 0)):
            assert copied_bytes(name, float8) == predicted_bytes(name, float8) == kept, name

    run_ranks(body, tmp_path, world=1)
