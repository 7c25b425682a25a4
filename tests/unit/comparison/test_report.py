"""The report as a browser shows it."""

import html
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.browser import NEEDS_CHROMIUM, opened
from tests.support.run_folder import falling, record
from titanlite.comparison.axis import fitted_limits
from titanlite.comparison.judge import Verdict
from titanlite.comparison.report import write_report
from titanlite.comparison.runs import RunRecord

HOSTILE = "b <b>&\"'</script><script>console.error(1)</script>"

# Steps through what a user does; after each it notes what the page shows.
USE = """
const noted = {}, get = name => document.querySelector(name), loss = get("[data-metric=loss]");
const settle = () => new Promise(done => setTimeout(done, 200));
const note = async name => {
  await settle();
  const numbers = text => text?.split(",").map(Number);
  noted[name] = {};
  for (const { dataset: { metric, x, y, lines } } of document.querySelectorAll("figure"))
    noted[name][metric] = { x: numbers(x), y: numbers(y), lines };
};
const mouse = (target, name, x) => {
  const { left, top } = loss.querySelector(".u-over").getBoundingClientRect();
  const at = { clientX: left + x, clientY: top + 50, movementX: 5, bubbles: true, view: window };
  target.dispatchEvent(new MouseEvent(name, at));
};
const key = (target, name) => target.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true }));
(async () => {
  while (document.querySelector("figure:not([data-y])")) await settle();
  await note("start");
  get('[name=limits][value=full]').click(); await note("full"); get('[name=limits][value=fitted]').click();
  get('[name=axis][value=steps]').click(); await note("steps");
  get('[name=axis][value=seconds]').click(); await note("seconds"); get('[name=axis][value=tokens]').click();
  get('[data-run="1"]').click(); await note("toggled"); noted.pressed = get('[data-run="1"]').ariaPressed;
  get('[data-run="1"]').click(); await settle();
  const over = loss.querySelector(".u-over");
  mouse(over, "mouseenter", 100); mouse(over, "mousemove", 100); mouse(over, "mousedown", 100);
  mouse(over, "mousemove", 300); mouse(document, "mouseup", 300); await note("dragged");
  mouse(over, "mousemove", 150); await settle(); noted.hover = get("#tip").hidden ? "" : get("#tip").textContent;
  mouse(over, "dblclick", 150); await note("doubled");
  const box = loss.querySelector(".plot"); box.focus(); noted.focus = document.activeElement === box;
  key(box, "ArrowRight"); key(box, "+"); await note("plus"); key(box, "0"); await note("zero");
  const drawn = () => loss.querySelector("canvas").toDataURL(), plain = drawn(), name = get('[data-run="0"]');
  name.dispatchEvent(new PointerEvent("pointerenter")); await settle(); noted.pointed = drawn() !== plain;
  name.dispatchEvent(new PointerEvent("pointerleave")); await settle(); noted.left = drawn() === plain;
  get("[name=smoothing]").value = 3; get("[name=smoothing]").dispatchEvent(new Event("input"));
  await note("smoothed"); noted.span = get("#span").textContent;
  noted.before = getComputedStyle(document.body).backgroundColor;
  get("#theme").click(); await settle();
  noted.after = getComputedStyle(document.body).backgroundColor;
  noted.tabs = [...document.querySelectorAll("button,input,summary,[tabindex]")].filter(e => e.tabIndex < 0).length;
  noted.legend = [...document.querySelectorAll("#legend [data-run]")].map(button => button.textContent);
  const result = document.createElement("pre"); result.id = "noted"; result.textContent = JSON.stringify(noted);
  document.body.append(result);
})();
"""


def runs() -> list[RunRecord]:
    """A run, another that differs by 0.01 and is named by somebody unkind, and one that logged nothing."""
    first = record("base", 150, falling)
    second = record(HOSTILE, 150, lambda step: None if step == 100 else falling(step) + 0.01)
    for run in (first, second):
        run.rows.append({"step": 150, "tokens": 150_000, "validation_loss": 4.0})
        run.rows.append({"step": 150, "tokens": 150_000, "float8_sqnr_db.layers.0.wo": 30.0})
    second.config["job.name"] = HOSTILE
    receipt = [{"feature": "float8", "requested": "x", "applied": HOSTILE, "skipped": []}]
    silent = RunRecord("silent", [], {}, "failed", None)
    return [first, RunRecord(second.name, second.rows, second.config, "running", receipt), silent]


