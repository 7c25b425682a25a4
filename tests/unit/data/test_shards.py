"""Token shards and token files: written, read across boundaries, and every kind of damage found."""

import json
import os
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.prepared import prepare_here
from titanlite.config.schema import Config, Data
from titanlite.data.corpus import Corpus
from titanlite.data.inputs import check_inputs
from titanlite.data.shard_writer import ShardWriter
from titanlite.data.shards import Meta
from titanlite.data.sources import resolve
from titanlite.data.token_files import scan
from titanlite.errors import DataError


def make_shards(folder: Path, tokens: np.ndarray, dtype: str = "uint16", shard_tokens: int = 100) -> Corpus:
    folder.mkdir(exist_ok=True)
    writer = ShardWriter(folder, dtype, shard_tokens)
    for piece in np.array_split(tokens, 7):
        writer.write(piece)
    shards, fingerprint = writer.close()
    Meta("test", "bytes", dtype, shards, fingerprint).write(folder)
    return Corpus(folder)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("n", [1, 99, 100, 101, 350])
def test_what_is_written_is_read(tmp_path: Path, dtype: str, n: int) -> None:
    tokens = np.arange(n) * 187 % np.iinfo(dtype).max
    shards = make_shards(tmp_path / "s", tokens, dtype)
    assert [s.tokens for s in shards.meta.shards] == [100] * (n // 100) + [n % 100] * (n % 100 > 0)
    assert shards.tokens == n
    for start in range(0, n, 13):
        for count in {0, 1, 50, 101, 205, n - start}:
            if start + count <= n:
                seen = shards.read(start, count)
                assert seen.dtype == np.int64
                assert np.array_equal(seen, tokens[start : start + count])
    with pytest.raises(IndexError):
        shards.read(n, 1)
    with pytest.raises(IndexError):
        shards.read(-1, 1)


def test_meta_knows_the_largest_id_of_each_shard(tmp_path: Path) -> None:
    tokens = np.zeros(250, int)
    tokens[[30, 170, 171]] = [5, 900, 900]
    shards = make_shards(tmp_path / "s", tokens).meta.shards
    assert [(s.max_id, s.max_at) for s in shards] == [(5, 30), (900, 70), (0, 0)]


def test_fingerprint_is_of_the_tokens_alone(tmp_path: Path) -> None:
    tokens = np.arange(300)
    one = make_shards(tmp_path / "a", tokens, shard_tokens=100).fingerprint
    assert make_shards(tmp_path / "b", tokens, shard_tokens=70).fingerprint == one
    assert make_shards(tmp_path / "c", tokens[::-1].copy()).fingerprint != one
    assert one == "c61fe00e7ca8edd8c68d8dbd223515e5"  # checkpoints hold it


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titanlite.data.shards.BLOCK_BYTES", 64)
    monkeypatch.setattr("titanlite.data.token_files.BLOCK_BYTES", 64)


@pytest.mark.parametrize("kept", [0, 1, 99, 100, 101, 250])
@pytest.mark.parametrize("dropped", [0, 1, 100, 350])
def test_what_is_dropped_was_never_written(tmp_path: Path, small_blocks: None, kept: int, dropped: int) -> None:
    tokens, folders = np.arange(kept + 170) % 300, [tmp_path / "with", tmp_path / "without"]
    closed: list[object] = []
    for folder in folders:
        folder.mkdir()
        with ShardWriter(folder, "uint16", 100) as writer:
            writer.write(tokens[:kept])
            writer.keep()
            for _ in range(2 * (folder.name == "with")):
                writer.write(np.full(dropped, 999))
                writer.drop()
            writer.write(tokens[kept:])
            closed.append(writer.close())
    assert closed[0] == closed[1]
    with_it, without = ({f.name: f.read_bytes() for f in folder.iterdir()} for folder in folders)
    assert with_it == without


def test_shards_are_on_disk_before_meta_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, done = os.fsync, []

    def waits(fd: int) -> None:
        done.append((os.fstat(fd).st_ino, os.fstat(fd).st_size))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", waits)
    make_shards(tmp_path / "s", np.arange(250))
    files = ("shard-00000.bin", "shard-00001.bin", "shard-00002.bin", "meta.json")
    assert done == [((tmp_path / "s" / f).stat().st_ino, (tmp_path / "s" / f).stat().st_size) for f in files]


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("size", [98, 102, None])
def test_a_shard_of_another_size_or_none_is_named(tmp_path: Path, size: int | None, is_open: bool) -> None:
    shards, last = make_shards(tmp_path / "s", np.arange(250)), tmp_path / "s" / "shard-00002.bin"
    if is_open:
        assert shards.read(0, 250)[-1] == 249
    if size is None:
        last.unlink()
    else:
        os.truncate(last, size)
    said = r"02\.bin is missing" if size is None else f"02\\.bin has {size} bytes, where 100 were written"
    with pytest.raises(DataError, match=rf"{said}\n(.|\n)*fix:  delete"):
        shards.read(249, 1) if is_open else Corpus(tmp_path / "s")
    assert shards.read(0, 100)[99] == 99


def test_a_block_is_held_against_its_hash_before_it_is_read(tmp_path: Path, small_blocks: None) -> None:
    """Other ids at equal size train on, or end in an IndexError; what was right once is not hashed again."""
    made = make_shards(tmp_path / "s", np.arange(250))
    assert [len(s.hashes) for s in made.meta.shards] == [4, 4, 2]
    file = tmp_path / "s" / "shard-00001.bin"
    content = bytearray(file.read_bytes())
    content[130] ^= 1
    file.write_bytes(content)
    shards = Corpus(tmp_path / "s")
    assert np.array_equal(shards.read(0, 164), np.arange(164))
    assert [file.checked[block] for file, block in shards.blocks()] == [True] * 6 + [False] * 4
    with pytest.raises(
        DataError, match=r"shard-00001.bin has changed: bytes 128 to 192 are not(.|\n)*fix:  delete .*/s;"
    ):
        shards.read(163, 2)
    with pytest.raises(DataError, match=r"shard-00001.bin has changed"):
        shards.read(0, 250)
    assert np.array_equal(shards.read(196, 54), np.arange(196, 250))


def test_token_files_that_change_and_keep_size_and_time_are_found(tmp_path: Path, small_blocks: None) -> None:
    (tmp_path / "in").mkdir()
    file = tmp_path / "in" / "a.bin"
    np.arange(250, dtype="<u2").tofile(file)
    time = file.stat().st_mtime_ns
    assert open_files(tmp_path, 256).read(100, 1) == 100
    np.arange(250, dtype="<u2")[::-1].tofile(file)
    os.utime(file, ns=(time, time))
    with pytest.raises(DataError, match=r"in/a\.bin has changed: bytes 192 to 256"):
        open_files(tmp_path, 256).read(100, 1)


def test_shards_that_were_damaged_on_their_way_are_refused(tmp_path: Path, small_blocks: None) -> None:
    made = make_shards(tmp_path / "in", np.arange(250))
    file = tmp_path / "in" / "shard-00001.bin"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + b"\x7f")
    with pytest.raises(DataError, match=r"shard-00001.bin, which is not what was prepared(.|\n)*fix:  copy them again"):
        open_files(tmp_path, 1 << 16, source="in")
    file.write_bytes(content)
    assert open_files(tmp_path, 1 << 16, source="in").fingerprint == made.fingerprint


