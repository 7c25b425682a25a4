"""Tokenizers: ids, separators, and what is no tokenizer."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.prepared import prepare_here
from titanlite.config.schema import Config, Data
from titanlite.data.inputs import check_inputs
from titanlite.data.prepare import data_warnings
from titanlite.data.tokenizer import load_tokenizer, rows_for
from titanlite.errors import DataError


def make_tokenizer(path: Path, special: tuple[str, ...] = ("<|endoftext|>",), **extra: Any) -> Path:
    """A byte-level BPE of a few merges, with truncation, padding and a first token, as published files have them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["hello world hello there"] * 4, trainer)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    tokenizer.post_processor = processors.TemplateProcessing(f"{special[0]} $A", None, [(special[0], 0)])
    tokenizer.save(str(path))
    if extra:
        (path.parent / "tokenizer_config.json").write_text(json.dumps(extra))
    return path


def test_bytes() -> None:
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.separator_id) == (256, 0)
    assert (rows_for(256), rows_for(2004)) == (256, 2048)  # what is proposed for a model
    ids = tokenizer.encode_batch(["a", "é", ""])
    assert [i.tolist() for i in ids] == [[97], [0xC3, 0xA9], []]


def test_a_file_is_used_without_truncation_padding_or_special_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenizers import Tokenizer

    path = make_tokenizer(tmp_path / "tokenizer.json")
    monkeypatch.setenv("HOME", str(tmp_path))
    tokenizer, plain = load_tokenizer("~/tokenizer.json"), Tokenizer.from_file(str(path))
    assert tokenizer.separator_id == plain.token_to_id("<|endoftext|>")
    text = "hello world, this <|endoftext|> is a text of more than four tokens"
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.separator_id not in ids
    assert plain.decode(ids.tolist(), skip_special_tokens=False) == text
    (short,) = tokenizer.encode_batch(["hello"])
    assert len(short) < 4


TEXT = " Hello world, hello there <|endoftext|> abc"


def altered(tmp_path: Path, **fields: Any) -> Path:
    """A tokenizer.json that only encodes, but for these fields; `model__dropout` is one of `model`."""
    path = make_tokenizer(tmp_path / "tokenizer.json")
    content = json.loads(path.read_text()) | {"truncation": None, "padding": None, "post_processor": None}
    for name, value in fields.items():
        *section, key = name.split("__")
        (content[section[0]] if section else content)[key] = value
    path.write_text(json.dumps(content))
    return path


def before_text(*tokens: str, after: tuple[str, ...] = ()) -> dict[str, Any]:
    """A post_processor that puts tokens around each text."""
    ids = {token: {"id": token, "ids": [0], "tokens": [token]} for token in (*tokens, *after)}
    first, last = ([{"SpecialToken": {"id": token, "type_id": 0}} for token in some] for some in (tokens, after))
    single = [*first, {"Sequence": {"id": "A", "type_id": 0}}, *last]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": ids}


SPECIAL = {"id": 0, "content": "<|endoftext|>", "special": True}
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
WORLD = {"id": 300, "content": "world", "special": False}
LOWER, PREFIX = {"type": "Lowercase"}, {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}
TRUNCATION = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
PADDING = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}
PADDING["pad_to_multiple_of"] = None


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("truncation", TRUNCATION, "its truncation to 4 tokens is switched off"),
        ("padding", PADDING, "its padding is switched off"),
        ("model__dropout", 0.5, "its dropout of 0.5 is switched off"),
        ("model__dropout", 0.0, ""),
        (
            "post_processor",
            before_text("<|endoftext|>"),
            r"its post_processor, which adds <\|endoftext\|>, is not used; ",
        ),
        ("post_processor", before_text(after=("<|endoftext|>",)), r"its post_processor, which adds <\|endoftext\|>, "),
        (
            "post_processor",
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "",
        ),
        ("decoder", None, ""),
        ("model__ignore_merges", True, ""),
        ("normalizer", LOWER, ""),
        ("normalizer", {"type": "Sequence", "normalizers": [LOWER, {"type": "Prepend", "prepend": "a"}]}, ""),
        ("pre_tokenizer", PREFIX | {"trim_offsets": True}, ""),
        ("model__end_of_word_suffix", "d", ""),
        ("model__unk_token", "<|endoftext|>", ""),
        *[("added_tokens", [SPECIAL | FLAGS | {flag: True}], "") for flag in FLAGS],
        *[("added_tokens", [SPECIAL | FLAGS, WORLD | FLAGS | {flag: True}], "") for flag in FLAGS],
    ],
)
def test_a_file_is_used_as_its_library_does_without_what_would_change_the_corpus(
    tmp_path: Path, field: str, value: Any, said: str
) -> None:
    from tokenizers import Tokenizer

    path = str(altered(tmp_path, **{field: value}))
    library, tokenizer = Tokenizer.from_file(path), load_tokenizer(path)
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens, library.model.dropout = True, None
    expected = library.encode(TEXT, add_special_tokens=False).ids
    for _ in range(5):
        (ids,) = tokenizer.encode_batch([TEXT])
        assert ids.tolist() == expected
    assert (tokenizer.unused == "") == (said == "")
    assert re.search(said, tokenizer.unused)


