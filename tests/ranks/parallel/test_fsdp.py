"""FSDP's units, and which of them are freed after forward."""

import copy
import dataclasses
import weakref
from collections.abc import Callable
from functools import partial
from itertools import product
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor

from tests.support.needs import slow
from tests.support.ranks import run_ranks
from tests.support.short_run import assemble, checked
from titanlite.config.recipe_schema import ModelDims
from titanlite.config.schema import Config, Parallelism, Training
from titanlite.config.schema import Model as ModelConfig
from titanlite.device import CPU
from titanlite.float8.weight import local_data
from titanlite.models.find import build_model
from titanlite.models.layers import Embedding, Sequences
from titanlite.models.llama3 import Llama3
from titanlite.observe.peak_memory import GATHERED
from titanlite.parallel import fsdp, placed_units, reduction
from titanlite.parallel.expert import apply_expert_parallel
from titanlite.parallel.fsdp import apply_fsdp, finalize, fsdp_units, memory_of_gathered
from titanlite.parallel.initialise import initialise
from titanlite.parallel.mesh import build_mesh
from titanlite.parallel.reduction import SUMS_OF_REPLICAS, Reduction
from titanlite.recipes import load
from titanlite.training.train import _profiler

SIZES = ModelDims("", 2, dim=64, n_heads=4, n_kv_heads=2, ffn_dim=128, vocab_size=32, rope_theta=1e4, norm_eps=1e-5)
S = 8


def sharded(
    reshard: str,
    tied: bool,
    finalizes: bool = False,
    param: str = "float32",
    reduce: str = "float32",
    change: Callable[[Llama3], object] = lambda _: None,
    replicas: int = 1,
    follow: bool = False,
    by_torch: bool = False,
) -> Llama3:
    """A model with weights; `by_torch`: under torch's FSDP2 as it is, with the same units."""
    config = Config(
        training=Training(seq_len=S, mixed_precision_param=param, mixed_precision_reduce=reduce),  # type: ignore[arg-type]
        parallelism=Parallelism(
            fsdp_reshard_after_forward=reshard,  # type: ignore[arg-type]
            data_parallel_replicate_degree=replicas,
        ),
    )
    with torch.device("meta"):
        model = Llama3(dataclasses.replace(SIZES, tied_embeddings=tied), S)
        change(model)
    mesh = build_mesh(config.parallelism, CPU)
    with patch.object(fsdp, "_place", (lambda *_: None) if by_torch else fsdp._place):
        apply_fsdp(model, config, mesh, follow)
    for module in model.modules() if by_torch else ():
        if isinstance(module, FSDPModule):  # gloo cannot divide while it reduces, and nothing is to be divided
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    model.to_empty(device="cpu")
    model.fill_buffers()
    initialise(model, seed=0)
    if finalizes:
        finalize(model, config, mesh)
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
            with torch.device("meta"):
                whole = Llama3(dataclasses.replace(SIZES, tied_embeddings=tied), S)
            planned = fsdp_units(whole, Config(), build_mesh(Parallelism(), CPU))
            assert [unit.turn for unit in planned] == [0, 1, *([] if tied else [-1, 2]), None]
            assert [unit.is_read_backward for unit in planned].count(False) == (not tied)  # a looked-up table is not

    run_ranks(body, tmp_path, 2)


FREED = {
    1: [("default", set(), False), ("always", {"block", "embedding", "head"}, False)],  # from one rank is a copy
    2: [
        ("default", {"block", "embedding"}, False),
        ("always", {"block", "embedding", "head"}, False),
        ("never", set(), False),
        ("default", {"block"}, True),
        ("always", {"block", "embedding", "head"}, True),
    ],
}


@pytest.mark.parametrize("world", FREED)
def test_what_is_freed_after_forward(world, tmp_path):
    def check(reshard: str, freed: set[str], tied: bool) -> None:
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

    run_ranks(lambda: [check(*case) for case in FREED[world]], tmp_path, world)


