"""The check of token shards while training goes on: shared out on a host, and one message on all ranks."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch.distributed as dist

import titanlite.data.shards
from tests.support.needs import slow
from tests.support.ranks import run_ranks
from tests.unit.data.test_shards import make_shards
from titanlite.data.corpus import Corpus
from titanlite.data.order import samples_at
from titanlite.errors import DataError
from titanlite.training.data_check import DataCheck

if TYPE_CHECKING:
    from tests.support.launched import Desk

N_BLOCKS = 40


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shards of 40 small blocks."""
    monkeypatch.setattr(titanlite.data.shards, "BLOCK_BYTES", 64)
    assert len([*make_shards(tmp_path / "s", np.arange(1000)).blocks()]) == N_BLOCKS
    return tmp_path / "s"


def checked_blocks(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What is hashed from now on."""
    hashed, block_hash = list[bytes](), titanlite.data.shards.block_hash
    monkeypatch.setattr(titanlite.data.shards, "block_hash", lambda data: (hashed.append(data), block_hash(data))[1])
    return hashed


@pytest.mark.parametrize("launchers", [1, 2])
def test_the_ranks_of_a_launcher_check_each_block_once(
    launchers: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body() -> None:
        if launchers == 2:
            monkeypatch.setenv("LOCAL_RANK", "0")
            monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
        shards = Corpus(folder)
        hashed = checked_blocks(monkeypatch)
        check = DataCheck([shards])
        check._checking.result()
        n_hashed = len(hashed)
        assert sum(file.checked[block] for file, block in shards.blocks()) == n_hashed
        assert np.array_equal(shards.read(0, 1000), np.arange(1000))
        assert len(hashed) == N_BLOCKS
        check.tell()
        check.close()
        print(n_hashed)

    assert sum(map(int, run_ranks(body, folder.parent))) == N_BLOCKS * launchers


def test_what_the_share_of_one_rank_holds_ends_all_with_one_message(folder: Path) -> None:
    file = folder / "shard-00009.bin"
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")

    def body() -> None:
        check = DataCheck([Corpus(folder)])

        check._checking.exception()
        with pytest.raises(DataError) as e:
            check.tell()
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


@pytest.mark.parametrize(
    ("name", "how", "world"),
    [
        ("text", swapped, 2),
        *slow(
            ("held", swapped, 2), ("text", beyond, 1), ("text", swapped, 1), ("held", swapped, 1), ("text", beyond, 2)
        ),
    ],
)
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


@pytest.mark.parametrize("of", ["text", *slow("held")])
def test_what_one_rank_alone_meets_ends_all_with_one_message(desk: "Desk", of: str) -> None:
    def plant() -> None:
        titanlite.data.shards.BLOCK_BYTES = 128  # a sample's
        DataCheck._check = lambda self: None  # what is read finds it first

    cache = desk.folder / f"blocks of {of}"
    flags = [f"--data.cache_dir={cache}", f"--validation.enable={'true' if of == 'held' else 'false'}"]
    flags += ["--validation.freq=2", "--training.seed=1"]
    desk.run(f"whole {of}", 2, *flags, "--job.stop_after=1", plant=plant)
    (file,) = cache.glob(f"*{'held_out' if of == 'held' else 'train'}.txt-*/shard-00000.bin")
    sample, at_step = 3, 1  # held-out text is looked through for a target before the first step
    if of == "text":
        n_samples = (file.stat().st_size // 2 - 1) // 64
        position = {int(x): i for i, x in enumerate(samples_at(np.arange(n_samples), n_samples, 1))}
        # The sample before reads its first token: it is to come later.
        sample = next(x for x, i in position.items() if 8 <= i < 60 and i + 8 < position.get(x - 1, 0))
        at_step = position[sample] // 4 + 1
    change(file, lambda ids: ids.__setitem__(slice(sample * 64 + 1, sample * 64 + 3), 1))
    ended = desk.run(f"changed {of}", 2, *flags, plant=plant, ends=2)
    said = f"{file} has changed: bytes {sample * 128} to {sample * 128 + 128} are not those that were written"
    assert all(said in of_rank for of_rank in ended.output.split("--- rank ")[1:])
    assert ended.status["step"] == at_step - 1
    assert [row["step"] for row in ended.rows] == list(range(1, at_step))
    assert not ended.checkpoints()


@pytest.mark.slow
def test_a_step_waits_for_no_other_rank_because_of_the_check(desk: "Desk") -> None:
    def plant() -> None:
        titanlite.data.shards.BLOCK_BYTES = 128
        gather, check = dist.all_gather_object, Corpus.check
        dist.all_gather_object = lambda *given: (print("gathers"), gather(*given))
        Corpus.check = lambda self, *block: (time.sleep(0.02), check(self, *block))  # longer than the run

    flags = [f"--data.cache_dir={desk.folder}/slow", "--validation.enable=false"]
    runs = [desk.run(f"{n} steps", 2, *flags, f"--job.stop_after={n}", plant=plant) for n in (2, 6)]
    few, many = (run.output.count("gathers") for run in runs)
    assert few == many > 0
