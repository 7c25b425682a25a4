"""What is proposed fits: each flag is pasted behind the command and priced anew."""

import re

import pytest

from tests.support.measured import MEASURED_CONFIGS
from titanlite import recipes
from titanlite.config.stages import sequences_per_step
from titanlite.config.toml_file import shipped_folder
from titanlite.errors import ConfigError
from titanlite.forecast.device_specs import measured_rates
from titanlite.forecast.memory import GIB, MARGIN, MemoryModel, usable
from titanlite.forecast.search import LEAST, changes_that_fit, check_budget, processes_that_fit
from titanlite.preflight.checked_run import CheckedRun, checked_run
from titanlite.training.assemble import try_assembly

FULL = ("--activation_checkpoint.recipe", "full")
CONFIG = str(MEASURED_CONFIGS / "llama3_8b.toml")


def checked(*flags: str, world: int = 4) -> CheckedRun:
    return checked_run(["--config", CONFIG, *flags], world_size=world)


def model_of(run: CheckedRun, world: int = 4) -> MemoryModel:
    return MemoryModel(run.config, run.dims, run.float8, run.optimizer, world)


def peak(run: CheckedRun, world: int = 4) -> int:
    return model_of(run, world).peak_under(run.save_list or LEAST).total


def held(run: CheckedRun, world: int = 4) -> int:
    """On a device."""
    model = model_of(run, world)
    return model.needed_under(run.save_list or LEAST) + model.symmetric_memory


@pytest.mark.parametrize("limit_gib", [100, 70, 60, 50])
@pytest.mark.parametrize("flags", [(), ("--parallelism.tensor_parallel_degree", "2")], ids=str)
def test_each_override_does_what_it_says(limit_gib: int, flags: tuple[str, ...]) -> None:
    run = checked("--activation_checkpoint.recipe", "none", *flags)
    assert run.save_list is not None
    now = held(run)
    found = changes_that_fit(model_of(run), run.save_list, limit_gib * GIB)
    assert len(found) == 3 or limit_gib < 70
    assert found
    for override in found:
        changed = checked("--activation_checkpoint.recipe", "none", *flags, *override.flag.split())
        chosen_for = changed.config.activation_checkpoint.budget_gib
        assert override.peak == (int(chosen_for * GIB) if chosen_for else peak(changed))
        pushed = model_of(changed).symmetric_memory
        assert override.peak + pushed <= limit_gib * GIB
        assert override.frees == now - override.peak - pushed
        same = sequences_per_step(changed.config, 4) == sequences_per_step(run.config, 4)
        assert same or "local_batch_size" in override.flag


def test_one_of_each_kind_and_of_the_lists_the_one_that_auto_chooses() -> None:
    run = checked("--activation_checkpoint.recipe", "none")
    assert run.save_list is not None
    found = changes_that_fit(model_of(run), run.save_list, 100 * GIB)
    assert [override.flag for override in found] == [
        "--activation_checkpoint.recipe auto --activation_checkpoint.budget_gib 96.6",
        "--parallelism.tensor_parallel_degree 2 --training.global_batch_size 8",
        "--training.local_batch_size 1",
    ]


def test_what_frees_nothing_is_not_proposed_and_kinds_stay_together() -> None:
    run = checked("--activation_checkpoint.recipe", "none", "--training.local_batch_size", "1", world=1)
    assert run.save_list is not None
    limit = held(run, world=1)  # the list that the run has would fit, and frees nothing
    found = changes_that_fit(model_of(run, 1), run.save_list, limit)
    assert all(override.frees > 0 for override in found)
    keys = [override.flag.split()[0] for override in found]
    assert keys == ["--activation_checkpoint.recipe"] * 2 + ["--parallelism.fsdp_reshard_after_forward"]


def test_a_batch_that_the_global_batch_cannot_be_made_of_is_not_proposed() -> None:
    """Three sequences a step over three ranks: one at a time on each."""
    run = checked("--training.local_batch_size", "3", "--training.global_batch_size", "12")
    assert run.save_list is not None
    found = changes_that_fit(model_of(run), run.save_list, 80 * GIB)
    assert "--training.local_batch_size 2" not in {override.flag for override in found}


def test_replicas_are_given_up() -> None:
    run = checked("--activation_checkpoint.recipe", "full", "--parallelism.data_parallel_replicate_degree", "2")
    found = changes_that_fit(model_of(run), LEAST, 45 * GIB)
    assert found[0].flag == "--parallelism.data_parallel_replicate_degree 1"


