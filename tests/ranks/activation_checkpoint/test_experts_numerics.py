"""A mixture of experts trains bit for bit alike under every save-list: recomputation goes the way that forward went.

Compiled blocks are compared without the compiler's code generation, as in test_save_list_numerics.py.
"""

import pytest
import torch

from tests.support.needs import slow
from tests.support.short_run import Trained, train
from titanlite import recipes
from titanlite.training.build import Run

LISTS = [name for name in recipes.names("activation_checkpoint") if name != "none"]
LAYOUTS = {"one process": 1, "FSDP 2": 2, "EP 2": 2}
STEPS = 2


@pytest.fixture(scope="module")
def without_checkpointing(tmp_path_factory: pytest.TempPathFactory):
    known: dict[tuple[str, bool], tuple[Trained, str]] = {}

    def run(layout: str, compiled: bool) -> tuple[Trained, str]:
        if (layout, compiled) not in known:
            known[layout, compiled] = trained(layout, compiled, "none", tmp_path_factory.mktemp("none"))
        return known[layout, compiled]

    return run


def trained(layout: str, compiled: bool, save_list: str, folder) -> tuple[Trained, str]:
    """What a run did, and the tokens that it counted for each expert by then."""
    torch._dynamo.reset()

    def write_counts(run: Run) -> None:
        norm = run.optimizer.norm

        def counts_then_norm(grads: dict[str, torch.Tensor], _: None) -> torch.Tensor:
            counted = [block.experts.counts.tolist() for block in run.model.layers]
            (folder / f"counts_{run.mesh.dp_rank}").write_text(str(counted))
            return norm(grads)

        run.optimizer.norm = counts_then_norm

    flags = ["--model.name", "qwen3_moe", "--activation_checkpoint.recipe", save_list]
    flags += ["--compile.enable"] if compiled else []
    flags += ["--parallelism.expert_parallel_degree=2"] if layout == "EP 2" else []
    got = train(folder, LAYOUTS[layout], flags, steps=STEPS, change=write_counts, timeout_s=200)
    counted = [(folder / f"counts_{rank}").read_text() for rank in range(LAYOUTS[layout])]
    return got, "\n".join(counted)


@pytest.mark.usefixtures("without_machine_code")
@pytest.mark.parametrize(
    ("layout", "compiled", "save_list"),
    [
        ("FSDP 2", False, "full"),
        *slow(
            *(
                (layout, compiled, name)
                for layout in LAYOUTS
                for compiled in (False, True)
                for name in LISTS
                if (layout, compiled, name) != ("FSDP 2", False, "full")
            )
        ),
    ],
)
def test_a_save_list_changes_no_bit_of_a_mixture(layout, compiled, save_list, tmp_path, without_checkpointing):
    """Nor does it count a token twice."""
    got, counted = trained(layout, compiled, save_list, tmp_path)
    truth, once = without_checkpointing(layout, compiled)
    assert counted == once
    assert torch.equal(got.losses, truth.losses)
    assert torch.equal(got.norms, truth.norms)
    for name, gradient in truth.gradients.items():
        assert torch.equal(got.gradients[name], gradient), name
