"""Continue the texts of `validation.samples` with the weights of a run, by their likeliest tokens."""

from collections.abc import Callable

from titanlite.config.schema import Config
from titanlite.evaluation.inputs import tokenizer_of
from titanlite.evaluation.prompts import SAMPLE_KEYS, encode_prompts
from titanlite.generation.decode import Decoder, Sampling
from titanlite.generation.text import continue_texts
from titanlite.observe.observer import Sample
from titanlite.parallel.fsdp import frees_after_forward
from titanlite.parallel.mesh import Mesh
from titanlite.preflight.checked_run import CheckedRun
from titanlite.receipt import Entry
from titanlite.training.build import Run

_GPU_ROWS = 128  # for each tensor-parallel rank: the shape that kernels of float8 and of fused products take


def _is_alone(config: Config, mesh: Mesh) -> bool:
    """Return whether this rank is alone, and keeps its weights in the compute dtype after a forward pass."""
    return mesh.dp_size == mesh.tp_size == 1 and not any(frees_after_forward(config, shards=1))


class Sampler:
    """Makes the samples of a run. All ranks compute the same ones: weights are gathered from all of them.

    Args:
        asked: the run; it has samples.
        run: its model.
    """

    def __init__(self, asked: CheckedRun, run: Run) -> None:
        config, mesh = asked.config, run.mesh
        self.texts = config.validation.samples
        self._limit, self._tokenizer = config.validation.sample_tokens, tokenizer_of(config, asked.inputs)
        capacity = config.training.seq_len
        self._prompts = encode_prompts(self.texts, self._tokenizer, self._limit, capacity, *SAMPLE_KEYS)
        has_shapes = mesh.built_for.is_gpu and (mesh.tp_size > 1 or asked.float8 is not None)
        self._decoder = Decoder(
            run.model,
            mesh.device,
            mesh.tp_group,
            capacity,
            vocab_size=self._tokenizer.vocab_size,
            keeps_keys=not config.model.file,
            row_unit=mesh.tp_size * (_GPU_ROWS if has_shapes else 1),
            records=mesh.built_for.is_gpu and not config.model.file and _is_alone(config, mesh),
        )
        applied = {"samples": len(self.texts), "tokens": self._limit}
        run.receipt.add(Entry(SAMPLE_KEYS[0], list(self.texts), applied, count=len(self.texts)))

    def samples(self, progress: Callable[[str], object]) -> list[Sample]:
        """Continue each text; collective, with the same samples on every rank. `progress` is called after each token.

        The model is in evaluation mode.
        """
        given = self._decoder, self._tokenizer, self._prompts, self._limit, Sampling()
        added = continue_texts(*given, show=progress, ends_early=False)
        return [Sample(*pair) for pair in zip(self.texts, added, strict=True)]
