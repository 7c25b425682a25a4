"""Find or make a Python environment that runs titanlite, and print the path of its interpreter.

    python3 scripts/environment.py [EXTRA ...]

`.venv` in the checkout is taken if it has everything, else the Python that this runs on; nothing is installed into
either. If both lack something, `.venv` is made or completed; where there is a Hopper or Blackwell GPU, with the extra
`gpu`, too. What a broken-off start has left is made anew by the next, and of two that start at once, one waits for the
other. What it does it says on stderr, step by step.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
UNFINISHED = VENV / "unfinished"  # is there while something is being installed
EVERYTHING, NO_PIP = "everything", "pip, and Python 3.11 or later"  # what may be missing besides requirements
STILL_S = 15.0  # between two signs of life
OLDER = "python3.11", "python3.12", "python3.13"

# Runs in the environment that is looked at: prints what it lacks, one requirement a line.
WHAT_IS_MISSING = """
import importlib.metadata, sys, tomllib
from pip._vendor.packaging.requirements import Requirement
with open(sys.argv[1], "rb") as f:
    project = tomllib.load(f)["project"]
wanted = [*map(Requirement, project["dependencies"]), Requirement(f"{project['name']}[{','.join(sys.argv[2:])}]")]
for requirement in wanted:
    if requirement.name == project["name"]:  # an extra may name others
        wanted += [Requirement(r) for e in sorted(requirement.extras) for r in project["optional-dependencies"][e]]
        continue
    if requirement.marker and not requirement.marker.evaluate():
        continue  # for another platform
    requirement.marker = None
    try:
        found = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        found = None
    if found is None or not requirement.specifier.contains(found, prereleases=True):
        print(requirement if found is None else f"{requirement} (found: {found})")
"""

# Likewise: prints the newest version of torch without CUDA that meets a requirement.
NEWEST_WITHOUT_CUDA = """
import re, subprocess, sys
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.version import Version
requirement = Requirement(sys.argv[1])
command = [sys.executable, "-m", "pip", "index", "versions", requirement.name, *sys.argv[2:]]
offered = subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout
versions = [v for v in re.findall(r"[\\w.]+\\+cpu", offered) if requirement.specifier.contains(v)]
print(f"{requirement.name}=={max(versions, key=Version)}" if versions else "")
"""


def main() -> None:
    """Print the path of an interpreter with everything that the named extras need."""
    if sys.version_info < (3, 11):  # noqa: UP036  the one file that an older Python may come to
        newer = next(filter(shutil.which, OLDER), None)
        if newer is None:
            version = ".".join(map(str, sys.version_info[:3]))
            sys.exit(f"titanlite wants Python 3.11 or later; python3 is {version}, and there is no {', '.join(OLDER)}")
        os.execvp(newer, [newer, *sys.argv])
    extras, known = sys.argv[1:], project()["optional-dependencies"]
    if unknown := [extra for extra in extras if extra not in known]:
        sys.exit(f"not in [project.optional-dependencies]: {', '.join(unknown)}; there are {', '.join(known)}")
    lock = os.open(ROOT, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process and a pip that outlives it have ended
    except BlockingIOError:
        say("waiting for another start that is installing")
        fcntl.flock(lock, fcntl.LOCK_EX)
    os.set_inheritable(lock, True)
    lacks = [EVERYTHING] if UNFINISHED.exists() or not PYTHON.exists() else missing(PYTHON, extras)
    if not lacks:
        found = PYTHON
    elif not missing(Path(sys.executable), extras):
        found = Path(sys.executable)
    else:
        found = install(extras, lacks)
    say(f"environment: {found}")
    sys.stdout.write(f"{found}\n")


def project() -> dict[str, Any]:
    """Return the table `[project]` of pyproject.toml."""
    import tomllib  # Python 3.11 has it

    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def missing(python: Path, extras: Sequence[str]) -> list[str]:
    """Return the requirements that an environment does not meet; all of it where pip or a new Python is missing.

    Args:
        python: its interpreter.
        extras: names in `[project.optional-dependencies]`.
    """
    command = [python, "-c", WHAT_IS_MISSING, ROOT / "pyproject.toml", *extras]
    looked = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd="/")
    return looked.stdout.splitlines() if looked.returncode == 0 else [NO_PIP]


def install(extras: Sequence[str], lacks: Sequence[str]) -> Path:
    """Make or complete `.venv`, and return its interpreter.

    Args:
        extras: names in `[project.optional-dependencies]`.
        lacks: requirements that it does not meet, or `EVERYTHING`.
    """
    start, has_gpu = time.monotonic(), bool(shutil.which("nvidia-smi"))
    extras = [*extras, "gpu"] if has_gpu and is_hopper_or_blackwell() else extras
    if any(lack.startswith((EVERYTHING, NO_PIP, "torch<", "torch>")) for lack in lacks):
        download = "some gigabytes, with CUDA" if has_gpu else "about 350 MB"
        say(f"installing titanlite and what it needs into {VENV}; {download} to download")
    else:
        say(f"adding to {VENV}: {', '.join(lacks)}")
    made_by = os.path.realpath(PYTHON) if PYTHON.exists() else ""
    is_anothers = NO_PIP in lacks and made_by != os.path.realpath(sys.executable)
    if made_by and is_anothers:  # which could not add pip to it
        say(f"    {made_by} has made it, another Python than {sys.executable}: it is made anew")
    clear = ["--clear"] if EVERYTHING in lacks or is_anothers else []
    # PyPI's torch for Linux brings CUDA, gigabytes of it. torch's own index has builds without; if it cannot be
    # reached, PyPI's is taken, so one short attempt is enough.
    index = ["--retries", "1", "--timeout", "15", "--extra-index-url", "https://download.pytorch.org/whl/cpu"]
    # On all cores, where pip takes one, and without what nobody imports, of 12,000 files a quarter. Some packages have
    # templates among them, which are no Python.
    compile_all = [PYTHON, "-m", "compileall", "-qq", "-j", "0", "-x", "site-packages/.*/tests/", VENV / "lib"]
    steps: dict[str, Callable[[], object]] = {
        "make the environment": lambda: run(sys.executable, "-m", "venv", *clear, VENV),
        "install torch without CUDA": lambda: run(*pip("--no-deps", *index, torch_without_cuda(index))),
        "install titanlite and what it needs": lambda: run(
            *pip("-e", f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT))
        ),
        "compile what was installed": lambda: subprocess.run(compile_all, stdout=sys.stderr, close_fds=False),
    }
    if not {EVERYTHING, NO_PIP} & {*lacks}:  # whichever Python has made it, its own pip completes it
        del steps["make the environment"]
    if sys.platform != "linux" or has_gpu:
        del steps["install torch without CUDA"]
    VENV.mkdir(exist_ok=True)
    for n, (what, does) in enumerate(steps.items(), start=1):
        UNFINISHED.touch()  # again, for --clear takes it away
        with at_work(f"{n}/{len(steps)} {what}"):
            does()
    UNFINISHED.unlink()
    say(f"installed in {time.monotonic() - start:.0f} s")
    return PYTHON


def is_hopper_or_blackwell() -> bool:
    """Return whether the extra `gpu` has kernels for a GPU of this host: of compute capability 9 or 10."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    listed = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    return any(line.partition(".")[0] in ("9", "10") for line in listed.split())


