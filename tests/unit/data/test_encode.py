"""Large documents go through a tokenizer in pieces, and the tokens are those of the whole text."""

import functools
import json
import random
import re
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.prepared import prepare_here
from titanlite.config.schema import Data
from titanlite.data.documents import Document
from titanlite.data.encode import _pieces, encode
from titanlite.data.prepare import prepare
from titanlite.data.sources import resolve
from titanlite.data.tally import Tally
from titanlite.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from titanlite.errors import DataError

WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|" + WORDS
PARTS = ["word", "Two words", "it's", "x = 12345", "1234567", "é", "字文", "字。", "…!?", "});", "a", "<b>", "don't go"]
GAPS = ["\n", "\n\n", "\n\n\n", "\r\n", "\r\n\r\n", "\n    ", "  \n", " \n\n  ", " ", "  ", "\t", "\u3000", "\f\n"]


def a_text(characters: int, gaps: list[str] = GAPS) -> str:
    draw, text, length = random.Random(0), [""], 0
    while length < characters:
        more = [draw.choice(PARTS) for _ in range(draw.randrange(1, 3))] + [draw.choice(gaps)]
        text += more
        length += sum(map(len, more))
    return "".join(text)


def bpe(folder: Path, kind: str) -> str:
    """A BPE that merges whatever its pre-tokenizer lets it, line ends too."""
    (folder / "tokenizer.json").write_text(trained(kind))
    return str(folder / "tokenizer.json")


@functools.cache
def trained(kind: str) -> str:
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    byte_level = pre_tokenizers.ByteLevel
    words = {
        "gpt2": byte_level(add_prefix_space=False),
        "gpt2 with a space before": byte_level(add_prefix_space=True),
        "llama3": pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), byte_level(add_prefix_space=False, use_regex=False)]
        ),
    }
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    if kind in words:
        tokenizer.pre_tokenizer = words[kind]
    else:
        spaces = normalizers.Replace(" ", "▁")
        tokenizer.normalizer = (
            normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if kind == "sentencepiece" else spaces
        )
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["</s>", "<unk>"], initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    text = a_text(20_000)  # without a pre-tokenizer it would be one word, but for lines
    tokenizer.train_from_iterator([text] if kind in words else text.split("\n"), trainer)
    tokenizer.add_tokens(["    "])  # as some have, for what is frequent
    return tokenizer.to_str()


def count_texts(monkeypatch: pytest.MonkeyPatch, tokenizer: type[Tokenizer]) -> list[int]:
    """The lengths of texts that are encoded, but for the ends that show a seam."""
    lengths, original = list[int](), tokenizer.encode_batch

    def counted(self: Tokenizer, texts: list[str]) -> list[np.ndarray]:
        lengths.extend(map(len, texts))
        return original(self, texts)

    monkeypatch.setattr(tokenizer, "encode_batch", counted)
    return lengths


def in_pieces(monkeypatch: pytest.MonkeyPatch, characters: int = 256) -> None:
    monkeypatch.setattr("titanlite.data.encode._PIECE_CHARACTERS", characters)
    monkeypatch.setattr("titanlite.data.encode._AROUND_CHARACTERS", 40)
    monkeypatch.setattr("titanlite.data.encode._BATCH_CHARACTERS", 4 * characters)
    monkeypatch.setattr("titanlite.data.documents._BLOCK_BYTES", 1000)


def tokens_of(source: str, tokenizer: Tokenizer, limit: int = 0) -> list[list[int]]:
    """The documents' ids, of good ones."""
    ids: list[list[int]] = [[]]
    for batch in encode(resolve(source), "text", tokenizer, Tally(source, "data.source", limit)):
        for encoded in batch:
            ids[-1] = [] if encoded.is_bad else ids[-1] + encoded.ids.tolist()
            ids += [[]] * encoded.ends
    assert not ids[-1]
    return ids[:-1]


