from dataclasses import replace

from tests.support.profiles import profiled, rank_profile
from titanlite.explain.tables import memory_table, run_text
from titanlite.explain.timeline import draw_timeline, timeline_figure
from titanlite.observe.step_profile import ATTENTION, DATA_WAIT, MATMUL, SAVING, VALIDATION, PeakMemory, StepEdges
from titanlite.text_table import folded

SHARD, REPLICATE = "communication dp_shard", "communication dp_replicate"


def ranks(n, start, **config):
    """A run of n ranks, each of which comes to its collectives later than the one before, in seconds."""
    profiles = []
    for rank in range(n):
        late = start + 1e6 * rank
        spans = {
            DATA_WAIT: [(0.0, start)],
            MATMUL: [(start, late)],
            ATTENTION: [(late, late + 1e6)],
            SHARD: [(late + 5e5, 2e7)],
            REPLICATE: [(2e7, 2.2e7)],
        }
        edges = [StepEdges(11, 0.0, 2e7), StepEdges(12, 2e7, 2.5e7), StepEdges(13, 2.5e7, 3.5e7)]
        profiles.append(replace(rank_profile(spans, rank=rank, world=n), steps=edges))
    return profiled(*profiles, **config)


def test_every_line_fits_80_columns_and_the_sum_is_the_step():
    run = ranks(8, 2e6, name="a-run-with-a-name-of-some-length")
    assert max(map(len, folded(run_text(run), 80).splitlines())) <= 80, run_text(run)
    rows = {line[2:28].strip(): line[28:].split() for line in run_text(run).splitlines()}
    assert rows["sum"][:2] == [f"{run.wall_us / 1e3:,.1f}", "100.0%"]
    assert "comes last most: rank 7, by 1,333.3 ms a step, 100% of all waits" in run_text(run)


def test_recording_costs_no_work_between_steps():
    plain, aside = {MATMUL: [(0.0, 40.0)]}, {MATMUL: [(0.0, 40.0)], VALIDATION: [(40.0, 60.0)], SAVING: [(60.0, 70.0)]}
    said = [run_text(replace(profiled(rank_profile(spans)), unprofiled_us=50.0)) for spans in (plain, aside)]
    assert "so recording costs +100%\n" in said[0]
    assert "so recording costs +40%, validation and saving not counted\n" in said[1]


def test_memory_is_that_of_the_fullest_rank_beside_its_forecast():
    small, large = (
        PeakMemory({"parameters": n << 20, "fragmentation": 1 << 20}, n << 20, (n + 1) << 20) for n in (4, 9)
    )
    forecast = {"parameters": 8 << 20, "communication": 2 << 20, "gathered weights": 1 << 20, "slack": 3 << 19}
    run = profiled(
        rank_profile({}, world=2, memory=small), rank_profile({}, rank=1, world=2, memory=large, forecast=forecast)
    )
    rows = [line.split() for line in memory_table(run).splitlines()]
    assert rows == [
        ["MiB", "at", "the", "peak,", "rank", "1", "measured", "forecast"],
        ["parameters", "9.0", "8.0"],
        ["gathered", "weights,", "communication", "0.0", "3.0"],
        ["fragmentation", "1.0", "1.5"],
        ["all", "10.0", "12.5"],
    ]
    assert memory_table(profiled(rank_profile({}))) == ""


def test_the_timeline_shows_each_rank_s_parts_and_its_collectives(tmp_path):
    run = ranks(3, 2e6)
    assert run.median_step == 13
    figure = timeline_figure(run, 0)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1", "rank 2"]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [ATTENTION, MATMUL, SHARD, "waiting for other ranks", DATA_WAIT]
    draw_timeline(run, 12, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
