"""A trained model that continues texts: what `titanlite generate` and `titanlite.load` use."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist
from torch import nn

from titanlite.data.prepare import check_vocabulary
from titanlite.device import device_of
from titanlite.errors import ConfigError
from titanlite.evaluation.prompts import encode_prompts
from titanlite.generation.decode import Decoder, Sampling
from titanlite.generation.load import load_split_model
from titanlite.generation.text import continue_texts
from titanlite.parallel.mesh import Mesh
from titanlite.parallel.process_group import start_process_group
from titanlite.preflight.trained_model import TrainedModel, find_trained_model


class TextModel:
    """A model with its weights and its tokenizer, on this process's device.

    Args:
        target: what to load.
        capacity: the most tokens that a prompt and its continuation can have together; 0: as many as in training.

    Attributes:
        target: what was loaded.
        module: takes [M] token ids and `sequences` to logits [M, V/tp].
        capacity: see above.
    """

    def __init__(self, target: TrainedModel, capacity: int = 0) -> None:
        check_vocabulary(target.tokenizer, target.dims.vocab_size, is_given=True)
        if capacity < 0:
            raise ConfigError.of("load", "capacity", str(capacity), "a number of tokens", "leave it out")
        self.target, self.capacity = target, capacity or target.seq_len
        if target.dims.max_seq_len and self.capacity > target.dims.max_seq_len:
            want = f"at most {target.dims.max_seq_len}, the positions that the model has learned"
            raise ConfigError.of("generate", "tokens", str(self.capacity), want, "fewer tokens, or a shorter prompt")
        self.module, self._mesh = _load_module(target, self.capacity)

    def generate(
        self,
        prompts: str | Sequence[str],
        tokens: int = 128,
        *,
        stop: str = "",
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        show: Callable[[str], object] | None = None,
    ) -> str | list[str]:
        """Return the text that the model adds to a prompt, or to each of several.

        A continuation ends after `tokens` tokens, at the end of the document, or at the text `stop`.

        Args:
            prompts: one text, or several, which are continued together.
            tokens: the most that are added to each.
            stop: a text that ends a continuation and is not part of it; "": none.
            temperature: 0: take the likeliest token, always; 1: sample from the model's probabilities.
            top_k: sample from the k likeliest tokens; 0: from all.
            top_p: sample from the likeliest tokens whose probabilities add up to p.
            seed: equal seeds give equal texts.
            show: called with each new part of the first prompt's text, as it is made.

        Returns:
            A text for a text, a list for several.

        Raises:
            DataError: a prompt cannot be encoded, or is longer than `capacity` less `tokens`.
            ConfigError: a number is out of range.
            CheckpointError: the model's logits are not finite.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not texts:
            return []
        if tokens < 1:
            raise ConfigError.of("generate", "tokens", str(tokens), "a number of tokens, at least 1", "tokens = 64")
        tokenizer = self.target.tokenizer
        decoder = Decoder(
            self.module,
            self._mesh.device,
            self._mesh.tp_group,
            self.capacity,
            vocab_size=tokenizer.vocab_size,
            softcap=self.target.dims.logit_softcap,
            keeps_keys=not self.target.config.model.file,
            row_unit=self._mesh.tp_size,
            requires_finite=True,
            records=self._mesh.device.type == "cuda" and self._mesh.tp_group is None,
        )
        encoded = encode_prompts(texts, tokenizer, tokens, self.capacity, "prompts", "tokens")
        found = continue_texts(
            decoder, tokenizer, encoded, tokens, Sampling(temperature, top_k, top_p, seed), stop, show
        )
        return found[0] if isinstance(prompts, str) else found


def _load_module(target: TrainedModel, capacity: int) -> tuple[nn.Module, Mesh]:
    """Load a model in the job's process group; without one, in a group of this process alone, which ends here."""
    is_alone = not dist.is_initialized()
    device = start_process_group(target.config.comm)
    try:
        return load_split_model(
            target.config, target.dims, device_of(device), capacity, target.checkpoint, target.averaged
        )
    finally:
        if is_alone and dist.get_world_size() == 1:
            dist.destroy_process_group()


def load_text_model(
    target: str | os.PathLike[str],
    *,
    step: int | None = None,
    ema: bool = False,
    tokenizer: str | None = None,
    capacity: int = 0,
) -> TextModel:
    """Load the model of a run, a checkpoint or a folder in Hugging Face's layout.

    Args:
        target: its path.
        step: of the run's checkpoint; None: the newest.
        ema: load the average of weights that `optimizer.ema_decay` has kept.
        tokenizer: the model's tokenizer.json, if it is not where the run, or the folder, has it.
        capacity: the most tokens that a prompt and its continuation can have together; 0: as many as in training.

    Raises:
        TitanliteError: there is no such model, its weights are damaged, or its tokenizer is another.
    """
    at = None if step is None else str(step)
    return TextModel(find_trained_model("titanlite.load", Path(target).expanduser(), at, tokenizer, ema), capacity)
