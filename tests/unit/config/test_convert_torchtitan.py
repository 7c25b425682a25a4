"""What `titanlite convert` writes beside the values, whose values test_torchtitan.py has."""

from pathlib import Path

import pytest
import tomli

from tests.support.launched import REPOSITORY
from titanlite.commands import main
from titanlite.config.build import from_table
from titanlite.config.check import config_problems
from titanlite.config.problems import Origin, Problems
from titanlite.config.schema import Config
from titanlite.recipes import load

THEIRS = """\
[job]
description = "mine"
print_config = false
[profiling]
enable_profiling = true
profile_freq = 100
enable_memory_snapshot = false
[metrics]
save_for_all_ranks = true # a comment of theirs
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "assets"
[optimizer]
name = "Adam"
lr = 3e-4
[lr_scheduler]
warmup_steps = 100
[training]
dataset = "c4_test"
steps = 50
stepz = 5
[parallelism]
pipeline_parallel_degree = 2
[validation]
enable = false
dataset = "c4_validation"
[fault_tolerance]
enable = true
sync_steps = 10
"""

OWN = "[comm]\ntrace_buf_size = 20000\n"  # makes a file torchtitan's, and asks for nothing


@pytest.fixture
def convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)

    def call(text: str, *flags: str) -> tuple[int, str, str]:
        Path("theirs.toml").write_text(text)
        code = main(["convert", "theirs.toml", *flags])
        return code, *capsys.readouterr()

    return call


def test_what_differs_has_a_comment(convert) -> None:
    code, made, _ = convert(THEIRS)
    assert code == 0
    for line in (
        'name = "theirs"  # names the run\'s folder, in job.dump_folder\n',
        'flavor = "8B"  # was "debugmodel"\nn_layers = 6\n',
        'tokenizer = "assets/tokenizer.json"  # was model.hf_assets_path = "assets"\n',
        'recipe = "adamw"  # was optimizer.name = "Adam"\n',
        "weight_decay = 0.0  # Adam without its L2 penalty\n",
        "lr = 0.0003\n",
        "warmup_steps = 50  # was 100, which torchtitan shortens to the run\n",
        'decay_type = "linear"  # torchtitan\'s default; "cosine" here\n',
        "start_step = 100  # was profiling.profile_freq: there is one trace\n",
    ):
        assert f"\n{line}" in made, line
    assert "a comment of theirs" not in made
    assert max(map(len, made.splitlines())) <= 100


def test_what_has_no_counterpart_is_a_comment_and_is_listed_with_its_line(convert) -> None:
    _, made, said = convert(THEIRS)
    in_parallelism = made.partition("[parallelism]\n")[2].partition("\n\n")[0]
    assert "# pipeline_parallel_degree = 2: titanlite has no pipeline parallelism: split the model" in in_parallelism
    assert made.endswith(
        "# Of sections that titanlite has not:\n"
        "# fault_tolerance.enable = true: titanlite has no torchft: restart with torchrun --max-restarts\n"
        "# fault_tolerance.sync_steps = 10: titanlite has no torchft: restart with torchrun --max-restarts\n"
    )
    unknown = "neither torchtitan v0.2.2 nor titanlite has this key; did you mean training.steps?"
    assert f"# stepz = 5: {unknown}\n" in made
    line = THEIRS.splitlines().index("stepz = 5") + 1
    assert "\n    5 without a counterpart, now comments:\n" in said
    assert f"\n        line {line}  training.stepz = 5: {unknown}\n" in said
    assert f"\n        line {line + 2}  parallelism.pipeline_parallel_degree = 2: titanlite has no pipeline" in said


def test_what_asks_for_nothing_is_counted_and_what_is_off_is_there_to_be_switched_on(convert) -> None:
    _, made, said = convert(THEIRS)
    assert "# Left out: 3 keys that asked for nothing.\n" in made
    assert "\n    3 left out, which asked for nothing\n" in said
    assert not [name for name in ("memory_snapshot", "print_config", "mine") if name in made]
    off = '# source = "hf:allenai/c4:en:validation"  # was validation.dataset = "c4_validation"'
    assert made.partition("[validation]\n")[2].partition("\n\n")[0] == f"enable = false\n{off}"