def test_an_embedding_that_multiplies_by_its_weight_has_it_in_backward(tmp_path):
    """By a user's class, a forward of its own, or a hook; a lookup needs none (ranks/recorder/test_real_step.py)."""

    def scaled(module: nn.Module, tokens: Tensor) -> Tensor:
        return Embedding.forward(module, tokens) * module.weight.square().mean()  # type: ignore[arg-type, union-attr]

    class Scaled(Embedding):
        forward = scaled  # type: ignore[assignment]

    def of_a_class(model: Llama3) -> None:
        model.tok_embeddings = Scaled(SIZES.vocab_size, SIZES.dim, 1.0)

    def by_its_forward(model: Llama3) -> None:
        model.tok_embeddings.forward = partial(scaled, model.tok_embeddings)  # type: ignore[method-assign]

    def by_a_hook(model: Llama3) -> None:
        model.tok_embeddings.register_forward_hook(lambda module, _, x: x * module.weight.square().mean())

    def body() -> None:
        for scale in (of_a_class, by_its_forward, by_a_hook):
            found = []
            for reshard in ("default", "never"):
                model = sharded(reshard, tied=False, change=scale)
                model(torch.arange(S)).square().sum().backward()
                found.append(local_data(model.tok_embeddings.weight.grad).clone())
            assert torch.equal(*found)
            assert found[0].count_nonzero() > S * SIZES.dim  # of tokens that did not occur, too

    run_ranks(body, tmp_path, 2)


ORDERS = {"skips": (0, 2, 4, 1, 3), "repeats": (0, 1, 0, 1, 2, 2, 0, 4), "parity": (0, 2, 0, 4, 2)}


@pytest.mark.parametrize("together", [0, placed_units.TOGETHER], ids=["apart", "together"])
@pytest.mark.parametrize("order", ORDERS)
def test_blocks_in_any_order_have_the_weights_that_are_never_freed(order, together, tmp_path, monkeypatch):
    """Also if a block is called again, or after one whose weights lie in the same memory; in two steps."""
    monkeypatch.setattr(placed_units, "TOGETHER", together)
    monkeypatch.setattr("tests.ranks.parallel.test_fsdp.SIZES", dataclasses.replace(SIZES, n_layers=5))

    def by_order(model: Llama3) -> None:
        def forward(tokens: Tensor) -> Tensor:
            x, sequences = model.tok_embeddings(tokens), Sequences(S)
            for n in ORDERS[order]:
                x = model.layers[n](x, model.cos, model.sin, sequences)
            return model.output(model.norm(x))

        model.forward = forward  # type: ignore[method-assign, assignment]

    def body() -> None:
        found = []
        for reshard in ("default", "always", "never"):
            model = sharded(reshard, tied=False, finalizes=True, param="bfloat16", change=by_order)
            for n in range(2):
                model.zero_grad(set_to_none=True)
                model(torch.arange(S) + dist.get_rank() + n).float().square().sum().backward()
                with torch.no_grad():
                    for p in model.parameters():
                        p.sub_(0 if p.grad is None else 1e-3 * p.grad)
            found.append({name: local_data(p).clone() for name, p in model.named_parameters()})
        *freed, never = found
        for weights in freed:
            assert all(torch.equal(weights[name], never[name]) for name in never)

    run_ranks(body, tmp_path, 2)


def test_two_blocks_in_one_memory_may_have_inputs_without_gradients(tmp_path, monkeypatch):
    """Autograd does not tell when backward has left them."""
    monkeypatch.setattr("tests.ranks.parallel.test_fsdp.SIZES", dataclasses.replace(SIZES, n_layers=3))

    def branch(model: Llama3) -> None:
        def forward(tokens: Tensor) -> Tensor:
            x, sequences = model.tok_embeddings(tokens), Sequences(S)
            first, second = (model.layers[n](x, model.cos, model.sin, sequences) for n in (0, 2))
            return model.output(model.norm(model.layers[1](first + second, model.cos, model.sin, sequences)))

        model.tok_embeddings.requires_grad_(False)
        model.forward = forward  # type: ignore[method-assign, assignment]

    def body() -> None:
        found = []
        for by_torch in (True, False):
            model = sharded("default", tied=False, change=branch, by_torch=by_torch)
            for n in range(2):
                model(torch.arange(S) + dist.get_rank() + n).square().sum().backward()
            found.append({name: local_data(p.grad) for name, p in model.named_parameters() if p.grad is not None})
        theirs, ours = found
        assert theirs.keys() == ours.keys() == dict(model.named_parameters()).keys() - {"tok_embeddings.weight"}
        assert all(torch.equal(theirs[name], ours[name]) for name in theirs)

    run_ranks(body, tmp_path, 2)


