"""Compare runs: a verdict on each against the first, loss curves, results, and how their configs differ.

A verdict is "equal bits", "within rounding", "within seed noise", or "differs" with the mean difference of the loss
over the last fifth of the steps; "undecided" where nothing says how much of it is chance. If a run differs, is
undecided, or has ended before the last step of its config, the exit code is 1.
The effect of rounding is measured on runs of the first run's config whose initial weights were nudged. --floor trains
one such run, or up to four if the verdict needs them, into FIRST-nudged, FIRST-nudged-2 … beside FIRST. Later
comparisons use these folders again. For mixtures of experts a second picture shows the tokens of each expert over time.
Apart from --floor and --layers, the command only reads run folders (`metrics.jsonl`, `experts.jsonl`, `config.toml`,
`status.json`, `receipt.json`), or a run's data on wandb's server. So it can compare runs that are still going, were
copied from elsewhere or made by another version.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from titanlite.commands.arguments import Command, number_of
from titanlite.comparison.judge import FLOORS, Verdict, is_open, judge, tokens_to_equal_loss
from titanlite.comparison.layers import Parting
from titanlite.comparison.picture import draw_losses
from titanlite.comparison.report import write_report
from titanlite.comparison.reruns import floor_of, measure_floor, parting
from titanlite.comparison.runs import RunRecord, read_runs
from titanlite.comparison.tables import RESULTS, config_differences, results
from titanlite.comparison.wandb_verdicts import paths_on_server, send_verdicts
from titanlite.errors import Problem, describe
from titanlite.observe.experts_file import read_experts
from titanlite.observe.heat_map import draw_heat_map
from titanlite.observe.metrics import RunError
from titanlite.preflight.output_file import require_picture, require_place, writable
from titanlite.preflight.run_folder import RunFolder
from titanlite.text_table import columns

# Prefixes of the config keys that decide a run's losses. Other keys decide where and how results are written.
_OF_TRAINING = ("model.", "data.", "training.", "optimizer.", "lr_scheduler.", "float8.")

COMMAND = Command(
    "compare",
    __doc__ or "",
    {
        "RUN": "run folder, <dump_folder>/<name>; or entity/project/run_id, of a run on wandb's server",
        "--floor": "train the first run's config once more, nudged by one rounding, up to four times if need be",
        "--seeds RUN,RUN,...": "runs of the first's config with other seeds; two or more show what is chance",
        "--tolerance NATS": "difference of the loss that is accepted, the whole interval within it",
        "--layers K": "take K steps of each config once more, and name the first layer and tensor that differ",
        "--out FILE": "file for the plot; default: loss.png in the folder of a single run, else compare.png here",
        "--wandb": "write verdict and picture to the runs' pages on wandb's server, and to others of their groups",
        "--report FILE.html": "file for a report with charts of all metrics, which a browser shows without a network",
    },
    takes="RUN [RUN ...]",
)


def run(argv: Sequence[str]) -> int:
    """Compare the runs that `argv` names; write the pictures, and print verdicts and tables.

    Returns:
        1 if a run differs from the first by its verdict or in a layer, is undecided, has no step in common with the
            first, or if one of these two has ended before the last step of its config; else 0.
    """
    words, given = COMMAND.read_words(argv)
    folders = [Path(word) for word in words]
    records = read_runs(folders)
    out = Path(given.get("--out", folders[0] / "loss.png" if len(folders) == 1 else "compare.png"))
    report = Path(given["--report"]) if "--report" in given else None
    if report is not None and report.suffix.lower() not in (".html", ".htm"):
        saw, want = str(report), "a file whose ending is html"
        raise RunError.of("titanlite compare", "--report", saw, want, "--report compare.html")
    if report is not None:
        require_place("--report", report, makes_folder=True)
    require_picture("titanlite compare", out, "losses.png")
    if "--wandb" in given:
        paths_on_server(records)
    want, most = "a number above 0", 10**9
    tolerance = number_of(given, "--tolerance", float, want, "--tolerance 0.01", below=most)
    steps = number_of(given, "--layers", int, want, "--layers 1", below=most)
    if len(records) == 1 and (asked := {"--floor", "--layers", "--seeds", "--tolerance"} & set(given)):
        fix = f"titanlite compare {words[0]} OTHER {' '.join(sorted(asked))}"
        raise RunError.of("titanlite compare", "RUN", words[0], "a second run, to be judged against the first", fix)
    seeds = _seeds(records[0], given["--seeds"]) if "--seeds" in given else []
    nudged = _floors(records, "--floor" in given) if len(records) > 1 and records[0].steps else []
    judged = [judge(records[0], record, nudged, seeds, tolerance) for record in records[1:]]
    verdicts = [verdict for verdict in judged if verdict is not None]
    for record, verdict in zip(records[1:], judged, strict=True):
        sys.stdout.write(_said(records, record, verdict))
    fails = any(verdict is None or not verdict.passes for verdict in judged)
    if steps is not None:
        for record in records[1:]:
            found, lone = parting(records[0], record, steps)
            fails |= found is not None
            sys.stdout.write(_parting_line(record, found, lone, steps))
    with writable("titanlite compare", "--out", out):
        draw_losses(records, out, verdicts)
    if "--wandb" in given:
        for path in send_verdicts(records, judged, out):
            sys.stdout.write(f"wandb: {path} has the verdict\n")
    if report is not None:
        with writable("titanlite compare", "--report", report):
            write_report(records, report, verdicts)
    written = [path for path in (out, _draw_experts(records, out), report) if path is not None]
    sys.stdout.write(_tables(records) + "".join(f"{path}\n" for path in written))
    return int(fails)


def _draw_experts(records: Sequence[RunRecord], out: Path) -> Path | None:
    """Draw the tokens of each expert over time for the runs that recorded them. Return the picture's path, or None."""
    found = {
        record.name: rows
        for record in records
        if (path := RunFolder(record.path).experts).is_file() and (rows := read_experts(path))
    }
    if not found:
        return None
    picture = out.with_stem(f"{out.stem}_experts")
    with writable("titanlite compare", "--out", picture):
        draw_heat_map(found, picture)
    return picture


