"""What was refused once is refused still, by the same key and line, wherever the check that does it now stands."""

from pathlib import Path

import pytest
import tomli

from tests.support.refusals import FILE, input_of, problems_of

REFUSALS = tomli.loads(FILE.read_text(encoding="utf-8"))["refusal"]


@pytest.mark.parametrize("entry", REFUSALS, ids=[f"{entry['key']} by {entry['at']}" for entry in REFUSALS])
def test_what_was_refused_is_refused_still(entry: dict[str, str], tmp_path: Path) -> None:
    """After a key was removed, or is allowed more, on purpose: take its entries out of the file."""
    found = problems_of(*input_of(entry), tmp_path / "run")
    named = [(problem.where, problem.line, problem.fix) for problem in found]
    assert any(each[:2] == (entry["key"], entry.get("line")) and entry.get("fix", each[2]) == each[2] for each in named)
