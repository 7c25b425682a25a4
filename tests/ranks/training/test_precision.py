"""bfloat16 compute with float32 masters and float32 gradient reduction is what runs, in every layout."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.needs import slow
from tests.support.ranks import run_ranks
from tests.support.short_run import assemble, checked, take_steps, train
from titanlite.float8.weight import local_data
from titanlite.models.layers import Embedding, Linear, RMSNorm
from titanlite.models.llama3 import Attention

BF16 = ["--training.mixed_precision_param", "bfloat16"]
TP_2 = ["--parallelism.tensor_parallel_degree", "2"]
LAYOUTS = {
    "one process": (1, []),
    "FSDP 2": (2, []),
    "HSDP 2 × 2": (4, ["--parallelism.data_parallel_replicate_degree", "2"]),
    "TP 2": (2, TP_2),
    "FSDP 2 × TP 2": (4, TP_2),
}


class ReducedDtypes(TorchDispatchMode):
    """Collects the dtypes that summing collectives of tensors (not of a few numbers) work in."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if "reduce" in name:
            tensors = [t for arg in args for t in (arg if isinstance(arg, list) else [arg]) if torch.is_tensor(t)]
            self.dtypes.setdefault(name, set()).update(t.dtype for t in tensors if t.numel() > 8)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", ["one process", "HSDP 2 × 2", "FSDP 2 × TP 2", *slow("FSDP 2", "TP 2")])
def test_dtypes(layout, tmp_path):
    world, flags = LAYOUTS[layout]
    asked = checked(tmp_path, world, [*BF16, *flags])

    def body() -> None:
        run = assemble(asked)
        logits, computed, gradients, tables = set(), {}, set(), set()
        run.model.register_forward_hook(lambda module, args, out: logits.add(out.dtype))
        for name, module in run.model.named_modules():
            if isinstance(module, Linear | RMSNorm | Embedding):
                module.register_forward_pre_hook(
                    lambda module, args, name=name: computed.update({name: module.weight.dtype})
                )
            if isinstance(module, Attention):
                module.register_forward_pre_hook(
                    lambda module, args: tables.update(t.dtype for t in args[1:] if isinstance(t, Tensor))
                )
        norm = run.optimizer.norm
        run.optimizer.norm = lambda grads, _: gradients.update(g.dtype for g in grads.values()) or norm(grads)
        with ReducedDtypes() as reduced:
            take_steps(run, 1)
        assert logits == {torch.bfloat16}
        assert len(computed) == 4 * run.dims.n_layers + 3  # norms of blocks run as `fork` and `add`
        assert set(computed.values()) == {torch.bfloat16}
        assert tables == {torch.float32}  # rounded, slow frequencies would not tell neighbours apart
        assert {local_data(p).dtype for p in run.parameters} == gradients == {torch.float32}
        assert {moment.dtype for moment in run.optimizer.state_tensors()} == {torch.float32}
        # Activations of tensor parallelism are summed in the compute dtype, gradients of parameters in float32.
        activations = reduced.dtypes.pop("reduce_scatter_tensor", set())
        assert activations == ({torch.bfloat16} if run.mesh.tp_size > 1 else set())
        assert set().union(*reduced.dtypes.values()) == ({torch.float32} if world > 1 else set())

    run_ranks(body, tmp_path, world)


@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
def test_gradients_are_summed_in_the_dtype_that_was_asked_for(reduce, tmp_path):
    flags = [*BF16, "--training.mixed_precision_reduce", reduce, "--training.local_batch_size", "2"]
    got = train(tmp_path, 2, flags, steps=1)
    gradient = got.gradients["layers.0.feed_forward.w2.weight"]
    # The sum of two bfloat16 numbers needs more bits than bfloat16 has.
    rounded = torch.equal(gradient, gradient.bfloat16().float())
    assert rounded == (reduce == "bfloat16")
