"""Write a checkpoint as a folder in Hugging Face's layout, and start a run from the weights of such a folder.

A single process writes the folder. It loads the parameters of one output file at a time, so that the model need not fit
into memory, whatever layout it was trained under. Like a checkpoint, the folder is either complete or absent. When a
run starts, each rank reads one parameter after the other and keeps its slice.
"""

# The annotations of torch, safetensors and tokenizers are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportPrivateImportUsage=false

import json
import re
import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from titanlite.byte_size import byte_size
from titanlite.checkpoint import store
from titanlite.checkpoint.collective import on_all_ranks, rank
from titanlite.checkpoint.publish import verify
from titanlite.checkpoint.resume import AVERAGE, MODEL
from titanlite.checkpoint.store import require_none, require_same
from titanlite.config.architectures import ARCHITECTURES, Architecture
from titanlite.config.hugging_face import INDEX, ONE_FILE, config_json, weight_files, without_place
from titanlite.config.recipe_schema import ModelDims
from titanlite.config.schema import FROM_CHECKPOINT, Config
from titanlite.data.tokenizer import FileTokenizer, Tokenizer
from titanlite.errors import CheckpointError, describe
from titanlite.float8.weight import local_data
from titanlite.hub import folder_of
from titanlite.models.find import build_model
from titanlite.models.hugging_face import our_weight, their_weights
from titanlite.parallel.initialise import local_slice

# Tables of positions and masks, which older releases of transformers saved beside the weights.
_BUFFER = re.compile(r"\.(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)$")
_FILE_BYTES = 5_000_000_000  # the most bytes of weights in one file, as in transformers


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    config: Config,
    dims: ModelDims,
    tokenizer: Tokenizer | None,
    dtype: str,
    say: Callable[[str], None],
    *,
    averaged: bool = False,
) -> None:
    """Write a checkpoint as the new folder `out`, with weights of `dtype`, such as "bfloat16".

    The checkpoint is verified after a check that the folder can be written. With `averaged` the moving average of the
    weights in the checkpoint is written instead of the weights. `say` is called with each message of progress.

    Raises:
        CheckpointError: the folder cannot be written or has too little room; the checkpoint is damaged or has another
            model than `config`; or transformers has no such model.
    """
    layout, seq_len = ARCHITECTURES[config.model.name], config.training.seq_len
    if wrong := without_place(config.model.name, dims):
        stays = [each._replace(fix=f"none for this model: to export one, train it with {each.fix}") for each in wrong]
        raise CheckpointError(describe("titanlite export", stays))
    model = build_model(config.model, dims, seq_len)
    end = tokenizer.separator_id if tokenizer else None
    tmp, makes_parent = out.with_name(f"{out.name}.tmp"), not out.parent.exists()
    try:
        tmp.mkdir(parents=True)
        try:
            n_bytes = sum(p.numel() for p in model.parameters()) * getattr(torch, dtype).itemsize
            free = shutil.disk_usage(tmp).free
            if free < 1.01 * n_bytes:
                raise OSError(f"needs {byte_size(n_bytes)}, {byte_size(free)} are free")
            begin = {} if tokenizer is None or tokenizer.bos_id is None else {"bos_token_id": tokenizer.bos_id}
            _write_json(tmp / "config.json", config_json(layout, dims, seq_len, dtype, end) | begin)
            if tokenizer is not None:
                _write_tokenizer(tmp, tokenizer, seq_len)
            say(f"verifying {checkpoint}")
            verify(checkpoint)
            _write_weights(tmp, checkpoint, config.model.name, model, getattr(torch, dtype), say, averaged=averaged)
            tmp.rename(out)
        except BaseException:
            shutil.rmtree(tmp, ignore_errors=True)
            if makes_parent:
                with suppress(OSError):  # another process may have written into it
                    out.parent.rmdir()
            raise
    except (OSError, SafetensorError) as error:
        raise CheckpointError.of(
            "titanlite export", "--out", f"{out} ({error})", "a folder that can be written, with room", "name another"
        ) from error


def load_weights(path: str, architecture: str, model: nn.Module, parameters: Mapping[str, Tensor]) -> int:
    """Fill a run's float32 parameters, in any layout, with the weights of a folder in Hugging Face's layout.
    Collective.

    Returns:
        The number of weights that were read.

    Raises:
        CheckpointError: weights are missing, surplus or of other shapes (all are listed); or the folder on some rank's
            host has other weights than rank 0's. On all ranks.
    """

    def load_here() -> tuple[int, int]:
        with _folder_of(path, f"rank {rank()}") as folder:
            return _load(folder, ARCHITECTURES[architecture], model, parameters)

    of_ranks = on_all_ranks(load_here)
    if different := [r for r, other in enumerate(of_ranks) if other != of_ranks[0]]:
        want, fix = f"on rank {different[0]} the weights that rank 0 has read", "the same folder on every host"
        raise CheckpointError.of("initial weights", "checkpoint.initial_load_path", path, want, fix)
    return of_ranks[0][0]


