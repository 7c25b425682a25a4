import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from titanlite.config.architectures import ARCHITECTURES
from titanlite.config.hugging_face import LAYOUTS, _dimensions_of, check_initial_load_path, config_json, weight_files
from titanlite.config.problems import Origin
from titanlite.config.schema import Checkpoint, Config, Model
from titanlite.errors import ConfigError
from titanlite.recipes import load


def check(folder: Path | str, name: str = "llama3", flavor: str = "8B", **model: Any) -> None:
    config = Config(
        model=Model(name=name, flavor=flavor, **model), checkpoint=Checkpoint(initial_load_path=str(folder))
    )
    check_initial_load_path(config, load("model", f"{name}-{flavor}"), Origin("config"))


def make_folder(folder: Path, name: str = "llama3", flavor: str = "8B", **over: object) -> Path:
    """Of a published size, with keys changed, or left out by an ellipsis."""
    said = config_json(LAYOUTS[name], load("model", f"{name}-{flavor}"), 8192, "bfloat16", 0) | over
    (folder / "config.json").write_text(json.dumps({key: value for key, value in said.items() if value is not ...}))
    (folder / "model.safetensors").touch()
    return folder


def test_every_architecture_has_a_layout() -> None:
    assert LAYOUTS.keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize("size", ["llama3-1B", "llama3-8B", "qwen3-0.6B", "gemma3-1B", "gpt2-124M"])
def test_what_is_exported_is_accepted(size: str, tmp_path: Path) -> None:
    name, flavor = size.split("-")
    check(make_folder(tmp_path, name, flavor), name, flavor)


