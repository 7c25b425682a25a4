"""Errors of several checks become one message, whether or not they consist of reports."""

import pytest

from titanlite.errors import ConfigError, DataError, ShardingError, TitanliteError, Together


def raised(*errors: TitanliteError) -> TitanliteError:
    checks = Together()
    checks.errors += errors
    with pytest.raises(TitanliteError) as caught:
        checks.raise_all()
    return caught.value


def test_a_message_without_a_report_is_shown_as_it_is() -> None:
    text, report = (
        ShardingError("no plan:\n  try this"),
        DataError.of("a.toml", "data.source", "1", "a text", "write one"),
    )
    assert raised(text) is text
    several = raised(text, report)
    assert type(several) is ConfigError
    assert str(several) == f"{report}\n{text}"


def test_reports_about_one_source_are_merged() -> None:
    several = raised(*(ConfigError.of("a.toml", key, "1", "2", "write 2") for key in ("one", "two")))
    assert str(several).startswith("a.toml: 2 problems\n  one = 1\n")
