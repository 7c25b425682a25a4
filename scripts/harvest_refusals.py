"""Harvest what tests see refused into `tests/data/refusals.toml`, so that checks can be rebuilt and miss none of it.

    python scripts/harvest_refusals.py [arguments of pytest]

Runs pytest with a plugin that records each refusal (`tests/support/record_refusals.py`). One input is kept for each
place in the code and key: the first by which a command refuses that key at that place, cut down to what this needs.
Where no command and a few small files do, the place is listed with its error and keys. Run on some of the tests it adds
to the file; to begin anew, delete the file.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import tomli
import torch  # noqa: F401  # now: not in the time of an input

HERE = Path(__file__).parents[1]
sys.path.insert(0, str(HERE))

from tests.support import record_refusals  # noqa: E402
from tests.support.refusals import ARGV, CONFIG, FILE, input_of, problems_of  # noqa: E402
from titanlite.config.schema import schema_keys  # noqa: E402

COMMANDS = (  # but for those that start others
    *("validate", "plan", "convert", "recipes", "schema", "compare", "explain", "data", "new"),
    *("export", "evaluate", "prepare"),
)
OF_A_LINE = 12  # keys that are none of the schema, of one line of code: paths, and keys of torchtitan's
LONGEST = 24  # lines of an entry's files
LONGEST_S = 8.0  # of the processor, for one input

MOST_KEYS = 6  # of a function, for what cannot be repeated
HEAD = """\
# What titanlite refuses, as its tests have it: made by scripts/harvest_refusals.py, and carried out again by
# tests/unit/config/test_refusals.py. Of each refusal: the check that made it when it was harvested, the key and line
# that it named, the fix where a person wrote it in, and how to repeat it: `titanlite ARGV` (`validate run.toml` where
# there is none) in a folder with these files, of which `config` is run.toml. At the end stand functions whose refusals
# no command and small files repeat.
"""

Input = tuple[str, dict[str, str]]  # the command line behind `titanlite`, and texts by file
Found = list[tuple[str, str, int | None]]  # place in the code, key and line of each problem


class Trials:
    """Inputs carried out, each in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.found = folder, dict[str, Found]()

    def __call__(self, given: Input) -> Found:
        """Return the problems that a command ends with; none if it ends otherwise, or takes long."""
        name = json.dumps(given)
        if name not in self.found:
            record_refusals.forget()
            signal.setitimer(signal.ITIMER_PROF, LONGEST_S)
            try:
                problems = problems_of(*given, self.folder / str(len(self.found)))
            except (Exception, pytest.fail.Exception) as bug:
                print(f"a bug, not a refusal: {given}: {type(bug).__name__}: {bug}")
                problems = []
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            self.found[name] = [(record_refusals.place_of(p), p.where, p.line) for p in problems]
        return self.found[name]

    def refuses(self, at: str, key: str, given: Input) -> bool:
        """Return whether this key is refused, by that place alone: a check that is lost is then missed."""
        return [place for place, where, _ in self(given) if where == key] == [at]


def shrunk(given: Input, refuses: Callable[[Input], bool]) -> Input:
    """Return an input without the files, flags and lines that a refusal does not need."""
    argv, files = given
    words = [word for word in shlex.split(argv) if word != "--config"]
    named = [word for word in words[1:] if word.endswith(".toml") and word in files]
    if len(named) == 1 and (named[0] == CONFIG or CONFIG not in files):
        words = [CONFIG if word == named[0] else word for word in words]
        files = {CONFIG if name == named[0] else name: text for name, text in files.items()}
    words = ["validate", *words[1:]] if refuses((shlex.join(["validate", *words[1:]]), files)) else words
    argv = shlex.join(words)
    if not refuses((argv, files)):
        (argv, files), words = given, shlex.split(given[0])
    for name in [*files]:
        less = {n: text for n, text in files.items() if n != name}
        files = less if refuses((argv, less)) else files
    for first in reversed([n for n, word in enumerate(words) if n and word.startswith("--")]):
        after = next((n for n in range(first + 1, len(words)) if words[n].startswith("--")), len(words))
        less = words[:first] + words[after:]
        words = less if refuses((shlex.join(less), files)) else words
    argv = shlex.join(words)
    for name in files:
        lines = [line for line in files[name].splitlines(True) if line.strip() and not line.startswith("#")]
        if not refuses((argv, {**files, name: "".join(lines)})):
            lines = files[name].splitlines(True)
        size = len(lines)
        while size:
            start = 0
            while start < len(lines):
                less = lines[:start] + lines[start + size :]
                if refuses((argv, {**files, name: "".join(less)})):
                    lines = less
                else:
                    start += size
            size = size // 2
        files = {**files, name: "".join(lines)}
        bare = {**files, name: files[name].strip("\n")}
        files = bare if refuses((argv, bare)) else files
    flat = {**files, CONFIG: with_dotted_keys(files.get(CONFIG, ""))}
    return argv, flat if CONFIG in files and refuses((argv, flat)) else files


def with_dotted_keys(text: str) -> str:
    """Write `section.key = value` for keys of one line; a text with others, as of a list of tables, stays as it is."""
    section, lines = "", list[str]()
    for line in re.sub(r"\[\n +(.*),\n\]", r"[\1]", text).splitlines():
        if header := re.fullmatch(r"\[([\w.]+)\]", line.strip()):
            section = f"{header[1]}."
        elif re.match(r"[\w.]+ *= *[^ ]", line) and line.count("[") == line.count("]"):
            lines.append(f"{section}{line}")
        else:
            return text
    return "\n".join(lines)