def test_shards_that_are_read_keep_neither_descriptors_nor_mappings(tmp_path: Path) -> None:
    shards, kept = make_shards(tmp_path / "s", np.arange(250)), [Path("/proc/self/fd"), Path("/proc/self/maps")]
    if not kept[0].exists():
        pytest.skip("looks in /proc")
    before = len(list(kept[0].iterdir()))
    assert shards.read(0, 250)[-1] == 249
    assert len(list(kept[0].iterdir())) == before
    assert str(tmp_path) not in kept[1].read_text()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *((lambda meta, content=content: content, "") for content in ("", "[]", "{}", '{"version": 99}')),
        (lambda meta: None, "FileNotFoundError"),
        (lambda meta: meta.replace('"documents": 0', '"documents": 3'), "ValueError: another content than that of its"),
        (lambda meta: meta.replace('"hash"', '"other"'), "KeyError: 'hash'"),
    ],
)
def test_damaged_meta(tmp_path: Path, change: Callable[[str], str | None], said: str) -> None:
    make_shards(tmp_path / "s", np.arange(10))
    meta = tmp_path / "s" / "meta.json"
    content = change(meta.read_text())
    meta.unlink() if content is None else meta.write_text(content)
    with pytest.raises(DataError, match=rf"token shards = {said}.*\n.*want: a folder of token shards with a meta.json"):
        Corpus(tmp_path / "s")


