"""Which of several ways to run is chosen."""

from dataclasses import dataclass

from titanlite.config.schema import Config
from titanlite.forecast.search import Candidate, Setting, best, fastest_by
from titanlite.recipes import load


@dataclass(frozen=True)
class Priced(Candidate):
    """A candidate whose prices are given."""

    degree: int = 1
    recipe: str = "none"
    tokens_per_second: float = 0.0
    on_device: int = 50
    fits: bool = True
    replicas: int = 1


def candidate(
    degree: int, speed: float, on_device: int = 50, save_list: str = "none", fits: bool = True, replicas: int = 1
) -> Candidate:
    setting = Setting(load("model", "llama3-debug"), None, load("optimizer", "adamw"))
    prices = {"degree": degree, "recipe": save_list, "tokens_per_second": speed, "on_device": on_device, "fits": fits}
    return Priced(setting, 1, Config(), **prices, replicas=replicas)  # type: ignore[arg-type]


def test_the_fastest_that_fits_and_of_what_is_nearly_as_fast_the_plainest() -> None:
    too_large, fastest, plainer = candidate(1, 999.0, fits=False), candidate(4, 100.0), candidate(2, 99.5)
    assert best([too_large, fastest, candidate(1, 98.0)]) is fastest
    assert best([too_large, fastest, plainer]) is plainer
    assert best([fastest, plainer, less := candidate(2, 99.2, on_device=40)]) is less
    assert best([candidate(2, 99.9, on_device=30, replicas=4), plainer, less]) is less
    assert best([too_large]) is None


def test_a_list_that_is_made_for_the_run_must_be_worth_it() -> None:
    named = candidate(2, 100.0)
    assert best([named, candidate(1, 101.9, save_list="auto")]) is named
    assert best([named, made := candidate(4, 102.1, save_list="auto")]) is made


def test_of_each_value_the_fastest_that_fits_stands_for_it_or_else_the_smallest() -> None:
    candidates = [candidate(1, 90.0), (quick := candidate(1, 95.0)), candidate(1, 99.0, fits=False)]
    candidates += [
        candidate(2, 99.0, on_device=90, fits=False),
        (small := candidate(2, 80.0, on_device=70, fits=False)),
    ]
    assert fastest_by(candidates, lambda each: each.degree) == {1: quick, 2: small}
