import pytest

from titanlite.observe.metric_table import METRICS, flat_key, shown_name
from titanlite.optimizers.group_norms import KINDS
from titanlite.training.routers import SEEN

OF_LAYERS = "float8_output_sqnr_db.layers.0.attention.wo"


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("loss", "train/loss"),
        ("z_loss", "train/z_loss"),
        ("epoch.wiki", "train/epoch.wiki"),
        ("share.wiki", "data/share.wiki"),
        ("grad_norm.matrices", "train/grad_norm.matrices"),
        ("weight_norm.matrices", "optim/weight_norm.matrices"),
        ("update_ratio.matrices", "optim/update_ratio.matrices"),
        ("validation_loss", "val/loss"),
        ("validation_loss_ema.wiki", "val/loss_ema.wiki"),
        ("validation_bits_per_byte.wiki", "val/bits_per_byte.wiki"),
        ("accuracy.hellaswag", "eval/accuracy.hellaswag"),
        ("accuracy_norm.hellaswag", "eval/accuracy_norm.hellaswag"),
        ("evaluation_seconds", "eval/seconds"),
        (OF_LAYERS, "float8/output_sqnr_db.layers.0.attention.wo"),
        ("experts_fullest.layers.0", "experts/fullest.layers.0"),
        ("targets", "targets"),
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
