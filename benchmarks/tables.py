"""Write the tables of docs/performance.md from the rows of benchmarks/results: python benchmarks/tables.py

A row of `results/*.jsonl` is one measurement: what was run, on which GPU, of which commit, when, the numbers with their
units in the names, and the floor or peer that they are held against. Speed is of each GPU; a list is a range. A run's
command takes `--config`, from this folder, and `flags` from its row; `held` names the tests that hold a prediction
against it, and `table` the table that shows it. In the page, a table stands between two comments.
"""

import json
import re
import statistics
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
NAMES = {"qwen3": "Qwen3", "qwen3_moe": "Qwen3", "gemma3": "Gemma 3", "gpt2": "GPT-2"}
Row = dict[str, Any]


def rows(name: str, **equal: object) -> list[Row]:
    """Return the rows of `results/<name>.jsonl` that have these values."""
    found = map(json.loads, (RESULTS / f"{name}.jsonl").read_text().splitlines())
    return [row for row in found if all(row.get(key) == value for key, value in equal.items())]


def table(head: str, lines: list[list[object]]) -> str:
    """Return a Markdown table; None is an empty cell."""
    text = [
        ["" if cell is None else f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in line] for line in lines
    ]
    columns = [cell.strip() for cell in head.split("|")]
    return "\n".join(f"| {' | '.join(line)} |" for line in [columns, ["---"] * len(columns), *text])


def flags(row: Row) -> dict[str, str]:
    """Return a run's flags by their last name; those without a value have "true"."""
    found: dict[str, str] = {}
    for flag in row["flags"].split("--")[1:]:
        key, _, value = flag.strip().partition(" ")
        found[key.replace("activation_checkpoint.recipe", "save_list").rpartition(".")[2]] = value or "true"
    return found


