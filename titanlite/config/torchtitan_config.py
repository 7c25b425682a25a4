"""Say what each key of a torchtitan config is in titanlite, where that depends on its value or on other keys.

What a key always is says `torchtitan.py`. Here are also the keys that ask for nothing, and the defaults that differ.
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
    """The keys of a torchtitan config, those of titanlite among them, and the defaults there of all others."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given

    def __call__(self, key: str) -> Any:
        """Return the value; the default for one of another type."""
        return self.given.get(key, default_there(key)) if self.fits(key) else default_there(key)

    def fits(self, key: str) -> bool:
        """Return whether a value, if one is given, has the type of the default, where that has one."""
        default = default_there(key)
        value = self.given.get(key, default)
        return default is None or type(value) is type(default) or (type(default) is float and type(value) is int)

    def asks_nothing(self, key: str) -> bool:
        """Return whether a key of torchtitan's own asks for nothing, or for what titanlite does anyway."""
        if not self.fits(key):
            return False
        is_default = self(key) == default_there(key) and key not in ASKED_BY_DEFAULT
        return is_default or key.startswith(IDLE) or self.is_off(key) or self._is_settled(key)

    def is_off(self, key: str) -> bool:
        """Return whether a key belongs to a feature that is not on."""
        off = (s for s, keys in SWITCHES.items() if s not in (key, *stands_for(key)) and key.startswith(keys))
        return not all(map(self._is_on, off))

    def _is_on(self, switch: str) -> bool:
        """Return whether a feature is on, by its switch or by what an earlier release called that."""
        names = [key for key in self.given if KEYS.get(key) == (None, f"use {switch} = {{}}")]
        return any(self(name) not in (default_there(switch), None) for name in (switch, *names))

    def _is_settled(self, key: str) -> bool:
        """Return whether another key covers this one, or its value is what titanlite has."""
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
        """Say what a key is here."""
        value: Any = self(key)
        text = answer_to_key(key) or ""
        if not self.fits(key):
            return text.replace(" = {}", "")
        match key.split("."):
            case ["optimizer", "name"] if value == "Adam":
                text += " with optimizer.weight_decay = 0.0: Adam without its L2 penalty"
            case ["optimizer", "name"] if value.lower() != "adamw":  # as titanlite 0.1.0 wrote it
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
        """Return a round number of tokens, at least what the run takes where its ranks are known."""
        ranks = self("parallelism.data_parallel_replicate_degree") * self("parallelism.data_parallel_shard_degree")
        batch = max(self("training.global_batch_size"), self("training.local_batch_size") * ranks)
        takes = batch * self("training.steps") * self("training.seq_len") * 11 // 10
        if takes < 1:
            return 100_000_000
        unit = 10 ** (len(str(takes)) - 1)
        return -(-takes // unit) * unit

    def _filters(self, kind: str, given: list[str]) -> tuple[list[str], str]:
        """Return the layers that a conversion leaves alone, by their names here, and a remark."""
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
        """Return whether layers are converted to `kind`; linear ones also under their name of the release before."""
        names = (f"quantize.{part}.{kind}", *((kind,) if part == "linear" else ()))
        return any(name in names for name in self("model.converters"))

    def left_out(self, given: Collection[str]) -> dict[str, str]:
        """Return the keys of titanlite that are not `given` and have another default, with that of torchtitan."""
        found = {key: show(value) for key, value in UNSAID.items()}
        for key, (default, answer) in KEYS.items():
            if key in self.given or self.is_off(key):
                continue
            if key in ASKED_BY_DEFAULT:
                found |= {} if self._is_settled(key) else dict(SETS.findall(self.answer(key)))
            elif answer is None and key != BATCH:
                found[key] = show(default)
        if self("training.steps") < self("lr_scheduler.warmup_steps"):  # where warm-up is as long as the run at most
            found["lr_scheduler.warmup_steps"] = show(self("training.steps"))
        if self("model.name") == "qwen3":  # whose tokenizers have no bos_token
            del found[BOS]
        if MASKS.fullmatch(str(self("model.flavor"))):
            del found["data.document_mask"]
        there = {key: found[key] for key in schema_keys() if key in found and key not in given}
        return {key: value for key, value in there.items() if value != show(attrgetter(key)(Config()))}


def save_list(mode: str, option: str) -> str:
    """Say which save-list an `activation_checkpoint.mode` of torchtitan is."""
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
    """Return the keys that are set here where torchtitan sets `key`."""
    answer = answer_to_key(key) or ""
    return {*re.findall(r"[a-z0-9_]+\.[a-z0-9_]+", answer if answer.startswith("use ") else "")}


def default_there(key: str) -> Any:
    """Return torchtitan's default of a key; None where it has none, or has no counterpart but for its beginning."""
    if key in KEYS:
        return KEYS[key][0]
    return attrgetter(key)(Config()) if key in schema_keys() else None