def verdict(run: str) -> Verdict:
    band = (np.array([1000.0, 150_000]), np.array([0.03, 0.03]))
    return Verdict(run, "differs", "differs: +0.0100 ± 0.0002 at 150 k tokens", 0.0098, 0.0102, band)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "page.html"
    write_report(runs(), path, [verdict(HOSTILE)])
    return path


@pytest.fixture(scope="module")
def used(page: Path) -> tuple[str, list[str], dict]:
    """The page after use: its HTML, its console, and what was noted."""
    shown, console = opened(page, ("--window-size=1200,5000",), USE)
    found = re.search(r'<pre id="noted">(.*?)</pre>', shown, re.DOTALL)
    assert found, console
    return shown, console, json.loads(html.unescape(found[1]))


def test_page_needs_no_network_and_has_all_runs(page: Path) -> None:
    text = page.read_text()
    assert "default-src 'none'" in text
    assert not re.findall(r"<(?:link|img|iframe)|<script src|@import|url\(", text)
    assert "differs: +0.0100 ± 0.0002 at 150 k tokens" in text
    assert "<small><bdi>failed, no logged step</bdi></small>" in text
    assert text.count("console.error(1)</script>") == 0


def test_a_card_names_its_run_and_says_whether_it_passes(tmp_path: Path) -> None:
    verdicts = [
        Verdict("silent", "equal bits", "equal bits in the 2 steps", 0.0, 0.0, is_short=True),
        Verdict("silent", "equal bits", "equal bits", 0.0, 0.0),
    ]
    write_report(runs(), tmp_path / "page.html", verdicts)
    cards = re.findall(r'<p class="verdict (\w+)">(.*?)</p>', (tmp_path / "page.html").read_text(), re.DOTALL)
    said = [f"<strong><bdi>silent</bdi>: {verdict.line}</strong>" for verdict in verdicts]
    assert cards == list(zip(["differs", "same"], said, strict=True))


@NEEDS_CHROMIUM
def test_a_narrow_page_has_the_results_whole_and_nothing_beyond_its_edge(tmp_path: Path) -> None:
    long = [replace(record("mixture_of_experts_bf16_seed_7_second", 20, falling), state="stopped"), *runs()]
    for row in long[0].rows:
        row |= {"tokens_per_second_per_gpu": 66192.0, "mfu": 0.4213, "memory_gib": 63.25, "validation_loss": 2.5}
    write_report(long, tmp_path / "page.html", [verdict(HOSTILE)])
    script = """const all = [...document.querySelectorAll(".wide")].map(e => [e.scrollWidth, e.clientWidth]);
      const { scrollWidth, clientWidth } = document.documentElement;
      console.log(JSON.stringify([innerWidth, [scrollWidth, clientWidth], all[0]]))"""
    _, (said,) = opened(tmp_path / "page.html", ("--window-size=500,2000",), script, 1000)
    width, page, results = json.loads(re.findall(r'"(.*)", source', said)[0])
    assert width == 500
    assert page[0] <= page[1]
    assert results[0] <= results[1]


def test_names_of_others_change_no_text_beside_them(page: Path) -> None:
    """One from right to left, say: each has a direction of its own."""
    text, name = page.read_text().partition('<script type="application/json"')[0], html.escape(HOSTILE, quote=False)
    shown = re.sub("&#(34|39);", lambda found: chr(int(found[1])), text).partition("</title>")[2]
    assert shown.count(name) > 8
    assert all("<bdi>" in before[-120:] for before in shown.split(name)[:-1])


@NEEDS_CHROMIUM
def test_console_is_silent(used: tuple) -> None:
    assert used[1] == []


@NEEDS_CHROMIUM
def test_a_message_on_the_console_is_seen_and_a_dark_desktop_has_a_dark_page(page: Path) -> None:
    script = "console.error(getComputedStyle(document.body).backgroundColor); throw new Error('planted')"
    _, console = opened(page, ("--blink-settings=preferredColorScheme=0",), script, 1000)
    dark, error = console
    assert "rgb(20, 23, 27)" in dark
    assert "planted" in error


@NEEDS_CHROMIUM
def test_every_metric_is_drawn_with_a_line_a_run(used: tuple) -> None:
    start = used[2]["start"]
    assert {name: chart["lines"] for name, chart in start.items()} == {
        "loss": "0,1",
        "loss difference": "1",
        "validation_loss": "0,1",
        "seconds": "0,1",
        "float8_sqnr_db.layers.0.wo": "0,1",
    }
    assert used[2]["legend"] == ["base", f"{HOSTILE}running", "silentfailed, no logged step"]
    assert "1 value not finite" in used[0]


