"""What the runs of a file share."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.launched import Desk


@pytest.fixture(scope="module")
def desk(shared_path: Path) -> "Desk":
    from tests.support.launched import Desk  # slow to import

    return Desk(shared_path)
