"""The device of a process."""

import pytest
import torch

from titanlite.config.schema import Comm
from titanlite.errors import ConfigError
from titanlite.parallel.process_group import start_process_group


def test_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda settings: None)
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(ConfigError, match=r"--nproc-per-node = 8\n.*want: at most 4, (.|\n)*fix:  --nproc-per-node 4"):
        start_process_group(Comm())