def open_files(tmp_path: Path, vocab_size: int, source: str = "in/*.bin", **keys: str) -> Corpus:
    return prepare_here(tmp_path, tmp_path / source, vocab_size, **keys)


@pytest.mark.parametrize(("dtype", "vocab_size"), [("<u2", 1 << 16), ("<u4", (1 << 16) + 1)])
def test_token_files_are_used_where_they_lie(tmp_path: Path, dtype: str, vocab_size: int) -> None:
    (tmp_path / "in").mkdir()
    tokens = np.arange(500) * 131 % vocab_size
    for i, part in enumerate(np.array_split(tokens, 3)):
        part.astype(dtype).tofile(tmp_path / "in" / f"{i}.bin")
    for empty in ("0_.bin", "3.bin"):  # between the first two, and last
        (tmp_path / "in" / empty).write_bytes(b"")
    shards = open_files(tmp_path, vocab_size)
    assert np.array_equal(shards.read(0, 500), tokens)
    assert shards.meta.input_bytes == 500 * np.dtype(dtype).itemsize
    assert [p.name for p in shards.folder.iterdir()] == ["meta.json"]
    assert open_files(tmp_path, vocab_size).folder == shards.folder


def test_folders_of_different_types_are_refused(tmp_path: Path) -> None:
    make_shards(tmp_path / "a", np.arange(100), "uint32")
    make_shards(tmp_path / "b", np.arange(100), "uint16")
    with pytest.raises(DataError, match="want: one type of ids"):
        open_files(tmp_path, 1000, source="*/*.bin")
    make_shards(tmp_path / "b", np.arange(100), "uint32")
    assert open_files(tmp_path, 1000, source="*/*.bin").tokens == 200


@pytest.mark.parametrize("content", ["[]", "{}", '{"dtype": 16}'])
def test_a_meta_json_that_is_somebody_elses_is_left_alone(tmp_path: Path, content: str) -> None:
    (tmp_path / "in").mkdir()
    np.arange(100, dtype="<u2").tofile(tmp_path / "in" / "a.bin")
    (tmp_path / "in" / "meta.json").write_text(content)
    assert open_files(tmp_path, 100).tokens == 100


@pytest.mark.parametrize("content", [b"", b'{"dtype": "uint32"', b"\xff"])
def test_a_damaged_meta_json_is_refused_as_it_may_have_stated_the_type(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "in").mkdir()
    np.arange(100, dtype="<u4").tofile(tmp_path / "in" / "a.bin")
    (tmp_path / "in" / "meta.json").write_bytes(content)
    with pytest.raises(DataError, match=r"in/meta\.json: .*\n +want: a meta\.json that can be read\n +fix:  write"):
        open_files(tmp_path, 256)


