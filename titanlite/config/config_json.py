"""Read the config.json of a folder of weights, make a model recipe from it, and compare this with a config's model.

`architectures.py` decides which keys are used and which are refused. Tensors are compared when they are loaded.
"""

import os
from collections.abc import Mapping
from typing import Any, cast

from titanlite.config.architectures import ARCHITECTURES, Architecture
from titanlite.config.build import from_table, show
from titanlite.config.check_recipe import check_model
from titanlite.config.hugging_face import computed, layer_types, model_keys, recipe_table, weight_files
from titanlite.config.problems import Origin, Problems
from titanlite.config.recipe_schema import ROUTER_TRAINING, ModelDims
from titanlite.config.schema import FROM_CHECKPOINT, Config
from titanlite.hub import HUB, folder_of, is_hub_name, wrong_name
from titanlite.json_file import MALFORMED, read_json

KEY = "checkpoint.initial_load_path"


_OTHER = "name another folder: titanlite has no such model"


def recipe_of(path: str, problems: Problems, key: str) -> tuple[str, ModelDims] | None:
    """Return the architecture and dimensions of the model in the folder `path`.

    If titanlite cannot compute this model, add problems at the config key `key`, and return None.
    """
    file = folder_of(path) / "config.json"
    try:
        content = cast(dict[str, Any], read_json(file))
        kind = content.get("model_type")
        architecture = next((name for name, known in ARCHITECTURES.items() if known.model_type == kind), None)
    except _UNREADABLE as error:
        _add_unreadable(path, error, problems, key)
        return None
    try:
        theirs = _meaning(architecture, content) if architecture else {}
    except _UNREADABLE as error:
        want = f"a config.json of {kind} as transformers writes it; its values are of other types ({error})"
        problems.add(key, show(path), want, "fetch the folder again")
        return None
    if architecture is None:
        types = ", ".join(known.model_type for known in ARCHITECTURES.values())
        want = f"a config.json whose model_type is one of {types} (it says {kind})"
        problems.add(key, show(path), want, "name the folder of such a model: titanlite has no other architectures")
        return None
    own, layout = Problems(Origin(str(file))), ARCHITECTURES[architecture]
    recipe = from_table(ModelDims, {**recipe_table(architecture, theirs), "help": f"As {file} says."}, own)
    if recipe is not None and not own:
        check_model(recipe, own)
    if recipe is None or own:
        theirs_of = {of.ours: name for name, of in layout.fields.items() if of.ours} | {"head_dim": "head_dim"}
        odd: list[str] = []
        for problem in own.found():
            name = theirs_of.get(problem.where) or problem.where.partition(".")[0]  # a table, as rope_scaling
            odd.append(f"{name} (it says {_value_said(theirs.get(name))}, which is not {problem.want})")
        problems.add(key, show(path), f"a config.json with another value as {', '.join(odd)}", _OTHER)
        return None
    ours = {**_left_out(layout), **model_keys(layout, recipe)}
    ours["layer_types"] = layer_types(recipe)
    differ = [k for k, value in theirs.items() if value != ours.get(k, value) and (value or ours[k])]  # null is false
    wrong = [f"{name} = {ours[name]} (it says {theirs[name]})" for name in differ]
    unknown = [name for name, value in theirs.items() if name not in ours and value]  # a false one has no effect
    if wrong:
        want = f"a {layout.model_type} as titanlite computes it, with {', '.join(wrong)}"
        problems.add(key, show(path), want, _OTHER)
    if unknown:
        want = f"a config.json without {', '.join(unknown)}, which may change the model"
        fix = f"remove from {file} what {layout.hub_class} makes nothing of; or name another folder"
        problems.add(key, show(path), want, fix)
    return None if wrong or unknown else (architecture, recipe)


