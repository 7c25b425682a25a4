"""Device code in Triton and Gluon, and what launches it: a file for each operator of `titanlite/kernels` that has some.

Of the collective matmuls, over symmetric memory: `channel` (the memory that ranks share), `protocol` (how they signal),
then the two stems. The rules that keep a step of theirs from hanging:

1. No kernel that can fill a GPU waits for what another GPU's host has yet to launch: it starts behind a thread block
   that has met all ranks (`protocol.meet`, or the last block of `_publish` and of the kernels that push).
2. Any number of resident thread blocks makes progress: who copies and who computes is decided by tickets that running
   blocks claim, never by a block's number.
3. All ranks of a group issue the same operators in the same order, and where they share several groups, those of all of
   them; a process's operators run one after the other. Whether one is fused depends on shapes, dtypes and the group
   alone, and ranks compare shapes and dtypes that are new to them before they share memory.
4. What an operator allocates is allocated before its first launch, and its kernels are loaded (`launch.ready`), so that
   nothing blocks between them: both may wait for all that this GPU runs.
5. Every wait has a deadline, after which the kernel says who did not come and stops. A run takes it away, for a GPU's
   clock goes on while a job is suspended: there the watchdog ends what hangs.

`shard_exchange` moves FSDP's shards over the same memory by copies. Its only kernels that wait are single thread
blocks, on FSDP's own streams; who fills a GPU meanwhile has met its ranks (1), so it ends and leaves them room.
"""
