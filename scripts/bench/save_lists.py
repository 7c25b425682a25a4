"""Save-lists against each other, and auto at several budgets: python scripts/bench/save_lists.py --gpus 4

Each is one run of Llama-3 8B under FSDP, sequence 8,192, local batch 2, compiled. The table has speed, the peak that
was predicted (`titanlite/forecast/memory.py`) and the one that was measured. A run takes about 45 s: where time is
short, name fewer lists or budgets. Steps are few, so speed is for comparison within the table.
"""

import argparse
import json
import tempfile
from pathlib import Path

from throughput import ROOT, SETTLE, run  # beside this file

FLAGS = "--config benchmarks/configs/llama3_8b.toml --job.strict=false"
BUDGETS_GIB = (55.0, 70.0, 90.0, 130.0)


def main() -> None:
    names = sorted(path.stem for path in (ROOT / "recipes" / "activation_checkpoint").glob("*.toml"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--alone", action="store_true", help="one rank of so many GPUs, on one: one_rank.py")
    parser.add_argument("--lists", nargs="*", default=names, metavar="LIST", help=f"of: {', '.join(names)}")
    parser.add_argument("--budgets", nargs="*", default=BUDGETS_GIB, type=float, metavar="GIB", help="of auto")
    parser.add_argument("--steps", type=int, default=SETTLE + 4)
    parser.add_argument("--flags", default="", help="more flags of train.py, for all runs")
    parser.add_argument("--timeout-s", type=float, default=150)
    parser.add_argument("--logs", type=Path, default=Path(tempfile.mkdtemp()))
    args = parser.parse_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    asked = {name: f"--activation_checkpoint.recipe {name}" for name in args.lists}
    for gib in args.budgets:
        asked[f"auto-{gib:g}"] = f"--activation_checkpoint.recipe auto --activation_checkpoint.budget_gib {gib}"
    columns = ("tok/s/GPU", "predicted GiB", "reserved GiB", "off", "allocated GiB", "budget", "keeps")
    print(f"| list, {args.gpus} GPUs | {' | '.join(columns)} |\n{'|---' * (1 + len(columns))}|", flush=True)
    for name, flags in asked.items():
        row = run(name, f"{FLAGS} {args.flags} {flags}", args)
        line = _line(name, row, args.logs / "runs" / name / "receipt.json") if row else f"{name}: failed"
        print(line, flush=True)  # at once: the command may be ended before the last list


def _line(name: str, row: dict[str, float], receipt: Path) -> str:
    """Return one row of the table."""
    entries = {entry["feature"]: entry for entry in json.loads(receipt.read_text())}
    memory, reserved = entries["memory"], row["memory_gib"]
    predicted, budget = memory["applied"]["predicted_gib"], memory["requested"]
    within = "" if budget is None else "over" if reserved > budget else "within"
    keeps = entries["activation_checkpoint"]["applied"].get("keeps", "")
    return (
        f"| {name} | {row['tokens_per_second_per_gpu']:,.0f} | {predicted:.1f} | {reserved:.1f} "
        f"| {predicted / reserved - 1:+.1%} | {row['memory_allocated_gib']:.1f} | {within} | {keeps} |"
    )


if __name__ == "__main__":
    main()
