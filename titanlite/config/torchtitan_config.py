"""Find titanlite's counterpart of each key of a torchtitan config, if it depends on the value or on other keys.

`torchtitan.py` lists the answers that are always the same. This module also finds keys that would change nothing, and
defaults that differ.
"""

import os
import re
from collections.abc import Collection, Mapping
from operator import attrgetter
from typing import Any, cast

from titanlite.config.architectures import ARCHITECTURES
from titanlite.config.problems import show
from titanlite.config.schema import Config, schema_keys
from titanlite.config.torchtitan import (
    ASKED_BY_DEFAULT,
    DATASETS,
    DEFAULTS,
    IDLE,
    KEYS,
    MASKS,
    MODELS,
    SWITCHES,
    UNSAID,
    VALUES,
    answer_to_key,
    flavor,
)

BOS = "data.add_bos_token"
BATCH = "training.global_batch_size"
SETS = re.compile(r'([a-z0-9_]+\.[a-z0-9_]+) = ("[^"]*"|\[[^]]*\]|[-+.\w]+)')


class TorchtitanConfig:
    """The values of a torchtitan config, with torchtitan's defaults for keys that are not given."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given

    def __call__(self, key: str) -> Any:
        """Return the value of `key`, or torchtitan's default if the key is missing or its value has another type."""
        return self.given.get(key, default_there(key)) if self.fits(key) else default_there(key)

    def fits(self, key: str) -> bool:
        """Return whether the value of `key` has the type of its default. True if either is missing."""
        default = default_there(key)
        value = self.given.get(key, default)
        return default is None or type(value) is type(default) or (type(default) is float and type(value) is int)

    def asks_nothing(self, key: str) -> bool:
        """Return whether a key that titanlite lacks can be left out: no effect, or titanlite does the same anyway."""
        if not self.fits(key):
            return False
        is_default = self(key) == default_there(key) and key not in ASKED_BY_DEFAULT
        return is_default or key.startswith(IDLE) or self.is_off(key) or self._is_settled(key)

    def is_off(self, key: str) -> bool:
        """Return whether a key belongs to a feature that is switched off."""
        off = (s for s, keys in SWITCHES.items() if s not in (key, *stands_for(key)) and key.startswith(keys))
        return not all(map(self._is_on, off))

    def _is_on(self, switch: str) -> bool:
        """Return whether a feature is on, by `switch` or by the name of this key in an earlier release."""
        names = [key for key in self.given if KEYS.get(key) == (None, f"use {switch} = {{}}")]
        return any(self(name) not in (default_there(switch), None) for name in (switch, *names))

    def _is_settled(self, key: str) -> bool:
        """Return whether another given key replaces `key`, or its value is what titanlite does anyway."""
        mode = "activation_checkpoint.mode"
        if (here := stands_for(key)) and here <= {*self.given}:
            return True
        match key.split("."):
            case ["quantize", part, kind, name]:
                return name == "recipe_name" or not self._converts(kind, part)
            case ["validation", "local_batch_size" | "seq_len" as name]:
                return self(key) == self(f"training.{name}")
            case [section, "dataset"]:
                return f"{section}.dataset_path" in self.given
            case [_, "hf_assets_path"]:
                return "model.tokenizer_path" in self.given
            case [_, "initial_load_in_hf"]:
                return self(key) is True
            case [_, "total_steps"]:
                return self(key) == self("training.steps")
            case [_, "memory_budget" | "visualize_memory_budget_pareto"]:
                return self(mode) != "memory_budget"
            case [_, "selective_ac_option"]:
                return mode in self.given
            case _:
                return False

    def answer(self, key: str) -> str:
        """Return how to write `key` and its value in titanlite, or why to remove it."""
        value: Any = self(key)
        text = answer_to_key(key) or ""
        if not self.fits(key):
            return text.replace(" = {}", "")
        match key.split("."):
            case ["optimizer", "name"] if value == "Adam":
                text += " with optimizer.weight_decay = 0.0: Adam without its L2 penalty"
            case ["optimizer", "name"] if value.lower() != "adamw":  # titanlite 0.1.0 wrote "adamw"
                return "use optimizer.recipe, with one that `titanlite recipes optimizer` lists"
            case ["model", "flavor"]:
                return flavor(MODELS.get(self("model.name")) or self("model.name"), value) or ""
            case ["model", "converters"] if self._converts("float8"):
                return f"use float8.recipe = {show(self('quantize.linear.float8.recipe_name') or 'tensorwise')}"
            case ["model", "converters"] if self._converts("mx"):
                return KEYS["quantize.linear.mx.recipe_name"][1] or ""
            case ["model", "hf_assets_path" | "tokenizer_path"] if not str(value).endswith(".json"):
                folder = os.path.dirname(str(value)) if str(value).endswith(".model") else str(value)
                value = os.path.join(folder, "tokenizer.json")
            case ["activation_checkpoint", "mode" | "selective_ac_option"]:
                return save_list(self("activation_checkpoint.mode"), self("activation_checkpoint.selective_ac_option"))
            case ["training" | "validation" as section, "dataset"] if value in DATASETS:
                source = f"use {section.replace('training', 'data')}.source = {show(DATASETS[value])}"
                if (section, value) != ("training", "c4") or "data.max_tokens" in self.given:
                    return source
                why = "all of it is 156 billion tokens, which are tokenized before the first step"
                return f"{source}, with data.max_tokens = {self._tokens():_}: {why}"
            case [section, "dataset_path"]:
                _, _, of_c4 = DATASETS.get(self(f"{section}.dataset"), "").removeprefix("hf:").partition(":")
                value = f"hf:{value}:{of_c4}".rstrip(":")
            case [_, "total_steps"] if isinstance(value, int) and value > self("training.steps"):
                text += f" with job.stop_after = {self('training.steps')}"
            case [*_, kind, "filter_fqns"]:
                value, more = self._filters(kind, cast("list[str]", value))
                text += more
            case _:
                pass
        return text.replace("{}", show(value))

    def _tokens(self) -> int:
        """Return a round number of tokens, at least those of the run; 100 million if the number of ranks is unknown."""
        ranks = self("parallelism.data_parallel_replicate_degree") * self("parallelism.data_parallel_shard_degree")
        batch = max(self("training.global_batch_size"), self("training.local_batch_size") * ranks)
        takes = batch * self("training.steps") * self("training.seq_len") * 11 // 10
        if takes < 1:
            return 100_000_000
        unit = 10 ** (len(str(takes)) - 1)
        return -(-takes // unit) * unit

    def _filters(self, kind: str, given: list[str]) -> tuple[list[str], str]:
        """Return the layers that the conversion to `kind` excludes, by titanlite's names, and a remark on them."""
        kept, said = [one for one in given if one != "auto_filter_small_kn"], ""
        if len(kept) < len(given):
            said += "; titanlite has no auto_filter_small_kn"
        name = dict(SETS.findall(self.answer("model.flavor"))).get("model.name", "").strip('"') or self("model.name")
        if name not in ARCHITECTURES or "experts" not in ARCHITECTURES[name].needs:
            return kept, said
        named = [one for one in kept if one.rpartition(".")[2] not in ("router", "gate")]
        if len(named) < len(kept):
            said += "; routers are in float32 always"
        if not (self._converts(kind, "grouped_mm") and self(f"quantize.grouped_mm.{kind}.fqns")):
            named += ["experts.w13", "experts.w2"]
            said += "; experts are not converted, as there"
        return named, said

    def _converts(self, kind: str, part: str = "linear") -> bool:
        """Return whether `model.converters` converts a `part` to `kind`; linear layers also by an older, short name."""
        names = (f"quantize.{part}.{kind}", *((kind,) if part == "linear" else ()))
        return any(name in names for name in self("model.converters"))

    def left_out(self, given: Collection[str]) -> dict[str, str]:
        """Return key → torchtitan's default, in TOML syntax, for keys that are not `given` and differ in it."""
        found = {key: show(value) for key, value in UNSAID.items()}
        for key, (default, answer) in KEYS.items():
            if key in self.given or self.is_off(key):
                continue
            if key in ASKED_BY_DEFAULT:
                found |= {} if self._is_settled(key) else dict(SETS.findall(self.answer(key)))
            elif answer is None and key != BATCH:
                found[key] = show(default)
        if self("training.steps") < self("lr_scheduler.warmup_steps"):  # torchtitan shortens warm-up to the run
            found["lr_scheduler.warmup_steps"] = show(self("training.steps"))
        if self("model.name") == "qwen3":  # its tokenizers have no bos_token
            del found[BOS]
        if MASKS.fullmatch(str(self("model.flavor"))):
            del found["data.document_mask"]
        there = {key: found[key] for key in schema_keys() if key in found and key not in given}
        return {key: value for key, value in there.items() if value != show(attrgetter(key)(Config()))}


def save_list(mode: str, option: str) -> str:
    """Return advice on the save-list for torchtitan's `activation_checkpoint.mode` and `selective_ac_option`."""
    here = VALUES["activation_checkpoint.recipe"]
    if mode == "memory_budget":
        return here[mode]
    if mode != "selective":
        return f"use activation_checkpoint.recipe = {show(mode)}"
    if option == "op":
        return 'use activation_checkpoint.recipe = "every_second_matmul"'
    why = f"no save-list recomputes one of every {option} blocks" if option != "1" else "all blocks are recomputed"
    return f"{here[mode]}; {why}"


def stands_for(key: str) -> set[str]:
    """Return the keys of titanlite that take the place of torchtitan's `key`."""
    answer = answer_to_key(key) or ""
    return {*re.findall(r"[a-z0-9_]+\.[a-z0-9_]+", answer if answer.startswith("use ") else "")}


def default_there(key: str) -> Any:
    """Return torchtitan's default of a key; None if it has none."""
    if key in KEYS:
        return KEYS[key][0]
    return attrgetter(key)(Config()) if key in schema_keys() else DEFAULTS.get(key)
