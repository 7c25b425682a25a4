"""scripts/mutants.py: its table fits the code, and it says which entry does not."""

import pytest

from tests.cli.test_bench import BENCH, script

mutants = script("mutants", BENCH.parent)


def test_each_entry_fits_the_code() -> None:
    assert mutants.misfits(mutants.entries()) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"old": "no such text"}, "has its `old` 0 times"),
        ({"old": "import "}, "times; want once"),
        ({"file": "titanlite/none.py"}, "has its `old` 0 times"),
        ({"tests": ["tests/none.py::test_it"]}, "there is no tests/none.py::test_it"),
        ({"tests": ["tests/cli/test_mutants.py::test_none[1]"]}, "there is no tests/cli/test_mutants.py::test_none[1]"),
        ({"tests": []}, "a test"),
        ({"more": ""}, "want file, name, new, old, tests"),
    ],
)
def test_an_entry_that_does_not_fit_is_named(change: dict[str, object], said: str) -> None:
    (wrong,) = mutants.misfits([mutants.entries()[0] | change])
    assert mutants.entries()[0]["name"] in wrong
    assert said in wrong
