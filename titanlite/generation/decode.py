"""Continue prompts token by token, with any model under any layout.

Every data-parallel rank continues the same prompts, since weights are gathered from all of them, so that each rank has
the same tokens. The number of forward passes depends on the prompts' lengths and `limit` alone, unless `is_done` ends
the loop, which must say the same on every rank.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from titanlite.errors import CheckpointError, ConfigError
from titanlite.generation.kept_keys import KeyMemory, NewTokens
from titanlite.generation.recorded_pass import RecordedPass
from titanlite.kernels.collectives import Group, all_gather
from titanlite.models.layers import Sequences

_PROMPT_TOKENS = 4096  # of all rows together, that a forward pass takes of prompts


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen.

    Attributes:
        temperature: divides the logits; 0: the likeliest token, always.
        top_k: sample from the k likeliest tokens; 0: from all.
        top_p: sample from the likeliest tokens whose probabilities add up to p; 1: from all.
        seed: of the random numbers.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise a ConfigError if a number is out of range."""
        for key, is_right, want in (
            ("temperature", 0 <= self.temperature < math.inf, "0, or a number above it"),
            ("top_k", self.top_k >= 0, "0 for all tokens, or a number of them"),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
            ("seed", 0 <= self.seed < 2**63, "at least 0, below 2^63"),
        ):
            if not is_right:
                fix = {"temperature": "0.8", "top_k": "50", "top_p": "0.95", "seed": "1"}[key]
                raise ConfigError.of("generate", key, str(getattr(self, key)), want, f"{key} = {fix}")


