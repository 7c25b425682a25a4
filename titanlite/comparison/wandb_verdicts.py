"""Show the verdict of a comparison on the pages that the compared runs have in Weights & Biases.

The verdict is in a run's summary, under `compare/verdict` and `compare/with`, and the picture is a file of the run. A
later comparison replaces both. Nothing is added to the history, as a run in progress numbers its lines itself. Other
runs in the groups of the compared runs (`metrics.wandb_group`) get all verdicts, for their pages to show.
"""

from collections.abc import Sequence
from pathlib import Path

from titanlite.comparison.judge import Verdict
from titanlite.comparison.runs import RunRecord
from titanlite.comparison.wandb_runs import require_wandb, wandb_run_path, wandb_server
from titanlite.observe.metrics import RunError
from titanlite.observe.wandb import has_login


def paths_on_server(runs: Sequence[RunRecord]) -> list[str]:
    """Return the path of each run on wandb's server.

    Raises:
        RunError: wandb is not installed, or lacks a run, or there is no login.
    """
    require_wandb("titanlite compare", "--wandb")
    paths = [wandb_run_path(run.path, run.config) for run in runs]
    if None in paths:
        want, fix = "a run that wandb has: trained with metrics.wandb", "leave --wandb out"
        raise RunError.of("titanlite compare", "--wandb", str(runs[paths.index(None)].path), want, fix)
    if not has_login():
        want = "a key for wandb's server, in the environment or of `wandb login`"
        raise RunError.of("titanlite compare", "--wandb", "", want, "`wandb login`, or set WANDB_API_KEY")
    return [path for path in paths if path]


def send_verdicts(runs: Sequence[RunRecord], verdicts: Sequence[Verdict | None], picture: Path) -> list[str]:
    """Send each verdict to the page of its run, all verdicts to other runs of its group, and the picture to both.

    Returns:
        The paths, on wandb's server, of all runs that got a verdict.

    Raises:
        RunError: wandb lacks a run, there is no login, or the server refuses the data.
    """
    paths = paths_on_server(runs)
    first = runs[0].name
    lines = [f"the first of {len(runs)} runs", *(v.line if v else "no step in common" for v in verdicts)]
    every = "; ".join(f"{run.name}: {line}" for run, line in zip(runs[1:], lines[1:], strict=True))
    sent: list[str] = []
    want, fix = "a server of wandb's that takes verdicts on these runs", "`wandb login`; `wandb sync` offline runs"
    with wandb_server("titanlite compare", "--wandb", want, fix) as api:
        told = [(api.run(path), line) for path, line in zip(paths, lines, strict=True)]
        named = {tuple(run.path) for run, _ in told}
        groups = dict.fromkeys((run.entity, run.project, run.group) for run, _ in told if run.group)
        for entity, project, group in groups:
            others = api.runs(f"{entity}/{project}", filters={"group": group})
            told += [(run, every) for run in others if tuple(run.path) not in named]
        for run, line in told:
            run.summary.update({"compare/verdict": line, "compare/with": first})
            run.upload_file(str(picture), root=str(picture.parent))
            if (path := "/".join(run.path)) not in sent:
                sent.append(path)
    return sent
