import json
from datetime import UTC, datetime, timedelta

import pytest

from tests.support.run_folder import make_run
from titanlite.commands.compare import run
from titanlite.comparison import reruns
from titanlite.observe.metrics import RunError


def has_colour(path, colour):
    """Whether a colour, as "#rrggbb", is in a picture."""
    import matplotlib.image

    pixels = matplotlib.image.imread(path)[..., :3]
    wanted = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return bool((abs(pixels - wanted).max(axis=-1) < 0.01).any())


BLUE, VERMILION = "#0072B2", "#D55E00"


def test_one_run(tmp_path, capsys):
    folder = make_run(tmp_path / "debug", [5.0, 4.0, 3.0], validations=[(2, 3.9), (3, 3.25)])
    assert run([folder]) == 0
    out = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert out == [
        "  run    steps  final loss  best validation  tok/s/GPU    MFU  memory GiB",
        "  debug      3      3.0000           3.2500        100  50.0%         1.5",
        str(tmp_path / "debug/loss.png"),
    ]
    assert has_colour(tmp_path / "debug/loss.png", BLUE)
    assert not has_colour(tmp_path / "debug/loss.png", VERMILION)


def test_several_runs_and_what_differs(tmp_path, capsys):
    runs = [
        make_run(tmp_path / "a", [5.0, 4.0], tokens_per_second_per_gpu=1234.0),
        make_run(tmp_path / "b", [5.0, 3.5, float("nan")], lr=0.001, batch=2, mfu=float("nan"), state="stopped"),
    ]
    assert run([*runs, "--out", str(tmp_path / "new/picture.png")]) == 1
    verdict, *rest = capsys.readouterr().out.splitlines()
    assert verdict.startswith("b: undecided: +1, of too few steps for an interval, at ")
    lines = [line.split() for line in rest]
    assert lines[1] == ["a", "2", "4.0000", "-", "1,234", "50.0%", "1.5"]
    assert lines[2] == ["b", "3", "(stopped)", "3.5000", "-", "100", "-", "1.5"]
    assert lines[3:6] == [
        ["config", "a", "b"],
        ["optimizer.lr", "0.0003", "0.001"],
        ["training.local_batch_size", "1", "2"],
    ]
    assert lines[6] == [str(tmp_path / "new/picture.png")]
    assert has_colour(tmp_path / "new/picture.png", BLUE)
    assert has_colour(tmp_path / "new/picture.png", VERMILION)


def test_runs_of_one_name_are_told_apart_and_how_they_were_resumed_is_no_difference(tmp_path, capsys):
    runs = [make_run(tmp_path / side / "run", [5.0]) for side in ("left", "right")]
    for side, resume in (("left", '"auto"'), ("right", "50")):
        with (tmp_path / side / "run/config.toml").open("a") as config:
            config.write(f"[checkpoint]\nresume = {resume}\n")
    run([*runs, "--out", str(tmp_path / "p.png")])
    out = capsys.readouterr().out
    assert "left/run " in out
    assert "right/run " in out
    assert "the configs are the same" in out