def _floors(records: Sequence[RunRecord], is_asked: bool) -> list[RunRecord]:
    """Return the runs of the first config with nudged weights. `is_asked`: train missing ones that a verdict needs."""
    first, nudged = records[0], list[RunRecord]()
    for seed in range(1, FLOORS + 1):
        floor = floor_of(first.path, seed)
        found, why = _floor(floor, first)
        if why and is_asked and any(is_open(first, other, nudged) for other in records[1:]):
            measure_floor(first, seed)
            found, why = _floor(floor, first)
            if why:
                want = f"the config of {first.path}, nudged, to step {first.last_step:,}"
                raise RunError.of("titanlite compare", str(floor), why, want, "delete the folder, and compare again")
        elif why and not is_asked and floor.is_dir():
            sys.stdout.write(f"{floor} is not used as the floor: {why}; --floor trains it again\n")
        nudged += found
    return nudged


def _floor(floor: Path, first: RunRecord) -> tuple[list[RunRecord], str]:
    """Return the nudged run in folder `floor` as a list of one; else an empty list and why the run cannot be used."""
    if not all(os.path.isfile(floor / name) for name in ("metrics.jsonl", "config.toml")):
        return [], "nothing was logged there"
    found = read_runs([floor])
    why = _unfit(found[0], first, "training.nudge")
    its, own = ([(row["loss"], row.get("grad_norm")) for row in run.steps] for run in (found[0], first))
    if not why and its[: len(own)] == own:
        why = "its losses and gradient norms are those of the run itself, so nothing was nudged"
    return ([], why) if why else (found, "")


def _seeds(first: RunRecord, paths: str) -> list[RunRecord]:
    """Read the runs at `paths`, separated by commas. Refuse a run that is shorter, or differs in more than its seed."""
    found = read_runs([Path(path) for path in paths.split(",")])
    want, fix = "runs of the first's config with another training.seed each", "train it with --training.seed 1 and 2"
    problems = [Problem(run.name, why, want, fix) for run in found if (why := _unfit(run, first, "training.seed"))]
    if len({run.config.get("training.seed") for run in found}) < 2:
        problems.append(Problem("--seeds", paths, "two seeds or more, for there to be a spread", fix))
    if problems:
        raise RunError(describe("titanlite compare", problems))
    return found


def _unfit(run: RunRecord, first: RunRecord, key: str) -> str:
    """Return why `run` is not comparable with `first`, or "". The config key `key`, and no other, must differ."""
    keys = [name for name, _ in config_differences([first, run]) if name.startswith(_OF_TRAINING)]
    if keys != [key]:
        return f"{', '.join(name for name in keys if name != key) or 'nothing'} differs from {first.path}"
    last = run.last_step
    return f"it ends at step {last:,} of {first.last_step:,}" if last < first.last_step else ""


def _said(records: Sequence[RunRecord], record: RunRecord, verdict: Verdict | None) -> str:
    """Return a line with the verdict on `record`, and another with the tokens for equal loss if the loss differs."""
    who = f"{record.name}: "
    if verdict is None:
        return f"{who}no step in common with {records[0].name}\n"
    is_shown = verdict.kind == "differs" and (verdict.low > 0 or verdict.high < 0)  # False for NaN
    times = tokens_to_equal_loss(records[0], record) if is_shown else None
    more = "" if times is None else f"{who}for equal loss it needs {times:.3g} times the tokens\n"
    return f"{who}{verdict.line}\n{more}"


def _parting_line(record: RunRecord, found: Parting | None, lone: Sequence[str], steps: int) -> str:
    if found is None:
        where = "the first step" if steps == 1 else f"the first {steps} steps"
        lacking = f"; not compared are {len(lone)} that one of them lacks: {', '.join(lone[:3])}" if lone else ""
        return f"{record.name}: no tensor of {where} differs by more than rounding{lacking}\n"
    more = f", and {found.others} more tensors of that step" if found.others else ""
    size = f"{found.difference:.2g} of its size, where rounding makes {found.rounding:.1g}"
    return f"{record.name}: differs first in step {found.step}: {found.tensor}, by {size}{more}\n"


def _tables(records: Sequence[RunRecord]) -> str:
    """Return the table of results, and the table of config keys whose values differ."""
    text = columns(RESULTS, *map(results, records))
    if rows := config_differences(records):
        text += columns(("config", *(record.name for record in records)), *((key, *values) for key, values in rows))
    elif len(records) > 1:
        text += "the configs are the same\n"
    return text
