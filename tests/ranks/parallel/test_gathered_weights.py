"""Weights that FSDP gathers in float8: blocks keep nothing of them, and a save-list changes no gradient."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tests.support.held_for_backward import Compiled, stream
from tests.support.needs import slow
from tests.support.ranks import run_ranks
from titanlite import recipes
from titanlite.activation_checkpoint.apply import apply_activation_checkpoint
from titanlite.config.recipe_schema import Float8Recipe, ModelDims
from titanlite.config.schema import Config, Float8, Training
from titanlite.device import CPU
from titanlite.float8.convert import apply_float8, precompute_scales
from titanlite.float8.weight import GatheredWeight
from titanlite.forecast.activation_cost import held_without_checkpointing
from titanlite.forecast.traced_run import traced_run
from titanlite.models.layers import RMSNorm, Sequences
from titanlite.models.llama3 import Llama3
from titanlite.parallel.fsdp import apply_fsdp, finalize
from titanlite.parallel.initialise import initialise
from titanlite.parallel.mesh import build_mesh

D, H, K, F, S = 64, 4, 2, 512, 48
SIZES = ModelDims("", 1, D, H, K, F, vocab_size=32, rope_theta=1e4, norm_eps=1e-5)


def trained(name: str, float8: Float8Recipe) -> tuple[list[Tensor], list[Tensor]]:
    """What forward hands to backward that is no weight, and gradients: by the real partitioner, under real FSDP."""
    torch._dynamo.reset()
    with torch.device("meta"):
        model = Llama3(SIZES, S)
    apply_float8(model, replace(float8, min_compute_capability=0), ("output",), CPU, S, shards=1)
    apply_activation_checkpoint(model, recipes.load("activation_checkpoint", name))
    block = model.layers[0]
    graphs = Compiled(block)
    apply_fsdp(model, Config(), build_mesh(Config().parallelism, CPU))
    model.to_empty(device="cpu")
    model.fill_buffers()
    initialise(model, seed=0)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            module.reshard()
    precompute_scales(list(model.parameters()), build_mesh(Config().parallelism, CPU).fsdp)
    x = stream(S, D, torch.bfloat16)
    block(x, model.cos, model.sin, Sequences(model.seq_len)).float().square().sum().backward()
    assert graphs.forward is not None
    _, *held = next(node for node in graphs.forward.graph.nodes if node.op == "output").args[0]
    made = [node.meta["val"] for node in held if node.op != "placeholder" and isinstance(node.meta["val"], Tensor)]
    gradients = [p.grad for p in (x, *block.parameters()) if p.grad is not None]
    assert len(gradients) == 1 + len(list(block.parameters()))
    gradients = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    return [value for value in made if value.dtype != torch.uint8], gradients  # of which is a CPU's random state


@pytest.mark.parametrize("name", slow("rowwise", "tensorwise"))
def test_blocks_keep_activations_alone_and_lists_change_no_gradient(name: str, tmp_path) -> None:
    float8 = recipes.load("float8", name)
    config = Config(training=Training(seq_len=S, local_batch_size=1), float8=Float8(filter_fqns=("output",)))
    (block,) = traced_run(config, SIZES, float8).blocks

    def body() -> None:
        held, gradients = trained("none", float8)
        predicted = held_without_checkpointing(block, compiled=True) - 2 * S * D
        # But for vectors: a maximum or two of each token.
        assert abs(sum(v.untyped_storage().nbytes() for v in held) - predicted) <= 2 * 4 * S
        for listed in ("balanced", "full"):
            held, again = trained(listed, float8)
            assert not [v for v in held if v.dtype == torch.float8_e4m3fn], listed
            for got, truth in zip(again, gradients, strict=True):
                assert torch.equal(got, truth), listed
            assert all(gradient.abs().max() > 0 for gradient in again), listed

    run_ranks(body, tmp_path, world=1)


def test_a_weight_may_have_an_odd_number_of_elements_beside_scales_of_rows(tmp_path) -> None:
    """Small shards are sent together, scales in four bytes, others in two."""
    rowwise = replace(recipes.load("float8", "rowwise"), min_compute_capability=0)

    def body() -> None:
        with torch.device("meta"):
            model = Llama3(SIZES, S)
            model.layers[0].odd = RMSNorm(1, 1e-5)
        apply_float8(model, rowwise, ("output",), CPU, S, shards=2)
        mesh = build_mesh(Config().parallelism, CPU)
        apply_fsdp(model, Config(), mesh)
        model.to_empty(device="cpu")
        initialise(model, seed=0)
        finalize(model, Config(), mesh)
        block = model.layers[0]
        block.unshard()  # type: ignore[operator]
        assert block.odd.weight.tolist() == [1]  # type: ignore[union-attr]
        assert block.attention_norm.weight.tolist() == [1] * D  # type: ignore[union-attr]
        assert all((weight.scale_inv > 0).all() for weight in block.parameters() if isinstance(weight, GatheredWeight))

    run_ranks(body, tmp_path, 2)