def test_a_run_without_steps_beside_one_that_has_some(tmp_path, capsys):
    runs = [make_run(tmp_path / "new", [], state="running"), make_run(tmp_path / "old", [5.0])]
    run([*runs, "--out", str(tmp_path / "p.png")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "old: no step in common with new"
    assert run([*runs, "--floor", "--out", str(tmp_path / "p.png")]) == 1  # nothing to train once more
    assert lines[2].split() == ["new", "0", "(running)", "-", "-", "-", "-", "-"]


def falling(offset=0.0, noise=0.0):
    return [2 + 3 / step + offset + noise * (step % 3 - 1) * step for step in range(1, 101)]


def nudged(folder, losses, **given):
    """A run beside `folder` of the same config, but for training.nudge."""
    make_run(folder.with_name(f"{folder.name}-nudged"), losses, **given)
    config = folder.with_name(f"{folder.name}-nudged") / "config.toml"
    config.write_text(config.read_text().replace("[training]", "[training]\nnudge = 1"))


def of_seed(folder, losses, seed):
    made = make_run(folder, losses)
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("[training]", f"[training]\nseed = {seed}"))
    return made


def test_the_verdict_stands_first_and_an_exit_code_goes_by_it(tmp_path, capsys):
    first = make_run(tmp_path / "a", falling())
    nudged(tmp_path / "a", falling(noise=1e-6))
    near = make_run(tmp_path / "near", falling(noise=2e-6))
    far = make_run(tmp_path / "far", falling(offset=-0.01))
    out = ["--out", str(tmp_path / "p.png")]
    assert run([first, near, *out]) == 0
    assert capsys.readouterr().out.startswith("near: within rounding: ")
    assert run([first, far, *out]) == 1
    verdict, tokens, *_ = capsys.readouterr().out.splitlines()
    assert verdict.startswith("far: differs: \N{MINUS SIGN}0.01 ± ")
    assert tokens.startswith("far: for equal loss it needs 0.")
    assert run([first, near, far, first, "--tolerance", "0.02", *out]) == 0
    kinds = [line.split(": ")[1] for line in capsys.readouterr().out.splitlines()[:3]]
    assert kinds == ["within rounding", "within tolerance", "equal bits"]
    band = of_seed(tmp_path / "s1", falling(offset=0.02), 1), of_seed(tmp_path / "s2", falling(offset=-0.02), 2)
    assert run([first, far, "--seeds", ",".join(band), *out]) == 0
    assert capsys.readouterr().out.startswith("far: within seed noise: ")


def test_seeds_are_two_runs_that_differ_in_their_seed_alone(tmp_path):
    first, other = (make_run(tmp_path / name, falling()) for name in ("a", "b"))
    seed = of_seed(tmp_path / "s1", falling(), 1)
    with pytest.raises(RunError, match="two seeds or more"):
        run([first, other, "--seeds", seed])
    with pytest.raises(RunError, match=r"b\n?.*nothing differs"):
        run([first, other, "--seeds", f"{seed},{other}"])
    wrong = make_run(tmp_path / "lr", falling(), lr=0.001)
    with pytest.raises(RunError, match=r"optimizer\.lr differs"):
        run([first, other, "--seeds", f"{seed},{wrong}"])
    stopped = of_seed(tmp_path / "s2", falling()[:99], 2)
    with pytest.raises(RunError, match=r"s2 = it ends at step 99 of 100"):
        run([first, other, "--seeds", f"{seed},{stopped}"])


@pytest.mark.parametrize(
    ("losses", "given", "why"),
    [
        (falling(), {"lr": 0.001}, "optimizer.lr differs from "),
        (falling()[:20], {}, "it ends at step 20 of 100"),
        (falling(), {}, "its losses and gradient norms are those of the run itself"),
    ],
)
def test_what_is_no_floor_is_not_used_as_one(losses, given, why, tmp_path, capsys):
    runs = [make_run(tmp_path / name, falling(noise=noise)) for name, noise in (("a", 0.0), ("b", 1e-6))]
    nudged(tmp_path / "a", losses, **given)
    run([*runs, "--out", str(tmp_path / "p.png")])
    note, verdict, *_ = capsys.readouterr().out.splitlines()
    assert "a-nudged is not used as the floor: " + why in note
    assert verdict.endswith("(rounding not measured: --floor)")


def test_a_floor_of_few_steps_may_differ_in_its_gradient_norms_alone(tmp_path, capsys):
    runs = [make_run(tmp_path / name, falling(noise=noise)[:6]) for name, noise in (("a", 0.0), ("b", 1e-6))]
    nudged(tmp_path / "a", falling()[:6], grad_norm=0.5 + 1e-7)
    run([*runs, "--out", str(tmp_path / "p.png")])
    out = capsys.readouterr().out
    assert "is not used as the floor" not in out
    assert "rounding not measured" not in out


@pytest.mark.parametrize(("age_s", "code"), [(0, 0), (300, 0), (None, 1)])
def test_what_ended_early_fails_and_what_still_runs_is_compared_so_far(age_s, code, tmp_path, capsys):
    runs = [make_run(tmp_path / name, falling()[:6]) for name in "ab"]
    for name in "ab":
        config = tmp_path / name / "config.toml"
        config.write_text(config.read_text().replace("[training]", "[training]\nsteps = 6"))
    rows = (tmp_path / "b/metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "b/metrics.jsonl").write_text("".join(rows[:2]))
    if age_s is not None:
        updated = (datetime.now(UTC) - timedelta(seconds=age_s)).isoformat()
        status = {"state": "running", "step": 2, "updated": updated, "host": "h", "pid": 1}
        (tmp_path / "b/status.json").write_text(json.dumps(status))
    assert run([*runs, "--out", str(tmp_path / "p.png")]) == code
    said = {0: "", 300: " (b was last seen at step 2 of 6)", None: " (b ended at step 2 of 6)"}[age_s]
    verdict = capsys.readouterr().out.splitlines()[0]
    assert verdict == f"b: equal bits in the 2 steps that both have{said}"


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "null"])
def test_what_is_not_finite_differs_however_it_is_written(number, tmp_path, capsys):
    first, other = (make_run(tmp_path / name, [5.0, 4.0, 3.0]) for name in "ab")
    metrics = tmp_path / "b/metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"loss": 4.0', f'"loss": {number}'))
    assert run([other, first, other, "--out", str(tmp_path / "p.png")]) == 1
    assert capsys.readouterr().out.splitlines()[:2] == [
        "a: differs: one of them has no finite training loss at 2.0 k tokens",
        "b: differs: both have a training loss that is not finite, which equals nothing, at 2.0 k tokens",
    ]


