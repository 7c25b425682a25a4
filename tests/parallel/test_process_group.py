"""What a launcher must set up is asked for before anything that takes long."""

import pytest

from titanlite.errors import ConfigError
from titanlite.parallel.process_group import check_launcher


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