def layout(row: Row) -> str:
    """Return the layout of a run, as `FSDP 2 × TP 2, async`."""
    given = flags(row)
    tensor, replicas = (int(given.get(f"{of}_degree", 1)) for of in ("tensor_parallel", "data_parallel_replicate"))
    axes = {"replicas": replicas, "FSDP": row["world"] // tensor // replicas, "TP": tensor}
    text = " × ".join(f"{name} {ranks}" for name, ranks in axes.items() if ranks > 1) or "1 GPU"
    text += ", async" if "async_tensor_parallel" in given else ""
    batch, length = given.get("local_batch_size", "2"), given.get("seq_len", "8192")
    return text if (batch, length) == ("2", "8192") else f"{text}, {batch} × {length} tokens"


def model(row: Row) -> str:
    """Return the model of a run, as `Qwen3 0.6B` or `8B, 12 layers`."""
    given = flags(row)
    if "dim" in given:
        return f"Llama of {given['n_layers']} layers, {given['dim']} wide"
    size = re.sub(r".*_(\w+)\.toml", r"\1", row["config"]).upper()
    size = f"{NAMES[given['name']]} {given['flavor']}" if "name" in given else size
    return size + (f", {given['n_layers']} layers" if "n_layers" in given else "")


def save_list(row: Row) -> str:
    """Return the save-list of a run, with the budget of `auto`, and whether the run was compiled."""
    given = flags(row)
    budget = f", {given['budget_gib']} GiB" if "budget_gib" in given else ""
    return f"`{given['save_list']}`{budget}{', not compiled' if given.get('enable') == 'false' else ''}"


def float8(row: Row) -> str:
    """Return the float8 recipe of a run, or bf16."""
    recipe = flags(row).get("recipe")
    return f"`{recipe}`" if recipe else "bf16"


def figures() -> str:
    """Return the runs that torchtitan was run beside."""
    shown = [row for row in rows("runs", table="layouts") if "peer_tokens_per_second" in row]
    speed = "tokens_per_second", "mfu_percent", "reserved_gib", "peer_tokens_per_second"
    lines = [[layout(row), float8(row), save_list(row), *map(row.get, speed)] for row in shown]
    return table("layout | arithmetic | save-list | tok/s/GPU | MFU % | reserved GiB | torchtitan, 8 GPUs", lines)


def beside_torchtitan() -> str:
    """Return the runs in turn with torchtitan, on the same GPUs in one call."""
    lines = []
    for row in rows("runs"):
        if "beside" in row:
            ours, theirs = row["tokens_per_second"], row["peer_tokens_per_second"]
            memory = row["reserved_gib"], row["peer_reserved_gib"]
            lines.append([row["beside"], model(row), float8(row), f"{ours / theirs:.2f}", ours, theirs, *memory])
    columns = "times torchtitan's speed | tok/s/GPU | torchtitan, tok/s/GPU | GiB | torchtitan, GiB"
    return table(
        f"steps of | model, on two H200 | arithmetic | {columns}", sorted(lines, key=lambda line: float(line[3]))
    )


def layouts() -> str:
    """Return the newest run of each layout, recipe and save-list."""
    speed = "tokens_per_second", "mfu_percent", "reserved_gib", "gpu", "commit"
    lines = [
        [model(row), layout(row), float8(row), save_list(row), *map(row.get, speed)]
        for row in rows("runs", table="layouts")
    ]
    return table("model | layout | arithmetic | save-list | tok/s/GPU | MFU % | reserved GiB | GPU | commit", lines)


def save_lists() -> str:
    """Return every save-list, and `auto`, of one rank of FSDP 8 by memory."""
    shown = sorted(rows("runs", alone=True, commit="ba6760f", world=8), key=lambda row: row["reserved_gib"])
    lines = [[save_list(row), row["reserved_gib"], row["tokens_per_second"]] for row in shown]
    return table("save-list | reserved GiB | tok/s/GPU if communication took no time", lines)


def steps() -> str:
    """Return the milliseconds of a step by class of work."""
    classes = {
        "matmul": "matmul_ms",
        "collective matmuls: gather": "collective_matmul_gather_ms",
        "collective matmuls: push": "collective_matmul_push_ms",
        "attention": "attention_ms",
        "communication that nothing hides": "exposed_communication_ms",
        "norms, RoPE, SwiGLU, loss, casts": "elementwise_and_casts_ms",
        "AdamW, clipping": "optimizer_ms",
        "copies": "copies_ms",
        "idle": "idle_ms",
        "step": "step_ms",
    }
    shown = rows("profiles", command="train.py --profiling.enable")
    head = [f"{row['layout']} {row.get('float8', 'bf16')}" for row in shown]
    lines = [[name, *(row.get(key) for row in shown)] for name, key in classes.items()]
    return table(" | ".join(["ms of rank 0", *head]), lines)


def optimizers() -> str:
    """Return the runs of 12 layers of 8B by optimizer, beside what is predicted of them."""
    lines = []
    for row in rows("runs", table="optimizers"):
        given = flags(row)
        sequences = int(given.get("global_batch_size", 4)) // row["world"]
        columns = "ms_per_step", "predicted_ms_per_step", "tokens_per_second", "reserved_gib", "predicted_reserved_gib"
        lines.append([f"`{given['recipe']}`", 8192 * sequences, row["repeats"], *map(row.get, columns), row["commit"]])
    head = "optimizer | tokens a step and GPU | runs | ms | predicted | tok/s/GPU | reserved GiB | predicted"
    return table(f"{head} | commit", lines)


def muon() -> str:
    """Return Muon's step by itself, beside its floor and torch's."""
    columns = "ms", "floor_ms", "computing_floor_ms", "ratio", "torch_ms", "commit"
    lines = [[row["model"], *map(row.get, columns)] for row in rows("kernels", kernel="Muon")]
    return table("Muon's step of | ms | floor | of it computing | ratio | torch.optim.Muon | commit", lines)


def fewer_tokens() -> str:
    """Return the losses of 150M by optimizer and learning rate, and of all seeds of the best one."""
    runs = [row for row in rows("loss", config="configs/llama3_150m.toml") if "recipe" in row]
    rates = sorted({row["lr"] for row in runs})
    lines = []
    for recipe in ("adamw", "muon"):
        own = [row for row in runs if row["recipe"] == recipe]
        first = {row["lr"]: f"{row['loss']:.4f}" for row in own if row["seed"] == 0}
        (best,) = {row["lr"] for row in own if row["seed"] == 1}
        seeds = [row["loss"] for row in own if row["lr"] == best]
        mean = f"{statistics.mean(seeds):.4f} ± {statistics.stdev(seeds):.4f}"
        lines.append([f"`{recipe}`", own[0]["steps"], *(first[rate] for rate in rates), mean])
    head = " | ".join(f"lr {rate:g}" for rate in rates)
    return table(f"150M | steps | {head} | best rate, three seeds", lines)


def read_once() -> str:
    """Return held-out losses of 150M on text read once: of a quarter by rate, and of all of it with the best one."""
    runs = rows("loss", config="scripts/bench/once_150m.toml")
    rates, lines = sorted({row["lr"] for row in runs}), list[list[str]]()
    for arm in dict.fromkeys(row["arm"] for row in runs):
        own = [row for row in runs if row["arm"] == arm]
        quarter = {row["lr"]: f"{row['held_out_loss']:.3f}" for row in own if row["epochs"] < 1}
        seeds = [row["held_out_loss"] for row in own if row["epochs"] == 1]
        whole = f"{statistics.mean(seeds):.4f}: {', '.join(f'{loss:.4f}' for loss in seeds)}" if seeds else ""
        lines.append([f"`{arm}`", *(quarter.get(rate, "") for rate in rates), whole])
    return table(f"150M | {' | '.join(f'lr {rate:g}' for rate in rates)} | all tokens, by seed", lines)


def loss() -> str:
    """Return the loss of each recipe after 1,500 steps, beside three seeds of bf16."""
    runs = [row for row in rows("loss", config="configs/llama3_150m.toml") if "noise" in row]
    lines = [[row["run"], row["loss"], f"{row['off']:+.4f}", row["commit"]] for row in runs]
    return table("150M, 1,500 steps | loss | from the mean of bf16 | commit", lines)


def balance() -> str:
    """Return the loss of a mixture in float8 and by ways of balance, beside three seeds of bf16."""
    runs = rows("loss", config="scripts/bench/olmoe_eighth.toml")
    lines = [[r["run"], r["loss"], f"{r['off']:+.4f}", r["fullest"], r["emptiest"], r["commit"]] for r in runs]
    return table("840M, 1,000 steps | loss | from the mean of bf16 | fullest expert | emptiest | commit", lines)


def float8_layers() -> str:
    """Return the time of each linear layer of 8B by recipe."""
    recipes = "blockwise", "rowwise", "rowwise_with_gw_hp", "tensorwise"
    lines = [
        [row["layer"], row["bf16_ms"], *(f"{row['bf16_ms'] / row[f'{name}_ms']:.2f}×" for name in recipes)]
        for row in rows("float8_layers")
        if "N" in row
    ]
    return table(f"layer of 8B | bf16, ms | {' | '.join(recipes)}", lines)


def collective_matmuls() -> str:
    """Return the fused operators of 8B at TP 4 beside their parts."""
    columns = "one_after_the_other_ms", "torch_fused_ms", "titanlite_ms", "floor_ms", "ratio"
    found = [row for row in rows("collective_matmuls", world=4, commit="72c0771") if "ratio" in row]
    lines = [
        [row["operator"], row["dtype"], *map(row.get, columns)] for row in found if row["operator"].startswith("8B")
    ]
    return table("operator | arithmetic | cuBLAS, then NCCL | torch fused | titanlite | floor | ratio", lines)


def kernels() -> str:
    """Return the kernels that move memory, beside the compiler's or torch's and the GPU's copy."""
    lines = []
    for row in rows("kernels"):
        ours = row.get("update_ms") or row.get("ms") or row.get("by_row_ms")
        speed = row.get("update_gbps") or row.get("gbps") or row.get("by_row_gbps")
        other = row.get("compiler_in_a_step_ms") or row.get("compiler_ms") or row.get("torch_update_ms")
        if speed:
            share = f"{speed / row['floor_gbps']:.0%}" if "floor_gbps" in row else None
            where = row.get("model") or (f"width {row['width']}" if "width" in row else None)
            lines.append([row["kernel"], where, ours, other, share, row["gpu"], row["commit"]])
    return table("kernel | of | ms | the compiler's or torch's | of a copy's speed | GPU | commit", lines)


def attention() -> str:
    """Return the runs in which FlashAttention-4 attended, beside the kernel before it."""
    lines = []
    for row in rows("runs"):
        if before := row.get("tokens_per_second_before"):
            given = flags(row)
            layers = f"{given['n_layers']} layers of " if "n_layers" in given else ""
            model = f"{NAMES[given['name']]} {given['flavor']}" if "name" in given else ""
            of = model or row["config"].removeprefix("configs/llama3_").removesuffix(".toml").upper()
            arithmetic = "rowwise" if "rowwise" in row["flags"] else "bf16"
            what = [layers + of, arithmetic, row["world"], row.get("documents")]
            ratio = f"{row['tokens_per_second'] / before:.3f}"
            kept = row["kernel_before"], before, row["tokens_per_second"], ratio, row["repeats"], row["commit"]
            lines.append([*what, *kept])
    return table("model | arithmetic | GPUs | documents | before | tok/s/GPU | now | ratio | runs | commit", lines)


def recommended() -> str:
    """Return the runs of shipped configs beside their forecasts, with layouts beside the one that the search finds."""
    lines = []
    for row in rows("runs", table="recommended"):
        speed, predicted = row["tokens_per_second"], row["predicted_tokens_per_second"]
        ran = [f"`{row['config'].removeprefix('../')}`", 1 if "alone" in row else row["world"], row["what"], speed]
        memory = row["reserved_gib"], row["predicted_gib"]
        lines.append([*ran, predicted, f"{speed / predicted:.2f}", row["mfu_percent"], *memory])
    head = "config | H200 | how | tok/s/GPU | predicted | ratio | MFU % | GiB | predicted"
    return table(head, lines)


def long_sequences() -> str:
    """Return the runs of 4 layers of 8B by documents and context-parallel degree, beside torchtitan's."""
    columns = "repeats", "tokens_per_second", "ms_per_step", "reserved_gib"
    columns += "peer_tokens_per_second", "peer_reserved_gib", "commit"
    lines = [
        [row["documents"], flags(row).get("context_parallel_degree", "1"), *map(row.get, columns)]
        for row in rows("runs", table="long_sequences")
    ]
    return table("documents | degree | runs | tok/s/GPU | ms | GiB | torchtitan, tok/s/GPU | GiB | commit", lines)


def experts() -> str:
    """Return the rates of grouped products, beside cuBLAS's with one weight and torch's grouped ones."""
    columns = "ms", "tflops", "cublas_dense_tflops", "torch_grouped_tflops", "gpu", "commit"
    lines = [[row["model"], row["product"], *map(row.get, columns)] for row in rows("kernels", kernel="grouped_matmul")]
    return table("model | product | ms | TFLOP/s | cuBLAS, one weight | torch, grouped | GPU | commit", lines)


def exchange() -> str:
    """Return the times of tokens that travel to experts and back, beside NCCL's and a copy's."""
    columns = "mib_in", "ms", "nccl_ms", "floor_ms", "gpu", "commit"
    lines = [
        [row["model"], row["operator"], *map(row.get, columns)] for row in rows("kernels", kernel="token_exchange")
    ]
    return table("model | operator | MiB from peers | ms | NCCL | floor | GPU | commit", lines)


TABLES = [
    figures,
    beside_torchtitan,
    layouts,
    save_lists,
    steps,
    loss,
    float8_layers,
    collective_matmuls,
    attention,
    long_sequences,
    recommended,
    exchange,
    experts,
    balance,
    kernels,
    optimizers,
    muon,
    fewer_tokens,
    read_once,
]


def filled(page: str) -> str:
    """Return a page with its tables made anew.

    Raises:
        ValueError: a table has no place in the page.
    """
    for make in TABLES:
        start = f"<!-- table: {make.__name__} -->\n"
        before, found, rest = page.partition(start)
        _, end, after = rest.partition("<!-- end -->")
        if not (found and end):
            raise ValueError(f"{PAGE}: no place for the table {make.__name__}")
        page = f"{before}{start}{make()}\n{end}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