def torch_without_cuda(index: Sequence[str]) -> str:
    """Return the newest torch without CUDA that the project takes, or where none is offered, the project's requirement.

    Args:
        index: pip's options that name it.
    """
    requirement = next(r for r in project()["dependencies"] if r.startswith("torch>"))
    command = [PYTHON, "-c", NEWEST_WITHOUT_CUDA, requirement, *index]
    newest = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout.strip()
    return newest or requirement


def pip(*args: str) -> list[str | Path]:
    """Return a command that installs into `.venv`."""
    own = ["--progress-bar", "off", "--no-compile", "--disable-pip-version-check"]
    return [PYTHON, "-m", "pip", "install", *own, *args]


def run(*command: str | Path) -> None:
    """Run a command, and say of its output what a person may wait for; if it fails, end with its exit code."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, close_fds=False) as started:
        assert started.stdout is not None  # noqa: S101
        for line in started.stdout:
            if text := worth_saying(line):
                say(f"    {text}")
    if started.returncode:
        sys.exit(started.returncode)


def worth_saying(line: str) -> str:
    """Return what a line of pip's is about in few words, if it takes long: a large download, and the installation."""
    if found := re.match(r"\s*Downloading \S*?([^/\s]+) \(([\d.]+) ([MG]B)\)", line):
        name, version = urllib.parse.unquote(found[1]).split("-")[:2]
        return f"downloading {name} {version}, {found[2]} {found[3]}"
    if line.startswith("Installing collected packages: "):
        n = line.count(",") + 1
        return f"unpacking {n} package{'s' * (n > 1)}"
    return ""


@contextmanager
def at_work(what: str) -> Iterator[None]:
    """Say what is being done, and every few seconds that it goes on."""
    say(what)
    done, start = threading.Event(), time.monotonic()

    def tell() -> None:
        while not done.wait(STILL_S):
            say(f"    still at it, {time.monotonic() - start:.0f} s")

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def say(text: str) -> None:
    """Tell the person who waits; stdout is for the result."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