def test_layers_say_what_they_did_not_compare_and_the_exit_code_goes_by_them(tmp_path, capsys, monkeypatch):
    a, b = (make_run(tmp_path / name, [5.0]) for name in "ab")
    ones = reruns.np.ones(16)
    taken = {"a": {"1 x": ones, "1 y": ones}, "b": {"1 x": ones, "1 z": ones}}
    monkeypatch.setattr(reruns, "_sketched", lambda run, *_, **__: taken[run.name])
    assert run([a, b, "--layers", "1", "--out", str(tmp_path / "p.png")]) == 0
    assert "no tensor of the first step differs by more than rounding; not compared are 2 " in capsys.readouterr().out
    taken["b"]["1 x"] = 2 * ones
    assert run([a, b, "--layers", "1", "--out", str(tmp_path / "p.png")]) == 1
    assert "b: equal bits\nb: differs first in step 1: x" in capsys.readouterr().out


def test_inside_a_runs_folder(tmp_path, monkeypatch):
    make_run(tmp_path / "a", falling())
    monkeypatch.chdir(tmp_path / "a")
    assert run([".", "."]) == 0


NOT_RUNS = {
    "minr": ("there is no such folder", "mine"),
    "mine/metrics.jsonl": ("this is a file", "mine"),
    "mine/wandb/offline-run-1-2": ("config.toml and metrics.jsonl missing", "mine"),
    "": ("config.toml and metrics.jsonl missing", "mine"),
    "other.txt": ("this is a file", None),
    "nothing/mine": ("there is no such folder", None),
    "x" * 300: ("there is no such folder", None),
}


def test_every_path_that_is_no_run_is_named_with_the_run_that_was_meant(tmp_path):
    make_run(tmp_path / "mine", [5.0])
    (tmp_path / "mino").mkdir()  # is near, too, and no run
    (tmp_path / "mine/wandb/offline-run-1-2").mkdir(parents=True)
    (tmp_path / "other.txt").touch()
    with pytest.raises(RunError) as error:
        run([str(tmp_path / given) for given in ("mine", *NOT_RUNS)])
    assert f"titanlite compare: {len(NOT_RUNS)} problems\n" in str(error.value)
    for given, (what, meant) in NOT_RUNS.items():
        fix = f"did you mean {tmp_path / meant}?" if meant else "give the path <dump_folder>/<name> of a run"
        want = f"a run's folder, with config.toml and metrics.jsonl; {what}"
        assert f"  {tmp_path / given}\n      want: {want}\n      fix:  {fix}" in str(error.value)


def test_a_report_is_written_where_it_is_asked_for(tmp_path, capsys):
    folder, page = make_run(tmp_path / "a", [5.0, 4.0]), tmp_path / "new/page.html"
    assert run([folder, "--report", str(page)]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [str(tmp_path / "a/loss.png"), str(page)]
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_the_experts_of_those_runs_that_have_any_are_a_second_picture(tmp_path, capsys):
    dense, mixture = (make_run(tmp_path / name, [5.0, 4.0]) for name in ("dense", "mixture"))
    rows = [{"step": n, "tokens": 1000 * n, "experts": {"layers.0": [3, 1]}} for n in (1, 2)]
    (tmp_path / "mixture" / "experts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run([dense, mixture, "--out", str(tmp_path / "p.png")])
    assert capsys.readouterr().out.splitlines()[-2:] == [str(tmp_path / "p.png"), str(tmp_path / "p_experts.png")]
    assert (tmp_path / "p_experts.png").stat().st_size > 0
    run([dense])
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "dense" / "loss.png")


DAMAGED = [("status.json", "[]"), ("receipt.json", "{}"), ("receipt.json", '[{"feature": 3}]')]
DAMAGED += [("receipt.json", '[{"feature": "float8", "skipped": [1]}]')]


@pytest.mark.parametrize(("file", "content"), DAMAGED)
def test_json_of_another_shape_is_named(file, content, tmp_path):
    folder = make_run(tmp_path / "a", [5.0])
    (tmp_path / "a" / file).write_text(content)
    with pytest.raises(RunError, match=rf"a/{file}: 1 problem(.|\n)*want: a JSON "):
        run([folder])
