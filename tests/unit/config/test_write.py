"""What is written reads back as the same config, and the defaults are a file that shows when one changes."""

from dataclasses import replace
from pathlib import Path

from titanlite.config.read import read_config
from titanlite.config.schema import Config
from titanlite.config.write import to_toml

DEFAULTS = Path(__file__).with_name("default_config.toml")


def test_the_defaults_are_those_of_the_golden_file() -> None:
    """After a change of a default on purpose: write `to_toml(Config())` to the file, and the CHANGELOG under Config."""
    assert to_toml(Config()) == DEFAULTS.read_text()


def test_round_trip(tmp_path: Path) -> None:
    base = Config()
    config = replace(
        base,
        job=replace(base.job, name='quotes " and \\ and ×', recipe_dirs=("a", "b"), strict=False),
        training=replace(base.training, global_batch_size=64, max_norm=1 / 3),
        model=replace(base.model, rope_theta=1e-7, n_layers=3),
        checkpoint=replace(base.checkpoint, resume=12),
        float8=replace(base.float8, filter_fqns=()),
    )
    for written in (config, base):
        path = tmp_path / "config.toml"
        path.write_text(to_toml(written), encoding="utf-8")
        assert read_config(path)[0] == written
