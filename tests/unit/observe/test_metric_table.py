import pytest

from titanlite.observe.metric_table import METRICS, flat_key, shown_name
from titanlite.optimizers.group_norms import KINDS
from titanlite.training.routers import SEEN


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("loss", "train/loss"),
        ("validation_loss_ema.wiki", "val/loss_ema.wiki"),
        ("float8_output_sqnr_db.layers.0.attention.wo", "float8/output_sqnr_db.layers.0.attention.wo"),
        *((f"{key}.wiki", f"{metric.name}.wiki") for key, metric in METRICS.items()),
        ("tokens", "tokens"),
        ("of_a_later_version", "of_a_later_version"),
    ],
)
def test_names_lead_back(key: str, name: str) -> None:
    assert shown_name(key) == name
    assert flat_key(name) == key


def test_names_are_unique() -> None:
    assert len({metric.name for metric in METRICS.values()}) == len(METRICS)
    assert not [key for key, metric in METRICS.items() if "." in key + metric.name]


def test_what_is_of_groups_and_of_routers_is_declared() -> None:
    assert {*KINDS, *(f"experts_{what}" for what in (*SEEN, "bias_range"))} <= METRICS.keys()
