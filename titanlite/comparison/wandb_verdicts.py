"""Show the verdict of a comparison on the pages of Weights & Biases of the runs that were compared.

A run that goes on counts its lines itself, so nothing is added to its history: the verdict is in its summary, under
`compare/verdict` and `compare/with`, and the picture is a file of the run. A later comparison replaces both. Other runs
of their groups (`metrics.wandb_group`) get all verdicts, so that the page of each run of a group shows them.
"""

from collections.abc import Sequence
from pathlib import Path

from titanlite.comparison.judge import Verdict
from titanlite.comparison.runs import RunRecord
from titanlite.comparison.wandb_runs import wandb_run_path, wandb_server
from titanlite.observe.metrics import RunError
from titanlite.observe.wandb import has_login


def paths_on_server(runs: Sequence[RunRecord]) -> list[str]:
    """Return the path of each run on wandb's server; a RunError where wandb does not have one, or without a login."""
    paths = [wandb_run_path(run.path, run.config) for run in runs]
    if None in paths:
        want, fix = "a run that wandb has: trained with metrics.wandb", "leave --wandb out"
        raise RunError.of("titanlite compare", "--wandb", str(runs[paths.index(None)].path), want, fix)
    if not has_login():
        want = "a key for wandb's server, in the environment or of `wandb login`"
        raise RunError.of("titanlite compare", "--wandb", "", want, "`wandb login`, or set WANDB_API_KEY")
    return [path for path in paths if path]


def send_verdicts(runs: Sequence[RunRecord], verdicts: Sequence[Verdict | None], picture: Path) -> list[str]:
    """Write each verdict, and the picture, to the page of its run, and all of them to the other runs of its group.

    Returns:
        The paths of the runs on wandb's server.

    Raises:
        RunError: as `paths_on_server` says, or the server does not take what is sent.
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