def test_a_key_of_titanlite_stays(convert) -> None:
    _, made, _ = convert('[job]\nname = "mine"\n[float8]\nrecipe = "rowwise"\n[training]\nglobal_batch_size = -1\n')
    table = tomli.loads(made)
    assert (table["job"]["name"], table["float8"]["recipe"]) == ("mine", "rowwise")
    assert "global_batch_size" not in made


@pytest.mark.parametrize(
    ("text", "line", "is_other"),
    [
        ('[checkpoint]\ninitial_load_path = "theirs"\n', 'initial_load_path = "theirs"', True),
        ('[checkpoint]\ninitial_load_path = "a"\ninitial_load_in_hf = true\n', 'initial_load_path = "a"', False),
        ("[training]\nglobal_batch_size = 64\n[validation]\nsteps = 10\n", "steps = 10", True),
        ("[training]\nglobal_batch_size = 64\n[validation]\nsteps = -1\n", "steps = -1", False),
        ("[validation]\nsteps = 10\n", "steps = 10", False),
    ],
)
def test_a_key_that_means_something_else_says_so(convert, text: str, line: str, is_other: bool) -> None:
    _, made, _ = convert(text + OWN)
    assert (f"\n{line}  # " in made) == is_other
    assert (f"\n{line}\n" in made) != is_other


def test_a_key_of_an_earlier_release_is_answered(convert) -> None:
    _, made, _ = convert("[training]\nbatch_size = 4\ncompile = true\n[experimental]\nx = [{a = 1}]\n")
    assert "\nlocal_batch_size = 4  # was training.batch_size\n" in made
    assert "\nenable = true  # was training.compile\n" in made
    assert "\n# experimental.x = […]: titanlite has no experimental section\n" in made
    on = "enable_checkpoint = true\ninterval = 3600\n"
    _, made, said = convert(f'[checkpoint]\n{on}interval_type = "seconds"\n')
    assert '\n# interval_type = "seconds": checkpoint.interval counts steps\n' in made
    assert "\n        line 4  checkpoint.interval_type" in said
    _, made, _ = convert("[validation]\nenabled = true\nseq_len = 64\n")
    assert "\n# seq_len = 64: validation uses training.seq_len\n" in made


@pytest.mark.parametrize(
    ("switch", "default", "other"),
    [
        ("fault_tolerance.enable = true", "group_size = 0", "replica_id = 1"),
        ("memory_estimation.enable = true", "disable_fake_mode = false", "folder = 1"),
        ("training.steps = 10", "gc_freq = 7", "gc_debug = true"),
        (
            "parallelism.context_parallel_degree = 2",
            'context_parallel_load_balancer = "headtail"',
            'context_parallel_rotate_method = "alltoall"',
        ),
    ],
)
def test_a_key_at_its_default_there_asks_for_nothing(convert, switch: str, default: str, other: str) -> None:
    section = switch.partition(".")[0]
    _, made, said = convert(f"{switch}\n{section}.{default}\n{section}.{other}\n{OWN}")
    assert default not in made + said
    assert other in made
    assert other in said


def test_where_traces_go_by_default_asks_for_nothing(convert) -> None:
    _, made, said = convert(f'{OWN}save_traces_folder = "comm_traces"\nsave_traces_file_prefix = "mine"\n')
    assert "save_traces_folder" not in made + said
    assert 'save_traces_file_prefix = "mine"' in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[model]\nname = "gpt_oss"\n', "fix:  choose one of these: titanlite has no such model"),
        ('[training]\nsteps = "ten"\n', 'line 2  training.steps = "ten"'),
        ('[profiling]\nenable_profiling = "yes"\n', "line 2  profiling.enable_profiling"),
        ("[training\n", "valid TOML"),
    ],
)
def test_what_cannot_be_converted_writes_nothing(convert, text: str, said: str) -> None:
    code, made, error = convert(text + OWN, "--out", "ours.toml")
    assert (code, made) == (2, "")
    assert said in error
    assert not Path("ours.toml").exists()


