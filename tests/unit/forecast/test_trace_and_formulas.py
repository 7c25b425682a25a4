"""The trace against the formulas that it replaces: the same operations, the same bytes, the same work done again."""

from itertools import product

import pytest

from titanlite import recipes
from titanlite.activation_checkpoint.operations import CLASSES
from titanlite.config.toml_file import shipped_folder
from titanlite.forecast import activation_cost, block_price
from titanlite.forecast.activation_bytes import layout_of
from titanlite.forecast.traced_run import traced_run
from titanlite.preflight.checked_run import checked_run

LISTS = [recipes.load("activation_checkpoint", name) for name in recipes.names("activation_checkpoint")]
MODELS = {"llama3": ("llama3", "8B"), "qwen3": ("qwen3", "0.6B"), "gemma3": ("gemma3", "1B"), "gpt2": ("gpt2", "124M")}


def kind(op: str) -> str:
    return "attention" if op in CLASSES["attention"] else op


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("float8", ["none", "rowwise", "blockwise"])
@pytest.mark.parametrize(("ranks", "fused"), [(1, False), (2, False), (2, True)])
def test_they_are_equal(model: str, float8: str, ranks: int, fused: bool) -> None:
    """Bytes of every list to 0.1 %; the most by which one is off is 0.07 %."""
    name, flavor = MODELS[model]
    for compiled in (True, False):
        flags = ["--model.name", name, "--model.flavor", flavor, "--float8.recipe", float8, "--job.strict=false"]
        flags += ["--parallelism.tensor_parallel_degree", str(ranks), f"--compile.enable={compiled}".lower()]
        flags += [f"--parallelism.async_tensor_parallel={fused}".lower(), "--training.seq_len", "1024"]
        flags += [
            "--model.vocab_size",
            "51200",
            *(["--model.n_kv_heads", "2", "--model.n_heads", "4"] * (model == "gemma3")),
        ]
        run = checked_run(["--config", str(shipped_folder("configs") / "llama3_8b.toml"), *flags])
        layout = layout_of(run.config, run.dims, run.float8)
        traced = traced_run(run.config, run.dims, run.float8)
        n_layers = run.dims.n_layers
        for save_list, n in product(LISTS, {0, n_layers - 1}):
            block, window, active = traced.blocks[n], run.dims.windows[n], save_list.active(n_layers)[n]
            if save_list.default == "save":
                new = activation_cost.held_without_checkpointing(block, compiled)
                old = block_price.held_without_checkpointing(layout)
            else:
                by_trace = activation_cost.costs(block, save_list, active, compiled)
                by_formula = block_price.price(layout, save_list, active, window)
                assert [kind(c.activation.op) for c in by_trace] == [kind(p.activation.op) for p in by_formula]
                assert [c.activation.layer for c in by_trace] == [p.activation.layer for p in by_formula]
                assert [c.activation.flops for c in by_trace] == [p.activation.flops for p in by_formula]
                assert [c.recomputed for c in by_trace] == [p.again for p in by_formula]
                new = block.input_bytes + sum(c.held for c in by_trace)
                old = layout.block_input + sum(p.held for p in by_formula)
            assert new == pytest.approx(old, rel=0.001), (save_list.help, n)