def pieces_of(source: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of a source's pieces, whose tokens are those of the whole."""
    whole = tokens_of(source, tokenizer)
    in_pieces(monkeypatch)
    lengths = count_texts(monkeypatch, type(tokenizer))
    assert tokens_of(source, tokenizer) == whole
    return [n for n in lengths if n > 80]  # shorter ones are the ends around a seam


def write_as(kind: str, folder: Path, text: str) -> str:
    file = folder / f"a.{kind}"
    file.write_bytes(text.encode() if kind == "txt" else json.dumps({"text": text}).encode() + b'\n{"text": "b"}')
    return str(file)


KINDS = ["gpt2", "gpt2 with a space before", "llama3", "plain"]


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
@pytest.mark.parametrize("kind", ["bytes", *KINDS])
def test_the_tokens_of_pieces_are_those_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, suffix: str
) -> None:
    source = write_as(suffix, tmp_path, text := a_text(50_000))  # a cut at any place would be wrong for most tokenizers
    tokenizer = load_tokenizer("bytes" if kind == "bytes" else bpe(tmp_path, kind))
    assert tokens_of(source, tokenizer)[0] == [*tokenizer.encode_batch([text])[0].tolist(), tokenizer.separator_id]
    pieces = pieces_of(source, tokenizer, monkeypatch)
    assert len(pieces) > 80
    assert max(pieces) < 1000 + 2 * 256  # a piece with what was left of the block before


@pytest.mark.parametrize("flags", [{"lstrip": True, "rstrip": True}, {"single_word": True}, {"normalized": True}])
def test_the_tokens_of_pieces_are_those_of_the_whole_whatever_is_said_of_added_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, bool]
) -> None:
    from tokenizers import AddedToken, Tokenizer, normalizers

    file = bpe(tmp_path, "gpt2")
    made = Tokenizer.from_file(file)
    made.normalizer = normalizers.Lowercase()
    made.add_tokens([AddedToken(token, **flags) for token in ("word", "two", "x", "\n\n", "go")])
    made.save(file)
    tokenizer, source = load_tokenizer(file), write_as("txt", tmp_path, a_text(50_000))
    assert len(pieces_of(source, tokenizer, monkeypatch)) > 50


@pytest.mark.parametrize("gap", ["\n", "\n\n", "\r\n", " "])
@pytest.mark.parametrize("kind", KINDS)
def test_there_are_seams_whatever_lies_between_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, gap: str
) -> None:
    tokenizer, source = load_tokenizer(bpe(tmp_path, kind)), write_as("txt", tmp_path, a_text(5_000, [gap]))
    assert len(pieces_of(source, tokenizer, monkeypatch)) >= 5


def test_a_tokenizer_that_marks_the_start_of_a_text_gets_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, source = load_tokenizer(bpe(tmp_path, "sentencepiece")), write_as("txt", tmp_path, text := a_text(5_000))
    assert pieces_of(source, tokenizer, monkeypatch) == [len(text)]


def test_a_text_without_seams_is_put_together_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 ms; a copy of what is there for each of its blocks takes 3.5 s."""
    monkeypatch.setattr("titanlite.data.encode._seam", lambda text, start, tokenizer: None)
    document = Document("a.txt", ("x" * 1_000 for _ in range(10_000)))
    start = time.process_time()
    (piece,) = _pieces([document], ByteTokenizer(), Tally("a.txt", "data.source", 0))
    assert time.process_time() - start < 0.5
    assert piece.text == "x" * 10_000_000


def test_a_tokenizer_that_knows_whole_words_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"known": 0, "words": 1, "</s>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    tokenizer, source = (
        load_tokenizer(str(tmp_path / "tokenizer.json")),
        write_as("txt", tmp_path, "known words\n" * 500),
    )
    in_pieces(monkeypatch)
    assert tokens_of(source, tokenizer) == [[0, 1] * 500 + [2]]


PANIC = "a" * 40  # of `panicking`: a regular expression gives up, and the library panics


def panicking(folder: Path) -> str:
    """A tokenizer that fails on texts as published ones do on twelve million spaces."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE({"</s>": 0, **{chr(33 + i): i + 1 for i in range(94)}, "Ġ": 95}, []))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.Split(Regex("(?:a|a|aa)+!"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def test_a_text_that_the_tokenizer_fails_on_is_a_bad_record_like_any_other(tmp_path: Path) -> None:
    texts = ["one", PANIC, "two", f"{PANIC} again", *["more"] * 5]
    file, tokenizer = tmp_path / "a.jsonl", panicking(tmp_path)
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    said = rf"2 bad records so far:\n.*a\.jsonl:2: data\.tokenizer = '{tokenizer}' cannot encode it: .*retry-limit"
    with pytest.raises(DataError, match=said):
        prepare_here(tmp_path, file, tokenizer=tokenizer)
    shards = prepare_here(tmp_path, file, tokenizer=tokenizer, max_bad_records=2)
    assert (shards.meta.documents, shards.meta.n_bad_records) == (7, 2)
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts if PANIC not in text))
    assert prepare_here(tmp_path, file, tokenizer=tokenizer).fingerprint == shards.fingerprint


