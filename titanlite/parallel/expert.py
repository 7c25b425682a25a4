"""Expert parallelism: each rank of a group has some experts of every layer, and receives the tokens of all ranks.

A group consists of neighbours among the ranks that shard parameters. Tensor-parallel ranks are separate ranks in it,
with their own tokens. Weights of experts are DTensors, split over the group by rows, which are in the order of the
experts. FSDP splits a rank's experts further, over the ranks of other groups, as separate units (`fsdp.py`). The rest
of the model is sharded over all ranks.
"""

from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from titanlite.errors import Problem, ShardingError, describe
from titanlite.kernels.expert_windows import window_rows
from titanlite.kernels.experts import PlainExperts
from titanlite.kernels.token_exchange import no_token_exchange
from titanlite.models.experts import MixtureOfExperts
from titanlite.models.layers import runs_forward_of
from titanlite.parallel.mesh import Mesh
from titanlite.receipt import Entry, Skipped

KEY = "parallelism.expert_parallel_degree"


def experts_to_share(model: nn.Module, degree: int) -> dict[str, MixtureOfExperts]:
    """Return a model's mixtures of experts by name, after a check that `degree` ranks can share the experts of each.

    Raises:
        ShardingError: the model has no experts, their number is not a multiple of `degree`, or a user's class changes
            their computation.
    """
    own, want, fix = "one of the model's own", "titanlite's, which ranks can share", "expert_parallel_degree = 1"
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MixtureOfExperts)}
    wrong = [] if layers or degree == 1 else [Problem(KEY, str(degree), "1: the model has no experts", fix)]
    for name, layer in layers.items():
        if layer.of.n_experts % degree:
            multiple = f"a multiple of {KEY} = {degree}"
            wrong.append(Problem(name, f"{layer.of.n_experts} experts", multiple, "another degree"))
        if degree > 1 and not isinstance(layer.compute, PlainExperts):
            wrong.append(Problem(f"{name}.compute", own, want, fix))
        if not runs_forward_of(layer, MixtureOfExperts):
            wrong.append(Problem(f"{name}.forward", own, want, f"{fix}, tensor_parallel_degree = 1"))
    if wrong:
        raise ShardingError(describe("expert parallelism", wrong))
    return layers


def apply_expert_parallel(model: nn.Module, mesh: Mesh, tokens: int) -> Entry:
    """Share the experts of each layer over the ranks of an expert group, in place; return the receipt's entry.

    Args:
        model: on the meta device, not sharded yet.
        mesh: with expert groups.
        tokens: number of tokens of a rank's micro-batch.

    Raises:
        ShardingError: see `experts_to_share`.
    """
    group = mesh.expert_group
    assert mesh.experts is not None  # noqa: S101
    layers = experts_to_share(model, group.size if group else 1)
    if group is None:
        own = {"layers": len(layers), "tokens": "each rank's own", "weights": "split over all ranks of a replica"}
        return Entry("expert_parallel", 1, own, count=len(layers), key=KEY)
    compute = PlainExperts(group)
    for layer in layers.values():
        layer.compute = compute
        for projection in (layer.w13, layer.w2):
            part = distribute_tensor(projection.weight.data, mesh.experts["ep"], [Shard(0)])
            projection.weight = nn.Parameter(part)
    each = [*dict.fromkeys(layer.of.n_experts // group.size for layer in layers.values())]
    on = mesh.built_for
    why = no_token_exchange(group.name, on) if on.is_gpu else "there are no GPUs"
    missed = (Skipped("exchange of tokens", why),) if on.is_gpu and why else ()
    of_all = tokens * group.size
    rows = [
        window_rows(group.size, of_all, layer.of.top_k, layer.of.n_experts // group.size) for layer in layers.values()
    ]
    applied = {
        "layers": len(layers),
        "experts of a rank": each[0] if len(each) == 1 else each,
        "tokens travel by": "copy engines, and stores to peers" if why is None else f"collectives: {why}",
        "rows of a window": max(rows),
        "dropped": 0,
    }
    return Entry("expert_parallel", group.size, applied, count=len(layers), missed=missed, key=KEY)