def test_a_file_is_looked_through_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titanlite.data.token_files._CHUNK_BYTES", 80)
    ids = np.tile([1, 0], 60)  # as 32-bit ids would look
    ids[[7, 62]] = 9
    ids.astype("<u2").tofile(tmp_path / "a.bin")
    source, done = resolve(f"{tmp_path}/a.bin"), list[int]()
    (shard,) = scan(source, "uint16", done.append).shards
    assert (shard.tokens, shard.max_id, shard.max_at) == (120, 9, 7)
    assert done == [80, 160, 240]
    (tmp_path / "a.bin").unlink()
    with pytest.raises(DataError, match=r"data.source = .*a\.bin: .*No such file"):
        scan(source, "uint16", done.append)


def test_ids_that_the_model_has_no_row_for_are_named(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    np.array([1, 2, 300, 299], "<u2").tofile(tmp_path / "in" / "a.bin")
    np.array([1, 2], "<u2").tofile(tmp_path / "in" / "b.bin")
    want = r"id 300 at token 2 of .*a\.bin\n.*want: ids below model.vocab_size = 300"
    with pytest.raises(DataError, match=want):
        open_files(tmp_path, 300)
    open_files(tmp_path, 301)
    with pytest.raises(DataError, match=want):  # though it has been prepared for a larger model
        open_files(tmp_path, 300)


def test_the_type_is_what_stands_beside_or_else_what_the_key_says_or_the_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    np.arange(1, 101, dtype="<u4").tofile(tmp_path / "in" / "a.bin")
    assert open_files(tmp_path, 256).tokens == 200  # as uint16, which nothing contradicts
    assert open_files(tmp_path, 70_000).read(98, 2).tolist() == [99, 100]
    assert open_files(tmp_path, 256, token_dtype="uint32").read(98, 2).tolist() == [99, 100]
    (tmp_path / "in" / "meta.json").write_text(json.dumps({"dtype": "uint32"}))
    assert open_files(tmp_path, 256).read(98, 2).tolist() == [99, 100]
    assert open_files(tmp_path, 256, token_dtype="uint16").tokens == 100  # the key is for another source
    (tmp_path / "in" / "meta.json").unlink()
    np.arange(1, 101, dtype="<u2").tofile(tmp_path / "in" / "a.bin")
    with pytest.raises(DataError, match=r'if it holds uint16, data.token_dtype = "uint16"'):
        open_files(tmp_path, 70_000)
    assert open_files(tmp_path, 70_000, token_dtype="uint16").read(98, 2).tolist() == [99, 100]


def test_a_type_without_token_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text that is long enough")
    data = Data(str(tmp_path / "a.txt"), cache_dir=str(tmp_path / "c"), token_dtype="uint32")
    with pytest.raises(DataError, match=r'data.token_dtype = "uint32"\n.*want: token files among the sources'):
        check_inputs(replace(Config(), data=data), 256)


def test_the_conversion_that_a_refusal_names_makes_it_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ids = np.random.default_rng(0).integers(0, 50_257, 20_000)
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(ids)
    for is_numpy in (True, False):
        with open("a.bin", "wb") as file:
            if is_numpy:
                np.save(file, ids.astype(np.uint16))
            else:
                file.write(header.tobytes() + ids.astype("<u2").tobytes())
        with pytest.raises(DataError) as e:
            open_files(tmp_path, 1 << 16, "a.bin")
        eval(str(e.value).partition("fix:  ")[2].partition(": ")[2], {"np": np})
        shards = open_files(tmp_path, 1 << 16, "ids.bin")
        assert np.array_equal(shards.read(0, shards.tokens), ids)


def megatron(file: Path, ids: np.ndarray, code: int, dtype: str) -> None:
    ids.astype(dtype).tofile(file)
    lengths = np.array([len(ids) - 10, 10], "<i4")
    places = np.array([0, (len(ids) - 10) * np.dtype(dtype).itemsize], "<i8")
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, 2, 3)
    file.with_suffix(".idx").write_bytes(head + lengths.tobytes() + places.tobytes() + bytes(24))


