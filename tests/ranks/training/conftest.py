"""What the runs of a file share."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.launched import Desk


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> "Desk":
    from tests.support.launched import Desk  # slow to import

    return Desk(tmp_path_factory.mktemp("desk"))
