"""Collect facts of a run that its config lacks, to find and filter runs by: GPUs, parameters, commit of the code."""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from titanlite.config.schema import Config

_ROOT = Path(__file__).parents[2]  # folder of the git checkout, if titanlite runs from one
_TAG = 64  # characters of the longest tag that Weights & Biases accepts


def run_facts(parameters: int, world: int, device: torch.device) -> dict[str, Any]:
    """Return facts by their names in wandb's config, for a model of `parameters` parameters on `world` ranks."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    facts: dict[str, Any] = {"world_size": world, "gpu": gpu, "parameters": parameters}
    commit = commit_of(_ROOT)
    return facts | ({"commit": commit} if commit else {})


def tags_of(config: Config, facts: Mapping[str, Any]) -> list[str]:
    """Return a run's tags for Weights & Biases: its model, its recipes, and its `run_facts` as readable text."""
    model = Path(config.model.file).stem if config.model.file else config.model.name
    world, parameters = facts["world_size"], facts["parameters"]
    tags = [
        f"{model} {config.model.flavor}",
        f"{parameters / 1e9:.3g}B parameters" if parameters >= 1e9 else f"{parameters / 1e6:.3g}M parameters",
        f"{world} × {facts['gpu']}",
        f"world size {world}",
        f"save-list {config.activation_checkpoint.recipe}",
        f"float8 {config.float8.recipe}" if config.float8.recipe != "none" else config.training.mixed_precision_param,
    ]
    if "commit" in facts:
        commit, _, changed = facts["commit"].partition(" ")
        tags.append(f"commit {commit[:8]} {changed}".rstrip())
    return [tag[:_TAG] for tag in tags]


def commit_of(root: Path) -> str | None:
    """Return the commit of the git checkout at `root`, and whether files differ from it; None without a checkout."""
    if not (root / ".git").exists():
        return None
    git = ["git", "-c", f"safe.directory={root}", "-C", str(root)]  # accept another user's checkout: it is only read
    named = ["describe", "--always", "--exclude=*", "--abbrev=64", "--dirty= with changes"]
    try:
        return subprocess.run([*git, *named], capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # no git here, or no commit yet
        return None
