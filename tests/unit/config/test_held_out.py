"""Further held-out sources: their keys, and an average of weights."""

from dataclasses import replace
from typing import Any

import pytest

from titanlite.config.check import check_config
from titanlite.config.held_out import held_out_sources, name_of_source
from titanlite.config.schema import Config, Optimizer, Validation


def with_sources(*sources: str, enable: bool = True) -> Config:
    return replace(Config(), validation=Validation(enable=enable, source="a.txt", sources=sources))


def test_each_source_has_a_key() -> None:
    found = held_out_sources(with_sources("code=b=c.txt", "wiki=hf:wiki::test"))
    assert found == {
        "validation.source": "a.txt",
        "validation.sources.code": "b=c.txt",
        "validation.sources.wiki": "hf:wiki::test",
    }
    assert [name_of_source(key) for key in found] == ["", "code", "wiki"]
    assert held_out_sources(with_sources(enable=False)) == {}


@pytest.mark.parametrize("weights", ["ema", "both"])
def test_an_average_is_validated_where_there_is_one_and_validation(weights: Any) -> None:
    validation, average = Validation(enable=True, weights=weights), Optimizer(ema_decay=0.9)
    check_config(replace(Config(), validation=validation, optimizer=average), None, None)
