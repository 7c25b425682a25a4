"""A command line as a call, for every test of a command."""

from collections.abc import Callable

import pytest

from titanlite.commands import main

Call = Callable[..., str]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Carry a command line out; return what is on standard output, or on standard error if it is to end otherwise."""

    def carry_out(*argv: str, ends: int = 0) -> str:
        capsys.readouterr()
        assert main(argv) == ends
        out, err = capsys.readouterr()
        return err if ends else out

    return carry_out