def test_an_index_of_megatron_states_the_type(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    file, ids = tmp_path / "in" / "a_text_document.bin", np.arange(400)
    for code, dtype in ((4, "<i4"), (8, "<u2")):
        megatron(file, ids, code, dtype)
        for vocab_size in (1000, 100_000):
            assert np.array_equal(open_files(tmp_path, vocab_size, "in").read(0, 400), ids)
    for code, dtype, name in ((5, "<i8", "i8"), (7, "<f4", "f4"), (1, "u1", "u1"), (99, "<i4", "type 99")):
        megatron(file, ids % 200, code, dtype)
        with pytest.raises(DataError, match=rf"a_text_document\.idx states '{name}'\n.*want: ids of 16 or 32 bits"):
            open_files(tmp_path, 1000)
    megatron(file, ids, 4, "<i4")
    os.truncate(file, 800)
    with pytest.raises(
        DataError, match=r"bin has 800 bytes\n.*want: 1600 bytes, as a_text_document\.idx beside it says"
    ):
        open_files(tmp_path, 1000)
    megatron(file, ids, 4, "<i4")
    (tmp_path / "in" / "meta.json").write_text('{"dtype": "uint16"}')
    with pytest.raises(DataError, match=r"uint32 for .*, uint16 for (.|\n)*want: one type of ids"):
        open_files(tmp_path, 1000)
    for head in (b"MMIDIDX\0\0", b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2**64 - 1, 1)):
        file.with_suffix(".idx").write_bytes(head)
        with pytest.raises(DataError, match=r"want: an index that can be read"):
            open_files(tmp_path, 1000)


IDS = np.arange(100, dtype="<u2").tobytes()
SIGNED = np.where(np.arange(100) == 7, -100, 1)  # of those who mark what is not trained on
HEADS = {  # that are no ids
    b"\x93NUMPY\x01\x00": "numpy's header",
    np.array([20240520, 1, 9], "<i4").tobytes(): "llm.c's header",
    np.array([20240801, 7, 9], "<i4").tobytes(): "llm.c's header",
    b"LITPKDS\x01": "lit-gpt's header",
    b"MMIDIDX\x00\x00\x01": "Megatron's index",
    b"PK\x03\x04": "a zip archive",
    b"\x1f\x8b\x08\x00": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PAR1": "Parquet",
    b"version https://git-lfs.github.com/spec/v1\n": "a pointer of Git LFS",
}
REFUSED = [  # the file's bytes, the dtype of a meta.json beside it, the vocabulary, what is said
    *((head + bytes(1200 - len(head)), "", 256, f"begins with {what}.*uint16 ids, no") for head, what in HEADS.items()),
    (b"abc", "", 256, r"a\.bin has 3 bytes\n.*want: uint16 ids \(2 bytes each\)"),
    (b"abcdef", "", 70_000, r'6 bytes\n.*want: uint32 ids \(4 bytes each\).*data.token_dtype = "uint16"'),
    *(
        (IDS, stated, 256, rf"meta\.json states '{re.escape(stated)}'\n")
        for stated in ("int64", "<u8", ">u2", "uint8", "float32", "torch.int64", "i4,i4", "(")
    ),
    (SIGNED.astype("<i2").tobytes(), "", 1000, r"id 65436 \(-100 as int16\) at token 7 of"),
    (SIGNED.astype("<i4").tobytes(), "", 70_000, r"id 4294967196 \(-100 as int32\) at token 7 of"),
]


@pytest.mark.parametrize(("content", "stated", "vocab_size", "said"), REFUSED)
def test_what_are_no_ids_is_refused(content: bytes, stated: str, vocab_size: int, said: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.bin").write_bytes(content)
    if stated:
        (tmp_path / "in" / "meta.json").write_text(json.dumps({"dtype": stated}))
    with pytest.raises(DataError, match=f"(?s){said}"):
        open_files(tmp_path, vocab_size)


def test_a_type_that_is_stated_with_a_sign_is_read_without(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.bin").write_bytes(IDS)
    (tmp_path / "in" / "meta.json").write_text('{"dtype": "<i2"}')
    assert open_files(tmp_path, 70_000).tokens == 100