def test_a_file_is_not_overwritten(convert) -> None:
    Path("ours.toml").write_text("mine")
    code, _, said = convert("", "--out", "ours.toml")
    assert code == 2
    assert "fix:  remove ours.toml, or name another" in said
    assert Path("ours.toml").read_text() == "mine"
    assert convert(OWN, "--out", "no/such/folder.toml")[0] == 2


def test_the_run_is_named_after_the_file_that_is_written(convert) -> None:
    _, said, _ = convert(OWN, "--out", "ours.toml")
    assert tomli.loads(Path("ours.toml").read_text())["job"]["name"] == "ours"
    assert said.endswith("next: titanlite validate ours.toml --world N\n")
    assert Config().job.name == "run"


def test_a_warmup_of_another_type_is_refused_however_long_it_is(convert) -> None:
    code, _, said = convert(THEIRS.replace("warmup_steps = 100", 'warmup_steps = "200"'))
    assert code == 2
    line = THEIRS.splitlines().index("warmup_steps = 100") + 1
    assert f'line {line}  lr_scheduler.warmup_steps = "200"\n' in said
    assert "want: a whole number\n" in said


def test_a_file_without_a_key_of_torchtitan_is_refused(convert) -> None:
    for text in (Path(REPOSITORY, "configs/debug.toml").read_text(), "[model]\nnosuch = 1\n", ""):
        code, made, said = convert(text)
        assert (code, made) == (2, "")
        assert "want: a key or a value that only torchtitan has, as model.hf_assets_path; none is: " in said


MIXTURE = """
[model]
name = "qwen3"
flavor = "debugmodel_moe"
converters = ["quantize.linear.float8"{more}]
[quantize.linear.float8]
recipe_name = "rowwise"
{filters}
[quantize.grouped_mm.float8]
fqns = ["experts"]
"""


@pytest.mark.parametrize(
    ("more", "filters", "written"),
    [
        ("", "", ["experts.w13", "experts.w2"]),
        ("", 'filter_fqns = ["output", "router.gate"]', ["output", "experts.w13", "experts.w2"]),
        (', "quantize.grouped_mm.float8"', 'filter_fqns = ["output", "router.gate"]', ["output"]),
    ],
)
def test_experts_are_in_float8_where_they_were(convert, more: str, filters: str, written: list[str]) -> None:
    code, out, said = convert(MIXTURE.format(more=more, filters=filters))
    table = tomli.loads(out)
    assert code == 0
    assert table["float8"] == {"recipe": "rowwise", "filter_fqns": written}
    assert table["model"] == {"name": "qwen3_moe", "flavor": "torchtitan-debug"}
    assert "to change" not in said
    assert ("quantize.grouped_mm.float8.fqns" in said) == bool(more)


@pytest.mark.parametrize(("flavor", "over"), [("30B-A3B", {}), ("235B-A22B", {"rope_theta": 5e6})])
def test_a_published_mixture_says_that_it_is_balanced_otherwise(convert, flavor: str, over: dict[str, float]) -> None:
    """Its dimensions are the same; torchtitan gives the larger one another RoPE, and both a bias."""
    code, out, _ = convert(MIXTURE.format(more="", filters="").replace("debugmodel_moe", flavor))
    assert code == 0
    assert tomli.loads(out)["model"] == {"name": "qwen3_moe", "flavor": flavor, **over}
    assert "with balance_loss = 0.0, balance_bias = 0.001" in out.replace("\n#  ", "")


def test_what_is_refused_together_is_listed_in_the_words_of_validate(convert) -> None:
    """Whatever the checks of a config say: this asks them too."""
    text = MIXTURE.format(more="", filters="")
    code, out, said = convert(f"{text}[parallelism]\ntensor_parallel_degree = 2\nexpert_parallel_degree = 3\n")
    assert code == 0
    config = from_table(Config, tomli.loads(out), Problems(Origin("")))
    assert config is not None
    problems = config_problems(config, load("model", "qwen3_moe-torchtitan-debug"), None).found()
    assert problems
    found = [f"{p.where} = {p.saw}; want {p.want}; fix: {p.fix}" for p in problems]
    listed = [line.removeprefix("  to change: ") for line in said.splitlines() if "to change" in line]
    assert listed == found
