"""Values of device code by Triton's interpreter, which is asked for before Triton is imported."""

import os
import subprocess
import sys

import pytest

from tests.support.needs import LOOPS_BY_INTERPRETER


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "copies",
        "rows",
        *(pytest.param(name, marks=LOOPS_BY_INTERPRETER) for name in ("losses", "products", "routing")),
    ],
)
def test_values_of_device_code_without_a_gpu(name: str) -> None:
    run = [sys.executable, "-W", "ignore", "-m", "tests.support.interpreted", name]
    done = subprocess.run(run, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