@pytest.mark.parametrize("at", [0, 2_500, 5_000])
@pytest.mark.parametrize("bad", ["\0", PANIC + " "], ids=["separator", "panic"])
def test_a_large_document_that_cannot_be_used_is_one_bad_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str, at: int
) -> None:
    in_pieces(monkeypatch)
    source, text, tokenizer = tmp_path / "in", "word " * 1_000, "bytes" if bad == "\0" else panicking(tmp_path)
    source.mkdir()
    for name, content in {"a": text, "b": text[:at] + bad + text[at:] + bad, "c": text}.items():
        (source / f"{name}.txt").write_text(content)
    with pytest.raises(DataError, match=r"1 bad record so far:\n.*b\.txt: (holds NUL, which|data\.tokenizer)"):
        prepare_here(tmp_path, source, tokenizer=tokenizer)
    shards = prepare_here(tmp_path, source, tokenizer=tokenizer, max_bad_records=1)
    assert (shards.meta.documents, shards.meta.n_bad_records) == (2, 1)
    (source / "b.txt").unlink()
    without = prepare_here(tmp_path, source, tokenizer=tokenizer)
    assert (shards.fingerprint, shards.meta.shards) == (without.fingerprint, without.meta.shards)


def test_a_byte_that_is_not_utf8_is_found_in_any_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_pieces(monkeypatch)
    text = "x" + "é\n" * 1_000  # blocks of 1000 bytes end with halves of characters, too
    for n_bytes in (999, 1_000, 2_000, 2_998, 3_000):
        good = text.encode()[:n_bytes].decode(errors="ignore").encode()
        for bad in (b"\xff", b"\xc3"):  # the latter is half a character, at the end of the file
            (tmp_path / "a.txt").write_bytes(good + bad)
            line = good.count(b"\n") + 1
            with pytest.raises(DataError, match=rf"a\.txt:{line}: not UTF-8: byte 0x{bad.hex()} at byte {len(good)}\n"):
                tokens_of(str(tmp_path), ByteTokenizer(), limit=0)


def test_a_large_file_shows_progress(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titanlite.data.progress._SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr("titanlite.data.documents._BLOCK_BYTES", 1_000_000)
    monkeypatch.setattr("titanlite.data.encode._BATCH_CHARACTERS", 1_000_000)
    source = write_as("txt", tmp_path, "a line\n" * 600_000)
    prepare(source, Data(cache_dir=str(tmp_path / "cache")), 256, progress=True)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == f"preparing {source}"
    assert re.fullmatch(rf"preparing {source}: \d of 4 MB, [\d.]+ MB/s", lines[1])
    prepare(source, Data(cache_dir=str(tmp_path / "cache")), 256, progress=True)
    assert capfd.readouterr().err == ""  # it is there
    seen = [line.split(": ")[1].split(" MB")[0] for line in lines[1:-1]]
    assert seen[0] in ("1 of 4", "2 of 4")
    assert seen[-1] == "4 of 4"
    assert len(set(seen)) >= 3


def test_seams_are_looked_for_in_blocks_that_are_longer_than_a_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one the rest of a text is kept, and looked at again from where it was left."""
    in_pieces(monkeypatch)
    lengths = count_texts(monkeypatch, ByteTokenizer)
    source = write_as("txt", tmp_path, "x" * 5_000 + " word\n" * 500)
    (ids,) = tokens_of(source, ByteTokenizer())
    assert bytes(ids) == b"x" * 5_000 + b" word\n" * 500 + b"\0"
    pieces = [n for n in lengths if n > 80]
    assert 5_000 < pieces[0] < 5_600
    assert len(pieces) > 5


def test_a_large_document_ends_where_it_reaches_max_tokens(tmp_path: Path) -> None:
    text = a_text(10_000) * 150
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text("behind it")
    shards = prepare_here(tmp_path, tmp_path / "*.txt", max_tokens=400_000)
    assert 400_000 < shards.meta.tokens < 700_000
    assert (shards.meta.documents, shards.meta.max_tokens) == (1, 400_000)
    ids = shards.read(0, shards.meta.tokens)
    assert text.encode().startswith(bytes(ids[:-1].tolist()))
    assert ids[-1] == 0
