"""Find a trained model: of a run, of one of its checkpoints, or of a folder in Hugging Face's layout."""

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from titanlite.checkpoint import publish
from titanlite.checkpoint.resume import dims_of, require_average
from titanlite.checkpoint.saved_state import RankedLoss, best_of, losses_of, read_state
from titanlite.config.build import show
from titanlite.config.check import last_step
from titanlite.config.config_json import check_weight_files, recipe_of
from titanlite.config.problems import Origin, Problems
from titanlite.config.read import read_config
from titanlite.config.recipe_schema import ModelDims
from titanlite.config.schema import FROM_CHECKPOINT, Config, Model, Training
from titanlite.data.tokenizer import Tokenizer, load_tokenizer, panics_raised, tokenizer_file
from titanlite.durable import require_reachable
from titanlite.errors import CheckpointError, ConfigError
from titanlite.hub import HUB, fetch_description, fetch_weights, folder_of, is_hub_name, resolve_name
from titanlite.json_file import read_json
from titanlite.preflight.run_folder import RunFolder
from titanlite.streams import say_first

_LISTED = 5  # most models that a message names


@dataclass(frozen=True)
class TrainedModel:
    """A trained model, without its weights in memory.

    Attributes:
        folder: folder of the run, or of the weights.
        seq_len: the longest sequence that the model takes, in tokens.
        checkpoint: folder with the weights; None: they are in `config.checkpoint.initial_load_path`.
        averaged: whether to use the average of the weights that the checkpoint holds.
    """

    folder: Path
    config: Config
    dims: ModelDims
    tokenizer: Tokenizer
    seq_len: int
    checkpoint: Path | None = None
    averaged: bool = False


def find_trained_model(
    command: str, path: Path, step: str | None, tokenizer: str | None, averaged: bool
) -> TrainedModel:
    """Find out whether `path` is a run, a checkpoint or a model's folder, and read everything but the weights."""
    if is_hub_name(str(path)):
        if averaged:
            raise _no_average(str(path))
        return _of_hub_folder(command, _fetched(str(path)), tokenizer)
    require_reachable(path / "config.toml")
    if (path / "config.toml").is_file():
        return _of_run(command, RunFolder(path), step, tokenizer, averaged)
    above = path.resolve().parent.parent
    is_model = (path / "config.json").is_file()  # an exported model in the run folder is no checkpoint
    if path.is_dir() and not is_model and path.name.startswith("step-") and (above / "config.toml").is_file():
        if step is not None:
            raise ConfigError.of("command line", "--step", step, f"{path} alone, which has its step", "leave it out")
        return _of_run(command, RunFolder(above), path.name.removeprefix("step-"), tokenizer, averaged)
    models = [found for found in _models_in(path) if not is_model]
    if models:
        want = "the folder of a run, a checkpoint, or a model in Hugging Face's layout"
        listed = ", ".join(map(str, models[:_LISTED]))
        fix = f"one of those in it: {listed}{', …' * (len(models) > _LISTED)}"
        raise ConfigError.of(command, "TARGET", f"{show(str(path))}, which is none itself", want, fix)
    if not path.exists():
        want = "the folder of a run, a checkpoint, or a model in Hugging Face's layout; there is none of this name"
        fix = f"correct the path; a model of the hub is {HUB}OWNER/MODEL"
        raise ConfigError.of(command, "TARGET", show(str(path)), want, fix)
    target = _of_hub_folder(command, str(path), tokenizer)
    if averaged:
        raise _no_average(str(path))
    return target


def _no_average(path: str) -> ConfigError:
    want, fix = "a run, or a checkpoint of one: a folder of weights has no second ones", "leave it out"
    return ConfigError.of("command line", "--ema", path, want, fix)


def _fetched(name: str) -> str:
    """Fetch a model of the hub, but for its tokenizer; return its name with the commit."""
    say_first(f"looking for {name} on the hub, then in this host's cache")
    name = resolve_name(name, "TARGET")[0]
    fetch_description(name, "TARGET")
    fetch_weights(name, "TARGET")
    return name


def _models_in(folder: Path) -> list[Path]:
    """Return the runs, checkpoints and models in Hugging Face's layout that are in a folder, sorted by name."""
    with suppress(OSError):
        return sorted(
            path
            for path in folder.iterdir()
            if (path / "config.toml").is_file()
            or (path / "config.json").is_file()
            or (folder.name == "checkpoints" and publish.step_of(path) is not None)
        )
    return []


def _of_run(command: str, folder: RunFolder, step: str | None, tokenizer: str | None, averaged: bool) -> TrainedModel:
    config, number = read_config(folder.config)[0], asked_step(command, folder.checkpoints, step)
    checkpoint = publish.step_folder(folder.checkpoints, number)
    state = read_state(checkpoint, number)
    if averaged:
        require_average(command, checkpoint, state)
    name = tokenizer or config.data.tokenizer
    found = trained_tokenizer(command, name, config.data.add_bos_token, state.tokenizer)
    if found is None:  # the run read token files, which name no tokenizer
        if tokenizer is None:
            want = "the tokenizer.json that made the token files which the run read"
            raise CheckpointError.of(command, "--tokenizer", "", want, "--tokenizer FILE")
        found = load_tokenizer(tokenizer, config.data.add_bos_token)
    dims = dims_of(checkpoint, state)
    return TrainedModel(folder.path, config, dims, found, config.training.seq_len, checkpoint, averaged)


