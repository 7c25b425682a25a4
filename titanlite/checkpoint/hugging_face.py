"""Write a checkpoint's weights, dimensions and tokenizer as a folder that Hugging Face's transformers loads.

One process reads the parameters of one file after the other, so that a model need not fit into memory, whatever layout
it was trained under. The folder is complete or absent, as a checkpoint is.
"""

# The annotations of torch, safetensors and tokenizers are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportPrivateImportUsage=false

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from titanlite.checkpoint import store
from titanlite.config.recipe_schema import ModelRecipe
from titanlite.config.schema import Config
from titanlite.data.tokenizer import FileTokenizer, Tokenizer
from titanlite.errors import CheckpointError, Problem, describe
from titanlite.models.find import build_model
from titanlite.models.hugging_face import LAYOUTS, config_json, their_weights

_FILE_BYTES = 5_000_000_000  # of weights in one file, as transformers itself writes them


def export(
    checkpoint: Path,
    out: Path,
    config: Config,
    sizes: ModelRecipe,
    tokenizer: Tokenizer | None,
    dtype: torch.dtype,
    say: Callable[[str], None],
) -> None:
    """Write the folder.

    Args:
        checkpoint: a verified one.
        out: the folder; there is none yet.
        config: of the run; its model is a shipped architecture.
        sizes: the model's dimensions.
        tokenizer: the run's, or None if it is not known.
        dtype: of the weights.
        say: told what was written.

    Raises:
        CheckpointError: the folder cannot be written, has too little room, or the checkpoint is of another model; or
            transformers has no such model.
    """
    layout, seq_len = LAYOUTS[config.model.name], config.training.seq_len
    if sizes.n_kv_heads < sizes.n_heads and not layout.groups_heads:
        want = f"n_heads = {sizes.n_heads}: transformers' {layout.class_name} has no grouped heads"
        fix = "train with as many key/value heads as heads"
        problem = Problem("model.n_kv_heads", str(sizes.n_kv_heads), want, fix)
        raise CheckpointError(describe("titanlite export", [problem]))
    model = build_model(config.model, sizes, seq_len)
    end = tokenizer.separator_id if tokenizer else None
    tmp = out.with_name(f"{out.name}.tmp")
    try:
        shutil.rmtree(tmp, ignore_errors=True)  # of an earlier attempt that was killed
        tmp.mkdir(parents=True)
        n_bytes = sum(p.numel() for p in model.parameters()) * dtype.itemsize
        if shutil.disk_usage(tmp).free < 1.01 * n_bytes:
            raise OSError(f"needs {n_bytes / 2**30:.3g} GiB, {shutil.disk_usage(tmp).free / 2**30:.3g} GiB are free")
        _write_json(tmp / "config.json", config_json(layout, sizes, seq_len, dtype, end))
        if tokenizer is not None:
            _write_tokenizer(tmp, tokenizer, seq_len)
        _write_weights(tmp, checkpoint, config.model.name, model, dtype, say)
        tmp.rename(out)
    except (OSError, SafetensorError) as error:
        problem = Problem("--out", f"{out} ({error})", "a folder that can be written, with room", "name another")
        raise CheckpointError(describe("titanlite export", [problem])) from error
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def _write_weights(
    folder: Path, checkpoint: Path, architecture: str, model: nn.Module, dtype: torch.dtype, say: Callable[[str], None]
) -> None:
    shapes = {f"model/{name}": parameter.shape for name, parameter in model.named_parameters()}
    files = _files({name: shape.numel() * dtype.itemsize for name, shape in shapes.items()})
    where: dict[str, str] = {}
    for n, names in enumerate(files, start=1):
        file = f"model-{n:05}-of-{len(files):05}.safetensors" if len(files) > 1 else "model.safetensors"
        ours = {name: torch.empty(shapes[name]) for name in names}
        store.read(checkpoint, ours, optional=("optimizer/", "rng/", *(name for name in shapes if name not in ours)))
        theirs = {
            their_name: weight.to(dtype)
            for name in names
            for their_name, weight in their_weights(
                LAYOUTS[architecture], model, name.removeprefix("model/"), ours.pop(name)
            ).items()
        }
        save_file(theirs, folder / file, metadata={"format": "pt"})
        shutil.copymode(folder / "config.json", folder / file)  # else nobody else may read it
        where |= dict.fromkeys(theirs, file)
        say(f"{file}  {(folder / file).stat().st_size / 1e9:.3f} GB")
    if len(files) > 1:
        total = sum(shape.numel() for shape in shapes.values()) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": where}
        _write_json(folder / "model.safetensors.index.json", index)


def _files(n_bytes: Mapping[str, int]) -> list[list[str]]:
    """Deal parameters out to files, in order."""
    files, room = list[list[str]](), 0
    for name, size in n_bytes.items():
        if size > room:
            files.append([])
            room = _FILE_BYTES
        files[-1].append(name)
        room -= size
    return files


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, seq_len: int) -> None:
    """Write tokenizer.json and what stands beside it; bytes become a tokenizer that knows each byte by its number."""
    import tokenizers
    from tokenizers import decoders, models

    if isinstance(tokenizer, FileTokenizer):
        given = Path(os.path.expanduser(tokenizer.name)).parent
        shutil.copyfile(os.path.expanduser(tokenizer.name), folder / "tokenizer.json")
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            if (given / name).is_file():
                shutil.copyfile(given / name, folder / name)
    else:
        each = {f"<0x{byte:02X}>": byte for byte in range(256)}
        whole = tokenizers.Tokenizer(models.BPE(vocab=each, merges=[], byte_fallback=True))
        whole.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        whole.save(str(folder / "tokenizer.json"))
    if not (folder / "tokenizer_config.json").exists():
        end = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).id_to_token(tokenizer.separator_id)
        kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "model_max_length": seq_len}
        _write_json(folder / "tokenizer_config.json", kind)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