def _meaning(architecture: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Normalise the config.json of any transformers release: add defaults, unify names, drop keys without effect."""
    layout = ARCHITECTURES[architecture]
    left_out, ignored = _left_out(layout), layout.ignored
    theirs = {**left_out, **content}
    for alias, name in layout.aliases.items():
        if alias in theirs:
            theirs[name] = theirs.pop(alias)
    if "rope_theta" in left_out:
        _unify_rope(theirs, of_two_kinds="rope_local_base_freq" in left_out)
        theirs["num_key_value_heads"] = theirs["num_key_value_heads"] or theirs["num_attention_heads"]
        theirs["head_dim"] = theirs["head_dim"] or theirs["hidden_size"] // theirs["num_attention_heads"]
    else:
        theirs["n_inner"] = theirs["n_inner"] or 4 * theirs["n_embd"]
    if "layer_types" in left_out:
        every, layers = theirs.pop("sliding_window_pattern", 0), range(1, theirs["num_hidden_layers"] + 1)
        made = ["sliding_attention" if every and n % every else "full_attention" for n in layers]
        types = theirs["layer_types"] = theirs["layer_types"] or made
        if every:
            theirs["sliding_window_pattern"] = [*types, "full_attention"].index("full_attention") + 1
    return {key: value for key, value in theirs.items() if key not in ignored}


def _left_out(layout: Architecture) -> dict[str, Any]:
    return {name: of.left_out for name, of in layout.fields.items()}


def _unify_rope(theirs: dict[str, Any], of_two_kinds: bool) -> None:
    """Unify keys of rotary positions to `rope_theta` and `rope_scaling`. `of_two_kinds`: local layers have own keys."""
    both, former = (cast(dict[str, Any], theirs.pop(key, None) or {}) for key in ("rope_parameters", "rope_scaling"))
    full, local = former or both, dict[str, Any]()
    if of_two_kinds or ("full_attention" in both and "layer_types" in theirs):
        kinds = ("full_attention", "sliding_attention")
        full, local = (cast(dict[str, Any], both.pop(kind, None) or {}) for kind in kinds)
        full = {**full, **former}
        theirs |= {"rope_parameters": both} if both else {}  # keys for neither kind of layers
    beside = theirs.pop("partial_rotary_factor", None), theirs.pop("original_max_position_embeddings", None)
    scalings = [_scaling(kind, *beside, theirs.get("max_position_embeddings")) for kind in (full, local)]
    theirs["rope_scaling"] = next(filter(None, scalings), None)
    theirs["rope_theta"] = full.get("rope_theta", theirs["rope_theta"])
    if of_two_kinds:
        theirs["rope_local_base_freq"] = local.get("rope_theta", theirs["rope_local_base_freq"])


def _scaling(rope: Mapping[str, Any], part: float | None, length: int | None, longest: object) -> dict[str, Any] | None:
    """Return the scaling of rotary positions, or None. `part`, `length`, `longest`: values of keys outside `rope`."""
    kind, part = rope.get("rope_type", rope.get("type", "default")), rope.get("partial_rotary_factor", part)
    scaling = {"rope_type": kind}
    if kind != "default":  # "default" ignores other keys
        scaling |= {key: value for key, value in rope.items() if key not in ("type", "rope_theta")}
    if kind == "llama3":
        scaling["original_max_position_embeddings"] = length or rope.get("original_max_position_embeddings", longest)
    if part in (None, 1):
        scaling.pop("partial_rotary_factor", None)
    else:
        scaling["partial_rotary_factor"] = part
    return None if scaling == {"rope_type": "default"} else scaling


def model_of(config: Config, origin: Origin) -> ModelDims:
    """Make the recipe of a run's initial weights. Raise ConfigError if none are given, or those of another model."""
    path, problems = config.checkpoint.initial_load_path, Problems(origin)
    if not path:
        want = f"{KEY} as well: the folder whose config.json has the dimensions"
        problems.add("model.flavor", show(FROM_CHECKPOINT), want, f'{KEY} = "FOLDER"')
    for name, value in vars(config.model).items():
        if value is not None and name not in ("name", "file", "flavor"):
            want = f"not given with model.flavor = {show(FROM_CHECKPOINT)}: all dimensions are the folder's"
            problems.add(f"model.{name}", show(value), want, "remove it")
    found = _of_config(config, path, problems) if path else None
    problems.raise_all()
    return cast(ModelDims, found)


def check_initial_load_path(config: Config, dims: ModelDims, origin: Origin) -> None:
    """Raise a ConfigError with all differences if the folder of initial weights is missing or has another model."""
    path, problems = config.checkpoint.initial_load_path, Problems(origin)
    recipe = _of_config(config, path, problems)
    problems.raise_all()
    its, own = computed(cast(ModelDims, recipe)), computed(dims)
    keys = [key for key in {**its, **own} if key.removeprefix("experts.") not in ROUTER_TRAINING]
    differ = [
        f"{k} = {_value_said(own.get(k))} (the folder has {_value_said(its.get(k))})"
        for k in keys
        if own.get(k) != its.get(k)
    ]
    if differ:
        want = f"a folder of this config's model: {', '.join(differ)}"
        fix = f'model.flavor = "{FROM_CHECKPOINT}", and no other dimensions in [model]: all are the folder\'s'
        problems.add(KEY, show(path), want, fix)
    check_weight_files(path, problems, KEY)
    problems.raise_all()


def _value_said(value: object) -> str:
    return show(value) or str(value)  # str for a table, of which `show` returns ""


def check_weight_files(path: str, problems: Problems, key: str) -> None:
    """Add a problem if files of weights are missing from a folder, or if their index is damaged.

    Those of a model of the hub need not be there yet: `hub.fetch_description` has found that the hub has them.
    """
    try:
        missing = [file.name for file in weight_files(folder_of(path)) if not file.is_file()]
        if missing and not is_hub_name(path):
            want = f"{', '.join(missing)} in it"
            problems.add(key, show(path), want, "fetch the folder again, with its safetensors")
    except _UNREADABLE as error:
        _add_unreadable(path, error, problems, key)


def _of_config(config: Config, path: str, problems: Problems) -> ModelDims | None:
    """Return the recipe of a folder's model. If the config has another architecture, add a problem and return None."""
    if config.model.file:
        want = "a shipped architecture: what the weights of others are called there is not known"
        problems.add("model.file", show(config.model.file), want, f"remove it, or {KEY}")
        return None
    if (found := recipe_of(path, problems, KEY)) is None:
        return None
    architecture, recipe = found
    if architecture == config.model.name:
        return recipe
    want = f'"{architecture}", as config.json in {path} says'
    fix = f'name = "{architecture}", with flavor = "{FROM_CHECKPOINT}"'
    problems.add("model.name", show(config.model.name), want, fix)
    return None


_UNREADABLE = (OSError, *MALFORMED)


def _add_unreadable(path: str, error: Exception, problems: Problems, key: str) -> None:
    """Add the problem that `path` is no folder in Hugging Face's layout, with advice on what was probably meant."""
    folder = folder_of(path)
    saw = show(path)
    if isinstance(error, FileNotFoundError) and os.path.isdir(folder) and not (folder / "config.json").exists():
        saw += ", which has no config.json"
    want = f"a folder in Hugging Face's layout, with config.json and safetensors ({error})"
    is_name = wrong_name(f"{HUB}{path}") is None and not os.path.isdir(folder.parent)
    fix = f"correct the path{f'; or, for the model of the hub, {show(HUB + path)}' if is_name else ''}"
    problems.add(key, saw, want, fix)
