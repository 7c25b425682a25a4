"""Device code in Triton and Gluon, and its launchers: a file for each operator of `titanlite/kernels` with device code.

For the collective matmuls over symmetric memory, read `channel` (memory that ranks share) and `protocol` (signals
between ranks), then `all_gather_matmul` and `matmul_reduce_scatter`. These rules keep a training step from hanging:

1. No kernel that can fill a GPU waits for a kernel that another GPU's host has yet to launch. It starts only after a
   barrier of all ranks, in a single thread block: `protocol.meet`, or the last block of `_publish` or of a push.
2. A kernel makes progress with any number of resident thread blocks. Running blocks claim tickets, and the ticket
   decides whether a block copies or computes. The block's index never does.
3. All ranks of a group issue the same operators in the same order, also across several groups that they share. A
   process runs its operators one after the other. Whether an operator is fused depends only on shapes, dtypes and the
   group, and ranks compare new shapes and dtypes before they share memory.
4. Before its first launch an operator has allocated all its memory and loaded all its kernels (`launch.ready`). Both
   may wait for everything that this GPU runs, so neither may happen between the operator's launches.
5. Every wait has a deadline, after which the kernel names the missing rank and stops. A training run removes the
   deadline, because a GPU's clock goes on while a job is suspended, and relies on the watchdog to end hangs.

`shard_exchange` moves FSDP's shards through such memory by copies. Its only waiting kernels are single thread blocks on
FSDP's own streams. A kernel that fills the GPU meanwhile has passed its barrier (rule 1), so it ends and makes room.
"""