def test_nccl_is_proposed_where_symmetric_memory_is_too_much() -> None:
    run = checked("--activation_checkpoint.recipe", "none")
    assert run.save_list is not None
    found = changes_that_fit(model_of(run), run.save_list, 104 * GIB)
    assert found[1].flag == "--parallelism.fsdp_copy_engines never"
    assert peak(run) < 104 * GIB < held(run)


def test_replicas_that_would_share_parameters_are_charged_for_symmetric_memory() -> None:
    """Four replicas have none; two on each of two shards do."""
    run = checked("--activation_checkpoint.recipe", "balanced", "--parallelism.data_parallel_replicate_degree", "4")
    two = checked("--activation_checkpoint.recipe", "balanced", "--parallelism.data_parallel_replicate_degree", "2")
    assert run.save_list is not None
    assert (held(run) > peak(run), held(two) > peak(two)) == (False, True)
    for limit, fits in ((held(two), True), (held(two) - 1, False)):
        flags = [override.flag for override in changes_that_fit(model_of(run), run.save_list, limit)]
        assert ("--parallelism.data_parallel_replicate_degree 2" in flags) == fits


def test_nothing_is_proposed_where_nothing_fits() -> None:
    run = checked("--activation_checkpoint.recipe", "full")
    assert changes_that_fit(model_of(run), LEAST, 20 * GIB) == []


AUTO = ("--activation_checkpoint.recipe", "auto", "--activation_checkpoint.budget_gib")


def test_a_chosen_list_is_given_less() -> None:
    run, list_of_now = checked(*AUTO, "90"), recipes.load("activation_checkpoint", "matmuls")
    found = changes_that_fit(model_of(run), list_of_now, 75.25 * GIB)
    assert found[0].flag == "--activation_checkpoint.budget_gib 71.9"
    assert all("recipe" not in override.flag for override in found)


def test_a_budget_that_no_list_keeps_to_is_an_error_before_anything_is_built() -> None:
    with pytest.raises(ConfigError, match="1 problem") as error:
        try_assembly(checked(*AUTO, "34.6"), 4)
    said = str(error.value)
    least = peak(checked("--activation_checkpoint.recipe", "full")) / GIB
    assert "activation_checkpoint.budget_gib = 34.6\n" in said
    assert f"want: at least 35.3: {least:.1f} are predicted" in said
    assert "fix:  one of these\n            --activation_checkpoint.budget_gib 35.3\n" in said
    flags = [line.split("  frees")[0].split() for line in said.splitlines() if "frees" in line]
    assert len(flags) == 1
    for flag in [["--activation_checkpoint.budget_gib", "35.3"], *flags]:
        try_assembly(checked(*AUTO, "34.6", *flag), 4)
    with pytest.raises(ConfigError, match="more ranks: no other layout or batch fits 5 GiB"):
        try_assembly(checked(*AUTO, "5"), 4)


def test_a_small_budget_is_named_exactly() -> None:
    """It is the smallest of three digits that is accepted, and more than what is predicted."""
    tiny = ["--config", str(shipped_folder("configs") / "debug.toml"), *AUTO]
    with pytest.raises(ConfigError, match=r"want: at least 0\.\d\d\d: ") as error:
        try_assembly(checked_run([*tiny, "0.1"], world_size=1), 1)
    found = re.search(r"at least (\S+): (\S+) are predicted", str(error.value))
    assert found is not None
    enough, needed = map(float, found.groups())
    assert needed == pytest.approx(enough * (1 - MARGIN), abs=0.001)
    try_assembly(checked_run([*tiny, str(enough)], world_size=1), 1)
    with pytest.raises(ConfigError):
        try_assembly(checked_run([*tiny, str(enough - 0.001)], world_size=1), 1)


def test_a_budget_holds_for_a_list_by_name_too() -> None:
    """It is refused where it needs more, and what is proposed keeps to the budget of the file."""
    within = ("--activation_checkpoint.budget_gib", "90", "--activation_checkpoint.recipe")
    for fitting in ("auto", "full", "attention"):
        try_assembly(checked(*within, fitting), 4)
    asked = checked(*within, "none")
    with pytest.raises(ConfigError, match=r"want: at least 1\d\d.\d: .* are predicted with none, and") as error:
        try_assembly(asked, 4)
    proposed = [line.split("  frees")[0].split() for line in str(error.value).splitlines() if line.startswith(" " * 12)]
    raised, auto, *_ = proposed
    assert raised[0] == "--activation_checkpoint.budget_gib"
    assert auto == ["--activation_checkpoint.recipe", "auto"]
    for flag in proposed:
        try_assembly(checked(*within, "none", *flag), 4)
    with pytest.raises(ConfigError, match=r"fix:  one of these\n *--activation_checkpoint.recipe auto  "):
        check_budget(model_of(asked), asked.save_list, asked.origin, measured_rates("h100"))


