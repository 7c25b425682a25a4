"""A folder's weights are held against the model before a start, by the headers of its files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.safetensors_header import header_of, write_header
from titanlite.checkpoint.hugging_face import check_weights
from titanlite.config.schema import Model
from titanlite.errors import CheckpointError
from titanlite.models.find import build_model
from titanlite.recipes import load


def check(folder: Path, size: str) -> None:
    name = size.partition("-")[0]
    check_weights(str(folder), name, build_model(Model(name=name), load("model", size), 1))


def changed(name: str, **over: object) -> Callable[[dict[str, Any]], object]:
    return lambda header: header.update({name: header[name] | over})


ODD: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "no head": ("llama3-8B", lambda header: header.pop("lm_head.weight"), "missing in the folder = lm_head.weight"),
    "another head_dim": (
        "qwen3-0.6B",
        changed("model.layers.3.self_attn.k_proj.weight", shape=[512, 1024]),
        "model.layers.3.self_attn.k_proj.weight [512, 1024] (this run: [1024, 1024])",
    ),
    "an expert less": (
        "mixtral-8x7B",
        lambda header: header.pop("model.layers.1.block_sparse_moe.experts.7.w2.weight"),
        "missing in the folder = model.layers.1.block_sparse_moe.experts.7.w2.weight",
    ),
    "not transposed": (
        "gpt2-124M",
        changed("transformer.h.0.attn.c_attn.weight", shape=[2304, 768]),
        "transformer.h.0.attn.c_attn.weight [2304, 768] (this run: [768, 2304])",
    ),
    "one more": (
        "llama3-8B",
        lambda header: header.update({"model.more": header["model.norm.weight"]}),
        "only in the folder = model.more",
    ),
    "quantized": ("llama3-8B", changed("model.norm.weight", dtype="I8"), "in the folder = model.norm.weight I8"),
    "nothing": ("llama3-8B", lambda header: header.clear(), "missing in the folder = lm_head.weight, model.embed_tok"),
}


@pytest.mark.parametrize("case", ODD)
def test_weights_that_are_not_the_model_s_are_refused(case: str, tmp_path: Path) -> None:
    size, change, said = ODD[case]
    header = header_of(size.partition("-")[0], load("model", size))
    change(header)
    write_header(tmp_path / "model.safetensors", header)
    with pytest.raises(CheckpointError) as refused:
        check(tmp_path, size)
    assert said in str(refused.value)


def test_of_a_tied_head_that_is_written_and_a_model_saved_without_its_head_nothing_is_said(tmp_path: Path) -> None:
    header = header_of("gpt2", load("model", "gpt2-124M"))
    header["lm_head.weight"] = header["transformer.wte.weight"]
    write_header(tmp_path / "model.safetensors", header)
    check(tmp_path, "gpt2-124M")
    headless = {name.removeprefix("transformer."): one for name, one in header.items() if name != "lm_head.weight"}
    write_header(tmp_path / "model.safetensors", headless | {"h.0.attn.bias": header["lm_head.weight"]})
    check(tmp_path, "gpt2-124M")


@pytest.mark.parametrize("content", [b"", b"\xff" * 30, b"\2" + bytes(7) + b"[]", b"\2" + bytes(7) + b"{"])
def test_what_is_no_safetensors_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"checkpoint.initial_load_path = .*\n.*safetensors that every rank"):
        check(tmp_path, "gpt2-124M")


def test_a_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_header(file, header_of("gpt2", load("model", "gpt2-124M")))
    with file.open("r+b") as content:
        content.truncate(file.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="safetensors that every rank"):
        check(tmp_path, "gpt2-124M")