def _of_hub_folder(command: str, path: str, tokenizer: str | None) -> TrainedModel:
    """Read a folder in Hugging Face's layout; `path` is its path, or a name of the hub that was fetched."""
    problems = Problems(Origin(command))
    found = recipe_of(path, problems, "TARGET")
    if found is not None:
        check_weight_files(path, problems, "TARGET")
    problems.raise_all()
    assert found is not None  # noqa: S101  # else `raise_all` has raised
    architecture, dims = found
    folder = folder_of(path)
    content: dict[str, Any] = read_json(folder / "config.json")
    stored = content.get("dtype") or content.get("torch_dtype")  # transformers 5 writes "dtype"
    dtype = "bfloat16" if stored == "bfloat16" else "float32"
    file = tokenizer or (path if is_hub_name(path) else str(folder / "tokenizer.json"))
    model = Model(name=architecture, flavor=FROM_CHECKPOINT)
    config = Config(model=model, training=Training(mixed_precision_param=dtype))
    config = replace(config, checkpoint=replace(config.checkpoint, initial_load_path=path))
    trained = content.get("max_position_embeddings")
    longest = dims.max_seq_len or (trained if isinstance(trained, int) and trained > 0 else Training.seq_len)
    return TrainedModel(folder, config, dims, load_tokenizer(file, _begins_with_bos(file)), longest)


def _begins_with_bos(file: str) -> bool:
    """Return whether a tokenizer.json makes transformers put a token, as BOS, before each text."""
    import tokenizers

    if file == "bytes" or not os.path.isfile(path := tokenizer_file(file)):
        return False
    with suppress(Exception), panics_raised():  # no tokenizer (`load_tokenizer` refuses it), or no token for "a"
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        whole, bare = (tokenizer.encode("a", add_special_tokens=adds).ids for adds in (True, False))
        return len(whole) > len(bare) and whole[0] != bare[0]
    return False


def asked_step(command: str, root: Path, asked: str | None) -> int:
    """Return the step `asked` of the checkpoints in `root`: a number, or "best", by the loss of `checkpoint.keep_best`.

    None is the newest. Raises a CheckpointError that begins with `command` if `root` has no such checkpoint.
    """
    steps = publish.complete_steps(root)
    if asked == "best" and steps:
        key, losses = read_config(root.parent / "config.toml")[0].checkpoint.keep_best, dict[int, RankedLoss | None]()
        for error in losses_of(root, key, losses).values():
            raise error
        if (best := best_of(losses)) is not None:
            return best
        want = (
            f"a checkpoint with a {key} that was measured at its own step" if key else "a run with checkpoint.keep_best"
        )
        raise CheckpointError.of(command, "--step", asked, want, f"one of {', '.join(map(str, steps))}")
    step = int(asked) if asked and asked.isdecimal() and len(asked) < 20 else None
    if steps and (asked is None or step in steps):
        return steps[-1] if step is None else step
    if steps:
        want = f"one of {', '.join(map(str, steps))}"
        raise CheckpointError.of(command, "--step", asked or "", want, f"--step {steps[-1]}")
    raise CheckpointError.of(command, "checkpoints", show(str(root)), "a complete one; there is none", _fix(root))


def _fix(root: Path) -> str:
    """Return what to do about a run that has no complete checkpoint in `root`, its folder of them."""
    config = read_config(root.parent / "config.toml")[0]
    if not config.checkpoint.enable:
        return "train with checkpoint.enable = true: this run saves none"
    if RunFolder(root.parent).seems_in_use():
        first = min(config.checkpoint.interval, last_step(config))
        return f"wait: the run is still training, and saves its first one after step {first}"
    return "start the run again, or name one that has saved a checkpoint"


def trained_tokenizer(command: str, name: str, add_bos: bool, fingerprint: str) -> Tokenizer | None:
    """Return the tokenizer that a run was trained with, None if it read token files.

    Args:
        command: name of the command, for the error message.
        name: the value of `data.tokenizer`, or of `--tokenizer` in its place.
        add_bos: `data.add_bos_token`.
        fingerprint: the tokenizer's fingerprint in the checkpoint, which `name` must match; "" for token files.
    """
    if not fingerprint:
        return None
    path = tokenizer_file(name)
    require_reachable(path)
    is_there = name == "bytes" or os.path.isfile(path)
    tokenizer = load_tokenizer(name, add_bos) if is_there else None
    if tokenizer is None or tokenizer.fingerprint != fingerprint:
        saw = "this file is not it, or was changed" if is_there else f"there is no such file, seen from {Path.cwd()}"
        want = f"the tokenizer that the run was trained with; {saw}"
        fix = "--tokenizer with the path of that tokenizer.json"
        raise CheckpointError.of(command, "data.tokenizer", repr(name), want, fix)
    return tokenizer
