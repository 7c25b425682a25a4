"""Check that tests notice when a protection is taken out: python scripts/mutants.py [--only TEXT] [--jobs N]

The protections are the entries of `mutants.toml`: what is protected, a text of a file, what stands in its place without
the protection, and the nearest tests. These run in a copy of the tracked files, as they are in this checkout. The test
that fails must pass once the text is back. A line per entry names it, or says NOT CAUGHT. Ends with 1 if one is not
caught, or if the table does not fit the code any more: an entry moves with the code that it names.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

HERE = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".toml")
TEST_S, LIMIT_S = 120, 600  # of a test, as one may hang without its protection; and of an entry's tests
KEYS = {"name", "file", "old", "new", "tests"}

Entry = dict[str, Any]


def entries() -> list[Entry]:
    """Read the table."""
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))["mutant"]


def misfits(table: list[Entry]) -> list[str]:
    """Say which entries do not fit the code: keys, names, texts that are not there once, tests that are not."""
    wrong, names = list[str](), [entry.get("name") for entry in table]
    for n, entry in enumerate(table, 1):
        where = f"{TABLE.name}, entry {n} ({entry.get('name')})"
        if entry.keys() != KEYS or names.count(entry["name"]) > 1 or not entry["tests"]:
            wrong.append(f"{where}: want {', '.join(sorted(KEYS))}, a name of its own and a test")
            continue
        file = HERE / entry["file"]
        times = file.read_text(encoding="utf-8").count(entry["old"]) if file.is_file() else 0
        if times != 1:
            wrong.append(f"{where}: {entry['file']} has its `old` {times} times; want once: move it with the code")
        lost = [test for test in entry["tests"] if not is_there(test)]
        wrong += [f"{where}: there is no {test}; name the test that is nearest now" for test in lost]
    return wrong


def is_there(test: str) -> bool:
    """Return whether a file of tests, or a test in one, exists."""
    path, _, name = test.partition("::")
    file, function = HERE / path, name.partition("[")[0]
    return file.is_file() and (not name or f"def {function}(" in file.read_text(encoding="utf-8"))


def copied(to: Path) -> Path:
    """Copy the tracked files."""
    listed = subprocess.run(["git", "-C", str(HERE), "ls-files", "-z"], check=True, capture_output=True, text=True)
    for name in listed.stdout.rstrip("\0").split("\0"):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(HERE / name, to / name)
    return to


def tested(tree: Path, tests: list[str]) -> tuple[int, str]:
    """Run tests up to the first that fails; return pytest's exit code and its output, or -1 where there is no end."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-o", f"timeout={TEST_S}", *tests]
    env = {**os.environ, "PYTHONPATH": str(tree), "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return -1, f"no end within {LIMIT_S} s"
    return done.returncode, done.stdout + done.stderr


def verdict(free: "SimpleQueue[Path]", entry: Entry) -> tuple[bool, str]:
    """Return whether an entry's tests notice, in a copy that is free, and in words which one does."""
    tree = free.get()
    try:
        file = tree / entry["file"]
        before = file.read_text(encoding="utf-8")
        file.write_text(before.replace(entry["old"], entry["new"]), encoding="utf-8")
        code, output = tested(tree, entry["tests"])
        file.write_text(before, encoding="utf-8")
        if code == 0:
            return False, "NOT CAUGHT"
        lines = [line for line in output.splitlines() if line.startswith("FAILED ")]
        if code != 1 or not lines:
            return False, f"NOT CAUGHT: its tests did not run, pytest ended with {code}\n{output[-2000:]}"
        test = lines[0].removeprefix("FAILED ").partition(" - ")[0]
        code, output = tested(tree, [test])
        if code:
            return False, f"NOT CAUGHT: {test} fails with the protection, too\n{output[-2000:]}"
        return True, f"caught by {test}"
    finally:
        free.put(tree)


def main() -> int:
    """Print a line per entry, and return 0 if all are caught."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--only", default="", help="entries whose name or file has this text")
    parser.add_argument("--jobs", type=int, default=2, help="entries at a time; default: %(default)s")
    given = parser.parse_args()
    table = entries()
    if wrong := misfits(table):
        sys.stderr.write("\n".join(wrong) + "\n")
        return 1
    chosen = [entry for entry in table if given.only in entry["name"] or given.only in entry["file"]]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(given.jobs) as pool:
        free = SimpleQueue[Path]()
        for n in range(given.jobs):
            free.put(copied(Path(scratch) / f"{n}"))
        caught = 0
        for entry, (is_caught, text) in zip(chosen, pool.map(partial(verdict, free), chosen), strict=True):
            print(f"{entry['name']}: {text}", flush=True)
            caught += is_caught
    print(f"{caught} of {len(chosen)} caught")
    return int(caught < max(1, len(chosen)))


if __name__ == "__main__":
    sys.exit(main())
