"""The lines before the first step and after the last one: what they say is so, and their commands do what they say."""

import re
import shlex
from pathlib import Path

from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.launched import Desk, Ended
from tests.support.ranks import run_ranks
from tests.support.short_run import assemble, checked
from titanlite.commands import main
from titanlite.data.order import epochs
from titanlite.models.find import build_model
from titanlite.parallel.mesh import mesh_entry
from titanlite.training.summary import _mesh_in_words


def said(output: str, first: str, last: str) -> dict[str, str]:
    """Rows of the lines from one word to another, by their words."""
    found = re.search(rf"^{first} .*?^{last} .*?$", output, re.MULTILINE | re.DOTALL)
    assert found, output
    return {word: text.strip() for word, _, text in (line.partition(" ") for line in found[0].splitlines())}


def lowest(run: Ended, key: str) -> str:
    return "{:.4f} at step {}".format(*min((row[key], row["step"]) for row in run.rows if key in row))


def test_a_run_says_what_it_is_and_what_comes_next(desk: Desk, tmp_path: Path) -> None:
    flags = ("--validation.enable=true", "--validation.freq=3", "--validation.steps=1", "--training.steps=6")
    split = ("--parallelism.tensor_parallel_degree=2", "--metrics.wandb=offline", "--metrics.tensorboard=true")
    warmup = ("--lr_scheduler.warmup_steps=2",)
    run = desk.run("sum mary", 2, *flags, *split, "--job.stop_after=4", "--checkpoint.resume=never", *warmup)
    folder = shlex.quote(str(run.folder))
    begins, ends = said(run.output, "model", "wandb"), said(run.output, "took", "generate")
    assert "\ndata.source: 1 file taken\n" in run.output
    assert begins["layout"] == "2 × CPU processes: tensor parallel 2"
    n_tokens = (desk.folder / "train.txt").stat().st_size + 1  # of bytes, and a separator
    share = epochs(6 * 4 / ((n_tokens - 1) // 64))
    assert begins["tokens"] == f"1,536 in 6 steps of 256; data.source has {n_tokens:,}: {share}"
    assert begins["folder"] == str(run.folder)
    assert begins["wandb"] == f"offline, in {run.folder}/wandb"
    shown = {"folder": str(run.folder / "tensorboard")}
    assert run.output.count(f"\ntensorboard  in {shown['folder']}\n") == 1
    assert run.receipt["metrics.tensorboard"]["applied"] == shown
    assert all(len(f"{word}{text}") < 100 for word, text in begins.items() if str(run.folder) not in text)
    assert re.fullmatch(r"0:0\d:\d\d to step 4 of 6", ends["took"])
    assert ends["lowest"] == f"train loss {lowest(run, 'loss')}, validation loss {lowest(run, 'validation_loss')}"
    assert ends["compare"] == f"titanlite compare {folder}"

    command, out = shlex.split(ends["export"]), tmp_path / "out"
    assert main([*command[1:], "--out", str(out)]) == 0
    count = sum(weight.numel() for weight in load_file(out / "model.safetensors").values())
    assert main([*shlex.split(ends["generate"])[1:], "--tokens", "1"]) == 0
    assert begins["model"] == f"llama3 debug, {count:,} parameters"

    titanlite, train, config, gpus, world, *rest = shlex.split(ends["resume"])
    assert [titanlite, train, gpus] == ["titanlite", "train", "--gpus"]
    desk.rerun(Path(config), *rest, "--training.steps", "8", world=int(world))
    whole = Ended(run.folder, (run.folder / "logs" / "rank0.log").read_text())
    assert whole.status["state"] == "finished"
    assert [row["step"] for row in whole.steps] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert "wandb: " not in whole.output
    assert len(list((run.folder / "wandb").glob("offline-run-*"))) == 1  # the last start's, which has all rows
    scalars = EventAccumulator(shown["folder"]).Reload().Scalars("train/loss")
    assert [event.step for event in scalars] == [1, 2, 3, 4, 5, 6, 7, 8]
    logged = re.sub(r"^\S+Z ", "", whole.output, flags=re.MULTILINE)
    was, now = whole.steps[3]["lr"], whole.steps[4]["lr"]
    assert logged.count(f"with a schedule of 8 steps the learning rate jumps from {was:.3g} to {now:.3g}\n") == 1
    longer = said(logged[logged.index("to step 8 of 8") - 50 :], "lowest", "export")
    assert longer["lowest"].startswith(f"train loss {lowest(whole, 'loss')}, ")  # of both starts
    assert longer["longer"].startswith(f"titanlite train {shlex.quote(config)} --gpus 2 --training.steps 16")
    assert longer[""].startswith(
        f"with a schedule of 16 steps the learning rate jumps from {whole.steps[7]['lr']:.3g} to "
    )


def test_a_mixture_is_said_with_the_parameters_of_a_token_and_where_its_experts_are(tmp_path: Path) -> None:
    flags = ("--model.name=qwen3_moe", "--parallelism.expert_parallel_degree=2")
    asked = checked(tmp_path, 2, flags)

    def body() -> None:
        run = assemble(asked)
        whole, D, F = build_model(asked.config.model, asked.dims, 8), asked.dims.dim, asked.dims.experts.ffn_dim
        assert run.n_elements == sum(parameter.numel() for parameter in whole.parameters())
        assert run.n_elements - run.n_active == 2 * 6 * 3 * D * F  # of two layers, of each six of eight experts
        assert _mesh_in_words(run.mesh, 2) == "2 × CPU processes: FSDP 2 (experts over 2)"
        entry = mesh_entry(asked.config.parallelism, run.mesh)
        assert entry.requested == [1, -1, 1, 2]
        assert entry.applied["expert_parallel"] == 2  # type: ignore[index]

    run_ranks(body, tmp_path, 2)
