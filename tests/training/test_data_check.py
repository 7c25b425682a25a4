"""The check of token shards while training goes on: shared out on a host, and one message on all ranks."""

import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch.distributed as dist

import titanlite.data.shards
from tests.data.test_shards import make_shards
from tests.ranks import run_ranks
from titanlite.data.shards import TokenShards
from titanlite.errors import DataError
from titanlite.training.data_check import DataCheck

if TYPE_CHECKING:
    from tests.training.launched import Desk

N_BLOCKS = 40


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shards of 40 small blocks."""
    monkeypatch.setattr(titanlite.data.shards, "BLOCK_BYTES", 64)
    assert len(make_shards(tmp_path / "s", np.arange(1000)).checked) == N_BLOCKS
    return tmp_path / "s"


def checked_blocks(shards: TokenShards, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What is hashed from now on."""
    hashed, block_hash = list[bytes](), titanlite.data.shards.block_hash
    monkeypatch.setattr(titanlite.data.shards, "block_hash", lambda data: (hashed.append(data), block_hash(data))[1])
    return hashed


@pytest.mark.parametrize("hosts", [1, 2])
def test_each_block_is_checked_once_per_host(hosts: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> None:
        monkeypatch.setattr(platform, "node", lambda: f"host {dist.get_rank() % hosts}")
        shards = TokenShards(folder)
        hashed = checked_blocks(shards, monkeypatch)
        check = DataCheck([shards])
        check.finish(0)
        assert shards.checked.all()
        assert np.array_equal(shards.read(0, 1000), np.arange(1000))
        check.before(lambda: pytest.fail("it is over"))
        check.close()
        print(len(hashed))

    assert sum(map(int, run_ranks(body, folder.parent))) == N_BLOCKS * hosts


def test_what_the_share_of_one_rank_holds_ends_all_with_one_message(folder: Path) -> None:
    file = folder / "shard-00009.bin"
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")

    def body() -> None:
        check = DataCheck([TokenShards(folder)])

        def steps() -> None:
            while True:
                check.before(lambda: None)

        with pytest.raises(DataError) as e:
            steps()
        check.close()
        print(e.value)

    first, second = run_ranks(body, folder.parent)
    assert f"{file} has changed: bytes 192 to 200 are not those that were written" in first
    assert first == second


def change(file: Path, how: Callable[[np.ndarray], object]) -> None:
    ids = np.fromfile(file, "<u2")
    how(ids)
    ids.tofile(file)


def beyond(ids: np.ndarray) -> None:
    """Ids that the model has no row for, in all of the last half: each step would meet some."""
    ids[len(ids) // 2 :] = 60_000


def swapped(ids: np.ndarray) -> None:
    """Ids that it has: nothing but a hash can tell."""
    ids[[10, 20]] = ids[[20, 10]]


@pytest.mark.parametrize(("name", "how"), [("text", beyond), ("text", swapped), ("held", swapped)])
@pytest.mark.parametrize("world", [1, 2])
def test_a_shard_that_changed_at_equal_size_is_named_before_its_tokens_are_used(
    desk: "Desk", world: int, name: str, how: Callable[[np.ndarray], object]
) -> None:
    cache, text = desk.folder / "kept", desk.folder / "text.txt"
    shutil.rmtree(cache, ignore_errors=True)
    text.write_bytes((desk.folder / "train.txt").read_bytes())
    (desk.folder / "held.txt").write_bytes((desk.folder / "held_out.txt").read_bytes())
    flags = [f"--data.source={text}", f"--validation.source={desk.folder}/held.txt", f"--data.cache_dir={cache}"]
    flags.append("--validation.enable=true")
    case = f"{name} {how.__name__} {world}"
    desk.run(f"whole {case}", world, *flags, "--job.stop_after=1")
    (file,) = cache.glob(f"*{name}.txt-*/shard-00000.bin")
    change(file, how)
    ended = desk.run(f"changed {case}", world, *flags, ends=2)
    said = f"{file} has changed: bytes 0 to {file.stat().st_size} are not those that were written"
    assert all(said in of_rank for of_rank in ended.output.split("--- rank ")[1:])
    assert "IndexError" not in ended.output
    assert ended.status["state"] == "failed"
    if name == "text":
        assert ended.status["step"] == 0
    else:
        assert not [row for row in ended.rows if "validation_loss" in row]
