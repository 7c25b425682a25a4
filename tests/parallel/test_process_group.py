"""What a launcher must set up is asked for before anything that takes long."""

import pytest
import torch

from titanlite.config.schema import Comm
from titanlite.errors import ConfigError
from titanlite.parallel.process_group import check_launcher, start_process_group


@pytest.mark.parametrize(
    ("restarts", "disabled", "legal"),
    [(None, None, True), ("0", None, True), ("3", "1", True), ("3", None, False), ("1", "0", False)],
)
def test_restarts_need_a_store_of_their_own(
    monkeypatch: pytest.MonkeyPatch, restarts: str | None, disabled: str | None, legal: bool
) -> None:
    for name, value in (("TORCHELASTIC_MAX_RESTARTS", restarts), ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", disabled)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    if legal:
        check_launcher()
    else:
        with pytest.raises(ConfigError, match=r"export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
            check_launcher()


@pytest.mark.parametrize("given", [("RANK",), ("WORLD_SIZE",), ("RANK", "WORLD_SIZE", "MASTER_ADDR")])
def test_a_part_of_what_a_launcher_says_is_refused(monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...]) -> None:
    said = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in said:
        monkeypatch.delenv(name, raising=False)
    check_launcher()
    monkeypatch.setenv("MASTER_ADDR", "localhost")  # of others, too
    check_launcher()
    for name in given:
        monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match="MASTER_PORT = not set") as refused:
        check_launcher()
    assert ("WORLD_SIZE = not set" in str(refused.value)) == ("WORLD_SIZE" not in given)
    for name in said:
        monkeypatch.setenv(name, "1")
    check_launcher()


def test_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda settings: None)
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(ConfigError, match=r"--nproc-per-node = 8\n.*want: at most 4, (.|\n)*fix:  --nproc-per-node 4"):
        start_process_group(Comm())
