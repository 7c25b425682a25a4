#!/usr/bin/env bash
# Installs what is missing and runs the tests. Arguments go to pytest:
#
#     bash scripts/test.sh [tests/unit] [-k order] [-m gpu -n 0]
set -euo pipefail
cd "$(dirname "$0")/.."

python=$("$(command -v python3 || command -v python3.11)" scripts/environment.py dev)
# Fewer page faults: ranks allocate the same few megabytes in every step (a twentieth of their time).
export GLIBC_TUNABLES=glibc.malloc.hugetlb=1
# Or each of some hundred processes would compile all of titanlite for itself.
unset PYTHONDONTWRITEBYTECODE
# Three workers keep two cores at work: a test has up to four processes, which wait for each other or for time to pass;
# with two workers a quarter of the cores' time goes unused. The tests of one file may share what one has made. xdist
# would take the files with most tests first, and have long ones of few tests left for the end, when one worker is idle.
exec "$python" -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