def test_a_profile_counts_the_memory_of_gathered_weights(tmp_path):
    """It is there before the traced steps; buffers would be what is left of memory."""
    asked = checked(tmp_path, 2, [])

    def body() -> None:
        run, folder = assemble(asked), SimpleNamespace(profile=tmp_path)
        session = SimpleNamespace(asked=asked, folder=folder, rank=dist.get_rank(), console=None)
        profiled = _profiler(session, run, 0)._run  # type: ignore[arg-type]
        assert profiled.held[GATHERED] >= profiled.forecast["gathered weights"] > 0

    run_ranks(body, tmp_path, 2)


@pytest.mark.parametrize("reshard", ["default", "always", "never"])
@pytest.mark.parametrize("n_layers", [1, 2, 3])
def test_memory_of_gathered_weights_is_predicted(n_layers: int, reshard: str, tmp_path) -> None:
    """But for the alignment of each weight, and small ones, which are there twice."""
    asked = checked(
        tmp_path, 2, ["--model.n_layers", f"{n_layers}", "--parallelism.fsdp_reshard_after_forward", reshard]
    )

    def body() -> None:
        run = assemble(asked)
        assert run.predicted is not None
        found = sum(memory.nbytes for memory in memory_of_gathered(run.model))
        assert 1 <= found / run.predicted.gathered_weights < 1.02

    run_ranks(body, tmp_path, 2)


TIED, TENSORWISE = "--model.name gemma3 --model.flavor debug", "--float8.recipe tensorwise"


@pytest.mark.parametrize(
    ("world", "which"),
    [
        *((2, ""), (4, TENSORWISE)),
        *slow((2, f"{TENSORWISE} {TIED}"), (4, TIED)),  # with the two above, each pair of two
    ],
)
def test_gathered_weights_are_plain(world: int, which: str, tmp_path):
    flags = ["--training.mixed_precision_param", "bfloat16", "--training.seq_len", "128", *which.split()]
    asked = checked(tmp_path, world, ["--parallelism.tensor_parallel_degree", "2", *flags])

    def body() -> None:
        model, seen = assemble(asked).model, 0
        for _ in range(2):  # gathered for the first time, and again
            for unit in model.modules():
                group = unit._get_fsdp_state()._fsdp_param_group if isinstance(unit, FSDPModule) else None
                if group is not None:
                    unit.unshard()  # type: ignore[operator]
                    for param in group.fsdp_params:
                        weight, at, seen = param.unsharded_param, param._module_info, seen + 1
                        assert not isinstance(weight, DTensor)
                        assert isinstance(param.sharded_param, DTensor)
                        assert len(weight._post_accumulate_grad_hooks or ()) == (world == 2)
                        for module in (at.module, *at.shared_modules):
                            assert getattr(module, at.param_name) is weight
                    unit.reshard()  # type: ignore[operator]
        assert seen >= 2 * len(list(model.parameters()))

    run_ranks(body, tmp_path, world)