def test_documents_begin_with_the_bos_token_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tokenizer(tmp_path / "tokenizer.json", ("</s>", "<s>", "<other>"))
    plain, begun = load_tokenizer(str(path)), load_tokenizer(str(path), add_bos=True)
    assert (plain.bos_id, begun.bos_id) == (None, 1)
    assert plain.fingerprint != begun.fingerprint
    texts = ["hello", "world " * 300, "there"]  # the second goes through in pieces
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    monkeypatch.setattr("titanlite.data.encode._PIECE_CHARACTERS", 256)
    without, shards, cut = (
        prepare_here(tmp_path, tmp_path / "a.jsonl", 300, tokenizer=str(path), **more)
        for more in ({}, {"add_bos_token": True}, {"add_bos_token": True, "max_tokens": 2})
    )
    assert shards.folder != without.folder
    expected = [id for ids in plain.encode_batch(texts) for id in (1, *ids.tolist(), 0)]
    assert shards.read(0, shards.tokens).tolist() == expected
    assert without.read(0, without.tokens).tolist() == [id for id in expected if id != 1]
    assert cut.tokens == expected.index(0) + 1

    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<other>"}')
    assert load_tokenizer(str(path), add_bos=True).bos_id == 2
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "</s>"}')
    with pytest.raises(DataError, match=r"data\.add_bos_token = true\n.*whose bos_token is its eos_token"):
        load_tokenizer(str(path), add_bos=True)


def test_a_bos_token_that_there_is_none_of_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.add_bos_token = true\n.*false with tokenizer `bytes`"):
        load_tokenizer("bytes", add_bos=True)
    path = make_tokenizer(tmp_path / "tokenizer.json", ("</s>",))
    with pytest.raises(
        DataError, match=r"begins documents, as data.add_bos_token asks for, one of <\|begin(.|\n)*bos_t"
    ):
        load_tokenizer(str(path), add_bos=True)
    np.arange(9, dtype="<u2").tofile(tmp_path / "a.bin")
    data = Data(f"{tmp_path}/a.bin", add_bos_token=True, cache_dir=str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"data\.add_bos_token = true\n.*false for token files such as"):
        check_inputs(Config(data=data), 300)


def test_tokens_for_what_is_unknown_are_counted(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"a": 0, "</s>": 1, "b": 2, "<unk>": 3}
    pieces = [(word, -1.0) for word in words]
    (tmp_path / "a.jsonl").write_text('{"text": "a c b d"}\n{"text": "c </s>"}\n{"text": "a b"}\n')
    for model in (models.WordLevel(words, unk_token="<unk>"), models.Unigram(pieces, unk_id=3)):
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(tmp_path / "t.json"))
        file = str(tmp_path / "t.json")
        assert load_tokenizer(file).unknown_id == 3
        meta = prepare_here(tmp_path, tmp_path / "a.jsonl", 4, tokenizer=file, max_bad_records=1).meta
        assert (meta.tokens, meta.n_unknown, meta.n_bad_records) == (8, 2, 1)  # a bad record's do not count
        (_, warning) = data_warnings("data.source", meta, 256)
        assert warning.endswith(f"2 tokens (25.00%) stand for text that {file} does not know")
    Tokenizer(models.BPE({"a": 0, "</s>": 1}, [])).save(str(tmp_path / "t.json"))
    assert load_tokenizer(str(tmp_path / "t.json")).unknown_id is None