def test_both_forms_of_rotary_positions(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    new = {"rope_type": "llama3", "rope_theta": 500000.0, **scaling}
    check(make_folder(tmp_path, rope_theta=..., rope_scaling=..., rope_parameters=new))
    for wrong, says in (({"factor": 32.0}, r"'factor': 32\.0"), ({"rope_theta": 1e4}, r"rope_theta = 500000\.0")):
        with pytest.raises(ConfigError, match=says):
            check(make_folder(tmp_path, rope_theta=..., rope_scaling=..., rope_parameters=new | wrong))
    with pytest.raises(ConfigError, match=r"rope_scaling = .*\(it says None\)"):
        check(make_folder(tmp_path, rope_scaling=...))
    with pytest.raises(ConfigError, match=r"rope_scaling = .*\(it says None\)"):
        check(make_folder(tmp_path, rope_scaling={"rope_type": "default"}))
    check(make_folder(tmp_path, "qwen3", "0.6B", rope_scaling={"rope_type": "default"}), "qwen3", "0.6B")


def test_both_forms_of_two_kinds_of_layers(tmp_path: Path) -> None:
    def folder(full: float, local: float) -> Path:
        new = {"full_attention": {"rope_theta": full}, "sliding_attention": {"rope_theta": local}}
        return make_folder(tmp_path, "gemma3", "1B", rope_theta=..., rope_local_base_freq=..., rope_parameters=new)

    check(folder(1e6, 1e4), "gemma3", "1B")
    with pytest.raises(ConfigError, match="rope_theta = 1000000"):
        check(folder(2e6, 1e4), "gemma3", "1B")
    with pytest.raises(ConfigError, match="rope_local_base_freq = 10000"):
        check(folder(1e6, 1e5), "gemma3", "1B")


LEFT_OUT = {
    "llama3-8B": "rope_theta = 500000.0 (it says 10000.0), rms_norm_eps = 1e-05 (it says 1e-06)",
    "qwen3-0.6B": "rope_theta = 1000000.0 (it says 10000.0), tie_word_embeddings = True (it says False)",
    "gemma3-1B": "sliding_window = 512 (it says 4096)",
    "gpt2-124M": "",
}


@pytest.mark.parametrize("size", LEFT_OUT)
def test_what_a_folder_leaves_out_is_what_transformers_takes(size: str, tmp_path: Path) -> None:
    name, flavor = size.split("-")
    keys = {"rope_theta", "rms_norm_eps", "tie_word_embeddings", "sliding_window", "layer_norm_epsilon", "rope_scaling"}
    folder = make_folder(tmp_path, name, flavor, **dict.fromkeys(keys, ...))
    said = json.loads((folder / "config.json").read_text())
    assert not keys & said.keys()
    if not LEFT_OUT[size]:
        check(folder, name, flavor)
        return
    with pytest.raises(ConfigError) as caught:
        check(folder, name, flavor)
    for words in LEFT_OUT[size].split(", "):
        assert words in str(caught.value)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.filterwarnings("default")  # transformers' own
def test_these_are_the_values_that_transformers_has(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    layout = LAYOUTS[name]
    transformers.AutoConfig.for_model(layout.model_type).to_json_file(tmp_path / "config.json", use_diff=False)
    theirs = _dimensions_of(tmp_path / "config.json")
    assert {key: theirs.get(key) for key in layout.unsaid} == layout.unsaid


@pytest.mark.parametrize(
    ("size", "key", "value"),
    [
        ("llama3-1B", "rope_scaling", {"type": "linear", "factor": 2.0}),
        ("qwen3-0.6B", "rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("qwen3-0.6B", "quantization_config", {"quant_method": "fp8"}),
        ("gemma3-1B", "rope_scaling", {"rope_type": "linear", "factor": 8.0}),
        ("gemma3-1B", "final_logit_softcapping", 30.0),
        ("gemma3-1B", "attn_logit_softcapping", 50.0),
        ("gemma3-1B", "use_bidirectional_attention", True),
        ("gpt2-124M", "scale_attn_weights", False),
        ("gpt2-124M", "scale_attn_by_inverse_layer_idx", True),
    ],
)
def test_what_no_dimension_of_ours_says_is_refused(size: str, key: str, value: object, tmp_path: Path) -> None:
    name, flavor = size.split("-")
    with pytest.raises(ConfigError, match=rf"of this config's model: {key} = .* \(it says"):
        check(make_folder(tmp_path, name, flavor, **{key: value}), name, flavor)


def test_scaling_under_its_former_key_too(tmp_path: Path) -> None:
    llama3 = config_json(LAYOUTS["llama3"], load("model", "llama3-8B"), 8192, "bfloat16", 0)["rope_scaling"]
    check(make_folder(tmp_path, rope_scaling=llama3 | {"type": "llama3"}))
    scaled = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    for full, local in ((scaled, {}), ({}, scaled)):
        new = {"full_attention": {"rope_theta": 1e6} | full, "sliding_attention": local | {"rope_theta": 1e4}}
        with pytest.raises(ConfigError, match=r"rope_scaling = None \(it says \{'rope_type': 'linear'"):
            check(make_folder(tmp_path, "gemma3", "1B", rope_theta=..., rope_parameters=new), "gemma3", "1B")


def test_every_how_many_layers_attend_to_all_is_said_in_either_form(tmp_path: Path) -> None:
    def folder(**over: object) -> Path:
        return make_folder(tmp_path, "gemma3", "1B", **over)

    check(folder(sliding_window_pattern=...), "gemma3", "1B")
    check(folder(layer_types=...), "gemma3", "1B")
    check(folder(layer_types=..., sliding_window_pattern=...), "gemma3", "1B")  # every sixth, as here
    with pytest.raises(ConfigError, match=r"sliding_window_pattern = 6 \(it says 3\)"):
        check(folder(layer_types=..., sliding_window_pattern=3), "gemma3", "1B")
    with pytest.raises(ConfigError, match=r"layer_types = "):
        check(folder(layer_types=["full_attention"] * 26), "gemma3", "1B")


def test_what_a_folder_does_not_say_is_left_to_its_weights(tmp_path: Path) -> None:
    check(make_folder(tmp_path, head_dim=..., mlp_bias=None))


def test_all_that_differs_is_said_at_once(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, num_hidden_layers=16, tie_word_embeddings=True, rms_norm_eps=1e-6)
    with pytest.raises(ConfigError) as caught:
        check(folder)
    for words in (
        "num_hidden_layers = 32 (it says 16)", "tie_word_embeddings = False (it says True)", "rms_norm_eps = 1e-05"
    ):  # fmt: skip
        assert words in str(caught.value)
    with pytest.raises(ConfigError, match=r"model_type = qwen3 \(it says llama\)"):
        check(folder, "qwen3")


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hf download meta-llama/Llama-3.1-8B --local-dir FOLDER"):
        check("meta-llama/Llama-3.1-8B")
    with pytest.raises(ConfigError, match=r"fix:  correct the path$"):
        check(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="in Hugging Face's layout"):
        check(tmp_path)
    with pytest.raises(ConfigError, match=r"model.file"):
        check(make_folder(tmp_path), file="mine.py")


def test_files_of_weights(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    assert weight_files(folder) == [folder / "model.safetensors"]
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model.safetensors in it"):
        check(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "2", "b": "1", "c": "2"}}')
    assert weight_files(folder) == [folder / "1", folder / "2"]
    (folder / "1").touch()
    with pytest.raises(ConfigError, match="want: 2 in it"):
        check(folder)
    (folder / "model.safetensors").touch()
    assert weight_files(folder) == [folder / "model.safetensors"]
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match="in Hugging Face's layout"):
        check(folder)


def test_of_a_folder_of_another_size_of_the_same_shapes_the_epsilon_tells(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    config = Config(model=Model(name="llama3", flavor="8B"), checkpoint=Checkpoint(initial_load_path=str(folder)))
    sizes = replace(load("model", "llama3-8B"), norm_eps=2e-5)
    with pytest.raises(ConfigError, match="rms_norm_eps = 2e-05"):
        check_initial_load_path(config, sizes, Origin("config"))


@pytest.mark.parametrize(
    ("path", "fix"),
    [
        ("outputs/mine", "titanlite export outputs/mine"),
        ("outputs/mine/checkpoints/step-00000010", "titanlite export outputs/mine"),
        ("outputs/other", "correct the path\n"),
        ("outputs/mine/nosuch", "correct the path\n"),
        ("Qwen/Qwen3-0.6B", "or fetch it: hf download Qwen/Qwen3-0.6B --local-dir FOLDER"),
        ("checkpoints/Qwen3", "correct the path\n"),
    ],
)
def test_a_folder_that_has_no_weights(path: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("outputs/mine/checkpoints/step-00000010").mkdir(parents=True)
    Path("outputs/mine/status.json").touch()
    Path("checkpoints/Qwen3").mkdir(parents=True)
    with pytest.raises(ConfigError) as e:
        check(Path(path))
    assert fix in f"{e.value}\n"
