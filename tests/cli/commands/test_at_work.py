"""A command that takes long says so on stderr; one that does not, does not."""

import time

import pytest

from titanlite.commands.at_work import at_work


def test_a_wait_is_said_once_it_lasts(capsys: pytest.CaptureFixture[str]) -> None:
    with at_work("at it", quiet_s=60):
        pass
    time.sleep(0.05)
    assert capsys.readouterr() == ("", "")
    with at_work("at it", quiet_s=0.01):
        deadline, err = time.monotonic() + 60, ""
        while not err and time.monotonic() < deadline:
            time.sleep(0.01)
            err += capsys.readouterr().err
    assert err == "at it …\n"
