from dataclasses import fields

import pytest

from titanlite.observe.metric_names import AXES, KNOWN, NAMES, PREFIXES, flat_key, shown_name
from titanlite.observe.metrics import StepRow, ValidationRow

OF_LAYERS = "float8_output_sqnr_db.layers.0.attention.wo"


def test_every_number_of_a_step_is_in_a_group() -> None:
    keys = {field.name for field in fields(StepRow)} - {*AXES, "sources", "layers", "numbers", "experts"}
    assert set(NAMES) == keys | {
        "z_loss",
        "weight_norm",
        "update_ratio",
    }  # which are among `numbers`, the latter of groups
    assert {name.partition("/")[0] for name in NAMES.values()} == {"train", "perf", "optim"}


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("loss", "train/loss"),
        ("z_loss", "train/z_loss"),
        ("grad_norm.matrices", "train/grad_norm.matrices"),
        ("weight_norm.matrices", "optim/weight_norm.matrices"),
        ("update_ratio.matrices", "optim/update_ratio.matrices"),
        ("validation_loss", "val/loss"),
        ("validation_bits_per_byte.wiki", "val/bits_per_byte.wiki"),
        ("accuracy.hellaswag", "eval/accuracy.hellaswag"),
        ("accuracy_norm.hellaswag", "eval/accuracy_norm.hellaswag"),
        ("evaluation_seconds", "eval/seconds"),
        (OF_LAYERS, "float8/output_sqnr_db.layers.0.attention.wo"),
        ("experts_fullest.layers.0", "experts/fullest.layers.0"),
        ("tokens", "tokens"),
        ("of_a_later_version", "of_a_later_version"),
    ],
)
def test_names_lead_back(key: str, name: str) -> None:
    assert shown_name(key) == name
    assert flat_key(name) == key


def test_names_are_unique() -> None:
    keys = {field.name for row in (StepRow, ValidationRow) for field in fields(row)}
    assert len({shown_name(key) for key in keys}) == len(keys)
    assert {key: shown_name(key) for key in KNOWN} == {key: known.name for key, known in KNOWN.items()}
    assert not [name for name in NAMES.values() if name.startswith(tuple(PREFIXES.values()))]