@pytest.mark.parametrize(
    ("special", "config", "expected"),
    [
        (("<unk>", "</s>"), {}, "</s>"),
        (("</s>", "<|endoftext|>", "<|end_of_text|>"), {}, "<|end_of_text|>"),
        (("</s>", "<end>"), {"eos_token": "<end>"}, "<end>"),
        (("</s>", "<end>"), {"eos_token": {"content": "<end>", "special": True}}, "<end>"),
        (("</s>", "<end>"), {"eos_token": None}, "</s>"),
    ],
)
def test_separator(tmp_path: Path, special: tuple[str, ...], config: dict[str, Any], expected: str) -> None:
    tokenizer = load_tokenizer(str(make_tokenizer(tmp_path / "tokenizer.json", special, **config)))
    assert tokenizer.separator_id == special.index(expected)  # special tokens come first


@pytest.mark.parametrize(
    ("special", "config", "said"),
    [
        ([f"<{i}>" for i in range(11)], "{}", r"tokenizer\.json', whose special tokens are <0>, <1>, .*<9>, …\n"),
        (
            ["<unk>"],
            "{}",
            r"tokens are <unk>\n.*one of <\|end_of_text\|>, .*</s>, <eos>\n.*fix:.*eos_token",
        ),
        (["<unk>"], '{"eos_token": "<gone>"}', "has no token '<gone>'"),
        (["<unk>"], '{"eos_token": ["<unk>"]}', r"has no token \['<unk>'\]"),
        (["<unk>"], "[]", "not a JSON object"),
        (["<unk>"], "{", "not a JSON object"),
    ],
)
def test_no_separator_lists_what_was_looked_for(tmp_path: Path, special: list[str], config: str, said: str) -> None:
    path = make_tokenizer(tmp_path / "tokenizer.json", tuple(special))
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(DataError, match=said):
        load_tokenizer(str(path))


NO_FILE = "', and there is no such file"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("x" * 300, f"x{NO_FILE}"),
        *((name, rf"data.tokenizer = '{name}{NO_FILE}(.|\n)*correct the path\Z") for name in ("./nope", "a/nope.json")),
        (
            "Qwen/Qwen3-0.6B",
            r"fix:  correct the path; or, for the tokenizer of a model of the hub, hf:Qwen/Qwen3-0\.6B",
        ),
        ("other.json", "which is no tokenizer"),
        ("folder", r"which is a folder(.|\n)*fix:  data.tokenizer = .*tokenizer\.json"),
        ("empty.json", "a token that separates documents"),
        ("folder/empty", NO_FILE),
    ],
)
def test_what_is_no_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str) -> None:
    from tokenizers import Tokenizer, models

    monkeypatch.chdir(tmp_path)
    Path("folder/empty").mkdir(parents=True)
    for file in ("other.json", "folder/tokenizer.json"):
        Path(file).write_text('{"a": 1}')
    Tokenizer(models.BPE()).save("empty.json")
    with pytest.raises(DataError, match=said):
        load_tokenizer(name)


def test_a_word_that_it_has_no_token_for(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    file = tmp_path / "words.json"
    Tokenizer(models.WordLevel({"known": 0, "</s>": 1}, unk_token="<unk>")).save(str(file))
    for name, text in {"a": "known", "b": "unknown"}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    with pytest.raises(DataError, match=r"b\.txt: .*words\.json' cannot encode it: .*Missing \[UNK\] token"):
        prepare_here(tmp_path, tmp_path / "*.txt", 2, tokenizer=str(file))
    shards = prepare_here(tmp_path, tmp_path / "*.txt", 2, tokenizer=str(file), max_bad_records=1)
    assert shards.read(0, shards.tokens).tolist() == [0, 1]


def test_a_file_that_the_library_panics_on_is_no_tokenizer(tmp_path: Path) -> None:
    file = make_tokenizer(tmp_path / "tokenizer.json")
    content = json.loads(file.read_text())
    content["model"]["continuing_subword_prefix"] = "longer than any token"
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match="which is no tokenizer: range end index"):
        load_tokenizer(str(file))


def test_fingerprint_follows_content_and_separator(tmp_path: Path) -> None:
    path = make_tokenizer(tmp_path / "tokenizer.json", ("</s>", "<end>"))
    first = load_tokenizer(str(path)).fingerprint
    assert load_tokenizer(str(path)).fingerprint == first
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    assert (second := load_tokenizer(str(path)).fingerprint) != first
    words = (content := json.loads(path.read_text()))["model"]["vocab"]
    words["÷"], words["×"] = words["×"], words["÷"]  # of bytes that no text has
    path.write_text(json.dumps(content))
    assert load_tokenizer(str(path)).fingerprint not in (first, second)
