"""What is written reads back as the same config, and the defaults are a file that shows when one changes."""

from dataclasses import replace
from pathlib import Path

from titanlite.config.check import check_config
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


def test_what_another_key_takes_the_place_of_is_not_written(tmp_path: Path) -> None:
    """Reading it back would refuse it: a file that is extended may have it."""
    (tmp_path / "base.toml").write_text("[lr_scheduler]\nwarmup_steps = 9\n")
    (tmp_path / "own.toml").write_text(
        'extends = ["base.toml"]\n[lr_scheduler]\nwarmup_tokens = 64\n[training]\ntokens = 4096\n'
    )
    config, origin = read_config(tmp_path / "own.toml")
    check_config(config, None, None, origin)
    assert config.lr_scheduler.warmup_steps == 9
    (tmp_path / "written.toml").write_text(to_toml(config))
    again, origin = read_config(tmp_path / "written.toml")
    check_config(again, None, None, origin)