def check_weights(path: str, architecture: str, model: nn.Module) -> None:
    """Check the weights of a folder as `load_weights` does, with the same errors, but read only the files' headers."""
    with _folder_of(path, "initial weights") as folder, ExitStack() as opened:
        # With "np", because "pt" maps a file as writable, for which not every host has enough memory.
        saved = {file: cast(Any, opened.enter_context(safe_open(file, "np"))) for file in weight_files(folder)}
        _find_weights(folder, ARCHITECTURES[architecture], model, dict(model.named_parameters()), saved)


@contextmanager
def _folder_of(path: str, who: str) -> Generator[Path]:
    try:
        yield folder_of(path)
    except (OSError, SafetensorError) as error:
        saw, want = f"{path} ({error})", "safetensors that every rank can read"
        raise CheckpointError.of(who, "checkpoint.initial_load_path", saw, want, "fetch the folder again") from error


def _full_name(layout: Architecture, name: str) -> str | None:
    """Return the name of a saved tensor with the model's prefix, which may be missing; None if it is not a weight."""
    base = layout.names["norm"].partition(".")[0]
    return None if _BUFFER.search(name) else name if name.startswith((f"{base}.", "lm_head.")) else f"{base}.{name}"


def _find_weights(
    folder: Path, layout: Architecture, model: nn.Module, parameters: Mapping[str, Tensor], saved: Mapping[Path, Any]
) -> tuple[dict[str, tuple[Any, str]], bool]:
    """Check names, shapes and dtypes. Return ({weight: (file, saved name)}, whether a tied head is saved, too)."""
    places: dict[str, list[tuple[Path, str]]] = {}
    for file, content in saved.items():
        for name in content.keys():  # noqa: SIM118  it is no mapping
            if key := _full_name(layout, name):
                places.setdefault(key, []).append((file, name))
    twice = [f"{key} ({', '.join(f'{n} in {f.name}' for f, n in of)})" for key, of in places.items() if len(of) > 1]
    require_none(folder, [("twice in the folder", twice, "each weight once")], "fetch the folder again")
    found = {key: (saved[of[0][0]], of[0][1]) for key, of in places.items()}
    shapes = {key: str(content.get_slice(name).get_shape()) for key, (content, name) in found.items()}
    # `head` is the shape of a head that the folder has although the model ties it to the embedding, else None.
    head = None if "output.weight" in parameters else shapes.pop("lm_head.weight", None)
    wanted = {
        key: str([*weight.shape])
        for name, parameter in parameters.items()
        for key, weight in their_weights(layout, model, name, torch.empty(parameter.shape, device="meta")).items()
    }
    fix = "choose the model.name, flavor and dimensions of that folder"
    require_same(folder, shapes, wanted, fix, "folder", "weight", "shapes")
    stored = {key: found[key][0].get_slice(found[key][1]).get_dtype() for key in wanted}
    integers = [f"{key} {dtype}" for key, dtype in stored.items() if not dtype.startswith(("F", "BF"))]
    want, fix = "floating-point numbers: what integers mean is unknown", "take the folder before quantization"
    require_none(folder, [("in the folder", integers, want)], fix)
    return {key: found[key] for key in (*wanted, *(["lm_head.weight"] if head is not None else []))}, head is not None


def _load(folder: Path, layout: Architecture, model: nn.Module, parameters: Mapping[str, Tensor]) -> tuple[int, int]:
    """Fill the parameters with a folder's weights. Return (number of weights, a checksum over all their bits)."""
    with ExitStack() as opened:
        saved = {file: cast(Any, opened.enter_context(safe_open(file, "pt"))) for file in weight_files(folder)}
        found, has_tied_head = _find_weights(folder, layout, model, parameters, saved)

        def read(key: str) -> Tensor:
            file, name = found[key]
            return file.get_tensor(name).float()

        embedding = layout.names["tok_embeddings"] + ".weight"
        if has_tied_head and not read("lm_head.weight").equal(read(embedding)):
            saw = [f"lm_head.weight, which is not {embedding}"]
            want = "a head that is the embedding, as tie_word_embeddings = true in config.json says"
            fix = f'"tie_word_embeddings": false in {folder / "config.json"}, and model.flavor = "{FROM_CHECKPOINT}"'
            require_none(folder, [("in the folder", saw, want)], f"{fix}; or drop the head from the safetensors")
        bits = 0
        for name, parameter in parameters.items():
            whole = our_weight(layout, model, name, read)
            bits = (31 * bits + int(whole.view(torch.int32).sum())) % 2**63
            with torch.no_grad():
                local_data(parameter).copy_(local_slice(whole, parameter))
    return len(found) - has_tied_head, bits


