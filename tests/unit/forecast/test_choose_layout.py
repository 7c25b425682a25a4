"""Which of several ways to run is chosen."""

from dataclasses import replace

from titanlite.config.schema import Config
from titanlite.forecast.choose_layout import Option, best, fastest_by


def option(degree: int, speed: float, on_device: int = 50, save_list: str = "none", fits: bool = True) -> Option:
    config = Config()
    mesh = replace(config.parallelism, tensor_parallel_degree=degree)
    kept = replace(config.activation_checkpoint, recipe=save_list)
    return Option(replace(config, parallelism=mesh, activation_checkpoint=kept), on_device, 1.0, speed, fits)


def test_the_fastest_that_fits_and_of_what_is_nearly_as_fast_the_plainest() -> None:
    too_large, fastest, plainer = option(1, 999.0, fits=False), option(4, 100.0), option(2, 99.5)
    assert best([too_large, fastest, option(1, 98.0)]) is fastest
    assert best([too_large, fastest, plainer]) is plainer
    assert best([fastest, plainer, less := option(2, 99.2, on_device=40)]) is less
    assert best([too_large]) is None


def test_a_list_that_is_made_for_the_run_must_be_worth_it() -> None:
    named = option(2, 100.0)
    assert best([named, option(1, 101.9, save_list="auto")]) is named
    assert best([named, made := option(4, 102.1, save_list="auto")]) is made


def test_of_each_value_the_fastest_that_fits_stands_for_it_or_else_the_smallest() -> None:
    options = [option(1, 90.0), (quick := option(1, 95.0)), option(1, 99.0, fits=False)]
    options += [option(2, 99.0, on_device=90, fits=False), (small := option(2, 80.0, on_device=70, fits=False))]
    assert fastest_by(options, lambda each: each.degree) == {1: quick, 2: small}
