"""Keep the keys and values of earlier tokens, so that each new token is computed alone.

A batch has B rows of one prompt each. All rows get the same number of new tokens; a shorter prompt is padded at its
end. Padding is never seen: a token sees the keys up to its own position, and later tokens of its row overwrite the keys
of padding before they can see them.
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from titanlite.errors import ConfigError
from titanlite.models.layers import CausalAttention, Sequences

_BUCKET = 256  # the attended range grows by this many positions, so that few shapes occur


class KeyMemory:
    """Keys and values of all layers.

    Args:
        rows: B.
        capacity: positions of a row.
    """

    def __init__(self, rows: int, capacity: int) -> None:
        self.rows, self.capacity = rows, capacity
        self._of_layer: dict[CausalAttention, tuple[Tensor, Tensor]] = {}

    def keep(
        self, layer: CausalAttention, row: Tensor, at: Tensor, k: Tensor, v: Tensor, end: int
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, n, K, E] into `row` [B, 1] at positions `at` [B, n]; return those below `end`."""
        kept = self._of_layer.get(layer)
        if kept is None:
            shape = self.rows, self.capacity, *k.shape[2:]
            kept = self._of_layer[layer] = k.new_zeros(shape), v.new_zeros(shape)
        for memory, new in zip(kept, (k, v), strict=True):
            memory[row, at] = new
        return kept[0][:, :end], kept[1][:, :end]


@dataclass(frozen=True, kw_only=True)
class NewTokens(Sequences):
    """The next n tokens of each of B rows, M = B·n, which see the kept keys of their row.

    Attributes:
        at: [B, n] int64, each token's position in its row; B may be more than the rows of `memory`.
        end: number of positions up to and including the last one of `at`, rounded up; on the host.
        memory: keys and values of earlier tokens.
    """

    at: Tensor
    end: int
    memory: KeyMemory
    _masks: dict[tuple[int, int], Tensor] = field(default_factory=dict[tuple[int, int], Tensor])

    @classmethod
    def after(cls, at: Tensor, last: int, memory: KeyMemory) -> "NewTokens":
        """Describe tokens at positions `at`, of which `last` is the largest."""
        end = min(memory.capacity, -(-(last + 1) // _BUCKET) * _BUCKET)
        return cls(longest=memory.capacity, at=at, end=end, memory=memory)

    def positions(self, tokens: Tensor) -> Tensor:
        """See `Sequences.positions`."""
        return self.at.flatten()

    def begin(self, table: Tensor) -> Tensor:
        """See `Sequences.begin`."""
        return table[self.at.flatten()]

    def rows(self, x: Tensor) -> Tensor:
        """Raise ConfigError: attention within rows does not see kept keys."""
        saw, want = "called while text is generated", "self.attend(q, k, v, sequences) of [M, heads, E]"
        raise ConfigError.of("attention", "sequences.rows", saw, want, "as in titanlite/models/llama3.py")

    def attend(self, layer: CausalAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Sequences.attend`. The queries that share a key are rows of one matrix: no key is copied.

        Rows after those of the memory pad the batch: they attend to nothing, and their results are 0.
        """
        (rows, n), K, is_padded = self._at.shape, k.shape[1], len(self.at) > self.memory.rows
        new_q, new_k, new_v = (x[: rows * n].unflatten(0, (rows, n)) for x in (q, k, v))
        keys, values = self.memory.keep(layer, self._row, self._at, new_k, new_v, self.end)
        heads = new_q.unflatten(2, (K, -1)).permute(0, 2, 3, 1, 4)  # [B, K, R, n, E]
        mask = self._seen_by(layer.window_in(self.longest), heads.shape[2])
        out = F.scaled_dot_product_attention(heads.flatten(2, 3), keys.transpose(1, 2), values.transpose(1, 2), mask)
        out = out.unflatten(2, (-1, n)).permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)
        return F.pad(out, (0, 0, 0, 0, 0, len(q) - len(out))) if is_padded else out

    @cached_property
    def _at(self) -> Tensor:
        return self.at[: self.memory.rows]

    @cached_property
    def _row(self) -> Tensor:
        return torch.arange(len(self._at), device=self.at.device)[:, None]

    def _seen_by(self, window: int, R: int) -> Tensor:
        """Return which keys each query sees, [B, 1, R·n, end] bool, made once for all layers with this window."""
        if (window, R) not in self._masks:
            others, at = torch.arange(self.end, device=self.at.device), self._at[..., None]
            seen = others <= at  # [B, n, end]
            if window:
                seen &= others > at - window
            self._masks[window, R] = seen[:, None].expand(-1, R, -1, -1).flatten(1, 2)[:, None]
        return self._masks[window, R]