def _write_weights(
    folder: Path,
    checkpoint: Path,
    architecture: str,
    model: nn.Module,
    dtype: torch.dtype,
    say: Callable[[str], None],
    *,
    averaged: bool,
) -> None:
    kind, left_out = (AVERAGE, MODEL) if averaged else (MODEL, AVERAGE)
    shapes = {f"{kind}{name}": parameter.shape for name, parameter in model.named_parameters()}
    files = _weights_by_file({name: shape.numel() * dtype.itemsize for name, shape in shapes.items()})
    where: dict[str, str] = {}
    for n, names in enumerate(files, start=1):
        file = f"model-{n:05}-of-{len(files):05}.safetensors" if len(files) > 1 else ONE_FILE
        ours = {name: torch.empty(shapes[name]) for name in names}
        others = ("optimizer/", "rng/", left_out, f"{AVERAGE}updates", *(name for name in shapes if name not in ours))
        store.read(checkpoint, ours, optional=others)
        theirs = {
            their_name: weight.to(dtype)
            for name in names
            for their_name, weight in their_weights(
                ARCHITECTURES[architecture], model, name.removeprefix(kind), ours.pop(name)
            ).items()
        }
        save_file(theirs, folder / file, metadata={"format": "pt"})
        shutil.copymode(folder / "config.json", folder / file)  # save_file lets only the owner read it
        where |= dict.fromkeys(theirs, file)
        say(f"{file}  {byte_size((folder / file).stat().st_size)}")
    if len(files) > 1:
        total = sum(shape.numel() for shape in shapes.values()) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": where}
        _write_json(folder / INDEX, index)


def _weights_by_file(n_bytes: Mapping[str, int]) -> list[list[str]]:
    """Split parameters, given with their bytes, into files of about `_FILE_BYTES`; return the names in each file."""
    files, room = list[list[str]](), 0
    for name, size in n_bytes.items():
        if size > room:
            files.append([])
            room = _FILE_BYTES
        files[-1].append(name)
        room -= size
    return files


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, seq_len: int) -> None:
    """Write tokenizer.json and the files of its settings. The tokenizer "bytes" becomes one token for each byte."""
    import tokenizers
    from tokenizers import decoders, models

    kind: dict[str, Any] = {}
    if isinstance(tokenizer, FileTokenizer):
        given, content = tokenizer.path.parent, tokenizer.as_used()
        if (given / "tokenizer_config.json").is_file():
            kind = json.loads((given / "tokenizer_config.json").read_text(encoding="utf-8"))
        if (given / "special_tokens_map.json").is_file():
            shutil.copyfile(given / "special_tokens_map.json", folder / "special_tokens_map.json")
        if kind.get("eos_token") is None:
            kind["eos_token"] = tokenizer.token(tokenizer.separator_id)
        if tokenizer.bos_id is not None:
            kind["bos_token"] = tokenizer.token(tokenizer.bos_id)
    else:
        each = {f"<0x{byte:02X}>": byte for byte in range(256)}
        whole = tokenizers.Tokenizer(models.BPE(vocab=each, merges=[], byte_fallback=True))
        whole.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        content = whole.to_str(pretty=True)
        kind["eos_token"] = f"<0x{tokenizer.separator_id:02X}>"
    (folder / "tokenizer.json").write_text(content, encoding="utf-8")  # the writer of tokenizers hides OSErrors
    # With another class, or without these keys, transformers would rebuild the tokenizer instead of using the file.
    adds = {"add_bos_token": tokenizer.bos_id is not None, "add_eos_token": False}
    before = json.loads(content)["pre_tokenizer"] or {}
    adds |= {key: before[key] for key in ("add_prefix_space",) if key in before}
    kind = {"model_max_length": seq_len} | kind | {"tokenizer_class": "PreTrainedTokenizerFast"} | adds
    _write_json(folder / "tokenizer_config.json", kind)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
