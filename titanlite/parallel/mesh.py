"""The device mesh: which rank holds which slice.

Three axes, also with a degree of one, so that there is one code path for every layout:

    dp_replicate   replicas of the sharded model (HSDP); gradients are all-reduced over it
    dp_shard       FSDP: parameters, gradients and optimizer state are split over it
    tp             each layer is split over it; innermost, so that its ranks are neighbours on one host

Ranks that share a sequence's tokens (context parallelism) are neighbours in `dp_shard`. Except for attention and data
loading they are data-parallel ranks.

Weights of experts have another mesh of the same processes if expert-parallel or tensor-parallel ranks share them. In
that mesh tensor-parallel ranks, which have different tokens, are separate ranks:

    dp_replicate, dp_shard · tp / ep, ep
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlite.config.schema import Parallelism
from titanlite.device import Device
from titanlite.kernels.collectives import Group
from titanlite.receipt import Entry


@dataclass(frozen=True)
class Mesh:
    """The mesh, and this process's rank along its axes."""

    built_for: Device
    all: DeviceMesh
    fsdp: DeviceMesh  # 1-D, or 2-D with replicas
    tp: DeviceMesh
    dp_size: int  # number of data-parallel ranks: replicas times shards
    dp_rank: int
    tp_size: int
    replicas: int
    experts: DeviceMesh | None = None  # 3-D; None: no experts, or FSDP splits them like other weights
    context: DeviceMesh | None = None  # 1-D, the ranks that share a sequence's tokens; None: no context parallelism
    sharers: DeviceMesh | None = None  # 1-D, ranks that share a micro-batch's tokens; None: no context parallelism

    @property
    def device(self) -> torch.device:
        """Return the device of this process's tensors."""
        return self.built_for.of_tensors

    @property
    def context_group(self) -> Group | None:
        """Return the ranks that share a sequence's tokens; None without context parallelism."""
        return None if self.context is None else _ranks_of(self.context)

    @property
    def micro_batch_group(self) -> Group | None:
        """Return the ranks that share a micro-batch's tokens; None if this rank has all its tokens."""
        return self.tp_group if self.sharers is None else _ranks_of(self.sharers)

    @property
    def data_size(self) -> int:
        """Return the number of ranks, or of context-parallel groups, that read different samples."""
        return self.dp_size // (1 if self.context is None else self.context.size())

    @property
    def data_rank(self) -> int:
        """Return the index of this rank, or of its context-parallel group, among those that read different samples."""
        return self.dp_rank * self.data_size // self.dp_size

    @property
    def expert_group(self) -> Group | None:
        """Return the ranks that share the experts of a layer; None without expert parallelism."""
        if self.experts is None or self.experts["ep"].size() == 1:
            return None
        return _ranks_of(self.experts["ep"])

    @property
    def expert_shards(self) -> DeviceMesh:
        """Return the mesh over which FSDP splits a rank's experts: 1-D, or 2-D with replicas."""
        assert self.experts is not None  # noqa: S101
        return self.experts["dp_replicate", "dp_shard"] if self.replicas > 1 else self.experts["dp_shard"]

    @property
    def tp_group(self) -> Group | None:
        """Return the ranks that share each layer; None without tensor parallelism."""
        return None if self.tp_size == 1 else _ranks_of(self.tp)


def place_of_each_rank(mesh: DeviceMesh) -> list[list[int]]:
    """Return the coordinates of each rank of the job along the axes of `mesh`, a submesh of the job's mesh."""
    root, names = mesh._get_root_mesh(), mesh.mesh_dim_names or ()
    axes = [(root.mesh_dim_names or ()).index(name) for name in names]
    at = [(root.mesh == rank).nonzero()[0].tolist() for rank in range(root.size())]
    return [[place[axis] for axis in axes] for place in at]


def _ranks_of(mesh: DeviceMesh) -> Group:
    """Return the process group of a 1-D mesh."""
    return Group(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())


def mesh_entry(config: Parallelism, mesh: Mesh) -> Entry:
    """Return the receipt's entry of the layout."""
    base = ("data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree")
    keys = [*base, "context_parallel_degree"] if mesh.context_group is not None else [*base]
    keys += ["expert_parallel_degree"] if mesh.expert_group is not None else []
    requested, default = ([getattr(of, key) for key in keys] for of in (config, Parallelism()))
    layout = {"data_parallel_replicate": mesh.replicas, "tensor_parallel": mesh.tp_size}
    layout["data_parallel_shard"] = mesh.data_size // mesh.replicas
    if (context := mesh.context_group) is not None:
        layout["context_parallel"] = context.size
    if (group := mesh.expert_group) is not None:
        layout["expert_parallel"] = group.size
    return Entry("parallelism", requested, layout, count=mesh.dp_size * mesh.tp_size, default=default)


def build_mesh(config: Parallelism, device: Device, has_experts: bool = False) -> Mesh:
    """Arrange all processes of the default group in a mesh. The degrees must fit their number."""
    replicas, tp = config.data_parallel_replicate_degree, config.tensor_parallel_degree
    shards = dist.get_world_size() // (replicas * tp)
    names, kind = ("dp_replicate", "dp_shard", "tp"), device.of_tensors.type
    mesh = init_device_mesh(kind, (replicas, shards, tp), mesh_dim_names=names)
    experts, ep = None, config.expert_parallel_degree
    if ep > 1 or (has_experts and tp > 1):
        names = ("dp_replicate", "dp_shard", "ep")
        experts = init_device_mesh(kind, (replicas, shards * tp // ep, ep), mesh_dim_names=names)
    context, sharers, cp = None, None, config.context_parallel_degree
    if cp > 1:
        names = ("dp_replicate", "dp_shard", "cp", "tp")
        of_tokens = init_device_mesh(kind, (replicas, shards // cp, cp, tp), mesh_dim_names=names)
        context = of_tokens["cp"]
        sharers = of_tokens["cp", "tp"]._flatten() if has_experts and tp > 1 else context
    replicate_rank, shard_rank, _ = mesh.get_coordinate() or (0, 0, 0)
    return Mesh(
        built_for=device,
        all=mesh,
        fsdp=mesh["dp_replicate", "dp_shard"] if replicas > 1 else mesh["dp_shard"],
        tp=mesh["tp"],
        dp_size=replicas * shards,
        dp_rank=replicate_rank * shards + shard_rank,
        tp_size=tp,
        replicas=replicas,
        experts=experts,
        context=context,
        sharers=sharers,
    )
