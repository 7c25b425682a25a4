from types import SimpleNamespace

from tests.conftest import pytest_collection_modifyitems

NAMES = [f"tests/test_a.py::test[{i}]" for i in range(100)]


def item(name: str, marker: str) -> SimpleNamespace:
    return SimpleNamespace(nodeid=name, get_closest_marker=lambda asked: asked == marker)


def test_each_slow_test_is_in_one_part_and_the_others_in_all():
    found: list[str] = []
    for part in range(4):
        items = [item(name, "slow") for name in NAMES] + [item("tests/test_b.py::test", "")]
        pytest_collection_modifyitems(SimpleNamespace(option=SimpleNamespace(slow_part=f"{part}/4")), items)  # type: ignore
        *slow, other = (each.nodeid for each in items)
        assert other == "tests/test_b.py::test"
        assert 10 < len(slow) < 40
        found += slow
    assert sorted(found) == sorted(NAMES)
