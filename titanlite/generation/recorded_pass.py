"""Record the forward pass of one new token per prompt as CUDA graphs, which the device then runs without the host.

Launching the kernels of a pass one by one takes the host several times as long as the device needs to run them.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from titanlite.generation.kept_keys import KeyMemory, NewTokens


class RecordedPass:
    """The pass of B new tokens, recorded once for each range of attended positions.

    A model whose pass waits for the device, as experts without a grouped kernel do, cannot be recorded, and is run.

    Args:
        model: on one GPU, without collectives; takes [B] tokens and `sequences` to logits [B, V].
        memory: keys of the earlier tokens, which the model has been run with.
        like: [B] int64, on the GPU.
    """

    def __init__(self, model: nn.Module, memory: KeyMemory, like: Tensor) -> None:
        self._model, self._memory = model, memory
        self._tokens, self._at = torch.zeros_like(like), torch.zeros_like(like)
        self._recorded: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}  # end of the range → graph, its logits
        self._waits = False

    def __call__(self, tokens: Tensor, at: Tensor, last: int) -> Tensor:
        """Return the logits [B, V] of tokens [B] at positions `at` [B], of which `last` is the largest.

        The next call may overwrite them.
        """
        self._tokens.copy_(tokens)
        self._at.copy_(at)
        end = self._new(last).end
        if end not in self._recorded and not self._waits:
            self._record(last, end)
        if self._waits:
            return self._run(last)
        graph, logits = self._recorded[end]
        graph.replay()
        return logits

    def _record(self, last: int, end: int) -> None:
        with _waiting_refused():  # also what kernels compile or tune at their first call
            try:
                self._run(last)
            except RuntimeError as error:
                if "synchroniz" not in str(error):
                    raise
                self._waits = True
                return
        graph, stream, after = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.current_stream()
        shared = next((graph.pool() for graph, _ in self._recorded.values()), None)
        stream.wait_stream(after)
        with torch.cuda.stream(stream):  # torch.cuda.graph would empty the cache, which the next step fills again
            graph.capture_begin(shared, capture_error_mode="thread_local")  # other threads pin memory
            try:
                logits = self._run(last)
            finally:
                graph.capture_end()
        after.wait_stream(stream)
        self._recorded[end] = graph, logits

    def _run(self, last: int) -> Tensor:
        return self._model(self._tokens, sequences=self._new(last))

    def _new(self, last: int) -> NewTokens:
        return NewTokens.after(self._at[:, None], last, self._memory)


@contextmanager
def _waiting_refused() -> Iterator[None]:
    """Let torch raise a RuntimeError where the host would wait for the device."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")  # that the mode does not find every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
