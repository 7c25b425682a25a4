"""FSDP's units, and which of them are freed after forward."""

import dataclasses
import warnings

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tests.ranks import run_ranks
from titanlite.config.recipe_schema import ModelRecipe
from titanlite.config.schema import Config, Parallelism, Training
from titanlite.float8.weight import local_data
from titanlite.models.llama3 import Llama3
from titanlite.parallel import fsdp
from titanlite.parallel.fsdp import apply_fsdp
from titanlite.parallel.initialise import initialise
from titanlite.parallel.mesh import build_mesh

SIZES = ModelRecipe("", 2, dim=64, n_heads=4, n_kv_heads=2, ffn_dim=128, vocab_size=32, rope_theta=1e4, norm_eps=1e-5)
S = 8


def sharded(reshard: str, tied: bool, in_place: bool = False) -> Llama3:
    config = Config(
        training=Training(seq_len=S, mixed_precision_param="float32"),
        parallelism=Parallelism(fsdp_reshard_after_forward=reshard),  # type: ignore[arg-type]
    )
    with torch.device("meta"):
        model = Llama3(dataclasses.replace(SIZES, tied_embeddings=tied), S)
    apply_fsdp(model, config, build_mesh(config.parallelism, torch.device("cpu")), in_place)
    model.to_empty(device="cpu")
    model.fill_buffers()
    initialise(model, seed=0)
    return model


def units(model: Llama3) -> list[set[str]]:
    """The parameters of each unit."""
    names = {id(module): name for name, module in model.named_modules()}
    states = {module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)}
    groups = [state._fsdp_param_group for state in states if state._fsdp_param_group]
    infos = [[p._module_info for p in group.fsdp_params] for group in groups]
    return [{f"{names[id(info.module)]}.{info.param_name}" for info in group} for group in infos]


def test_each_parameter_is_in_one_unit(tmp_path):
    def body() -> None:
        for tied in (False, True):
            model = sharded("default", tied)
            names = [name for name, _ in model.named_parameters()]
            blocks = [{name for name in names if name.startswith(f"layers.{n}.")} for n in range(2)]
            ends = [{"tok_embeddings.weight", "norm.weight"}]
            if not tied:
                ends = [{"tok_embeddings.weight"}, {"norm.weight", "output.weight"}]
            assert sorted(map(sorted, units(model))) == sorted(map(sorted, blocks + ends))

    run_ranks(body, tmp_path, 2)


@pytest.mark.parametrize(
    ("reshard", "world", "freed", "tied"),
    [
        ("default", 2, {"block", "embedding"}, False),
        ("default", 1, set(), False),  # gathering from one rank is a copy
        ("always", 2, {"block", "embedding", "head"}, False),
        ("always", 1, {"block", "embedding", "head"}, False),
        ("never", 2, set(), False),
        ("default", 2, {"block"}, True),
        ("always", 2, {"block", "embedding", "head"}, True),
    ],
)
def test_what_is_freed_after_forward(reshard, world, freed, tied, tmp_path):
    def body() -> None:
        model = sharded(reshard, tied)
        units = {"block": model.layers[0].feed_forward.w13, "embedding": model.tok_embeddings, "head": model.output}

        def sharded_units() -> set[str]:
            return {name for name, module in units.items() if isinstance(module.weight, DTensor)}

        seen = []
        model.layers[0].attention.register_forward_pre_hook(lambda *_: seen.append(sharded_units()))
        model(torch.arange(S))
        # The head is not gathered before its turn, but where it is the embedding.
        assert [within & {"block", "head"} for within in seen] == [set() if tied else {"head"}]
        assert sharded_units() == freed

    run_ranks(body, tmp_path, world)


@pytest.mark.parametrize("world", [1, 3])
def test_gradients_are_put_together_by_our_kernel(world, tmp_path, monkeypatch):
    def body() -> None:
        model, calls, ours = sharded("default", tied=False), [], []
        kernel = fsdp.chunk_cat
        monkeypatch.setattr(fsdp, "chunk_cat", lambda *args: (ours.append(args[1]), kernel(*args)))

        def count_and_compare(tensors: list[Tensor], dim: int, num_chunks: int, out: Tensor) -> None:
            want = torch.empty_like(out)
            torch._chunk_cat(tensors, dim, num_chunks, out=want)
            fsdp._chunk_cat(tensors, dim, num_chunks, out.fill_(torch.nan))
            assert torch.equal(out, want)
            calls.append((dim, num_chunks))

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is another already
            operators = torch.library.Library("fsdp", "IMPL")
            operators.impl("chunk_cat", count_and_compare, "CPU", allow_override=True)
        model(torch.arange(S)).sum().backward()
        assert calls == [(0, world)] * len(units(model))
        assert ours == [world] * len(calls)

    run_ranks(body, tmp_path, world)
    on_gpus = next(x for x in torch._C._dispatch_dump("fsdp::chunk_cat").splitlines() if x.startswith("CUDA:"))
    assert "titanlite/parallel/fsdp.py" in on_gpus


def test_gradients_in_place_are_those_that_were_put_together(tmp_path):
    def body() -> None:
        put_together: list[Tensor] = []
        kernel = fsdp._chunk_cat

        def note(tensors: list[Tensor], dim: int, num_chunks: int, out: Tensor) -> None:
            kernel(tensors, dim, num_chunks, out)
            put_together.append(out)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is another already
            operators = torch.library.Library("fsdp", "IMPL")
            operators.impl("chunk_cat", note, "CPU", allow_override=True)
        gradients = []
        for in_place in (False, True):
            model = sharded("default", tied=False, in_place=in_place)
            for _ in range(2):  # as in training: the second step's are others
                model.zero_grad(set_to_none=True)
                put_together.clear()
                model(torch.arange(S)).square().sum().backward()
            local = {name: local_data(p.grad) for name, p in model.named_parameters() if p.grad is not None}
            gradients.append({name: grad.clone() for name, grad in local.items()})
            theirs = {grad.untyped_storage().data_ptr() for grad in local.values()}
            mine = {out.untyped_storage().data_ptr() for out in put_together}
            assert len(mine) == len(units(model))
            assert (mine == theirs) if in_place else not mine & theirs
        copied, kept = gradients
        assert all(grad.abs().sum() > 0 for grad in copied.values())
        assert all(torch.equal(kept[name], grad) for name, grad in copied.items())

    run_ranks(body, tmp_path, 1)
