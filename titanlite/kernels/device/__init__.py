"""Device code in Triton and Gluon, and its launchers: a file for each operator of `titanlite/kernels` that has some.

For the collective matmuls over symmetric memory, read `channel` (the memory that ranks share), `protocol` (how they
signal), then the two stems. These rules keep a step from hanging:

1. No kernel that can fill a GPU waits for what another GPU's host has yet to launch: it starts behind a thread block
   that has met all ranks (`protocol.meet`, or the last block of `_publish` and of the kernels that push).
2. Any number of resident thread blocks makes progress: running blocks claim tickets, which decide who copies and who
   computes, never a block's number.
3. All ranks of a group issue the same operators in the same order, also across several groups that they share; a
   process's operators run one after the other. Whether one is fused depends only on shapes, dtypes and the group, and
   ranks compare new shapes and dtypes before they share memory.
4. Before its first launch an operator has allocated all memory and loaded all kernels (`launch.ready`): either may wait
   for everything that this GPU runs, so neither may happen between launches.
5. Every wait has a deadline, after which the kernel names the missing rank and stops. A run removes the deadline, since
a
   GPU's clock goes on while a job is suspended, and leaves hangs to the watchdog.

`shard_exchange` moves FSDP's shards over the same memory by copies. Its only waiting kernels are single thread blocks,
on FSDP's own streams; a kernel that fills the GPU meanwhile has met its ranks (1), so it ends and leaves them room.
"""
