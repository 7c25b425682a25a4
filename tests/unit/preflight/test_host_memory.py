"""A host without a GPU refuses at once a model whose weights, gradients and moments its memory does not hold."""

import sys
from pathlib import Path

import pytest

import titanlite.train
from titanlite.commands import main
from titanlite.config.toml_file import shipped_folder
from titanlite.errors import ConfigError
from titanlite.preflight import host_memory
from titanlite.preflight.checked_run import checked_run
from titanlite.preflight.host_memory import lack_of_memory
from titanlite.training.assemble import try_assembly

DEBUG = str(shipped_folder("configs") / "debug.toml")
NEED = 1_705_216 * 16  # bytes: of a parameter of `debug`, its gradient and two moments, in float32
IN_BLOCKS = 512 * 256 + 256 * 256 + 1536 * 256 + 256 * 768  # elements of the matrices of one of its two blocks
GROUPS = {
    "version 2": ("0::/job/step", "job/step/memory.max", "job/memory.max"),
    "version 1": ("5:cpu:/\n4:memory:/job/step\n0::/", "memory/job/step/memory.limit_in_bytes", "memory.max"),
    "of a parent": ("0::/job/step", "job/memory.max", "job/step/memory.max"),
    "of a container": ("0::/", "memory.max", "memory.high"),
}


@pytest.fixture(params=GROUPS)
def limit(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that limits the memory of this process; another has no limit in it."""
    groups, limited, unlimited = GROUPS[request.param]
    for name in (limited, unlimited):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("max\n")
    (tmp_path / "cgroup").write_text(f"{groups}\n")
    monkeypatch.setattr(host_memory, "_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(host_memory, "_TREE", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    return tmp_path / limited


def test_the_limit_is_what_weights_gradients_and_moments_take(limit: Path) -> None:
    checked = checked_run(["--config", DEBUG])
    limit.write_text(f"{NEED}\n")
    assert lack_of_memory(checked.config, NEED) is None
    limit.write_text(f"{NEED - 1}\n")
    assert "in float32, they take 26.0 MiB\n" in (lack_of_memory(checked.config, NEED) or "")


@pytest.mark.parametrize(
    ("flags", "world", "on_host", "need"),
    [
        ([], 4, 4, NEED),  # one copy, in four shards
        ([], 4, 1, NEED // 4),
        (["--parallelism.data_parallel_replicate_degree=2"], 4, 4, 2 * NEED),
        (["--parallelism.data_parallel_replicate_degree=2"], 4, 2, NEED),
        (["--parallelism.tensor_parallel_degree=2"], 4, 2, NEED // 2),
        (["--optimizer.state_dtype=bfloat16"], 1, 1, NEED * 12 // 16),
        (["--optimizer.ema_decay=0.99"], 1, 1, NEED * 20 // 16),
        (["--optimizer.recipe=muon"], 1, 1, NEED - 4 * 2 * IN_BLOCKS),
    ],
)
@pytest.mark.parametrize("limit", ["version 2"], indirect=True)
def test_ranks_of_this_host_share_it(limit: Path, flags: list[str], world: int, on_host: int, need: int) -> None:
    checked = checked_run(["--config", DEBUG, *flags], world)
    whole = try_assembly(checked, world).trained
    for room, fits in ((need, True), (need - 1, False)):
        limit.write_text(f"{room}\n")
        assert (lack_of_memory(checked.config, whole, world, on_host) is None) == fits


@pytest.mark.parametrize("limit", ["version 2"], indirect=True)
def test_a_start_is_refused_and_validate_warns_of_it(
    limit: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limit.write_text(f"{NEED - 1}\n")
    assert main(["validate", DEBUG]) == 0
    said = capsys.readouterr().out
    refusal = "this host shows no GPU, and has too little memory for the run: 1 problem\n"
    assert said.startswith(f'{DEBUG}: 1 warning\n  warning: {refusal}    model.flavor = "debug"\n        want: ')
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", DEBUG])
    with pytest.raises(ConfigError, match=refusal):
        titanlite.train.main()
    assert not Path("outputs").exists()