class Decoder:
    """A model that continues prompts.

    Args:
        model: takes [M] tokens and `sequences` to logits [M, V/tp].
        device: of the model.
        tp_group: the ranks that split the vocabulary; None: each has all of it.
        capacity: the most tokens that a prompt and its continuation can have together.
        vocab_size: number of ids that are chosen from; None: all that the model has.
        softcap: of the logits; 0: none.
        keeps_keys: compute each new token alone. Without, rows are computed whole for each token, which any model can.
        row_unit: rows of a batch are padded to a multiple of this number.
        requires_finite: raise a CheckpointError if logits are no numbers, on every rank; else they choose any token.
        records: record the pass of a token as a CUDA graph: the model has no collectives and is on a GPU.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        tp_group: Group | None,
        capacity: int,
        *,
        vocab_size: int | None = None,
        softcap: float = 0.0,
        keeps_keys: bool = True,
        row_unit: int = 1,
        requires_finite: bool = False,
        records: bool = False,
    ) -> None:
        self.model, self.device, self.tp_group = model, device, tp_group
        self.capacity, self.vocab_size, self.softcap = capacity, vocab_size, softcap
        self.keeps_keys, self.row_unit, self.requires_finite = keeps_keys, row_unit, requires_finite
        self.records = records

    @torch.no_grad()
    def continue_prompts(
        self,
        prompts: Sequence[Sequence[int]],
        limit: int,
        sampling: Sampling,
        is_done: Callable[[], bool] = lambda: False,
    ) -> Iterator[list[int]]:
        """Yield the next token of each prompt, `limit` times, or until `is_done`; collective.

        Args:
            prompts: ids, at least one each; with `limit` more, at most `capacity`.
            limit: new tokens of each prompt.
            sampling: how a token is chosen.
            is_done: asked after each token.
        """
        n_rows = -(-len(prompts) // self.row_unit) * self.row_unit
        lengths = torch.tensor([*map(len, prompts), *[1] * (n_rows - len(prompts))])
        longest = int(lengths.max())
        tokens = torch.zeros(n_rows, longest + limit, dtype=torch.int64)
        for row, prompt in zip(tokens, prompts, strict=False):
            row[: len(prompt)] = torch.tensor(prompt)
        lengths, tokens = lengths.to(self.device), tokens.to(self.device)
        memory = KeyMemory(len(prompts), longest + limit)
        random = torch.Generator(self.device).manual_seed(sampling.seed)
        row = torch.arange(n_rows, device=self.device)
        next_pass = RecordedPass(self.model, memory, row) if self.records else partial(self._run, memory)
        with torch.compiler.set_stance("force_eager"):  # each shape would be compiled anew
            for i in range(limit):
                if not self.keeps_keys:
                    logits = self._whole_rows(tokens, lengths + i)
                elif i == 0:
                    logits = self._read_prompts(tokens[:, :longest], lengths, memory)
                else:
                    at = lengths + i - 1
                    logits = next_pass(tokens[row, at], at, longest + i - 1)
                logits = self._all_logits(logits)
                if self.requires_finite and not bool(logits[: len(prompts)].isfinite().all()):
                    want, fix = "logits that are finite numbers", "another step or folder: these weights are damaged"
                    raise CheckpointError.of("generate", "weights", "logits that are no numbers", want, fix)
                chosen = choose_tokens(logits, sampling, random)
                tokens[row, lengths + i] = chosen
                yield chosen[: len(prompts)].tolist()
                if is_done():
                    return

    def _run(self, memory: KeyMemory, tokens: Tensor, at: Tensor, last: int) -> Tensor:
        return self.model(tokens, sequences=NewTokens.after(at[:, None], last, memory))

    def _read_prompts(self, tokens: Tensor, lengths: Tensor, memory: KeyMemory) -> Tensor:
        """Keep the keys of all prompts, part by part; return the logits after each one's last token [B, V/tp]."""
        n = max(1, _PROMPT_TOKENS // len(tokens))
        found = None
        for first in range(0, tokens.shape[1], n):
            part = tokens[:, first : first + n]
            at = torch.arange(first, first + part.shape[1], device=tokens.device).expand_as(part)
            new = NewTokens.after(at, first + part.shape[1] - 1, memory)
            logits = self.model(part.flatten(), sequences=new).unflatten(0, part.shape)
            ends_here = (lengths > first) & (lengths <= first + n)
            last = (lengths - 1 - first).clamp(0, part.shape[1] - 1)
            of_last = logits[torch.arange(len(tokens), device=tokens.device), last]
            found = of_last if found is None else torch.where(ends_here[:, None], of_last, found)
        assert found is not None  # noqa: S101  # a prompt has a token
        return found

    def _whole_rows(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Compute rows of `capacity` tokens; return the logits after the first `lengths` tokens of each, [B, V/tp]."""
        found = list[Tensor]()
        for row, length in zip(tokens, lengths, strict=True):  # one at a time: a row may be a whole micro-batch
            padded = row.new_zeros(self.capacity)
            padded[: len(row)] = row
            found.append(self.model(padded, sequences=Sequences(self.capacity))[length - 1])
        return torch.stack(found)

    def _all_logits(self, logits: Tensor) -> Tensor:
        """Gather the logits of the whole vocabulary, [B, V] float32, and cap them."""
        if self.tp_group is not None:
            parts = all_gather(logits, self.tp_group).unflatten(0, (self.tp_group.size, -1))
            logits = parts.transpose(0, 1).flatten(1)
        logits = logits[:, : self.vocab_size].float()
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits


def choose_tokens(logits: Tensor, sampling: Sampling, random: torch.Generator) -> Tensor:
    """Choose a token of each row.

    Args:
        logits: [B, V] float32.
        sampling: how.
        random: on the device of `logits`.

    Returns:
        [B] int64.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    logits = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature  # the largest is 0: none overflows
    if 0 < sampling.top_k < logits.shape[1]:
        least = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        p = ordered.softmax(-1)
        is_out = p.cumsum(-1) - p >= sampling.top_p  # the likeliest token is always in
        logits = logits.masked_fill(torch.zeros_like(is_out).scatter(1, order, is_out), -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=random).squeeze(1)