@NEEDS_CHROMIUM
def test_axes_of_the_page_are_those_of_the_picture(used: tuple) -> None:
    start = used[2]["start"]
    x = np.arange(1.0, 151)
    losses = [(1000 * x, np.array([row["loss"] or np.nan for row in run.steps])) for run in runs()[:2]]
    assert start["loss"]["x"] == [0, 150_000]
    assert start["loss"]["y"] == pytest.approx(fitted_limits(losses, 0, 150_000, 150_000), rel=1e-6)  # float32
    low, high = start["loss difference"]["y"]
    assert low < -0.03 < 0.03 < high < 0.1  # the band
    low, high = used[2]["full"]["loss difference"]["y"]
    assert low < -0.03
    assert 0.03 < high < 0.1
    full = used[2]["full"]["loss"]["y"]
    assert full[1] > max(falling(step) for step in range(1, 5)) > start["loss"]["y"][1]
    assert used[2]["steps"]["loss"]["x"] == [0, 150]
    assert used[2]["seconds"]["loss"]["x"] == [0, 75]


@NEEDS_CHROMIUM
def test_runs_zoom_smoothing_and_colours_are_chosen_by_mouse_and_keyboard(used: tuple) -> None:
    noted = used[2]
    assert (noted["toggled"]["loss"]["lines"], noted["pressed"]) == ("0", "false")
    assert noted["toggled"]["loss difference"]["lines"] == ""
    left, right = noted["dragged"]["loss"]["x"]
    assert 0 < left < right < 60_000
    assert noted["dragged"]["validation_loss"]["x"] == [left, right]  # all charts are zoomed
    assert noted["dragged"]["loss"]["y"] != noted["start"]["loss"]["y"]
    assert "base" in noted["hover"]
    assert HOSTILE in noted["hover"]
    assert re.search(r"step \d+ · [\d.]+K tokens · [\d.]+ s", noted["hover"])
    assert noted["doubled"]["loss"]["x"] == noted["zero"]["loss"]["x"] == [0, 150_000]
    left, right = noted["plus"]["loss"]["x"]
    assert right - left == pytest.approx(75_000)
    assert noted["focus"]
    assert noted["pointed"]  # at a name: other runs fade
    assert noted["left"]
    assert noted["tabs"] == 0  # everything can be reached by Tab
    assert noted["span"] == "over 10 steps"
    assert noted["smoothed"]["loss"]["y"] != noted["start"]["loss"]["y"]
    assert (noted["before"], noted["after"]) == ("rgb(255, 255, 255)", "rgb(20, 23, 27)")


@NEEDS_CHROMIUM
def test_an_offset_of_a_hundredth_is_seen_after_20_000_steps(tmp_path: Path) -> None:
    long = [record("base", 20_000, falling), record("off", 20_000, lambda step: falling(step) + 0.01)]
    write_report(long, tmp_path / "page.html")
    shown, console = opened(tmp_path / "page.html", ("--window-size=1200,3000",))
    assert console == []
    found = re.findall(r'data-metric="([^"]+)".*?data-y="([^,]+),([^"]+)"', shown)
    y = {name: (float(low), float(high)) for name, low, high in found}
    assert 350 * 0.01 / (y["loss"][1] - y["loss"][0]) > 3  # pixels of its height
    assert y["loss difference"][1] - y["loss difference"][0] < 0.03
    assert "here of 16 rows (base, off)" in shown


@pytest.mark.slow
@NEEDS_CHROMIUM
def test_ten_runs_of_10_000_steps_are_small_and_quick(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(1.0, 0.1, (10, 10_000, 10))
    records = []
    for i in range(10):
        run = record(f"run {i}", 10_000, falling)
        for row, extra in zip(run.rows, values[i], strict=True):
            row |= {f"metric_{k}": float(value) for k, value in enumerate(extra)}
        records.append(run)
    page = tmp_path / "page.html"
    write_report(records, page)
    assert page.stat().st_size < 5e6
    script = """new PerformanceObserver(list => console.log("painted", list.getEntries()[0].startTime))
      .observe({ type: "paint", buffered: true });
      const isDrawn = () => document.querySelector("[data-metric=loss][data-y]");
      setInterval(() => isDrawn() && console.log("drawn", performance.now()), 5);"""
    _, console = opened(page, ("--timeout=5000", "--window-size=1400,1000"), script, None)
    times = {word: float(ms) for word, ms in re.findall(r'"(painted|drawn) ([\d.]+)"', "\n".join(console[::-1]))}
    print(page.stat().st_size, times)
    assert times["painted"] < 2000
    assert times["drawn"] < 2000
