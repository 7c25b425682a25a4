"""Stopping and going on: the same samples, the same losses, the same weights as without the interruption."""

import pytest

from tests.training.launched import Desk, Ended

LAYOUTS = {"1": (1, ()), "FSDP 2": (2, ()), "TP 2": (2, ("--parallelism.tensor_parallel_degree=2",))}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    return Desk(tmp_path_factory.mktemp("resume"))


@pytest.fixture(scope="module", params=LAYOUTS)
def undisturbed(request: pytest.FixtureRequest, desk: Desk) -> tuple[str, Ended]:
    world, flags = LAYOUTS[request.param]
    return request.param, desk.run(f"undisturbed {request.param}", world, *flags)


def test_stop_and_resume_is_bitwise_the_uninterrupted_run(desk: Desk, undisturbed: tuple[str, Ended]) -> None:
    layout, whole = undisturbed
    world, flags = LAYOUTS[layout]
    half = desk.run(f"stopped {layout}", world, *flags, "--job.stop_after=10")
    assert half.status["state"] == "stopped"
    assert half.status["by"] == "job.stop_after"
    assert half.status["step"] == 10
    assert half.trained() == whole.trained()[:10]
    rest = desk.run(f"stopped {layout}", world, *flags)
    assert rest.status["state"] == "finished"
    assert rest.trained() == whole.trained()
    assert [row["tokens"] for row in rest.rows] == [row["tokens"] for row in whole.rows]
    assert rest.content(20) == whole.content(20)
    assert "resumed from step 10" in rest.output
