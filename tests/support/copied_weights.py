"""What FSDP took when runs were measured that gathered weights into a buffer and copied them out."""

from itertools import chain
from typing import Any

from titanlite.forecast.memory import MemoryModel
from titanlite.forecast.step_time import StepTimeModel, units


class WithCopies(MemoryModel):
    """Gathered weights were freed; so were the buffers, a unit's and its shard's beside those of the unit before. NCCL
    gathered and reduced the ends. Replicas without shards divided gradients by 1, into new memory."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sent |= {"embedding": self.reduced, "head": self.reduced}
        self.copied = self.reduced

    def _gathered(self) -> tuple[int, int, int, int]:
        embedding, head, experts = self.run.itemsize * self.embedding, self.gathered_head, self.gathered_experts
        block = 0 if self.copy_engines else self.gathered_block  # in symmetric memory
        order = [(0, embedding), (embedding, block), (block, block)]
        order += [] if self.dims.tied_embeddings else [(block, head)]
        of_experts = experts if self.expert_shards > 1 else 0
        buffers = max(before + unit + unit // self.shards for before, unit in order)
        buffers += 2 * of_experts + of_experts // self.expert_shards
        return self.gathered_block + experts, embedding, head, buffers if self.shards > 1 else 0

    def _reducing(self) -> int:
        divided = self.reduced * max(max(self.trained[part]) for part in ("embedding", "head", "block"))
        return super()._reducing() + (divided if self.shards == 1 < self.replicas else 0)


class TimeWithCopies(StepTimeModel):
    def _copied(self) -> float:
        moved = (self.run.itemsize + self.memory.reduced) * self.memory.parameters
        for unit in chain.from_iterable(units(self.memory)):
            cast = (4 * unit.elements + unit.gathered_bytes) / unit.shards
            moved += unit.gathers * (cast + (2 * unit.gathered_bytes if unit.shards > 1 else 0))
        return moved