def is_fit(given: Input) -> bool:
    """Return whether an input is short, of a command that needs nothing else, and the same on any machine."""
    argv, files = given
    text, is_whole = "\n".join([argv, *files, *files.values()]), CONFIG in files or CONFIG not in argv
    is_short = len(text.splitlines()) <= LONGEST and len(text) < 4000 and f"{argv}{[*files]}".isprintable()
    return is_whole and is_short and not re.search(rf"/tmp/|{HERE}|[\ud800-\udfff]", text)


def merge(old: dict[str, Any], rows: list[dict[str, Any]], trials: Trials) -> dict[str, Any]:
    """Return the file's table: entries that were there, and one for each other place and key that can be repeated."""
    entries, of_line, known = list[dict[str, Any]](old.get("refusal", [])), Counter[str](), set[tuple[str, str]]()
    for entry in entries:
        places = {at for at, key, _ in trials(input_of(entry)) if key == entry["key"]}
        if not places:
            print(f"not refused any more: {entry['key']} by titanlite {entry.get('argv', ARGV)}")
        known |= {(at, entry["key"]) for at in places}
        of_line.update(places)
    recorded, errors = dict[tuple[str, str], list[Input]](), dict[tuple[str, str], str]()
    for row in rows:
        inputs = [(each["argv"], each["files"]) for each in row["inputs"] if each["argv"].startswith(COMMANDS)]
        for p in row["problems"]:
            recorded.setdefault((p["at"], p["key"]), []).extend(inputs)
            errors[p["at"], p["key"]] = p["error"]
    elsewhere = {place: {*keys} for place, keys in old.get("elsewhere", {}).items()}
    for (at, key), inputs in recorded.items():
        refuses, where = partial(trials.refuses, at, key), at.rpartition(":")[0]
        if (at, key) in known or (of_line[at] >= OF_A_LINE and key not in schema_keys()):
            continue
        inputs.sort(key=lambda each: (not each[0].startswith("validate"), sum(map(len, each[1].values()))))
        given = next(filter(refuses, inputs), None)
        given = given and shrunk(given, refuses)
        if given is None or not is_fit(given):
            elsewhere.setdefault(f"{where} {errors[at, key]}", set()).add(_in_short(key))
            continue
        line = next(line for _, name, line in trials(given) if name == key)
        entries.append({"at": where, "key": key, "line": line, "argv": given[0], "files": given[1]})
        of_line[at] += 1
    entries.sort(key=lambda each: (each["at"], each["key"], each.get("argv", ARGV)))
    return {"refusal": entries, "elsewhere": {place: sorted(keys) for place, keys in sorted(elsewhere.items())}}


def _in_short(key: str) -> str:
    """Return a key without its folder and numbers."""
    return re.sub(r"\d+", "N", key.rpartition("/")[2])[:60].encode("ascii", "replace").decode()


def text_of(table: dict[str, Any]) -> Iterator[str]:
    """Yield the file's text."""
    yield HEAD
    for entry in table["refusal"]:
        (argv, files), line = input_of(entry), entry.get("line")
        yield f"\n[[refusal]]\nat = {quoted(entry['at'])}\nkey = {quoted(entry['key'])}\n"
        yield f"line = {line}\n" if line is not None else ""
        yield f"fix = {quoted(entry['fix'])}\n" if "fix" in entry else ""
        yield f"argv = {quoted(argv)}\n" if argv != ARGV else ""
        config = files.pop(CONFIG, "")
        yield f"config = {quoted(config)}\n" if config else ""
        yield from (f"files.{quoted(name)} = {quoted(text)}\n" for name, text in files.items())
    yield "\n[elsewhere]\n"
    for place, keys in table["elsewhere"].items():
        yield f"{quoted(place)} = [{', '.join(map(quoted, keys[:MOST_KEYS]))}]\n"


def quoted(text: str) -> str:
    """Write a text as TOML does, in lines of its own if it has several."""
    if "\n" in text and "'''" not in text and not re.search(r"[^\n\t -\ud7ff\ue000-\uffff]|\x7f", text):
        return f"'''\n{text}'''"
    if '"' in text and text.isprintable() and "'" not in text:
        return f"'{text}'"
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _stop(*_: object) -> NoReturn:
    raise TimeoutError("takes long")


def main() -> None:
    """Run the tests, and merge what they record into the file."""
    with tempfile.TemporaryDirectory() as folder:
        records = Path(os.environ.get(record_refusals.FOLDER, f"{folder}/records"))
        records.mkdir(exist_ok=True)
        for shared in (folder, records):  # some tests are another user for a moment
            os.chmod(shared, 0o777)
        environment = {**os.environ, record_refusals.FOLDER: str(records), "PYTHONPATH": str(HERE)}
        command = [sys.executable, "-m", "pytest", "-p", "tests.support.record_refusals", *sys.argv[1:]]
        if sys.argv[1:]:
            subprocess.run(command, cwd=HERE, env=environment, check=False)  # those that fail record, too
        lines = [line for path in sorted(records.glob("*.jsonl")) for line in path.read_text().splitlines()]
        rows = [json.loads(line) for line in lines if line.endswith("}")]  # a test may kill who is writing
        record_refusals.watch()
        signal.signal(signal.SIGPROF, _stop)
        old = tomli.loads(FILE.read_text()) if FILE.exists() else {}
        trials = Trials(Path(folder, "trials"))
        table = merge(old, rows, trials)
        FILE.write_text("".join(text_of(table)), encoding="utf-8")
        n_keys = sum(map(len, table["elsewhere"].values()))
        print(f"{len(table['refusal'])} refusals; {n_keys} others, of {len(table['elsewhere'])} functions")


if __name__ == "__main__":
    main()