def test_a_single_rank_has_the_gradients_that_fsdp_would_make(tmp_path, monkeypatch):
    """Of two micro-steps, and then of another step, bit for bit; and FSDP reduces none itself."""

    def check(param: str, reduce: str, tied: bool, patch: pytest.MonkeyPatch) -> None:
        found: list[list[dict[str, Tensor]]] = []
        for finalizes in (False, True):
            model, steps = sharded("default", tied, finalizes, param, reduce, by_torch=not finalizes), []
            if finalizes:
                patch.setattr(_fsdp_param_group, "foreach_reduce", None)
            for micro_steps in (2, 1):
                model.zero_grad(set_to_none=True)
                for n in range(micro_steps):
                    model(torch.arange(S) + n).float().square().sum().backward()
                steps.append(
                    {name: local_data(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
                )
                for p in model.parameters():
                    assert isinstance(p.grad, DTensor)
                    assert p.grad.placements == p.placements
            found.append(steps)
        for reduced, handed_over in zip(*found, strict=True):
            assert reduced.keys() == handed_over.keys() == dict(model.named_parameters()).keys()
            for name, gradient in reduced.items():
                assert gradient.dtype == torch.float32
                assert gradient.abs().sum() > 0
                assert torch.equal(handed_over[name], gradient), name

    def body() -> None:
        for param, reduce, tied in product(("float32", "bfloat16"), ("float32", "bfloat16"), (False, True)):
            with monkeypatch.context() as patch:
                check(param, reduce, tied, patch)

    run_ranks(body, tmp_path, 1)


def test_a_gradient_comes_when_it_is_whole_and_what_autograd_made_of_it_goes(tmp_path, monkeypatch):
    """Not with the others of its block: those of the feed-forward are there before attention's, none in bfloat16; our
    kernel casts each."""

    def body() -> None:
        model = sharded("default", tied=False, finalizes=True, param="bfloat16")
        masters, seen, cast, kernel = dict(model.named_parameters()), [], [], fsdp.chunk_cat
        monkeypatch.setattr(fsdp, "chunk_cat", lambda *args: (cast.append(args[0][0].dtype), kernel(*args)))

        def look(_module: object, _inputs: object, _outputs: object) -> None:
            seen.append({name for name, p in masters.items() if p.grad is not None})
            kept.update(p for p in weights if p.grad is not None)

        weights: list[torch.nn.Parameter] = []
        kept: set[torch.nn.Parameter] = set()
        layer = model.layers[0]
        layer.register_forward_hook(lambda *_: weights.extend(layer.parameters()))  # those that are gathered
        layer.attention.register_full_backward_hook(look)
        model(torch.arange(S)).float().square().sum().backward()
        late = {f"layers.0.{name}.weight" for name in ("attention.wqkv", "attention_norm")} | {"tok_embeddings.weight"}
        assert late & seen[0] <= {"layers.0.attention.wqkv.weight"}
        assert {f"layers.0.feed_forward.{name}.weight" for name in ("w13", "w2")} <= seen[0]
        assert len(weights) == 6
        assert not kept
        assert cast == [torch.bfloat16] * len(masters)

    run_ranks(body, tmp_path, 1)


def test_two_weights_whose_gradients_autograd_keeps_in_one_memory_have_their_own(tmp_path):
    def add_another(model: Llama3) -> None:
        layer = model.layers[0].feed_forward
        layer.also = copy.deepcopy(layer.w2)
        shape = layer.w2.weight.shape

        def forward(x: Tensor) -> Tensor:
            both = layer.w2.weight.view(4, -1) + layer.also.weight.view(4, -1)
            return F.linear(torch.cat((x, x), -1), both.view(shape))

        layer.forward = forward

    def body() -> None:
        found = []
        for finalizes in (False, True):
            model = sharded("default", tied=False, finalizes=finalizes, change=add_another, by_torch=not finalizes)
            for n in range(2):
                model(torch.arange(S) + n).square().sum().backward()
            found.append([local_data(getattr(model.layers[0].feed_forward, n).weight.grad) for n in ("w2", "also")])
        reduced, handed_over = found
        assert all(torch.equal(*pair) for pair in zip(reduced, handed_over, strict=True))
        assert torch.equal(*handed_over)
        assert handed_over[0].data_ptr() != handed_over[1].data_ptr()

    run_ranks(body, tmp_path, 1)


def freeze(model: Llama3) -> None:
    model.layers[1].feed_forward.w2.weight.requires_grad_(False)
    model.layers[0].requires_grad_(False)


@pytest.mark.parametrize(("world", "replicas"), [(3, 1), (4, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_gradients_are_those_of_torchs_fsdp(world, replicas, reduce, tied, tmp_path):
    """Bit for bit, of two micro-steps, then of one; three ranks pad every weight, and some weights are frozen."""

    def body() -> None:
        for reshard, change in (("default", freeze), ("always", lambda _: None), ("never", lambda _: None)):
            found = []
            for how in ({"by_torch": True}, {}, {"follow": True}):
                if how.get("follow") and reduce != "float32":
                    continue
                model = sharded(reshard, tied, False, "bfloat16", reduce, change, replicas, **how)
                for micro_steps in (1,) if how.get("follow") else (1, 2):
                    model.zero_grad(set_to_none=True)
                    for n in range(micro_steps):
                        model(torch.arange(S) + dist.get_rank() + n).float().square().sum().backward()
                    masters = model.named_parameters()
                    grads = {name: local_data(p.grad).clone() for name, p in masters if p.grad is not None}
                    found.append((how, micro_steps, grads))
            for how, micro_steps, ours in found:
                (theirs,) = [grads for by, n, grads in found if by.get("by_torch") and n == micro_steps]
                assert theirs.keys() == ours.keys() == {n for n, p in model.named_parameters() if p.requires_grad}
                assert all(torch.equal(theirs[name], ours[name]) for name in theirs), (reshard, how, micro_steps)
                assert sum(float(gradient.abs().sum()) for gradient in ours.values()) > 0

    run_ranks(body, tmp_path, world)


def test_what_was_sent_is_freed_before_more_is_sent(tmp_path):
    """Two buffers of a block's gradients do not exist at once."""
    empty, ranks = torch.empty, 2

    def body() -> None:
        made: list[weakref.ref[Tensor]] = []

        def note(*size, **kind) -> Tensor:
            out = empty(*size, **kind)
            if len(size) == 2 and size[0] == ranks:
                assert not any(ref() is not None for ref in made)
                made.append(weakref.ref(out))
            return out

        model = sharded("default", False)
        with patch.object(torch, "empty", note):
            model(torch.arange(S)).sum().backward()
        assert len(made) == 4  # head, two blocks, embedding

    run_ranks(body, tmp_path, ranks)


def test_what_autograd_made_is_freed_before_the_sum_takes_memory(tmp_path):
    """Once it is in the order of ranks."""
    put_in_order, allocate = reduction.chunk_cat, Reduction._allocate

    def body() -> None:
        made: list[weakref.ref[Tensor]] = []

        def note(tensors: list[Tensor], *args) -> None:
            made.extend(map(weakref.ref, tensors))
            put_in_order(tensors, *args)

        def check(self: Reduction, *args) -> Tensor:
            assert not any(ref() is not None for ref in made)
            return allocate(self, *args)

        model = sharded("default", False)
        with patch.object(reduction, "chunk_cat", note), patch.object(Reduction, "_allocate", check):
            model(torch.arange(S)).sum().backward()
        assert len(made) == len(list(model.parameters()))

    run_ranks(body, tmp_path, 2)


@pytest.mark.parametrize("world", [2, *slow(4)])
def test_sums_that_replicas_add_up_are_freed_in_backward(world, tmp_path):
    """Of a second micro-step, whose sums are added to gradients: no more exist at once than the forecast counts."""

    def body() -> None:
        model = sharded("default", False, replicas=2)
        sums: list[weakref.ref[Tensor]] = []
        most, add = 0, reduction._add_to_masters

        def look(params, parts) -> None:
            nonlocal most
            sums.append(weakref.ref(parts[0]._base))
            most = max(most, sum(ref() is not None for ref in sums))
            add(params, parts)

        model(torch.arange(S)).sum().backward()
        with patch.object(reduction, "_add_to_masters", look):
            model(torch.arange(S)).sum().backward()
        assert len(sums) == 4  # head, two blocks, embedding
        assert most == SUMS_OF_REPLICAS

    run_ranks(body, tmp_path, world)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True], ids=["any kernels", "deterministic"])
def test_a_sum_takes_what_the_compute_stream_has_freed_and_nothing_else_is_written_into_it(deterministic):
    """The compute stream is busy when it is allocated; under deterministic kernels torch fills what it allocates."""
    side, size = torch.cuda.Stream(), (1 << 24,)
    torch.cuda.empty_cache()
    freed = torch.zeros(size, device="cuda").data_ptr()
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        torch.cuda._sleep(200_000_000)
        with torch.cuda.stream(side):
            made = Reduction(follows=True)._allocate(*size, torch.float32, torch.device("cuda", 0))
            made.fill_(1)
        torch.cuda.synchronize()
    finally:
        torch.use_deterministic_algorithms(before)
    assert (made.data_ptr(), made.shape, made.dtype) == (freed, size, torch.float32)
    assert bool((made == 1).all())


def test_experts_that_ranks_share_out_are_units_of_their_own(tmp_path) -> None:
    def body() -> None:
        dims, config = load("model", "qwen3_moe-debug"), Parallelism(expert_parallel_degree=2)
        model = build_model(ModelConfig(name="qwen3_moe"), dims, S)
        mesh = build_mesh(config, CPU)
        apply_expert_parallel(model, mesh, S)
        units = fsdp_units(model, Config(parallelism=config), mesh)
        blocks = list(model.layers)  # type: ignore[arg-type]
        assert [unit.modules for unit in units[:2]] == [(b.experts.w13, b.experts.w2) for b in blocks]
        assert [unit.read_by for unit in units] == [*blocks, None, None, None]
        assert [unit.mesh.size() for unit in units] == [2, 2, 4, 4, 4]

    run_ranks(body, tmp_path, 4)