def test_a_budget_of_an_unknown_number_of_processes_is_not_judged() -> None:
    assert checked_run(["--config", CONFIG, *AUTO, "1"]).save_list is None


def test_a_list_that_is_broken_is_not_proposed(tmp_path) -> None:
    (tmp_path / "activation_checkpoint").mkdir()
    rule = '[[rules]]\nop = "matmull"\naction = "save"\n'
    broken = tmp_path / "activation_checkpoint" / "broken.toml"
    broken.write_text(f'help = ""\ndefault = "recompute"\n{rule}')
    one = ("--training.local_batch_size", "1", "--training.global_batch_size", "4")
    run = checked("--activation_checkpoint.recipe", "none", "--job.recipe_dirs", str(tmp_path), *one)
    assert "broken" in recipes.names("activation_checkpoint", run.config.job.recipe_dirs)
    assert run.save_list is not None
    # A layout and a batch would stand between auto and the list that keeps most, but for one sequence on each rank.
    found = changes_that_fit(model_of(run), run.save_list, 60 * GIB)
    assert found[1].flag == "--activation_checkpoint.recipe matmuls"


def test_an_explicit_number_of_shards_is_given_up_for_another_layout() -> None:
    full = "--activation_checkpoint.recipe", "full", "--parallelism.data_parallel_shard_degree"
    flags: list[list[str]] = []
    for degree in ("-1", "8"):
        run = checked(*full, degree, world=8)
        assert run.save_list is not None
        asked = model_of(run, 8), run.save_list, 21 * GIB
        found = [override.flag for override in changes_that_fit(*asked)]
        more = processes_that_fit(*asked)
        assert more is not None
        for flag in found:
            assert held(checked(*full, degree, *flag.split(), world=8), 8) <= 21 * GIB
        flags.append([*found, more])
    free, fixed = flags
    assert len(free) > 1
    assert fixed == [f"{flag} --parallelism.data_parallel_shard_degree -1" for flag in free]


MOE = ("--model.name", "qwen3_moe", "--model.flavor", "30B-A3B", "--training.seq_len", "4096")


@pytest.mark.slow
def test_another_expert_degree_is_proposed_and_the_cheapest_change_comes_first() -> None:
    """Four ranks hold half as many experts each as two, which leaves memory for a faster list than `auto` finds."""
    keeping = *MOE, "--activation_checkpoint.recipe", "matmuls"
    run = checked(*keeping, "--parallelism.expert_parallel_degree", "2", world=8)
    assert run.save_list is not None
    memory, limit = model_of(run, 8), 74 * GIB
    assert held(run, 8) > limit
    found = changes_that_fit(memory, run.save_list, limit, rates=measured_rates("h100"))
    assert found[0].flag == "--parallelism.expert_parallel_degree 4"
    speeds = [override.tokens_per_second for override in found if "batch" not in override.flag]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[-1] > 0
    assert len(speeds) >= 2
    fewer = checked(*keeping, *found[0].flag.split(), world=8)
    assert held(fewer, 8) <= limit


def test_of_the_layouts_that_fit_the_fastest_is_proposed_though_another_keeps_more() -> None:
    shipped = ["--config", str(MEASURED_CONFIGS / "qwen3_moe_30b_a3b.toml")]
    run = checked_run([*shipped, "--parallelism.expert_parallel_degree", "8"], world_size=8)
    assert run.save_list is not None
    memory, limit = model_of(run, 8), usable(79.1)
    kept, fastest = (
        [each.flag for each in changes_that_fit(memory, run.save_list, limit, rates=rates)]
        for rates in (None, measured_rates("h100"))
    )
    assert "--parallelism.expert_parallel_degree 1" not in kept
    assert fastest[0] == "--parallelism.expert_parallel_degree 1"


def test_where_nothing_fits_more_processes_that_keep_less_do() -> None:
    """Qwen3 235B-A22B: activations of the run's own list are more than a GPU, however many share the weights."""
    run = checked("--model.name", "qwen3_moe", "--model.flavor", "235B-A22B", world=64)
    assert run.save_list is not None
    asked = model_of(run, 64), run.save_list, 77 * GIB
    assert processes_that_fit(*asked) is None
    more = processes_that_fit(*asked, and_changes=True)
    assert more == "--world 128 --activation_checkpoint.recipe full"
    assert peak(checked("--model.name", "qwen3_moe", "--model.flavor", "235B-A22B", *FULL, world=128), 128) <= 77 * GIB
