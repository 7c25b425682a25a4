"""Check that a change keeps the bits of training: 20 steps of many setups, of another revision and of this checkout.

    python scripts/same_bits.py REV [--only TEXT] [--jobs N]

Each setup is a run of `train.py` on the CPU and an export of its weights, once in a worktree of REV and once here. Loss
and gradient norm of every step are compared, and the bytes of every weight. A line per setup says whether they are
equal, or where they differ first. Ends with 1 if one differs or fails.
"""

import argparse
import hashlib
import inspect
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import product
from pathlib import Path

from safetensors import safe_open

HERE = Path(__file__).parents[1]
STEPS = 20
LIMIT_S = 900  # of one run, on cores that are busy
SMALL = {
    "training.steps": STEPS,
    "training.seq_len": 64,
    "training.local_batch_size": 1,
    "training.global_batch_size": 4,
    "lr_scheduler.warmup_steps": 2,
    "validation.enable": "false",
    "checkpoint.interval": STEPS,
    "metrics.wandb": "off",
}
TP, EP, CP = (f"parallelism.{axis}_parallel_degree=2" for axis in ("tensor", "expert", "context"))
LAYOUTS = {  # processes, and flags
    "one process": (1, ()),
    "FSDP 2": (2, ()),
    "HSDP 2 × 2": (4, ("parallelism.data_parallel_replicate_degree=2",)),
    "TP 2": (2, (TP,)),
    "TP 2 async": (2, (TP, "parallelism.async_tensor_parallel")),
    "FSDP 2 × TP 2": (4, (TP,)),
    "CP 2": (2, (CP, "training.seq_len=256")),  # whole runs of 128 tokens
    "EP 2": (2, (EP,)),
}
RECIPES = [("none", "bf16", "adamw"), ("full", "rowwise", "muon"), ("balanced", "tensorwise", "adamw")]
OF_EXPERTS = ("one process", "FSDP 2", "TP 2", "CP 2", "EP 2")


def setups() -> Iterator[tuple[str, int, list[str]]]:
    """Yield the name, the number of processes and the flags of each setup."""
    for (layout, (world, flags)), recipe in product(LAYOUTS.items(), RECIPES):
        if layout != "EP 2":
            yield f"dense, {layout}, {', '.join(recipe)}", world, [*flags, *_recipe(*recipe)]
    experts = "model.name=qwen3_moe"
    for layout, recipe in product(OF_EXPERTS, RECIPES[:2]):
        world, flags = LAYOUTS[layout]
        yield f"experts, {layout}, {', '.join(recipe)}", world, [experts, *flags, *_recipe(*recipe)]
    yield "dense, FSDP 2, float32", 2, []
    yield "dense, FSDP 2, accumulation", 2, ["training.global_batch_size=8"]
    for name in ("normuon", "dion2"):
        yield f"dense, FSDP 2, {name}", 2, [f"optimizer.recipe={name}"]
    for name in ("gemma3", "gpt2", "qwen3"):
        yield f"{name}, FSDP 2", 2, [f"model.name={name}"]
        yield f"{name}, TP 2, full, bf16", 2, [f"model.name={name}", TP, *_recipe("full", "bf16", "adamw")]


def _recipe(save_list: str, arithmetic: str, optimizer: str) -> list[str]:
    float8 = "none" if arithmetic == "bf16" else arithmetic
    flags = [f"activation_checkpoint.recipe={save_list}", f"float8.recipe={float8}", f"optimizer.recipe={optimizer}"]
    return [*flags, "training.mixed_precision_param=bfloat16"]


def write_documents(folder: Path) -> None:
    """Write 200 documents of unequal lengths."""
    text, chance = inspect.getsource(argparse), random.Random(0)
    for i in range(200):
        at = chance.randrange(len(text) - 2000)
        (folder / f"{i}.txt").write_text(text[at : at + chance.randrange(20, 600)])


def trained(tree: Path, folder: Path, world: int, flags: list[str], source: Path) -> dict[str, object]:
    """Train and export in a checkout.

    Returns:
        Each number that is compared, by what it is, in the order of training.

    Raises:
        RuntimeError: one of both fails; it has the end of what was printed.
    """
    small = [f"--{key}={value}" for key, value in SMALL.items()]
    own = [f"--data.source={source}/*.txt", f"--data.cache_dir={folder}/cache", f"--job.dump_folder={folder}"]
    words = ["train.py", "--config=configs/debug.toml", "--job.name=run", *small, *own, *(f"--{f}" for f in flags)]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    for command in (
        [*launch, *words],
        [sys.executable, "-m", "titanlite", "export", f"{folder}/run", "--dtype=float32"],
    ):
        env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            command, cwd=tree, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S
        )
        if done.returncode:
            raise RuntimeError("\n".join(done.stdout.splitlines()[-20:]))
    found: dict[str, object] = {}
    for line in (folder / "run" / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        found |= {f"{key} of step {row['step']}": row[key] for key in ("loss", "grad_norm") if key in row}
    for file in sorted((folder / "run").glob("hugging_face/*/*.safetensors")):
        with safe_open(file, "np") as tensors:
            found |= {name: hashlib.sha256(tensors.get_tensor(name).tobytes()).hexdigest() for name in tensors.keys()}  # noqa: SIM118
    return found


def verdict(runs: "list[Future[dict[str, object]]]") -> tuple[bool, str]:
    """Return whether two runs are equal, and in words what differs first."""
    try:
        before, now = (run.result() for run in runs)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return False, f"failed\n{error}"
    n_steps, n_weights = (sum((" of step " in key) == is_row for key in before) for is_row in (True, False))
    if before.keys() != now.keys() or n_steps != 2 * STEPS or not n_weights:
        return False, f"not in both, or not {2 * STEPS} numbers of steps: {before.keys() ^ now.keys() or n_steps}"
    if differ := [key for key in before if before[key] != now[key]]:
        return False, f"{len(differ)} of {len(before)} differ, first {differ[0]}: {before[differ[0]]} {now[differ[0]]}"
    return True, f"equal: {n_steps} losses and norms, {n_weights} weights"


def main() -> int:
    """Print a line per setup, and return 0 if all are equal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rev", help="revision of git to compare with")
    parser.add_argument("--only", default="", help="setups whose name has this text")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; default: %(default)s")
    given = parser.parse_args()
    chosen, all_equal = [setup for setup in setups() if given.only in setup[0]], True
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(given.jobs) as pool:
        scratch, old = Path(name), Path(name) / "tree"
        git = ["git", "-C", str(HERE), "worktree"]
        subprocess.run([*git, "add", "--detach", str(old), given.rev], check=True, capture_output=True)
        try:
            (scratch / "documents").mkdir()
            write_documents(scratch / "documents")

            def start(tree: Path, at: int) -> dict[str, object]:
                folder = scratch / f"{tree.name}-{at}"
                folder.mkdir()
                return trained(tree, folder, *chosen[at][1:], scratch / "documents")

            pairs = [[pool.submit(start, tree, at) for tree in (old, HERE)] for at in range(len(chosen))]
            for (setup, *_), pair in zip(chosen, pairs, strict=True):
                is_equal, text = verdict(pair)
                sys.stdout.write(f"{setup}: {text}\n")
                sys.stdout.flush()
                all_equal &= is_equal
        finally:
            subprocess.run([*git, "remove", "--force", str(old)], check=True)
    sys.stdout.write(f"{len(chosen)} setups, {'all equal' if all_equal else 'NOT all equal'}\n")
    return int(not all_equal)


if __name__ == "__main__":
    sys.exit(main())
